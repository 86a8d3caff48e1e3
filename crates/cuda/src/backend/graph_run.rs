use std::sync::atomic::Ordering;
use std::time::Instant;

use counterpoint_exec::{Backend, ExecError, Prepared, Transport};

use super::{CudaBackend, CudaStream};
use crate::{CudaError, Event, Graph, Stream};

/// A whole run of one rank or of all ranks of this process as one CUDA graph: enqueued by one call, however many operations
/// it has. It computes what [`Prepared::start_ranks`] does, from the buffers that were bound when it was captured, and
/// measures nothing.
pub struct GraphRun<'a, T: Transport<CudaBackend>> {
    // Borrowed to the end: the graph names their buffers and kernels.
    ranks: &'a mut [Prepared<CudaBackend, T>],
    graph: Graph,
}

impl<'a, T: Transport<CudaBackend>> GraphRun<'a, T> {
    /// Captures the run of a world of one rank; see [`GraphRun::capture_ranks`].
    ///
    /// # Errors
    /// As [`GraphRun::capture_ranks`].
    pub fn capture(prepared: &'a mut Prepared<CudaBackend, T>) -> Result<Self, ExecError> {
        Self::capture_ranks(std::slice::from_mut(prepared))
    }

    /// Captures one run of all ranks of a world. Nothing is computed now. They must have run once, so that all that is made on
    /// first use is there.
    ///
    /// # Errors
    /// [`ExecError::Program`] when ranks are missing or have no stream; the driver's refusal, after which the Programs still
    /// run as before.
    pub fn capture_ranks(ranks: &'a mut [Prepared<CudaBackend, T>]) -> Result<Self, ExecError> {
        let whole = |ranks: &[Prepared<CudaBackend, T>]| {
            let program = ranks.first()?.program();
            let streams = ranks.iter().all(|rank| !rank.streams().is_empty());
            (program.world_size == ranks.len() && streams).then_some(())
        };
        if whole(ranks).is_none() {
            let program = ranks.first().map(Prepared::program);
            let (name, size) = program.map_or_else(Default::default, |p| (p.name.clone(), p.world_size));
            let reason =
                format!("a graph holds all {size} ranks with a stream each, not {} of them", ranks.len());
            return Err(ExecError::Program { program: name, rank: 0, reason });
        }
        let backends: Vec<CudaBackend> = ranks.iter().map(|rank| rank.backend().clone()).collect();
        let streams: Vec<Stream> =
            ranks.iter().flat_map(|rank| rank.streams()).map(|stream| stream.queue().clone()).collect();
        let fork = backends[0].create_event()?;
        let joins: Vec<Event> =
            streams.iter().skip(1).map(|_| backends[0].create_event()).collect::<Result<_, _>>()?;
        let capturing =
            |on| backends.iter().for_each(|backend| backend.0.capturing.store(on, Ordering::Relaxed));
        capturing(true);
        let captured = Graph::capture::<GraphError>(&streams[0], || {
            // The capture reaches a stream by an event, and must come back from it by another.
            fork.record(&streams[0])?;
            streams[1..].iter().try_for_each(|stream| stream.wait(&fork))?;
            Prepared::start_ranks(ranks, Instant::now()).map_err(GraphError::Run)?;
            for (stream, join) in streams[1..].iter().zip(&joins) {
                join.record(stream)?;
                streams[0].wait(join)?;
            }
            Ok(())
        });
        capturing(false);
        let graph = captured.map_err(|error| match error {
            GraphError::Run(error) => error,
            GraphError::Cuda(error) => backends[0].error(&"the capture of a graph", error),
        })?;
        graph.upload(&streams[0]).map_err(|error| backends[0].error(&"a graph", error))?;
        Ok(Self { ranks, graph })
    }

    fn stream(&self) -> &CudaStream {
        &self.ranks[0].streams()[0]
    }

    /// Enqueues a run and returns at once.
    ///
    /// # Errors
    /// The world's error, when it has failed; the driver's refusal.
    pub fn start(&mut self) -> Result<(), ExecError> {
        let backend = self.ranks[0].backend();
        backend.world().check()?;
        // SAFETY: the Programs' buffers, kernels and streams live as long as they, which are borrowed; clones of bound buffers
        // are in their tables.
        let launched = unsafe { self.graph.launch(self.stream().queue()) };
        launched.map_err(|error| backend.fail(backend.error(&"a graph", error)))
    }

    /// Sleeps until the runs that were started have finished.
    ///
    /// # Errors
    /// As [`Backend::synchronize`].
    pub fn finish(&mut self) -> Result<(), ExecError> {
        self.ranks[0].backend().synchronize(&[self.stream()])?;
        // All ranks are on that stream; what is left is what each asks at the end of a run.
        self.ranks[1..].iter().try_for_each(|rank| rank.backend().synchronize(&[]))
    }

    /// The first rank's Program and its buffers.
    pub fn prepared(&self) -> &Prepared<CudaBackend, T> {
        &self.ranks[0]
    }

    /// All ranks.
    pub fn ranks(&self) -> &[Prepared<CudaBackend, T>] {
        self.ranks
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
