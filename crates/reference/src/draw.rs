//! Seeded choices: of random problems, of rows to look at, of contents to time with.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Seeded choices. The same seed chooses the same on every machine.
pub struct Draw(ChaCha8Rng);

impl Draw {
    /// Whose choices follow from the seed.
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A number below `end`, which must not be 0. The bias of the remainder does not matter here.
    pub fn below(&mut self, end: usize) -> usize {
        (self.0.next_u64() % end as u64) as usize
    }

    /// A number of `first ..= last`.
    pub fn within(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last - first + 1)
    }

    /// As [`Draw::within`], small numbers as likely as large ones: every power of two has the same share.
    pub fn sized(&mut self, first: usize, last: usize) -> usize {
        let top = self.within(first.ilog2() as usize, last.ilog2() as usize);
        self.within(1 << top, (2 << top) - 1).clamp(first, last)
    }

    /// Whether what happens in so many of a hundred cases does.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of the choices, of which there must be one; each as likely as the others.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Ascending cut points of `0 .. len`, unaligned, both ends included.
    pub fn cuts(&mut self, len: usize, pieces: usize) -> Vec<usize> {
        let mut cuts: Vec<usize> = (1..pieces).map(|_| self.below(len + 1)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }
}
