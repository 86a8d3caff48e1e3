use super::segments::{Segments, bits_in, words_of};
use super::trade::Draw;
use crate::dispatch::{ChunkWork, Dispatch, Home};

/// Chunks and ranks up to which dispatches are settled: a proposal looks at the links between all ranks.
const MOST_CHUNKS: usize = 1024;
const MOST_RANKS: usize = 16;
/// Swaps that are proposed, in a wide search and in one downhill. A budget and no clock: the result is the same on every machine.
const PROPOSALS: usize = 8_000;
const PROPOSALS_DOWNHILL: usize = 2_000;
/// The first worsening that is accepted, as a part of the whole; they shrink evenly to none.
const FIRST_THRESHOLD: i64 = 48;
/// How much of the time of the slowest rank all others' counts for: so that a swap that helps only these is a step.
const OTHERS: i64 = 8;

/// A dispatch is left alone unless another one is predicted to take less by this part: what is predicted is no better.
const LEAST_GAIN: i64 = 100;
/// By which part of an average chunk each piece costs more that ranks' rows are cut into: blocks end where pieces do.
const PIECE: i64 = 16;

/// What a step of work takes, in picoseconds: a forward, and a backward.
#[derive(Clone, Debug)]
pub(crate) struct Prices {
    /// Computing each chunk.
    pub(crate) chunks: Vec<[i64; 2]>,
    /// Of each rank, what it takes beyond its chunks.
    pub(crate) beyond: Vec<[i64; 2]>,
    /// A key row on the busier side of a rank's links.
    pub(crate) row: i64,
}

/// How far swaps are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// From one dispatch to whatever is best, over worse ones too. A dispatch is left alone unless another gains.
    Wide,
    /// Only where each swap gains.
    Downhill,
}

/// Whether a dispatch is one that is settled: of a few ranks, in pieces that are not too many.
pub(crate) fn settles(work: &ChunkWork, dispatch: &Dispatch) -> bool {
    let (chunks, ranks) = (work.num_chunks(), dispatch.cp_size());
    (2..=MOST_RANKS).contains(&ranks) && (2 * ranks..=MOST_CHUNKS).contains(&chunks)
}

/// Swaps chunks of `dispatch` so that its slowest rank ends sooner: what a rank computes, and after it what its links carry. By
/// threshold accepting (Dueck and Scheuer, Journal of Computational Physics 90, 1990): integers alone, and the best that was met.
pub(crate) fn settle(work: &ChunkWork, prices: &Prices, search: Search, dispatch: Dispatch) -> Dispatch {
    let segments = Segments::new(work, Home::WithQueries);
    let mut state = State::new(&segments, prices, &dispatch);
    let mut seconds = state.seconds();
    let (limit, first_threshold, proposals) = match search {
        Search::Wide => (seconds - seconds / LEAST_GAIN, seconds / FIRST_THRESHOLD, PROPOSALS),
        Search::Downhill => (seconds, 0, PROPOSALS_DOWNHILL),
    };
    let mut best = (seconds, state.rank_chunks.clone());
    let mut draw = Draw::default();
    for step in 0..proposals {
        let threshold = first_threshold * (proposals - step) as i64 / proposals as i64;
        let Some(swap) = state.propose(&mut draw) else { continue };
        state.swap(swap);
        let after = state.seconds();
        if after > seconds + threshold {
            state.swap(swap);
            continue;
        }
        seconds = after;
        if seconds < best.0 {
            best = (seconds, state.rank_chunks.clone());
        }
    }
    match best.0 < limit {
        true => Dispatch::new(work.seqlen_q(), work.chunk_size(), best.1),
        false => dispatch,
    }
}

/// Two seats: rank and place in its list.
type Swap = [(usize, usize); 2];

/// Who has which chunks, and what follows from it.
struct State<'a> {
    segments: &'a Segments,
    prices: &'a Prices,
    rank_chunks: Vec<Vec<u32>>,
    /// By chunk.
    rank_of: Vec<usize>,
    loads: Vec<[i64; 2]>,
    /// Segments that each rank reads and owns, `[rank * words + word]`.
    read: Vec<u64>,
    own: Vec<u64>,
}

