use counterpoint_mask::Range;

use super::segments::{Segments, bits_in, words_of};

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
            let (start, end) = (word * 64, (word + 1) * 64);
            let first = ranges.partition_point(|range| range.end <= start);
            ranges[first..]
                .iter()
                .take_while(|range| range.start < end)
                .fold(0, |bits, &range| bits | bits_in(range, word))
        }
    }
}
