//! Ranges of tokens, and the arithmetic of sets of them.

use serde::{Deserialize, Serialize};

/// A half-open interval `[start, end)` of token indices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Range {
    /// First token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
}

impl Range {
    /// `[start, end)`. An `end` before `start` is a caller's bug and panics in debug builds.
    #[inline]
    pub const fn new(start: usize, end: usize) -> Self {
        debug_assert!(start <= end);
        Self { start, end }
    }

    /// Number of tokens; 0 for a reversed range.
    #[inline]
    pub const fn len(&self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no token.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    /// Whether `token` lies inside.
    #[inline]
    pub const fn contains(&self, token: usize) -> bool {
        self.start <= token && token < self.end
    }

    /// The common part; empty (and possibly anywhere) when there is none.
    #[inline]
    pub fn intersect(&self, other: &Range) -> Range {
        let start = self.start.max(other.start);
        Range { start, end: self.end.min(other.end).max(start) }
    }

    /// Whether the two share a token.
    #[inline]
    pub fn overlaps(&self, other: &Range) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }

    /// The smallest range that holds both. An empty range adds nothing, wherever it lies.
    #[inline]
    pub fn hull(&self, other: &Range) -> Range {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => *other,
            (_, true) => *self,
            _ => Range { start: self.start.min(other.start), end: self.end.max(other.end) },
        }
    }

    /// The tokens before `at`, and those from `at` on. Either part may be empty.
    #[inline]
    pub fn cut(&self, at: usize) -> (Range, Range) {
        let at = at.clamp(self.start, self.end.max(self.start));
        (Range { start: self.start, end: at }, Range { start: at, end: self.end })
    }

    /// The same set of tokens as ascending ranges that neither overlap nor touch.
    pub fn merged(mut ranges: Vec<Range>) -> Vec<Range> {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            if joins {
                last.end = last.end.max(next.end);
            }
            joins
        });
        ranges
    }

    /// The tokens of `ranges` that are not in `taken`. Both ascend, and neither overlap nor touch; so does the result.
    pub fn without(ranges: &[Range], taken: &[Range]) -> Vec<Range> {
        let mut left = Vec::with_capacity(ranges.len());
        let mut taken = taken.iter().peekable();
        for range in ranges {
            let mut start = range.start;
            while let Some(own) = taken.peek() {
                if own.start >= range.end {
                    break;
                }
                if own.start > start {
                    left.push(Range::new(start, own.start));
                }
                start = start.max(own.end);
                if own.end > range.end {
                    // It may reach into the next range as well.
                    break;
                }
                taken.next();
            }
            if start < range.end {
                left.push(Range::new(start, range.end));
            }
        }
        left
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}, {})", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_reversed_range_is_empty() {
        let reversed = Range { start: 5, end: 2 };
        assert!(reversed.is_empty());
        assert_eq!(reversed.len(), 0);
        assert_eq!(reversed.hull(&Range::new(1, 2)), Range::new(1, 2));
    }

    proptest! {
        #[test]
        fn merged_ranges_are_the_same_set_with_gaps_between(
            pairs in prop::collection::vec((0_usize..40, 0_usize..8), 0..12),
        ) {
            let ranges: Vec<Range> = pairs.iter().map(|&(start, len)| Range::new(start, start + len)).collect();
            let merged = Range::merged(ranges.clone());
            for token in 0..50 {
                let before = ranges.iter().any(|range| range.contains(token));
                prop_assert_eq!(before, merged.iter().any(|range| range.contains(token)));
            }
            prop_assert!(merged.iter().all(|range| !range.is_empty()));
            prop_assert!(merged.windows(2).all(|pair| pair[0].end < pair[1].start));
        }

        #[test]
        fn a_cut_divides_the_tokens(start in 0_usize..20, len in 0_usize..20, at in 0_usize..50) {
            let range = Range::new(start, start + len);
            let (low, high) = range.cut(at);
            for token in 0..50 {
                prop_assert_eq!(low.contains(token), range.contains(token) && token < at);
                prop_assert_eq!(high.contains(token), range.contains(token) && token >= at);
            }
        }
    }
}
