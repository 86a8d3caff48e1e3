//! Who owns which rows and does which work: keys to the queries, or queries to the keys.

use counterpoint_mask::{Band, Mask, Range};

use crate::hosting::{Away, MOST_PIECES, UnweighedOffload, assign, pieces, proposals};
use crate::outline::Outline;
use crate::rows::without;
use crate::runs::Runs;
use crate::work::{needed_rows, rank_work};
use crate::{
    AttentionSpec, Dispatch, HostedWork, PlanConfig, PlanError, Planning, Prediction, QueryExchange,
    StageCount,
};

/// Who owns which rows.
#[derive(Clone)]
pub(crate) struct Owners {
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
    pub(crate) fn new(q_dispatch: Dispatch, k_dispatch: Dispatch) -> Self {
        let k_runs = Runs::new(&k_dispatch);
        let q_runs = if q_dispatch == k_dispatch { k_runs.clone() } else { Runs::new(&q_dispatch) };
        Self { q_dispatch, k_dispatch, q_runs, k_runs }
    }

    /// By rank: local query rows, global key columns.
    pub(crate) fn work(&self, mask: &Mask) -> Vec<Vec<Band>> {
        rank_work(mask, &self.q_runs, self.q_dispatch.cp_size())
    }

    /// Global query rows (merged, ascending), by rank as its local ones.
    fn local(&self, rows: &[Range]) -> Away {
        let mut local: Away = vec![Vec::new(); self.q_dispatch.cp_size()];
        for rows in rows {
            for run in self.q_runs.overlapping(rows) {
                local[run.rank as usize].push(run.local(&run.range.intersect(rows)));
            }
        }
        local.into_iter().map(Range::merged).collect()
    }

    /// The other way round.
    fn global(&self, away: &Away) -> Vec<Range> {
        let mut rows = Vec::new();
        for run in self.q_runs.all() {
            let here = run.local(&run.range);
            let away = away[run.rank as usize].iter().map(|rows| rows.intersect(&here));
            let to_global = |rows: Range| {
                let start = run.range.start + (rows.start - here.start);
                Range::new(start, start + rows.len())
            };
            rows.extend(away.filter(|rows| !rows.is_empty()).map(to_global));
        }
        Range::merged(rows)
    }
}

/// One way to give work to ranks.
#[derive(Clone)]
pub(crate) struct Division {
    pub(crate) owners: Owners,
    /// By rank: local query rows, global key columns; without rows that are away.
    pub(crate) work: Vec<Vec<Band>>,
    /// By rank; empty where no row is away.
    pub(crate) hosted: Vec<HostedWork>,
    /// A way that was not weighed, because it comes in too many pieces.
    pub(crate) unweighed: Option<UnweighedOffload>,
}

impl Division {
    /// The division of `mask` for these owners; or, where rows that are away make it better, the best one for them or for those
    /// that `redispatch` finds, knowing which query rows are away. Ways in more than [`MOST_PIECES`] pieces are passed over.
    pub(crate) fn choose(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
        owners: Owners,
        redispatch: impl Fn(&[Range]) -> Result<Owners, PlanError>,
    ) -> Result<Self, PlanError> {
        let work = owners.work(mask);
        let Owners { q_dispatch, k_dispatch, k_runs, .. } = &owners;
        let proposals = proposals(&work, q_dispatch, k_dispatch, k_runs, spec, config);
        let without = Self { owners, work, hosted: Vec::new(), unweighed: None };
        if proposals.is_empty() {
            return Ok(without);
        }
        let mut aim = Aim::of(&without, spec, config, planning)?;
        let (mut best, mut unweighed) = (None, None);
        // One at a time: of thousands of ranks each takes hundreds of megabytes.
        let mut weigh = |owners: Owners, work: &[Vec<Band>], away: &Away| {
            planning.check()?;
            let pieces = pieces(work, away, &owners.q_dispatch, &owners.k_runs);
            if pieces > MOST_PIECES {
                unweighed = Some(UnweighedOffload { pieces });
                return Ok(());
            }
            let (work, hosted) = assign(work, away, &owners.q_dispatch, &owners.q_runs, &owners.k_runs);
            let division = Self { owners, work, hosted, unweighed: None };
            if aim.is_nearer(&division, spec, config, planning)? {
                best = Some(division);
            }
            Ok(())
        };
        for away in proposals {
            let rows = without.owners.global(&away);
            let other = redispatch(&rows)?;
            if other != without.owners {
                let (work, away) = (other.work(mask), other.local(&rows));
                weigh(other, &work, &away)?;
            }
            weigh(without.owners.clone(), &without.work, &away)?;
        }
        Ok(Self { unweighed, ..best.unwrap_or(without) })
    }

