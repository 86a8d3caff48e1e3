//! Tensors that Python owns, by address, shape, strides and type: the only unsafe code of this crate.

use counterpoint_exec::{HostElement, HostTensor};
use counterpoint_plan::DType;
use half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A tensor in host memory of Python. Whoever passes one keeps its owner alive and lets no one write it until the call returns:
/// `counterpoint.ops` makes them, from tensors that the caller holds.
pub(crate) struct Borrowed {
    address: usize,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<isize>,
    dtype: DType,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Borrowed {
    type Error = PyErr;

    fn extract(object: Borrowed_<'a, 'py>) -> PyResult<Self> {
        let (address, shape, strides, dtype): (usize, Vec<usize>, Vec<isize>, String) = object.extract()?;
        let dtype = dtype_of(&dtype)?;
        if shape.is_empty() || shape.len() != strides.len() {
            let message = format!("a tensor of shape {shape:?} cannot have strides {strides:?}");
            return Err(PyValueError::new_err(message));
        }
        if !address.is_multiple_of(dtype.size()) || (address == 0 && !shape.contains(&0)) {
            return Err(PyValueError::new_err(format!(
                "no tensor of {dtype:?} lies at address {address:#x}"
            )));
        }
        Ok(Self { address, shape, strides, dtype })
    }
}

type Borrowed_<'a, 'py> = pyo3::Borrowed<'a, 'py, PyAny>;

/// The type that `counterpoint.ops` names.
pub(crate) fn dtype_of(name: &str) -> PyResult<DType> {
    match name {
        "float64" => Ok(DType::F64),
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::Bf16),
        "float16" => Ok(DType::F16),
        _ => Err(PyValueError::new_err(format!(
            "dtype is {name}; attention computes in float64, float32, bfloat16 and float16"
        ))),
    }
}

/// Runs a block with `T` the element type of `dtype`.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $T = f64;
                $body
            }
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::Bf16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
        }
    };
}

impl Borrowed {
    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.shape[0]
    }

    /// A copy of `rows`.
    pub(crate) fn read(&self, rows: std::ops::Range<usize>) -> HostTensor {
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        with_element!(self.dtype, T => {
            let mut elements = Vec::<T>::with_capacity(shape.iter().product());
            self.runs(rows, |address, length| elements.extend_from_slice(at::<T>(address, length)));
            HostTensor::from_vec(shape, elements)
        })
    }

    /// Writes a tensor of the same row shape and type at the rows from `first` on.
    pub(crate) fn write(&self, first: usize, tensor: &HostTensor) {
        assert_eq!((tensor.dtype(), &tensor.shape()[1..]), (self.dtype, &self.shape[1..]), "what is written");
        with_element!(self.dtype, T => {
            let mut rest = tensor.as_slice::<T>().unwrap_or(&[]);
            self.runs(first..first + tensor.rows(), |address, length| {
                let (run, others) = rest.split_at(length);
                at_mut::<T>(address, length).copy_from_slice(run);
                rest = others;
            });
        });
    }

    /// Visits address and number of elements of the longest contiguous runs of `rows`, in order.
    fn runs(&self, rows: std::ops::Range<usize>, mut visit: impl FnMut(usize, usize)) {
        assert!(rows.end <= self.shape[0], "rows {rows:?} of a tensor of {:?}", self.shape);
        if self.shape[1..].contains(&0) {
            return;
        }
        // The trailing axes that lie densely are one run.
        let mut dense = 1;
        let mut outer = self.shape.len();
        while outer > 1 && (self.strides[outer - 1] == dense as isize || self.shape[outer - 1] == 1) {
            outer -= 1;
            dense *= self.shape[outer];
        }
        let mut index = vec![0; outer];
        for row in rows {
            index[0] = row;
            index[1..].fill(0);
            loop {
                let offset: isize =
                    index.iter().zip(&self.strides).map(|(&at, stride)| at as isize * stride).sum();
                visit(self.address.wrapping_add_signed(offset * self.dtype.size() as isize), dense);
                let Some(axis) = (1..outer).rev().find(|&axis| index[axis] + 1 < self.shape[axis]) else {
                    break;
                };
                index[axis] += 1;
                index[axis + 1..].fill(0);
            }
        }
    }
}

#[allow(unsafe_code)]
fn at<'a, T: HostElement>(address: usize, length: usize) -> &'a [T] {
    // SAFETY: the address is one of the elements of a tensor that Python holds and nobody writes while the call runs (`Borrowed`);
    // runs lie inside it, are dense and aligned, and every bit pattern is a float.
    unsafe { std::slice::from_raw_parts(address as *const T, length) }
}

#[allow(unsafe_code)]
fn at_mut<'a, T: HostElement>(address: usize, length: usize) -> &'a mut [T] {
    // SAFETY: as above, of a result that `counterpoint.ops` has made for this call, so nobody else reads or writes it.
    unsafe { std::slice::from_raw_parts_mut(address as *mut T, length) }
}
