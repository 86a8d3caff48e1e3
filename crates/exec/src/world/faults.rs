//! Injected faults of operations that the host enqueues on a device.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::World;
use crate::panics::panic_message;
use crate::{ExecError, OpPlace};

impl World {
    /// Lets injected faults strike an operation of `rank` that a thread of the host is about to enqueue on a device, as they
    /// strike one that a stream's own thread is about to perform. `occurrence` counts the runs.
    ///
    /// # Errors
    /// [`ExecError::RankPanicked`] for an injected panic.
    pub fn strike(
        &self,
        rank: usize,
        program: &str,
        place: &OpPlace,
        occurrence: u64,
    ) -> Result<(), ExecError> {
        let faults = self.config().faults.iter().filter(|fault| fault.strikes(rank, Some(program), place));
        let struck = catch_unwind(AssertUnwindSafe(|| {
            faults.for_each(|fault| {
                fault.delay_start(place, occurrence);
                fault.strike();
            });
        }));
        let panicked = |message| ExecError::RankPanicked { rank, place: place.to_string(), message };
        struck.map_err(|panic| panicked(panic_message(&*panic)))
    }
}
