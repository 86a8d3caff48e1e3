//! Random inputs from a seed, bit for bit the same on every machine and for any part of the rows.

use counterpoint_cpu_kernels::{random_parts, random_stream};
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::AttentionSpec;

use crate::{AttentionInputs, Pass};

/// Standard-normal q, k, v, a sink where the spec has one, and of a pass with a backward dout, and dlse where the spec has it. Each tensor has its
/// own stream of the generator, so its numbers depend on nothing but the seed, its name and its size: not on the machine,
/// its threads, the number of ranks or on what else is drawn. Narrow types hold the same numbers, rounded.
pub fn random_inputs(mask: &Mask, spec: &AttentionSpec, seed: u64, pass: Pass) -> AttentionInputs {
    let (q_rows, k_rows) = (Range::new(0, mask.seqlen_q()), Range::new(0, mask.seqlen_k()));
    random_rows(&[q_rows], &[k_rows], spec, seed, pass)
}

/// As [`random_inputs`], of these query and key rows alone, one after the other: the same numbers, and no others are held.
pub fn random_rows(
    q_ranges: &[Range],
    k_ranges: &[Range],
    spec: &AttentionSpec,
    seed: u64,
    pass: Pass,
) -> AttentionInputs {
    let has_backward = pass == Pass::ForwardBackward;
    let tensor = |stream, ranges: &[Range], [heads, dim]: [usize; 2]| {
        let rows: usize = ranges.iter().map(Range::len).sum();
        let elements = ranges.iter().map(|range| range.start * heads * dim..range.end * heads * dim);
        random_parts(vec![rows, heads, dim], spec.dtype, seed, stream, elements)
    };
    AttentionInputs {
        q: tensor(0, q_ranges, [spec.heads_q, spec.head_dim]),
        k: tensor(1, k_ranges, [spec.heads_kv, spec.head_dim]),
        v: tensor(2, k_ranges, [spec.heads_kv, spec.head_dim_v]),
        sink: (spec.seqlen_sink > 0)
            .then(|| random_stream(vec![spec.seqlen_sink, spec.heads_q], spec.dtype.accumulator(), seed, 4)),
        dout: has_backward.then(|| tensor(3, q_ranges, [spec.heads_q, spec.head_dim_v])),
        dlse: (has_backward && spec.dlse).then(|| {
            let heads = spec.heads_q;
            let rows = q_ranges.iter().map(Range::len).sum();
            let elements = q_ranges.iter().map(|range| range.start * heads..range.end * heads);
            random_parts(vec![rows, heads], spec.dtype.accumulator(), seed, 5, elements)
        }),
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::DType;

    use super::*;
    use crate::HostTensor;

    /// A rank's rows are what it would get of the whole.
    #[test]
    fn rows_alone_are_those_of_the_whole() {
        let mask = Mask::full(50).unwrap();
        for dims in [(3, 5), (4, 8), (1, 1)] {
            let spec = AttentionSpec {
                head_dim: dims.0,
                head_dim_v: dims.1,
                ..AttentionSpec::new(3, 1, 3, DType::F32)
            };
            let whole = random_inputs(&mask, &spec, 9, Pass::ForwardBackward);
            let rows = [Range::new(3, 4), Range::new(7, 21), Range::new(40, 50)];
            let keys = [Range::new(0, 5), Range::new(6, 7)];
            let some = random_rows(&rows, &keys, &spec, 9, Pass::ForwardBackward);
            let cut = |tensor: &HostTensor, ranges: &[Range]| {
                let width = tensor.shape()[1] * tensor.shape()[2];
                let values = tensor.to_f64();
                let rows =
                    ranges.iter().flat_map(|range| values[range.start * width..range.end * width].to_vec());
                rows.collect::<Vec<f64>>()
            };
            assert_eq!(some.q.to_f64(), cut(&whole.q, &rows));
            assert_eq!(some.k.to_f64(), cut(&whole.k, &keys));
            assert_eq!(some.v.to_f64(), cut(&whole.v, &keys));
            assert_eq!(some.dout.unwrap().to_f64(), cut(&whole.dout.unwrap(), &rows));
        }
    }
}
