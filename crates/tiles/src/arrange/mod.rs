//! The order of a queue by what it is predicted to take, of ranks whose keys arrive: they have few tiles for each CTA, so that one order
//! serves the cache, another one the queue's end, and none both.

mod orders;
#[cfg(test)]
mod plain;
mod trials;

use counterpoint_mask::Range;

use super::ctas::TileCtas;
use super::{TILE_COST, Tile, TileSchedule};
use orders::TileOrders;
use trials::{Trials, UNEVEN};

/// How many of the first classes may be split by half-heads, or all.
const HALVED: [usize; 5] = [0, 1, 2, 3, usize::MAX];

/// Columns that a row of a head costs more when it is not in the cache: its block takes 3.5 us then instead of 2 (H200, heads of 128).
const READING: (u64, u64) = (3, 4);
/// Columns until a row is there that arrives, counted from the first one: 12 ns (H200, NVLink, 8 key heads of 128).
const ARRIVAL: (u64, u64) = (2, 5);
/// By which part of it an end counts that comes later than an even one: CTAs that are through leave the others their share of power
/// and memory.
const LATE: u64 = 3;
/// Columns that it takes to add the two half-heads of a tile.
const HALF_COST: u64 = 150;

/// An order is as good as it is in so many trials of items that take longer or less long than they are said to.
const TRIALS: usize = 3;
/// So many orders are tried at most, those first that promise most. With long items and few heads all promise nearly the same, and trying
/// all of them took 40 ms for a rank's 130 tiles of two heads.
const MOST_TRIED: usize = 48;
/// With more items for each CTA than these, how they end is hardly a matter of their order: no split by half-heads, and one trial.
const MANY_ITEMS: usize = 32;

/// Tiles, and where classes of them end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) tiles: Vec<Tile>,
    pub(super) ends: Vec<usize>,
    /// So many of the first classes are split by half-heads.
    pub(super) halved: usize,
}

/// What is known of tiles, by their places in the order by work.
pub(super) struct Arranger<'a> {
    by_work: &'a [Tile],
    ctas: TileCtas,
    /// Which tiles read rows in common.
    segments: Vec<u32>,
    /// Columns of all query heads, and what a tile costs besides.
    costs: Vec<u64>,
    /// Rows that tiles read, ascending, each with the tile's place.
    rows: Vec<(Range, u32)>,
    waits: Vec<bool>,
    /// Columns until all rows are there that arrive.
    arrival: u64,
}

/// Places in the order by work, in the order of a queue, and what its classes are.
struct Candidate {
    places: Vec<u32>,
    ends: Vec<usize>,
    /// Rows that the tiles of each class read.
    rows: Vec<u64>,
}

impl Candidate {
    fn classes(&self) -> impl Iterator<Item = (&[u32], u64)> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins.zip(&self.ends).zip(&self.rows).map(|((begin, &end), &rows)| (&self.places[begin..end], rows))
    }
}

/// What an item of a tile costs that is handed out by half-heads, of one that costs so many columns as a whole.
fn half(whole: u64) -> u64 {
    (whole - TILE_COST) / 2 + TILE_COST + HALF_COST
}

impl<'a> Arranger<'a> {
    /// Of `by_work`, all tiles of `schedule` sorted by work, and of each number's tile the segment.
    pub(super) fn new(
        schedule: &TileSchedule,
        by_work: &'a [Tile],
        segments: &[u32],
        ctas: TileCtas,
    ) -> Self {
        let config = &schedule.config;
        let mut costs = Vec::with_capacity(by_work.len());
        let mut rows: Vec<(Range, u32)> = Vec::with_capacity(by_work.len());
        for (place, tile) in by_work.iter().enumerate() {
            let (mut columns, first) = (0, rows.len());
            for run in schedule.runs_of(tile) {
                let read = Range::new(run.start as usize, run.end as usize);
                let is_whole = schedule.bounds_of(run).is_empty();
                let seeing = if is_whole { (tile.end - tile.start) as usize } else { 0 };
                columns += read.len().div_ceil(config.block) as u64 * config.block_cost(seeing);
                match rows[first..].last_mut() {
                    Some((before, _)) if before.end == read.start => before.end = read.end,
                    _ => rows.push((read, place as u32)),
                }
            }
            costs.push(columns * ctas.head_passes as u64 + TILE_COST);
        }
        rows.sort_unstable();
        let arriving = config.arrival.map_or(0, |arrival| schedule.k_rows.saturating_sub(arrival));
        Self {
            by_work,
            ctas,
            segments: by_work.iter().map(|tile| segments[tile.number as usize]).collect(),
            costs,
            rows,
            waits: by_work.iter().map(|tile| schedule.waits(tile)).collect(),
            arrival: arriving as u64 * ARRIVAL.0 / ARRIVAL.1,
        }
    }

