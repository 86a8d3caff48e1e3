use counterpoint_mask::{Band, Mask, Range};

use crate::runs::Runs;
use crate::stages::{StageCuts, cut};
use crate::work::{RowList, needed_rows, rank_work, without};
use crate::{
    AttentionSpec, Dispatch, PlanConfig, PlanError, chunk_work, dispatch, dispatch_keys, dispatch_queries,
};

/// What all ranks must know of each rank: its work and what it receives.
pub(crate) struct RankOutline {
    /// Global key rows that it owns, merged and ascending.
    pub(crate) own: Vec<Range>,
    /// Local query rows, global key columns.
    pub(crate) work: Vec<Band>,
    /// Global key rows that it needs and does not own.
    pub(crate) remote: RowList,
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
        config.validate()?;
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
        config.validate()?;
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
        let k_runs = Runs::new(&k_dispatch);
        let work = match q_dispatch == k_dispatch {
            true => rank_work(mask, &k_runs, q_dispatch.cp_size()),
            false => rank_work(mask, &Runs::new(&q_dispatch), q_dispatch.cp_size()),
        };
        let ranks: Vec<RankOutline> = work
            .into_iter()
            .enumerate()
            .map(|(rank, work)| {
                let own = k_dispatch.ranges(rank);
                let remote = RowList::new(without(&needed_rows(&work), &own));
                RankOutline { own, work, remote }
            })
            .collect();
        let [forward, backward] = cut(&ranks, &k_runs, spec, config);
        Self { q_dispatch, k_dispatch, k_runs, ranks, forward, backward }
    }
}
