use counterpoint_mask::{Band, Mask, Range};

use crate::exchange::{exchange, exchange_part};
use crate::hosting::{Away, assign, proposals};
use crate::receive_order::ReceiveOrder;
use crate::runs::Runs;
use crate::stages::{StageCuts, cut};
use crate::work::{RowList, needed_rows, rank_work, without};
use crate::{
    AttentionSpec, Dispatch, GroupPart, HostedWork, Plan, PlanConfig, PlanError, Prediction, QueryExchange,
    RankPlan, StageCount, StagePlan, chunk_work, dispatch, dispatch_keys, dispatch_queries,
};

/// What all ranks must know of each rank: its work and what it receives.
pub(crate) struct RankOutline {
    /// Global key rows that it owns, merged and ascending.
    pub(crate) own: Vec<Range>,
    /// Local query rows, global key columns; without rows that are away.
    pub(crate) work: Vec<Band>,
    /// Global key rows that it needs and does not own, in the order in which it receives them.
    pub(crate) remote: RowList,
    /// What it computes for rows that are away; on every rank or on none.
    pub(crate) hosted: Option<HostedWork>,
}

/// Who owns which rows.
#[derive(Clone)]
struct Owners {
    q_dispatch: Dispatch,
    k_dispatch: Dispatch,
    k_runs: Runs,
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
}

impl Outline {
    pub(crate) fn new(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Result<Self, PlanError> {
        config.validate_for(mask)?;
        if mask.seqlen_q() != mask.seqlen_k() {
            return Self::cross_attention(mask, spec, config);
        }
        let work = chunk_work(mask, config.chunk_size_for(mask.seqlen_q()));
        let dispatch = dispatch(&work, config.topology.world_size, config.dispatch);
        Ok(Self::build(mask, spec, config, dispatch.clone(), dispatch))
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
        Ok(Self::build(mask, spec, config, q_dispatch, k_dispatch))
    }

    pub(crate) fn on(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        q_dispatch: Dispatch,
        k_dispatch: Dispatch,
    ) -> Result<Self, PlanError> {
        config.validate()?;
        for (axis, mask_len, plan_len) in
            [("q", mask.seqlen_q(), q_dispatch.seqlen()), ("k", mask.seqlen_k(), k_dispatch.seqlen())]
        {
            if mask_len != plan_len {
                return Err(PlanError::OtherLength { axis, mask: mask_len, plan: plan_len });
            }
        }
        if config.topology.world_size != q_dispatch.cp_size() {
            return Err(PlanError::OtherWorldSize {
                config: config.topology.world_size,
                plan: q_dispatch.cp_size(),
            });
        }
        Ok(Self::build(mask, spec, config, q_dispatch, k_dispatch))
    }

    fn build(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        q_dispatch: Dispatch,
        k_dispatch: Dispatch,
    ) -> Self {
        let owners = Owners { k_runs: Runs::new(&k_dispatch), q_dispatch, k_dispatch };
        let q_runs = (owners.q_dispatch != owners.k_dispatch).then(|| Runs::new(&owners.q_dispatch));
        let q_runs = q_runs.as_ref().unwrap_or(&owners.k_runs);
        let work = rank_work(mask, q_runs, owners.q_dispatch.cp_size());
        let away = Self::away(&work, &owners, q_runs, spec, config);
        let (work, hosted) = match &away {
            Some(away) => assign(&work, away, &owners.q_dispatch, q_runs, &owners.k_runs),
            None => (work, Vec::new()),
        };
        Self::of_work(work, hosted, owners, spec, config)
    }

    /// The rows that are away, where some are.
    fn away(
        work: &[Vec<Band>],
        owners: &Owners,
        q_runs: &Runs,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Option<Away> {
        let Owners { q_dispatch, k_dispatch, k_runs } = owners;
        let mut proposals = proposals(work, q_dispatch, k_dispatch, k_runs, spec, config);
        if proposals.is_empty() || config.query_exchange == QueryExchange::FewestBytes {
            return proposals.pop();
        }
        // Who computes what, and with it every bit of a result, must not depend on the stages that were asked for.
        let config = PlanConfig { stages: StageCount::Auto, ..*config };
        let seconds = |(work, hosted): (Vec<Vec<Band>>, Vec<HostedWork>)| {
            let plan = Self::of_work(work, hosted, owners.clone(), spec, &config).into_plan();
            let prediction = Prediction::new(&plan, spec, &config);
            (prediction.forward_seconds(), prediction.backward_seconds())
        };
        let without = seconds((work.to_vec(), Vec::new()));
        let mut best = (None, without.0 + without.1);
        for away in proposals {
            let (forward, backward) = seconds(assign(work, &away, q_dispatch, q_runs, k_runs));
            if forward <= without.0 && backward <= without.1 && forward + backward < best.1 {
                best = (Some(away), forward + backward);
            }
        }
        best.0
    }

    /// Of work that is given to ranks. `hosted` is empty where no row is away.
    fn of_work(
        work: Vec<Vec<Band>>,
        hosted: Vec<HostedWork>,
        owners: Owners,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Self {
        let Owners { q_dispatch, k_dispatch, k_runs } = owners;
        let k_rows: Vec<usize> = (0..work.len()).map(|rank| k_dispatch.tokens(rank)).collect();
        let order = ReceiveOrder::new(&k_runs, &k_rows, &config.topology);
        let mut hosted = hosted.into_iter();
        let ranks: Vec<RankOutline> = work
            .into_iter()
            .enumerate()
            .map(|(rank, work)| {
                let own = k_dispatch.ranges(rank);
                let remote = RowList::new(order.of(rank, &without(&needed_rows(&work), &own)));
                RankOutline { own, work, remote, hosted: hosted.next() }
            })
            .collect();
        let [forward, backward] = cut(&ranks, &k_runs, spec, config);
        Self { q_dispatch, k_dispatch, k_runs, ranks, forward, backward }
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
            let key_rows = match stage {
                0 => self.k_dispatch.tokens(rank),
                _ => recv_ranges.iter().map(Range::len).sum(),
            };
            let area = bands.iter().map(Band::area).sum();
            StagePlan { part, recv_ranges, key_rows, bands: bands.into(), area }
        });
        stages.collect()
    }
}
