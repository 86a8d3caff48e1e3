//! Matrix products and column sums of linear layers on the CPU, with operands in pieces and one order of sums.

use std::borrow::Cow;

use counterpoint_mask::Range;
use counterpoint_schedule::{Accumulate, GemmLayout};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::element::{HostElement, with_host_element};
use crate::matmul::{Mat, MatMut, matmul};
use crate::real::{Element, Real};
use crate::tensor::{TensorMut, TensorRef};

/// Rows of the result that a thread computes at a time.
const TILE_ROWS: usize = 64;

/// A matrix product. `T` is the type of the operands, `D` that of the result.
pub struct GemmArgs<'a, T: Element, D: HostElement> {
    /// Which of the operands is transposed.
    pub layout: GemmLayout,
    /// Rows of the first operand one after the other, in pieces.
    pub a: Vec<&'a [T]>,
    /// Columns of those.
    pub a_columns: usize,
    /// Likewise the second.
    pub b: Vec<&'a [T]>,
    /// Columns of those.
    pub b_columns: usize,
    /// `[rows, n]`.
    pub out: &'a mut [D],
    /// Columns of the result.
    pub n: usize,
    /// Those of the whole product that these are, where they are not all.
    pub columns: Option<Range>,
    /// Where the rows of the result go: ascending, disjoint.
    pub out_rows: &'a [Range],
    /// Of all columns, added to every row.
    pub bias: Option<&'a [T]>,
    /// Whether the result is written or added to.
    pub accumulate: Accumulate,
}

/// [`gemm`](crate::gemm()) of one type of operands and one of results.
pub(crate) fn gemm<T: Element, D: HostElement<Accumulator = T::Accumulator>>(
    args: GemmArgs<'_, T, D>,
    threads: &ThreadPool,
) {
    let GemmArgs { layout, a, a_columns, b, b_columns, out, n, columns, out_rows, bias, accumulate } = args;
    threads.install(|| {
        let a = Operand::gather(&a, a_columns);
        let (m, k) = match layout {
            GemmLayout::Nt | GemmLayout::Nn => (a.rows(), a.columns),
            GemmLayout::Tn => (a.columns, a.rows()),
        };
        let b_rows = rows_of(&b, b_columns);
        let (b_k, b_n) = match layout {
            GemmLayout::Nt => (b_columns, b_rows),
            GemmLayout::Nn | GemmLayout::Tn => (b_rows, b_columns),
        };
        let columns = columns.unwrap_or(Range::new(0, b_n));
        assert_eq!((b_k, columns.len()), (k, n), "shapes of a matrix product");
        assert!(columns.end <= b_n, "columns of a matrix product");
        // Those of the result are rows of B, where it is transposed.
        let b = match layout {
            GemmLayout::Nt => Operand::gather(&elements_of(&b, columns.start * k, columns.end * k), k),
            GemmLayout::Nn | GemmLayout::Tn => Operand::gather_columns(&b, b_columns, columns),
        };
        assert_eq!(out_rows.iter().map(Range::len).sum::<usize>(), m, "rows of a matrix product");
        let zero = T::Accumulator::ZERO;
        let bias: Option<Vec<T::Accumulator>> =
            bias.map(|bias| bias[columns.start..columns.end].iter().map(|x| x.widen()).collect());
        tiles(out, n, out_rows).into_par_iter().for_each(|Tile { first, count, pieces }| {
            // Next to the old values, not onto them: whether an element is in the rim of a product would change its last bit.
            let mut sums = vec![zero; count * n];
            let one = T::Accumulator::ONE;
            let product = MatMut::new(&mut sums, count, n, n);
            let whole_b = match layout {
                GemmLayout::Nt => Mat::new(&b.elements, n, k, k).transposed(),
                GemmLayout::Nn | GemmLayout::Tn => Mat::new(&b.elements, k, n, b.columns),
            };
            match layout {
                GemmLayout::Nt | GemmLayout::Nn => {
                    let some = &a.elements[first * k..(first + count) * k];
                    matmul(one, Mat::new(some, count, k, k), whole_b, zero, product);
                }
                GemmLayout::Tn => {
                    let some = Mat::new(a.elements.get(first..).unwrap_or(&[]), k, count, a.columns);
                    matmul(one, some.transposed(), whole_b, zero, product);
                }
            }
            let rows = pieces.into_iter().flat_map(|piece| piece.chunks_exact_mut(n));
            for (row, sums) in rows.zip(sums.chunks_exact(n)) {
                for (column, (out, &sum)) in row.iter_mut().zip(sums).enumerate() {
                    let sum = bias.as_ref().map_or(sum, |bias| sum + bias[column]);
                    *out = D::narrow(match accumulate {
                        Accumulate::Start => sum,
                        Accumulate::Continue => out.widen() + sum,
                    });
                }
            }
        });
    });
}

