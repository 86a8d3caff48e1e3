//! Stages as cuts of each rank's list of remote rows: what a rank receives in each of them, and the bands that it computes.

use counterpoint_mask::{Band, Range};

use crate::GroupPart;
use crate::exchange::{PlacedRows, exchange, exchange_part, sweep};
use crate::rank_outline::RankOutline;
use crate::runs::Runs;
use crate::work::{KeySegment, cut_into_stages};

/// The cuts of every rank's list of remote rows, for one direction.
#[derive(Clone, Debug)]
pub struct StageCuts {
    stages: usize,
    /// `rows[rank * stages + stage]`: global key rows received; empty for stage 0.
    rows: Vec<Vec<Range>>,
    /// By rank: own rows with which the key buffer of stage 1 begins, where all work is done there at once.
    gathered: Option<Vec<usize>>,
}

impl StageCuts {
    /// `places[rank]` are the `stages` ends of the remote stages in the rank's list, stage 0 included as 0.
    pub fn new(ranks: &[RankOutline], places: &[Vec<usize>], stages: usize) -> Self {
        let mut rows = Vec::with_capacity(ranks.len() * stages);
        for (outline, places) in ranks.iter().zip(places) {
            rows.push(Vec::new());
            rows.extend(places.windows(2).map(|cut| outline.remote.rows(cut[0], cut[1])));
        }
        Self { stages, rows, gathered: None }
    }

    /// Stage 0 alone.
    pub fn local(ranks: usize) -> Self {
        Self { stages: 1, rows: vec![Vec::new(); ranks], gathered: None }
    }

    /// All work in one stage, which takes received rows as they arrive.
    pub fn gathered(ranks: &[RankOutline]) -> Self {
        let rows = ranks.iter().flat_map(|outline| [Vec::new(), outline.remote.ranges().to_vec()]).collect();
        Self { stages: 2, rows, gathered: Some(ranks.iter().map(RankOutline::own_rows).collect()) }
    }

    /// Own rows with which the key buffer of a stage begins that does all of `rank`'s work; 0 in all others.
    pub fn own_rows(&self, rank: usize, stage: usize) -> usize {
        self.gathered.as_ref().filter(|_| stage == 1).map_or(0, |own_rows| own_rows[rank])
    }

    /// Number of stages, stage 0 included.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Global key rows that `rank` receives in `stage`, in the order of its key buffer.
    pub fn rows(&self, rank: usize, stage: usize) -> &[Range] {
        &self.rows[rank * self.stages + stage]
    }

    /// The parts of all ranks in the group-cast of a stage but stage 0, whose keys belong to the owners of `runs`.
    pub fn parts(&self, runs: &Runs, stage: usize) -> Vec<GroupPart> {
        exchange(runs, &self.placed_rows(stage))
    }

    /// Hands `visit` the owner, the receivers and the rows of every piece that travels in the group-cast of a stage but stage 0: what is
    /// counted of it, without the parts.
    pub fn pieces(&self, runs: &Runs, stage: usize, mut visit: impl FnMut(u32, &[u32], usize)) {
        sweep(runs, &self.placed_rows(stage), |owner, piece, receivers| {
            visit(owner.rank, receivers.ranks, piece.len());
        });
    }

    /// That of one rank.
    pub fn part(&self, runs: &Runs, stage: usize, rank: usize) -> GroupPart {
        exchange_part(runs, &self.placed_rows(stage), rank)
    }

    /// As [`StageCuts::rows`], of all ranks, ascending.
    fn placed_rows(&self, stage: usize) -> Vec<Vec<PlacedRows>> {
        let placed = |rank| PlacedRows::of(self.rows(rank, stage), self.own_rows(rank, stage));
        (0..self.rows.len() / self.stages).map(placed).collect()
    }

    /// The bands of every stage of `rank`.
    pub fn bands(&self, rank: usize, outline: &RankOutline) -> Vec<Vec<Band>> {
        let mut segments =
            Vec::with_capacity(outline.own.len() + outline.remote.ranges().len() + self.stages);
        let mut add = |stage: usize, mut start: usize, rows: &[Range]| {
            for &range in rows {
                segments.push(KeySegment { range, stage, start });
                start += range.len();
            }
        };
        add(usize::from(self.gathered.is_some()), 0, &outline.own);
        for stage in 1..self.stages {
            add(stage, self.own_rows(rank, stage), self.rows(rank, stage));
        }
        segments.sort_unstable_by_key(|segment| segment.range.start);
        cut_into_stages(&outline.work, &segments, self.stages)
    }
}
