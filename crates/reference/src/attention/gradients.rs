//! Gradients of a dense problem.

use std::ops::Range;

use counterpoint_cpu_kernels::Real;
use counterpoint_plan::DType;
use rayon::prelude::*;

use super::arithmetic::{add_scaled, dot, exp, operand, square};
use super::dense::{Dense, Rounding};
use super::{NoiseNorms, PARTS, ReferenceGradients};

/// Gradients from the rows of one part, for one key head and the query heads that read it.
struct PartGradients<A> {
    dq: Vec<A>,
    dk: Vec<A>,
    dv: Vec<A>,
    noise: NoiseNorms,
}

impl<A: Real> Dense<'_, A> {
    pub(super) fn backward(
        &self,
        dout: &[A],
        out: &[f64],
        lse: &[A],
        noise: &mut NoiseNorms,
    ) -> ReferenceGradients {
        let spec = self.spec;
        let rows = self.columns.len();
        let (heads, group) = (spec.heads_q, spec.heads_q / spec.heads_kv);
        let (dim, dim_v) = (spec.head_dim, spec.head_dim_v);
        let out: Vec<A> = out.iter().map(|&x| A::from_f64(x)).collect();
        let delta: Vec<A> = (0..rows * heads)
            .map(|at| {
                let of_out = dot(&out[at * dim_v..(at + 1) * dim_v], &dout[at * dim_v..(at + 1) * dim_v]);
                of_out - self.dlse.as_ref().map_or(A::ZERO, |dlse| dlse[at])
            })
            .collect();

        let part_rows = rows.div_ceil(PARTS);
        let items: Vec<(usize, Range<usize>)> = (0..spec.heads_kv)
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
                    let own = self.dlse.as_ref().map_or(0.0, |dlse| dlse[here].to_f64().powi(2));
                    let squares = square(&dout[slice.clone()]) * square(&out[slice]) / dim_v as f64 + own;
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
        part: Range<usize>,
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
                    let slope_square = slope.to_f64().powi(2) + self.slope_noise(row, col, head).powi(2);
                    let ds_square = ((p * scale).to_f64() * term).powi(2) * slope_square;
                    noise.dq += ds_square * k_square;
                    noise.dk += ds_square * q_square;
                    noise.dv += p.to_f64().powi(2) * dout_square;
                }
            }
        }
        PartGradients { dq, dk, dv, noise }
    }
}
