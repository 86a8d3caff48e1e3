//! Rows of long sequences solved by themselves, in time linear in the sequence.

use counterpoint_cpu_kernels::Real;
use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, HostTensor, Pass, convert_element, with_host_element,
};
use counterpoint_mask::{Band, Mask};
use counterpoint_plan::{AttentionSpec, DType};
use rayon::prelude::*;

use super::arithmetic::{add_scaled, capped, dot, exp, operand, rounded};
use crate::draw::Draw;

/// Which rows and keys of a long sequence are looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// (query row, query head).
    rows: Vec<(usize, usize)>,
    /// (key row, key head).
    keys: Vec<(usize, usize)>,
    /// Whether gradients are looked at.
    pass: Pass,
}

impl Sample {
    /// So many rows and, for gradients, keys; heads at random, the first and the last of the sequence among them.
    pub fn random(
        mask: &Mask,
        spec: &AttentionSpec,
        pass: Pass,
        rows: usize,
        keys: usize,
        seed: u64,
    ) -> Self {
        let mut draw = Draw::new(seed);
        let mut choose = |count: usize, seqlen: usize, heads: usize| {
            let ends = [0, seqlen.saturating_sub(1)];
            let inner = (0..count.saturating_sub(2)).map(|_| None);
            let wanted = ends.into_iter().map(Some).chain(inner).take(count.min(seqlen));
            wanted.map(|row| (row.unwrap_or_else(|| draw.below(seqlen)), draw.below(heads))).collect()
        };
        Self {
            rows: choose(rows, mask.seqlen_q(), spec.heads_q),
            keys: choose(keys, mask.seqlen_k(), spec.heads_kv),
            pass,
        }
    }
}

/// The elements of the sampled rows, one after the other; gradients are empty without a backward.
pub(crate) struct SampledRows {
    out: Vec<f64>,
    lse: Vec<f64>,
    gradients: Option<SampledGradients>,
}

struct SampledGradients {
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl SampledRows {
    /// The definition in f64.
    pub(crate) fn exact(
        mask: &Mask,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        outputs: &AttentionOutputs,
        sample: &Sample,
    ) -> Self {
        Problem::<f64> { mask, spec, inputs, outputs, round_to: DType::F64, type_: Default::default() }
            .solve(sample)
    }

    /// In f32, operands and results rounded to the inputs' type: the yardstick of bf16 and f16. Gradients are computed from
    /// the `out` of the run, as its backward did.
    pub(crate) fn plain(
        mask: &Mask,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        outputs: &AttentionOutputs,
        sample: &Sample,
    ) -> Self {
        Problem::<f32> { mask, spec, inputs, outputs, round_to: spec.dtype, type_: Default::default() }
            .solve(sample)
    }

    /// What came out of a run.
    pub(crate) fn of(outputs: &AttentionOutputs, sample: &Sample) -> Self {
        let gather = |tensor: &HostTensor, at: &[(usize, usize)]| {
            at.iter().flat_map(|&(row, head)| row_of::<f64>(tensor, row, head)).collect::<Vec<f64>>()
        };
        let gradients = [&outputs.dq, &outputs.dk, &outputs.dv];
        let gradients = match gradients.map(Option::as_ref) {
            [Some(dq), Some(dk), Some(dv)] => Some(SampledGradients {
                dq: gather(dq, &sample.rows),
                dk: gather(dk, &sample.keys),
                dv: gather(dv, &sample.keys),
            }),
            _ => None,
        };
        Self { out: gather(&outputs.out, &sample.rows), lse: gather(&outputs.lse, &sample.rows), gradients }
    }

    /// Names and elements of what there is.
    pub(crate) fn tensors(&self) -> Vec<(&'static str, &[f64])> {
        let mut tensors = vec![("out", &self.out[..]), ("lse", &self.lse)];
        if let Some(SampledGradients { dq, dk, dv }) = &self.gradients {
            tensors.extend([("dq", &dq[..]), ("dk", dk), ("dv", dv)]);
        }
        tensors
    }

    /// The elements of one tensor.
    pub(crate) fn tensor(&self, name: &str) -> Option<&[f64]> {
        self.tensors().into_iter().find(|(other, _)| *other == name).map(|(_, elements)| elements)
    }
}

/// A problem whose rows are computed one by one, in the type `A`.
struct Problem<'a, A> {
    mask: &'a Mask,
    spec: &'a AttentionSpec,
    inputs: &'a AttentionInputs,
    outputs: &'a AttentionOutputs,
    round_to: DType,
    type_: std::marker::PhantomData<A>,
}

struct QueryRow {
    out: Vec<f64>,
    lse: f64,
    dq: Vec<f64>,
}

