//! Which process this is: a fork has none of the threads that its parent's groups live on.

use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

/// Forks between this process and the one that loaded the module.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// A process, distinguished from its forks without asking the system, which in some sandboxes takes microseconds of every call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// The one that asks.
    pub(crate) fn this() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Has Python report its forks: all that go on with Python do, whoever makes them.
    pub(crate) fn watch_forks(py: Python<'_>) -> PyResult<()> {
        let forked = |_: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
            FORKS.fetch_add(1, Ordering::Relaxed);
        };
        let hooks = PyDict::new(py);
        hooks.set_item("after_in_child", PyCFunction::new_closure(py, None, None, forked)?)?;
        py.import("os")?.getattr("register_at_fork")?.call((), Some(&hooks))?;
        Ok(())
    }
}
