//! What graphs of PyTorch's replay of a group: it is kept, and calls of one plan may become those of another.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use counterpoint_cuda::GraphHandles;
use counterpoint_exec::{Backend, DeviceFault, ExecError, Machine};
use counterpoint_schedule::{OverlapPolicy, StreamKind, StreamSpec};

use crate::capture::Captures;
use crate::engine::{Direction, Named, PassCall, Passes};

/// What graphs of one group replay.
pub(crate) struct CapturedCalls<M: Machine>
where
    M::Backend: Captures,
{
    /// Plans that were called within a capture: nobody knows how long the graph is launched.
    plans: Mutex<Vec<Arc<dyn Passes>>>,
    calls: Mutex<Vec<CapturedPass<M::Backend>>>,
    /// Where calls are captured by themselves.
    stream: OnceLock<Arc<<M::Backend as Backend>::Stream>>,
}

/// A call that a graph replays.
struct CapturedPass<B: Captures> {
    /// Whose it is now.
    passes: Arc<dyn Passes>,
    direction: Direction,
    /// Of the Program, in words: another call takes its place if it has the same.
    operations: Vec<String>,
    /// Where its tensors are. Whoever replays the graph keeps them.
    inputs: Named,
    outputs: Named,
    nodes: B::Captured,
}

/// A call by another plan.
pub(crate) struct Replaced<'a> {
    pub(crate) graph: GraphHandles,
    /// Whose calls are replaced.
    pub(crate) from: &'a Arc<dyn Passes>,
    pub(crate) to: Arc<dyn Passes>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M: Machine> Default for CapturedCalls<M>
where
    M::Backend: Captures,
{
    fn default() -> Self {
        Self { plans: Mutex::default(), calls: Mutex::default(), stream: OnceLock::new() }
    }
}

impl<M: Machine> CapturedCalls<M>
where
    M::Backend: Captures,
{
    /// A graph replays calls of this plan from now on.
    pub(crate) fn keep(&self, plan: Arc<dyn Passes>) {
        lock(&self.plans).push(plan);
    }

    /// No graph is launched any more.
    pub(crate) fn let_go(&self) {
        lock(&self.calls).clear();
        lock(&self.plans).clear();
    }

    /// Enqueues a call of `passes` on a stream that captures.
    ///
    /// # Errors
    /// Those of `enqueue`; the device's.
    pub(crate) fn record<R>(
        &self,
        (backend, stream): (&M::Backend, &<M::Backend as Backend>::Stream),
        (passes, call): (&Arc<dyn Passes>, &PassCall),
        operations: Vec<String>,
        enqueue: impl FnOnce() -> Result<R, ExecError>,
    ) -> Result<R, ExecError> {
        let (result, nodes) = backend.record_call(stream, enqueue)?;
        let places = |named: &Named| named.iter().map(|(name, tensor)| (*name, tensor.place())).collect();
        let mut calls = lock(&self.calls);
        // The driver gives the nodes of a graph that is gone to another.
        calls.retain(|other| !M::Backend::share_nodes(&other.nodes, &nodes));
        calls.push(CapturedPass {
            passes: passes.clone(),
            direction: call.direction,
            operations,
            inputs: places(&call.inputs),
            outputs: places(&call.outputs),
            nodes,
        });
        Ok(result)
    }

    /// Calls of one plan that a graph has become those of another: how many. `enqueue` puts one on the stream that it is given; `operations`
    /// are those of the new plan. Nothing has changed after an error of it, or of calls that cannot take the others' place.
    ///
    /// # Errors
    /// With the reason; those of `enqueue`; the device's.
    pub(crate) fn update(
        &self,
        backend: &M::Backend,
        replaced: Replaced<'_>,
        operations: impl Fn(Direction) -> Vec<String>,
        enqueue: impl Fn(&PassCall, &Arc<<M::Backend as Backend>::Stream>) -> Result<(), ExecError>,
    ) -> Result<usize, ExecError> {
        let Replaced { graph, from, to } = replaced;
        let stream = self.stream(backend)?;
        let is_from = |passes: &Arc<dyn Passes>| std::ptr::addr_eq(Arc::as_ptr(passes), Arc::as_ptr(from));
        let mut calls = lock(&self.calls);
        let mut ready = Vec::new();
        for (index, call) in calls.iter().enumerate().filter(|(_, call)| is_from(&call.passes)) {
            if !backend.has_call(&call.nodes, graph)? {
                continue;
            }
            let (own, new) = (&call.operations, operations(call.direction));
            if *own != new {
                let words = |names: &[_]| names.iter().map(ToString::to_string).collect();
                let reason = DeviceFault::OtherOperations { captured: words(own), new: words(&new) };
                let place = "the update of a CUDA graph".to_owned();
                return Err(ExecError::Device { rank: backend.rank(), place, reason });
            }
            let pass = call.pass();
            let alone = backend.capture_alone(&stream, || enqueue(&pass, &stream))?;
            backend.check_call(&call.nodes, &alone)?;
            ready.push((index, alone));
        }
        for (index, alone) in &ready {
            backend.update_call(&calls[*index].nodes, graph, alone)?;
            calls[*index].passes = to.clone();
        }
        Ok(ready.len())
    }

    fn stream(&self, backend: &M::Backend) -> Result<Arc<<M::Backend as Backend>::Stream>, ExecError> {
        if let Some(stream) = self.stream.get() {
            return Ok(stream.clone());
        }
        let spec = StreamSpec { name: "updates of graphs".to_owned(), kind: StreamKind::Compute };
        let made = Arc::new(backend.create_stream(&spec, &OverlapPolicy::default())?);
        Ok(self.stream.get_or_init(|| made).clone())
    }
}

impl<B: Captures> CapturedPass<B> {
    fn pass(&self) -> PassCall {
        let places = |named: &Named| named.iter().map(|(name, tensor)| (*name, tensor.place())).collect();
        let (inputs, outputs) = (places(&self.inputs), places(&self.outputs));
        PassCall { direction: self.direction, stream: 0, inputs, outputs, keeper: Arc::new(()) }
    }
}
