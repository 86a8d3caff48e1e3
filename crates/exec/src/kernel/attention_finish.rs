use rayon::ThreadPool;
use rayon::prelude::*;

use super::poison::is_log_weight;
use super::shape::{check_len, rows_of};
use super::{Element, Real};

/// Tensors of the end of a forward, as in [`counterpoint_schedule::AttentionFinish`].
pub struct FinishArgs<'a, T: Element> {
    /// Query heads.
    pub heads_q: usize,
    /// Elements of a value row of one head.
    pub head_dim_v: usize,
    /// `[q_rows, heads_q, head_dim_v]`
    pub acc: &'a [T::Accumulator],
    /// `[q_rows, heads_q]`
    pub row_max: &'a [T::Accumulator],
    /// `[q_rows, heads_q]`
    pub row_sum: &'a [T::Accumulator],
    /// `[seqlen_sink, heads_q]`
    pub sink: Option<&'a [T::Accumulator]>,
    /// `[q_rows, heads_q, head_dim_v]`, written.
    pub out: &'a mut [T],
    /// `[q_rows, heads_q]`, written.
    pub lse: &'a mut [T::Accumulator],
}

/// Normalises the state of a forward into `out` and `lse`, the sink included. A row that saw nothing gets `out = 0` and
/// `lse = -inf` (with a sink, its logsumexp).
///
/// A row whose `row_sum` is NaN (see [`attention_forward`](super::attention_forward())) gets NaN in both. So does, in its
/// head, every row when a sink is NaN or `+inf`; a sink of `-inf` is one that draws nothing.
///
/// # Panics
/// When a tensor's length does not fit the others.
pub fn attention_finish<T: Element>(args: FinishArgs<'_, T>, threads: &ThreadPool) {
    let (heads, dim) = (args.heads_q, args.head_dim_v);
    let row_elements = heads * dim;
    let rows = rows_of("acc", args.acc, row_elements);
    check_len("row_max", args.row_max, rows, heads);
    check_len("row_sum", args.row_sum, rows, heads);
    check_len("out", args.out, rows, row_elements);
    check_len("lse", args.lse, rows, heads);
    let sink = args.sink.unwrap_or(&[]);
    rows_of("sink", sink, heads);

    threads.install(|| {
        args.out
            .par_chunks_exact_mut(row_elements)
            .zip(args.lse.par_chunks_exact_mut(heads))
            .enumerate()
            .with_min_len(16)
            .for_each_init(
                || vec![T::Accumulator::ZERO; dim],
                |scaled, (row, (out, lse))| {
                    for (head, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
                        let at = row * heads + head;
                        let (max, sum) = (args.row_max[at], args.row_sum[at]);
                        let sinks = sink.iter().skip(head).step_by(heads);
                        // The exponential would make a number of it.
                        if sinks.clone().any(|&s| !is_log_weight(s)) {
                            out.fill(T::from_f32(f32::NAN));
                            *lse = T::Accumulator::NAN;
                            continue;
                        }
                        let top = sinks.clone().fold(max, |top, &s| s.larger(top));
                        if top == -T::Accumulator::INFINITY {
                            out.fill(T::from_f32(0.0));
                            *lse = -T::Accumulator::INFINITY;
                            continue;
                        }
                        let factor = (max - top).fast_exp();
                        let total = sinks.fold(sum * factor, |total, &s| total + (s - top).fast_exp());
                        *lse = top + total.ln();
                        let weight = factor / total;
                        for (scaled, &x) in scaled.iter_mut().zip(&args.acc[at * dim..(at + 1) * dim]) {
                            *scaled = x * weight;
                        }
                        T::narrow_slice(scaled, out);
                    }
                },
            );
    });
}
