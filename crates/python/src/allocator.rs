//! PyTorch's caching allocator as the engine asks for memory.

use counterpoint_cuda::{AllocationError, DeviceAllocator};
use pyo3::prelude::*;

/// A tuple of three functions of Python: `allocate(bytes, stream)` gives an address, or None where there is too little; `free(address)`; `cached()` gives
/// the bytes that nobody has. The engine calls them without any lock of Python's.
#[derive(Debug, FromPyObject)]
pub(crate) struct PythonAllocator(Py<PyAny>, Py<PyAny>, Py<PyAny>);

impl DeviceAllocator for PythonAllocator {
    fn allocate(&self, bytes: usize, stream: u64) -> Result<u64, AllocationError> {
        let address = Python::try_attach(|py| self.0.call1(py, (bytes, stream))?.extract(py));
        match address {
            Some(Ok(Some(address))) => Ok(address),
            Some(Ok(None)) => Err(AllocationError::OutOfMemory),
            Some(Err(error)) => Err(AllocationError::Refused(error.to_string())),
            None => Err(AllocationError::Refused("Python is ending".to_owned())),
        }
    }

    fn free(&self, address: u64) {
        // At Python's end the memory goes with the process. There is no one to return an error to.
        let _ = Python::try_attach(|py| self.1.call1(py, (address,)).map(drop));
    }

    fn cached(&self) -> u64 {
        let bytes = Python::try_attach(|py| self.2.call0(py)?.extract(py));
        bytes.and_then(Result::ok).unwrap_or(0)
    }
}
