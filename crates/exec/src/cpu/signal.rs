use super::counter::Counter;
use crate::world::World;

/// A signal of the CPU backend: streams raise it and wait for it, compared by `>=`. It never falls.
#[derive(Clone)]
pub struct CpuSignal(pub(super) Counter);

impl CpuSignal {
    pub(super) fn new(world: &World) -> Self {
        Self(Counter::new(world, "a signal"))
    }
}
