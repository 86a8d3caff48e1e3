//! The selftest of RMSNorm by itself: random rows in pieces, and their gradients, against f64 and against a second run.

use std::iter;

use counterpoint_exec::{HostData, HostTensor, random_tensor};
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::{
    BufferId, BufferRole, BufferSpec, Op, OverlapPolicy, Program, ProgramOp, RmsNorm, RmsNormBackward,
    RowBlock, StreamId, StreamKind, StreamSpec,
};

use super::examine::unlike_elements;
use super::{Extent, SelfCheck, Share, Subject};
use crate::draw::Draw;
use crate::linear::half_unit;
use crate::{
    LinearSample, NormGradients, NormalisedRows, WrongResult, check_rms_norm, check_rms_norm_backward,
};

/// Columns that kernels take in different ways: few, odd, whole packs, as many as a block keeps and more.
const COLUMNS: [usize; 14] = [1, 3, 8, 72, 520, 1001, 1032, 2049, 4096, 8192, 8193, 8200, 9999, 12_288];

/// A norm and its tensors.
struct NormCase {
    seed: u64,
    dtype: DType,
    epsilon: f64,
    /// The rows that are normalised, in tensors whose pieces lie in another order.
    src: Vec<HostTensor>,
    blocks: Vec<(usize, Range)>,
    residual: Option<HostTensor>,
    weight: Option<HostTensor>,
    /// The backward's own, unlike what the forward gives: of it some rows are zeros.
    sum: HostTensor,
    dout: HostTensor,
    dsum: Option<HostTensor>,
}

