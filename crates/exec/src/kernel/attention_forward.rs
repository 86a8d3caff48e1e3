use counterpoint_mask::{Band, Range};
use counterpoint_plan::KEY_BLOCK;
use counterpoint_schedule::Accumulate;
use rayon::ThreadPool;

use super::matmul::{Mat, MatMut, matmul};
use super::poison::PoisonedRows;
use super::queue::drain;
use super::score::{Scoring, row_max, row_sum};
use super::shape::{check_len, rows_of};
use super::tile::{Strips, blocks_of_tile, gather, split_heads, strip};
use super::{Element, HeadShape, Real};

/// Tensors and numbers of one forward stage, as in [`counterpoint_schedule::AttentionForward`].
pub struct ForwardArgs<'a, T: Element> {
    /// Heads and their sizes.
    pub shape: HeadShape,
    /// `[q_rows, heads_q, head_dim]`
    pub q: &'a [T],
    /// `[key_rows, heads_kv, head_dim]`
    pub k: &'a [T],
    /// `[key_rows, heads_kv, head_dim_v]`
    pub v: &'a [T],
    /// `[q_rows, heads_q, head_dim_v]`
    pub acc: &'a mut [T::Accumulator],
    /// `[q_rows, heads_q]`
    pub row_max: &'a mut [T::Accumulator],
    /// `[q_rows, heads_q]`
    pub row_sum: &'a mut [T::Accumulator],
    /// Unmasked pairs in rows of `q` and of `k`; bands do not overlap.
    pub bands: &'a [Band],
    /// Factor on `q k^T`.
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
    /// Whether the state begins here.
    pub accumulate: Accumulate,
}

/// A tile of query rows of one key head: the heads of its group, stacked.
struct Tile<'a, R> {
    head: usize,
    rows: Range,
    bands: &'a [Band],
    weight: u64,
    acc: Vec<&'a mut [R]>,
    row_max: Vec<&'a mut [R]>,
    row_sum: Vec<&'a mut [R]>,
}

struct Scratch<R> {
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    s: Vec<R>,
    acc: Vec<R>,
    row_max: Vec<R>,
    row_sum: Vec<R>,
    poisoned_rows: PoisonedRows,
    poisoned_cols: PoisonedRows,
}

/// One stage of the blocked attention forward: each tile of query rows walks its key blocks in ascending order and
/// carries an online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1) in `row_max`,
/// `row_sum`, `acc`. A tile skips the blocks that it sees nothing of.
///
/// The operations that a row meets are a function of the unmasked pairs, the shape and the grid of [`KEY_BLOCK`] alone:
/// the result is the same, bit for bit, for any number of threads, for keys split at multiples of the block into
/// consecutive calls, and for any cutting of the mask into bands.
///
/// A number of `q` that is not finite makes `row_sum` of its row and head NaN, if the row sees anything; one of `k` or
/// `v` that of the rows that see it, in the query heads that read it. No other row of the state changes by a bit.
///
/// # Panics
/// When a tensor's length does not fit the others or a band leaves the tensors.
pub fn attention_forward<T: Element>(args: ForwardArgs<'_, T>, threads: &ThreadPool) {
    let shape = args.shape;
    shape.check();
    let group = shape.group();
    let q_rows = rows_of("q", args.q, shape.heads_q * shape.head_dim);
    let key_rows = rows_of("k", args.k, shape.heads_kv * shape.head_dim);
    check_len("v", args.v, key_rows, shape.heads_kv * shape.head_dim_v);
    check_len("acc", args.acc, q_rows, shape.heads_q * shape.head_dim_v);
    check_len("row_max", args.row_max, q_rows, shape.heads_q);
    check_len("row_sum", args.row_sum, q_rows, shape.heads_q);
    assert!(args.bands.iter().all(|band| band.k_range.end <= key_rows), "a band leaves the {key_rows} keys");

    if args.accumulate == Accumulate::Start {
        args.acc.fill(T::Accumulator::ZERO);
        args.row_max.fill(-T::Accumulator::INFINITY);
        args.row_sum.fill(T::Accumulator::ZERO);
    }

    let tile_rows = shape.tile_rows();
    let strips = Strips::of_rows(args.bands, q_rows, tile_rows);
    let mut acc = split_heads(args.acc, shape.heads_kv, group * shape.head_dim_v, tile_rows).into_iter();
    let mut row_max = split_heads(args.row_max, shape.heads_kv, group, tile_rows).into_iter();
    let mut row_sum = split_heads(args.row_sum, shape.heads_kv, group, tile_rows).into_iter();
    let mut tiles = Vec::with_capacity(strips.len() * shape.heads_kv);
    for index in 0..strips.len() {
        let (bands, weight) = (strips.bands(index), strips.area(index));
        let rows = strip(index, tile_rows, q_rows);
        for ((head, acc), (row_max, row_sum)) in
            (0..shape.heads_kv).zip(acc.by_ref()).zip(row_max.by_ref().zip(row_sum.by_ref()))
        {
            tiles.push(Tile { head, rows, bands, weight, acc, row_max, row_sum });
        }
    }
    tiles.retain(|tile| tile.weight > 0);
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.weight));

    let scoring = Scoring::new(args.scale, args.softcap);
    let height = tile_rows.min(q_rows) * group;
    let scratch = || Scratch {
        q: vec![T::Accumulator::ZERO; height * shape.head_dim],
        k: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim],
        v: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim_v],
        s: vec![T::Accumulator::ZERO; height * KEY_BLOCK],
        acc: vec![T::Accumulator::ZERO; height * shape.head_dim_v],
        row_max: vec![T::Accumulator::ZERO; height],
        row_sum: vec![T::Accumulator::ZERO; height],
        poisoned_rows: PoisonedRows::default(),
        poisoned_cols: PoisonedRows::default(),
    };
    drain(
        threads,
        tiles,
        |_| (),
        scratch,
        |tile, (), scratch| {
            walk(tile, &shape, (args.q, args.k, args.v), key_rows, &scoring, scratch);
        },
    );
}

