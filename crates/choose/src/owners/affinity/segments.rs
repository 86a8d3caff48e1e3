//! Key rows in segments that chunks read as a whole or not at all, so that sets of rows are sets of bits.

use counterpoint_mask::Range;

use crate::owners::KeyOwners;
use counterpoint_plan::ChunkWork;

/// Segments in one word of a set.
pub(super) const WORD: usize = 64;

/// The key sequence cut wherever a chunk's needs or its own key rows begin or end. Inside a segment every chunk needs all
/// rows or none, so sets of rows are sets of segments, exactly.
pub(super) struct Segments {
    /// Where segment `i` starts; one more entry for the end, then repeated up to a whole word.
    cuts: Vec<usize>,
    /// The needs of chunk `i`, as ranges of segments: `needs[offsets[i]..offsets[i + 1]]`.
    offsets: Vec<usize>,
    needs: Vec<Range>,
    /// The key rows that live with chunk `i`, as a range of segments.
    own: Vec<Range>,
}

impl Segments {
    pub(super) fn new(work: &ChunkWork, key_owners: KeyOwners) -> Self {
        let chunks = work.num_chunks();
        let seqlen = work.seqlen_k();
        let own_rows = |chunk: usize| match key_owners {
            KeyOwners::WithQueries => work.rows(chunk).intersect(&Range::new(0, seqlen)),
            KeyOwners::Elsewhere => Range::new(0, 0),
        };
        let mut cuts = vec![0, seqlen];
        for chunk in 0..chunks {
            let own = own_rows(chunk);
            cuts.extend([own.start, own.end]);
            cuts.extend(work.needs(chunk).iter().flat_map(|range| [range.start, range.end]));
        }
        cuts.sort_unstable();
        cuts.dedup();
        let place = |row: usize| cuts.partition_point(|&cut| cut < row);
        let place = |range: &Range| Range::new(place(range.start), place(range.end));
        let mut offsets = vec![0];
        let mut needs = Vec::new();
        let mut own = Vec::with_capacity(chunks);
        for chunk in 0..chunks {
            needs.extend(work.needs(chunk).iter().map(place));
            offsets.push(needs.len());
            own.push(place(&own_rows(chunk)));
        }
        let words = (cuts.len() - 1).div_ceil(WORD).max(1);
        cuts.resize(words * WORD + 1, seqlen);
        Self { cuts, offsets, needs, own }
    }

    /// Words of a set of segments.
    pub(super) fn words(&self) -> usize {
        self.cuts.len() / WORD
    }

    /// What `chunk` reads.
    pub(super) fn needs(&self, chunk: u32) -> &[Range] {
        &self.needs[self.offsets[chunk as usize]..self.offsets[chunk as usize + 1]]
    }

    /// Words and ranges that one look at the needs of `chunk` passes.
    pub(super) fn steps(&self, chunk: u32) -> usize {
        self.needs(chunk).iter().map(|&range| 1 + words_of(range).len()).sum()
    }

    /// What lives with `chunk`.
    pub(super) fn own(&self, chunk: u32) -> Range {
        self.own[chunk as usize]
    }

    /// Rows of the segments `bits` of word `word`.
    pub(super) fn rows(&self, word: usize, mut bits: u64) -> i64 {
        let cuts = &self.cuts[word * WORD..=(word + 1) * WORD];
        let mut rows = 0;
        // One step for each run of ones.
        while bits != 0 {
            let start = bits.trailing_zeros() as usize;
            let end = start + (!(bits >> start)).trailing_zeros() as usize;
            let end = end.min(WORD);
            rows += cuts[end] - cuts[start];
            bits = if end == WORD { 0 } else { bits & (u64::MAX << end) };
        }
        rows as i64
    }
}

/// The bits of `range` that lie in `word`.
pub(super) fn bits_in(range: Range, word: usize) -> u64 {
    let start = range.start.max(word * WORD);
    let end = range.end.min((word + 1) * WORD);
    if start >= end {
        return 0;
    }
    let ones = u64::MAX >> (WORD - (end - start));
    ones << (start - word * WORD)
}

/// The words that `range` touches.
pub(super) fn words_of(range: Range) -> std::ops::Range<usize> {
    range.start / WORD..range.end.div_ceil(WORD).max(range.start / WORD)
}
