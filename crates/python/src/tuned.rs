//! What layers of Python follow where it was measured: plans that `counterpoint tune` kept.

use std::path::Path;
use std::sync::Arc;

use counterpoint_choose::{TunedHere, TunedPlace, TunedPlans};
use counterpoint_console::{CliError, tuned};
use counterpoint_exec::{Group, Machine};
use pyo3::prelude::*;

use crate::error::{Raised, raise};

impl Raised for CliError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

/// Those for so many ranks that are in a file, or without one those that were kept on this machine, as the text that [`given`] reads.
pub(crate) fn text_of(path: Option<&Path>, ranks: usize) -> Result<String, CliError> {
    let all = path.map_or_else(tuned::kept, tuned::named)?;
    let mut of_ranks = TunedPlans::default();
    let layers = all.layers.plans().iter().filter(|plan| plan.shape.ranks == ranks);
    layers.cloned().for_each(|plan| of_ranks.layers.insert(plan));
    let experts = all.experts.plans().iter().filter(|plan| plan.shape.ranks == ranks);
    experts.cloned().for_each(|plan| of_ranks.experts.insert(plan));
    Ok(of_ranks.to_json())
}

/// Those of a group, the same on all its ranks.
pub(crate) fn given(py: Python<'_>, text: Option<&str>) -> PyResult<Option<TunedPlans>> {
    let read = text.map(TunedPlans::from_json).transpose();
    read.map_err(|error| raise(py, "PlanError", &format!("tuned plans: {error}"), &[]))
}

/// A group whose layers follow those that are for its place, and how many these are.
pub(crate) fn following<M: Machine>(
    group: Group<M>,
    plans: Option<TunedPlans>,
    place: &TunedPlace,
) -> (Group<M>, usize) {
    let Some(plans) = plans else { return (group, 0) };
    let topology = group.linear().topology;
    let here = (&place.device, &place.transport, topology.world_size, topology.ranks_per_node);
    let layers = plans.layers.plans().iter().map(|plan| &plan.shape);
    let layers = layers.filter(|one| (&one.device, &one.transport, one.ranks, one.ranks_per_node) == here);
    let experts = plans.experts.plans().iter().map(|plan| &plan.shape);
    let experts = experts.filter(|one| (&one.device, &one.transport, one.ranks, one.ranks_per_node) == here);
    let count = layers.count() + experts.count();
    (group.with_tuned(Arc::new(TunedHere { place: place.clone(), plans })), count)
}
