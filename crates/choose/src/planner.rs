//! From a mask to a plan with the dispatch that a configuration names: owners, hosts and stages are chosen here, crate `plan` writes out
//! what follows from them.

use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{
    AttentionSpec, Division, HostedWork, Outline, Owners, Plan, PlanError, Planning, RankPlan,
    chunk_work_with_offload, chunk_work_without,
};

use crate::closed_form::{Prediction, RankPrediction};
use crate::config::PlanConfig;
use crate::error::ChooseError;
use crate::hosts::{self, UnweighedOffload};
use crate::owners::{KeyOwners, by_seconds, dispatch_keys, solve};
use crate::stages;

/// Plans `mask` with the dispatch of `config`. Where the lengths of queries and keys agree it is self-attention: one dispatch for both,
/// so that token `i`'s query and key live on the same rank. Where they do not, as [`plan_cross_attention`].
///
/// # Errors
/// A `config` that does not make sense for `mask`; see [`PlanConfig::validate_for`]. [`PlanError::Bytes`] for a `spec` whose tensors are too large.
pub fn plan_mask(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Plan, ChooseError> {
    let planning = &Planning::ALONE;
    Ok(outline(mask, spec, config, planning)?.0.into_plan(planning)?)
}

/// As [`plan_mask`] and equal to it, made as `planning` says, unless the pieces of all ranks would take more than `available` bytes.
///
/// # Errors
/// As [`plan_mask`]; [`PlanError::Memory`] before they are made; [`PlanError::Cancelled`].
pub fn plan_mask_within(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    available: u64,
    planning: &Planning<'_>,
) -> Result<Plan, ChooseError> {
    Ok(outline(mask, spec, config, planning)?.0.into_plan_within(available, planning)?)
}

/// Plans `mask` with queries and keys dispatched each by a solve of its own, whatever their lengths.
///
/// # Errors
/// As [`plan_mask`].
pub fn plan_cross_attention(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> Result<Plan, ChooseError> {
    let planning = &Planning::ALONE;
    let (division, _) = divide_cross_attention(mask, spec, config, planning, None)?;
    Ok(stages::outline(division, spec, config, planning)?.into_plan(planning)?)
}

/// Plans another mask of the same training step on the dispatch of `base`: rows stay where they are, exchange and
/// stages are those of `mask`. `config`'s chunk size and dispatch algorithm are not looked at. Made as `planning` says.
///
/// # Errors
/// As [`plan_mask`]; a mask whose lengths are not those of the mask of `base`; [`PlanError::Cancelled`].
pub fn plan_mask_on(
    base: &Plan,
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<Plan, ChooseError> {
    let owners = owners_of(base, mask, spec, config)?;
    let (division, _) = hosts::choose(mask, spec, config, planning, owners.clone(), |_| Ok(owners.clone()))?;
    Ok(stages::outline(division, spec, config, planning)?.into_plan(planning)?)
}

/// The same mask on the owners of `base`, and computed by the same hosts, which queries reach in the same way, cut into stages as `config` says; unless the pieces of all
/// ranks would take more than `available` bytes. Nothing else of `config` is looked at but its cost and its topology.
///
/// # Errors
/// As [`plan_mask_on`]; [`PlanError::Memory`] before they are made.
pub fn plan_stages_within(
    base: &Plan,
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    available: u64,
    planning: &Planning<'_>,
) -> Result<Plan, ChooseError> {
    let mut division = Division::new(mask, owners_of(base, mask, spec, config)?);
    let hosted: Vec<&HostedWork> = base.ranks.iter().filter_map(|rank| rank.hosted.as_ref()).collect();
    if base.ranks.iter().any(RankPlan::is_hosted_in_part) {
        division = division.with_hosts(&hosted.iter().map(|work| work.hosted_rows()).collect::<Vec<_>>());
    } else if !hosted.is_empty() {
        division = division.with_offloaded(&hosted.iter().map(|work| work.offloaded()).collect());
    }
    let plan = stages::outline(division, spec, config, planning)?.into_plan_within(available, planning)?;
    Ok(Plan { queries_go_straight: base.queries_go_straight, ..plan })
}

/// Whether hosts could make `base`, a plan of `mask` without any, quicker by this part: whether ranks do something else than to compute
/// for so long, and rows of them are worth a look. Hosts share work, and do not lessen it.
pub(crate) fn may_host(
    base: &Plan,
    owners: &Owners,
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    gain: f64,
) -> bool {
    let prediction = Prediction::new(base, spec, config);
    let computing = |ranks: &[RankPrediction]| {
        let stages = ranks.iter().flat_map(|rank| &rank.stages);
        stages.map(|stage| stage.compute_seconds).sum::<f64>() / ranks.len() as f64
    };
    let least = computing(&prediction.forward) + computing(&prediction.backward);
    let seconds = prediction.forward_seconds() + prediction.backward_seconds();
    least <= (1.0 - gain) * seconds && hosts::any(&Division::new(mask, owners.clone()), spec, config)
}

/// The part of `rank` alone, equal to `plan_mask(mask, spec, config)?.rank(rank)` and cheaper: bands and splits of other
/// ranks are not made.
///
/// # Errors
/// As [`plan_mask`]; a rank that is not below the number of ranks.
pub fn plan_rank(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    rank: usize,
) -> Result<RankPlan, ChooseError> {
    let (outline, _) = outline(mask, spec, config, &Planning::ALONE)?;
    if rank >= outline.ranks.len() {
        return Err(PlanError::Rank { rank, cp_size: outline.ranks.len() }.into());
    }
    Ok(outline.into_rank(rank))
}

/// As [`plan_mask_within`], where that plan has offloaded rows. `owners` are those that it has without any, if they are known.
pub(crate) fn plan_hosting_within(
    owners: Option<Owners>,
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    available: u64,
    planning: &Planning<'_>,
) -> Result<Option<Plan>, ChooseError> {
    let (division, _) = divide(mask, spec, config, planning, owners)?;
    let plan =
        |division| stages::outline(division, spec, config, planning)?.into_plan_within(available, planning);
    Ok(division.has_hosts().then(|| plan(division)).transpose()?)
}

/// The outline of `mask`, with owners, hosts and stages as they are chosen for `config`, with hosts that were not weighed.
pub(crate) fn outline(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<(Outline, Option<UnweighedOffload>), ChooseError> {
    let (division, unweighed) = divide(mask, spec, config, planning, None)?;
    Ok((stages::outline(division, spec, config, planning)?, unweighed))
}

/// Who owns and who computes what. `owners` are those that suit all work, if they are known.
fn divide(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
    owners: Option<Owners>,
) -> Result<(Division, Option<UnweighedOffload>), ChooseError> {
    check(mask, spec, config)?;
    if mask.seqlen_q() != mask.seqlen_k() {
        return divide_cross_attention(mask, spec, config, planning, owners);
    }
    let chunk_size = config.chunk_size_for(mask.seqlen_q());
    let dispatch_with = |offloaded: &[Range]| {
        planning.check()?;
        let work = chunk_work_with_offload(mask, chunk_size, offloaded);
        planning.check()?;
        let (ranks, key_owners) = (config.topology.world_size, KeyOwners::WithQueries);
        let mut dispatch = solve(&work, ranks, config.dispatch, key_owners, planning);
        planning.check()?;
        if offloaded.is_empty() {
            dispatch = by_seconds(mask, &work, dispatch, spec, config, planning)?;
        }
        Ok(Owners::new(dispatch.clone(), dispatch))
    };
    let owners = owners.map_or_else(|| dispatch_with(&[]), Ok)?;
    Ok(hosts::choose(mask, spec, config, planning, owners, dispatch_with)?)
}

fn divide_cross_attention(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
    owners: Option<Owners>,
) -> Result<(Division, Option<UnweighedOffload>), ChooseError> {
    check(mask, spec, config)?;
    let [chunk_size_q, chunk_size_k] =
        [mask.seqlen_q(), mask.seqlen_k()].map(|seqlen| config.chunk_size_for(seqlen));
    let dispatch_with = |offloaded: &[Range]| {
        planning.check()?;
        // What is offloaded is computed by the owners of its keys, who have equally many.
        let work = chunk_work_without(mask, chunk_size_q, offloaded);
        planning.check()?;
        let ranks = config.topology.world_size;
        let q_dispatch = solve(&work, ranks, config.dispatch, KeyOwners::Elsewhere, planning);
        planning.check()?;
        let k_dispatch = dispatch_keys(&work, &q_dispatch, chunk_size_k);
        Ok(Owners::new(q_dispatch, k_dispatch))
    };
    let owners = owners.map_or_else(|| dispatch_with(&[]), Ok)?;
    Ok(hosts::choose(mask, spec, config, planning, owners, dispatch_with)?)
}

/// Refuses what cannot be planned.
pub(crate) fn check(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<(), ChooseError> {
    config.validate_for(mask)?;
    check_bytes(mask, spec, config)
}

fn check_bytes(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<(), ChooseError> {
    Ok(spec.check_bytes([mask.seqlen_q(), mask.seqlen_k()], config.topology.world_size)?)
}

/// The owners of `base`, where they fit `mask` and `config`.
pub(crate) fn owners_of(
    base: &Plan,
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> Result<Owners, ChooseError> {
    config.validate()?;
    check_bytes(mask, spec, config)?;
    let [q_dispatch, k_dispatch] = [&base.q_dispatch, &base.k_dispatch];
    for (axis, mask_len, plan_len) in
        [("q", mask.seqlen_q(), q_dispatch.seqlen()), ("k", mask.seqlen_k(), k_dispatch.seqlen())]
    {
        if mask_len != plan_len {
            return Err(PlanError::OtherLength { axis: axis.into(), mask: mask_len, plan: plan_len }.into());
        }
    }
    let (config, plan) = (config.topology.world_size, base.cp_size());
    match config == plan {
        true => Ok(Owners::new(q_dispatch.clone(), k_dispatch.clone())),
        false => Err(PlanError::OtherWorldSize { config, plan }.into()),
    }
}
