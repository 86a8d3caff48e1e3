//! The CPU's row statistic before an attention backward, and the gradient of its sink.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::poison::{all_finite, is_log_weight};
use crate::real::{Element, Real};
use crate::score::row_sum;
use crate::shape::{check_len, rows_of};

/// Tensors of the row statistic of a backward, as in [`counterpoint_schedule::AttentionDelta`].
pub struct DeltaArgs<'a, T: Element> {
    /// Query heads.
    pub heads_q: usize,
    /// Elements of a value row of one head.
    pub head_dim_v: usize,
    /// `[q_rows, heads_q, head_dim_v]`
    pub out: &'a [T],
    /// `[q_rows, heads_q, head_dim_v]`
    pub dout: &'a [T],
    /// `[q_rows, heads_q]`
    pub lse: &'a [T::Accumulator],
    /// `[q_rows, heads_q]`: the gradient of `lse`.
    pub dlse: Option<&'a [T::Accumulator]>,
    /// `[q_rows, heads_q]`, written.
    pub delta: &'a mut [T::Accumulator],
    /// The sink and its gradient.
    pub sink: Option<SinkArgs<'a, T::Accumulator>>,
}

/// A sink and its gradient, both `[seqlen_sink, heads_q]`.
pub struct SinkArgs<'a, A> {
    /// The sink.
    pub sink: &'a [A],
    /// Its gradient from these rows, written.
    pub dsink: &'a mut [A],
}

/// Rows whose contributions to `dsink` are summed together before the sums are summed: the order is fixed whatever the
/// number of threads, and the rounding error of long sequences stays small.
const ROWS_OF_SUM: usize = 256;

/// [`attention_delta`](crate::attention_delta()) of one element type.
pub(crate) fn delta<T: Element>(args: DeltaArgs<'_, T>, threads: &ThreadPool) {
    let (heads, dim) = (args.heads_q, args.head_dim_v);
    let row_elements = heads * dim;
    let rows = rows_of("out", args.out, row_elements);
    check_len("dout", args.dout, rows, row_elements);
    check_len("lse", args.lse, rows, heads);
    check_len("delta", args.delta, rows, heads);
    if let Some(dlse) = args.dlse {
        check_len("dlse", dlse, rows, heads);
    }

    threads.install(|| {
        args.delta.par_chunks_exact_mut(heads).enumerate().with_min_len(16).for_each_init(
            || (vec![T::Accumulator::ZERO; dim], vec![T::Accumulator::ZERO; dim]),
            |(out, dout), (row, delta)| {
                for (head, delta) in delta.iter_mut().enumerate() {
                    let at = (row * heads + head) * dim;
                    T::widen_slice(&args.out[at..at + dim], out);
                    T::widen_slice(&args.dout[at..at + dim], dout);
                    let lse = args.lse[row * heads + head];
                    *delta = if !is_log_weight(lse) {
                        T::Accumulator::NAN
                    } else if all_finite(dout) {
                        for (x, &y) in out.iter_mut().zip(dout.iter()) {
                            *x *= y;
                        }
                        row_sum(out).saturate()
                    } else if out.iter().all(|&x| x == T::Accumulator::ZERO) {
                        T::Accumulator::ZERO
                    } else {
                        T::Accumulator::NAN
                    };
                    if let Some(dlse) = args.dlse.filter(|_| lse != -T::Accumulator::INFINITY) {
                        *delta = *delta - dlse[row * heads + head];
                    }
                }
            },
        );
    });

    let Some(SinkArgs { sink, dsink }) = args.sink else { return };
    let seqlen_sink = rows_of("sink", sink, heads);
    check_len("dsink", dsink, seqlen_sink, heads);
    let (lse, delta) = (args.lse, &*args.delta);
    let partial_sums: Vec<Vec<T::Accumulator>> = threads.install(|| {
        lse.par_chunks(ROWS_OF_SUM * heads)
            .zip(delta.par_chunks(ROWS_OF_SUM * heads))
            .map(|(lse, delta)| {
                let mut sums = vec![T::Accumulator::ZERO; sink.len()];
                for (lse, delta) in lse.chunks_exact(heads).zip(delta.chunks_exact(heads)) {
                    for (sums, sink) in sums.chunks_exact_mut(heads).zip(sink.chunks_exact(heads)) {
                        for (head, sum) in sums.iter_mut().enumerate() {
                            // lse = -inf only where every sink is -inf too: nothing to share out. NaN is passed on.
                            if lse[head] != -T::Accumulator::INFINITY {
                                *sum += (sink[head] - lse[head]).fast_exp() * delta[head];
                            }
                        }
                    }
                }
                sums
            })
            .collect()
    });
    dsink.fill(T::Accumulator::ZERO);
    for sums in partial_sums {
        for (total, sum) in dsink.iter_mut().zip(sums) {
            *total += -sum;
        }
    }
}