    /// The order of at most `most` classes that is predicted to take least of those that are tried; of equal ones that which reads least.
    pub(super) fn arrange(&self, most: usize) -> Order {
        self.arrange_trying(MOST_TRIED, most)
    }

    fn arrange_trying(&self, most_tried: usize, most: usize) -> Order {
        let TileCtas { workers, heads, half_heads, .. } = self.ctas;
        let are_many = self.by_work.len() * heads > MANY_ITEMS * workers;
        let ways = if half_heads && !are_many { &HALVED[..] } else { &HALVED[..1] };
        let candidates = self.candidates(most);
        let best = match are_many {
            true => Search::<1>::new(self, &candidates).best(ways, most_tried),
            false => Search::<TRIALS>::new(self, &candidates).best(ways, most_tried),
        };
        best.map_or_else(Order::default, |BestOrder { candidate, halved, .. }| {
            let Candidate { places, ends, .. } = &candidates[candidate];
            let tiles = places.iter().map(|&place| self.by_work[place as usize]).collect();
            Order { tiles, ends: ends.clone(), halved }
        })
    }

    /// All orders that differ, by what they read.
    fn candidates(&self, most: usize) -> Vec<Candidate> {
        let mut class_of = vec![0; self.by_work.len()];
        let measured = TileOrders::new(self, most).all().into_iter().map(|(places, ends)| {
            let candidate =
                Candidate { rows: self.rows_of_classes(&places, &ends, &mut class_of), places, ends };
            (self.reading(&candidate), candidate)
        });
        let mut measured: Vec<(u64, Candidate)> = measured.collect();
        measured.sort_by_key(|measured| measured.0);
        let mut candidates: Vec<Candidate> = Vec::with_capacity(measured.len());
        // Those that read as much as the last one begin here.
        let (mut alike, mut last) = (0, None);
        for (reading, candidate) in measured {
            if last != Some(reading) {
                (alike, last) = (candidates.len(), Some(reading));
            }
            let Candidate { places, ends, .. } = &candidate;
            if !candidates[alike..].iter().any(|other| other.ends == *ends && other.places == *places) {
                candidates.push(candidate);
            }
        }
        candidates
    }

    /// Rows that the tiles of each class read. `class_of` has room for every tile.
    fn rows_of_classes(&self, places: &[u32], ends: &[usize], class_of: &mut [u32]) -> Vec<u64> {
        let mut begin = 0;
        for (class, &end) in ends.iter().enumerate() {
            places[begin..end].iter().for_each(|&place| class_of[place as usize] = class as u32);
            begin = end;
        }
        // Of each class, rows so far and where they end.
        let mut read = vec![(0, 0); ends.len()];
        for (range, place) in &self.rows {
            let (count, end) = &mut read[class_of[*place as usize] as usize];
            *count += range.end.saturating_sub(range.start.max(*end));
            *end = range.end.max(*end);
        }
        read.into_iter().map(|(count, _)| count as u64).collect()
    }

    /// Columns that all CTAs are held up by reading, shared out evenly. A head's part of a class is in the cache at a time, and a
    /// class finds nothing there of the one before.
    fn reading(&self, candidate: &Candidate) -> u64 {
        let TileCtas { workers, heads, head_passes, .. } = self.ctas;
        candidate.rows.iter().sum::<u64>() * (heads * head_passes) as u64 * READING.0
            / READING.1
            / workers as u64
    }

    /// Columns by which one head's part of a class of so many rows is held up.
    fn reading_of_class(&self, rows: u64) -> u64 {
        rows * self.ctas.head_passes as u64 * READING.0 / READING.1
    }
}

/// The best order so far. Of those that take as long it is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BestOrder {
    time: u64,
    candidate: usize,
    halved: usize,
}

/// Looks for the candidate that takes least, in `N` trials each: at those first that take least if all CTAs end at the same time, until
/// that is more than what the best of them takes.
struct Search<'a, const N: usize> {
    arranger: &'a Arranger<'a>,
    candidates: &'a [Candidate],
    /// What the items of one head cost as a whole, of each candidate that was looked at, in its order.
    costs: Vec<Vec<u64>>,
    trials: Trials<N>,
    /// Of the queue that is looked at.
    items: Vec<u64>,
    delays: Vec<u64>,
}

