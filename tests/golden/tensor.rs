//! Tensors whose elements follow from a seed alone, and digests of tensors' bytes.

use counterpoint::exec::{HostData, HostTensor};
use counterpoint::plan::DType;
use half::{bf16, f16};

use crate::case::digest;
use crate::draw::Draw;

/// What elements a tensor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elements {
    /// Any number of `[-1, 1)`: sums of products depend on their order and on fused multiply-add.
    Real,
    /// Whole numbers of `-2 ..= 2`: sums of a few hundred products are exact in any order, so on any machine.
    Whole,
}

pub(crate) fn tensor(shape: &[usize], dtype: DType, elements: Elements, seed: u64) -> HostTensor {
    let mut draw = Draw::new(seed);
    let mut value = || match elements {
        Elements::Real => draw.real(),
        Elements::Whole => draw.within(0, 4) as f64 - 2.0,
    };
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| value()).collect();
    let shape = shape.to_vec();
    match dtype {
        DType::F64 => HostTensor::from_vec(shape, values),
        DType::F32 => HostTensor::from_vec(shape, values.iter().map(|&x| x as f32).collect::<Vec<f32>>()),
        DType::Bf16 => {
            HostTensor::from_vec(shape, values.into_iter().map(bf16::from_f64).collect::<Vec<bf16>>())
        }
        DType::F16 => {
            HostTensor::from_vec(shape, values.into_iter().map(f16::from_f64).collect::<Vec<f16>>())
        }
    }
}

/// A tensor's shape, and of each row the digest of its elements' bits.
pub(crate) fn bits(name: &str, tensor: &HostTensor) -> String {
    let width = tensor.row_elements().max(1);
    let rows: Vec<String> = match tensor.data() {
        HostData::F64(all) => rows(all, width, |x| x.to_bits()),
        HostData::F32(all) => rows(all, width, |x| x.to_bits().into()),
        HostData::Bf16(all) => rows(all, width, |x| x.to_bits().into()),
        HostData::F16(all) => rows(all, width, |x| x.to_bits().into()),
    };
    let rows = rows.iter().enumerate().map(|(row, digest)| format!("{name} row {row} {digest}\n"));
    format!("{name} {:?}\n{}", tensor.shape(), rows.collect::<String>())
}

fn rows<T>(elements: &[T], width: usize, bits: impl Fn(&T) -> u64) -> Vec<String> {
    let row = |row: &[T]| row.iter().map(|x| format!("{:x} ", bits(x))).collect::<String>();
    elements.chunks(width).map(|elements| digest(&row(elements))).collect()
}
