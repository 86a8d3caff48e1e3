use std::f64::consts::TAU;

use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType};
use half::{bf16, f16};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::{AttentionInputs, HostData, HostTensor};

/// Standard-normal q, k, v, a sink where the spec has one, and dout where the backward is asked for. Each tensor has its own stream of the generator,
/// so its numbers depend on nothing but the seed, its name and its size: not on the machine, the number of ranks or
/// on what else is drawn. Narrow types hold the same numbers, rounded.
pub fn random_inputs(mask: &Mask, spec: &AttentionSpec, seed: u64, backward: bool) -> AttentionInputs {
    let tensor = |stream, shape: [usize; 3]| normal(seed, stream, shape.to_vec(), spec.dtype);
    AttentionInputs {
        q: tensor(0, [mask.seqlen_q(), spec.heads_q, spec.head_dim]),
        k: tensor(1, [mask.seqlen_k(), spec.heads_kv, spec.head_dim]),
        v: tensor(2, [mask.seqlen_k(), spec.heads_kv, spec.head_dim_v]),
        sink: (spec.seqlen_sink > 0)
            .then(|| normal(seed, 4, vec![spec.seqlen_sink, spec.heads_q], spec.dtype.accumulator())),
        dout: backward.then(|| tensor(3, [mask.seqlen_q(), spec.heads_q, spec.head_dim_v])),
    }
}

fn normal(seed: u64, stream: u64, shape: Vec<usize>, dtype: DType) -> HostTensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let elements: usize = shape.iter().product();
    let mut draw = Normal { rng, spare: None };
    let data = match dtype {
        DType::F64 => HostData::F64((0..elements).map(|_| draw.next()).collect()),
        DType::F32 => HostData::F32((0..elements).map(|_| draw.next() as f32).collect()),
        DType::Bf16 => HostData::Bf16((0..elements).map(|_| bf16::from_f64(draw.next())).collect()),
        DType::F16 => HostData::F16((0..elements).map(|_| f16::from_f64(draw.next())).collect()),
    };
    HostTensor::new(shape, data)
}

/// Box and Muller's transform. Its logarithm and its sine come from `libm`, in software: the system's own differ from
/// machine to machine in the last bit.
struct Normal {
    rng: ChaCha8Rng,
    spare: Option<f64>,
}

impl Normal {
    fn next(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        let radius = (-2.0 * libm::log(self.uniform())).sqrt();
        let (sin, cos) = libm::sincos(TAU * self.uniform());
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Uniform in (0, 1], with 53 random bits.
    fn uniform(&mut self) -> f64 {
        ((self.rng.next_u64() >> 11) + 1) as f64 * 2f64.powi(-53)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: u64, stream: u64, elements: usize) -> Vec<f64> {
        match normal(seed, stream, vec![elements], DType::F64).data() {
            HostData::F64(values) => values.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// Bits that must not change: results that people compare across versions rest on them.
    #[test]
    fn known_bits() {
        let bits: Vec<u64> = values(7, 1, 4).into_iter().map(f64::to_bits).collect();
        assert_eq!(
            bits,
            [4593695889341019057, 4574899159507359745, 13828710088146973633, 13817652958610680049]
        );
    }

    #[test]
    fn normal_and_independent_of_length_and_stream() {
        let long = values(0, 0, 100_000);
        assert_eq!(long[..999], values(0, 0, 999));
        assert_ne!(long[..10], values(0, 1, 10));
        assert_ne!(long[..10], values(1, 0, 10));
        let moment = |power: i32| long.iter().map(|x| x.powi(power)).sum::<f64>() / long.len() as f64;
        // Four standard errors of each sample moment.
        assert!(moment(1).abs() < 4.0 * (1.0 / 1e5f64).sqrt());
        assert!((moment(2) - 1.0).abs() < 4.0 * (2.0 / 1e5f64).sqrt());
        assert!(moment(3).abs() < 4.0 * (15.0 / 1e5f64).sqrt());
        assert!((moment(4) - 3.0).abs() < 4.0 * (96.0 / 1e5f64).sqrt());
        let far = long.iter().filter(|x| x.abs() > 3.0).count();
        assert!((200..350).contains(&far), "{far}"); // 270 expected
    }
}