/// RMSNorm of random rows on a device, with and without residual and weight, rows of every length, in pieces, rows of zeros, and its
/// gradients. Every element is compared with f64; then both run again, and must have the same bits. `checked` hears of every check, with
/// how many cases there are.
pub fn selftest_rms_norm(
    subject: &dyn Subject,
    extent: Extent,
    share: Share,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Vec<SelfCheck> {
    let count = match extent {
        Extent::Full => 56,
        Extent::Quick => 14,
    };
    let mut checks = Vec::new();
    for seed in (0..count).filter(|seed| share.takes(*seed as usize)) {
        for check in NormCase::random(seed, subject.dtypes()).examine(subject) {
            checked(&check, share.count(count as usize));
            checks.push(check);
        }
    }
    checks
}

impl NormCase {
    fn random(seed: u64, dtypes: &[DType]) -> Self {
        let mut draw = Draw::new(seed ^ 0x2b07);
        let columns = COLUMNS[seed as usize % COLUMNS.len()];
        // More than a block of the backward has, where that costs little.
        let rows = if columns < 100 && draw.chance(50) {
            draw.within(4000, 6000)
        } else {
            draw.sized(1, 60_000 / columns.max(60))
        };
        let dtype = draw.pick(dtypes);
        let mut stream = 100 * seed;
        let mut tensor = |shape: Vec<usize>| {
            stream += 1;
            random_tensor(shape, dtype, stream)
        };
        let cuts = draw.cuts(rows, 4);
        let sizes = cuts.windows(2).map(|ends| ends[1] - ends[0]);
        let src: Vec<HostTensor> = sizes.map(|rows| tensor(vec![rows, columns])).collect();
        let mut blocks = Vec::new();
        for (at, piece) in src.iter().enumerate() {
            let cuts = draw.cuts(piece.rows(), 2);
            blocks.extend(cuts.windows(2).map(|ends| (at, Range::new(ends[0], ends[1]))));
        }
        let turned = draw.below(blocks.len());
        blocks.rotate_left(turned);
        let has = |chance: bool, tensor: HostTensor| chance.then_some(tensor);
        // One case in so many has a backward without rows, as a rank without tokens.
        let backward_rows = if seed % 14 == 13 { 0 } else { rows };
        let of_backward =
            |tensor: &mut dyn FnMut(Vec<usize>) -> HostTensor| tensor(vec![backward_rows, columns]);
        Self {
            seed,
            dtype,
            epsilon: draw.pick(&[1e-5, 1e-6, 0.1]),
            residual: has(draw.chance(60), tensor(vec![rows, columns])),
            weight: has(draw.chance(70), tensor(vec![columns])),
            sum: with_zeros(of_backward(&mut tensor), draw.pick(&[0, 2, 3])),
            dout: of_backward(&mut tensor),
            dsum: has(draw.chance(60), of_backward(&mut tensor)),
            src,
            blocks,
        }
    }

    fn describe(&self) -> String {
        let (rows, columns) = (self.dout.rows(), self.dout.row_elements());
        let given = |word: &str, tensor: &Option<HostTensor>| match tensor {
            Some(_) => format!(" {word}"),
            None => String::new(),
        };
        let words =
            [given("residual", &self.residual), given("weight", &self.weight), given("dsum", &self.dsum)];
        let (pieces, words) = (self.blocks.len(), words.concat());
        format!(
            "rms-norm {} {rows} rows of {columns} in {pieces} pieces{words} epsilon={}",
            self.dtype, self.epsilon
        )
    }

    fn examine(&self, subject: &dyn Subject) -> Vec<SelfCheck> {
        let name = self.describe();
        let check = |what: &str, found: Result<f64, WrongResult>| {
            let name = format!("{name}: {what}");
            match found {
                Ok(share) => SelfCheck::of(name, self.seed, share, 1.0),
                Err(reason) => SelfCheck::failed(name, self.seed, reason.to_string()),
            }
        };
        let runs = [(self.forward(), "y"), (self.backward(), "gradients")];
        let examine = |((program, inputs), what): ((Program, Vec<&HostTensor>), &str)| {
            let run = || subject.run_alone(&program, &inputs);
            let (first, second) = match run().and_then(|first| Ok((first, run()?))) {
                Ok(outputs) => outputs,
                Err(error) => {
                    return vec![SelfCheck::failed(format!("{name}: {what}"), self.seed, error.to_string())];
                }
            };
            let found = if what == "y" { self.check_forward(&first) } else { self.check_backward(&first) };
            let unlike: usize = first.iter().zip(&second).map(|(a, b)| unlike_elements(a, b)).sum();
            let bits =
                SelfCheck::of(format!("same bits again: {name}: {what}"), self.seed, unlike as f64, 0.0);
            vec![check(what, found), bits]
        };
        runs.into_iter().flat_map(examine).collect()
    }

    /// Outputs are `sum` and `y`.
    fn forward(&self) -> (Program, Vec<&HostTensor>) {
        let mut tensors = Tensors::default();
        let src: Vec<BufferId> = self.src.iter().map(|tensor| tensors.input(tensor)).collect();
        let blocks = self.blocks.iter().map(|&(at, rows)| RowBlock { buffer: src[at], rows });
        let residual = self.residual.as_ref().map(|tensor| tensors.input(tensor));
        let weight = self.weight.as_ref().map(|tensor| tensors.input(tensor));
        let shape = [self.src.iter().map(HostTensor::rows).sum(), self.dout.row_elements()];
        let [sum, out] = ["sum", "y"].map(|name| tensors.output(name, &shape, self.dtype));
        let op = RmsNorm { src: blocks.collect(), residual, sum, weight, epsilon: self.epsilon, out };
        tensors.program(Op::RmsNorm(op))
    }

    /// Outputs are `dh` and, with a weight, its gradient.
    fn backward(&self) -> (Program, Vec<&HostTensor>) {
        let mut tensors = Tensors::default();
        let [dout, sum] = [&self.dout, &self.sum].map(|tensor| tensors.input(tensor));
        let weight = self.weight.as_ref().map(|tensor| tensors.input(tensor));
        let dsum = self.dsum.as_ref().map(|tensor| tensors.input(tensor));
        let shape = self.dout.shape();
        let dh = tensors.output("dh", shape, self.dtype);
        let sums = self.dtype.accumulator();
        let weight = weight.map(|weight| (weight, tensors.output("dweight", &shape[1..], sums)));
        tensors.program(Op::RmsNormBackward(RmsNormBackward {
            dout,
            sum,
            weight,
            dsum,
            epsilon: self.epsilon,
            dh,
        }))
    }

    fn check_forward(&self, outputs: &[HostTensor]) -> Result<f64, WrongResult> {
        let [sum, y] = outputs else { return Err(WrongResult::Count { tensors: outputs.len() }) };
        let src: Vec<Vec<f64>> = self.src.iter().map(HostTensor::to_f64).collect();
        let columns = y.row_elements();
        let rows =
            self.blocks.iter().flat_map(|(at, rows)| &src[*at][rows.start * columns..rows.end * columns]);
        let residual = self.residual.as_ref().map_or_else(|| vec![0.0; y.len()], HostTensor::to_f64);
        for (at, ((found, x), added)) in sum.to_f64().into_iter().zip(rows).zip(residual).enumerate() {
            // Rounded by the addition, and to its type.
            let right = x + added;
            let bound = (half_unit(self.dtype) + half_unit(self.dtype.accumulator())) * right.abs();
            let within = (found - right).abs() <= bound * 1.001;
            if !within {
                let (row, column) = (at / columns, at % columns);
                return Err(WrongResult::SumElement { row, column, found, right });
            }
        }
        check_rms_norm(&self.norm(sum), y, LinearSample::Whole)
    }

    fn check_backward(&self, outputs: &[HostTensor]) -> Result<f64, WrongResult> {
        let Some((dh, dweight)) = outputs.split_first() else {
            return Err(WrongResult::Count { tensors: 0 });
        };
        let dweight = dweight.first();
        let gradients = NormGradients { dout: &self.dout, dsum: self.dsum.as_ref(), dh, dweight };
        check_rms_norm_backward(&self.norm(&self.sum), &gradients, LinearSample::Whole)
    }

    fn norm<'a>(&'a self, sum: &'a HostTensor) -> NormalisedRows<'a> {
        NormalisedRows { sum, weight: self.weight.as_ref(), epsilon: self.epsilon }
    }
}

/// The same rows, of which one in so many is zeros; none where it is 0.
fn with_zeros(mut rows: HostTensor, each: usize) -> HostTensor {
    fn clear<T: Copy + Default>(elements: &mut [T], columns: usize, each: usize) {
        if each > 0 {
            elements.chunks_exact_mut(columns).step_by(each).for_each(|row| row.fill(T::default()));
        }
    }
    let columns = rows.row_elements();
    match rows.data_mut() {
        HostData::F64(values) => clear(values, columns, each),
        HostData::F32(values) => clear(values, columns, each),
        HostData::Bf16(values) => clear(values, columns, each),
        HostData::F16(values) => clear(values, columns, each),
    }
    rows
}

/// The tensors of a Program of one operation.
#[derive(Default)]
struct Tensors<'a> {
    buffers: Vec<BufferSpec>,
    inputs: Vec<&'a HostTensor>,
}

