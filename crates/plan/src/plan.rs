use std::sync::Arc;

use counterpoint_mask::{Band, Range};
use serde::{Deserialize, Serialize};

use crate::{Dispatch, GroupPart};

/// One stage of one rank. Stage 0 is the local work: its key buffer is the rank's own key rows and nothing moves.
/// Stage `s > 0` has a key buffer of its own, filled by one group-cast.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePlan {
    /// This rank's part in the stage's group-cast (and, mirrored, in the group-reduce of dk and dv): `owned` rows are
    /// rows of the rank's own keys, `remote` rows are rows of the stage's key buffer. Empty for stage 0.
    pub part: GroupPart,
    /// Global key rows that the stage receives, merged and ascending: the stage's key buffer in order.
    pub recv_ranges: Vec<Range>,
    /// Rows of the stage's key buffer.
    pub key_rows: usize,
    /// The work: rows are the rank's local query rows, columns are rows of the stage's key buffer.
    pub bands: Arc<[Band]>,
    /// Unmasked pairs.
    pub area: u64,
}

/// One rank's part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankPlan {
    /// The rank.
    pub rank: usize,
    /// Global query rows it owns, merged and ascending: its local query rows in order.
    pub q_ranges: Vec<Range>,
    /// Global key rows it owns, likewise.
    pub k_ranges: Vec<Range>,
    /// Number of local query rows.
    pub q_rows: usize,
    /// Number of local key rows.
    pub k_rows: usize,
    /// Unmasked pairs of its query rows.
    pub area: u64,
    /// Stages of the forward; every rank has the same number.
    pub forward: Vec<StagePlan>,
    /// Stages of the backward, cut on their own.
    pub backward: Vec<StagePlan>,
}

/// Who computes what and who sends what, for one mask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Query rows to ranks.
    pub q_dispatch: Dispatch,
    /// Key rows to ranks; the same as `q_dispatch` for self-attention.
    pub k_dispatch: Dispatch,
    /// Every rank's part.
    pub ranks: Vec<RankPlan>,
}
