//! Tables of the rows of a rank's experts, as the passes of a layer are lowered from them.

use std::sync::Arc;

use counterpoint_mask::Range;

use crate::GroupPart;

/// A row of a rank's experts: the token that it is, where that comes to and where it leaves from. Tokens of a rank are fewer than 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertRow {
    /// The token's row among those that arrive with its group; of the rank's own tokens its number.
    pub token: u32,
    /// The token's row among those of its group that leave.
    pub leaving: u32,
    /// Its group.
    pub group: u32,
    /// Whether it is a token of the rank itself, which needs no way.
    pub is_own: bool,
    /// Whether no expert of this rank before has it.
    pub is_first: bool,
}

/// Tokens of a group on a rank that has experts of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupRows {
    /// Rows of the other ranks' tokens: those that have an expert here, rank after rank.
    pub arriving: usize,
    /// The rank's part in bringing them: it owns its tokens, all groups', and the other side is a tensor of `arriving` rows.
    pub cast: Arc<GroupPart>,
    /// Rows of all ranks' tokens, its own included.
    pub leaving: usize,
    /// The rank's part in taking them back: it owns its tokens, all groups', and the other side is a tensor of `leaving` rows.
    pub reduce: Arc<GroupPart>,
}

/// The rows of a rank's experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRows {
    /// Rows of each expert; they follow each other.
    pub experts: Vec<Range>,
    /// All of them: of each expert the tokens of rank 0, then those of rank 1, and so on, in their order.
    pub rows: Vec<ExpertRow>,
    /// What travels, group by group.
    pub groups: Vec<GroupRows>,
}

impl ExpertRows {
    /// Those of an expert.
    pub fn of_expert(&self, expert: usize) -> &[ExpertRow] {
        let Range { start, end } = self.experts[expert];
        &self.rows[start..end]
    }
}
