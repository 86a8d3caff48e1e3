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
    pub const fn new(start: usize, end: usize) -> Self {
        debug_assert!(start <= end);
        Self { start, end }
    }

    /// Number of tokens.
    pub const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether it holds no token.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Whether `token` lies inside.
    pub const fn contains(&self, token: usize) -> bool {
        self.start <= token && token < self.end
    }

    /// The common part; empty (and possibly anywhere) when there is none.
    pub fn intersect(&self, other: &Range) -> Range {
        let start = self.start.max(other.start);
        Range { start, end: self.end.min(other.end).max(start) }
    }
}
