//! Rows that ranks send and receive, kept exact under swaps of chunks: what settling a dispatch is measured by.

use super::local_search::MOST_RANKS;
use super::segments::{Segments, WORD, bits_in, words_of};
use crate::owners::KeyOwners;
use counterpoint_plan::ChunkWork;

/// What chunks read and own, as sets of segments: two chunks are compared word by word.
pub(crate) struct Reach {
    segments: Segments,
    /// The words from the first to the last in which chunk `i` reads or owns anything, what it reads of them:
    /// `needs[offsets[i]..offsets[i + 1]]`, from word `first[i]` on.
    needs: Vec<u64>,
    offsets: Vec<usize>,
    first: Vec<usize>,
    /// Rows of each segment; none where it lives with no chunk.
    rows: Vec<i64>,
}

impl Reach {
    pub(crate) fn new(work: &ChunkWork) -> Self {
        let segments = Segments::new(work, KeyOwners::WithQueries);
        let chunks = work.num_chunks();
        let (mut needs, mut offsets, mut first) = (Vec::new(), vec![0], Vec::with_capacity(chunks));
        let mut rows = vec![0; segments.words() * WORD];
        for chunk in 0..chunks as u32 {
            let (read, own) = (segments.needs(chunk), segments.own(chunk));
            let touched =
                || read.iter().chain([&own]).filter(|range| !range.is_empty()).map(|range| words_of(*range));
            let start = touched().map(|words| words.start).min().unwrap_or(0);
            let end = touched().map(|words| words.end).max().unwrap_or(0);
            let base = needs.len();
            needs.resize(base + end - start, 0);
            for &range in read {
                words_of(range).for_each(|word| needs[base + word - start] |= bits_in(range, word));
            }
            first.push(start);
            offsets.push(needs.len());
            (own.start..own.end)
                .for_each(|segment| rows[segment] = segments.rows(segment / WORD, 1 << (segment % WORD)));
        }
        Self { segments, needs, offsets, first, rows }
    }

    /// What `chunk` reads of the segments of `word`.
    fn needs(&self, chunk: u32, word: usize) -> u64 {
        let chunk = chunk as usize;
        let words = &self.needs[self.offsets[chunk]..self.offsets[chunk + 1]];
        words.get(word.wrapping_sub(self.first[chunk])).copied().unwrap_or(0)
    }

    /// The words in which `chunk` may read or own anything.
    fn words_of(&self, chunk: u32) -> std::ops::Range<usize> {
        let chunk = chunk as usize;
        self.first[chunk]..self.first[chunk] + self.offsets[chunk + 1] - self.offsets[chunk]
    }
}

/// A rank, and a chunk that it gives away for the other one's.
pub(super) type Given = (usize, u32);

/// Key rows that each rank sends, once to each reader, and receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) sent: [i64; MOST_RANKS],
    pub(super) received: [i64; MOST_RANKS],
}

impl Moved {
    fn add(&mut self, from: usize, to: usize, rows: i64) {
        if from != to {
            self.sent[from] += rows;
            self.received[to] += rows;
        }
    }
}

/// Segments of one word: what the rank's chunks read, and what exactly one of them reads.
#[derive(Clone, Copy, Default)]
struct Word {
    any: u64,
    once: u64,
}

/// Who reads and owns which segments, kept up to date under swaps: one that is only weighed looks at what its chunks do not both read.
pub(super) struct Links<'a> {
    reach: &'a Reach,
    stride: usize,
    /// `[rank * stride + word]`.
    words: Vec<Word>,
    /// How many chunks of the rank read the segment, `[rank * stride * WORD + segment]`.
    counts: Vec<u16>,
    /// By segment, a bit for each rank that reads it.
    readers: Vec<u16>,
    /// By segment.
    owner: Vec<u8>,
    moved: Moved,
}

/// Which segments of a word two ranks read after a swap, and which of them they did not read before or no longer do.
struct Change {
    any: [u64; 2],
    come: [u64; 2],
    gone: [u64; 2],
}

