//! Random numbers from a seed, bit for bit the same on every machine and for any part of a tensor.

use std::f64::consts::TAU;

use counterpoint_plan::DType;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rayon::prelude::*;

use crate::element::{HostElement, with_host_element};
use crate::tensor::HostTensor;

/// A standard-normal tensor, whose numbers depend on nothing but the seed and its size. Narrow types hold the same numbers,
/// rounded.
pub fn random_tensor(shape: Vec<usize>, dtype: DType, seed: u64) -> HostTensor {
    random_stream(shape, dtype, seed, 0)
}

/// As [`random_tensor`], of a stream of the generator: tensors of one seed that differ in it have nothing in common.
pub fn random_stream(shape: Vec<usize>, dtype: DType, seed: u64, stream: u64) -> HostTensor {
    let elements = 0..shape.iter().product();
    random_parts(shape, dtype, seed, stream, [elements])
}

/// As [`random_stream`], the numbers at these places alone, one part after the other.
///
/// # Panics
/// When the parts are not as many elements as the shape has.
pub fn random_parts(
    shape: Vec<usize>,
    dtype: DType,
    seed: u64,
    stream: u64,
    parts: impl IntoIterator<Item = std::ops::Range<usize>>,
) -> HostTensor {
    with_host_element!(dtype, T => {
        let mut elements = vec![T::from_f32(0.0); shape.iter().product()];
        let mut rest = &mut elements[..];
        for part in parts {
            let (here, after) = rest.split_at_mut(part.len());
            rest = after;
            // A tensor of a long sequence has hundreds of millions; the generator can begin anywhere in its stream.
            here.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, elements)| {
                let first = part.start + chunk * CHUNK;
                // Numbers come in pairs, and a row of an odd width may begin with the second of one.
                let mut draw = Normal::starting_at(seed, stream, first - first % 2);
                if first % 2 == 1 {
                    draw.next();
                }
                elements.iter_mut().for_each(|element| *element = T::from_f64(draw.next()));
            });
        }
        HostTensor::from_vec(shape, elements)
    })
}

/// Numbers that one thread draws at once. Even, for they are drawn in pairs.
const CHUNK: usize = 1 << 16;
/// Words of the generator that a number takes: a pair takes two numbers of 64 bits.
const WORDS: u128 = 2;

/// Box and Muller's transform. Its logarithm and its sine come from `libm`, in software: the system's own differ from
/// machine to machine in the last bit.
struct Normal {
    rng: ChaCha8Rng,
    spare: Option<f64>,
}

impl Normal {
    /// The numbers of a stream from the `first` on, which must be even.
    fn starting_at(seed: u64, stream: u64, first: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        rng.set_word_pos(WORDS * first as u128);
        Self { rng, spare: None }
    }

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
    use crate::element::HostData;

    fn values(seed: u64, stream: u64, elements: usize) -> Vec<f64> {
        match random_stream(vec![elements], DType::F64, seed, stream).data() {
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

    /// Cutting the work among threads changes no number.
    #[test]
    fn chunks_are_one_stream() {
        let mut draw = Normal::starting_at(3, 2, 0);
        let expected: Vec<f64> = (0..2 * CHUNK + 5).map(|_| draw.next()).collect();
        assert_eq!(values(3, 2, expected.len()), expected);
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
