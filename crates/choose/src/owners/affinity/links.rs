//! Rows that ranks send and receive, kept exact under swaps of chunks: what settling a dispatch is measured by.

use super::local_search::MOST_RANKS;
use super::segments::{Segments, WORD, bits_in, words_of};
use crate::owners::KeyOwners;
use counterpoint_mask::Range;
use counterpoint_plan::ChunkWork;

/// What chunks read and own, as sets of segments: two chunks are compared word by word.
pub(crate) struct Reach {
    segments: Segments,
    /// What chunks read, in the words from the first to the last in which they read or own anything.
    needs: Vec<u64>,
    chunks: Vec<ChunkWords>,
    /// Rows of all segments before each one, without those that live with no chunk; one more entry for the end.
    rows_before: Vec<i64>,
    /// By segment, the chunk with which it lives.
    chunk_of: Vec<u32>,
}

/// Where in the list of words a chunk's are, the first of all words that they are, and the segments that it owns.
#[derive(Clone, Copy)]
struct ChunkWords {
    needs: Range,
    first: usize,
    own: Range,
}

impl Reach {
    pub(crate) fn new(work: &ChunkWork) -> Self {
        let segments = Segments::new(work, KeyOwners::WithQueries);
        let chunks = work.num_chunks();
        let (mut needs, mut words_of_chunks) = (Vec::with_capacity(2 * chunks), Vec::with_capacity(chunks));
        let mut rows_before = vec![0; segments.words() * WORD + 1];
        let mut chunk_of = vec![0; segments.words() * WORD];
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
            words_of_chunks.push(ChunkWords { needs: Range::new(base, needs.len()), first: start, own });
            chunk_of[own.start..own.end].fill(chunk);
            (own.start..own.end).for_each(|segment| {
                rows_before[segment + 1] = segments.rows(segment / WORD, 1 << (segment % WORD));
            });
        }
        let mut before = 0;
        for rows in &mut rows_before {
            before += *rows;
            *rows = before;
        }
        Self { segments, needs, chunks: words_of_chunks, rows_before, chunk_of }
    }

    /// What `chunk` reads and owns.
    #[inline]
    fn of(&self, chunk: u32) -> ChunkReach<'_> {
        let ChunkWords { needs, first, own } = self.chunks[chunk as usize];
        ChunkReach { needs: &self.needs[needs.start..needs.end], first, own }
    }

    /// Rows of one segment.
    #[inline]
    fn rows(&self, segment: usize) -> i64 {
        self.rows_before[segment + 1] - self.rows_before[segment]
    }

    /// Rows of the segments `bits` of `word`: a step for each run of them.
    #[inline]
    fn rows_of(&self, word: usize, mut bits: u64) -> i64 {
        let rows_before = &self.rows_before[word * WORD..=(word + 1) * WORD];
        let mut rows = 0;
        while bits != 0 {
            let start = bits.trailing_zeros() as usize;
            let next = bits.wrapping_add(1 << start);
            // None where the run reaches the end of the word.
            let end = next.trailing_zeros() as usize;
            rows += rows_before[end] - rows_before[start];
            bits &= next;
        }
        rows
    }
}

/// What a chunk reads and owns.
#[derive(Clone, Copy)]
struct ChunkReach<'a> {
    /// From word `first` on, what it reads of those words in which it reads or owns anything.
    needs: &'a [u64],
    first: usize,
    own: Range,
}

impl ChunkReach<'_> {
    #[inline]
    fn words(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.needs.len()
    }

    #[inline]
    fn needs(&self, word: usize) -> u64 {
        self.needs.get(word.wrapping_sub(self.first)).copied().unwrap_or(0)
    }
}

/// The words in which either chunk may read or own anything, each once.
#[inline]
fn words_of_both(chunks: [ChunkReach<'_>; 2]) -> impl Iterator<Item = usize> + use<> {
    let [a, b] = chunks.map(|chunk| chunk.words());
    let (first, second) = if a.start <= b.start { (a, b) } else { (b, a) };
    let second = second.start.max(first.end)..second.end;
    first.chain(second)
}

/// A rank, and a chunk that it gives away for the other one's.
pub(super) type Given = (usize, u32);

/// Key rows that each rank sends, once to each reader, and receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) sent: [i64; MOST_RANKS],
    pub(super) received: [i64; MOST_RANKS],
}