impl<'a> Tensors<'a> {
    fn input(&mut self, tensor: &'a HostTensor) -> BufferId {
        self.inputs.push(tensor);
        let name = format!("input {}", self.inputs.len());
        self.buffer(name, tensor.shape(), tensor.dtype(), BufferRole::Input)
    }

    fn output(&mut self, name: &str, shape: &[usize], dtype: DType) -> BufferId {
        self.buffer(name.to_owned(), shape, dtype, BufferRole::Output)
    }

    fn buffer(&mut self, name: String, shape: &[usize], dtype: DType, role: BufferRole) -> BufferId {
        self.buffers.push(BufferSpec { name, dtype, shape: shape.to_vec(), role });
        BufferId(self.buffers.len() - 1)
    }

    fn program(self, op: Op) -> (Program, Vec<&'a HostTensor>) {
        let op = ProgramOp { stream: StreamId(0), stage: None, label: "norm".to_owned(), op };
        let program = Program {
            name: "rms norm".to_owned(),
            rank: 0,
            world_size: 1,
            streams: vec![StreamSpec { name: "compute".to_owned(), kind: StreamKind::Compute }],
            buffers: self.buffers,
            slots: Vec::new(),
            num_events: 0,
            num_barriers: 0,
            num_signals: 0,
            policy: OverlapPolicy::default(),
            ops: iter::once(op).collect(),
        };
        (program, self.inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::CpuSubject;

    #[test]
    fn the_cpu_passes_every_check() {
        let checks = selftest_rms_norm(&CpuSubject, Extent::Quick, Share::ALL, |_, _| ());
        assert_eq!(checks.len(), 4 * 14);
        let wrong: Vec<_> = checks.iter().filter(|check| !check.passed).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn cases_have_what_matters() {
        let cases: Vec<String> =
            (0..56).map(|seed| NormCase::random(seed, &[DType::Bf16, DType::F16]).describe()).collect();
        for feature in [
            "bf16",
            "f16",
            " residual",
            " weight",
            " dsum",
            "rows of 1 ",
            "rows of 9999",
            " 0 rows",
            "in 1 pieces",
            "in 5 pieces",
            "epsilon=0.1",
        ] {
            assert!(cases.iter().filter(|case| case.contains(feature)).count() >= 2, "{feature}: {cases:#?}");
        }
        assert!(cases.iter().any(|case| !case.contains(" residual") && !case.contains(" weight")));
    }
}
