//! Kernel barriers of the CPU backend: computation starts after the communication that it should hide.

use super::counter::Counter;
use super::stream::CpuStream;
use crate::OpPlace;
use crate::world::World;

/// The CPU's kernel barrier: a communication operation arrives as the first thing it does, and computation queued behind an
/// await starts only once so many have arrived. It orders starts, not data. Its count is an epoch, never reset.
#[derive(Clone)]
pub struct KernelBarrier(pub(super) Counter);

impl KernelBarrier {
    pub(super) fn new(world: &World) -> Self {
        Self(Counter::new(world, "the kernel barrier"))
    }

    /// Notes that one more operation that will arrive is enqueued on `stream`.
    pub(crate) fn expect(&self, stream: &CpuStream, place: &OpPlace) {
        self.0.issue_step(stream, place);
    }

    /// One operation has started.
    pub(crate) fn arrive(&self) {
        self.0.step();
    }
}
