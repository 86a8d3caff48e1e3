use std::sync::atomic::Ordering;
use std::time::Instant;

use counterpoint_exec::{Backend, ExecError, Prepared, Transport};

use super::{CudaBackend, CudaStream};
use crate::{CudaError, Event, Graph};

/// A whole run of a Program as one CUDA graph: enqueued by one call, however many operations it has. It computes what
/// [`Prepared::start`] does, from the buffers that were bound when it was captured, and measures nothing.
///
/// For a Program of one rank: those of several meet on the host while they enqueue.
pub struct GraphRun<'a, T: Transport<CudaBackend>> {
    // Borrowed to the end: the graph names its buffers and kernels.
    prepared: &'a mut Prepared<CudaBackend, T>,
    graph: Graph,
}

impl<'a, T: Transport<CudaBackend>> GraphRun<'a, T> {
    /// Captures a run. Nothing is computed now. The Program must have run once, so that all it makes on first use is there.
    ///
    /// # Errors
    /// [`ExecError::Program`] for one of several ranks; the driver's refusal, after which the Program still runs as before.
    pub fn capture(prepared: &'a mut Prepared<CudaBackend, T>) -> Result<Self, ExecError> {
        let program = prepared.program();
        let (name, rank, world_size) = (program.name.clone(), program.rank, program.world_size);
        if world_size > 1 || prepared.streams().is_empty() {
            let reason = format!("a graph holds the run of one rank, not of {world_size}");
            return Err(ExecError::Program { program: name, rank, reason });
        }
        let backend = prepared.backend().clone();
        let fork = backend.create_event()?;
        let joins: Vec<Event> =
            prepared.streams().iter().skip(1).map(|_| backend.create_event()).collect::<Result<_, _>>()?;
        let origin = prepared.streams()[0].queue().clone();
        backend.0.capturing.store(true, Ordering::Relaxed);
        let captured = Graph::capture::<GraphError>(&origin, || {
            // The capture reaches a stream by an event, and must come back from it by another.
            fork.record(&origin)?;
            prepared.streams()[1..].iter().try_for_each(|stream| stream.queue().wait(&fork))?;
            prepared.start(Instant::now()).map_err(GraphError::Run)?;
            for (stream, join) in prepared.streams()[1..].iter().zip(&joins) {
                join.record(stream.queue())?;
                origin.wait(join)?;
            }
            Ok(())
        });
        backend.0.capturing.store(false, Ordering::Relaxed);
        let graph = captured.map_err(|error| match error {
            GraphError::Run(error) => error,
            GraphError::Cuda(error) => backend.error(&format_args!("the capture of `{name}`"), error),
        })?;
        let run = Self { prepared, graph };
        run.graph.upload(run.stream().queue()).map_err(|error| backend.error(&"a graph", error))?;
        Ok(run)
    }

    fn stream(&self) -> &CudaStream {
        &self.prepared.streams()[0]
    }

    /// Enqueues a run and returns at once.
    ///
    /// # Errors
    /// The world's error, when it has failed; the driver's refusal.
    pub fn start(&mut self) -> Result<(), ExecError> {
        let backend = self.prepared.backend();
        backend.world().check()?;
        // SAFETY: the Program's buffers, kernels and streams live as long as it, which is borrowed; clones of bound buffers
        // are in its table.
        let launched = unsafe { self.graph.launch(self.stream().queue()) };
        launched.map_err(|error| backend.fail(backend.error(&"a graph", error)))
    }

    /// Sleeps until the runs that were started have finished.
    ///
    /// # Errors
    /// As [`Backend::synchronize`].
    pub fn finish(&mut self) -> Result<(), ExecError> {
        self.prepared.backend().synchronize(&[self.stream()])
    }

    /// The Program and its buffers.
    pub fn prepared(&self) -> &Prepared<CudaBackend, T> {
        self.prepared
    }
}

/// What ends a capture.
enum GraphError {
    Run(ExecError),
    Cuda(CudaError),
}

impl From<CudaError> for GraphError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}
