//! The half of planning that every rank repeats: owners, work, needs and stage cuts, from which one rank's plan follows.

use counterpoint_mask::{Band, Mask, Range};

use crate::by_seconds::by_seconds;
use crate::dispatch::{Home, chunk_work_with_away, solve};
use crate::division::{Division, Owners};
use crate::exchange::{exchange, exchange_part};
use crate::hosting::Away;
use crate::receive_order::{ReceiveOrder, most_layers};
use crate::rows::without;
use crate::runs::Runs;
use crate::stages::{StageCuts, cut};
use crate::work::{RowList, needed_rows};
use crate::{
    AttentionSpec, Dispatch, GroupPart, HostedWork, Plan, PlanConfig, PlanError, Planning, RankPlan,
    StagePlan, UnweighedOffload, chunk_work, dispatch_keys,
};

/// What all ranks must know of each rank: its work and what it receives.
pub(crate) struct RankOutline {
    /// Global key rows that it owns, merged and ascending.
    pub(crate) own: Vec<Range>,
    /// Query rows that it owns.
    pub(crate) q_rows: usize,
    /// Local query rows, global key columns; without rows that are away.
    pub(crate) work: Vec<Band>,
    /// Global key rows that it needs and does not own, in the order in which it receives them.
    pub(crate) remote: RowList,
    /// What it computes for rows that are away; on every rank or on none.
    pub(crate) hosted: Option<HostedWork>,
}