impl<'a> State<'a> {
    fn new(segments: &'a Segments, prices: &'a Prices, dispatch: &Dispatch) -> Self {
        let ranks = dispatch.cp_size();
        let rank_chunks: Vec<Vec<u32>> = (0..ranks).map(|rank| dispatch.chunks(rank).to_vec()).collect();
        let mut rank_of = vec![0; prices.chunks.len()];
        for (rank, chunks) in rank_chunks.iter().enumerate() {
            chunks.iter().for_each(|&chunk| rank_of[chunk as usize] = rank);
        }
        let sets = || vec![0; ranks * segments.words()];
        let (read, own) = (sets(), sets());
        let mut state =
            Self { segments, prices, rank_chunks, rank_of, loads: vec![[0; 2]; ranks], read, own };
        (0..ranks).for_each(|rank| state.refresh(rank));
        state
    }

    fn refresh(&mut self, rank: usize) {
        let words = self.segments.words();
        let set = rank * words..(rank + 1) * words;
        let (read, own) = (&mut self.read[set.clone()], &mut self.own[set]);
        read.fill(0);
        own.fill(0);
        for &chunk in &self.rank_chunks[rank] {
            for &range in self.segments.needs(chunk) {
                words_of(range).for_each(|word| read[word] |= bits_in(range, word));
            }
            let rows = self.segments.own(chunk);
            words_of(rows).for_each(|word| own[word] |= bits_in(rows, word));
        }
        let chunks = self.rank_chunks[rank].iter().map(|&chunk| self.prices.chunks[chunk as usize]);
        self.loads[rank] =
            chunks.fold(self.prices.beyond[rank], |sum, chunk| [0, 1].map(|at| sum[at] + chunk[at]));
    }

    /// Two chunks of different ranks. A rank that owns a neighbour likely reads most of what a chunk reads.
    fn propose(&self, draw: &mut Draw) -> Option<Swap> {
        let a = draw.below(self.rank_of.len());
        let to = match draw.below(4) {
            0 => draw.below(self.rank_chunks.len()),
            way if way % 2 == 0 => self.rank_of[(a + 1).min(self.rank_of.len() - 1)],
            _ => self.rank_of[a.saturating_sub(1)],
        };
        let from = self.rank_of[a];
        if from == to || self.rank_chunks[to].is_empty() {
            return None;
        }
        let place = self.rank_chunks[from].iter().position(|&chunk| chunk as usize == a)?;
        Some([(from, place), (to, draw.below(self.rank_chunks[to].len()))])
    }

    fn swap(&mut self, [a, b]: Swap) {
        let (chunk_a, chunk_b) = (self.rank_chunks[a.0][a.1], self.rank_chunks[b.0][b.1]);
        self.rank_chunks[a.0][a.1] = chunk_b;
        self.rank_chunks[b.0][b.1] = chunk_a;
        self.rank_of[chunk_a as usize] = b.0;
        self.rank_of[chunk_b as usize] = a.0;
        self.refresh(a.0);
        self.refresh(b.0);
    }

    /// Picoseconds of the slowest rank, and a part of everybody's.
    fn seconds(&self) -> i64 {
        let (ranks, words) = (self.loads.len(), self.segments.words());
        let (mut received, mut sent) = (vec![0; ranks], vec![0; ranks]);
        for to in 0..ranks {
            for word in 0..words {
                let missing = self.read[to * words + word] & !self.own[to * words + word];
                if missing == 0 {
                    continue;
                }
                for from in (0..ranks).filter(|&from| from != to) {
                    let shared = missing & self.own[from * words + word];
                    if shared != 0 {
                        let rows = self.segments.rows(word, shared);
                        sent[from] += rows;
                        received[to] += rows;
                    }
                }
            }
        }
        let busier = |rank: usize| i64::max(sent[rank], received[rank]) * self.prices.row;
        let most_moved = (0..ranks).map(busier).max().unwrap_or(0);
        let (mut most_computed, mut all, mut uneven) = (0, 0, 0);
        for direction in 0..2 {
            let loads = self.loads.iter().map(|load| load[direction]);
            let sum: i64 = loads.clone().sum();
            all += sum;
            most_computed += loads.clone().max().unwrap_or(0);
            uneven += loads.map(|load| (load - sum / ranks as i64).abs()).sum::<i64>();
        }
        let pieces = self.rank_of.windows(2).filter(|pair| pair[0] != pair[1]).count() as i64;
        let cut = pieces * (all / self.rank_of.len() as i64) / (PIECE * ranks as i64);
        let moved: i64 = (0..ranks).map(busier).sum();
        most_computed + most_moved + cut + (uneven + moved) / (OTHERS * ranks as i64)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask};
    use proptest::prelude::*;