/// Segments of one word: what the rank's chunks read, what exactly one of them reads, and what lives with the rank.
#[derive(Clone, Copy, Default)]
struct Word {
    any: u64,
    once: u64,
    own: u64,
}

impl Word {
    /// What is read and not owned.
    #[inline]
    fn missing(self) -> u64 {
        self.any & !self.own
    }

    /// After a chunk was given away for another one. Of `needs` and `own` the first is what the chunk reads or owns that goes, the second
    /// the one's that comes.
    #[inline]
    fn after(self, needs: [u64; 2], own: [u64; 2]) -> Self {
        let (gone, come) = (needs[0] & !needs[1] & self.once, needs[1] & !needs[0]);
        Self { any: self.any & !gone | come, own: self.own & !own[0] | own[1], ..self }
    }
}

/// Who reads and owns which segments, kept up to date under swaps: one that is only weighed looks at what its chunks do not both read.
pub(super) struct Links<'a> {
    reach: &'a Reach,
    stride: usize,
    /// `[rank * stride + word]`.
    words: Vec<Word>,
    /// How many chunks of the rank read each segment of the word, in binary: bit `i` of all of them is word
    /// `[(rank * stride + word) * digits + i]`.
    counts: Vec<u64>,
    digits: usize,
    /// By segment.
    owner: Vec<u8>,
    /// By chunk, its own rows as often as there are ranks that read them.
    read: Vec<i64>,
    moved: Moved,
}

