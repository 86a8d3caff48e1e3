//! The order of a queue by what it is predicted to take, of ranks whose keys arrive: they have few tiles to each taker, so that one order
//! serves the cache, another one the queue's end, and none both.

use std::cmp::Reverse;

use counterpoint_mask::Range;

use super::classes::{TileTakers, ends_of, ends_of_alike};
use super::list_time::list_time;
use super::{TILE_COST, Tile, TileSchedule};

/// How light a tile may be, as a share of the heaviest's blocks, to come after those that are gathered.
const LIGHT: [(u32, u32); 6] = [(0, 1), (1, 16), (1, 8), (1, 4), (1, 2), (1, 1)];
/// How light a tile of a class of these may be, in tenths of its heaviest's blocks.
const ALIKE: [u32; 6] = [3, 5, 7, 8, 9, 10];
/// How many of the first classes may be handed out by halves, or all.
const HALVED: [usize; 5] = [0, 1, 2, 3, usize::MAX];

/// Columns that a row of a head costs more when it is not in the cache: its block takes 3.5 us then instead of 2 (H200, heads of 128).
const READING: (u64, u64) = (3, 4);
/// Columns until a row is there that arrives, counted from the first one: 12 ns (H200, NVLink, 8 key heads of 128).
const ARRIVAL: (u64, u64) = (2, 5);
/// By which part of it an end counts that comes later than an even one: takers that are through leave the others their share of power
/// and memory.
const LATE: u64 = 3;
/// Columns that it takes to add the halves of a tile.
const HALF_COST: u64 = 150;

/// Who shares power and memory with whom is not known: items take up to this part longer or less long than they are said to, and an order
/// is as good as it is in so many trials.
const UNEVEN: u64 = 16;
const TRIALS: u64 = 3;
/// With more items to each taker than these, how they end is hardly a matter of their order: no halves, and one trial.
const MANY_ITEMS: usize = 32;

/// Tiles, and where classes of them end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) tiles: Vec<Tile>,
    pub(super) ends: Vec<usize>,
    /// So many of the first classes are handed out by halves.
    pub(super) halved: usize,
}

impl Order {
    fn classes(&self) -> impl Iterator<Item = &[Tile]> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins.zip(&self.ends).map(|(begin, &end)| &self.tiles[begin..end])
    }
}

/// What is known of tiles, by their numbers.
pub(super) struct Arranger {
    takers: TileTakers,
    /// Which tiles walk rows in common.
    stretches: Vec<u32>,
    /// Columns of all walks, and what a tile costs besides.
    costs: Vec<u64>,
    rows: Vec<Vec<Range>>,
    waits: Vec<bool>,
    /// How many rows arrive.
    arriving: usize,
}

impl Arranger {
    pub(super) fn new(schedule: &TileSchedule, stretches: Vec<u32>, takers: TileTakers) -> Self {
        let config = &schedule.config;
        let count = stretches.len();
        let (mut costs, mut rows, mut waits) = (vec![0; count], vec![Vec::new(); count], vec![false; count]);
        for tile in &schedule.tiles {
            let at = tile.number as usize;
            for run in schedule.runs_of(tile) {
                let walked = Range::new(run.start as usize, run.end as usize);
                let is_whole = schedule.bounds_of(run).is_empty();
                let seeing = if is_whole { (tile.end - tile.start) as usize } else { 0 };
                costs[at] += walked.len().div_ceil(config.block) as u64 * config.block_cost(seeing);
                rows[at].push(walked);
            }
            costs[at] = costs[at] * takers.walks as u64 + TILE_COST;
            waits[at] = schedule.waits(tile);
        }
        let arriving = config.arrival.map_or(0, |arrival| schedule.k_rows.saturating_sub(arrival));
        Self { takers, stretches, costs, rows, waits, arriving }
    }

    fn waits(&self, tile: &Tile) -> bool {
        self.waits[tile.number as usize]
    }