impl<A: Real> Problem<'_, A> {
    fn solve(&self, sample: &Sample) -> SampledRows {
        let bands: Vec<Band> = self.mask.bands().collect();
        let rows: Vec<QueryRow> =
            sample.rows.par_iter().map(|&(row, head)| self.query_row(&bands, row, head)).collect();
        let dout = self.inputs.dout.as_ref().filter(|_| sample.pass == Pass::ForwardBackward);
        let gradients = dout.map(|dout| {
            let keys: Vec<(Vec<f64>, Vec<f64>)> =
                sample.keys.par_iter().map(|&(col, kv)| self.key(&bands, dout, col, kv)).collect();
            SampledGradients {
                dq: rows.iter().flat_map(|row| &row.dq).copied().collect(),
                dk: keys.iter().flat_map(|(dk, _)| dk).copied().collect(),
                dv: keys.iter().flat_map(|(_, dv)| dv).copied().collect(),
            }
        });
        SampledRows {
            out: rows.iter().flat_map(|row| &row.out).copied().collect(),
            lse: rows.iter().map(|row| row.lse).collect(),
            gradients,
        }
    }

    /// (score, its slope by the scaled dot product).
    fn score(&self, q: &[A], k: &[A]) -> (A, A) {
        let product = A::from_f64(self.spec.scale) * dot(q, k);
        if self.spec.softcap == 0.0 { (product, A::ONE) } else { capped(product, self.spec.softcap) }
    }

    fn dlse(&self, row: usize, head: usize) -> A {
        self.inputs.dlse.as_ref().map_or(A::ZERO, |dlse| row_of::<A>(dlse, row, head)[0])
    }

    fn query_row(&self, bands: &[Band], row: usize, head: usize) -> QueryRow {
        let spec = self.spec;
        let kv = head / (spec.heads_q / spec.heads_kv);
        let q = row_of::<A>(&self.inputs.q, row, head);
        let here = bands.iter().filter(|band| band.q_range.start <= row && row < band.q_range.end);
        let columns: Vec<usize> =
            here.flat_map(|band| band.columns(row).start..band.columns(row).end).collect();
        let scores: Vec<(A, A)> =
            columns.iter().map(|&col| self.score(&q, &row_of::<A>(&self.inputs.k, col, kv))).collect();
        let sinks: Vec<A> = self
            .inputs
            .sink
            .iter()
            .flat_map(|sink| (0..spec.seqlen_sink).flat_map(|at| row_of::<A>(sink, at, head)))
            .collect();
        let all = || scores.iter().map(|(score, _)| *score).chain(sinks.iter().copied());
        let max = all().fold(-A::INFINITY, |max, s| s.larger(max));
        let mut out = vec![A::ZERO; spec.head_dim_v];
        let mut dq = vec![A::ZERO; spec.head_dim];
        if max == -A::INFINITY {
            return QueryRow {
                out: rounded(&out, self.round_to),
                lse: f64::NEG_INFINITY,
                dq: rounded(&dq, self.round_to),
            };
        }
        let sum = all().fold(A::ZERO, |sum, s| sum + exp(s - max));
        let values: Vec<Vec<A>> = columns.iter().map(|&col| row_of(&self.inputs.v, col, kv)).collect();
        for ((score, _), v) in scores.iter().zip(&values) {
            add_scaled(&mut out, operand(exp(*score - max) / sum, self.round_to), v);
        }
        let out = rounded(&out, self.round_to);
        if let Some(dout) = &self.inputs.dout {
            let dout = row_of::<A>(dout, row, head);
            let delta = match self.round_to {
                DType::F64 => dot(&out.iter().map(|&x| A::from_f64(x)).collect::<Vec<A>>(), &dout),
                _ => dot(&row_of::<A>(&self.outputs.out, row, head), &dout),
            } - self.dlse(row, head);
            for ((&col, &(score, slope)), v) in columns.iter().zip(&scores).zip(&values) {
                let p = exp(score - max) / sum;
                let ds = p * (dot(&dout, v) - delta) * slope * A::from_f64(spec.scale);
                add_scaled(&mut dq, operand(ds, self.round_to), &row_of(&self.inputs.k, col, kv));
            }
        }
        let lse = max.to_f64() + sum.to_f64().ln();
        QueryRow { out, lse, dq: rounded(&dq, self.round_to) }
    }

    /// (dk, dv) of one key.
    fn key(&self, bands: &[Band], dout: &HostTensor, col: usize, kv: usize) -> (Vec<f64>, Vec<f64>) {
        let spec = self.spec;
        let group = spec.heads_q / spec.heads_kv;
        let (k, v) = (row_of::<A>(&self.inputs.k, col, kv), row_of::<A>(&self.inputs.v, col, kv));
        let (mut dk, mut dv) = (vec![A::ZERO; spec.head_dim], vec![A::ZERO; spec.head_dim_v]);
        for band in bands.iter().filter(|band| band.k_range.start <= col && col < band.k_range.end) {
            for row in band.q_range.start..band.q_range.end {
                let columns = band.columns(row);
                if col < columns.start || col >= columns.end {
                    continue;
                }
                for head in kv * group..(kv + 1) * group {
                    let q = row_of::<A>(&self.inputs.q, row, head);
                    let dout = row_of::<A>(dout, row, head);
                    let delta = dot(&row_of::<A>(&self.outputs.out, row, head), &dout) - self.dlse(row, head);
                    let (score, slope) = self.score(&q, &k);
                    let p = exp(score - row_of::<A>(&self.outputs.lse, row, head)[0]);
                    let ds = p * (dot(&dout, &v) - delta) * slope * A::from_f64(spec.scale);
                    add_scaled(&mut dk, operand(ds, self.round_to), &q);
                    add_scaled(&mut dv, operand(p, self.round_to), &dout);
                }
            }
        }
        (rounded(&dk, self.round_to), rounded(&dv, self.round_to))
    }
}