impl<'a, const N: usize> Search<'a, N> {
    fn new(arranger: &'a Arranger<'a>, candidates: &'a [Candidate]) -> Self {
        let TileCtas { workers, heads, .. } = arranger.ctas;
        // Whoever takes no item is not asked.
        let most_items = arranger.by_work.len() * heads * 2;
        Self {
            arranger,
            candidates,
            costs: vec![Vec::new(); candidates.len()],
            trials: Trials::new(workers.min(most_items.max(1))),
            items: Vec::with_capacity(most_items),
            delays: Vec::with_capacity(workers.min(most_items)),
        }
    }

    fn best(mut self, ways: &[usize], most_tried: usize) -> Option<BestOrder> {
        let mut bounds = Vec::with_capacity(self.candidates.len() * ways.len());
        for (at, candidate) in self.candidates.iter().enumerate() {
            let mut last = None;
            for (halved, time) in self.arranger.least(candidate, ways) {
                if last.replace(halved) != Some(halved) {
                    bounds.push(BestOrder { time, candidate: at, halved });
                }
            }
        }
        bounds.sort_unstable();
        let mut best: Option<BestOrder> = None;
        for bound in bounds.into_iter().take(most_tried) {
            if best.is_some_and(|best| best.time < bound.time) {
                break;
            }
            let found = BestOrder { time: self.time(bound.candidate, bound.halved), ..bound };
            best = Some(best.map_or(found, |best| best.min(found)));
        }
        best
    }

    /// Columns until the last CTA has finished.
    fn time(&mut self, candidate: usize, halved: usize) -> u64 {
        let Self { arranger, costs, trials, items, delays, .. } = self;
        let TileCtas { workers, heads, .. } = arranger.ctas;
        let (order, costs) = (&self.candidates[candidate], &mut costs[candidate]);
        if costs.is_empty() {
            order.classes().for_each(|(class, rows)| arranger.add_costs(class, rows, costs));
        }
        items.clear();
        delays.clear();
        let mut begin = 0;
        for (at, &end) in order.ends.iter().enumerate() {
            let (class, costs) = (&order.places[begin..end], &costs[begin..end]);
            begin = end;
            let first = items.len();
            let times = if at < halved {
                items.extend(costs.iter().map(|&whole| half(whole)));
                2 * heads
            } else {
                items.extend_from_slice(costs);
                heads
            };
            for _ in 1..times {
                items.extend_from_within(first..first + class.len());
            }
            // Who begins with a tile that waits does wait.
            let delay = |&place: &u32| if arranger.waits[place as usize] { arranger.arrival } else { 0 };
            let beginning = workers.min(items.len()) - delays.len();
            delays.extend(class.iter().cycle().map(delay).take(beginning));
        }
        let even = items.iter().sum::<u64>() / workers as u64;
        let last = trials.mean(items, delays);
        even + last.saturating_sub(even) / LATE
    }
}

