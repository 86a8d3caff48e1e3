use counterpoint_plan::DType;
use half::{bf16, f16};

/// Elements of a tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum HostData {
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// 16-bit floats.
    F16(Vec<f16>),
}

/// A dense row-major tensor in host memory; the first axis is rows (tokens).
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    shape: Vec<usize>,
    data: HostData,
}

impl HostTensor {
    /// # Panics
    /// When the number of elements is not the shape's product.
    pub fn new(shape: Vec<usize>, data: HostData) -> Self {
        let tensor = Self { shape, data };
        assert_eq!(tensor.shape.iter().product::<usize>(), tensor.len(), "shape {:?}", tensor.shape);
        tensor
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            HostData::F64(v) => v.len(),
            HostData::F32(v) => v.len(),
            HostData::Bf16(v) => v.len(),
            HostData::F16(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements.
    pub fn data(&self) -> &HostData {
        &self.data
    }

    /// Elements, to write.
    pub fn data_mut(&mut self) -> &mut HostData {
        &mut self.data
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.data {
            HostData::F64(_) => DType::F64,
            HostData::F32(_) => DType::F32,
            HostData::Bf16(_) => DType::Bf16,
            HostData::F16(_) => DType::F16,
        }
    }
}