/// The elements of one row of one head of a tensor `[rows, heads, …]`.
fn row_of<A: Real>(tensor: &HostTensor, row: usize, head: usize) -> Vec<A> {
    let [_, heads, inner @ ..] = tensor.shape() else {
        panic!("a tensor of rows and heads, not {:?}", tensor.shape())
    };
    let width: usize = inner.iter().product();
    let at = (row * heads + head) * width;
    with_host_element!(tensor.dtype(), T => {
        let elements = tensor.as_slice::<T>().unwrap_or(&[]);
        elements[at..at + width].iter().map(|&x| convert_element(x)).collect()
    })
}

#[cfg(test)]
mod tests {
    use counterpoint_choose::{PlanConfig, plan_mask};
    use counterpoint_exec::{RunConfig, random_inputs, run_attention};
    use counterpoint_mask::{AttnSlice, MaskType, Range};
    use counterpoint_plan::GradientShares;

    use super::*;
    use crate::{check_attention, check_sample};

    fn problem(dtype: DType) -> (Mask, AttentionSpec, AttentionInputs, AttentionOutputs) {
        let slices = vec![
            AttnSlice::new(Range::new(0, 150), Range::new(0, 150), MaskType::Causal),
            AttnSlice::new(Range::new(150, 300), Range::new(50, 120), MaskType::BiCausal),
            AttnSlice::new(Range::new(200, 301), Range::new(150, 301), MaskType::Full),
        ];
        let mask = Mask::new(301, 301, slices).unwrap();
        let spec = AttentionSpec {
            heads_q: 4,
            heads_kv: 2,
            head_dim: 24,
            head_dim_v: 16,
            dtype,
            scale: 0.2,
            softcap: 3.0,
            seqlen_sink: 1,
            gradient_shares: GradientShares::Accumulators,
            max_logits: false,
            dlse: false,
        };
        let inputs = random_inputs(&mask, &spec, 5, Pass::ForwardBackward);
        let plan = plan_mask(&mask, &spec, &PlanConfig::new(1)).unwrap();
        let outputs = run_attention(&plan, &spec, &inputs, &RunConfig::default()).unwrap().outputs;
        (mask, spec, inputs, outputs)
    }

    #[test]
    fn a_sample_of_right_results_passes_and_agrees_with_the_dense_reference() {
        for dtype in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
            let (mask, spec, inputs, outputs) = problem(dtype);
            let sample = Sample::random(&mask, &spec, Pass::ForwardBackward, 400, 400, 1);
            let report = check_sample(&mask, &spec, &inputs, &outputs, &sample);
            assert!(report.passed, "{report:#?}");
            let names: Vec<&str> = report.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            assert_eq!(names, ["out", "lse", "dq", "dk", "dv"]);
            // So many rows are nearly all: the two must find about the same errors.
            let dense = check_attention(&mask, &spec, &inputs, &outputs);
            for (sampled, dense) in report.tensors.iter().zip(&dense.tensors) {
                let ratio = sampled.relative_error / dense.relative_error;
                assert!((0.4..2.5).contains(&ratio), "{dtype:?} {sampled:?} {dense:?}");
            }
        }
    }

    #[test]
    fn wrong_elements_of_any_tensor_are_found() {
        let (mask, spec, inputs, right) = problem(DType::F32);
        let sample = Sample::random(&mask, &spec, Pass::ForwardBackward, 40, 40, 2);
        for name in ["out", "lse", "dq", "dk", "dv"] {
            let mut outputs = right.clone();
            let tensor = match name {
                "out" => Some(&mut outputs.out),
                "lse" => Some(&mut outputs.lse),
                "dq" => outputs.dq.as_mut(),
                "dk" => outputs.dk.as_mut(),
                _ => outputs.dv.as_mut(),
            };
            // The last row, which every sample holds, in all heads.
            let values = tensor.unwrap().as_mut_slice::<f32>().unwrap();
            let last = values.len() - values.len() / 301;
            values[last..].iter_mut().for_each(|x| *x += 0.01);
            let report = check_sample(&mask, &spec, &inputs, &outputs, &sample);
            let wrong: Vec<&str> = report
                .tensors
                .iter()
                .filter(|tensor| !tensor.passed)
                .map(|tensor| tensor.name.as_str())
                .collect();
            assert!(wrong.contains(&name), "{name}: {report:#?}");
        }
    }
}