    /// The order of at most `most` classes that is predicted to take least, of tiles that are sorted by work.
    pub(super) fn arrange(&self, by_work: &[Tile], most: usize) -> Order {
        let TileTakers { workers, heads, halves, .. } = self.takers;
        let are_many = by_work.len() * heads > MANY_ITEMS * workers;
        let (ways, trials) = match (are_many, halves) {
            (true, _) => (1, 1),
            (false, false) => (1, TRIALS),
            (false, true) => (HALVED.len(), TRIALS),
        };
        let mut orders = self.orders(by_work, most);
        orders.sort_by_key(|order| order.0);
        orders.dedup_by(|a, b| a.1 == b.1);
        let all: u64 = by_work.iter().map(|tile| self.costs[tile.number as usize]).sum();
        let even = all * heads as u64 / workers as u64;
        let mut best: Option<(u64, Order)> = None;
        for (reading, order) in orders {
            // Whatever its end is like.
            if best.as_ref().is_some_and(|best| best.0 <= even + reading) {
                break;
            }
            for halved in HALVED.into_iter().take(ways) {
                let order = Order { halved: halved.min(order.ends.len()), ..order.clone() };
                let time = self.time(&order, trials);
                if best.as_ref().is_none_or(|best| time < best.0) {
                    best = Some((time, order));
                }
            }
        }
        best.map_or_else(Order::default, |best| best.1)
    }

    /// Orders to choose from, each with what it reads.
    fn orders(&self, by_work: &[Tile], most: usize) -> Vec<(u64, Order)> {
        let has_waiting = by_work.iter().any(|tile| self.waits(tile));
        // Long tiles first, as many as there are takers, let the queue end early; none, the cache serve all.
        let first_ones = [0, self.takers.workers.div_ceil(self.takers.heads).min(by_work.len())];
        let mut orders = Vec::new();
        for (first, light) in first_ones.into_iter().flat_map(|first| LIGHT.map(|light| (first, light))) {
            let (tiles, groups) = self.gather(by_work, first, light, most / 2);
            let begin = groups.last().copied().unwrap_or(0);
            for alike in ALIKE {
                let mut ends = groups.clone();
                // One class more may come of tiles that wait.
                let others = ends_of_alike(&tiles[begin..], alike, most - 1 - groups.len());
                ends.extend(others.map(|end| begin + end));
                let together = Order { tiles: tiles.clone(), ends, halved: 0 };
                if has_waiting {
                    let (tiles, ends) =
                        self.takers.delay(&together.tiles, &together.ends, |tile| self.waits(tile));
                    orders.push(Order { tiles, ends, halved: 0 });
                }
                orders.push(together);
            }
        }
        orders.into_iter().map(|order| (self.reading(&order), order)).collect()
    }

    /// Tiles of a stretch next to one another, but for the `first` and for light ones, and where these groups end.
    fn gather(
        &self,
        by_work: &[Tile],
        first: usize,
        light: (u32, u32),
        most: usize,
    ) -> (Vec<Tile>, Vec<usize>) {
        let stretch = |tile: &Tile| self.stretches[tile.number as usize];
        let mut heaviest = vec![0; self.stretches.iter().max().map_or(0, |&last| last as usize + 1)];
        for tile in &by_work[first..] {
            let heaviest = &mut heaviest[stretch(tile) as usize];
            *heaviest = tile.blocks.max(*heaviest);
        }
        let longest = by_work.first().map_or(0, |tile| tile.blocks);
        let place = |tile: &Tile| {
            let is_light = tile.blocks * light.1 <= longest * light.0;
            (!is_light).then(|| (heaviest[stretch(tile) as usize], Reverse(stretch(tile))))
        };
        let mut tiles = by_work.to_vec();
        // Along the rows in a group, stable otherwise: light tiles stay by work.
        tiles[first..].sort_by_key(|tile| (Reverse(place(tile)), place(tile).map(|_| tile.number)));
        let mut ends: Vec<usize> = (first > 0).then_some(first).into_iter().collect();
        let groups = ends_of(&tiles[first..], place, (most - ends.len()).max(1));
        ends.extend(groups.into_iter().map(|end| first + end));
        (tiles, ends)
    }

