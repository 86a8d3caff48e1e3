//! The compiled module `counterpoint._native`: masks, plans, ranks and reports as Python objects. What needs PyTorch is in Python.

// Not a workspace lint.
#![warn(clippy::unwrap_used)]

mod allocator;
mod borrow;
mod calls;
mod engine;
mod error;
mod integers;
mod interrupt;
mod join;
mod linear;
mod mask;
mod ranks;
mod row_collective;
mod site;
mod solution;
mod timeline;

use pyo3::prelude::*;

/// The compiled part of the package counterpoint.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::calls::Calls;
    #[pymodule_export]
    use crate::mask::Mask;
    #[pymodule_export]
    use crate::ranks::Ranks;
    #[pymodule_export]
    use crate::solution::Solution;
    #[pymodule_export]
    use crate::timeline::Timeline;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Tells where the packages of this interpreter lie, CUDA's compiler among them: before the first group on a GPU.
    #[pyfunction]
    fn _search_packages(folders: Vec<std::path::PathBuf>) {
        counterpoint_cuda::search_packages(folders);
    }

    /// Panics inside the engine's guard: what a test of `InternalError` calls.
    #[pyfunction]
    fn _panic(py: Python<'_>, message: String) -> PyResult<()> {
        crate::error::engine::<(), counterpoint_mask::MaskError>(py, || panic!("{message}"))
    }
}
