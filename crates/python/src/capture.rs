//! Calls that a graph of PyTorch's captures, and the same calls with other plans that take their place in it.

use std::convert::Infallible;

use counterpoint_cuda::{CallGraph, CapturedCall, CudaBackend, CudaError, GraphHandles, exec_error};
use counterpoint_exec::{Backend, CpuBackend, DeviceFault, ExecError};

use crate::borrow::InPlace;

/// A backend whose calls a graph may hold.
pub(crate) trait Captures: InPlace {
    /// What a call put into a graph.
    type Captured: Send + Sync;
    /// A call that was captured by itself.
    type Alone;

    /// Enqueues a call on a stream that captures.
    ///
    /// # Errors
    /// Those of `enqueue`; the device's.
    fn record_call<R>(
        &self,
        stream: &Self::Stream,
        enqueue: impl FnOnce() -> Result<R, ExecError>,
    ) -> Result<(R, Self::Captured), ExecError>;

    /// Captures a call by itself, which `enqueue` puts on `stream`.
    ///
    /// # Errors
    /// Those of `enqueue`; the device's.
    fn capture_alone(
        &self,
        stream: &Self::Stream,
        enqueue: impl FnOnce() -> Result<(), ExecError>,
    ) -> Result<Self::Alone, ExecError>;

    /// Whether two captured calls have a node in common: one of them was of a graph that is gone.
    fn share_nodes(a: &Self::Captured, b: &Self::Captured) -> bool;

    /// Whether a call is in this graph, which is alive.
    ///
    /// # Errors
    /// The device's.
    fn has_call(&self, call: &Self::Captured, graph: GraphHandles) -> Result<bool, ExecError>;

    /// Refuses a call that cannot take the place of the one that was captured.
    ///
    /// # Errors
    /// With the reason.
    fn check_call(&self, call: &Self::Captured, alone: &Self::Alone) -> Result<(), ExecError>;

    /// Has it take that place, in a graph that has the captured one ([`Captures::has_call`]).
    ///
    /// # Errors
    /// As [`Captures::check_call`]; the device's.
    fn update_call(
        &self,
        call: &Self::Captured,
        graph: GraphHandles,
        alone: &Self::Alone,
    ) -> Result<(), ExecError>;

    /// Does `work`, which is in no graph, also while another thread captures, whose capture goes on.
    ///
    /// # Errors
    /// Those of `work`; the device's.
    fn despite_captures<R>(&self, work: impl FnOnce() -> Result<R, ExecError>) -> Result<R, ExecError>;
}

/// On the CPU there are no streams, and so no captures.
impl Captures for CpuBackend {
    type Captured = Infallible;
    type Alone = Infallible;

    fn record_call<R>(
        &self,
        _stream: &Self::Stream,
        _enqueue: impl FnOnce() -> Result<R, ExecError>,
    ) -> Result<(R, Infallible), ExecError> {
        Err(no_graphs(self.rank()))
    }

    fn capture_alone(
        &self,
        _stream: &Self::Stream,
        _enqueue: impl FnOnce() -> Result<(), ExecError>,
    ) -> Result<Infallible, ExecError> {
        Err(no_graphs(self.rank()))
    }

    fn share_nodes(a: &Infallible, _b: &Infallible) -> bool {
        match *a {}
    }

    fn has_call(&self, call: &Infallible, _graph: GraphHandles) -> Result<bool, ExecError> {
        match *call {}
    }

    fn check_call(&self, call: &Infallible, _alone: &Infallible) -> Result<(), ExecError> {
        match *call {}
    }

    fn update_call(
        &self,
        call: &Infallible,
        _graph: GraphHandles,
        _alone: &Infallible,
    ) -> Result<(), ExecError> {
        match *call {}
    }

    fn despite_captures<R>(&self, work: impl FnOnce() -> Result<R, ExecError>) -> Result<R, ExecError> {
        work()
    }
}

fn no_graphs(rank: usize) -> ExecError {
    ExecError::Device { rank, place: PLACE.to_owned(), reason: DeviceFault::NoGraphs }
}

/// Where errors say that they come from.
const PLACE: &str = "a CUDA graph";

impl Captures for CudaBackend {
    type Captured = CapturedCall;
    type Alone = CallGraph;

    fn record_call<R>(
        &self,
        stream: &Self::Stream,
        enqueue: impl FnOnce() -> Result<R, ExecError>,
    ) -> Result<(R, CapturedCall), ExecError> {
        let recorded = CapturedCall::record(stream.queue(), || enqueue().map_err(Failed::Call));
        recorded.map_err(|error| error.of_rank(self.rank()))
    }

    fn capture_alone(
        &self,
        stream: &Self::Stream,
        enqueue: impl FnOnce() -> Result<(), ExecError>,
    ) -> Result<CallGraph, ExecError> {
        let captured = CallGraph::capture(stream.queue(), || enqueue().map_err(Failed::Call));
        captured.map_err(|error| error.of_rank(self.rank()))
    }

    fn share_nodes(a: &CapturedCall, b: &CapturedCall) -> bool {
        a.shares_nodes_with(b)
    }

    fn has_call(&self, call: &CapturedCall, graph: GraphHandles) -> Result<bool, ExecError> {
        call.is_in(self.device(), graph).map_err(|error| exec_error(self.rank(), PLACE, error))
    }

    fn check_call(&self, call: &CapturedCall, alone: &CallGraph) -> Result<(), ExecError> {
        call.check(alone).map_err(|error| exec_error(self.rank(), PLACE, error))
    }

    fn update_call(
        &self,
        call: &CapturedCall,
        graph: GraphHandles,
        alone: &CallGraph,
    ) -> Result<(), ExecError> {
        call.update(graph, alone).map_err(|error| exec_error(self.rank(), PLACE, error))
    }

    fn despite_captures<R>(&self, work: impl FnOnce() -> Result<R, ExecError>) -> Result<R, ExecError> {
        let done = self.device().despite_captures(|| work().map_err(Failed::Call));
        done.map_err(|error| error.of_rank(self.rank()))
    }
}

/// What ended a capture.
enum Failed {
    Call(ExecError),
    Device(CudaError),
}

impl From<CudaError> for Failed {
    fn from(error: CudaError) -> Self {
        Self::Device(error)
    }
}

impl Failed {
    fn of_rank(self, rank: usize) -> ExecError {
        match self {
            Self::Call(error) => error,
            Self::Device(error) => exec_error(rank, PLACE, error),
        }
    }
}
