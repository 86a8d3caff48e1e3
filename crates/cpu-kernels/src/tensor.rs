//! Tensors in host memory: owned, and borrowed by operations.

use std::ops::Range;

use counterpoint_plan::DType;
use half::{bf16, f16};

use crate::element::HostElement;
use crate::element::{HostData, with_host_element};

/// A dense row-major tensor in host memory; the first axis is rows (tokens).
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    shape: Vec<usize>,
    data: HostData,
}

impl HostTensor {
    /// # Panics
    /// When the number of elements is not the shape's product, or the shape has no axis.
    pub fn new(shape: Vec<usize>, data: HostData) -> Self {
        let tensor = Self { shape, data };
        assert!(!tensor.shape.is_empty(), "a tensor has a row axis at least");
        assert_eq!(tensor.shape.iter().product::<usize>(), tensor.len(), "shape {:?}", tensor.shape);
        tensor
    }

    /// A tensor of the elements' type.
    ///
    /// # Panics
    /// As [`HostTensor::new`].
    pub fn from_vec<T: HostElement>(shape: Vec<usize>, elements: Vec<T>) -> Self {
        Self::new(shape, T::wrap(elements))
    }

    /// All zeros.
    ///
    /// # Panics
    /// When the shape has no axis.
    pub fn zeros(shape: Vec<usize>, dtype: DType) -> Self {
        let len = shape.iter().product();
        with_host_element!(dtype, T => Self::from_vec(shape, vec![T::from_f32(0.0); len]))
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

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn row_elements(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Elements.
    pub fn data(&self) -> &HostData {
        &self.data
    }

    /// Elements, to write.
    pub fn data_mut(&mut self) -> &mut HostData {
        &mut self.data
    }

    /// The elements, when they are of type `T`.
    pub fn as_slice<T: HostElement>(&self) -> Option<&[T]> {
        T::slice(&self.data)
    }

    /// The elements, to write, when they are of type `T`.
    pub fn as_mut_slice<T: HostElement>(&mut self) -> Option<&mut [T]> {
        T::slice_mut(&mut self.data)
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

    /// Every element as f64, exactly.
    pub fn to_f64(&self) -> Vec<f64> {
        with_host_element!(self.dtype(), T => {
            self.as_slice::<T>().unwrap_or(&[]).iter().map(|element| element.to_f64()).collect()
        })
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// When it does not have them.
    pub fn some_rows(&self, rows: Range<usize>) -> Self {
        let row = self.row_elements();
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        with_host_element!(self.dtype(), T => {
            let elements = self.as_slice::<T>().unwrap_or(&[]);
            Self::from_vec(shape, elements[rows.start * row..rows.end * row].to_vec())
        })
    }

    /// A tensor of this shape whose elements are these, again and again.
    ///
    /// # Panics
    /// When there is no element and the shape has some, or it has no axis.
    pub fn repeated(&self, shape: &[usize]) -> Self {
        let count = shape.iter().product();
        with_host_element!(self.dtype(), T => {
            let elements = self.as_slice::<T>().unwrap_or(&[]);
            let mut repeated = Vec::with_capacity(count);
            while repeated.len() < count {
                let left = count - repeated.len();
                repeated.extend_from_slice(&elements[..left.min(elements.len())]);
                assert!(!elements.is_empty(), "nothing repeats");
            }
            Self::from_vec(shape.to_vec(), repeated)
        })
    }

    /// To read.
    pub fn view(&self) -> TensorRef<'_> {
        TensorRef { shape: &self.shape, dtype: self.dtype(), bytes: self.bytes() }
    }

    /// To read and write.
    pub fn view_mut(&mut self) -> TensorMut<'_> {
        let dtype = self.dtype();
        let bytes = with_host_element!(dtype, T => match T::slice_mut(&mut self.data) {
            Some(elements) => bytemuck::cast_slice_mut(elements),
            None => &mut [],
        });
        TensorMut { shape: &self.shape, dtype, bytes }
    }

    /// The elements as they lie in memory.
    pub fn bytes(&self) -> &[u8] {
        with_host_element!(self.dtype(), T => bytemuck::cast_slice(self.as_slice::<T>().unwrap_or(&[])))
    }

    /// The inverse of [`HostTensor::bytes`], on a machine of the same byte order.
    ///
    /// # Panics
    /// As [`HostTensor::new`].
    pub fn from_bytes(shape: Vec<usize>, dtype: DType, bytes: &[u8]) -> Self {
        with_host_element!(dtype, T => Self::from_vec::<T>(shape, bytemuck::pod_collect_to_vec(bytes)))
    }

    /// Gives it another shape and type; contents arbitrary. Memory that is long enough is kept.
    pub fn reshape(&mut self, shape: &[usize], dtype: DType) {
        if dtype != self.dtype() {
            *self = Self::zeros(shape.to_vec(), dtype);
            return;
        }
        let len = shape.iter().product();
        self.shape = shape.to_vec();
        match &mut self.data {
            HostData::F64(v) => v.resize(len, 0.0),
            HostData::F32(v) => v.resize(len, 0.0),
            HostData::Bf16(v) => v.resize(len, bf16::ZERO),
            HostData::F16(v) => v.resize(len, f16::ZERO),
        }
    }
}

/// A dense tensor in host memory that an operation reads, whoever owns it.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    shape: &'a [usize],
    dtype: DType,
    bytes: &'a [u8],
}

impl<'a> TensorRef<'a> {
    /// Elements of this type and shape, as they lie in memory.
    pub fn new(shape: &'a [usize], dtype: DType, bytes: &'a [u8]) -> Self {
        debug_assert_eq!(bytes.len(), shape.iter().product::<usize>() * dtype.size());
        Self { shape, dtype, bytes }
    }

