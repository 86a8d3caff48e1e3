//! Checks of the grouped GEMM: random problems, empty, short and overfull, against f64, and the bits of every shape against each other.

use counterpoint_bench::gpu::element_bound;
use counterpoint_cuda::kernel::{
    ElementType, GemmGrid, GemmLayout, GemmProblem, GemmShape, GroupedGemm, GroupedGemmSpec,
    GroupedGemmTensors, ProblemKBlock, ProblemRows, RandomFill, Scalar,
};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, MemoryGuard, Stream, StreamPriority};
use counterpoint_reference::selftest::{Extent, SelfCheck, Share};

use super::gemm::{Dice, decode, encode};
use super::subject::clean;
use crate::case_fault::CaseFault;

/// Depth of a block of k.
const BLOCK: usize = 64;
/// Columns of each row that are compared with f64.
const COLUMNS: usize = 24;

/// Random grouped GEMMs: every layout and type, problems with few and many rows, rows in pieces of D, and blocks of k in their tensor
/// or in copies. Elements are compared with f64; rows of D of no problem must stay as they are, and all shapes have the same bits.
///
/// # Errors
/// When the GPU is not one that the kernel is for.
pub fn selftest_grouped(
    device: &Device,
    extent: Extent,
    share: Share,
    mut checked: impl FnMut(&SelfCheck),
) -> Result<Vec<SelfCheck>, CudaError> {
    let count = if extent == Extent::Full { 48 } else { 9 };
    let stream = Stream::new(device, StreamPriority::Low)?;
    let mut checks = Vec::new();
    for seed in (0..count).filter(|seed| share.takes(*seed as usize)) {
        let case = Case::random(seed);
        let guard = MemoryGuard::begin(device);
        let outcome = case.run(&stream);
        let guarded = clean(&guard.report());
        drop(guard);
        let name = case.describe();
        let check = match (outcome, guarded) {
            (Ok(share), Ok(())) => SelfCheck::of(name, seed, share, 1.0),
            (Ok(_), Err(error)) => SelfCheck::failed(name, seed, error.to_string()),
            (Err(reason), _) => SelfCheck::failed(name, seed, reason.to_string()),
        };
        checked(&check);
        checks.push(check);
    }
    Ok(checks)
}

/// A matrix with its elements.
struct Matrix {
    scalar: Scalar,
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn random(scalar: Scalar, rows: usize, columns: usize, seed: u64) -> Self {
        let value = |index| RandomFill::value(scalar, seed, index as u64);
        Self { scalar, columns, values: (0..rows * columns).map(value).collect() }
    }

    fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        f64::from(self.values[row * self.columns + column])
    }

    fn bytes(&self) -> Vec<u8> {
        let width = self.scalar.bytes() as usize;
        self.values.iter().flat_map(|value| encode(self.scalar, *value)[..width].to_vec()).collect()
    }

    fn upload(&self, stream: &Stream) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::from_slice(stream, &self.bytes())
    }

    /// Its rows `begin..begin + count` at the end of another, with zeros up to a whole block.
    fn append_to(&self, to: &mut Self, begin: usize, count: usize) {
        to.values.extend(&self.values[begin * self.columns..(begin + count) * self.columns]);
        to.values.resize(to.values.len() + (count.next_multiple_of(BLOCK) - count) * self.columns, 0.0);
    }
}

