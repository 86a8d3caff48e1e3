//! What all ranks must know of each rank: which rows it owns, what it computes, what it receives and in which order.

use counterpoint_mask::{Band, Range};

use crate::division::Owners;
use crate::receive_order::{ReceiveOrder, most_layers};
use crate::rows::without;
use crate::work::{RowList, needed_rows};
use crate::{AttentionSpec, HostedWork, PlanConfig, PlanError, Planning};

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
