//! Signals of the CPU backend: a stream waits for a value that another raises while it goes on.

use std::time::Instant;

use super::counter::Counter;
use super::stream::{CpuStream, StreamShared};
use crate::world::World;
use crate::{ExecError, OpPlace};

/// A signal of the CPU backend: streams raise it and wait for it, compared by `>=`. It never falls.
#[derive(Clone)]
pub struct CpuSignal(pub(super) Counter);

impl CpuSignal {
    pub(super) fn new(world: &World) -> Self {
        Self(Counter::new(world, "a signal"))
    }

    /// Notes that what is enqueued next on `stream` raises it to `value`, counted from the start of the run.
    pub(crate) fn expect(&self, stream: &CpuStream, place: &OpPlace, value: u64) -> SignalPoint {
        SignalPoint { counter: self.0.clone(), absolute: self.0.issue_value(stream, place, value) }
    }

    /// The point at which it is `value`, counted from the start of the run.
    pub(crate) fn at(&self, value: u64) -> SignalPoint {
        SignalPoint { counter: self.0.clone(), absolute: self.0.absolute(value) }
    }

    /// The point that has been enqueued last.
    pub(crate) fn last(&self) -> SignalPoint {
        SignalPoint { counter: self.0.clone(), absolute: self.0.issued() }
    }
}

/// A value that a signal takes in a run.
pub(crate) struct SignalPoint {
    counter: Counter,
    absolute: u64,
}

impl SignalPoint {
    /// The signal is there from now on.
    pub(crate) fn raise(&self) {
        self.counter.raise(self.absolute);
    }

    /// On a stream's thread, inside an operation: sleeps until the signal is there.
    pub(crate) fn wait(&self, stream: &StreamShared, place: &OpPlace) -> Result<(), ExecError> {
        let began = Instant::now();
        if self.counter.wait(stream, place, self.absolute)?.is_some() {
            stream.paused_since(began);
        }
        Ok(())
    }
}
