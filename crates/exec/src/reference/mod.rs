mod sample;

use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{AttentionSpec, DType};
use half::{bf16, f16};
use rayon::prelude::*;

pub use sample::Sample;
pub(crate) use sample::SampledRows;

use crate::host_element::{convert, with_host_element};
use crate::kernel::Real;
use crate::{AttentionInputs, HostElement, HostTensor};

/// Results of dense attention, every tensor in f64 and in global token order, shapes as in
/// [`AttentionOutputs`](crate::AttentionOutputs).
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[seqlen_q, heads_q, head_dim_v]`
    pub out: Vec<f64>,
    /// `[seqlen_q, heads_q]`, natural logarithm.
    pub lse: Vec<f64>,
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
/// larger of this and the tensor's own norm. On ordinary inputs the two are about the same.
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
    // The yardstick is held beside the reference.
    let runs = if matches!(spec.dtype, DType::Bf16 | DType::F16) { 2 } else { 1 };
    query_side
        .saturating_mul(copies)
        .saturating_add(key_side.saturating_mul(parts))
        .saturating_add(statistics)
        .saturating_mul(8 * runs)
}

/// Rows are cut into so many parts, whose shares of dk and dv are summed in order: a fixed number, so that the result
/// does not depend on the threads.
const PARTS: usize = 4;

/// A problem with its inputs in the type that it is solved in.
struct Dense<'a, A> {
    spec: &'a AttentionSpec,
    /// Unmasked columns of each query row.
    columns: Vec<Vec<Range>>,
    seqlen_k: usize,
    q: Vec<A>,
    k: Vec<A>,
    v: Vec<A>,
    sink: Vec<A>,
    dout: Option<Vec<A>>,
    round_to: DType,
    rounding: Rounding,
}

/// What is rounded on the way to gradients of scores.
#[derive(Clone, Copy, PartialEq)]
enum Rounding {
    /// They alone, scaled, as a matrix product takes them.
    Operands,
    /// Weights, which wait for them in f16 whatever the type is, and they before they are scaled.
    Kernels,
}

/// Results of the rows of one query head.
struct HeadRows<A> {
    out: Vec<A>,
    lse: Vec<A>,
}

/// Gradients from the rows of one part, for one key head and the query heads that read it.
struct PartGradients<A> {
    dq: Vec<A>,
    dk: Vec<A>,
    dv: Vec<A>,
    noise: NoiseNorms,
}

impl<'a, A: Real> Dense<'a, A> {
    fn new(mask: &Mask, spec: &'a AttentionSpec, inputs: &AttentionInputs, round_to: DType) -> Self {
        let (seqlen_q, seqlen_k) = (mask.seqlen_q(), mask.seqlen_k());
        let read = |name: &str, tensor: &HostTensor, shape: [usize; 3]| {
            assert_eq!(tensor.shape(), shape, "shape of {name}");
            convert_all(tensor)
        };
        let mut columns = vec![Vec::new(); seqlen_q];
        for band in mask.bands() {
            for row in band.q_range.start..band.q_range.end {
                let seen = band.columns(row);
                if !seen.is_empty() {
                    columns[row].push(seen);
                }
            }
        }
        let sink = inputs.sink.as_ref().map_or_else(Vec::new, |sink| {
            assert_eq!(sink.shape(), [spec.seqlen_sink, spec.heads_q], "shape of sink");
            convert_all(sink)
        });
        Self {
            spec,
            columns,
            seqlen_k,
            q: read("q", &inputs.q, [seqlen_q, spec.heads_q, spec.head_dim]),
            k: read("k", &inputs.k, [seqlen_k, spec.heads_kv, spec.head_dim]),
            v: read("v", &inputs.v, [seqlen_k, spec.heads_kv, spec.head_dim_v]),
            sink,
            dout: inputs
                .dout
                .as_ref()
                .map(|dout| read("dout", dout, [seqlen_q, spec.heads_q, spec.head_dim_v])),
            round_to,
            rounding: Rounding::Operands,
        }
    }

    fn q_row(&self, row: usize, head: usize) -> &[A] {
        row_of(&self.q, row, head, self.spec.heads_q, self.spec.head_dim)
    }

    fn k_row(&self, col: usize, head: usize) -> &[A] {
        row_of(&self.k, col, head, self.spec.heads_kv, self.spec.head_dim)
    }

    fn v_row(&self, col: usize, head: usize) -> &[A] {
        row_of(&self.v, col, head, self.spec.heads_kv, self.spec.head_dim_v)
    }

    fn seen(&self, row: usize) -> impl Iterator<Item = usize> + '_ {
        self.columns[row].iter().flat_map(|range| range.start..range.end)
    }

    fn sinks(&self, head: usize) -> impl Iterator<Item = A> + '_ {
        self.sink.iter().skip(head).step_by(self.spec.heads_q).copied()
    }

    /// (score, its slope by the scaled dot product).
    fn score(&self, row: usize, col: usize, head: usize) -> (A, A) {
        let kv = head / (self.spec.heads_q / self.spec.heads_kv);
        let product = A::from_f64(self.spec.scale) * dot(self.q_row(row, head), self.k_row(col, kv));
        if self.spec.softcap > 0.0 {
            let cap = A::from_f64(self.spec.softcap);
            let tanh = A::from_f64((product / cap).to_f64().tanh());
            (cap * tanh, A::ONE - tanh * tanh)
        } else {
            (product, A::ONE)
        }
    }

    /// Gradients take `saved` as `out` where it is given.
    fn run(&self, saved: Option<Vec<f64>>) -> Reference {
        let spec = self.spec;
        let rows = self.columns.len();
        let (heads, dim_v) = (spec.heads_q, spec.head_dim_v);
        let by_head: Vec<(HeadRows<A>, f64)> =
            (0..heads).into_par_iter().map(|head| self.forward_head(head)).collect();
        let mut out = vec![A::ZERO; rows * heads * dim_v];
        let mut lse = vec![A::ZERO; rows * heads];
        let mut noise = NoiseNorms::default();
        for (head, (results, squares)) in by_head.iter().enumerate() {
            noise.out += squares;
            for row in 0..rows {
                lse[row * heads + head] = results.lse[row];
                let at = (row * heads + head) * dim_v;
                out[at..at + dim_v].copy_from_slice(&results.out[row * dim_v..(row + 1) * dim_v]);
            }
        }
        let out = self.rounded(&out);
        let saved = saved.as_ref().unwrap_or(&out);
        let gradients = self.dout.as_ref().map(|dout| self.backward(dout, saved, &lse, &mut noise));
        for norm in [&mut noise.out, &mut noise.dq, &mut noise.dk, &mut noise.dv, &mut noise.dsink] {
            *norm = norm.sqrt();
        }
        let lse = lse.iter().map(|x| x.to_f64()).collect();
        Reference { out, lse, gradients, noise }
    }

    /// All rows of one query head, and the square of `out`'s noise norm.
    fn forward_head(&self, head: usize) -> (HeadRows<A>, f64) {
        let spec = self.spec;
        let kv = head / (spec.heads_q / spec.heads_kv);
        let rows = self.columns.len();
        let mut out = vec![A::ZERO; rows * spec.head_dim_v];
        let mut lse = vec![-A::INFINITY; rows];
        let mut squares = 0.0;
        let v_squares: Vec<f64> = (0..self.seqlen_k).map(|col| square(self.v_row(col, kv))).collect();
        let mut scores = Vec::new();
        for row in 0..rows {
            scores.clear();
            scores.extend(self.seen(row).map(|col| self.score(row, col, head).0));
            let max =
                scores.iter().copied().chain(self.sinks(head)).fold(-A::INFINITY, |max, s| s.larger(max));
            if max == -A::INFINITY {
                continue;
            }
            let sum =
                scores.iter().copied().chain(self.sinks(head)).fold(A::ZERO, |sum, s| sum + exp(s - max));
            lse[row] = max + A::from_f64(sum.to_f64().ln());
            let out = &mut out[row * spec.head_dim_v..(row + 1) * spec.head_dim_v];
            for (col, &s) in self.seen(row).zip(&scores) {
                let p = exp(s - max) / sum;
                add_scaled(out, operand(p, self.round_to), self.v_row(col, kv));
                squares += p.to_f64().powi(2) * v_squares[col];
            }
        }
        (HeadRows { out, lse }, squares)
    }

    fn backward(&self, dout: &[A], out: &[f64], lse: &[A], noise: &mut NoiseNorms) -> ReferenceGradients {
        let spec = self.spec;
        let rows = self.columns.len();
        let (heads, group) = (spec.heads_q, spec.heads_q / spec.heads_kv);
        let (dim, dim_v) = (spec.head_dim, spec.head_dim_v);
        let out: Vec<A> = out.iter().map(|&x| A::from_f64(x)).collect();
        let delta: Vec<A> = (0..rows * heads)
            .map(|at| dot(&out[at * dim_v..(at + 1) * dim_v], &dout[at * dim_v..(at + 1) * dim_v]))
            .collect();

        let part_rows = rows.div_ceil(PARTS);
        let items: Vec<(usize, std::ops::Range<usize>)> = (0..spec.heads_kv)
            .flat_map(|kv| {
                (0..PARTS)
                    .map(move |part| (kv, (part * part_rows).min(rows)..((part + 1) * part_rows).min(rows)))
            })
            .collect();
        let parts: Vec<PartGradients<A>> = items
            .par_iter()
            .map(|(kv, part)| self.backward_part(*kv, part.clone(), dout, lse, &delta))
            .collect();

        let mut dq = vec![A::ZERO; self.q.len()];
        let mut dk = vec![A::ZERO; self.k.len()];
        let mut dv = vec![A::ZERO; self.v.len()];
        for ((kv, part), gradients) in items.iter().zip(&parts) {
            for (row, src) in part.clone().zip(gradients.dq.chunks_exact(group * dim)) {
                let at = (row * heads + kv * group) * dim;
                dq[at..at + group * dim].copy_from_slice(src);
            }
            for col in 0..self.seqlen_k {
                let at = (col * spec.heads_kv + kv) * dim;
                add_scaled(&mut dk[at..at + dim], A::ONE, &gradients.dk[col * dim..(col + 1) * dim]);
                let at = (col * spec.heads_kv + kv) * dim_v;
                add_scaled(&mut dv[at..at + dim_v], A::ONE, &gradients.dv[col * dim_v..(col + 1) * dim_v]);
            }
            noise.dq += gradients.noise.dq;
            noise.dk += gradients.noise.dk;
            noise.dv += gradients.noise.dv;
        }

        let dsink = (!self.sink.is_empty()).then(|| {
            let mut dsink = vec![A::ZERO; self.sink.len()];
            for (at, sum) in dsink.iter_mut().enumerate() {
                let head = at % heads;
                for row in 0..rows {
                    let here = row * heads + head;
                    if lse[here] == -A::INFINITY {
                        continue;
                    }
                    let weight = exp(self.sink[at] - lse[here]);
                    *sum += -(weight * delta[here]);
                    let slice = here * dim_v..(here + 1) * dim_v;
                    let squares = square(&dout[slice.clone()]) * square(&out[slice]) / dim_v as f64;
                    noise.dsink += weight.to_f64().powi(2) * squares;
                }
            }
            // The gradient of the sink stays in the type of the statistics.
            dsink.iter().map(|x| x.to_f64()).collect()
        });
        ReferenceGradients { dq: self.rounded(&dq), dk: self.rounded(&dk), dv: self.rounded(&dv), dsink }
    }

    /// The rows `part` of the query heads that read key head `kv`. Norms are squared.
    fn backward_part(
        &self,
        kv: usize,
        part: std::ops::Range<usize>,
        dout: &[A],
        lse: &[A],
        delta: &[A],
    ) -> PartGradients<A> {
        let spec = self.spec;
        let (heads, group) = (spec.heads_q, spec.heads_q / spec.heads_kv);
        let (dim, dim_v) = (spec.head_dim, spec.head_dim_v);
        let scale = A::from_f64(spec.scale);
        let mut dq = vec![A::ZERO; part.len() * group * dim];
        let mut dk = vec![A::ZERO; self.seqlen_k * dim];
        let mut dv = vec![A::ZERO; self.seqlen_k * dim_v];
        let mut noise = NoiseNorms::default();
        let squares: Vec<(f64, f64)> = (0..self.seqlen_k)
            .map(|col| (square(self.k_row(col, kv)), square(self.v_row(col, kv)) / dim_v as f64))
            .collect();
        for row in part.clone() {
            for head in kv * group..(kv + 1) * group {
                let at = row * heads + head;
                if lse[at] == -A::INFINITY {
                    continue;
                }
                let q = self.q_row(row, head);
                let dout = &dout[at * dim_v..(at + 1) * dim_v];
                let at_dq = ((row - part.start) * group + head - kv * group) * dim;
                let dq = &mut dq[at_dq..at_dq + dim];
                let (q_square, dout_square) = (square(q), square(dout));
                for col in self.seen(row) {
                    let (score, slope) = self.score(row, col, head);
                    let p = exp(score - lse[at]);
                    let dp = dot(dout, self.v_row(col, kv));
                    let ds_operand = match self.rounding {
                        Rounding::Operands => operand(p * (dp - delta[at]) * slope * scale, self.round_to),
                        Rounding::Kernels => {
                            let weight = operand(p * slope, DType::F16);
                            operand(weight * (dp - delta[at]), self.round_to) * scale
                        }
                    };
                    let p_operand = operand(p, self.round_to);
                    add_scaled(dq, ds_operand, self.k_row(col, kv));
                    add_scaled(&mut dk[col * dim..(col + 1) * dim], ds_operand, q);
                    add_scaled(&mut dv[col * dim_v..(col + 1) * dim_v], p_operand, dout);

                    let (k_square, v_square) = squares[col];
                    let term = (dout_square * v_square).sqrt() + delta[at].to_f64().abs();
                    let ds_square = ((p * slope * scale).to_f64() * term).powi(2);
                    noise.dq += ds_square * k_square;
                    noise.dk += ds_square * q_square;
                    noise.dv += p.to_f64().powi(2) * dout_square;
                }
            }
        }
        PartGradients { dq, dk, dv, noise }
    }

    fn rounded(&self, values: &[A]) -> Vec<f64> {
        rounded(values, self.round_to)
    }
}

/// Values rounded once to a type.
fn rounded<A: Real>(values: &[A], dtype: DType) -> Vec<f64> {
    values.iter().map(|x| round(x.to_f64(), dtype)).collect()
}

/// A value as a matrix product in `dtype` takes it.
fn operand<A: Real>(value: A, dtype: DType) -> A {
    A::from_f64(round(value.to_f64(), dtype))
}

fn round(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::Bf16 => convert::<f64, bf16>(x).to_f64(),
        DType::F16 => convert::<f64, f16>(x).to_f64(),
    }
}

/// The elements of a tensor in the type that the problem is solved in.
fn convert_all<A: HostElement>(tensor: &HostTensor) -> Vec<A> {
    with_host_element!(tensor.dtype(), T => {
        tensor.as_slice::<T>().unwrap_or(&[]).iter().map(|&x| convert(x)).collect()
    })
}

fn row_of<A>(tensor: &[A], row: usize, head: usize, heads: usize, dim: usize) -> &[A] {
    let at = (row * heads + head) * dim;
    &tensor[at..at + dim]
}

/// In a few independent sums, which is also how a compiler would like it.
fn dot<A: Real>(a: &[A], b: &[A]) -> A {
    const LANES: usize = 8;
    let mut sums = [A::ZERO; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    let rest = rest.fold(A::ZERO, |sum, (&x, &y)| sum + x * y);
    for (a, b) in a.zip(b) {
        for ((sum, &x), &y) in sums.iter_mut().zip(a).zip(b) {
            *sum += x * y;
        }
    }
    sums.into_iter().fold(rest, |sum, x| sum + x)
}

fn add_scaled<A: Real>(sum: &mut [A], factor: A, row: &[A]) {
    for (sum, &x) in sum.iter_mut().zip(row) {
        *sum += factor * x;
    }
}

fn square<A: Real>(row: &[A]) -> f64 {
    row.iter().map(|x| x.to_f64().powi(2)).sum()
}

/// The library's exponential, not the kernels' own: the reference shares no numerics with what it judges.
fn exp<A: Real>(x: A) -> A {
    A::from_f64(x.to_f64().exp())
}
