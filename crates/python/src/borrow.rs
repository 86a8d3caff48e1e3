//! Tensors that Python owns, by address, shape, strides and type, as buffers of a backend; and its graphs: the only unsafe code of this crate.

use std::ops::Range;
use std::sync::Arc;

use counterpoint_cuda::{CudaBackend, CudaBuffer, CudaError, CudaStream, DeviceBuffer, GraphHandles};
use counterpoint_exec::{
    Backend, BufferAccess, CpuBackend, CpuBuffer, DeviceFault, ExecError, HostView, MemoryKeeper, TensorFault,
};
use counterpoint_plan::DType;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A tensor of PyTorch, kept alive as long as the engine may use it.
pub(crate) struct Borrowed {
    pub(crate) address: usize,
    pub(crate) shape: Vec<usize>,
    /// In elements.
    pub(crate) strides: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) keeper: MemoryKeeper,
}

/// `counterpoint.collectives.borrowed` makes them.
impl<'py> FromPyObject<'_, 'py> for Borrowed {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        type Fields<'py> = (usize, Vec<usize>, Vec<usize>, String, Bound<'py, PyAny>);
        let (address, shape, strides, dtype, tensor): Fields<'py> = object.extract()?;
        let keeper = Arc::new(tensor.unbind());
        Ok(Self { address, shape, strides, dtype: dtype_of(&dtype)?, keeper })
    }
}

/// The type that `counterpoint.collectives` names.
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

/// Its name there.
pub(crate) const fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
    }
}

impl Borrowed {
    /// The same place, which this does not keep.
    pub(crate) fn place(&self) -> Self {
        let Self { address, dtype, .. } = *self;
        let (shape, strides) = (self.shape.clone(), self.strides.clone());
        Self { address, shape, strides, dtype, keeper: Arc::new(()) }
    }

    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Address and shape of some of its rows.
    fn part(&self, name: &str, rows: &Range<usize>) -> Result<(usize, Vec<usize>), ExecError> {
        if rows.end > self.rows() || self.strides.len() != self.shape.len() {
            let (shape, strides) = (self.shape.clone(), self.strides.clone());
            return Err(ExecError::tensor(
                name,
                TensorFault::NoSuchRows { shape, strides, rows: rows.clone() },
            ));
        }
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        if shape.contains(&0) {
            return Ok((0, shape));
        }
        Ok((self.address + rows.start * self.strides[0] * self.dtype.size(), shape))
    }
}

/// A graph of PyTorch's by its handles, to be updated.
pub(crate) fn graph(graph: usize, executable: usize) -> GraphHandles {
    // SAFETY: `counterpoint.graphs.update_graph` holds PyTorch's object, whose handles these are, until the update has ended; as for
    // PyTorch's own methods of a graph, one thread at a time calls them. `CapturedCalls` keeps what the graph uses.
    #[allow(unsafe_code)]
    unsafe {
        GraphHandles::new(graph, executable)
    }
}

/// A backend that computes on tensors of PyTorch where they are.
pub(crate) trait InPlace: Backend {
    /// Some rows of a tensor.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] with the reason why they cannot be used as they lie.
    fn borrow(
        &self,
        name: &str,
        tensor: &Borrowed,
        rows: Range<usize>,
        access: BufferAccess,
    ) -> Result<Self::Buffer, ExecError>;

    /// Has a thread of PyTorch's that has not launched anything yet, such as that of its backwards, be one that has.
    fn enter(&self);

    /// PyTorch's current stream, which calls are ordered with. `None` where there are none: calls are waited for there.
    fn caller(&self, stream: u64) -> Option<Arc<Self::Stream>>;

    /// Sleeps until all that the stream was given has ended.
    ///
    /// # Errors
    /// The device's.
    fn await_end(&self, stream: &Self::Stream) -> Result<(), ExecError>;
}

