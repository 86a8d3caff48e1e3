//! Linear layers of the ranks in this process, on tensors of Python.

use counterpoint_exec::{ExecError, Group, LayerCall, Machine};

use super::{Joined, lock};
use crate::capture::Captures;
use crate::linear::{self, LayerKey, LinearCall, LinearEngine, ReadyLayer, WantedTensor};

impl<M> LinearEngine for Joined<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
    ReadyLayer<M>: Send,
{
    fn call(&self, call: &LinearCall) -> Result<(), ExecError> {
        self.group.poll()?;
        let streams = self.callers(call.stream);
        let captures = self.captures(streams.as_deref())?;
        let callers: Option<Vec<_>> = streams.as_ref().map(|streams| streams.iter().collect());
        let _one = lock(&self.calling);
        let enqueued = self.layers.with(&self.group, &call.key, |layer| {
            linear::enqueue(&self.group, layer, call, callers.as_deref())
        });
        let called = enqueued.and_then(|tickets| self.ended(&tickets, streams.as_deref()));
        if captures && called.is_ok() {
            self.layers.keep(&call.key);
        }
        if called.is_err() {
            lock(&self.kept).extend(call.tensors.iter().map(|(_, tensor)| tensor.keeper.clone()));
        }
        called
    }

    fn tensors(&self, key: &LayerKey, call: LayerCall) -> Result<Vec<WantedTensor>, ExecError> {
        self.layers.with(&self.group, key, |layer| linear::tensors(layer, call))
    }
}