    use super::*;
    use crate::dispatch::{DispatchAlgorithm, chunk_work, dispatch};

    fn slowest(work: &ChunkWork, prices: &Prices, dispatch: &Dispatch) -> i64 {
        let segments = Segments::new(work, Home::WithQueries);
        State::new(&segments, prices, dispatch).seconds()
    }

    proptest! {
        /// Every chunk keeps exactly one rank, ranks keep their counts, nothing gets slower, and twice is the same.
        #[test]
        fn swaps_gain_or_are_left(
            lengths in prop::collection::vec(1..900_usize, 1..20),
            ranks in 2..6_usize,
            prices in prop::collection::vec(1_000_000..9_000_000_i64, 64),
            row in 0..60_000_i64,
        ) {
            let mask = Mask::causal(Documents::from_lengths(lengths).unwrap()).unwrap();
            let work = chunk_work(&mask, 64);
            let first = dispatch(&work, ranks, DispatchAlgorithm::Affinity);
            prop_assume!(settles(&work, &first));
            let chunks = (0..work.num_chunks()).map(|chunk| [prices[chunk % 64] / 4, prices[chunk % 64]]).collect();
            let prices = Prices { chunks, beyond: vec![[0; 2]; ranks], row };
            let settled = settle(&work, &prices, Search::Wide, first.clone());
            let mut owned: Vec<u32> = (0..ranks).flat_map(|rank| settled.chunks(rank).to_vec()).collect();
            owned.sort_unstable();
            prop_assert_eq!(owned, (0..work.num_chunks() as u32).collect::<Vec<_>>());
            for rank in 0..ranks {
                prop_assert_eq!(settled.chunks(rank).len(), first.chunks(rank).len());
            }
            let (before, after) = (slowest(&work, &prices, &first), slowest(&work, &prices, &settled));
            prop_assert!(settled == first || after < before - before / LEAST_GAIN, "{before} {after}");
            prop_assert_eq!(settle(&work, &prices, Search::Wide, first.clone()), settled.clone());
            let level = settle(&work, &prices, Search::Downhill, settled.clone());
            prop_assert!(slowest(&work, &prices, &level) <= after);
        }
    }

    /// Chunks of two prices that areas do not tell apart: balance by pairs leaves one rank with all dear ones.
    #[test]
    fn a_load_that_pairs_do_not_show_is_shared() {
        let mask = Mask::full(Documents::from_lengths(vec![64; 16]).unwrap()).unwrap();
        let work = chunk_work(&mask, 64);
        let price = |chunk| if chunk < 8 { 9_000 } else { 1_000 };
        let chunks = (0..16).map(|chunk| [price(chunk), 2 * price(chunk)]).collect();
        let prices = Prices { chunks, beyond: vec![[0; 2]; 2], row: 1 };
        let halves = vec![(0..8).collect(), (8..16).collect()];
        let settled = settle(&work, &prices, Search::Wide, Dispatch::new(work.seqlen_q(), 64, halves));
        let load =
            |rank| settled.chunks(rank).iter().map(|&chunk| prices.chunks[chunk as usize][0]).sum::<i64>();
        assert_eq!([load(0), load(1)], [40_000, 40_000]);
    }
}
