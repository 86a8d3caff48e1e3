//! The end of the online softmax on the CPU: out and log-sum-exp of a row, sinks included.

use crate::poison::is_log_weight;
use crate::real::{Element, Real};

/// The state of one row and head at the end of a forward.
pub(crate) struct RowState<'a, R> {
    pub(crate) acc: &'a [R],
    pub(crate) max: R,
    pub(crate) sum: R,
}

/// Turns the state of one row and head into `out`, and returns its `lse`, its `sinks` included. A row that saw nothing gets
/// `out = 0` and `lse = -inf` (with a sink, its logsumexp). `scaled` is scratch, as long as `out`.
///
/// A row whose `sum` is NaN (see [`attention_forward`](crate::attention_forward())) gets NaN in both. So does one with a sink
/// that is NaN or `+inf`; a sink of `-inf` is one that draws nothing.
pub(crate) fn normalise<T: Element>(
    state: &RowState<'_, T::Accumulator>,
    sinks: impl Iterator<Item = T::Accumulator> + Clone,
    scaled: &mut [T::Accumulator],
    out: &mut [T],
) -> T::Accumulator {
    // The exponential would make a number of it.
    if sinks.clone().any(|s| !is_log_weight(s)) {
        out.fill(T::from_f32(f32::NAN));
        return T::Accumulator::NAN;
    }
    let top = sinks.clone().fold(state.max, |top, s| s.larger(top));
    if top == -T::Accumulator::INFINITY {
        out.fill(T::from_f32(0.0));
        return top;
    }
    let factor = (state.max - top).fast_exp();
    let total = sinks.fold(state.sum * factor, |total, s| total + (s - top).fast_exp());
    let weight = factor / total;
    for (scaled, &x) in scaled.iter_mut().zip(state.acc) {
        *scaled = x * weight;
    }
    T::narrow_slice(scaled, out);
    top + total.ln()
}
