//! Who owns which rows and does which work: keys to the queries, or queries to the keys.

use counterpoint_mask::{Band, Mask, Range};

use crate::hosting::{HostedRows, OffloadedRows, assign, pieces};
use crate::runs::Runs;
use crate::work::{needed_rows, rank_work};
use crate::{AttentionSpec, Dispatch, HostedWork};

/// Who owns which rows.
#[derive(Clone, Debug)]
pub struct Owners {
    pub(crate) q_dispatch: Dispatch,
    pub(crate) k_dispatch: Dispatch,
    pub(crate) q_runs: Runs,
    pub(crate) k_runs: Runs,
}

impl PartialEq for Owners {
    fn eq(&self, other: &Self) -> bool {
        // Runs follow from dispatches.
        self.q_dispatch == other.q_dispatch && self.k_dispatch == other.k_dispatch
    }
}

impl Owners {
    /// Of queries and of keys; the same dispatch twice for self-attention.
    pub fn new(q_dispatch: Dispatch, k_dispatch: Dispatch) -> Self {
        let k_runs = Runs::new(&k_dispatch);
        let q_runs = if q_dispatch == k_dispatch { k_runs.clone() } else { Runs::new(&q_dispatch) };
        Self { q_dispatch, k_dispatch, q_runs, k_runs }
    }

    /// Of query rows.
    pub fn q_dispatch(&self) -> &Dispatch {
        &self.q_dispatch
    }

    /// Of key rows.
    pub fn k_dispatch(&self) -> &Dispatch {
        &self.k_dispatch
    }

    /// Owners of key rows in global order.
    pub fn k_runs(&self) -> &Runs {
        &self.k_runs
    }

    /// By rank: local query rows, global key columns.
    pub fn work(&self, mask: &Mask) -> Vec<Vec<Band>> {
        rank_work(mask, &self.q_runs, self.q_dispatch.cp_size())
    }

    /// Global query rows (merged, ascending), by rank as its local ones.
    pub fn local(&self, rows: &[Range]) -> OffloadedRows {
        let mut local: OffloadedRows = vec![Vec::new(); self.q_dispatch.cp_size()];
        for rows in rows {
            for run in self.q_runs.overlapping(rows) {
                local[run.rank as usize].push(run.local(&run.range.intersect(rows)));
            }
        }
        local.into_iter().map(Range::merged).collect()
    }

    /// The other way round.
    pub fn global(&self, offloaded: &OffloadedRows) -> Vec<Range> {
        let mut rows = Vec::new();
        for run in self.q_runs.all() {
            let here = run.local(&run.range);
            let offloaded = offloaded[run.rank as usize].iter().map(|rows| rows.intersect(&here));
            let to_global = |rows: Range| {
                let start = run.range.start + (rows.start - here.start);
                Range::new(start, start + rows.len())
            };
            rows.extend(offloaded.filter(|rows| !rows.is_empty()).map(to_global));
        }
        Range::merged(rows)
    }
}

/// One way to give work to ranks.
#[derive(Clone, Debug)]
pub struct Division {
    pub(crate) owners: Owners,
    /// By rank: local query rows, global key columns; without what hosts compute.
    pub(crate) work: Vec<Vec<Band>>,
    /// By rank; empty where no row is offloaded.
    pub(crate) hosted: Vec<HostedWork>,
}

impl Division {
    /// The division of `mask` for these owners in which no row is offloaded.
    pub fn new(mask: &Mask, owners: Owners) -> Self {
        let work = owners.work(mask);
        Self { owners, work, hosted: Vec::new() }
    }

    /// Who owns which rows.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// By rank, what it computes of its own rows: local query rows, global key columns.
    pub fn work(&self) -> &[Vec<Band>] {
        &self.work
    }

    /// Whether any row is offloaded.
    pub fn has_hosts(&self) -> bool {
        !self.hosted.is_empty()
    }

    /// Whether ranks compute with some keys for rows for which hosts compute too.
    pub fn is_hosted_in_part(&self) -> bool {
        self.hosted.iter().zip(&self.work).any(|(hosted, work)| hosted.is_in_part(work.iter()))
    }

    /// By rank, offloaded rows with their hosts.
    pub fn hosted_rows(&self) -> Vec<Vec<HostedRows>> {
        self.hosted.iter().map(HostedWork::hosted_rows).collect()
    }

    /// The same, but these local query rows of each rank are offloaded: the ranks that own their keys compute them. `self` has none that are.
    #[must_use]
    pub fn with_offloaded(&self, offloaded: &OffloadedRows) -> Self {
        self.with_hosts(&HostedRows::by_all(offloaded))
    }

    /// The same, but others compute for these rows of each rank, which are ascending and disjoint: all of their work or some. `self` has none of
    /// which they do.
    #[must_use]
    pub fn with_hosts(&self, offloaded: &[Vec<HostedRows>]) -> Self {
        let owners = self.owners.clone();
        if offloaded.iter().all(Vec::is_empty) {
            return Self { owners, work: self.work.clone(), hosted: Vec::new() };
        }
        let (work, hosted) =
            assign(&self.work, offloaded, &owners.q_dispatch, &owners.q_runs, &owners.k_runs);
        Self { owners, work, hosted }
    }

    /// At least so many bands does [`Division::with_hosts`] cut before it joins neighbours again, where all owners of keys host.
    pub fn hosted_pieces(&self, offloaded: &[Vec<HostedRows>]) -> u64 {
        pieces(&self.work, offloaded, &self.owners.q_dispatch, &self.owners.k_runs)
    }

    /// Bytes that travel in a forward and a backward.
    pub fn bytes(&self, spec: &AttentionSpec) -> u64 {
        let keys = |(rank, work): (usize, &Vec<Band>)| -> usize {
            let own = self.owners.k_dispatch.ranges(rank);
            Range::without(&needed_rows(work), &own).iter().map(Range::len).sum()
        };
        let keys: usize = self.work.iter().enumerate().map(keys).sum();
        let queries = self.hosted.iter().enumerate().map(|(rank, hosted)| hosted.recv_rows(rank));
        keys as u64 * spec.exchanged_key_bytes() + queries.sum::<u64>() * spec.exchanged_query_bytes()
    }
}
