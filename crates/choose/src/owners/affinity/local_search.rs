//! Local search for the dispatch whose slowest rank ends first, computation and links together: threshold accepting over swaps.

use counterpoint_plan::{ChunkWork, Dispatch, Planning};

use super::heaviest::{busier, heaviest, most_of_others};
use super::links::{Links, Moved, Reach};
use super::trade::Draw;

/// Chunks and ranks up to which dispatches are searched: a proposal looks at the links between all ranks.
const MOST_CHUNKS: usize = 1024;
pub(super) const MOST_RANKS: usize = 16;
/// The first worsening that is accepted, as a part of the whole; they shrink evenly to none.
const FIRST_THRESHOLD: i64 = 48;
/// How much of the time of the slowest rank all others' counts for: so that a swap that helps only these is a step.
const OTHERS: i64 = 8;

/// A dispatch is left alone unless another one is predicted to take less by this part: what is predicted is no better.
const LEAST_GAIN: i64 = 100;
/// By which part of an average chunk each piece costs more that ranks' rows are cut into: blocks end where pieces do.
const PIECE: i64 = 16;

/// What a step of work takes, in equal parts of a second: a forward, and a backward.
#[derive(Clone, Debug)]
pub(crate) struct Prices {
    /// Computing each chunk.
    pub(crate) chunks: Vec<[i64; 2]>,
    /// Of each rank, what it takes beyond its chunks.
    pub(crate) beyond: Vec<[i64; 2]>,
    /// A key row on the busier side of a rank's links.
    pub(crate) row: i64,
}

/// Swaps that are proposed for each rank, and for eight of them at least. A budget and no clock: the result is the same on every machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    wide: usize,
    downhill: usize,
}

impl Effort {
    /// What plans are made with. Three times as many make the slowest rank faster by 0.3 % in the geometric mean (120 packed masks on 2 to
    /// 16 ranks), and take two and a half times as long.
    pub(crate) const DEFAULT: Self = Self { wide: 320, downhill: 80 };
    /// To compare with.
    #[cfg(test)]
    pub(crate) const LONG: Self = Self { wide: 1_000, downhill: 250 };

    fn proposals(self, search: Search, ranks: usize) -> usize {
        let each = match search {
            Search::Wide => self.wide,
            Search::Downhill => self.downhill,
        };
        each * ranks.max(8)
    }
}

/// How far swaps are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// From one dispatch to whatever is best, over worse ones too. A dispatch is left alone unless another gains.
    Wide,
    /// Only where each swap gains.
    Downhill,
}

/// Whether a dispatch is one that is searched: of a few ranks, in pieces that are not too many.
pub(crate) fn is_searched(work: &ChunkWork, dispatch: &Dispatch) -> bool {
    let (chunks, ranks) = (work.num_chunks(), dispatch.cp_size());
    (2..=MOST_RANKS).contains(&ranks) && (2 * ranks..=MOST_CHUNKS).contains(&chunks)
}