impl<'a> Links<'a> {
    /// Of ranks that have these chunks.
    pub(super) fn new<'b>(
        reach: &'a Reach,
        rank_chunks: impl ExactSizeIterator<Item = &'b [u32]> + Clone,
    ) -> Self {
        let stride = reach.segments.words();
        let (ranks, segments) = (rank_chunks.len(), stride * WORD);
        let most = rank_chunks.clone().map(<[u32]>::len).max().unwrap_or(0);
        let digits = most.checked_ilog2().map_or(1, |log| log as usize + 1);
        let mut links = Self {
            reach,
            stride,
            words: vec![Word::default(); ranks * stride],
            counts: vec![0; ranks * stride * digits],
            digits,
            owner: vec![0; segments],
            read: vec![0; reach.chunks.len()],
            moved: Moved::default(),
        };
        for (rank, chunks) in rank_chunks.enumerate() {
            for chunk in chunks.iter().map(|&chunk| reach.of(chunk)) {
                for word in chunk.words() {
                    links.count(rank, word, [0, chunk.needs(word)]);
                }
                links.owner[chunk.own.start..chunk.own.end].fill(rank as u8);
                for word in words_of(chunk.own) {
                    links.words[rank * stride + word].own |= bits_in(chunk.own, word);
                }
            }
        }
        for to in 0..ranks {
            for word in 0..stride {
                let at = links.words[to * stride + word];
                links.moved.received[to] += reach.rows_of(word, at.missing());
                ones(at.any, word).for_each(|segment| {
                    let (rows, owner) = (reach.rows(segment), usize::from(links.owner[segment]));
                    links.moved.sent[owner] += if owner == to { 0 } else { rows };
                    links.read[reach.chunk_of[segment] as usize] += rows;
                });
            }
        }
        links
    }

    pub(super) fn moved(&self) -> &Moved {
        &self.moved
    }

    /// Rows that the two ranks would receive after a swap; all others receive what they did.
    pub(super) fn received_after(&self, given: [Given; 2]) -> [i64; 2] {
        let chunks = given.map(|(_, chunk)| self.reach.of(chunk));
        let ranks = given.map(|(rank, _)| &self.words[rank * self.stride..][..self.stride]);
        let mut received = given.map(|(rank, _)| self.moved.received[rank]);
        for word in words_of_both(chunks) {
            let needs = chunks.map(|chunk| chunk.needs(word));
            let own = chunks.map(|chunk| bits_in(chunk.own, word));
            for side in 0..2 {
                let at = ranks[side][word];
                let (before, after) =
                    (at.missing(), at.after(turned(needs, side), turned(own, side)).missing());
                received[side] +=
                    self.reach.rows_of(word, after & !before) - self.reach.rows_of(word, before & !after);
            }
        }
        received
    }

    /// Fills `sent` with what ranks would send after a swap.
    pub(super) fn sent_after(&self, given: [Given; 2], sent: &mut [i64; MOST_RANKS]) {
        let [a, b] = given.map(|(rank, _)| rank);
        let chunks = given.map(|(_, chunk)| self.reach.of(chunk));
        *sent = self.moved.sent;
        let words = [a, b].map(|rank| &self.words[rank * self.stride..][..self.stride]);
        let mut others = given.map(|(_, chunk)| self.read[chunk as usize]);
        let mut read = [[0; 2]; 2];
        // First other rows are read of the owners that there are, then the rows of the two chunks change owners.
        for word in words_of_both(chunks) {
            let needs = chunks.map(|chunk| chunk.needs(word));
            let own = chunks.map(|chunk| bits_in(chunk.own, word));
            let before = words.map(|words| words[word]);
            let after = [0, 1].map(|side| before[side].after(turned(needs, side), [0; 2]));
            for side in 0..2 {
                let (before, after) = (before[side].missing(), after[side].missing());
                let changed = before ^ after;
                ones(changed, word).for_each(|segment| {
                    let rows = self.reach.rows(segment);
                    let comes = after >> (segment % WORD) & 1 == 1;
                    sent[usize::from(self.owner[segment])] += if comes { rows } else { -rows };
                });
            }
            for (chunk, own) in own.into_iter().enumerate().filter(|(_, own)| *own != 0) {
                let rows = |any: u64| self.reach.rows_of(word, any & own);
                others[chunk] -= rows(before[0].any) + rows(before[1].any);
                (0..2).for_each(|side| read[chunk][side] += rows(after[side].any));
            }
        }
        for (side, from, to) in [(0, a, b), (1, b, a)] {
            sent[from] -= others[side] + read[side][1 - side];
            sent[to] += others[side] + read[side][side];
        }
    }

    /// Takes note of a swap, of which [`Links::received_after`] and [`Links::sent_after`] have said this.
    pub(super) fn swap(&mut self, given: [Given; 2], received: [i64; 2], sent: &[i64; MOST_RANKS]) {
        let reach = self.reach;
        let [(a, chunk_a), (b, chunk_b)] = given;
        let chunks = [reach.of(chunk_a), reach.of(chunk_b)];
        for word in words_of_both(chunks) {
            let needs = chunks.map(|chunk| chunk.needs(word));
            let [only_a, only_b] = [needs[0] & !needs[1], needs[1] & !needs[0]];
            for (rank, changed) in [(a, [only_a, only_b]), (b, [only_b, only_a])] {
                let before = self.words[rank * self.stride + word].any;
                let after = self.count(rank, word, changed);
                ones(before ^ after, word).for_each(|segment| {
                    let rows = reach.rows(segment);
                    let comes = after >> (segment % WORD) & 1 == 1;
                    self.read[reach.chunk_of[segment] as usize] += if comes { rows } else { -rows };
                });
            }
        }
        for (own, from, to) in [(chunks[0].own, a, b), (chunks[1].own, b, a)] {
            self.owner[own.start..own.end].fill(to as u8);
            for word in words_of(own) {
                self.words[from * self.stride + word].own &= !bits_in(own, word);
                self.words[to * self.stride + word].own |= bits_in(own, word);
            }
        }
        self.moved.sent = *sent;
        [self.moved.received[a], self.moved.received[b]] = received;
    }

    /// One chunk of `rank` less reads the segments `gone` of `word`, and one more those that `come`: others. What is read then.
    fn count(&mut self, rank: usize, word: usize, [gone, come]: [u64; 2]) -> u64 {
        let at = rank * self.stride + word;
        let counts = &mut self.counts[at * self.digits..(at + 1) * self.digits];
        let (mut borrowed, mut carried, mut first, mut higher) = (gone, come, 0, 0);
        for (index, digit) in counts.iter_mut().enumerate() {
            let before = *digit;
            *digit ^= borrowed | carried;
            (borrowed, carried) = (borrowed & !before, carried & before);
            match index {
                0 => first = *digit,
                _ => higher |= *digit,
            }
        }
        let word = &mut self.words[at];
        (word.any, word.once) = (first | higher, first & !higher);
        word.any
    }
}

/// What is one side's of two, and the other's.
#[inline]
fn turned([a, b]: [u64; 2], side: usize) -> [u64; 2] {
    if side == 0 { [a, b] } else { [b, a] }
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
