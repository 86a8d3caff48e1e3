//! What all ranks must know of each rank: which rows it owns, what it computes, what it receives and in which order.

use counterpoint_mask::{Band, Range};

use crate::division::{Division, Owners};
use crate::receive_order::ReceiveOrder;
use crate::row_list::RowList;
use crate::work::needed_rows;
use crate::{HostedWork, PlanError, Planning, Topology};

/// What all ranks must know of each rank: its work and what it receives.
#[derive(Clone, Debug)]
pub struct RankOutline {
    /// Global key rows that it owns, merged and ascending.
    pub own: Vec<Range>,
    /// Query rows that it owns.
    pub q_rows: usize,
    /// Local query rows, global key columns; without offloaded rows.
    pub work: Vec<Band>,
    /// Global key rows that it needs and does not own, in the order in which it receives them.
    pub remote: RowList,
    /// What it computes for offloaded rows; on every rank or on none.
    pub hosted: Option<HostedWork>,
}

impl RankOutline {
    /// Query rows whose results are made of what hosts and stages compute: all, where both compute for some.
    pub fn merged_rows(&self) -> usize {
        let in_part = self.hosted.as_ref().is_some_and(|hosted| hosted.is_in_part(self.work.iter()));
        if in_part { self.q_rows } else { 0 }
    }

    /// Those of all ranks, and who owns what. `layers(work, received)` says into how many layers owners' rows are cut at most, in which
    /// ranks receive that do such work, by rank, and receive so many rows for it.
    ///
    /// # Errors
    /// [`PlanError::Cancelled`].
    pub fn of(
        division: Division,
        topology: &Topology,
        layers: impl FnOnce(&[Vec<Band>], &[usize]) -> usize,
        planning: &Planning<'_>,
    ) -> Result<(Owners, Vec<Self>), PlanError> {
        let Division { owners, work, hosted } = division;
        let Owners { q_dispatch, k_dispatch, k_runs, .. } = &owners;
        let k_rows: Vec<usize> = (0..work.len()).map(|rank| k_dispatch.tokens(rank)).collect();
        let owned: Vec<Vec<Range>> = (0..work.len()).map(|rank| k_dispatch.ranges(rank)).collect();
        let missing: Vec<Vec<Range>> =
            planning.map(work.len(), |rank| Range::without(&needed_rows(&work[rank]), &owned[rank]))?;
        let received: Vec<usize> = missing.iter().map(|rows| rows.iter().map(Range::len).sum()).collect();
        let order = ReceiveOrder::new(k_runs, &k_rows, topology, layers(&work, &received));
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
        let ranks = of_ranks.collect();
        Ok((owners, ranks))
    }

    /// Number of key rows that it owns.
    pub fn own_rows(&self) -> usize {
        self.own.iter().map(Range::len).sum()
    }
}