/// Swaps chunks of `dispatch` so that its slowest rank ends sooner: what a rank computes, and after it what its links carry. By
/// threshold accepting (Dueck and Scheuer, Journal of Computational Physics 90, 1990): integers alone, and the best that was met.
/// `reach` is that of `work`.
pub(crate) fn local_search(
    work: &ChunkWork,
    reach: &Reach,
    prices: &Prices,
    (search, effort): (Search, Effort),
    dispatch: Dispatch,
    planning: &Planning<'_>,
) -> Dispatch {
    let mut state = State::new(reach, prices, &dispatch);
    let mut seconds = state.seconds();
    let (limit, first_threshold) = match search {
        Search::Wide => (seconds - seconds / LEAST_GAIN, seconds / FIRST_THRESHOLD),
        Search::Downhill => (seconds, 0),
    };
    let proposals = effort.proposals(search, dispatch.cp_size());
    let (mut least, mut best) = (seconds, state.seats.clone());
    let mut draw = Draw::default();
    for step in 0..proposals {
        if planning.is_cancelled() {
            break;
        }
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
    /// By how much each rank is off the mean in both, and all ranks together.
    off: [i64; MOST_RANKS],
    uneven: i64,
}

/// What follows from a swap; what ranks send is kept in the [`State`].
struct After {
    seconds: i64,
    /// By direction, what the two ranks compute.
    swapped: [[i64; 2]; 2],
    /// By how much each of them is off the mean in both, and all ranks together.
    off: [i64; 2],
    uneven: i64,
    pieces: i64,
    /// Rows that the two receive.
    received: [i64; 2],
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
    /// By chunk, between two of no rank.
    rank_of: Vec<usize>,
    /// By direction, of a rank; swaps leave it as it is.
    mean: [i64; 2],
    /// What so many pieces cost.
    cuts: Vec<i64>,
    loads: Loads,
    /// By direction, the heaviest ranks: whichever two swap, one of them is another.
    heaviest: [[i64; 3]; 2],
    /// The same of rows that are received, and those of all ranks.
    most_received: [i64; 3],
    all_received: i64,
    /// Neighbouring chunks of different ranks.
    pieces: i64,
    links: Links<'a>,
    /// What ranks would send after the swap that was weighed last.
    sent_after: [i64; MOST_RANKS],
}

impl<'a> State<'a> {
    fn new(reach: &'a Reach, prices: &'a Prices, dispatch: &Dispatch) -> Self {
        let (ranks, chunks) = (dispatch.cp_size(), prices.chunks.len());
        let (mut seats, mut starts) = (Vec::with_capacity(chunks), Vec::with_capacity(ranks + 1));
        let (mut seat_of, mut rank_of) = (vec![0; chunks], vec![usize::MAX; chunks + 2]);
        let mut of = [[0; MOST_RANKS]; 2];
        starts.push(0);
        for rank in 0..ranks {
            (0..2).for_each(|at| of[at][rank] = prices.beyond[rank][at]);
            for &chunk in dispatch.chunks(rank) {
                seat_of[chunk as usize] = seats.len();
                rank_of[chunk as usize + 1] = rank;
                seats.push(chunk);
                (0..2).for_each(|at| of[at][rank] += prices.chunks[chunk as usize][at]);
            }
            starts.push(seats.len());
        }
        let all = of.map(|loads| loads.iter().sum::<i64>());
        let mean = all.map(|all| all / ranks as i64);
        let mut off = [0; MOST_RANKS];
        for (rank, off) in off[..ranks].iter_mut().enumerate() {
            *off = (0..2).map(|at| (of[at][rank] - mean[at]).abs()).sum();
        }
        let loads = Loads { of, off, uneven: off.iter().sum() };
        let piece = (all[0] + all[1]) / chunks as i64;
        let cuts = (0..chunks as i64).map(|pieces| pieces * piece / (PIECE * ranks as i64)).collect();
        let pieces = rank_of[1..=chunks].windows(2).filter(|pair| pair[0] != pair[1]).count() as i64;
        let links = Links::new(reach, (0..ranks).map(|rank| dispatch.chunks(rank)));
        let received = &links.moved().received[..ranks];
        let (most_received, all_received) = (heaviest(received), received.iter().sum());
        let heaviest = of.map(|loads| heaviest(&loads[..ranks]));
        Self {
            prices,
            ranks,
            seats,
            starts,
            seat_of,
            rank_of,
            mean,
            cuts,
            loads,
            heaviest,
            most_received,
            all_received,
            pieces,
            links,
            sent_after: [0; MOST_RANKS],
        }
    }

    fn rank_of(&self, chunk: u32) -> usize {
        self.rank_of[chunk as usize + 1]
    }

    /// Two chunks of different ranks. A rank that owns a neighbour likely reads most of what a chunk reads.
    fn propose(&self, draw: &mut Draw) -> Option<Swap> {
        let chunks = self.seat_of.len();
        let a = draw.below(chunks);
        let way = draw.below(4);
        // All are computed and one is selected: such a branch is often predicted wrongly.
        let mut after = *draw;
        let drawn = after.below(self.ranks);
        let neighbour = if way.is_multiple_of(2) { (a + 1).min(chunks - 1) } else { a.saturating_sub(1) };
        let to = if way == 0 { drawn } else { self.rank_of[neighbour + 1] };
        *draw = if way == 0 { after } else { *draw };
        let seats = &self.seats[self.starts[to]..self.starts[to + 1]];
        if self.rank_of[a + 1] == to || seats.is_empty() {
            return None;
        }
        Some([a as u32, seats[draw.below(seats.len())]])
    }

    /// What follows from a swap; `None` where it leads beyond `limit`, which is often plain before looking at links, and mostly from
    /// what the two ranks receive.
    fn after(&mut self, swap: Swap, limit: i64) -> Option<After> {
        let [a, b] = swap.map(|chunk| self.rank_of(chunk));
        let prices = swap.map(|chunk| self.prices.chunks[chunk as usize]);
        let (mut off, mut slowest, mut swapped) = ([0; 2], 0, [[0; 2]; 2]);
        for at in 0..2 {
            let change = prices[1][at] - prices[0][at];
            let loads = &self.loads.of[at];
            let [of_a, of_b] = [loads[a] + change, loads[b] - change];
            off[0] += (of_a - self.mean[at]).abs();
            off[1] += (of_b - self.mean[at]).abs();
            slowest += most_of_others(self.heaviest[at], [loads[a], loads[b]]).max(of_a).max(of_b);
            swapped[at] = [of_a, of_b];
        }
        let uneven = self.loads.uneven - self.loads.off[a] - self.loads.off[b] + off[0] + off[1];
        let pieces = self.pieces + self.more_pieces(swap, [a, b]);
        let ended = slowest + self.cuts[pieces as usize];
        let is_beyond = |most: i64, all: i64| self.is_beyond(limit, ended, uneven, (most, all));
        let Moved { received: before, .. } = self.links.moved();
        // Others receive what they did, and links carry no less than that.
        let most = most_of_others(self.most_received, [before[a], before[b]]);
        let all = self.all_received - before[a] - before[b];
        if is_beyond(most, all) {
            return None;
        }
        let given = [(a, swap[0]), (b, swap[1])];
        let received = self.links.received_after(given);
        if is_beyond(most.max(received[0]).max(received[1]), all + received[0] + received[1]) {
            return None;
        }
        let mut of_all = *before;
        [of_all[a], of_all[b]] = received;
        self.links.sent_after(given, &mut self.sent_after);
        let (most, all) = busier(&self.sent_after[..self.ranks], &of_all);
        let seconds = self.seconds_of(ended, uneven, (most, all));
        (seconds <= limit).then_some(After { seconds, swapped, off, uneven, pieces, received })
    }

    /// How many more neighbours are of different ranks after a swap of chunks of these ranks.
    fn more_pieces(&self, swap: Swap, ranks: [usize; 2]) -> i64 {
        let more = |chunk: u32, other: u32, [from, to]: [usize; 2]| {
            // One to the right of where it would be looked for: a chunk of no rank is before the first and behind the last.
            let (chunk, other) = (chunk as usize, other as usize + 1);
            let of = |neighbour: usize| {
                let rank = self.rank_of[neighbour];
                // Two that are swapped stay of different ranks.
                i64::from(neighbour != other) * (i64::from(rank != to) - i64::from(rank != from))
            };
            of(chunk) + of(chunk + 2)
        };
        more(swap[0], swap[1], ranks) + more(swap[1], swap[0], [ranks[1], ranks[0]])
    }

    /// Makes the swap that was weighed last.
    fn swap(&mut self, swap: Swap, After { swapped, off, uneven, pieces, received, .. }: After) {
        let [a, b] = swap.map(|chunk| chunk as usize);
        let [rank_a, rank_b] = swap.map(|chunk| self.rank_of(chunk));
        self.links.swap([(rank_a, swap[0]), (rank_b, swap[1])], received, &self.sent_after);
        self.seats.swap(self.seat_of[a], self.seat_of[b]);
        self.seat_of.swap(a, b);
        self.rank_of.swap(a + 1, b + 1);
        for at in 0..2 {
            let loads = &mut self.loads.of[at];
            [loads[rank_a], loads[rank_b]] = swapped[at];
            self.heaviest[at] = heaviest(&loads[..self.ranks]);
        }
        let received = &self.links.moved().received[..self.ranks];
        (self.most_received, self.all_received) = (heaviest(received), received.iter().sum());
        [self.loads.off[rank_a], self.loads.off[rank_b]] = off;
        (self.loads.uneven, self.pieces) = (uneven, pieces);
    }

    /// What the slowest rank takes, and a part of everybody's.
    fn seconds(&self) -> i64 {
        let slowest: i64 = self.heaviest.iter().map(|heaviest| heaviest[0]).sum();
        let Moved { sent, received } = self.links.moved();
        let ended = slowest + self.cuts[self.pieces as usize];
        self.seconds_of(ended, self.loads.uneven, busier(&sent[..self.ranks], received))
    }

    /// With when the slowest rank has computed, how uneven all are, and the rows that the busiest rank's links and those of all carry: no
    /// less with more of any.
    fn seconds_of(&self, ended: i64, uneven: i64, (most_moved, moved): (i64, i64)) -> i64 {
        let row = self.prices.row;
        ended + most_moved * row + (uneven + moved * row) / (OTHERS * self.ranks as i64)
    }

    /// Whether [`State::seconds_of`] these is more than `limit`, which is known without a division.
    fn is_beyond(&self, limit: i64, ended: i64, uneven: i64, (most_moved, moved): (i64, i64)) -> bool {
        let row = self.prices.row;
        // Nothing of this is negative, so what is rounded down is more where it is so before.
        uneven + moved * row >= (limit - ended - most_moved * row + 1) * (OTHERS * self.ranks as i64)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask, Range, Window};
    use proptest::prelude::*;

    use super::*;
    use crate::config::DispatchAlgorithm;
    use crate::owners::dispatch;
    use counterpoint_plan::chunk_work;

    fn slowest(work: &ChunkWork, prices: &Prices, dispatch: &Dispatch) -> i64 {
        plain(work, prices, &lists(dispatch))
    }

    fn lists(dispatch: &Dispatch) -> Vec<Vec<u32>> {
        (0..dispatch.cp_size()).map(|rank| dispatch.chunks(rank).to_vec()).collect()
    }

    /// What [`State::seconds`] is, from rows and without anything that is kept.
    fn plain(work: &ChunkWork, prices: &Prices, rank_chunks: &[Vec<u32>]) -> i64 {
        let ranks = rank_chunks.len();
        let rows = |rank: usize| rank_chunks[rank].iter().map(|&chunk| work.rows(chunk as usize));
        let (mut sent, mut received) = (vec![0; ranks], vec![0; ranks]);
        for to in 0..ranks {
            let needs = rank_chunks[to].iter().flat_map(|&chunk| work.needs(chunk as usize).to_vec());
            let missing = Range::without(&Range::merged(needs.collect()), &Range::merged(rows(to).collect()));
            for from in (0..ranks).filter(|&from| from != to) {
                let shared =
                    rows(from).flat_map(|own| missing.iter().map(move |rows| rows.intersect(&own).len()));
                let shared = shared.sum::<usize>() as i64;
                sent[from] += shared;
                received[to] += shared;
            }
        }
        let busier: Vec<i64> =
            (0..ranks).map(|rank| i64::max(sent[rank], received[rank]) * prices.row).collect();
        let (mut most, mut all, mut uneven) = (*busier.iter().max().unwrap(), 0, 0);
        for at in 0..2 {
            let load = |rank: usize| {
                let chunks = rank_chunks[rank].iter().map(|&chunk| prices.chunks[chunk as usize][at]);
                prices.beyond[rank][at] + chunks.sum::<i64>()
            };
            let sum: i64 = (0..ranks).map(load).sum();
            most += (0..ranks).map(load).max().unwrap();
            all += sum;
            uneven += (0..ranks).map(|rank| (load(rank) - sum / ranks as i64).abs()).sum::<i64>();
        }
        let rank_of = |chunk: u32| rank_chunks.iter().position(|chunks| chunks.contains(&chunk));
        let chunks = work.num_chunks() as i64;
        let pieces = (1..chunks as u32).filter(|&chunk| rank_of(chunk) != rank_of(chunk - 1)).count() as i64;
        let cut = pieces * (all / chunks) / (PIECE * ranks as i64);
        most + cut + (uneven + busier.iter().sum::<i64>()) / (OTHERS * ranks as i64)
    }

    proptest! {
        /// What a swap is weighed at is what all ranks are found to take after it, whatever was kept of swaps before; and a limit
        /// turns away exactly what is beyond it.
        #[test]
        fn a_swap_is_weighed_as_from_scratch(
            lengths in prop::collection::vec(1..700_usize, 1..12),
            kind in 0..4_usize,
            ranks in 2..=MOST_RANKS,
            drawn in prop::collection::vec([1_000_000..9_000_000_i64, 0..9_000_000], 64),
            row in 0..60_000_i64,
            swaps in prop::collection::vec((any::<usize>(), any::<usize>(), any::<bool>()), 1..40),
        ) {
            let documents = Documents::from_lengths(lengths).unwrap();
            let window = Window { left: Some(100), right: Some(30), global: 20 };
            let mask = match kind {
                0 => Mask::full(documents),
                1 => Mask::sliding_window(documents, window),
                2 => Mask::block_causal(documents, 90),
                _ => Mask::causal(documents),
            };
            let work = chunk_work(&mask.unwrap(), 64);
            let first = dispatch(&work, ranks, DispatchAlgorithm::Affinity);
            prop_assume!(is_searched(&work, &first));
            let chunks = (0..work.num_chunks()).map(|chunk| drawn[chunk % 64]).collect();
            let prices = Prices { chunks, beyond: drawn[..ranks].to_vec(), row };
            let reach = Reach::new(&work);
            let mut state = State::new(&reach, &prices, &first);
            let mut owned = lists(&first);
            prop_assert_eq!(state.seconds(), plain(&work, &prices, &owned));
            for (a, b, stays) in swaps {
                let swap = [a, b].map(|chunk| (chunk % work.num_chunks()) as u32);
                let seat = |owned: &[Vec<u32>], chunk: u32| {
                    let place = |rank: usize| Some((rank, owned[rank].iter().position(|&own| own == chunk)?));
                    (0..ranks).find_map(place).unwrap()
                };
                let [(rank_a, at_a), (rank_b, at_b)] = swap.map(|chunk| seat(&owned, chunk));
                if rank_a == rank_b {
                    continue;
                }
                let mut after = owned.clone();
                (after[rank_a][at_a], after[rank_b][at_b]) = (swap[1], swap[0]);
                let wanted = plain(&work, &prices, &after);
                prop_assert!(state.after(swap, wanted - 1).is_none());
                let found = state.after(swap, wanted).unwrap();
                prop_assert_eq!(found.seconds, wanted);
                if stays {
                    state.swap(swap, found);
                    owned = after;
                    prop_assert_eq!(state.seconds(), wanted);
                }
            }
        }

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
            prop_assume!(is_searched(&work, &first));
            let chunks = (0..work.num_chunks()).map(|chunk| [prices[chunk % 64] / 4, prices[chunk % 64]]).collect();
            let prices = Prices { chunks, beyond: vec![[0; 2]; ranks], row };
            let reach = Reach::new(&work);
            let searched = local_search(&work, &reach, &prices, (Search::Wide, Effort::DEFAULT), first.clone(), &Planning::ALONE);
            let mut owned: Vec<u32> = (0..ranks).flat_map(|rank| searched.chunks(rank).to_vec()).collect();
            owned.sort_unstable();
            prop_assert_eq!(owned, (0..work.num_chunks() as u32).collect::<Vec<_>>());
            for rank in 0..ranks {
                prop_assert_eq!(searched.chunks(rank).len(), first.chunks(rank).len());
            }
            let (before, after) = (slowest(&work, &prices, &first), slowest(&work, &prices, &searched));
            prop_assert!(searched == first || after < before - before / LEAST_GAIN, "{before} {after}");
            prop_assert_eq!(local_search(&work, &reach, &prices, (Search::Wide, Effort::DEFAULT), first.clone(), &Planning::ALONE), searched.clone());
            let level = local_search(&work, &reach, &prices, (Search::Downhill, Effort::DEFAULT), searched.clone(), &Planning::ALONE);
            prop_assert!(slowest(&work, &prices, &level) <= after);
        }
    }

    /// Chunks of two prices that areas do not distinguish: balance by pairs leaves one rank with all dear ones.
    #[test]
    fn a_load_that_pairs_do_not_show_is_shared() {
        let mask = Mask::full(Documents::from_lengths(vec![64; 16]).unwrap()).unwrap();
        let work = chunk_work(&mask, 64);
        let price = |chunk| if chunk < 8 { 9_000 } else { 1_000 };
        let chunks = (0..16).map(|chunk| [price(chunk), 2 * price(chunk)]).collect();
        let prices = Prices { chunks, beyond: vec![[0; 2]; 2], row: 1 };
        let halves = vec![(0..8).collect(), (8..16).collect()];
        let reach = Reach::new(&work);
        let searched = local_search(
            &work,
            &reach,
            &prices,
            (Search::Wide, Effort::DEFAULT),
            Dispatch::new(work.seqlen_q(), 64, halves),
            &Planning::ALONE,
        );
        let load =
            |rank| searched.chunks(rank).iter().map(|&chunk| prices.chunks[chunk as usize][0]).sum::<i64>();
        assert_eq!([load(0), load(1)], [40_000, 40_000]);
    }
}
