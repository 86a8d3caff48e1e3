//! The ends of hosted rows on the CPU: a state as a partial result to be merged, merged ones as results.

use counterpoint_mask::Range;
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::normalise::{RowState, normalise};
use crate::real::{Element, Real};
use crate::shape::{check_len, rows_of};

/// [`attention_partial`](crate::attention_partial()) of one type.
pub(crate) fn partial<R: Real>(
    out: &mut [R],
    lse: &mut [R],
    row_sum: &[R],
    head_dim_v: usize,
    threads: &ThreadPool,
) {
    check_len("out", out, row_sum.len(), head_dim_v);
    check_len("lse", lse, row_sum.len(), 1);
    let entries = out.par_chunks_mut(head_dim_v).zip(lse.par_iter_mut().zip(row_sum));
    let scratch = || (vec![R::ZERO; head_dim_v], vec![R::ZERO; head_dim_v]);
    threads.install(|| {
        entries.for_each_init(scratch, |(acc, scaled), (out, (lse, &sum))| {
            acc.copy_from_slice(out);
            *lse = normalise(&RowState { acc, max: *lse, sum }, std::iter::empty(), scaled, out);
        });
    });
}

/// Tensors of [`attention_finish`](crate::attention_finish()), as in [`counterpoint_schedule::AttentionFinish`].
pub struct FinishArgs<'a, T: Element> {
    /// Query heads.
    pub heads_q: usize,
    /// Elements of a value row of one head.
    pub head_dim_v: usize,
    /// `[rows, heads_q, head_dim_v]`
    pub merged_out: &'a [T::Accumulator],
    /// `[rows, heads_q]`
    pub merged_lse: &'a [T::Accumulator],
    /// `[seqlen_sink, heads_q]`
    pub sink: &'a [T::Accumulator],
    /// Rows of `out` and `lse`, as many as there are merged ones.
    pub rows: &'a [Range],
    /// `[q_rows, heads_q, head_dim_v]`
    pub out: &'a mut [T],
    /// `[q_rows, heads_q]`
    pub lse: &'a mut [T::Accumulator],
}

/// [`attention_finish`](crate::attention_finish()) of one element type.
pub(crate) fn finish<T: Element>(args: FinishArgs<'_, T>, threads: &ThreadPool) {
    let FinishArgs { heads_q, head_dim_v, merged_out, merged_lse, sink, rows, out, lse } = args;
    let merged_rows = rows_of("merged_lse", merged_lse, heads_q);
    check_len("merged_out", merged_out, merged_rows, heads_q * head_dim_v);
    let mut merged = merged_out.chunks_exact(heads_q * head_dim_v).zip(merged_lse.chunks_exact(heads_q));
    let mut entries = Vec::with_capacity(merged_rows);
    let mut targets = out.chunks_exact_mut(heads_q * head_dim_v).zip(lse.chunks_exact_mut(heads_q));
    let mut next = 0;
    for range in rows {
        let here = targets.by_ref().skip(range.start - next).take(range.len());
        entries.extend(here.zip(merged.by_ref().take(range.len())));
        next = range.end;
    }
    threads.install(|| {
        let scratch = || vec![T::Accumulator::ZERO; head_dim_v];
        entries.into_par_iter().for_each_init(scratch, |scaled, ((out, lse), (merged_out, merged_lse))| {
            let merged = merged_out.chunks_exact(head_dim_v).zip(merged_lse);
            let results = out.chunks_exact_mut(head_dim_v).zip(lse);
            for (head, ((acc, &weight), (out, lse))) in merged.zip(results).enumerate() {
                let sinks = sink.iter().skip(head).step_by(heads_q).copied();
                // Merged results are a state whose sum is 1. NaN has to come from the sum; comparisons would lose it.
                let (max, sum) = match weight.partial_cmp(&weight) {
                    Some(_) => (weight, T::Accumulator::ONE),
                    None => (T::Accumulator::ZERO, T::Accumulator::NAN),
                };
                *lse = normalise(&RowState { acc, max, sum }, sinks, scaled, out);
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads() -> ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap()
    }

    /// One row and head of each kind: seen, unseen, poisoned.
    #[test]
    fn a_state_becomes_a_partial_result_in_place() {
        let mut out = [2.0_f32, 4.0, 0.0, 0.0, 1.0, 1.0];
        let mut lse = [1.0, f32::NEG_INFINITY, 0.0];
        partial(&mut out, &mut lse, &[2.0, 0.0, f32::NAN], 2, &threads());
        assert_eq!(out[..4], [1.0, 2.0, 0.0, 0.0]);
        assert_eq!(lse[..2], [1.0 + 2.0_f32.ln(), f32::NEG_INFINITY]);
        assert!(out[4].is_nan() && lse[2].is_nan());
    }

    #[test]
    fn merged_rows_are_put_in_their_places_with_the_sink() {
        let merged_out = [3.0_f64, 5.0, 7.0];
        let merged_lse = [0.0, f64::NEG_INFINITY, f64::NAN];
        let run = |sink: &[f64]| {
            let (mut out, mut lse) = ([-1.0_f64; 5], [-1.0_f64; 5]);
            let args = FinishArgs {
                heads_q: 1,
                head_dim_v: 1,
                merged_out: &merged_out,
                merged_lse: &merged_lse,
                sink,
                rows: &[Range::new(0, 1), Range::new(2, 4)],
                out: &mut out,
                lse: &mut lse,
            };
            finish(args, &threads());
            (out, lse)
        };
        let (out, lse) = run(&[]);
        assert_eq!((out[0], lse[0], out[2], lse[2]), (3.0, 0.0, 0.0, f64::NEG_INFINITY));
        assert!(out[3].is_nan() && lse[3].is_nan());
        assert_eq!((out[1], lse[1], out[4], lse[4]), (-1.0, -1.0, -1.0, -1.0), "rows that are not named");
        let (out, lse) = run(&[0.0]);
        assert_eq!((out[0], out[2], lse[2]), (1.5, 0.0, 0.0));
        assert!((lse[0] - 2.0_f64.ln()).abs() < 1e-15 && out[3].is_nan());
    }
}