    /// Rows that the tiles of a class walk.
    fn rows_of(&self, class: &[Tile]) -> u64 {
        let rows = class.iter().flat_map(|tile| &self.rows[tile.number as usize]);
        let mut rows: Vec<Range> = rows.copied().collect();
        rows.sort_unstable();
        let (mut count, mut end) = (0, 0);
        for range in rows {
            count += range.end.saturating_sub(range.start.max(end));
            end = end.max(range.end);
        }
        count as u64
    }

    /// Columns that all takers are held up by reading, shared out evenly. A head's part of a class is in the cache at a time, and a
    /// class finds nothing there of the one before.
    fn reading(&self, order: &Order) -> u64 {
        let TileTakers { workers, heads, walks, .. } = self.takers;
        let rows: u64 = order.classes().map(|class| self.rows_of(class)).sum();
        rows * (heads * walks) as u64 * READING.0 / READING.1 / workers as u64
    }

    /// Columns until the last taker has finished.
    fn time(&self, order: &Order, trials: u64) -> u64 {
        let TileTakers { workers, heads, walks, .. } = self.takers;
        let mut classes = Vec::with_capacity(order.ends.len());
        for (at, class) in order.classes().enumerate() {
            let blocks: u64 = class.iter().map(|tile| u64::from(tile.blocks)).sum();
            let reading = self.rows_of(class) * walks as u64 * READING.0 / READING.1;
            let cost = |tile: &Tile| {
                // Whoever walks most reads most.
                let read = reading * u64::from(tile.blocks) / blocks.max(1);
                let whole = self.costs[tile.number as usize] + read;
                if at < order.halved { (whole - TILE_COST) / 2 + TILE_COST + HALF_COST } else { whole }
            };
            let items: Vec<(u64, bool)> = class.iter().map(|tile| (cost(tile), self.waits(tile))).collect();
            classes.push((heads * if at < order.halved { 2 } else { 1 }, items));
        }
        let arrival = self.arriving as u64 * ARRIVAL.0 / ARRIVAL.1;
        let trial = |trial: u64| {
            let mut draw = trial as u32;
            let items = classes.iter().flat_map(|(heads, class)| (0..*heads).flat_map(move |_| class));
            let items = items.enumerate().map(|(at, &(cost, waits))| {
                draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let cost = cost - cost / UNEVEN + cost * u64::from(draw >> 16) / (UNEVEN << 15);
                // Who begins with a tile that waits does wait.
                (cost + if at < workers && waits { arrival } else { 0 }, 1)
            });
            list_time(items, workers)
        };
        let last = (1..=trials).map(trial).sum::<u64>() / trials;
        let costs =
            classes.iter().map(|(heads, class)| *heads as u64 * class.iter().map(|item| item.0).sum::<u64>());
        let even = costs.sum::<u64>() / workers as u64;
        even + last.saturating_sub(even) / LATE
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask};
    use proptest::prelude::*;

    use super::super::chains::stretches_of_rows;
    use super::super::{TileDirection, TileScheduleConfig};
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

    fn takers(halves: bool) -> TileTakers {
        TileTakers { workers: 132, heads: 8, walks: 8, halves }
    }

    fn arranger(schedule: &TileSchedule, halves: bool) -> Arranger {
        Arranger::new(schedule, stretches_of_rows(schedule), takers(halves))
    }

