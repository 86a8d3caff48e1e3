use serde::{Deserialize, Serialize};

use crate::Range;

/// The pairs of a rectangle whose diagonal `col - row` lies in `[diag_min, diag_max]`.
///
/// Every [`AttnSlice`](crate::AttnSlice) is one band, and clipping a band to a rectangle, intersecting two bands or
/// moving one by offsets gives one band again; a slice cut across a diagonal would need up to three. So planning and
/// kernels work on bands, and slices are what people write and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Band {
    /// Query rows.
    pub q_range: Range,
    /// Key columns.
    pub k_range: Range,
    /// Smallest unmasked `col - row`; [`Band::NO_MIN`] when unbounded.
    pub diag_min: i64,
    /// Largest unmasked `col - row`; [`Band::NO_MAX`] when unbounded.
    pub diag_max: i64,
}

impl Band {
    /// No lower bound on the diagonal. Far outside every index, yet safe to add indices to.
    pub const NO_MIN: i64 = -(1 << 60);
    /// No upper bound on the diagonal.
    pub const NO_MAX: i64 = 1 << 60;

    /// The unmasked columns of `row`: one interval, empty when there are none. `row` must lie in `q_range`.
    pub fn columns(&self, row: usize) -> Range {
        debug_assert!(self.q_range.contains(row));
        let start = (row as i64 + self.diag_min).max(self.k_range.start as i64);
        let end = (row as i64 + self.diag_max + 1).min(self.k_range.end as i64).max(start);
        Range { start: start as usize, end: end as usize }
    }

    /// Whether query `row` sees key `col`.
    pub fn contains(&self, row: usize, col: usize) -> bool {
        let diag = col as i64 - row as i64;
        self.q_range.contains(row)
            && self.k_range.contains(col)
            && self.diag_min <= diag
            && diag <= self.diag_max
    }

    /// The part inside the rectangle `q` x `k`.
    pub fn clip(&self, q: &Range, k: &Range) -> Band {
        Band { q_range: self.q_range.intersect(q), k_range: self.k_range.intersect(k), ..*self }
    }

    /// The same band with its rows moved by `dq` and its columns by `dk` (both may be negative).
    pub fn shift(&self, dq: i64, dk: i64) -> Band {
        let by = |range: Range, d: i64| Range {
            start: (range.start as i64 + d) as usize,
            end: (range.end as i64 + d) as usize,
        };
        Band {
            q_range: by(self.q_range, dq),
            k_range: by(self.k_range, dk),
            diag_min: if self.diag_min == Self::NO_MIN { Self::NO_MIN } else { self.diag_min + dk - dq },
            diag_max: if self.diag_max == Self::NO_MAX { Self::NO_MAX } else { self.diag_max + dk - dq },
        }
    }

    /// Number of unmasked pairs, in closed form.
    ///
    /// `sum over rows of max(0, min(k.end, row + diag_max + 1) - max(k.start, row + diag_min))`, as a difference of
    /// sums of clamped affine functions: for a fixed row, `max(0, hi - lo)` with `lo <= col`-clamping both ends into
    /// `[k.start, k.end]` is `clamp(hi) - clamp(lo)` whenever `diag_min <= diag_max + 1`.
    pub fn area(&self) -> u64 {
        if self.q_range.is_empty() || self.k_range.is_empty() || self.diag_min > self.diag_max {
            return 0;
        }
        let clamped_sum = |diag: i64| -> i128 {
            // Sum over rows of clamp(row + diag, k.start, k.end).
            let (lo, hi) = (self.k_range.start as i128, self.k_range.end as i128);
            let (r0, r1) = (self.q_range.start as i128, self.q_range.end as i128);
            let d = i128::from(diag);
            let a = (lo - d).clamp(r0, r1); // rows before a are clamped to lo
            let b = (hi - d).clamp(a, r1); // rows from b on are clamped to hi
            let middle = (b - a) * (a + b - 1) / 2 + (b - a) * d;
            (a - r0) * lo + middle + (r1 - b) * hi
        };
        (clamped_sum(self.diag_max + 1) - clamped_sum(self.diag_min)) as u64
    }
}