impl<'a> Links<'a> {
    /// Of ranks that have these chunks.
    pub(super) fn new<'b>(reach: &'a Reach, rank_chunks: impl ExactSizeIterator<Item = &'b [u32]>) -> Self {
        let stride = reach.segments.words();
        let (ranks, segments) = (rank_chunks.len(), stride * WORD);
        let mut links = Self {
            reach,
            stride,
            words: vec![Word::default(); ranks * stride],
            counts: vec![0; ranks * segments],
            readers: vec![0; segments],
            owner: vec![0; segments],
            moved: Moved::default(),
        };
        for (rank, chunks) in rank_chunks.enumerate() {
            for &chunk in chunks {
                for word in reach.words_of(chunk) {
                    let needs = reach.needs(chunk, word);
                    let at = &mut links.words[rank * stride + word];
                    at.once = (at.once & !needs) | (needs & !at.any);
                    at.any |= needs;
                    ones(needs, word).for_each(|segment| {
                        links.counts[rank * segments + segment] += 1;
                        links.readers[segment] |= 1 << rank;
                    });
                }
                let own = reach.segments.own(chunk);
                links.owner[own.start..own.end].fill(rank as u8);
            }
        }
        for segment in 0..segments {
            let from = usize::from(links.owner[segment]);
            let readers = links.readers[segment];
            (0..ranks)
                .filter(|to| readers >> to & 1 == 1)
                .for_each(|to| links.moved.add(from, to, reach.rows[segment]));
        }
        links
    }

    pub(super) fn moved(&self) -> &Moved {
        &self.moved
    }

    /// Fills `moved` with what would be moved after a swap.
    pub(super) fn after(&self, given: [Given; 2], moved: &mut Moved) {
        let [(a, chunk_a), (b, chunk_b)] = given;
        *moved = self.moved;
        let segments = &self.reach.segments;
        let owned = [(segments.own(chunk_a), a, b, 0), (segments.own(chunk_b), b, a, 1)];
        for word in self.words_of(given) {
            let change = self.change(given, word);
            // First other rows are read of the owners that there are, then the rows of the two chunks change owners.
            for (rank, side) in [(a, 0), (b, 1)] {
                for (bits, sign) in [(change.come[side], 1), (change.gone[side], -1)] {
                    ones(bits, word).for_each(|segment| {
                        let from = usize::from(self.owner[segment]);
                        moved.add(from, rank, sign * self.reach.rows[segment]);
                    });
                }
            }
            for &(own, from, to, side) in &owned {
                let [any_from, any_to] = [change.any[side], change.any[1 - side]];
                for segment in ones(bits_in(own, word), word) {
                    let rows = self.reach.rows[segment];
                    let reads = |any: u64| rows * (any >> (segment % WORD) & 1) as i64;
                    let others = self.readers[segment] & !(1 << a | 1 << b);
                    let others = rows * i64::from(others.count_ones());
                    let [reads_from, reads_to] = [reads(any_from), reads(any_to)];
                    moved.sent[from] -= others + reads_to;
                    moved.received[to] -= reads_to;
                    moved.sent[to] += others + reads_from;
                    moved.received[from] += reads_from;
                }
            }
        }
    }

    /// Takes note of a swap, `moved` being what [`Links::after`] said of it.
    pub(super) fn swap(&mut self, given: [Given; 2], moved: &Moved) {
        let [(a, chunk_a), (b, chunk_b)] = given;
        let segments = self.stride * WORD;
        for word in self.words_of(given) {
            let [needs_a, needs_b] = [chunk_a, chunk_b].map(|chunk| self.reach.needs(chunk, word));
            for (bits, from, to) in [(needs_a & !needs_b, a, b), (needs_b & !needs_a, b, a)] {
                if bits == 0 {
                    continue;
                }
                let [mut less, mut more] = [from, to].map(|rank| self.words[rank * self.stride + word]);
                for segment in ones(bits, word) {
                    let bit = 1 << (segment % WORD);
                    let [left, read] = [(from, u16::MAX), (to, 1)].map(|(rank, step)| {
                        let count = &mut self.counts[rank * segments + segment];
                        *count = count.wrapping_add(step);
                        *count
                    });
                    // Who gives a chunk away reads less, who takes it more.
                    less.any &= !(u64::from(left == 0) * bit);
                    less.once = (less.once & !bit) | (u64::from(left == 1) * bit);
                    more.any |= bit;
                    more.once = (more.once & !bit) | (u64::from(read == 1) * bit);
                    let readers = &mut self.readers[segment];
                    *readers = *readers & !(u16::from(left == 0) << from) | 1 << to;
                }
                self.words[from * self.stride + word] = less;
                self.words[to * self.stride + word] = more;
            }
        }
        for (chunk, to) in [(chunk_a, b), (chunk_b, a)] {
            let own = self.reach.segments.own(chunk);
            self.owner[own.start..own.end].fill(to as u8);
        }
        self.moved = *moved;
    }

    /// The words in which either chunk may read or own anything, each once.
    fn words_of(&self, [(_, chunk_a), (_, chunk_b)]: [Given; 2]) -> impl Iterator<Item = usize> + use<> {
        let (a, b) = (self.reach.words_of(chunk_a), self.reach.words_of(chunk_b));
        let (first, second) = if a.start <= b.start { (a, b) } else { (b, a) };
        let second = second.start.max(first.end)..second.end;
        first.chain(second)
    }

    /// What a swap changes in `word`.
    fn change(&self, [(a, chunk_a), (b, chunk_b)]: [Given; 2], word: usize) -> Change {
        let [needs_a, needs_b] = [chunk_a, chunk_b].map(|chunk| self.reach.needs(chunk, word));
        let [at_a, at_b] = [a, b].map(|rank| self.words[rank * self.stride + word]);
        let (only_a, only_b) = (needs_a & !needs_b, needs_b & !needs_a);
        let gone = [only_a & at_a.once, only_b & at_b.once];
        let come = [only_b & !at_a.any, only_a & !at_b.any];
        Change { any: [at_a.any & !gone[0] | come[0], at_b.any & !gone[1] | come[1]], come, gone }
    }
}

/// The segments `bits` of `word`.
fn ones(mut bits: u64, word: usize) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if bits == 0 {
            return None;
        }
        let segment = word * WORD + bits.trailing_zeros() as usize;
        bits &= bits - 1;
        Some(segment)
    })
}