struct Case {
    spec: GroupedGemmSpec,
    a: Vec<Matrix>,
    b: Vec<Matrix>,
    d: Matrix,
    /// Of each problem where A lies along m, its first row of the operands and how many: `a[0]` and `b[0]` before anything was copied.
    terms: Vec<(usize, usize)>,
    whole: Option<[Matrix; 2]>,
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 11);
        let layout = GemmLayout::ALL[seed as usize % 3];
        let element = dice.of(&ElementType::ALL);
        let output = dice.of(&[element.scalar(), Scalar::F32]);
        let n = 8 * (1 + dice.below(90));
        let mut spec = GroupedGemmSpec {
            n,
            k: 8 * (1 + dice.below(60)),
            m: 8 * (1 + dice.below(50)),
            layout,
            element,
            output,
            strides: [0; 3],
            rows_a: Vec::new(),
            rows_b: Vec::new(),
            rows_d: 0,
            adds: layout == GemmLayout::Tn && dice.below(2) == 0,
            problems: Vec::new(),
            sm_margin: dice.of(&[0, 0, 5, 100]) as u32,
            grid: dice.of(&[GemmGrid::Persistent, GemmGrid::PerUnit]),
        };
        if layout == GemmLayout::Nn {
            spec.k = spec.k.next_multiple_of(BLOCK);
        }
        // Some experts have no rows, and are no problem; some have nearly all.
        let rows: Vec<usize> = (0..1 + dice.below(12))
            .map(|_| match dice.below(6) {
                0 => 1 + dice.below(5),
                1 => 64 * (1 + dice.below(4)),
                2 => 1 + dice.below(900),
                _ => 1 + dice.below(200),
            })
            .collect();
        match layout {
            GemmLayout::Tn => Self::of_terms(seed, &mut dice, spec, &rows),
            _ => Self::of_rows(seed, &mut dice, spec, &rows),
        }
    }

    fn of_rows(seed: u64, dice: &mut Dice, mut spec: GroupedGemmSpec, rows: &[usize]) -> Self {
        let (n, k, scalar) = (spec.n, spec.k, spec.element.scalar());
        let total: usize = rows.iter().sum();
        let tensors = 1 + dice.below(2);
        let rows_a = total + dice.below(70);
        let (b_rows, b_columns) = if spec.layout == GemmLayout::Nt { (n, k) } else { (k, n) };
        spec.strides = [k, b_columns, n];
        spec.rows_d = total + 40;
        // Rows of D that are nobody's lie at both ends, and any of them in between where runs of rows change places.
        let longest = dice.of(&[1, 3, 17, 300]);
        let mut runs = runs(dice, 20..20 + total, longest);
        if dice.below(2) == 0 {
            runs.sort_unstable();
        }
        let results: Vec<usize> = runs.into_iter().flat_map(|(first, count)| first..first + count).collect();
        let mut next = 0;
        for (index, &count) in rows.iter().enumerate() {
            let mut problem =
                GemmProblem { b_row: b_rows * (rows.len() - 1 - index), ..GemmProblem::default() };
            let (source, mut first) = (dice.below(tensors), dice.below(rows_a + 1 - count));
            for to in results[next..next + count].chunk_by(|a, b| a + 1 == *b) {
                problem.rows.push(ProblemRows { source, first, to: to[0], count: to.len() });
                first += to.len();
            }
            next += count;
            spec.problems.push(problem);
        }
        let a =
            (0..tensors as u64).map(|tensor| Matrix::random(scalar, rows_a, k, 10 * seed + tensor)).collect();
        let b = vec![Matrix::random(scalar, rows.len() * b_rows, b_columns, 10 * seed + 2)];
        let d = Matrix::random(spec.output, spec.rows_d, n, 10 * seed + 3);
        Self::new(spec, a, b, d, Vec::new(), None)
    }

    fn of_terms(seed: u64, dice: &mut Dice, mut spec: GroupedGemmSpec, rows: &[usize]) -> Self {
        let (m, n, scalar) = (spec.m, spec.n, spec.element.scalar());
        spec.strides = [m, n, n];
        spec.k = 0;
        spec.rows_d = m * rows.len() + 3;
        let total: usize = rows.iter().sum();
        let whole = [m, n].map(|columns| Matrix::random(scalar, total, columns, 10 * seed + columns as u64));
        let in_place = [dice.below(2) == 0, dice.below(2) == 0];
        let [a, b] = [0, 1].map(|operand| placed(&whole[operand], rows, in_place[operand]));
        let mut first = 0;
        let mut terms = Vec::new();
        for (index, &count) in rows.iter().enumerate() {
            terms.push((first, count));
            first += count;
            let rows = vec![ProblemRows { source: 0, first: 0, to: index * m, count: m }];
            let places = a.1[index].iter().zip(&b.1[index]);
            let k_blocks = places.map(|(&a, &b)| ProblemKBlock { a, b }).collect();
            spec.problems.push(GemmProblem { rows, b_row: 0, k_blocks });
        }
        let d = Matrix::random(spec.output, spec.rows_d, n, 10 * seed + 3);
        Self::new(spec, a.0, b.0, d, terms, Some(whole))
    }

    fn new(
        mut spec: GroupedGemmSpec,
        a: Vec<Matrix>,
        b: Vec<Matrix>,
        d: Matrix,
        terms: Vec<(usize, usize)>,
        whole: Option<[Matrix; 2]>,
    ) -> Self {
        spec.rows_a = a.iter().map(Matrix::rows).collect();
        spec.rows_b = b.iter().map(Matrix::rows).collect();
        Self { spec, a, b, d, terms, whole }
    }

    fn describe(&self) -> String {
        let GroupedGemmSpec { n, k, m, layout, element, output, adds, problems, sm_margin, grid, .. } =
            &self.spec;
        let pieces: usize = problems.iter().map(|problem| problem.rows.len()).sum();
        let blocks: usize = problems.iter().map(|problem| problem.k_blocks.len()).sum();
        let size = match layout {
            GemmLayout::Tn => format!("{m} x {n} in {blocks} blocks of k"),
            _ => format!("{} x {n} x {k} in {pieces} pieces", self.spec.rows_d - 40),
        };
        format!(
            "{} {} of {} problems, {size} to {}{}, {grid:?}, margin {sm_margin}",
            element.name(),
            layout.name(),
            problems.len(),
            output.name(),
            if *adds { ", added" } else { "" },
        )
    }

    /// The largest share of an element's bound, or what else is wrong.
    fn run(&self, stream: &Stream) -> Result<f64, CaseFault> {
        let shapes = GroupedGemm::shapes(stream.device(), &self.spec)?;
        let mut first: Option<Vec<u8>> = None;
        for shape in shapes {
            let found = self.launch(stream, shape)?;
            match &first {
                None => first = Some(found),
                Some(first) => {
                    let unlike = first.iter().zip(&found).filter(|(a, b)| a != b).count();
                    if unlike > 0 {
                        let shape = format!("{shape:?}");
                        return Err(CaseFault::UnlikeFirst { bytes: unlike, shape });
                    }
                }
            }
        }
        self.judge(&first.unwrap_or_default())
    }

    fn launch(&self, stream: &Stream, shape: GemmShape) -> Result<Vec<u8>, CudaError> {
        let gemm = GroupedGemm::with_shape(stream, &self.spec, shape)?;
        let upload =
            |all: &[Matrix]| all.iter().map(|matrix| matrix.upload(stream)).collect::<Result<Vec<_>, _>>();
        let (a, b, d) = (upload(&self.a)?, upload(&self.b)?, self.d.upload(stream)?);
        let addresses = |all: &[DeviceBuffer]| all.iter().map(DeviceBuffer::address).collect::<Vec<_>>();
        let (a_addresses, b_addresses) = (addresses(&a), addresses(&b));
        let tensors = GroupedGemmTensors { a: &a_addresses, b: &b_addresses, d: d.address() };
        // SAFETY: the tensors are those of the spec, and live until the download below has waited for the stream.
        unsafe { gemm.launch(stream, &tensors) }?;
        d.download::<u8>(stream, 0, d.len())
    }

    /// The largest share of an element's bound.
    fn judge(&self, found: &[u8]) -> Result<f64, CaseFault> {
        let mut worst = 0.0;
        let mut written = vec![false; self.spec.rows_d];
        for (index, problem) in self.spec.problems.iter().enumerate() {
            for rows in &problem.rows {
                for row in 0..rows.count {
                    let to = rows.to + row;
                    if std::mem::replace(&mut written[to], true) {
                        return Err(CaseFault::Twice { row: to });
                    }
                    for sampled in 0..COLUMNS {
                        let column = (sampled * 37 + to * 11) % self.spec.n;
                        let share = self.judge_element((index, rows, row), column, found)?;
                        worst = f64::max(worst, share);
                    }
                }
            }
        }
        let row_bytes = self.spec.n * self.spec.output.bytes() as usize;
        let before = self.d.bytes();
        let changed = (0..self.spec.rows_d).find(|&row| {
            let bytes = row * row_bytes..(row + 1) * row_bytes;
            !written[row] && found[bytes.clone()] != before[bytes]
        });
        changed.map_or(Ok(worst), |row| Err(CaseFault::OfNoProblem { row }))
    }

    fn judge_element(
        &self,
        (index, rows, row): (usize, &ProblemRows, usize),
        column: usize,
        found: &[u8],
    ) -> Result<f64, CaseFault> {
        let Self { spec, a, b, .. } = self;
        let terms: Vec<(f64, f64)> = match (&self.whole, spec.layout) {
            (Some([a, b]), _) => {
                let (first, count) = self.terms[index];
                (first..first + count).map(|k| (a.at(k, rows.first + row), b.at(k, column))).collect()
            }
            (None, layout) => {
                let first = spec.problems[index].b_row;
                let b = |k| {
                    if layout == GemmLayout::Nt {
                        b[0].at(first + column, k)
                    } else {
                        b[0].at(first + k, column)
                    }
                };
                (0..spec.k).map(|k| (a[rows.source].at(rows.first + row, k), b(k))).collect()
            }
        };
        let product: f64 = terms.iter().map(|(x, y)| x * y).sum();
        let squares: f64 = terms.iter().map(|(x, y)| x * x * y * y).sum();
        let to = rows.to + row;
        let before = if spec.adds { self.d.at(to, column) } else { 0.0 };
        let right = before + product;
        let magnitude = if spec.adds { product.abs() + right.abs() } else { right.abs() };
        let width = spec.output.bytes() as usize;
        let at = (to * spec.n + column) * width;
        let bound = element_bound(spec.output, magnitude, squares, terms.len());
        let share = (decode(spec.output, &found[at..at + width]) - right).abs() / bound;
        if share.is_nan() || share > 1.0 {
            return Err(CaseFault::OutOfBound { row: to, column, share });
        }
        Ok(share)
    }
}

