//! The one shape that masks are cut into: clipping, intersecting, cutting, fusing and counting a rectangle between two diagonals.

use serde::{Deserialize, Serialize};

use crate::Range;

/// The pairs of a rectangle whose diagonal `col - row` lies in `[diag_min, diag_max]`.
///
/// Every [`AttnSlice`](crate::AttnSlice) is one band, and clipping a band to a rectangle, intersecting two bands or moving one by offsets
/// gives one band again; a slice cut across a diagonal would need up to three. So planning and kernels work on bands,
/// and slices are what people write and read.
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

    /// Every pair of a rectangle.
    #[inline]
    pub const fn full(q_range: Range, k_range: Range) -> Self {
        Self { q_range, k_range, diag_min: Self::NO_MIN, diag_max: Self::NO_MAX }
    }

    /// The unmasked columns of `row`: one interval, empty when there are none. `row` must lie in `q_range`.
    #[inline]
    pub fn columns(&self, row: usize) -> Range {
        debug_assert!(self.q_range.contains(row));
        let start = (row as i64 + self.diag_min).max(self.k_range.start as i64);
        let end = (row as i64 + self.diag_max + 1).min(self.k_range.end as i64).max(start);
        Range { start: start as usize, end: end as usize }
    }

    /// The rows that see at least one column. They are one range: empty exactly when the band is.
    #[inline]
    pub fn rows(&self) -> Range {
        let (q, k) = (self.q_range, self.k_range);
        if q.is_empty() || k.is_empty() || self.diag_min > self.diag_max {
            return Range { start: q.start, end: q.start };
        }
        // Above the first row the upper diagonal is still left of the columns; below the last one the lower diagonal
        // has passed them.
        let start = (k.start as i64 - self.diag_max).max(q.start as i64);
        let end = (k.end as i64 - self.diag_min).min(q.end as i64).max(start);
        Range { start: start as usize, end: end as usize }
    }

    /// The columns that at least one row sees: the key rows that this band needs, to the token.
    #[inline]
    pub fn keys(&self) -> Range {
        let (q, k) = (self.q_range, self.k_range);
        if q.is_empty() || k.is_empty() || self.diag_min > self.diag_max {
            return Range { start: k.start, end: k.start };
        }
        let start = (q.start as i64 + self.diag_min).max(k.start as i64);
        let end = (q.end as i64 + self.diag_max).min(k.end as i64).max(start);
        Range { start: start as usize, end: end as usize }
    }

    /// Whether no pair is unmasked. The same as an area of 0, and cheaper.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.rows().is_empty()
    }

    /// Whether no diagonal bounds it: a trimmed band is then a whole rectangle.
    #[inline]
    pub fn is_rectangle(&self) -> bool {
        self.diag_min == Self::NO_MIN && self.diag_max == Self::NO_MAX
    }

    /// Whether query `row` sees key `col`.
    #[inline]
    pub fn contains(&self, row: usize, col: usize) -> bool {
        let diag = col as i64 - row as i64;
        self.q_range.contains(row)
            && self.k_range.contains(col)
            && self.diag_min <= diag
            && diag <= self.diag_max
    }

    /// The part inside the rectangle `q` x `k`.
    #[inline]
    pub fn clip(&self, q: &Range, k: &Range) -> Band {
        Band { q_range: self.q_range.intersect(q), k_range: self.k_range.intersect(k), ..*self }
    }

    /// The pairs that both bands hold: one band again.
    #[inline]
    pub fn intersect(&self, other: &Band) -> Band {
        Band {
            q_range: self.q_range.intersect(&other.q_range),
            k_range: self.k_range.intersect(&other.k_range),
            diag_min: self.diag_min.max(other.diag_min),
            diag_max: self.diag_max.min(other.diag_max),
        }
    }

    /// The pairs of this band that `other` does not hold: at most six bands, none empty, disjoint.
    pub fn without(&self, other: &Band) -> impl Iterator<Item = Band> + use<> {
        let shared = self.intersect(other);
        let pieces = if shared.is_empty() {
            [Some(*self), None, None, None, None, None]
        } else {
            let (above, rest) = self.cut_rows(shared.q_range.start);
            let (rows, below) = rest.cut_rows(shared.q_range.end);
            let (left, rest) = rows.cut_cols(shared.k_range.start);
            let (columns, right) = rest.cut_cols(shared.k_range.end);
            let under = Band { diag_max: columns.diag_max.min(shared.diag_min - 1), ..columns };
            let over = Band { diag_min: columns.diag_min.max(shared.diag_max + 1), ..columns };
            [Some(above), Some(below), Some(left), Some(right), Some(under), Some(over)]
        };
        pieces.into_iter().flatten().filter_map(|piece| piece.trim())
    }

    /// The rows before `at`, and the rows from `at` on.
    pub fn cut_rows(&self, at: usize) -> (Band, Band) {
        let (above, below) = self.q_range.cut(at);
        (Band { q_range: above, ..*self }, Band { q_range: below, ..*self })
    }

    /// The columns before `at`, and the columns from `at` on.
    pub fn cut_cols(&self, at: usize) -> (Band, Band) {
        let (left, right) = self.k_range.cut(at);
        (Band { k_range: left, ..*self }, Band { k_range: right, ..*self })
    }

    /// The same band with its rows moved by `dq` and its columns by `dk`. Both may be negative, but no index may
    /// become so.
    #[inline]
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

    /// The canonical form of the same set of pairs: both ranges are its bounding box, and a diagonal bound that hides
    /// no pair of that box is dropped. `None` when no pair is unmasked.
    ///
    /// Two bands hold the same pairs exactly when their trimmed forms are equal.
    #[inline]
    pub fn trim(&self) -> Option<Band> {
        let (q_range, k_range) = (self.rows(), self.keys());
        if q_range.is_empty() {
            return None;
        }
        let bottom_left = k_range.start as i64 - (q_range.end as i64 - 1);
        let top_right = k_range.end as i64 - 1 - q_range.start as i64;
        Some(Band {
            q_range,
            k_range,
            diag_min: if self.diag_min <= bottom_left { Self::NO_MIN } else { self.diag_min },
            diag_max: if self.diag_max >= top_right { Self::NO_MAX } else { self.diag_max },
        })
    }

    /// Smallest and largest diagonal that a trimmed band really reaches.
    #[inline]
    fn diagonals(&self) -> (i64, i64) {
        let bottom_left = self.k_range.start as i64 - (self.q_range.end as i64 - 1);
        let top_right = self.k_range.end as i64 - 1 - self.q_range.start as i64;
        (self.diag_min.max(bottom_left), self.diag_max.min(top_right))
    }

    /// The union with `other`, trimmed, when it is a band; `None` when it is not.
    pub fn union(&self, other: &Band) -> Option<Band> {
        let (Some(a), Some(b)) = (self.trim(), other.trim()) else {
            return self.trim().or_else(|| other.trim());
        };
        a.union_of_trimmed(&b)
    }

    /// [`Band::union`] of two that are trimmed, and not empty, which it does not look at again.
    pub fn union_of_trimmed(&self, other: &Band) -> Option<Band> {
        let (a, b) = (self, other);
        let gap = |a: Range, b: Range| a.start.max(b.start) > a.end.min(b.end);
        if gap(a.q_range, b.q_range) || gap(a.k_range, b.k_range) {
            return None;
        }
        let ((a_min, a_max), (b_min, b_max)) = (a.diagonals(), b.diagonals());
        // The smallest band around both. It holds the union, so it is the union exactly when it holds no more pairs.
        let around = Band {
            q_range: a.q_range.hull(&b.q_range),
            k_range: a.k_range.hull(&b.k_range),
            diag_min: a_min.min(b_min),
            diag_max: a_max.max(b_max),
        };
        if a.leaves_gap(b, &around) || !around.may_be_filled(a, b) {
            return None;
        }
        let shared = a.intersect(b).area();
        (around.area() == a.area() - shared + b.area()).then(|| around.trim()).flatten()
    }

    /// Whether the two share neither rows nor columns, and `around`, which holds both, has a pair next to their common
    /// corner. It is so for documents one after another, which are many; this spares them the areas.
    fn leaves_gap(&self, other: &Band, around: &Band) -> bool {
        if self.q_range.overlaps(&other.q_range) || self.k_range.overlaps(&other.k_range) {
            return false;
        }
        let (above, below) =
            if self.q_range.start < other.q_range.start { (self, other) } else { (other, self) };
        let (last_row, first_row) = (above.q_range.end - 1, below.q_range.start);
        let (across, back) = match above.k_range.start < below.k_range.start {
            true => (below.k_range.start, above.k_range.end - 1),
            false => (below.k_range.end - 1, above.k_range.start),
        };
        around.contains(last_row, across) || around.contains(first_row, back)
    }

    /// Whether the two, which it is the smallest band around, hold as many pairs of its first and of its last row as there are: mostly what
    /// is no band is short of some there, and this spares it the areas.
    fn may_be_filled(&self, a: &Band, b: &Band) -> bool {
        let width = |band: &Band, row: usize| match band.q_range.contains(row) {
            true => band.columns(row).len(),
            false => 0,
        };
        let is_filled = |row: usize| self.columns(row).len() <= width(a, row) + width(b, row);
        is_filled(self.q_range.start) && is_filled(self.q_range.end - 1)
    }

    /// The same pairs in fewer bands: fuses neighbours whose union is a band, until no two that follow each other by
    /// rows, by columns or along a diagonal fuse. Every band of the result is trimmed, and none is empty.
    ///
    /// Greedy: it need not find the smallest number of bands. `O(n log n)` a round, and in practice two to four
    /// rounds, the last of which only sees that nothing fuses.
    pub fn merged(bands: Vec<Band>) -> Vec<Band> {
        Self::merged_in_rounds(bands).0
    }

    /// [`Band::merged`], and the rounds that it took.
    fn merged_in_rounds(bands: Vec<Band>) -> (Vec<Band>, usize) {
        let mut bands = bands;
        bands.retain_mut(|band| match band.trim() {
            Some(trimmed) => {
                *band = trimmed;
                true
            }
            None => false,
        });
        for round in 1.. {
            sort_by_rows(&mut bands);
            if none_fuse(&bands) {
                return (bands, round);
            }
            let before = bands.len();
            if round > 1 {
                // A triangle begins a row below the rectangle at its left, and both end in the same row. Each round would fuse
                // one such pair of a long causal sequence, whose rows see keys of other ranks between the two.
                bands.sort_unstable_by_key(|b| {
                    (b.q_range.end, b.k_range, b.q_range.start, b.diag_min, b.diag_max)
                });
                fuse_neighbours(&mut bands);
            }
            bands.sort_unstable_by_key(|b| (b.diag_min, b.diag_max, b.q_range, b.k_range));
            fuse_neighbours(&mut bands);
            bands.sort_unstable_by_key(|b| {
                (b.k_range.start, b.q_range, b.k_range.end, b.diag_min, b.diag_max)
            });
            fuse_neighbours(&mut bands);
            sort_by_rows(&mut bands);
            fuse_neighbours(&mut bands);
            if bands.len() == before {
                return (bands, round);
            }
        }
        unreachable!("each round but the last has fewer bands")
    }

    /// Number of unmasked pairs, in closed form.
    ///
    /// `sum over rows of max(0, min(k.end, row + diag_max + 1) - max(k.start, row + diag_min))`, as a difference of
    /// sums of clamped affine functions: for a fixed row, `max(0, hi - lo)` with both ends clamped into
    /// `[k.start, k.end]` is `clamp(hi) - clamp(lo)` whenever `diag_min <= diag_max + 1`.
    pub fn area(&self) -> u64 {
        if self.q_range.is_empty() || self.k_range.is_empty() || self.diag_min > self.diag_max {
            return 0;
        }
        if self.is_rectangle() {
            return self.q_range.len() as u64 * self.k_range.len() as u64;
        }
        // Sum over rows of clamp(row + diag, k.start, k.end).
        macro_rules! difference_of_sums {
            ($number:ty) => {{
                let (lo, hi) = (self.k_range.start as $number, self.k_range.end as $number);
                let (r0, r1) = (self.q_range.start as $number, self.q_range.end as $number);
                let clamped_sum = |diag: i64| -> $number {
                    let d = <$number>::from(diag);
                    let a = (lo - d).clamp(r0, r1); // rows before a are clamped to lo
                    let b = (hi - d).clamp(a, r1); // rows from b on are clamped to hi
                    let middle = (b - a) * (a + b - 1) / 2 + (b - a) * d;
                    (a - r0) * lo + middle + (r1 - b) * hi
                };
                (clamped_sum(self.diag_max + 1) - clamped_sum(self.diag_min)) as u64
            }};
        }
        // Where a diagonal is further off, no row lies between the clamped ones, and it is multiplied with 0.
        const NARROW: usize = 1 << 30;
        match self.q_range.end <= NARROW && self.k_range.end <= NARROW {
            true => difference_of_sums!(i64),
            false => difference_of_sums!(i128),
        }
    }
}