    /// Shape; the first axis is rows (tokens).
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn row_elements(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The elements as they lie in memory.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements, when they are of type `T`.
    pub fn as_slice<T: HostElement>(&self) -> Option<&'a [T]> {
        if T::DTYPE == self.dtype { bytemuck::try_cast_slice(self.bytes).ok() } else { None }
    }

    /// A copy of its own.
    pub fn to_tensor(&self) -> HostTensor {
        HostTensor::from_bytes(self.shape.to_vec(), self.dtype, self.bytes)
    }
}

/// A dense tensor in host memory that an operation writes, whoever owns it.
#[derive(Debug)]
pub struct TensorMut<'a> {
    shape: &'a [usize],
    dtype: DType,
    bytes: &'a mut [u8],
}

impl<'a> TensorMut<'a> {
    /// Elements of this type and shape, as they lie in memory.
    pub fn new(shape: &'a [usize], dtype: DType, bytes: &'a mut [u8]) -> Self {
        debug_assert_eq!(bytes.len(), shape.iter().product::<usize>() * dtype.size());
        Self { shape, dtype, bytes }
    }

    /// Shape; the first axis is rows (tokens).
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    pub fn row_elements(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// To read.
    pub fn view(&self) -> TensorRef<'_> {
        TensorRef { shape: self.shape, dtype: self.dtype, bytes: self.bytes }
    }

    /// The same for a shorter time.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut { shape: self.shape, dtype: self.dtype, bytes: self.bytes }
    }

    /// The elements, to write, when they are of type `T`.
    pub fn as_mut_slice<T: HostElement>(&mut self) -> Option<&mut [T]> {
        if T::DTYPE == self.dtype { bytemuck::try_cast_slice_mut(self.bytes).ok() } else { None }
    }

    /// Likewise, for as long as the tensor is borrowed.
    pub fn into_slice<T: HostElement>(self) -> Option<&'a mut [T]> {
        if T::DTYPE == self.dtype { bytemuck::try_cast_slice_mut(self.bytes).ok() } else { None }
    }

    /// The elements as they lie in memory.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// NaN everywhere.
    pub fn fill_nan(&mut self) {
        with_host_element!(self.dtype, T => {
            self.as_mut_slice::<T>().unwrap_or(&mut []).fill(T::from_f32(f32::NAN));
        });
    }
}
