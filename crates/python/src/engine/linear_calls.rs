//! Linear layers and layers of experts of the ranks in this process, on tensors of Python.

use counterpoint_exec::{
    ExecError, ExpertLayer, ExpertPasses, Group, LayerCall, Machine, MemoryKeeper, Ticket,
};

use super::{CallerStream, Joined};
use crate::capture::Captures;
use crate::experts::{ExpertCall, ExpertEngine, ExpertKey};
use crate::linear::{self, LayerKey, LinearCall, LinearEngine, ReadyLayer, RunPass, WantedTensor};

impl<M> Joined<M>
where
    M: Machine,
    M::Backend: Captures,
{
    /// Enqueues a call of a layer behind what the caller's stream was given, and waits for it where nothing else does. Where a graph of the
    /// caller captures it, the layer is to `stay` before.
    pub(super) fn call_layer(
        &self,
        stream: u64,
        keepers: impl Iterator<Item = MemoryKeeper>,
        stay: impl FnOnce(),
        enqueue: impl FnOnce(Option<&[&CallerStream<M>]>) -> Result<Vec<Ticket<M::Backend>>, ExecError>,
    ) -> Result<(), ExecError> {
        self.group.poll()?;
        let streams = self.callers(stream);
        if self.captures(streams.as_deref())? {
            stay();
        }
        let callers: Option<Vec<_>> = streams.as_ref().map(|streams| streams.iter().collect());
        let _one = self.calling.take();
        let tickets = enqueue(callers.as_deref());
        let called = tickets.and_then(|tickets| self.ended(&tickets, streams.as_deref()));
        self.reported(called, keepers)
    }
}

impl<M> LinearEngine for Joined<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
    ReadyLayer<M>: Send,
{
    fn call(&self, call: &LinearCall) -> Result<(), ExecError> {
        let keepers = call.tensors.iter().map(|(_, tensor)| tensor.keeper.clone());
        let stay = || self.layers.keep(&call.key);
        self.call_layer(call.stream, keepers, stay, |callers| {
            let enqueue = |layer: &mut _| linear::enqueue(&self.group, layer, call, callers);
            self.layers.with(&self.group, &call.key, enqueue)
        })
    }

    fn tensors(&self, key: &LayerKey, call: LayerCall) -> Result<Vec<WantedTensor>, ExecError> {
        self.layers.with(&self.group, key, |layer| linear::tensors(layer, call))
    }

    fn passes(&self, key: &LayerKey) -> Result<[RunPass; 2], ExecError> {
        self.layers.with(&self.group, key, |layer| Ok(layer.passes()))
    }
}

impl<M> ExpertEngine for Joined<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
    ExpertLayer<M>: Send,
{
    fn call(&self, call: &ExpertCall) -> Result<(), ExecError> {
        let keepers = call.tensors.iter().map(|(_, tensor)| tensor.keeper.clone());
        let stay = || self.experts.keep(call);
        let enqueue = |callers: Option<&[&CallerStream<M>]>| self.experts.enqueue(&self.group, call, callers);
        self.call_layer(call.stream, keepers, stay, enqueue)
    }

    fn ask(&self, key: &ExpertKey, call: LayerCall) -> bool {
        self.experts.ask(key, call)
    }

    fn make(&self, key: &ExpertKey, call: LayerCall) -> Result<(), ExecError> {
        self.group.poll()?;
        let make = || self.experts.make(&self.group, key, call);
        match self.group.ranks() {
            [first, ..] => first.backend().despite_captures(make),
            [] => make(),
        }
    }

    fn passes(&self, key: &ExpertKey) -> Result<ExpertPasses, ExecError> {
        self.experts.passes_of(&self.group, key)
    }
}