fn sort_by_rows(bands: &mut [Band]) {
    let key = |b: &Band| (b.q_range.start, b.k_range, b.q_range.end, b.diag_min, b.diag_max);
    // Bands that were merged before are sorted already.
    if !bands.is_sorted_by_key(key) {
        bands.sort_unstable_by_key(key);
    }
}

/// Pairs of bands that are looked at for each band before it is given up to say that none of them fuse.
const PAIRS: usize = 8;

/// Whether it is plain that no two of `bands` fuse, which are trimmed and ascending by first row.
fn none_fuse(bands: &[Band]) -> bool {
    let mut left = PAIRS * bands.len();
    bands.iter().enumerate().all(|(index, band)| {
        let near = bands[index + 1..].iter().take_while(|other| other.q_range.start <= band.q_range.end);
        near.take(left + 1).all(|other| {
            let looked = left > 0;
            left = left.saturating_sub(1);
            looked && band.union_of_trimmed(other).is_none()
        })
    })
}

/// Replaces every run of trimmed bands that fuse one after another by its union.
fn fuse_neighbours(bands: &mut Vec<Band>) {
    bands.dedup_by(|next, last| match last.union_of_trimmed(next) {
        Some(union) => {
            *last = union;
            true
        }
        None => false,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chunks of a causal sequence that two ranks take alternately, as one of them sees them: a triangle, a rectangle of own keys at its
    /// left that begins a row earlier, and between the two by columns a rectangle of the other's keys.
    #[test]
    fn a_long_causal_sequence_takes_few_rounds() {
        const ROWS: usize = 8;
        for chunks in [64, 512] {
            let remote = chunks * ROWS;
            let bands = (0..chunks).flat_map(|chunk| {
                let rows = Range::new(chunk * ROWS, (chunk + 1) * ROWS);
                let own = Band::full(rows, Range::new(0, rows.start + 1));
                let triangle = Band { diag_max: 0, ..Band::full(rows, Range::new(rows.start + 1, rows.end)) };
                let seen = Band::full(rows, Range::new(remote, remote + chunk * ROWS));
                [own, triangle, seen]
            });
            let (merged, rounds) = Band::merged_in_rounds(bands.collect());
            assert_eq!(merged.len(), chunks, "one triangle, and what is seen of the other rank");
            assert!(rounds <= 4, "{rounds} rounds for {chunks} chunks");
        }
    }
}
