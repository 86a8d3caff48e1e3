use super::links::{Links, Moved, Reach};
use super::trade::Draw;
use crate::dispatch::{ChunkWork, Dispatch};

/// Chunks and ranks up to which dispatches are settled: a proposal looks at the links between all ranks.
const MOST_CHUNKS: usize = 1024;
pub(super) const MOST_RANKS: usize = 16;
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
/// `reach` is that of `work`.
pub(crate) fn settle(
    work: &ChunkWork,
    reach: &Reach,
    prices: &Prices,
    search: Search,
    dispatch: Dispatch,
) -> Dispatch {
    let mut state = State::new(reach, prices, &dispatch);
    let mut seconds = state.seconds();
    let (limit, first_threshold, proposals) = match search {
        Search::Wide => (seconds - seconds / LEAST_GAIN, seconds / FIRST_THRESHOLD, PROPOSALS),
        Search::Downhill => (seconds, 0, PROPOSALS_DOWNHILL),
    };
    let (mut least, mut best) = (seconds, state.seats.clone());
    let mut draw = Draw::default();
    for step in 0..proposals {
        let threshold = first_threshold * (proposals - step) as i64 / proposals as i64;
        let Some(swap) = state.propose(&mut draw) else { continue };
        let Some(after) = state.after(swap, seconds + threshold) else { continue };
        seconds = after.seconds;
        state.swap(swap, after);
        if seconds < least {
            least = seconds;
            best.copy_from_slice(&state.seats);
        }
    }
    match least < limit {
        true => {
            let rank_chunks = state.starts.windows(2).map(|ends| best[ends[0]..ends[1]].to_vec()).collect();
            Dispatch::new(work.seqlen_q(), work.chunk_size(), rank_chunks)
        }
        false => dispatch,
    }
}

/// Two chunks of different ranks.
type Swap = [u32; 2];

/// What ranks compute, by direction.
#[derive(Clone, Copy)]
struct Loads {
    of: [[i64; MOST_RANKS]; 2],
    /// By how much all ranks together are off the mean.
    uneven: i64,
}

/// What follows from a swap.
struct After {
    seconds: i64,
    loads: Loads,
    pieces: i64,
    moved: Moved,
}

/// Who has which chunks, and what follows from it.
struct State<'a> {
    prices: &'a Prices,
    ranks: usize,
    /// The chunks of rank `r`: `seats[starts[r]..starts[r + 1]]`.
    seats: Vec<u32>,
    starts: Vec<usize>,
    /// By chunk.
    seat_of: Vec<usize>,
    rank_of: Vec<usize>,
    /// By direction, of a rank; swaps leave it as it is.
    mean: [i64; 2],
    /// What one more piece costs, times [`PIECE`] and ranks.
    piece: i64,
    loads: Loads,
    /// Neighbouring chunks of different ranks.
    pieces: i64,
    links: Links<'a>,
}

impl<'a> State<'a> {
    fn new(reach: &'a Reach, prices: &'a Prices, dispatch: &Dispatch) -> Self {
        let (ranks, chunks) = (dispatch.cp_size(), prices.chunks.len());
        let (mut seats, mut starts) = (Vec::with_capacity(chunks), vec![0]);
        let (mut seat_of, mut rank_of) = (vec![0; chunks], vec![0; chunks]);
        let mut of = [[0; MOST_RANKS]; 2];
        for rank in 0..ranks {
            (0..2).for_each(|at| of[at][rank] = prices.beyond[rank][at]);
            for &chunk in dispatch.chunks(rank) {
                seat_of[chunk as usize] = seats.len();
                rank_of[chunk as usize] = rank;
                seats.push(chunk);
                (0..2).for_each(|at| of[at][rank] += prices.chunks[chunk as usize][at]);
            }
            starts.push(seats.len());
        }
        let all = of.map(|loads| loads.iter().sum::<i64>());
        let mean = all.map(|all| all / ranks as i64);
        let uneven = |at: usize| of[at][..ranks].iter().map(|load| (load - mean[at]).abs()).sum::<i64>();
        let loads = Loads { of, uneven: uneven(0) + uneven(1) };
        let piece = (all[0] + all[1]) / chunks as i64;
        let pieces = rank_of.windows(2).filter(|pair| pair[0] != pair[1]).count() as i64;
        let links = Links::new(reach, (0..ranks).map(|rank| dispatch.chunks(rank)));
        Self { prices, ranks, seats, starts, seat_of, rank_of, mean, piece, loads, pieces, links }
    }

