//! Slices as users and MagiAttention write masks: a query range, a key range and one of four types.

use serde::{Deserialize, Serialize};

use crate::{Band, Range};

/// The shape of the unmasked part of an [`AttnSlice`]. With `i = row - q.start`, `j = col - k.start`, `sq`, `sk` the
/// lengths of the two ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum MaskType {
    /// Every pair.
    Full = 0,
    /// `j - i <= sk - sq`: aligned to the bottom-right corner.
    Causal = 1,
    /// `j >= i`: aligned to the top-left corner.
    InvCausal = 2,
    /// Both conditions: a band; empty when `sq > sk`.
    BiCausal = 3,
}

impl MaskType {
    /// The name used in JSON and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::InvCausal => "inv_causal",
            Self::BiCausal => "bi_causal",
        }
    }
}

impl std::fmt::Display for MaskType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A rectangle of the (query, key) plane and the shape of its unmasked part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttnSlice {
    /// Query rows.
    pub q_range: Range,
    /// Key columns.
    pub k_range: Range,
    /// Which pairs of the rectangle are unmasked.
    pub mask_type: MaskType,
}

impl AttnSlice {
    /// A slice; ranges may be empty (its area is then 0).
    pub const fn new(q_range: Range, k_range: Range, mask_type: MaskType) -> Self {
        Self { q_range, k_range, mask_type }
    }

    /// The same set of pairs as a [`Band`].
    pub fn band(&self) -> Band {
        let (q, k) = (self.q_range, self.k_range);
        let upper = matches!(self.mask_type, MaskType::Causal | MaskType::BiCausal);
        let lower = matches!(self.mask_type, MaskType::InvCausal | MaskType::BiCausal);
        Band {
            q_range: q,
            k_range: k,
            diag_min: if lower { k.start as i64 - q.start as i64 } else { Band::NO_MIN },
            diag_max: if upper { k.end as i64 - q.end as i64 } else { Band::NO_MAX },
        }
    }

    /// Number of unmasked pairs, in closed form.
    pub fn area(&self) -> u64 {
        self.band().area()
    }

    /// Whether query `row` sees key `col`.
    pub fn contains(&self, row: usize, col: usize) -> bool {
        self.band().contains(row, col)
    }

    /// The rows before `at`, and the rows from `at` on, as slices: at most three on each side.
    pub fn cut_rows(&self, at: usize) -> (Vec<AttnSlice>, Vec<AttnSlice>) {
        let (above, below) = self.band().cut_rows(at);
        (above.to_slices().collect(), below.to_slices().collect())
    }

    /// The columns before `at`, and the columns from `at` on, as slices: at most three on each side.
    pub fn cut_cols(&self, at: usize) -> (Vec<AttnSlice>, Vec<AttnSlice>) {
        let (left, right) = self.band().cut_cols(at);
        (left.to_slices().collect(), right.to_slices().collect())
    }
}
