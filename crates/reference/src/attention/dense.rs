//! A dense problem solved row by row.

use counterpoint_cpu_kernels::Real;
use counterpoint_exec::{AttentionInputs, HostTensor};
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{AttentionSpec, DType};
use rayon::prelude::*;

use super::arithmetic::{
    add_scaled, capped, convert_all, convert_by_head, dot, exp, operand, rounded, row_of, sech_squared,
    square,
};
use super::{F32_BOUND, F64_BOUND, NoiseNorms, Reference};

/// A problem with its inputs in the type that it is solved in.
pub(super) struct Dense<'a, A> {
    pub(super) spec: &'a AttentionSpec,
    /// Unmasked columns of each query row.
    pub(super) columns: Vec<Vec<Range>>,
    pub(super) seqlen_k: usize,
    pub(super) q: Vec<A>,
    /// `[heads_kv, seqlen_k, head_dim]`: every query row reads all rows of a head, which in the order of the input lie on a page of
    /// memory each.
    pub(super) k: Vec<A>,
    /// Likewise.
    pub(super) v: Vec<A>,
    pub(super) sink: Vec<A>,
    pub(super) dout: Option<Vec<A>>,
    pub(super) dlse: Option<Vec<A>>,
    pub(super) round_to: DType,
    pub(super) rounding: Rounding,
}

/// What is rounded on the way to gradients of scores.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rounding {
    /// They alone, scaled, as a matrix product takes them.
    Operands,
    /// Weights, which wait for them in f16 whatever the type is, and they before they are scaled.
    Kernels,
}

/// Results of the rows of one query head.
struct HeadRows<A> {
    out: Vec<A>,
    lse: Vec<A>,
    max_logit: A,
}

impl<'a, A: Real> Dense<'a, A> {
    pub(super) fn new(
        mask: &Mask,
        spec: &'a AttentionSpec,
        inputs: &AttentionInputs,
        round_to: DType,
    ) -> Self {
        let (seqlen_q, seqlen_k) = (mask.seqlen_q(), mask.seqlen_k());
        fn checked<'t>(name: &str, tensor: &'t HostTensor, shape: [usize; 3]) -> &'t HostTensor {
            assert_eq!(tensor.shape(), shape, "shape of {name}");
            tensor
        }
        let (k_shape, v_shape) =
            ([seqlen_k, spec.heads_kv, spec.head_dim], [seqlen_k, spec.heads_kv, spec.head_dim_v]);
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
            q: convert_all(checked("q", &inputs.q, [seqlen_q, spec.heads_q, spec.head_dim])),
            k: convert_by_head(checked("k", &inputs.k, k_shape)),
            v: convert_by_head(checked("v", &inputs.v, v_shape)),
            sink,
            dout: inputs
                .dout
                .as_ref()
                .map(|dout| convert_all(checked("dout", dout, [seqlen_q, spec.heads_q, spec.head_dim_v]))),
            dlse: inputs.dlse.as_ref().map(|dlse| {
                assert_eq!(dlse.shape(), [seqlen_q, spec.heads_q], "shape of dlse");
                convert_all(dlse)
            }),
            round_to,
            rounding: Rounding::Operands,
        }
    }

    pub(super) fn q_row(&self, row: usize, head: usize) -> &[A] {
        row_of(&self.q, row, head, self.spec.heads_q, self.spec.head_dim)
    }

    pub(super) fn k_row(&self, col: usize, head: usize) -> &[A] {
        row_of(&self.k, head, col, self.seqlen_k, self.spec.head_dim)
    }

    pub(super) fn v_row(&self, col: usize, head: usize) -> &[A] {
        row_of(&self.v, head, col, self.seqlen_k, self.spec.head_dim_v)
    }

    pub(super) fn seen(&self, row: usize) -> impl Iterator<Item = usize> + '_ {
        self.columns[row].iter().flat_map(|range| range.start..range.end)
    }

    fn sinks(&self, head: usize) -> impl Iterator<Item = A> + '_ {
        self.sink.iter().skip(head).step_by(self.spec.heads_q).copied()
    }

    /// (score, its slope by the scaled dot product).
    pub(super) fn score(&self, row: usize, col: usize, head: usize) -> (A, A) {
        let kv = head / (self.spec.heads_q / self.spec.heads_kv);
        let product = A::from_f64(self.spec.scale) * dot(self.q_row(row, head), self.k_row(col, kv));
        if self.spec.softcap > 0.0 { capped(product, self.spec.softcap) } else { (product, A::ONE) }
    }

    /// How far rounding a pair's product moves the slope of its score under softcap, in units of the bound on relative errors: a
    /// small cap makes much of a small difference, whoever computes it.
    pub(super) fn slope_noise(&self, row: usize, col: usize, head: usize) -> f64 {
        /// Roundings of the terms that a dot product is allowed.
        const ROUNDINGS: f64 = 8.0;
        /// Smallest normal numbers that a slope may be off by: there the type ends.
        const UNDERFLOW: f64 = 4.0;
        let (unit, smallest, bound) = match self.spec.dtype {
            DType::F64 => (f64::EPSILON / 2.0, f64::MIN_POSITIVE, F64_BOUND),
            _ => (f64::from(f32::EPSILON) / 2.0, f64::from(f32::MIN_POSITIVE), F32_BOUND),
        };
        if self.spec.softcap == 0.0 {
            return 0.0;
        }
        let kv = head / (self.spec.heads_q / self.spec.heads_kv);
        let (q, k) = (self.q_row(row, head), self.k_row(col, kv));
        let squares = q.iter().zip(k).map(|(&q, &k)| (q.to_f64() * k.to_f64()).powi(2));
        let factor = (self.spec.scale / self.spec.softcap).abs();
        let at = factor * dot(q, k).to_f64().abs();
        let moved = ROUNDINGS * unit * (factor * squares.sum::<f64>().sqrt()).max(at);
        let moved = sech_squared((at - moved).max(0.0)) - sech_squared(at + moved);
        (moved + UNDERFLOW * smallest) / bound
    }

    /// Gradients take `saved` as `out` where it is given.
    pub(super) fn run(&self, saved: Option<Vec<f64>>) -> Reference {
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
        let max_logits = by_head.iter().map(|(results, _)| results.max_logit.to_f64()).collect();
        Reference { out, lse, max_logits, gradients, noise }
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
        let mut max_logit = -A::INFINITY;
        for row in 0..rows {
            scores.clear();
            scores.extend(self.seen(row).map(|col| self.score(row, col, head).0));
            max_logit = scores.iter().copied().fold(max_logit, |max, s| s.larger(max));
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
        (HeadRows { out, lse, max_logit }, squares)
    }

    pub(super) fn rounded(&self, values: &[A]) -> Vec<f64> {
        rounded(values, self.round_to)
    }
}
