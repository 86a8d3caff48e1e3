//! The engine of ranks: whose it is, until when, and who may call it.

use std::sync::{Arc, PoisonError};

use pyo3::prelude::*;

use super::Ranks;
use crate::engine::Engine;
use crate::error::raise;
use crate::process::Process;

impl Ranks {
    /// Whether this is another process than the one that made it.
    pub(crate) fn is_forked(&self) -> bool {
        self.process != Process::this()
    }

    /// The engine of a group that is open.
    pub(crate) fn engine(&self, py: Python<'_>) -> PyResult<Arc<dyn Engine>> {
        if self.is_forked() {
            let message = "this group was made in another process, and a fork does not copy its threads; start workers \
                           with spawn, or make the group in them";
            return Err(raise(py, "Error", message, &[]));
        }
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone();
        engine.ok_or_else(|| raise(py, "Error", "this group is closed; make a new one", &[]))
    }

    /// The same for a call, which is not inside of another one of this thread.
    pub(crate) fn engine_to_call(&self, py: Python<'_>) -> PyResult<Arc<dyn Engine>> {
        let engine = self.engine(py)?;
        check_outside(py, &*engine)?;
        Ok(engine)
    }

    /// The engine of a group that is to be closed; `None` where it was, and in a fork.
    pub(super) fn take_engine(&self, py: Python<'_>) -> PyResult<Option<Arc<dyn Engine>>> {
        let engine = || self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_forked() {
            // Its threads are those of another process.
            std::mem::forget(engine().take());
            return Ok(None);
        }
        // Not under the lock, for which others wait with Python's.
        let open = engine().clone();
        open.map_or(Ok(()), |engine| check_outside(py, &*engine))?;
        Ok(engine().take())
    }
}

/// Refuses what would wait for ever: a handler of a signal that calls the group whose call it interrupts.
fn check_outside(py: Python<'_>, engine: &dyn Engine) -> PyResult<()> {
    if !engine.is_called_here() {
        return Ok(());
    }
    let message = "a handler of a signal cannot call the group whose call it interrupts: have it note the signal, or raise, and \
                   call the group once that call has returned";
    Err(raise(py, "Error", message, &[]))
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if self.is_forked() {
            let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(engine);
            std::mem::forget(self.planners.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}