    /// Two chunks of different ranks. A rank that owns a neighbour likely reads most of what a chunk reads.
    fn propose(&self, draw: &mut Draw) -> Option<Swap> {
        let a = draw.below(self.rank_of.len());
        let to = match draw.below(4) {
            0 => draw.below(self.ranks),
            way if way % 2 == 0 => self.rank_of[(a + 1).min(self.rank_of.len() - 1)],
            _ => self.rank_of[a.saturating_sub(1)],
        };
        let seats = &self.seats[self.starts[to]..self.starts[to + 1]];
        if self.rank_of[a] == to || seats.is_empty() {
            return None;
        }
        Some([a as u32, seats[draw.below(seats.len())]])
    }

    /// What follows from a swap; `None` where it leads beyond `limit`, which is often plain before looking at links.
    fn after(&self, swap: Swap, limit: i64) -> Option<After> {
        let [a, b] = swap.map(|chunk| self.rank_of[chunk as usize]);
        let prices = swap.map(|chunk| self.prices.chunks[chunk as usize]);
        let mut loads = self.loads;
        for at in 0..2 {
            let change = prices[1][at] - prices[0][at];
            for (rank, change) in [(a, change), (b, -change)] {
                let load = &mut loads.of[at][rank];
                loads.uneven -= (*load - self.mean[at]).abs();
                *load += change;
                loads.uneven += (*load - self.mean[at]).abs();
            }
        }
        let pieces = self.pieces + self.more_pieces(swap);
        if self.seconds_of(&loads, pieces, 0, 0) > limit {
            return None;
        }
        let moved = self.links.after([(a, swap[0]), (b, swap[1])]);
        let seconds = self.seconds_with(&loads, pieces, &moved);
        (seconds <= limit).then_some(After { seconds, loads, pieces, moved })
    }

    /// How many more neighbours are of different ranks after a swap.
    fn more_pieces(&self, swap: Swap) -> i64 {
        let [a, b] = swap.map(|chunk| chunk as usize);
        let more = |chunk: usize, other: usize| {
            let (from, to) = (self.rank_of[chunk], self.rank_of[other]);
            let beside = [chunk.wrapping_sub(1), chunk + 1].into_iter();
            // Two that are swapped stay of different ranks.
            let ranks = beside.filter(|&chunk| chunk != other).filter_map(|chunk| self.rank_of.get(chunk));
            ranks.map(|&rank| i64::from(rank != to) - i64::from(rank != from)).sum::<i64>()
        };
        more(a, b) + more(b, a)
    }

    fn swap(&mut self, swap: Swap, After { loads, pieces, moved, .. }: After) {
        let [a, b] = swap.map(|chunk| chunk as usize);
        self.links.swap([(self.rank_of[a], swap[0]), (self.rank_of[b], swap[1])], moved);
        self.seats.swap(self.seat_of[a], self.seat_of[b]);
        self.seat_of.swap(a, b);
        self.rank_of.swap(a, b);
        (self.loads, self.pieces) = (loads, pieces);
    }

    /// Picoseconds of the slowest rank, and a part of everybody's.
    fn seconds(&self) -> i64 {
        self.seconds_with(&self.loads, self.pieces, self.links.moved())
    }

    fn seconds_with(&self, loads: &Loads, pieces: i64, Moved { sent, received }: &Moved) -> i64 {
        let busier = sent.iter().zip(received).map(|(&sent, &received)| sent.max(received) * self.prices.row);
        let (most, all) = busier.fold((0, 0), |(most, all), moved| (moved.max(most), all + moved));
        self.seconds_of(loads, pieces, most, all)
    }

    /// With what the busiest rank's links carry, and all ranks' together: no less with more of either.
    fn seconds_of(&self, loads: &Loads, pieces: i64, most_moved: i64, moved: i64) -> i64 {
        let ranks = self.ranks as i64;
        let most = |loads: &[i64; MOST_RANKS]| loads[..self.ranks].iter().copied().max().unwrap_or(0);
        let cut = pieces * self.piece / (PIECE * ranks);
        most(&loads.of[0]) + most(&loads.of[1]) + most_moved + cut + (loads.uneven + moved) / (OTHERS * ranks)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask};
    use proptest::prelude::*;

    use super::*;
    use crate::dispatch::{DispatchAlgorithm, chunk_work, dispatch};

    fn slowest(work: &ChunkWork, prices: &Prices, dispatch: &Dispatch) -> i64 {
        plain(work, prices, &(0..dispatch.cp_size()).map(|rank| dispatch.chunks(rank)).collect::<Vec<_>>())
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
