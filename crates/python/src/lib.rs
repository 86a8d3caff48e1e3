//! The compiled module `counterpoint._native`: masks, plans, ranks and reports as Python objects. What needs PyTorch is in Python.

// Not a workspace lint.
#![warn(clippy::unwrap_used)]

mod ahead;
mod allocator;
mod borrow;
mod calls;
mod capture;
mod captured;
mod described;
mod engine;
mod error;
mod experts;
mod integers;
mod interrupt;
mod join;
mod kept;
mod linear;
mod mask;
mod numbered;
mod pickled;
mod process;
mod ranks;
mod routing;
mod rows;
mod site;
mod solution;
mod splits;
mod timeline;
mod tuned;

use counterpoint_cli::ReportingAllocator;
use pyo3::prelude::*;

// The command needs it; until that runs it is the system's.
#[global_allocator]
static ALLOCATOR: ReportingAllocator = ReportingAllocator;

/// The compiled part of the package counterpoint.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::ahead::{_ask_experts, _make_experts};
    #[pymodule_export]
    use crate::calls::Calls;
    #[pymodule_export]
    use crate::described::{Described, StepTables};
    #[pymodule_export]
    use crate::join::Attempt;
    #[pymodule_export]
    use crate::mask::Mask;
    #[pymodule_export]
    use crate::ranks::Ranks;
    #[pymodule_export]
    use crate::routing::Routing;
    #[pymodule_export]
    use crate::solution::{Cancellation, Solution};
    #[pymodule_export]
    use crate::splits::Splits;
    #[pymodule_export]
    use crate::timeline::Timeline;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::process::Process::watch_forks(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Sets where the packages of this interpreter lie, CUDA's compiler among them: before the first group on a GPU.
    #[pyfunction]
    fn _search_packages(folders: Vec<std::path::PathBuf>) {
        counterpoint_cuda::search_packages(folders);
    }

    /// Rows of a chunk of a sequence of so many rows on so many ranks, where none is given.
    #[pyfunction]
    fn _chunk_size(rows: usize, ranks: usize) -> usize {
        counterpoint_choose::PlanConfig::new(ranks).chunk_size_for(rows)
    }

    /// The tuned plans for so many ranks that are in a file, or without one those that were kept on this machine, as text.
    #[pyfunction]
    fn _tuned_plans(py: Python<'_>, path: Option<std::path::PathBuf>, ranks: usize) -> PyResult<String> {
        crate::error::engine(py, || crate::tuned::text_of(path.as_deref(), ranks))
    }

    /// Runs the `counterpoint` command with these arguments, `file` being what starts it again, and ends the process with its status: where it
    /// returns, with that of a panic.
    #[pyfunction]
    fn _command_line(
        py: Python<'_>,
        file: std::path::PathBuf,
        arguments: Vec<std::ffi::OsString>,
    ) -> PyResult<u8> {
        counterpoint_console::program::started_by(file, arguments);
        counterpoint_cli::decide_before_threads();
        // By the name of the thread a command's own panics are distinguished from those of ranks.
        let thread = std::thread::Builder::new().name("main".to_owned()).stack_size(8 << 20);
        py.detach(|| thread.spawn(|| counterpoint_cli::run()).map(|running| drop(running.join())))?;
        Ok(101)
    }

    /// Panics inside the engine's guard: what a test of `InternalError` calls.
    #[pyfunction]
    fn _panic(py: Python<'_>, message: String) -> PyResult<()> {
        crate::error::engine::<(), counterpoint_mask::MaskError>(py, || panic!("{message}"))
    }
}
