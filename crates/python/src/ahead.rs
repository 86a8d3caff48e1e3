//! Passes of layers of experts that threads of Python's make ready ahead of their calls.

use pyo3::prelude::*;

use crate::error::engine;
use crate::experts::{ExpertFields, ExpertKey};
use crate::linear::named_call;
use crate::ranks::Ranks;
use crate::routing::Routing;

/// Asks for a pass of a layer of experts, "forward" or "backward", which `_make_experts` makes ready on any thread, or its first call. False
/// where it was asked for before. All ranks ask, and call what was not asked for, in one order. Local.
#[pyfunction]
pub(crate) fn _ask_experts(
    py: Python<'_>,
    ranks: &Ranks,
    layer: ExpertFields,
    routing: &Routing,
    call: &str,
) -> PyResult<bool> {
    let (joined, key) = (ranks.engine(py)?, ExpertKey::new(layer, routing.native.clone()));
    Ok(joined.experts().ask(&key, named_call(call)))
}

/// Makes a pass ready that was asked for, where no call has come first. Local.
#[pyfunction]
pub(crate) fn _make_experts(
    py: Python<'_>,
    ranks: &Ranks,
    layer: ExpertFields,
    routing: &Routing,
    call: &str,
) -> PyResult<()> {
    let (joined, key) = (ranks.engine(py)?, ExpertKey::new(layer, routing.native.clone()));
    engine(py, || joined.experts().make(&key, named_call(call)))
}
