//! From a mask to a plan: owners, hosts and stages are chosen, then every rank's part, or one, is written out.

use counterpoint_mask::{Mask, Range};

use crate::by_seconds::by_seconds;
use crate::dispatch::{Home, chunk_work_with_away, solve};
use crate::division::{Division, Owners};
use crate::hosting::Away;
use crate::outline::Outline;
use crate::{
    AttentionSpec, Dispatch, HostedWork, Plan, PlanConfig, PlanError, Planning, RankPlan, chunk_work,
    dispatch_keys, offload, stages,
};

impl Plan {
    /// Plans `mask`. Where the lengths of queries and keys agree it is self-attention: one dispatch for both, so that
    /// token `i`'s query and key live on the same rank. Where they do not, as [`Plan::cross_attention`].
    ///
    /// # Errors
    /// A `config` that does not make sense for `mask`; see [`PlanConfig::validate_for`].
    pub fn new(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Plan, PlanError> {
        let planning = &Planning::ALONE;
        outline(mask, spec, config, planning)?.into_plan(planning)
    }

    /// Plans `mask` with queries and keys dispatched each by a solve of its own, whatever their lengths.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn cross_attention(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Plan, PlanError> {
        let planning = &Planning::ALONE;
        cross_attention(mask, spec, config, planning)?.into_plan(planning)
    }

    /// Plans another mask of the same training step on this plan's dispatch: rows stay where they are, exchange and
    /// stages are those of `mask`. `config`'s chunk size and dispatch algorithm are not looked at.
    ///
    /// # Errors
    /// As [`Plan::new`]; a mask whose lengths are not those of this plan's mask.
    pub fn for_mask_on(
        &self,
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Plan, PlanError> {
        let dispatches = [&self.q_dispatch, &self.k_dispatch].map(Dispatch::clone);
        outline_on(mask, spec, config, dispatches)?.into_plan(&Planning::ALONE)
    }

    /// As [`Plan::new`] and equal to it, made as `planning` says, unless the pieces of all ranks would take more than `available` bytes.
    ///
    /// # Errors
    /// As [`Plan::new`]; [`PlanError::Memory`] before they are made; [`PlanError::Cancelled`].
    pub fn within(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        available: u64,
        planning: &Planning<'_>,
    ) -> Result<Plan, PlanError> {
        within(outline(mask, spec, config, planning)?, available, planning)
    }

    /// The same mask on the same owners, and computed by the same hosts, cut into stages as `config` says; unless the pieces of all ranks
    /// would take more than `available` bytes. Nothing else of `config` is looked at but its cost and its topology.
    ///
    /// # Errors
    /// As [`Plan::for_mask_on`]; [`PlanError::Memory`] before they are made; [`PlanError::Cancelled`].
    pub fn staged_within(
        &self,
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        available: u64,
        planning: &Planning<'_>,
    ) -> Result<Plan, PlanError> {
        let away = |rank: &RankPlan| rank.hosted.as_ref().map_or_else(Vec::new, HostedWork::away);
        let away = self.ranks.iter().map(away).collect();
        within(outline_again(mask, spec, config, (self, &away), planning)?, available, planning)
    }
}

/// The part of `rank` alone, equal to `Plan::new(mask, spec, config)?.rank(rank)` and cheaper: bands and splits of other
/// ranks are not made.
///
/// # Errors
/// As [`Plan::new`]; a rank that is not below the number of ranks.
pub fn plan_rank(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    rank: usize,
) -> Result<RankPlan, PlanError> {
    let outline = outline(mask, spec, config, &Planning::ALONE)?;
    if rank >= outline.ranks.len() {
        return Err(PlanError::Rank { rank, cp_size: outline.ranks.len() });
    }
    Ok(outline.into_rank(rank))
}

/// The outline of `mask`: owners, hosts and stages as they are chosen for `config`.
pub(crate) fn outline(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<Outline, PlanError> {
    config.validate_for(mask)?;
    if mask.seqlen_q() != mask.seqlen_k() {
        return cross_attention(mask, spec, config, planning);
    }
    let chunk_size = config.chunk_size_for(mask.seqlen_q());
    let dispatch_with = |away: &[Range]| {
        planning.check()?;
        let work = chunk_work_with_away(mask, chunk_size, away);
        planning.check()?;
        let (ranks, home) = (config.topology.world_size, Home::WithQueries);
        let mut dispatch = solve(&work, ranks, config.dispatch, home, planning);
        planning.check()?;
        if away.is_empty() {
            dispatch = by_seconds(mask, &work, dispatch, spec, config, planning)?;
        }
        Ok(Owners::new(dispatch.clone(), dispatch))
    };
    let division = offload::choose(mask, spec, config, planning, dispatch_with(&[])?, dispatch_with)?;
    stages::outline(division, spec, config, planning)
}

fn cross_attention(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<Outline, PlanError> {
    config.validate_for(mask)?;
    let work = chunk_work(mask, config.chunk_size_for(mask.seqlen_q()));
    let ranks = config.topology.world_size;
    let q_dispatch = solve(&work, ranks, config.dispatch, Home::Elsewhere, planning);
    planning.check()?;
    let k_dispatch = dispatch_keys(&work, &q_dispatch, config.chunk_size_for(mask.seqlen_k()));
    let owners = Owners::new(q_dispatch, k_dispatch);
    let division = offload::choose(mask, spec, config, planning, owners.clone(), |_| Ok(owners.clone()))?;
    stages::outline(division, spec, config, planning)
}

/// On owners that were found before.
pub(crate) fn outline_on(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    [q_dispatch, k_dispatch]: [Dispatch; 2],
) -> Result<Outline, PlanError> {
    fits(mask, config, [&q_dispatch, &k_dispatch])?;
    let (owners, planning) = (Owners::new(q_dispatch, k_dispatch), &Planning::ALONE);
    let division = offload::choose(mask, spec, config, planning, owners.clone(), |_| Ok(owners.clone()))?;
    stages::outline(division, spec, config, planning)
}

/// The division of `plan`, whose local query rows `away` are computed where their keys are.
fn outline_again(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    (plan, away): (&Plan, &Away),
    planning: &Planning<'_>,
) -> Result<Outline, PlanError> {
    fits(mask, config, [&plan.q_dispatch, &plan.k_dispatch])?;
    let owners = Owners::new(plan.q_dispatch.clone(), plan.k_dispatch.clone());
    stages::outline(Division::with_away(mask, owners, away), spec, config, planning)
}

/// Whether a mask can be planned for owners that were found before.
fn fits(mask: &Mask, config: &PlanConfig, [q_dispatch, k_dispatch]: [&Dispatch; 2]) -> Result<(), PlanError> {
    config.validate()?;
    for (axis, mask_len, plan_len) in
        [("q", mask.seqlen_q(), q_dispatch.seqlen()), ("k", mask.seqlen_k(), k_dispatch.seqlen())]
    {
        if mask_len != plan_len {
            return Err(PlanError::OtherLength { axis, mask: mask_len, plan: plan_len });
        }
    }
    let (config, plan) = (config.topology.world_size, q_dispatch.cp_size());
    if config == plan { Ok(()) } else { Err(PlanError::OtherWorldSize { config, plan }) }
}

fn within(outline: Outline, available: u64, planning: &Planning<'_>) -> Result<Plan, PlanError> {
    let needed = outline.plan_bytes();
    if needed > available {
        return Err(PlanError::Memory { ranks: outline.ranks.len(), needed, available });
    }
    outline.into_plan(planning)
}
