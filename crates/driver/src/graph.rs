//! CUDA graphs: capturing streams, launching what was captured.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::library::call;
use crate::{CudaError, Device, GraphFault, Stream};

/// Everything that was enqueued on streams, made ready to be enqueued again by one call. Cheap to clone.
///
/// What it uses (memory, functions, tensor maps) is fixed when it is captured and must outlive it.
#[derive(Clone)]
pub struct Graph(Arc<Executable>);

struct Executable {
    device: Device,
    raw: CUgraphExec,
}

// SAFETY: executable graphs may be launched from any thread; `launch` holds no state of its own.
unsafe impl Send for Executable {}
// SAFETY: as above. Two launches of one graph run one after the other.
unsafe impl Sync for Executable {}

impl Graph {
    /// Captures what `enqueue` puts on `stream` and on the streams that it forks to by events and joins again; nothing of it
    /// runs now. If `enqueue` fails, or panics, the capture ends and the stream can be used again.
    ///
    /// # Errors
    /// Those of `enqueue`; [`CudaError::Capture`] or the driver's when what was enqueued cannot be a graph, such as a
    /// stream that was forked and not joined.
    pub fn capture<E: From<CudaError>>(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let graph = Captured::of(stream, enqueue)?;
        let driver = stream.device().bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the graph is alive; the executable is destroyed in drop.
        unsafe { call!(driver, cuGraphInstantiateWithFlags(&mut raw, graph.raw, 0)) }?;
        let executable = Executable { device: stream.device().clone(), raw };
        Ok(Self(Arc::new(executable)))
    }

    /// Moves the graph to the device now, so that the first launch is as fast as the others.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn upload(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.0.device.bind()?;
        // SAFETY: both handles are alive.
        unsafe { call!(driver, cuGraphUpload(self.0.raw, stream.raw())) }
    }

    /// Enqueues all of it on `stream`.
    ///
    /// # Safety
    /// The memory and the functions that it was captured with are alive until it has run.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let driver = self.0.device.bind()?;
        // SAFETY: both handles are alive, the rest is the caller's promise.
        unsafe { call!(driver, cuGraphLaunch(self.0.raw, stream.raw())) }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Graph({:?}, {:p})", self.0.device, self.0.raw)
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made in capture. A launch that is on its way completes first.
        self.device.release(|driver| unsafe { call!(driver, cuGraphExecDestroy(self.raw)) });
    }
}

/// A stream that captures. Dropping it ends the capture, whatever was captured.
struct Capture<'a> {
    stream: &'a Stream,
    open: bool,
}

/// What was captured, before it is made executable.
pub(crate) struct Captured {
    device: Device,
    raw: CUgraph,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, CudaError> {
        let driver = stream.device().bind()?;
        // Other threads (other ranks) may allocate and wait meanwhile; this one may not.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the handle is alive.
        unsafe { call!(driver, cuStreamBeginCapture_v2(stream.raw(), mode)) }?;
        Ok(Self { stream, open: true })
    }

    fn end(mut self) -> Result<Captured, CudaError> {
        self.close()
    }

    fn close(&mut self) -> Result<Captured, CudaError> {
        self.open = false;
        let driver = self.stream.device().bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the stream captures since begin. On an error the driver gives no graph and the capture is over.
        unsafe { call!(driver, cuStreamEndCapture(self.stream.raw(), &mut raw)) }?;
        if raw.is_null() {
            return Err(CudaError::Capture { reason: GraphFault::NoGraph });
        }
        Ok(Captured { device: self.stream.device().clone(), raw })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            // The graph, if there is one, goes with its own drop.
            let _ = self.close();
        }
    }
}

impl Captured {
    /// See [`Graph::capture`].
    pub(crate) fn of<E: From<CudaError>>(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let capture = Capture::begin(stream)?;
        let enqueued = enqueue();
        let graph = capture.end();
        enqueued?;
        Ok(graph?)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle.
    pub(crate) fn raw(&self) -> CUgraph {
        self.raw
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: given by cuStreamEndCapture; executables do not need it.
        self.device.release(|driver| unsafe { call!(driver, cuGraphDestroy(self.raw)) });
    }
}