/// Takes one tile through all of its key blocks.
fn walk<T: Element>(
    mut tile: Tile<'_, T::Accumulator>,
    shape: &HeadShape,
    (q, k, v): (&[T], &[T], &[T]),
    key_rows: usize,
    scoring: &Scoring<T::Accumulator>,
    scratch: &mut Scratch<T::Accumulator>,
) {
    let group = shape.group();
    let (dim, dim_v) = (shape.head_dim, shape.head_dim_v);
    let q_width = group * dim;
    gather(q, shape.heads_q * dim, tile.rows, tile.head * q_width, q_width, &mut scratch.q);
    scratch.poisoned_rows.clear();
    scratch.poisoned_rows.take_out_of(&mut scratch.q[..tile.rows.len() * q_width], dim);
    load(&tile.acc, &mut scratch.acc);
    load(&tile.row_max, &mut scratch.row_max);
    load(&tile.row_sum, &mut scratch.row_sum);

    for visit in blocks_of_tile(tile.bands, tile.rows, key_rows) {
        let cols = visit.cols.len();
        gather(k, shape.heads_kv * dim, visit.cols, tile.head * dim, dim, &mut scratch.k);
        gather(v, shape.heads_kv * dim_v, visit.cols, tile.head * dim_v, dim_v, &mut scratch.v);
        scratch.poisoned_cols.clear();
        scratch.poisoned_cols.take_out_of(&mut scratch.k[..cols * dim], dim);
        scratch.poisoned_cols.take_out_of(&mut scratch.v[..cols * dim_v], dim_v);
        let first = (visit.rows.start - tile.rows.start) * group;
        let rows = visit.rows.len() * group;
        scoring.scores(&visit, group, dim, &scratch.q[first * dim..], &scratch.k, &mut scratch.s);
        let sums = &mut scratch.row_sum[first..first + rows];
        scratch.poisoned_cols.poison_sums_of_viewers(&scratch.s[..rows * KEY_BLOCK], sums);
        let acc = &mut scratch.acc[first * dim_v..(first + rows) * dim_v];
        online_softmax(
            &mut scratch.s[..rows * KEY_BLOCK],
            &mut scratch.row_max[first..first + rows],
            sums,
            acc,
            dim_v,
        );
        matmul(
            T::Accumulator::ONE,
            Mat::new(&scratch.s, rows, cols, KEY_BLOCK),
            Mat::new(&scratch.v, cols, dim_v, dim_v),
            T::Accumulator::ONE,
            MatMut::new(acc, rows, dim_v, dim_v),
        );
    }

    scratch.poisoned_rows.poison_sums(&scratch.row_max, &mut scratch.row_sum);
    store(&scratch.acc, &mut tile.acc);
    store(&scratch.row_max, &mut tile.row_max);
    store(&scratch.row_sum, &mut tile.row_sum);
}

/// Turns the scores `s` (rows of [`KEY_BLOCK`]) into `exp(s - max)` under the rows' new maxima, and brings sums and
/// accumulators under them.
fn online_softmax<R: Real>(s: &mut [R], maxima: &mut [R], sums: &mut [R], acc: &mut [R], dim_v: usize) {
    let rows = s.chunks_exact_mut(KEY_BLOCK).zip(acc.chunks_exact_mut(dim_v));
    for ((s, acc), (max, sum)) in rows.zip(maxima.iter_mut().zip(sums.iter_mut())) {
        let new_max = row_max(s).larger(*max);
        if new_max == -R::INFINITY {
            // Nothing seen so far: -inf - -inf would be NaN.
            s.fill(R::ZERO);
            continue;
        }
        for x in s.iter_mut() {
            *x = (*x - new_max).fast_exp();
        }
        if *max != new_max {
            let factor = (*max - new_max).fast_exp();
            *sum *= factor;
            for x in acc.iter_mut() {
                *x *= factor;
            }
            *max = new_max;
        }
        *sum += row_sum(s);
    }
}

fn load<R: Copy>(parts: &[&mut [R]], dst: &mut [R]) {
    let Some(width) = parts.first().map(|part| part.len()) else { return };
    for (part, dst) in parts.iter().zip(dst.chunks_exact_mut(width)) {
        dst.copy_from_slice(part);
    }
}

fn store<R: Copy>(src: &[R], parts: &mut [&mut [R]]) {
    let Some(width) = parts.first().map(|part| part.len()) else { return };
    for (src, part) in src.chunks_exact(width).zip(parts.iter_mut()) {
        part.copy_from_slice(src);
    }
}