impl RankOutline {
    /// Those of all ranks: their work, and what of it is hosted, if any is.
    pub(crate) fn of(
        owners: &Owners,
        work: Vec<Vec<Band>>,
        hosted: Vec<HostedWork>,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Vec<Self>, PlanError> {
        let Owners { q_dispatch, k_dispatch, k_runs, .. } = owners;
        let k_rows: Vec<usize> = (0..work.len()).map(|rank| k_dispatch.tokens(rank)).collect();
        let owned: Vec<Vec<Range>> = (0..work.len()).map(|rank| k_dispatch.ranges(rank)).collect();
        let missing: Vec<Vec<Range>> =
            planning.map(work.len(), |rank| without(&needed_rows(&work[rank]), &owned[rank]))?;
        let received: Vec<usize> = missing.iter().map(|rows| rows.iter().map(Range::len).sum()).collect();
        let layers = most_layers(&work, &received, spec, config);
        let order = ReceiveOrder::new(k_runs, &k_rows, &config.topology, layers);
        let remote = planning.map(work.len(), |rank| RowList::new(order.of(rank, &missing[rank])))?;
        let mut hosted = hosted.into_iter();
        let of_ranks = work.into_iter().zip(owned).zip(remote).enumerate();
        let of_ranks = of_ranks.map(|(rank, ((work, own), remote))| Self {
            own,
            q_rows: q_dispatch.tokens(rank),
            work,
            remote,
            hosted: hosted.next(),
        });
        Ok(of_ranks.collect())
    }

    /// Number of key rows that it owns.
    pub(crate) fn own_rows(&self) -> usize {
        self.own.iter().map(Range::len).sum()
    }
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

/// A rank's parts in the group-casts of a pass and its bands, by stage.
type Parts = (Vec<GroupPart>, Vec<Vec<Band>>);

/// Everything that all ranks agree on, before bands and splits of the stages are written out. The shared, cheap half of
/// a plan: one rank's part follows from it alone.
pub(crate) struct Outline {
    pub(crate) q_dispatch: Dispatch,
    pub(crate) k_dispatch: Dispatch,
    pub(crate) k_runs: Runs,
    pub(crate) ranks: Vec<RankOutline>,
    pub(crate) forward: StageCuts,
    pub(crate) backward: StageCuts,
    pub(crate) unweighed: Option<UnweighedOffload>,
}

impl Outline {
    pub(crate) fn new(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        config.validate_for(mask)?;
        if mask.seqlen_q() != mask.seqlen_k() {
            return Self::cross_attention(mask, spec, config, planning);
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
        let division = Division::choose(mask, spec, config, planning, dispatch_with(&[])?, dispatch_with)?;
        Self::of(division, spec, config, planning)
    }

    pub(crate) fn cross_attention(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        config.validate_for(mask)?;
        let work = chunk_work(mask, config.chunk_size_for(mask.seqlen_q()));
        let ranks = config.topology.world_size;
        let q_dispatch = solve(&work, ranks, config.dispatch, Home::Elsewhere, planning);
        planning.check()?;
        let k_dispatch = dispatch_keys(&work, &q_dispatch, config.chunk_size_for(mask.seqlen_k()));
        let owners = Owners::new(q_dispatch, k_dispatch);
        let division =
            Division::choose(mask, spec, config, planning, owners.clone(), |_| Ok(owners.clone()))?;
        Self::of(division, spec, config, planning)
    }

    pub(crate) fn on(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        [q_dispatch, k_dispatch]: [Dispatch; 2],
    ) -> Result<Self, PlanError> {
        fits(mask, config, [&q_dispatch, &k_dispatch])?;
        let (owners, planning) = (Owners::new(q_dispatch, k_dispatch), &Planning::ALONE);
        let division =
            Division::choose(mask, spec, config, planning, owners.clone(), |_| Ok(owners.clone()))?;
        Self::of(division, spec, config, planning)
    }

    /// The division of `plan`, whose local query rows `away` are computed where their keys are.
    pub(crate) fn again(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        (plan, away): (&Plan, &Away),
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        fits(mask, config, [&plan.q_dispatch, &plan.k_dispatch])?;
        let owners = Owners::new(plan.q_dispatch.clone(), plan.k_dispatch.clone());
        Self::of(Division::with_away(mask, owners, away), spec, config, planning)
    }

    /// Of a division of the work.
    pub(crate) fn of(
        division: Division,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        let Division { owners, work, hosted, unweighed } = division;
        let ranks = RankOutline::of(&owners, work, hosted, spec, config, planning)?;
        let Owners { q_dispatch, k_dispatch, k_runs, .. } = owners;
        let [forward, backward] = cut(&ranks, &k_runs, spec, config, planning)?;
        Ok(Self { q_dispatch, k_dispatch, k_runs, ranks, forward, backward, unweighed })
    }

    /// Writes out every rank's part.
    pub(crate) fn into_plan(self, planning: &Planning<'_>) -> Result<Plan, PlanError> {
        let passes = [&self.forward, &self.backward];
        let bands = planning.map(self.ranks.len(), |rank| passes.map(|cuts| self.bands(rank, cuts)))?;
        let [forward, backward] = passes.map(|cuts| self.parts_of_all(cuts, planning));
        let parts = forward?.into_iter().zip(backward?).zip(bands).enumerate();
        let ranks = parts.map(|(rank, ((forward, backward), [in_forward, in_backward]))| {
            self.rank_plan(rank, (forward, in_forward), (backward, in_backward))
        });
        let ranks = ranks.collect();
        Ok(Plan { q_dispatch: self.q_dispatch, k_dispatch: self.k_dispatch, ranks, two_level: None })
    }

    /// Writes out one rank's part.
    pub(crate) fn into_rank(self, rank: usize) -> RankPlan {
        let [forward, backward] = [&self.forward, &self.backward]
            .map(|cuts| (self.parts_of_one(cuts, rank), self.bands(rank, cuts)));
        self.rank_plan(rank, forward, backward)
    }

    /// The bands of one rank, by stage.
    fn bands(&self, rank: usize, cuts: &StageCuts) -> Vec<Vec<Band>> {
        cuts.bands(rank, &self.ranks[rank])
    }

    /// The parts in all group-casts, by rank, then stage.
    fn parts_of_all(
        &self,
        cuts: &StageCuts,
        planning: &Planning<'_>,
    ) -> Result<Vec<Vec<GroupPart>>, PlanError> {
        let mut parts = vec![Vec::with_capacity(cuts.stages()); self.ranks.len()];
        parts.iter_mut().for_each(|parts| parts.push(GroupPart::default()));
        let of_stage = |before: usize| exchange(&self.k_runs, &cuts.placed_rows(before + 1));
        for stage_parts in planning.map(cuts.stages() - 1, of_stage)? {
            parts.iter_mut().zip(stage_parts).for_each(|(parts, part)| parts.push(part));
        }
        Ok(parts)
    }

    /// One rank's parts in all group-casts, by stage.
    fn parts_of_one(&self, cuts: &StageCuts, rank: usize) -> Vec<GroupPart> {
        let mut parts = vec![GroupPart::default()];
        parts.extend(
            (1..cuts.stages()).map(|stage| exchange_part(&self.k_runs, &cuts.placed_rows(stage), rank)),
        );
        parts
    }

    fn rank_plan(&self, rank: usize, forward: Parts, backward: Parts) -> RankPlan {
        let forward = self.stage_plans(rank, &self.forward, forward);
        let hosted = self.ranks[rank].hosted.clone();
        RankPlan {
            rank,
            q_ranges: self.q_dispatch.ranges(rank),
            k_ranges: self.ranks[rank].own.clone(),
            q_rows: self.q_dispatch.tokens(rank),
            k_rows: self.k_dispatch.tokens(rank),
            area: forward.iter().map(|stage| stage.area).sum::<u64>()
                + hosted.as_ref().map_or(0, |work| work.area),
            forward,
            backward: self.stage_plans(rank, &self.backward, backward),
            hosted,
        }
    }

    fn stage_plans(&self, rank: usize, cuts: &StageCuts, (parts, bands): Parts) -> Vec<StagePlan> {
        let stages = parts.into_iter().zip(bands).enumerate();
        let stages = stages.map(|(stage, (part, bands))| {
            let recv_ranges = cuts.rows(rank, stage).to_vec();
            let own_rows = cuts.own_rows(rank, stage);
            let key_rows = match stage {
                0 => self.k_dispatch.tokens(rank),
                _ => own_rows + recv_ranges.iter().map(Range::len).sum::<usize>(),
            };
            let area = bands.iter().map(Band::area).sum();
            StagePlan { part, recv_ranges, own_rows, key_rows, bands: bands.into(), area }
        });
        stages.collect()
    }
}
