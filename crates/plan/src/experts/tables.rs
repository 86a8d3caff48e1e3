//! Tables of the rows of a rank's experts, as the passes of a layer are lowered from them.

use std::sync::{Arc, OnceLock};

use counterpoint_mask::Range;

use super::rows::ChoicesHere;
use crate::GroupPart;

/// The rows of a rank's experts: of each expert the tokens of rank 0, then those of rank 1, and so on, in their order. Which tokens they are and
/// to which tokens they give is found when a pass first asks for it. Rows and tokens of a rank are fewer than 2^32.
#[derive(Debug, Default, PartialEq)]
pub struct ExpertRows {
    /// The rank.
    pub rank: usize,
    /// Rows of each expert; they follow each other.
    pub experts: Vec<Range>,
    pub(super) choices: OnceLock<ChoicesHere>,
    pub(super) arriving: OnceLock<ArrivingRows>,
    pub(super) leaving: OnceLock<LeavingRows>,
}

/// The rows of a rank's experts as the tokens that they are, which come from other ranks or are the rank's own.
#[derive(Debug, PartialEq)]
pub struct ArrivingRows {
    /// Of each row the token's row among those that arrive with its group; of the rank's own tokens its number.
    pub tokens: Arc<Vec<u32>>,
    /// Rows that follow each other whose tokens come to one place, expert by expert.
    pub(super) runs: Vec<TokenRun>,
    /// Where the runs of each expert begin, and where the last one's end.
    pub(super) run_starts: Vec<usize>,
    /// What travels, group by group.
    pub groups: Vec<ArrivingGroup>,
}

/// Rows of an expert whose tokens come to one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// The rows.
    pub rows: Range,
    /// The group that the tokens arrive with; `None` of the rank's own, which need no way.
    pub group: Option<usize>,
}

/// Tokens of a group on their way to a rank that has experts of them.
#[derive(Clone, Debug, PartialEq)]
pub struct ArrivingGroup {
    /// Rows of the other ranks' tokens: those that have an expert here, rank after rank.
    pub rows: usize,
    /// The rank's part in bringing them: it owns its tokens, all groups', and the other side is a tensor of these rows.
    pub cast: Arc<GroupPart>,
}

/// The tokens that the rows of a rank's experts give to.
#[derive(Debug, PartialEq)]
pub struct LeavingRows {
    /// The rows, group by group and of each expert by expert: first those whose token no expert of this rank before has, then others.
    pub rows: Arc<Vec<u32>>,
    /// Of each of them the token's row among those of its group that leave.
    pub to: Arc<Vec<u32>>,
    /// Where those of each group and expert begin, both kinds, and where the last ones end.
    pub(super) starts: Vec<u32>,
    /// What travels, group by group.
    pub groups: Vec<LeavingGroup>,
}

/// Tokens of a group on their way back from a rank that has experts of them.
#[derive(Clone, Debug, PartialEq)]
pub struct LeavingGroup {
    /// Rows of all ranks' tokens, its own included.
    pub rows: usize,
    /// The rank's part in taking them back: it owns its tokens, all groups', and the other side is a tensor of these rows.
    pub reduce: Arc<GroupPart>,
}

impl ExpertRows {
    /// Of a rank whose experts have these.
    pub fn new(rank: usize, experts: Vec<Range>) -> Self {
        Self { rank, experts, ..Self::default() }
    }

    /// Rows of all experts.
    pub fn count(&self) -> usize {
        self.experts.last().map_or(0, |last| last.end)
    }
}

impl ArrivingRows {
    /// The rows of an expert.
    pub fn runs_of(&self, expert: usize) -> &[TokenRun] {
        &self.runs[self.run_starts[expert]..self.run_starts[expert + 1]]
    }
}

impl LeavingRows {
    /// Where rows of a group are, of an expert among so many: those whose token no expert of this rank before has, and others.
    pub fn given(&self, group: usize, (expert, experts): (usize, usize)) -> [Range; 2] {
        let first = 2 * (group * experts + expert);
        [first, first + 1].map(|at| Range::new(self.starts[at] as usize, self.starts[at + 1] as usize))
    }
}
