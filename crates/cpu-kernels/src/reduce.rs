//! Combining what arrives. Operands of a row are combined one after the other, in the order in which they are given, in
//! one type; so the result has the same bits every time.

use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::ReduceOp;

use crate::convert::load;
use crate::element::{Accumulator, HostElement, with_host_element};
use crate::tensor::{TensorMut, TensorRef};

/// Elements converted at once: small enough for the first-level cache.
const CHUNK: usize = 2048;

/// Sets every element to the operation's identity: 0, and -inf for the logarithms of [`ReduceOp::Lse`].
pub fn set_identity(op: ReduceOp, index: usize, sums: &mut TensorMut<'_>) {
    let identity = if op == ReduceOp::Lse && index % 2 == 1 { f32::NEG_INFINITY } else { 0.0 };
    with_host_element!(sums.dtype(), R => {
        sums.as_mut_slice::<R>().unwrap_or(&mut []).fill(R::from_f32(identity));
    });
}

/// `sums[to] += operand[from]`, in the type of `sums`.
pub fn add_rows(operand: TensorRef<'_>, from: Range, wire: DType, sums: &mut TensorMut<'_>, to: Range) {
    let row = sums.row_elements();
    with_host_element!(sums.dtype(), R => {
        let mut chunk = [R::from_f32(0.0); CHUNK];
        let Some(sums) = sums.as_mut_slice::<R>() else { return };
        let mut start = from.start * row;
        for sums in sums[to.start * row..to.end * row].chunks_mut(CHUNK) {
            let terms = &mut chunk[..sums.len()];
            load(operand, start, wire, terms);
            start += terms.len();
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum = R::narrow(sum.widen() + term.widen()));
        }
    });
}

/// Divides every row by its number of operands.
pub fn divide_rows(sums: &mut TensorMut<'_>, operands: &[u32]) {
    let row = sums.row_elements();
    if row == 0 {
        return;
    }
    with_host_element!(sums.dtype(), R => {
        let sums = sums.as_mut_slice::<R>().unwrap_or(&mut []);
        for (sums, &count) in sums.chunks_exact_mut(row).zip(operands) {
            let count = <R as HostElement>::Accumulator::from_f64(f64::from(count.max(1)));
            sums.iter_mut().for_each(|sum| *sum = R::narrow(sum.widen() / count));
        }
    });
}

/// Merges rows `from` of an (out, lse) pair into rows `to` of another.
pub fn merge_rows(
    operand: (TensorRef<'_>, TensorRef<'_>),
    from: Range,
    wire: (DType, DType),
    sums: (&mut TensorMut<'_>, &mut TensorMut<'_>),
    to: Range,
) {
    let heads = sums.1.row_elements();
    if heads == 0 {
        return;
    }
    let dim = sums.0.row_elements() / heads;
    with_host_element!(sums.0.dtype(), R => {
        let (Some(out), Some(lse)) = (sums.0.as_mut_slice::<R>(), sums.1.as_mut_slice::<R>()) else { return };
        let mut other_out = vec![R::from_f32(0.0); heads * dim];
        let mut other_lse = vec![R::from_f32(0.0); heads];
        for (source, target) in (from.start..from.end).zip(to.start..to.end) {
            load(operand.0, source * heads * dim, wire.0, &mut other_out);
            load(operand.1, source * heads, wire.1, &mut other_lse);
            for head in 0..heads {
                let at = target * heads + head;
                let (merged, own, other) = merge_weights(lse[at].widen(), other_lse[head].widen());
                lse[at] = R::narrow(merged);
                let terms = &other_out[head * dim..][..dim];
                for (out, term) in out[at * dim..][..dim].iter_mut().zip(terms) {
                    *out = R::narrow(weigh(own, out.widen()) + weigh(other, term.widen()));
                }
            }
        }
    });
}

/// `logaddexp(a, b)`, and the weights of the two sides. Written as `max + ln(1 + exp(min - max))`: nothing overflows, and a
/// side with `-inf` leaves the other's bits alone. Both `-inf`: `-inf`, and both weights 0 instead of NaN.
fn merge_weights<A: Accumulator>(a: A, b: A) -> (A, A, A) {
    let (max, min) = if a > b { (a, b) } else { (b, a) };
    if max == A::from_f32(f32::NEG_INFINITY) {
        return (max, A::from_f32(0.0), A::from_f32(0.0));
    }
    let merged = max + (min - max).exp().ln_1p();
    (merged, (a - merged).exp(), (b - merged).exp())
}

/// A side of weight 0 counts for nothing, whatever it holds.
fn weigh<A: Accumulator>(weight: A, value: A) -> A {
    if weight == A::from_f32(0.0) { weight } else { weight * value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_a_merge() {
        let inf = f64::NEG_INFINITY;
        assert_eq!(merge_weights(inf, inf), (inf, 0.0, 0.0));
        assert_eq!(merge_weights(inf, 3.0), (3.0, 0.0, 1.0));
        assert_eq!(merge_weights(3.0, inf), (3.0, 1.0, 0.0));
        // Far beyond where exp overflows.
        assert_eq!(merge_weights(1e4, -1e4), (1e4, 1.0, 0.0));
        let (lse, a, b) = merge_weights(1.0, 2.0);
        assert!((lse - (1f64.exp() + 2f64.exp()).ln()).abs() < 1e-15);
        assert!((a + b - 1.0).abs() < 1e-15);
        assert_eq!(weigh(0.0, f64::NAN), 0.0);
    }
}
