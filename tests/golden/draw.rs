//! Random choices that stay the same whatever happens to the crates of random numbers.

/// SplitMix64 (Steele, Lea and Flood 2014).
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number of `low ..= high`.
    pub(crate) fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    pub(crate) fn percent(&mut self, chance: usize) -> bool {
        self.within(0, 99) < chance
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.within(0, of.len() - 1)]
    }

    /// A number of `[-1, 1)` with 53 random bits.
    pub(crate) fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    /// Ascending cuts of `[0, length)` into at most so many pieces, both ends included.
    pub(crate) fn cuts(&mut self, length: usize, pieces: usize) -> Vec<usize> {
        let mut cuts: Vec<usize> = (1..pieces).map(|_| self.within(0, length)).collect();
        cuts.extend([0, length]);
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }
}