/// Rows cut into runs of at most so many, in any order.
fn runs(dice: &mut Dice, rows: std::ops::Range<usize>, longest: usize) -> Vec<(usize, usize)> {
    let (mut next, mut all) = (rows.start, Vec::new());
    while next < rows.end {
        let count = (1 + dice.below(longest)).min(rows.end - next);
        let at = dice.below(all.len() + 1);
        all.insert(at, (next, count));
        next += count;
    }
    all
}

/// An operand's tensors, and of each problem where its blocks of k lie: rows in place but for the ends of problems, or all in a copy.
fn placed(whole: &Matrix, rows: &[usize], in_place: bool) -> (Vec<Matrix>, Vec<Vec<(usize, usize)>>) {
    let Matrix { scalar, columns, .. } = *whole;
    let mut copied = Matrix { scalar, columns, values: Vec::new() };
    let mut places = Vec::new();
    let mut first = 0;
    for &count in rows {
        let kept = if in_place { count / BLOCK * BLOCK } else { 0 };
        let mut blocks: Vec<(usize, usize)> =
            (first..first + kept).step_by(BLOCK).map(|row| (0, row)).collect();
        let begin = copied.rows();
        whole.append_to(&mut copied, first + kept, count - kept);
        let tensor = usize::from(in_place);
        blocks.extend((begin..copied.rows()).step_by(BLOCK).map(|row| (tensor, row)));
        places.push(blocks);
        first += count;
    }
    let original = in_place.then(|| Matrix { scalar, columns, values: whole.values.clone() });
    let copied = Some(copied).filter(|copied| !copied.values.is_empty());
    (original.into_iter().chain(copied).collect(), places)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is drawn is what it says: every row of D once, and every kind of case.
    #[test]
    fn cases_are_sound_and_of_all_kinds() {
        let cases: Vec<Case> = (0..48).map(Case::random).collect();
        for case in &cases {
            let mut rows: Vec<usize> = case
                .spec
                .problems
                .iter()
                .flat_map(|problem| &problem.rows)
                .flat_map(|rows| rows.to..rows.to + rows.count)
                .collect();
            let count = rows.len();
            rows.sort_unstable();
            rows.dedup();
            assert_eq!(rows.len(), count, "{}", case.describe());
            assert!(rows.last().is_none_or(|last| *last < case.spec.rows_d), "{}", case.describe());
        }
        let names: Vec<String> = cases.iter().map(Case::describe).collect();
        for word in
            [" nt ", " nn ", " tn ", "f32", "f16", "bf16", "added", "PerUnit", "margin 100", "of 1 problems"]
        {
            assert!(names.iter().any(|name| name.contains(word)), "{word}");
        }
    }
}
