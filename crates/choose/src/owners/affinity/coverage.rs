//! Received rows of ranks as bit sets of segments, so that a swap of two chunks is weighed in a few words.

use counterpoint_mask::Range;

use super::segments::{Segments, WORD, bits_in, words_of};

/// Segments of one word: what the rank's chunks read, what exactly one of them reads, and what the rank owns.
#[derive(Clone, Copy, Default)]
struct Word {
    any: u64,
    once: u64,
    own: u64,
}

/// What every rank reads and owns, kept up to date under swaps, so that the change in received rows that a swap would
/// make costs a few words.
pub(super) struct Coverage<'a> {
    segments: &'a Segments,
    words: Vec<Word>,
    stride: usize,
}

impl<'a> Coverage<'a> {
    pub(super) fn new(segments: &'a Segments, rank_chunks: &[Vec<u32>]) -> Self {
        let stride = segments.words();
        let mut coverage =
            Self { segments, words: vec![Word::default(); stride * rank_chunks.len()], stride };
        for (rank, chunks) in rank_chunks.iter().enumerate() {
            coverage.refresh(rank, chunks);
        }
        coverage
    }

    /// Takes note that `rank` now owns `chunks`.
    pub(super) fn refresh(&mut self, rank: usize, chunks: &[u32]) {
        let words = &mut self.words[rank * self.stride..(rank + 1) * self.stride];
        words.fill(Word::default());
        for &chunk in chunks {
            for &range in self.segments.needs(chunk) {
                for word in words_of(range) {
                    let bits = bits_in(range, word);
                    let at = &mut words[word];
                    at.once = (at.once & !bits) | (bits & !at.any);
                    at.any |= bits;
                }
            }
            let own = self.segments.own(chunk);
            for word in words_of(own) {
                words[word].own |= bits_in(own, word);
            }
        }
    }

    /// Rows that `rank` receives.
    pub(super) fn received(&self, rank: usize) -> i64 {
        let words = &self.words[rank * self.stride..(rank + 1) * self.stride];
        words.iter().enumerate().map(|(word, at)| self.segments.rows(word, at.any & !at.own)).sum()
    }

    /// By how much `received(rank)` would change if the rank gave `out` away and took `into`.
    pub(super) fn change(&self, rank: usize, out: u32, into: u32) -> i64 {
        let segments = self.segments;
        let words = &self.words[rank * self.stride..(rank + 1) * self.stride];
        let (out_needs, out_own) = (segments.needs(out), segments.own(out));
        let (in_needs, in_own) = (segments.needs(into), segments.own(into));
        let mut change = 0;
        for &range in out_needs {
            for word in words_of(range) {
                let at = words[word];
                let gone = bits_in(range, word) & at.once & !at.own;
                change -= segments.rows(word, gone);
            }
        }
        for word in words_of(out_own) {
            let at = words[word];
            let still = at.any & !(at.once & bits_of(out_needs, word));
            change += segments.rows(word, still & bits_in(out_own, word));
        }
        for &range in in_needs {
            for word in words_of(range) {
                let at = words[word];
                let any = at.any & !(at.once & bits_of(out_needs, word));
                let own = (at.own & !bits_in(out_own, word)) | bits_in(in_own, word);
                change += segments.rows(word, bits_in(range, word) & !any & !own);
            }
        }
        for word in words_of(in_own) {
            let at = words[word];
            let any = at.any & !(at.once & bits_of(out_needs, word));
            change -= segments.rows(word, any & bits_in(in_own, word));
        }
        change
    }
}

/// The bits of `ranges` (ascending) that lie in `word`.
fn bits_of(ranges: &[Range], word: usize) -> u64 {
    match ranges {
        [range] => bits_in(*range, word),
        _ => {
            let (start, end) = (word * WORD, (word + 1) * WORD);
            let first = ranges.partition_point(|range| range.end <= start);
            ranges[first..]
                .iter()
                .take_while(|range| range.start < end)
                .fold(0, |bits, &range| bits | bits_in(range, word))
        }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
    use proptest::prelude::*;

    use super::*;
    use crate::owners::key_owners::{KeyOwners, received_by};
    use counterpoint_plan::chunk_work;

    /// Strips of rows, each with one slice of any type anywhere.
    fn mask(seqlen: usize, strips: &[(usize, usize, usize, u8)]) -> Mask {
        let mut row = 0;
        let mut slices = Vec::new();
        for &(rows, start, cols, kind) in strips {
            let q = Range::new(row, (row + rows).min(seqlen));
            let k = Range::new(start % seqlen, (start % seqlen + cols).min(seqlen));
            let types = [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];
            slices.push(AttnSlice::new(q, k, types[usize::from(kind % 4)]));
            row = q.end;
        }
        slices.retain(|slice| !slice.q_range.is_empty() && !slice.k_range.is_empty());
        Mask::new(seqlen, seqlen, slices).unwrap()
    }

    proptest! {
        /// Every change that is predicted for a swap is the difference of two counts from scratch.
        #[test]
        fn changes_are_exact(
            strips in prop::collection::vec((1..90_usize, any::<usize>(), 1..300_usize, any::<u8>()), 1..20),
            ranks in 2..5_usize,
            swaps in prop::collection::vec((any::<usize>(), any::<usize>()), 1..20),
            with_queries: bool,
        ) {
            let key_owners = if with_queries { KeyOwners::WithQueries } else { KeyOwners::Elsewhere };
            let work = chunk_work(&mask(600, &strips), 7);
            let segments = Segments::new(&work, key_owners);
            let mut rank_chunks = vec![Vec::new(); ranks];
            for chunk in 0..work.num_chunks() {
                rank_chunks[chunk % ranks].push(chunk as u32);
            }
            let mut coverage = Coverage::new(&segments, &rank_chunks);
            let received = |chunks: &[u32]| {
                let mut chunks = chunks.to_vec();
                chunks.sort_unstable();
                received_by(&work, &chunks, key_owners) as i64
            };
            for (a, b) in swaps {
                let rank_a = a % ranks;
                let rank_b = (rank_a + 1 + b % (ranks - 1)) % ranks;
                let (i, j) = (b % rank_chunks[rank_a].len(), a % rank_chunks[rank_b].len());
                let (out, into) = (rank_chunks[rank_a][i], rank_chunks[rank_b][j]);
                let before = received(&rank_chunks[rank_a]);
                prop_assert_eq!(coverage.received(rank_a), before);
                let change = coverage.change(rank_a, out, into);
                rank_chunks[rank_a][i] = into;
                rank_chunks[rank_b][j] = out;
                prop_assert_eq!(before + change, received(&rank_chunks[rank_a]));
                coverage.refresh(rank_a, &rank_chunks[rank_a]);
                coverage.refresh(rank_b, &rank_chunks[rank_b]);
            }
        }
    }
}
