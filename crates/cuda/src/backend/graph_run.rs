//! Runs of Programs as CUDA graphs: captured once for all ranks of the process, replayed by one call.

use std::sync::atomic::Ordering;

use counterpoint_exec::{Backend, ExecError, Prepared, ProgramFault, Transport};

use super::pass_order::PassOrder;
use super::{CudaBackend, CudaStream};
use crate::{CudaError, Graph};

/// A whole run of one rank or of all ranks of this process as one CUDA graph: enqueued by one call, however many operations
/// it has. It computes what [`Prepared::start_ranks`] does, from the buffers that were bound when it was captured, and
/// measures nothing. Passes may follow each other in it, such as a forward and a backward.
pub struct GraphRun<'a, T: Transport<CudaBackend>> {
    // Borrowed to the end: the graph names their buffers and kernels.
    passes: Vec<&'a mut [Prepared<CudaBackend, T>]>,
    graph: Graph,
}

impl<'a, T: Transport<CudaBackend>> GraphRun<'a, T> {
    /// Captures the run of a world of one rank; see [`GraphRun::capture_passes`].
    ///
    /// # Errors
    /// As [`GraphRun::capture_passes`].
    pub fn capture(prepared: &'a mut Prepared<CudaBackend, T>) -> Result<Self, ExecError> {
        Self::capture_ranks(std::slice::from_mut(prepared))
    }

    /// Captures one run of all ranks of a world; see [`GraphRun::capture_passes`].
    ///
    /// # Errors
    /// As [`GraphRun::capture_passes`].
    pub fn capture_ranks(ranks: &'a mut [Prepared<CudaBackend, T>]) -> Result<Self, ExecError> {
        Self::capture_passes(vec![ranks])
    }

    /// Captures one run of all ranks of a world in each of several passes: a rank begins a pass when it has ended the one before.
    /// Nothing is computed now. They must have run once, so that all that is made on first use is there.
    ///
    /// # Errors
    /// [`ExecError::Program`] when passes or ranks are missing or have no stream; the driver's refusal, after which the Programs
    /// still run as before.
    pub fn capture_passes(passes: Vec<&'a mut [Prepared<CudaBackend, T>]>) -> Result<Self, ExecError> {
        let mut passes = passes;
        let whole = |ranks: &[Prepared<CudaBackend, T>]| {
            let streams = ranks.iter().all(|rank| !rank.streams().is_empty());
            ranks.first().is_some_and(|rank| rank.program().world_size == ranks.len() && streams)
        };
        if passes.is_empty() || !passes.iter().all(|ranks| whole(ranks)) {
            let program = passes.iter().find_map(|ranks| ranks.first()).map(Prepared::program);
            let (name, size) = program.map_or_else(Default::default, |p| (p.name.clone(), p.world_size));
            let held = passes.iter().map(|ranks| ranks.len()).collect();
            let reason = ProgramFault::GraphOfFewer { ranks: size, held };
            return Err(ExecError::Program { program: name, rank: 0, reason });
        }
        let order = PassOrder::new(&passes)?;
        let ranks = passes.iter().flat_map(|ranks| ranks.iter());
        let backends: Vec<CudaBackend> = ranks.map(|rank| rank.backend().clone()).collect();
        let origin = PassOrder::origin(&passes).clone();
        let capturing =
            |on| backends.iter().for_each(|backend| backend.0.capturing.store(on, Ordering::Relaxed));
        capturing(true);
        // The capture reaches other streams by events, and comes back from them by others.
        let captured =
            Graph::capture::<GraphError>(&origin, || order.enqueue(&mut passes).map_err(GraphError::Run));
        capturing(false);
        let graph = captured.map_err(|error| match error {
            GraphError::Run(error) => error,
            GraphError::Cuda(error) => backends[0].error(&"the capture of a graph", error),
        })?;
        graph.upload(&origin).map_err(|error| backends[0].error(&"a graph", error))?;
        Ok(Self { passes, graph })
    }

    fn stream(&self) -> &CudaStream {
        &self.passes[0][0].streams()[0]
    }

    /// Enqueues a run and returns at once.
    ///
    /// # Errors
    /// The world's error, when it has failed; the driver's refusal.
    pub fn start(&mut self) -> Result<(), ExecError> {
        let backend = self.passes[0][0].backend();
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
        self.passes[0][0].backend().synchronize(&[self.stream()])?;
        // All ranks are on that stream; what is left is what each asks at the end of a run.
        let mut others = self.passes.iter().flat_map(|ranks| ranks.iter()).skip(1);
        others.try_for_each(|rank| rank.backend().synchronize(&[]))
    }

    /// The first rank's Program of the first pass and its buffers.
    pub fn prepared(&self) -> &Prepared<CudaBackend, T> {
        &self.passes[0][0]
    }

    /// All ranks, pass by pass.
    pub fn passes(&self) -> &[&'a mut [Prepared<CudaBackend, T>]] {
        &self.passes
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
