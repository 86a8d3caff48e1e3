//! Tensors that Python owns, by address, shape, strides and type: the only unsafe code of this crate.

use std::ops::Range;
use std::sync::Arc;

use counterpoint_exec::{BufferAccess, ExecError, HostView, MemoryKeeper};
use counterpoint_plan::DType;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A tensor in host memory of Python, kept alive as long as the engine may use it. `counterpoint.rows.borrowed` makes them.
pub(crate) struct Borrowed {
    address: usize,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
    dtype: DType,
    keeper: MemoryKeeper,
}

impl<'py> FromPyObject<'_, 'py> for Borrowed {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        type Fields<'py> = (usize, Vec<usize>, Vec<usize>, String, Bound<'py, PyAny>);
        let (address, shape, strides, dtype, tensor): Fields<'py> = object.extract()?;
        let keeper = Arc::new(tensor.unbind());
        Ok(Self { address, shape, strides, dtype: dtype_of(&dtype)?, keeper })
    }
}

/// The type that `counterpoint.rows` names.
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

impl Borrowed {
    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Shape.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Some of its rows, for the engine.
    ///
    /// # Errors
    /// As [`HostView::new`]; when it does not have the rows.
    pub(crate) fn view(&self, rows: Range<usize>, access: BufferAccess) -> Result<HostView, ExecError> {
        if rows.end > self.rows() || self.strides.len() != self.shape.len() {
            let reason = format!("{:?} with strides {:?} has no rows {rows:?}", self.shape, self.strides);
            return Err(ExecError::Tensor { name: "borrowed memory".to_owned(), reason });
        }
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        let address = (self.address + rows.start * self.strides[0] * self.dtype.size()) as *mut u8;
        // SAFETY: address, shape and strides are those of a tensor of PyTorch, of which these rows are a part; `keeper` is a reference to
        // it, so its memory stays. Results are tensors that the package has just made and gives nobody until the call has ended; inputs
        // are those of the caller of a function that returns only then.
        #[allow(unsafe_code)]
        unsafe {
            HostView::new(address, &shape, &self.strides, self.dtype, access, self.keeper.clone())
        }
    }
}
