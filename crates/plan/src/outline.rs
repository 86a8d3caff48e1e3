//! The half of planning that every rank repeats: owners, work, needs and stage cuts, from which one rank's plan follows.

use counterpoint_mask::{Band, Mask, Range};

use crate::by_seconds::by_seconds;
use crate::dispatch::chunk_work_with_away;
use crate::division::{Division, Owners};
use crate::exchange::{exchange, exchange_part};
use crate::hosting::Away;
use crate::receive_order::{ReceiveOrder, most_layers};
use crate::rows::without;
use crate::runs::Runs;
use crate::stages::{StageCuts, cut};
use crate::work::{RowList, needed_rows};
use crate::{
    AttentionSpec, Dispatch, GroupPart, HostedWork, Plan, PlanConfig, PlanError, RankPlan, StagePlan,
    UnweighedOffload, chunk_work, dispatch, dispatch_keys, dispatch_queries,
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
    ) -> Vec<Self> {
        let Owners { q_dispatch, k_dispatch, k_runs, .. } = owners;
        let k_rows: Vec<usize> = (0..work.len()).map(|rank| k_dispatch.tokens(rank)).collect();
        let owned: Vec<Vec<Range>> = (0..work.len()).map(|rank| k_dispatch.ranges(rank)).collect();
        let missing: Vec<Vec<Range>> =
            work.iter().zip(&owned).map(|(work, own)| without(&needed_rows(work), own)).collect();
        let received: Vec<usize> = missing.iter().map(|rows| rows.iter().map(Range::len).sum()).collect();
        let layers = most_layers(&work, &received, spec, config);
        let order = ReceiveOrder::new(k_runs, &k_rows, &config.topology, layers);
        let mut hosted = hosted.into_iter();
        work.into_iter()
            .zip(owned)
            .enumerate()
            .map(|(rank, (work, own))| {
                let remote = RowList::new(order.of(rank, &missing[rank]));
                Self { own, q_rows: q_dispatch.tokens(rank), work, remote, hosted: hosted.next() }
            })
            .collect()
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
    pub(crate) fn new(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Self, PlanError> {
        config.validate_for(mask)?;
        if mask.seqlen_q() != mask.seqlen_k() {
            return Self::cross_attention(mask, spec, config);
        }
        let chunk_size = config.chunk_size_for(mask.seqlen_q());
        let dispatch_with = |away: &[Range]| {
            let work = chunk_work_with_away(mask, chunk_size, away);
            let mut dispatch = dispatch(&work, config.topology.world_size, config.dispatch);
            if away.is_empty() {
                dispatch = by_seconds(mask, &work, dispatch, spec, config);
            }
            Owners::new(dispatch.clone(), dispatch)
        };
        let division = Division::choose(mask, spec, config, dispatch_with(&[]), dispatch_with);
        Ok(Self::of(division, spec, config))
    }

    pub(crate) fn cross_attention(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Self, PlanError> {
        config.validate_for(mask)?;
        let work = chunk_work(mask, config.chunk_size_for(mask.seqlen_q()));
        let q_dispatch = dispatch_queries(&work, config.topology.world_size, config.dispatch);
        let k_dispatch = dispatch_keys(&work, &q_dispatch, config.chunk_size_for(mask.seqlen_k()));
        let owners = Owners::new(q_dispatch, k_dispatch);
        let division = Division::choose(mask, spec, config, owners.clone(), |_| owners.clone());
        Ok(Self::of(division, spec, config))
    }

    pub(crate) fn on(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        q_dispatch: Dispatch,
        k_dispatch: Dispatch,
    ) -> Result<Self, PlanError> {
        fits(mask, config, [&q_dispatch, &k_dispatch])?;
        let owners = Owners::new(q_dispatch, k_dispatch);
        let division = Division::choose(mask, spec, config, owners.clone(), |_| owners.clone());
        Ok(Self::of(division, spec, config))
    }

    /// The division of `plan`, whose local query rows `away` are computed where their keys are.
    pub(crate) fn again(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        plan: &Plan,
        away: &Away,
    ) -> Result<Self, PlanError> {
        fits(mask, config, [&plan.q_dispatch, &plan.k_dispatch])?;
        let owners = Owners::new(plan.q_dispatch.clone(), plan.k_dispatch.clone());
        Ok(Self::of(Division::with_away(mask, owners, away), spec, config))
    }

    /// Of a division of the work.
    pub(crate) fn of(division: Division, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        let Division { owners, work, hosted, unweighed } = division;
        let ranks = RankOutline::of(&owners, work, hosted, spec, config);
        let Owners { q_dispatch, k_dispatch, k_runs, .. } = owners;
        let [forward, backward] = cut(&ranks, &k_runs, spec, config);
        Self { q_dispatch, k_dispatch, k_runs, ranks, forward, backward, unweighed }
    }

    /// Writes out every rank's part.
    pub(crate) fn into_plan(self) -> Plan {
        let parts = self.parts_of_all(&self.forward).into_iter().zip(self.parts_of_all(&self.backward));
        let ranks = parts
            .enumerate()
            .map(|(rank, (forward, backward))| self.rank_plan(rank, forward, backward))
            .collect();
        Plan { q_dispatch: self.q_dispatch, k_dispatch: self.k_dispatch, ranks, two_level: None }
    }

    /// Writes out one rank's part.
    pub(crate) fn into_rank(self, rank: usize) -> RankPlan {
        self.rank_plan(rank, self.parts_of_one(&self.forward, rank), self.parts_of_one(&self.backward, rank))
    }

    /// The parts in all group-casts, by rank, then stage.
    fn parts_of_all(&self, cuts: &StageCuts) -> Vec<Vec<GroupPart>> {
        let mut parts = vec![Vec::with_capacity(cuts.stages()); self.ranks.len()];
        parts.iter_mut().for_each(|parts| parts.push(GroupPart::default()));
        for stage in 1..cuts.stages() {
            let stage_parts = exchange(&self.k_runs, &cuts.placed_rows(stage));
            parts.iter_mut().zip(stage_parts).for_each(|(parts, part)| parts.push(part));
        }
        parts
    }

    /// One rank's parts in all group-casts, by stage.
    fn parts_of_one(&self, cuts: &StageCuts, rank: usize) -> Vec<GroupPart> {
        let mut parts = vec![GroupPart::default()];
        parts.extend(
            (1..cuts.stages()).map(|stage| exchange_part(&self.k_runs, &cuts.placed_rows(stage), rank)),
        );
        parts
    }

    fn rank_plan(&self, rank: usize, forward: Vec<GroupPart>, backward: Vec<GroupPart>) -> RankPlan {
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

    fn stage_plans(&self, rank: usize, cuts: &StageCuts, parts: Vec<GroupPart>) -> Vec<StagePlan> {
        let bands = cuts.bands(rank, &self.ranks[rank]);
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
