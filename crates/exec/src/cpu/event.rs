//! Events of the CPU backend, which order its streams as CUDA events order GPU streams.

use super::counter::Counter;
use crate::world::World;

/// An event of the CPU backend. Each record is one step of a counter, and a wait is for the last record enqueued before it, whatever
/// other streams have recorded meanwhile; so one event serves any number of runs.
#[derive(Clone)]
pub struct CpuEvent(pub(super) Counter);

impl CpuEvent {
    pub(super) fn new(world: &World) -> Self {
        Self(Counter::new(world, "an event"))
    }
}
