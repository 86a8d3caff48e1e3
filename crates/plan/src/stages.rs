use counterpoint_mask::{Band, Range};

use crate::outline::RankOutline;
use crate::runs::Runs;
use crate::work::{KeySegment, cut_into_stages};
use crate::{AttentionSpec, KEY_BLOCK, PlanConfig, StageCount};

/// The cuts of every rank's list of remote rows, for one direction.
pub(crate) struct StageCuts {
    stages: usize,
    /// `rows[rank * stages + stage]`: global key rows received; empty for stage 0.
    rows: Vec<Vec<Range>>,
}

impl StageCuts {
    /// `places[rank]` are the `stages` ends of the remote stages in the rank's list, stage 0 included as 0.
    fn new(ranks: &[RankOutline], places: &[Vec<usize>], stages: usize) -> Self {
        let mut rows = Vec::with_capacity(ranks.len() * stages);
        for (outline, places) in ranks.iter().zip(places) {
            rows.push(Vec::new());
            rows.extend(places.windows(2).map(|cut| outline.remote.rows(cut[0], cut[1])));
        }
        Self { stages, rows }
    }

    /// Number of stages, stage 0 included.
    pub(crate) fn stages(&self) -> usize {
        self.stages
    }

    /// Global key rows that `rank` receives in `stage`, merged and ascending.
    pub(crate) fn rows(&self, rank: usize, stage: usize) -> &[Range] {
        &self.rows[rank * self.stages + stage]
    }

    /// The bands of every stage of `rank`.
    pub(crate) fn bands(&self, rank: usize, outline: &RankOutline) -> Vec<Vec<Band>> {
        let mut segments = Vec::with_capacity(outline.own.len() + outline.remote.ranges.len() + self.stages);
        let mut add = |stage: usize, rows: &[Range]| {
            let mut start = 0;
            for &range in rows {
                segments.push(KeySegment { range, stage, start });
                start += range.len();
            }
        };
        add(0, &outline.own);
        for stage in 1..self.stages {
            add(stage, self.rows(rank, stage));
        }
        segments.sort_unstable_by_key(|segment| segment.range.start);
        cut_into_stages(&outline.work, &segments, self.stages)
    }
}

/// Cuts for the forward and for the backward.
pub(crate) fn cut(
    ranks: &[RankOutline],
    _runs: &Runs,
    _spec: &AttentionSpec,
    config: &PlanConfig,
) -> [StageCuts; 2] {
    let remote = match config.stages {
        _ if ranks.iter().all(|rank| rank.remote.len() == 0) => 0,
        StageCount::Auto => 4,
        StageCount::Fixed(stages) => stages,
    };
    [(), ()].map(|()| {
        let places: Vec<Vec<usize>> = ranks
            .iter()
            .map(|rank| {
                let length = rank.remote.len();
                let blocks = length.div_ceil(KEY_BLOCK);
                (0..=remote).map(|stage| (blocks * stage / remote.max(1) * KEY_BLOCK).min(length)).collect()
            })
            .collect();
        StageCuts::new(ranks, &places, remote + 1)
    })
}
