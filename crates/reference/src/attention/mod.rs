//! Dense attention: the definition in f64, and what a plain implementation in a narrow type gives.

mod arithmetic;
mod dense;
mod gradients;
mod sample;

use counterpoint_exec::{AttentionInputs, HostTensor};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType};

use dense::{Dense, Rounding};
pub use sample::Sample;
pub(crate) use sample::SampledRows;

/// Relative Frobenius error allowed to results whose statistics are f32.
pub(crate) const F32_BOUND: f64 = 1e-5;
/// Likewise f64.
pub(crate) const F64_BOUND: f64 = 1e-12;

/// Results of dense attention, every tensor in f64 and in global token order, shapes as in
/// [`AttentionOutputs`](counterpoint_exec::AttentionOutputs).
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[seqlen_q, heads_q, head_dim_v]`
    pub out: Vec<f64>,
    /// `[seqlen_q, heads_q]`, natural logarithm.
    pub lse: Vec<f64>,
    /// `[heads_q]`
    pub max_logits: Vec<f64>,
    /// Present when `dout` was.
    pub gradients: Option<ReferenceGradients>,
    /// Norms below which an error is rounding noise.
    pub noise: NoiseNorms,
}

/// Gradients of dense attention.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceGradients {
    /// As `q`.
    pub dq: Vec<f64>,
    /// As `k`.
    pub dk: Vec<f64>,
    /// As `v`.
    pub dv: Vec<f64>,
    /// As `sink`.
    pub dsink: Option<Vec<f64>>,
}

/// The Frobenius norm that each tensor would have if the terms of its sums were independent: the root of the summed
/// squares of the terms. Where terms cancel by construction (a row that sees one key has a gradient `dq` of exactly 0)
/// no floating-point sum comes closer to 0 than its rounding unit times this norm, so an error is compared with the
/// larger of this and the tensor's own norm. On ordinary inputs the two are about the same. Under a small softcap the
/// rounding of a score decides about its slope, and so about gradients: they have more noise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NoiseNorms {
    /// Of `out`.
    pub out: f64,
    /// Of `dq`.
    pub dq: f64,
    /// Of `dk`.
    pub dk: f64,
    /// Of `dv`.
    pub dv: f64,
    /// Of `dsink`.
    pub dsink: f64,
}

/// Dense attention in f64 on the inputs as they are stored: the definition, row by row, with no blocks and no online
/// softmax. Takes `area * heads` steps and memory linear in the sequence.
///
/// For finite inputs. NaN and infinity go through it as arithmetic takes them, so an infinite score may leave its row a
/// number where the kernels say NaN.
///
/// # Panics
/// When a tensor's shape does not fit `mask` and `spec`.
pub fn reference_attention(mask: &Mask, spec: &AttentionSpec, inputs: &AttentionInputs) -> Reference {
    Dense::<f64>::new(mask, spec, inputs, DType::F64).run(None)
}

/// What a plain implementation in the inputs' type gives: the same steps with every sum and statistic in f32 (f64 for
/// f64), weights and their gradients rounded to the inputs' type where a matrix product takes them, and every output rounded
/// once. The yardstick for bf16 and f16: matrix units take no other operands.
///
/// # Panics
/// As [`reference_attention`].
pub fn plain_attention(mask: &Mask, spec: &AttentionSpec, inputs: &AttentionInputs) -> Reference {
    plain(mask, spec, inputs, None)
}

/// As [`plain_attention`], with gradients computed from the `out` that a run saved for its backward rather than from its own, and
/// rounded where kernels of matrix units round: weights before gradients of scores are made of them, and these before they are scaled.
/// Two right roundings differ in every element, and twice the largest error of one says little about the other.
///
/// # Panics
/// As [`reference_attention`], and when `out` has another shape.
pub(crate) fn plain_attention_from(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    out: &HostTensor,
) -> Reference {
    assert_eq!(out.shape(), [mask.seqlen_q(), spec.heads_q, spec.head_dim_v], "shape of out");
    plain(mask, spec, inputs, Some(out.to_f64()))
}

fn plain(mask: &Mask, spec: &AttentionSpec, inputs: &AttentionInputs, saved: Option<Vec<f64>>) -> Reference {
    let rounding = if saved.is_some() { Rounding::Kernels } else { Rounding::Operands };
    match spec.dtype {
        DType::F64 => Dense::<f64>::new(mask, spec, inputs, DType::F64).run(saved),
        dtype => Dense { rounding, ..Dense::<f32>::new(mask, spec, inputs, dtype) }.run(saved),
    }
}

/// Bytes that [`reference_attention`] and the comparison with it need at their peak, besides the tensors themselves.
pub fn reference_bytes(spec: &AttentionSpec, seqlen_q: usize, seqlen_k: usize, backward: bool) -> u64 {
    let (q, k) = (seqlen_q as u64, seqlen_k as u64);
    let (heads_q, heads_kv) = (spec.heads_q as u64, spec.heads_kv as u64);
    let (dim, dim_v) = (spec.head_dim as u64, spec.head_dim_v as u64);
    let query_side = q.saturating_mul(heads_q).saturating_mul(dim + dim_v);
    let key_side = k.saturating_mul(heads_kv).saturating_mul(dim + dim_v);
    let statistics = q.saturating_mul(heads_q).saturating_mul(4);
    // Inputs and results in f64; the gradients of keys once more for each part of the rows.
    let copies = if backward { 3 } else { 2 };
    let parts = if backward { PARTS as u64 + 2 } else { 1 };
    // The yardstick is held together with the reference.
    let runs = if matches!(spec.dtype, DType::Bf16 | DType::F16) { 2 } else { 1 };
    query_side
        .saturating_mul(copies)
        .saturating_add(key_side.saturating_mul(parts))
        .saturating_add(statistics)
        .saturating_mul(8 * runs)
}

/// Rows are cut into so many parts, whose partial sums of dk and dv are summed in order: a fixed number, so that the result
/// does not depend on the threads.
const PARTS: usize = 4;
