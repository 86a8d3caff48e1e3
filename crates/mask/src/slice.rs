//! Slices as users and MagiAttention write masks: a query range, a key range and one of four types; from bands and back.

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

impl Band {
    /// The same pairs as at most three slices, from top to bottom. No slice is empty.
    pub fn to_slices(&self) -> impl Iterator<Item = AttnSlice> + Clone + use<> {
        self.trim().map_or([None; 3], Band::slices_of_trimmed).into_iter().flatten()
    }

    /// In a bounding box the upper diagonal enters in the first row and leaves the right edge after `upper_end` rows;
    /// the lower one leaves the left edge at `lower_start`. These two rows cut the band into slices.
    fn slices_of_trimmed(self) -> [Option<AttnSlice>; 3] {
        let (q, k) = (self.q_range, self.k_range);
        let upper_end = match self.diag_max {
            Self::NO_MAX => q.start,
            diag => (k.end as i64 - diag) as usize,
        };
        let lower_start = match self.diag_min {
            Self::NO_MIN => q.end,
            diag => (k.start as i64 - diag) as usize,
        };
        let piece = |start: usize, end: usize| {
            if start >= end {
                return None;
            }
            let mask_type = match (start < upper_end, lower_start < end) {
                // In one row every shape is its interval of columns.
                _ if end - start == 1 => MaskType::Full,
                (false, false) => MaskType::Full,
                (true, false) => MaskType::Causal,
                (false, true) => MaskType::InvCausal,
                (true, true) => MaskType::BiCausal,
            };
            let k_range = Range { start: self.columns(start).start, end: self.columns(end - 1).end };
            Some(AttnSlice { q_range: Range { start, end }, k_range, mask_type })
        };
        let (first, second) = (upper_end.min(lower_start), upper_end.max(lower_start));
        [piece(q.start, first), piece(first, second), piece(second, q.end)]
    }
}