    /// The division of `mask` for these owners in which these local query rows of each rank are away.
    pub(crate) fn with_away(mask: &Mask, owners: Owners, away: &Away) -> Self {
        let work = owners.work(mask);
        if away.iter().all(Vec::is_empty) {
            return Self { owners, work, hosted: Vec::new(), unweighed: None };
        }
        let (work, hosted) = assign(&work, away, &owners.q_dispatch, &owners.q_runs, &owners.k_runs);
        Self { owners, work, hosted, unweighed: None }
    }

    /// Predicted, of a forward and of a backward.
    fn seconds(
        &self,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<(f64, f64), PlanError> {
        // Who computes what, and with it every bit of a result, must not depend on the stages that were asked for.
        let config = PlanConfig { stages: StageCount::Auto.into(), ..*config };
        let outline = Outline::of(self.clone(), spec, &config, planning)?;
        let prediction = Prediction::of_outline(&outline, spec, &config);
        Ok((prediction.forward_seconds(), prediction.backward_seconds()))
    }

    /// Bytes that travel in a forward and a backward.
    fn bytes(&self, spec: &AttentionSpec) -> u64 {
        let keys = |(rank, work): (usize, &Vec<Band>)| -> usize {
            let own = self.owners.k_dispatch.ranges(rank);
            without(&needed_rows(work), &own).iter().map(Range::len).sum()
        };
        let keys: usize = self.work.iter().enumerate().map(keys).sum();
        let queries = self.hosted.iter().enumerate().map(|(rank, hosted)| hosted.recv_rows(rank));
        keys as u64 * spec.exchanged_key_bytes() + queries.sum::<u64>() * spec.exchanged_query_bytes()
    }
}

/// What the best way to divide work is the nearest to.
enum Aim {
    /// The least of those seen so far, if any was.
    FewestBytes(Option<u64>),
    /// Seconds of a forward and of a backward without rows that are away, of which neither may take longer, and the least of both
    /// together so far.
    Soonest { limit: (f64, f64), least: f64 },
}

impl Aim {
    fn of(
        without: &Division,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        Ok(match config.query_exchange {
            QueryExchange::FewestBytes => Self::FewestBytes(None),
            _ => {
                let limit = without.seconds(spec, config, planning)?;
                Self::Soonest { limit, least: limit.0 + limit.1 }
            }
        })
    }

    /// Whether it is nearer than all before it.
    fn is_nearer(
        &mut self,
        division: &Division,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<bool, PlanError> {
        Ok(match self {
            Self::FewestBytes(least) => {
                let bytes = division.bytes(spec);
                let is_nearer = least.is_none_or(|least| bytes < least);
                if is_nearer {
                    *least = Some(bytes);
                }
                is_nearer
            }
            Self::Soonest { limit, least } => {
                let (forward, backward) = division.seconds(spec, config, planning)?;
                let is_nearer = forward <= limit.0 && backward <= limit.1 && forward + backward < *least;
                if is_nearer {
                    *least = forward + backward;
                }
                is_nearer
            }
        })
    }
}