impl InPlace for CpuBackend {
    fn borrow(
        &self,
        name: &str,
        tensor: &Borrowed,
        rows: Range<usize>,
        access: BufferAccess,
    ) -> Result<CpuBuffer, ExecError> {
        let (address, shape) = tensor.part(name, &rows)?;
        let keeper = tensor.keeper.clone();
        // SAFETY: address, shape and strides are those of a tensor of PyTorch, of which these rows are a part; `keeper` is a reference to
        // it, so its memory stays. Results are tensors that the package has just made and gives nobody until the call has ended; inputs
        // are those of the caller of a function that returns only then.
        #[allow(unsafe_code)]
        let view = unsafe {
            HostView::new(address as *mut u8, &shape, &tensor.strides, tensor.dtype, access, keeper)
        };
        Ok(CpuBuffer::borrowed(self.rank(), name, view?))
    }

    fn enter(&self) {}

    fn caller(&self, _stream: u64) -> Option<Arc<Self::Stream>> {
        None
    }

    fn await_end(&self, _stream: &Self::Stream) -> Result<(), ExecError> {
        Ok(())
    }
}

impl InPlace for CudaBackend {
    fn borrow(
        &self,
        name: &str,
        tensor: &Borrowed,
        rows: Range<usize>,
        _access: BufferAccess,
    ) -> Result<CudaBuffer, ExecError> {
        let (address, shape) = tensor.part(name, &rows)?;
        let strides = apart(&shape, &tensor.strides).map_err(|reason| ExecError::tensor(name, reason))?;
        let furthest: usize = match strides {
            _ if shape.contains(&0) => 0,
            None => shape.iter().product(),
            Some([row, head]) => (shape[0] - 1) * row + (shape[1] - 1) * head + shape[2],
        };
        // SAFETY: as on the CPU, these are elements of a tensor of PyTorch on this device. Its allocator gives the memory to others in the
        // order of the stream that the call is joined to, behind the call; of a call that could not be joined, the engine's owner keeps
        // the tensors (`Joined`).
        #[allow(unsafe_code)]
        let memory =
            unsafe { DeviceBuffer::borrow(self.device(), address as u64, furthest * tensor.dtype.size()) };
        let buffer = match strides {
            None => CudaBuffer::new(memory, &shape, tensor.dtype),
            Some(strides) => CudaBuffer::strided(memory, &shape, tensor.dtype, strides),
        };
        buffer.map_err(|error| unusable(name, &error))
    }

    fn enter(&self) {
        self.device().leave_current();
    }

    fn caller(&self, stream: u64) -> Option<Arc<CudaStream>> {
        // SAFETY: PyTorch's streams live as long as the process, and are of the device's primary context.
        #[allow(unsafe_code)]
        Some(unsafe { self.borrow_stream(stream as *mut _) })
    }

    fn await_end(&self, stream: &CudaStream) -> Result<(), ExecError> {
        stream.queue().synchronize().map_err(|error| device_error(self.rank(), &error))
    }
}

/// Elements from a row to the next and from a head to the next; `None` of a tensor that is dense, or that has no heads.
fn apart(shape: &[usize], strides: &[usize]) -> Result<Option<[usize; 2]>, TensorFault> {
    // What an axis of one element has for a stride says nothing.
    let dense = strides.iter().zip(shape).rev().try_fold(1, |expected, (stride, size)| {
        (*size <= 1 || *stride == expected).then_some(expected * size)
    });
    match (shape, strides) {
        _ if dense.is_some() || shape.contains(&0) => Ok(None),
        (&[rows, heads, elements], &[row, head, element]) if elements <= 1 || element == 1 => {
            let head = if heads <= 1 { elements.next_multiple_of(8) } else { head };
            let inside = (heads - 1) * head + elements;
            Ok(Some([if rows <= 1 { inside.next_multiple_of(8) } else { row }, head]))
        }
        _ => Err(TensorFault::NotContiguous { shape: shape.to_vec(), strides: strides.to_vec() }),
    }
}

fn unusable(name: &str, error: &CudaError) -> ExecError {
    ExecError::tensor(name, TensorFault::Memory { words: error.to_string() })
}

fn device_error(rank: usize, error: &CudaError) -> ExecError {
    ExecError::Device { rank, place: "PyTorch's current stream".to_owned(), reason: DeviceFault::call(error) }
}