impl Arranger<'_> {
    /// Of each way how many classes are halved, and no more than what the order takes when all CTAs end at the same time, or with the
    /// longest item: quotients are rounded down for each class, not for each tile.
    fn least(&self, candidate: &Candidate, ways: &[usize]) -> impl Iterator<Item = (usize, u64)> {
        let TileCtas { workers, heads, .. } = self.ctas;
        let of_class = |(class, rows): (&[u32], u64)| {
            let cost: u64 = class.iter().map(|&place| self.costs[place as usize]).sum();
            let has_blocks = class.iter().any(|&place| self.by_work[place as usize].blocks > 0);
            let reading = if has_blocks { self.reading_of_class(rows) } else { 0 };
            let tiles = class.len() as u64;
            let whole = cost + reading.saturating_sub(tiles);
            let halved_cost = (whole - tiles * TILE_COST).saturating_sub(tiles);
            let longest = class.iter().map(|&place| self.costs[place as usize]).max();
            (whole, halved_cost + 2 * tiles * (TILE_COST + HALF_COST), longest)
        };
        let classes: Vec<(u64, u64, Option<u64>)> = candidate.classes().map(of_class).collect();
        ways.iter().map(move |&way| {
            let (halved, whole) = classes.split_at(way.min(classes.len()));
            let split: u64 = halved.iter().map(|class| class.1).sum();
            let all = split + whole.iter().map(|class| class.0).sum::<u64>();
            let even = all * heads as u64 / workers as u64;
            let split = halved.iter().filter_map(|class| class.2.map(half));
            let longest = split.chain(whole.iter().filter_map(|class| class.2)).max().unwrap_or(0);
            (halved.len(), even + (longest - longest / UNEVEN).saturating_sub(even) / LATE)
        })
    }

    /// What the items of a head's part of a class cost as a whole: the longest tile reads most.
    fn add_costs(&self, class: &[u32], rows: u64, costs: &mut Vec<u64>) {
        let blocks = |place: u32| u64::from(self.by_work[place as usize].blocks);
        let all: u64 = class.iter().map(|&place| blocks(place)).sum();
        let reading = self.reading_of_class(rows);
        // Tiles of the same length mostly follow one another.
        let mut last = (0, 0);
        costs.extend(class.iter().map(|&place| {
            let blocks = blocks(place);
            if blocks != last.0 {
                last = (blocks, reading * blocks / all);
            }
            self.costs[place as usize] + last.1
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use counterpoint_mask::{Documents, Mask};
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::super::chains::row_segments;
    use super::super::ctas::ends_of_alike;
    use super::super::{TileDirection, TileScheduleConfig};
    use super::plain::Plain;
    use super::*;

    fn schedule(mask: &Mask, arrival: usize) -> TileSchedule {
        let bands: Vec<_> = mask.bands().collect();
        let config = TileScheduleConfig {
            arrival: Some(arrival),
            ..TileScheduleConfig::new(TileDirection::Backward, 128, 64)
        };
        TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config).unwrap()
    }

    fn by_work(schedule: &TileSchedule) -> Vec<Tile> {
        let mut tiles = schedule.tiles.clone();
        tiles.sort_by_key(|tile| (Reverse(tile.blocks), tile.number));
        tiles
    }

    fn ctas(half_heads: bool) -> TileCtas {
        TileCtas { workers: 132, heads: 8, head_passes: 8, half_heads }
    }

    fn arrange(schedule: &TileSchedule, ctas: TileCtas, most: usize) -> Order {
        let by_work = by_work(schedule);
        let arranger = Arranger::new(schedule, &by_work, &row_segments(schedule), ctas);
        arranger.arrange_trying(usize::MAX, most)
    }

    /// Trying few orders is as good as trying all: many packs of few and of many heads, with a part of their keys arriving.
    #[test]
    fn few_orders_are_enough() {
        let (mut logarithms, mut worst): (f64, f64) = (0.0, 1.0);
        const CASES: usize = 48;
        for case in 0..CASES {
            let mut rng = ChaCha8Rng::seed_from_u64(case as u64);
            let rows = [8192, 12288, 16384][case % 3];
            let (mut left, mut lengths) = (rows, Vec::new());
            while left > 0 {
                let length = left.min((1 << rng.random_range(4..13)) + rng.random_range(0..600));
                lengths.push(length);
                left -= length;
            }
            let documents = Documents::from_lengths(lengths).unwrap();
            let mask = if case % 4 == 0 { Mask::full(documents) } else { Mask::causal(documents) }.unwrap();
            let schedule = schedule(&mask, 128 * rng.random_range(8..rows / 128));
            let (heads, head_passes) = [(2, 4), (8, 8), (4, 2), (1, 8)][case / 3 % 4];
            let ctas = TileCtas { workers: 132, heads, head_passes, half_heads: true };
            let by_work = by_work(&schedule);
            let plain = Plain::new(&schedule, &by_work, ctas);
            let arranger = Arranger::new(&schedule, &by_work, &row_segments(&schedule), ctas);
            let [few, all] = [MOST_TRIED, usize::MAX]
                .map(|tried| plain.time(&arranger.arrange_trying(tried, 16), TRIALS) as f64);
            logarithms += (few / all).ln();
            worst = worst.max(few / all);
        }
        let mean = (logarithms / CASES as f64).exp();
        println!("{mean:.4} of what the best of all orders takes, at worst {worst:.4}");
        assert!(mean < 1.01 && worst < 1.07, "{mean} {worst}");
    }

    /// Documents of a rank of two. By work, tiles of both long ones come in turn, and each class reads their rows again.
    #[test]
    fn tiles_of_a_document_that_is_most_of_the_work_are_near_one_another() {
        let mask: Mask = "varlen-causal:lengths=102,3051,419,2404,680,1536".parse().unwrap();
        let schedule = schedule(&mask, 8064);
        let tiles = by_work(&schedule);
        let plain = Plain::new(&schedule, &tiles, ctas(true));
        let ends = ends_of_alike(&tiles, 7, 15).collect();
        let before = Order { tiles: tiles.clone(), ends, halved: 0 };
        let after = arrange(&schedule, ctas(true), 16);
        let (read_before, read_after) = (plain.reading(&before), plain.reading(&after));
        assert!(4 * read_after < 3 * read_before, "{read_after} {read_before}");
        let (time_before, time_after) = (plain.time(&before, TRIALS), plain.time(&after, TRIALS));
        assert!(100 * time_after < 97 * time_before, "{time_after} {time_before}");
    }

    /// Each head has an item of 48 blocks, two thirds of what a CTA computes in all.
    #[test]
    fn long_items_are_halved_where_they_are_in_the_way() {
        let mask: Mask = "varlen-causal:lengths=102,3051,419,2404,680,1536".parse().unwrap();
        let schedule = schedule(&mask, 8064);
        let [whole, halved] = [false, true].map(|half_heads| arrange(&schedule, ctas(half_heads), 16));
        assert!(whole.halved == 0 && halved.halved > 0, "{halved:?}");
        let plain = Plain::new(&schedule, &by_work(&schedule), ctas(true));
        assert!(plain.time(&halved, TRIALS) < plain.time(&whole, TRIALS));
        // Short ones are not.
        let mask: Mask =
            "varlen-full:lengths=200,300,200,300,100,250,64,200,300,200,300,100,250,64".parse().unwrap();
        let schedule = self::schedule(&mask, mask.seqlen_k() - 64);
        assert_eq!(arrange(&schedule, ctas(true), 16).halved, 0);
    }

    #[test]
    fn rows_that_several_tiles_read_count_once() {
        let mask: Mask = "varlen-causal:lengths=300,64".parse().unwrap();
        let schedule = schedule(&mask, 300);
        let tiles = by_work(&schedule);
        let arranger = Arranger::new(&schedule, &tiles, &row_segments(&schedule), ctas(false));
        let rows = |ends: &[usize]| {
            let mut places: Vec<u32> = (0..tiles.len() as u32).collect();
            places.sort_by_key(|&place| tiles[place as usize].number);
            arranger.rows_of_classes(&places, ends, &mut vec![0; tiles.len()])
        };
        // Three tiles of the first document, and one of the other.
        assert_eq!(tiles.len(), 4);
        assert_eq!(rows(&[4]), [364]);
        assert_eq!(rows(&[1, 4]), [300, 172 + 64]);
        assert_eq!(rows(&[3, 4]), [300, 64]);
        assert_eq!(rows(&[1, 1, 2, 3, 4]), [300, 0, 172, 44, 64]);
    }

    proptest! {
        #[test]
        fn no_order_is_predicted_to_take_less(
            lengths in prop::collection::vec(1..900_usize, 1..9),
            is_causal in any::<bool>(),
            own in 0..10_usize,
            // With more than 256 CTAs, there is no tree of them.
            ctas in (prop_oneof![1..140_usize, 250..300_usize], 1..9_usize, 1..5_usize, any::<bool>()),
            most in 4..17_usize,
        ) {
            let documents = Documents::from_lengths(lengths).unwrap();
            let mask = if is_causal { Mask::causal(documents) } else { Mask::full(documents) }.unwrap();
            let schedule = schedule(&mask, mask.seqlen_k() * own / 10);
            let (workers, heads, head_passes, half_heads) = ctas;
            let ctas = TileCtas { workers, heads, head_passes, half_heads };
            let plain = Plain::new(&schedule, &by_work(&schedule), ctas);
            prop_assert_eq!(arrange(&schedule, ctas, most), plain.arrange(most));
        }

        #[test]
        fn every_tile_is_in_one_class(
            lengths in prop::collection::vec(1..900_usize, 1..12),
            own in 0..10_usize,
            ctas in (1..140_usize, 1..9_usize, 1..5_usize, any::<bool>()),
            most in 4..17_usize,
        ) {
            let mask = Mask::causal(Documents::from_lengths(lengths).unwrap()).unwrap();
            let mut schedule = schedule(&mask, mask.seqlen_k() * own / 10);
            let before = by_work(&schedule);
            let (workers, heads, head_passes, half_heads) = ctas;
            let classes = schedule.classes(TileCtas { workers, heads, head_passes, half_heads }, most);
            prop_assert!(by_work(&schedule) == before);
            prop_assert!(classes.ends.len() <= most && classes.ends.is_sorted_by(|a, b| a < b), "{classes:?}");
            prop_assert_eq!(classes.ends.last().copied(), Some(before.len() as u32));
            prop_assert!(classes.halved <= classes.ends.len());
            prop_assert!(classes.halved == 0 || half_heads && head_passes % 2 == 0);
            prop_assert!(classes.halved_tiles() as usize <= before.len());
        }
    }
}