/// [`column_sum`](crate::column_sum()) of one type of operands and one of results.
pub(crate) fn column_sum<T: Element, D: HostElement<Accumulator = T::Accumulator>>(
    src: &[&[T]],
    dst: &mut [D],
    accumulate: Accumulate,
    threads: &ThreadPool,
) {
    /// Columns that a thread sums at a time.
    const COLUMNS: usize = 64;
    let columns = dst.len();
    threads.install(|| {
        dst.par_chunks_mut(COLUMNS).enumerate().for_each(|(chunk, dst)| {
            let first = chunk * COLUMNS;
            let mut sums = [T::Accumulator::ZERO; COLUMNS];
            for row in src.iter().flat_map(|piece| piece.chunks_exact(columns)) {
                for (sum, x) in sums.iter_mut().zip(&row[first..first + dst.len()]) {
                    *sum += x.widen();
                }
            }
            for (dst, &sum) in dst.iter_mut().zip(&sums) {
                *dst = D::narrow(match accumulate {
                    Accumulate::Start => sum,
                    Accumulate::Continue => dst.widen() + sum,
                });
            }
        });
    });
}

/// The largest element of each of the first columns, as many as `dst` has elements, in the type of sums. NaN is passed over.
pub fn column_max(src: TensorRef<'_>, dst: &mut TensorMut<'_>) {
    with_host_element!(src.dtype(), T => largest_of_columns::<<T as HostElement>::Accumulator>(src, dst));
}

fn largest_of_columns<R: Real>(src: TensorRef<'_>, dst: &mut TensorMut<'_>) {
    let columns = src.row_elements();
    let (src, dst) = (src.as_slice::<R>().unwrap_or(&[]), dst.as_mut_slice::<R>().unwrap_or(&mut []));
    dst.fill(-R::INFINITY);
    for row in src.chunks_exact(columns) {
        dst.iter_mut().zip(row).for_each(|(largest, value)| *largest = value.larger(*largest));
    }
}

/// A whole operand in the type that sums are formed in.
struct Operand<'a, R: Real> {
    elements: Cow<'a, [R]>,
    columns: usize,
}

impl<'a, R: Real> Operand<'a, R> {
    fn gather<T: Element<Accumulator = R>>(pieces: &[&'a [T]], columns: usize) -> Self {
        // One piece that needs no conversion is taken as it lies.
        if let [piece] = pieces
            && let Some(whole) = T::accumulators(piece)
        {
            return Self { elements: Cow::Borrowed(whole), columns };
        }
        let mut elements = vec![R::ZERO; pieces.iter().map(|piece| piece.len()).sum()];
        let mut rest = &mut elements[..];
        for piece in pieces {
            let (here, behind) = rest.split_at_mut(piece.len());
            T::widen_slice(piece, here);
            rest = behind;
        }
        Self { elements: Cow::Owned(elements), columns }
    }

    /// The same of some columns of the pieces' rows: as they lie in wider rows, where nothing is converted.
    fn gather_columns<T: Element<Accumulator = R>>(pieces: &[&'a [T]], all: usize, columns: Range) -> Self {
        if columns == Range::new(0, all) {
            return Self::gather(pieces, all);
        }
        if let [piece] = pieces
            && let Some(whole) = T::accumulators(piece)
        {
            let from_first = whole.get(columns.start..).unwrap_or(&[]);
            return Self { elements: Cow::Borrowed(from_first), columns: all };
        }
        let n = columns.len();
        let mut elements = vec![R::ZERO; rows_of(pieces, all) * n];
        let rows = pieces.iter().flat_map(|piece| piece.chunks_exact(all.max(1)));
        for (row, here) in rows.zip(elements.chunks_exact_mut(n.max(1))) {
            T::widen_slice(&row[columns.start..columns.end], here);
        }
        Self { elements: Cow::Owned(elements), columns: n }
    }

    fn rows(&self) -> usize {
        self.elements.len() / self.columns.max(1)
    }
}

/// Rows of all pieces together.
fn rows_of<T>(pieces: &[&[T]], columns: usize) -> usize {
    pieces.iter().map(|piece| piece.len()).sum::<usize>() / columns.max(1)
}

/// Some of the elements of all pieces, one after the other.
fn elements_of<'a, T>(pieces: &[&'a [T]], from: usize, to: usize) -> Vec<&'a [T]> {
    let mut before = 0;
    let some = pieces.iter().map(|piece| {
        let at = |element: usize| element.saturating_sub(before).min(piece.len());
        let some = &piece[at(from)..at(to)];
        before += piece.len();
        some
    });
    some.filter(|piece| !piece.is_empty()).collect()
}

/// Rows of the result that one thread computes, wherever they lie: a product of a single row would read all of the second operand for it.
struct Tile<'a, D> {
    /// The first row of the product, and how many.
    first: usize,
    count: usize,
    /// The memory of its rows.
    pieces: Vec<&'a mut [D]>,
}