    /// Documents of a rank of two. By work, tiles of both long ones come in turn, and each class reads their rows again.
    #[test]
    fn tiles_of_a_document_that_is_most_of_the_work_are_near_one_another() {
        let mask: Mask = "varlen-causal:lengths=102,3051,419,2404,680,1536".parse().unwrap();
        let schedule = schedule(&mask, 8064);
        let tiles = by_work(&schedule);
        let arranger = arranger(&schedule, true);
        let ends = ends_of_alike(&tiles, 7, 15).collect();
        let before = Order { tiles: tiles.clone(), ends, halved: 0 };
        let after = arranger.arrange(&tiles, 16);
        let (read_before, read_after) = (arranger.reading(&before), arranger.reading(&after));
        assert!(4 * read_after < 3 * read_before, "{read_after} {read_before}");
        let (time_before, time_after) = (arranger.time(&before, TRIALS), arranger.time(&after, TRIALS));
        assert!(100 * time_after < 97 * time_before, "{time_after} {time_before}");
    }

    /// Each head has an item of 48 blocks, two thirds of what a taker walks in all.
    #[test]
    fn long_items_are_halved_where_they_are_in_the_way() {
        let mask: Mask = "varlen-causal:lengths=102,3051,419,2404,680,1536".parse().unwrap();
        let schedule = schedule(&mask, 8064);
        let tiles = by_work(&schedule);
        let [whole, halved] = [false, true].map(|halves| arranger(&schedule, halves).arrange(&tiles, 16));
        assert!(whole.halved == 0 && halved.halved > 0, "{halved:?}");
        let arranger = arranger(&schedule, true);
        assert!(arranger.time(&halved, TRIALS) < arranger.time(&whole, TRIALS));
        // Short ones are not.
        let mask: Mask =
            "varlen-full:lengths=200,300,200,300,100,250,64,200,300,200,300,100,250,64".parse().unwrap();
        let schedule = self::schedule(&mask, mask.seqlen_k() - 64);
        let tiles = by_work(&schedule);
        assert_eq!(self::arranger(&schedule, true).arrange(&tiles, 16).halved, 0);
    }

    #[test]
    fn rows_that_several_tiles_walk_are_read_once() {
        let mask: Mask = "varlen-causal:lengths=300,64".parse().unwrap();
        let schedule = schedule(&mask, 300);
        let arranger = arranger(&schedule, false);
        let rows = |numbers: &[u32]| {
            let tiles = schedule.tiles.iter().copied().filter(|tile| numbers.contains(&tile.number));
            arranger.rows_of(&tiles.collect::<Vec<_>>())
        };
        let all: Vec<u32> = schedule.tiles.iter().map(|tile| tile.number).collect();
        assert_eq!((rows(&[0]), rows(&all), rows(&[])), (300, 364, 0));
        let last = all.iter().max().copied().unwrap();
        assert_eq!(rows(&[0, last]), 364);
    }

    proptest! {
        #[test]
        fn every_tile_is_in_one_class(
            lengths in prop::collection::vec(1..900_usize, 1..12),
            own in 0..10_usize,
            takers in (1..140_usize, 1..9_usize, 1..5_usize, any::<bool>()),
            most in 4..17_usize,
        ) {
            let mask = Mask::causal(Documents::from_lengths(lengths).unwrap()).unwrap();
            let mut schedule = schedule(&mask, mask.seqlen_k() * own / 10);
            let before = by_work(&schedule);
            let (workers, heads, walks, halves) = takers;
            let classes = schedule.classes(TileTakers { workers, heads, walks, halves }, most);
            prop_assert!(by_work(&schedule) == before);
            prop_assert!(classes.ends.len() <= most && classes.ends.is_sorted_by(|a, b| a < b), "{classes:?}");
            prop_assert_eq!(classes.ends.last().copied(), Some(before.len() as u32));
            prop_assert!(classes.halved <= classes.ends.len());
            prop_assert!(classes.halved == 0 || halves && walks % 2 == 0);
            prop_assert!(classes.halved_tiles() as usize <= before.len());
        }
    }
}