/// The rows of the result in tiles.
fn tiles<'a, D>(out: &'a mut [D], n: usize, out_rows: &[Range]) -> Vec<Tile<'a, D>> {
    let mut tiles: Vec<Tile<'a, D>> = Vec::new();
    let (mut rest, mut behind, mut first) = (out, 0, 0);
    for rows in out_rows {
        let (_, from_here) = rest.split_at_mut((rows.start - behind) * n);
        let (mut here, after) = from_here.split_at_mut(rows.len() * n);
        while !here.is_empty() {
            if tiles.last().is_none_or(|tile| tile.count == TILE_ROWS) {
                tiles.push(Tile { first, count: 0, pieces: Vec::new() });
            }
            let Some(tile) = tiles.last_mut() else { break };
            let room = TILE_ROWS - tile.count;
            let (piece, left) = here.split_at_mut((room * n).min(here.len()));
            let count = piece.len() / n;
            tile.count += count;
            tile.pieces.push(piece);
            first += count;
            here = left;
        }
        (rest, behind) = (after, rows.end);
    }
    tiles
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn values(count: usize, seed: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect()
    }

    /// Element (i, j) of an operand that is `[rows, columns]`, transposed where asked.
    fn at(x: &[f32], columns: usize, transposed: bool, i: usize, j: usize) -> f32 {
        if transposed { x[j * columns + i] } else { x[i * columns + j] }
    }

    #[test]
    fn all_layouts_pieces_and_places() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let (m, n, k) = (150, 37, 70);
        for layout in [GemmLayout::Nt, GemmLayout::Nn, GemmLayout::Tn] {
            let (a_columns, a_t) = if layout == GemmLayout::Tn { (m, true) } else { (k, false) };
            let (b_columns, b_t) = if layout == GemmLayout::Nt { (k, true) } else { (n, false) };
            let (a, b, bias) = (values(m * k, 1.0), values(k * n, 2.0), values(n, 3.0));
            let cut = 13 * a_columns;
            for accumulate in [Accumulate::Start, Accumulate::Continue] {
                let mut out = vec![0.5f32; (m + 9) * n];
                gemm(
                    GemmArgs {
                        layout,
                        a: vec![&a[..cut], &a[cut..]],
                        a_columns,
                        b: vec![&b[..]],
                        b_columns,
                        out: &mut out,
                        n,
                        columns: None,
                        out_rows: &[Range::new(2, 92), Range::new(97, m + 7)],
                        bias: Some(&bias),
                        accumulate,
                    },
                    &threads,
                );
                for row in 0..m + 9 {
                    let i = match row {
                        2..92 => Some(row - 2),
                        97.. if row < m + 7 => Some(row - 7),
                        _ => None,
                    };
                    for j in 0..n {
                        let expected = i.map_or(0.5, |i| {
                            let sum: f32 = (0..k)
                                .map(|l| at(&a, a_columns, a_t, i, l) * at(&b, b_columns, b_t, l, j))
                                .sum();
                            sum + bias[j] + if accumulate == Accumulate::Start { 0.0 } else { 0.5 }
                        });
                        assert!((out[row * n + j] - expected).abs() < 1e-4, "{layout:?} {row} {j}");
                    }
                }
            }
        }
    }

    /// Bit for bit those of the whole.
    #[test]
    fn groups_of_columns_are_columns_of_the_whole() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (m, n, k) = (70, 53, 600);
        let (a, b, bias) = (values(m * k, 1.0), values(k * n, 2.0), values(n, 3.0));
        for layout in [GemmLayout::Nt, GemmLayout::Nn, GemmLayout::Tn] {
            let b_columns = if layout == GemmLayout::Nt { k } else { n };
            let product = |columns: Option<Range>, cut: usize| {
                let n_of = columns.map_or(n, |columns| columns.len());
                let mut out = vec![0.0f32; m * n_of];
                let args = GemmArgs {
                    layout,
                    a: vec![&a[..]],
                    a_columns: if layout == GemmLayout::Tn { m } else { k },
                    b: if cut == 0 {
                        vec![&b[..]]
                    } else {
                        vec![&b[..cut * b_columns], &b[cut * b_columns..]]
                    },
                    b_columns,
                    out: &mut out,
                    n: n_of,
                    columns,
                    out_rows: &[Range::new(0, m)],
                    bias: Some(&bias),
                    accumulate: Accumulate::Start,
                };
                gemm(args, &threads);
                out
            };
            let whole = product(None, 0);
            for columns in [(0, 1), (0, 53), (7, 40), (40, 53)].map(|(from, to)| Range::new(from, to)) {
                for cut in [0, 19] {
                    let some = product(Some(columns), cut);
                    for (row, some) in whole.chunks_exact(n).zip(some.chunks_exact(columns.len())) {
                        assert_eq!(&row[columns.start..columns.end], some, "{layout:?} {columns} {cut}");
                    }
                }
            }
        }
    }

    #[test]
    fn sums_of_columns() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let x: Vec<bf16> = values(30 * 100, 0.0).into_iter().map(bf16::from_f32).collect();
        let mut dst = vec![1.0f32; 100];
        column_sum(&[&x[..700], &x[700..]], &mut dst, Accumulate::Continue, &threads);
        for (column, sum) in dst.iter().enumerate() {
            let expected: f32 = 1.0 + (0..30).map(|row| x[row * 100 + column].to_f32()).sum::<f32>();
            assert!((sum - expected).abs() < 1e-4);
        }
    }
}
