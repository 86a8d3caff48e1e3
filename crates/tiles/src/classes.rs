//! The order of a persistent kernel's queue: heavy tiles first, tiles of a document together for the L2 cache, light ones for the end.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::arrange::{Arranger, Order};
use super::chains::row_segments;
use super::ctas::{TileCtas, ends_of, ends_of_alike};
use super::list_time::{MOST_ITEMS, list_time};
use super::{TILE_COST, Tile, TileOrder, TileSchedule, TileScheduleConfig};

/// How heavy a tile may be, as a share of the heaviest's blocks, to be left for the end: the less is left, the more of a segment is
/// handed out together.
const LIGHT: [(u32, u32); 6] = [(0, 1), (1, 16), (1, 8), (1, 4), (3, 8), (1, 2)];

/// How light a tile of a class may be, in tenths of its heaviest's blocks: the more alike they are, the better the queue's end is
/// balanced, and the less of what they read the tiles of a head share. Finer classes took 1.13 ms instead of 1.09 for causal documents of
/// 8k rows at 64:8 heads (H200).
const ALIKE: u32 = 7;
/// The same where queues are so long that the end takes care of itself: a head's rows come from memory once for each class.
const UNLIKE: u32 = 1;
/// As which part of all the work of a CTA its end may come later for that.
const UNEVEN: u64 = 100;
/// By which part later all may finish for tiles of a segment to be handed out together.
const MOST_LOSS: u64 = 100;

/// In which order a queue hands out the tiles of a schedule, which are in that order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileClasses {
    /// Where each class ends. A class is handed out head by head, before the next one.
    pub ends: Vec<u32>,
    /// So many of the first classes are handed out by half-heads.
    pub halved: usize,
}

impl TileClasses {
    fn new(ends: Vec<usize>, halved: usize) -> Self {
        Self { ends: ends.into_iter().map(|end| end as u32).collect(), halved }
    }

    /// How many tiles are handed out by half-heads: the first ones.
    pub fn halved_tiles(&self) -> u32 {
        self.halved.checked_sub(1).map_or(0, |last| self.ends[last])
    }
}

impl TileSchedule {
    /// Puts tiles in the order in which a queue hands them out, in classes, at most `most`.
    ///
    /// Tiles that read rows in common, such as those of a document, are classes of their own, with the heaviest tile's first:
    /// what they read, and what a backward adds to, is then in the second level cache at a time; by work alone, a document's tiles
    /// run whenever those of their length are next. Light tiles of all of them come last, in classes of similar work, as many as it takes
    /// for the `ctas` to finish about as early as by work alone. All classes are of similar work where one segment of rows would
    /// have most of the work, or where most tiles of a segment are about as long as its longest.
    ///
    /// Where tiles need rows from [`arrival`](super::TileScheduleConfig::arrival) on, the CTAs have few of them, and the order is the
    /// one of many that is predicted to take least: by what its classes read, by when the last CTA finishes, and by who has to
    /// wait at the beginning. CTAs that share a tile of a head, half of its query heads each, let both be good.
    ///
    /// A schedule by [`TileOrder::Chains`] stays as it is, and is one class.
    ///
    /// # Panics
    /// When there is no CTA, or `most` is less than 4.
    pub fn classes(&mut self, ctas: TileCtas, most: usize) -> TileClasses {
        assert!(most > 3, "a class of the first, of a segment, of light tiles and of those that wait");
        if self.config.order == TileOrder::Chains || self.tiles.is_empty() {
            return TileClasses::new(vec![self.tiles.len()], 0);
        }
        let has_waiting = self.ready_tiles < self.tiles.len();
        let segments = row_segments(self);
        let mut tiles = self.tiles.clone();
        tiles.sort_by_key(|tile| (Reverse(tile.blocks), tile.number));
        let order = if has_waiting && tiles.len() * ctas.heads <= MOST_ITEMS {
            let ctas = TileCtas { half_heads: ctas.half_heads && ctas.head_passes.is_multiple_of(2), ..ctas };
            Arranger::new(self, &tiles, &segments, ctas).arrange(most)
        } else {
            let queue = Queue { segments, config: self.config, ctas };
            let most = most - usize::from(has_waiting);
            let mut ends = queue.gather(&mut tiles, most * 5 / 8);
            let light = ends.last().copied().unwrap_or(0);
            let groups = ends.len();
            let tenths = match groups == 0 && !has_waiting && queue.has_even_end(&tiles, UNLIKE, most) {
                true => UNLIKE,
                false => ALIKE,
            };
            ends.extend(ends_of_alike(&tiles[light..], tenths, most - groups).map(|end| light + end));
            if has_waiting {
                (tiles, ends) = ctas.delay(&tiles, &ends, |tile| self.waits(tile));
            }
            Order { tiles, ends, halved: 0 }
        };
        self.ready_tiles = order.tiles.iter().take_while(|tile| !self.waits(tile)).count();
        self.tiles = order.tiles;
        TileClasses::new(order.ends, order.halved)
    }
}

/// What is known of a schedule while its tiles are in another order.
struct Queue {
    /// By [`Tile::number`].
    segments: Vec<u32>,
    config: TileScheduleConfig,
    ctas: TileCtas,
}

impl Queue {
    fn segment(&self, tile: &Tile) -> u32 {
        self.segments[tile.number as usize]
    }

    /// Puts tiles of a segment next to one another where that serves, and gives where each such group ends, at most `most`, of which
    /// the last may be several.
    fn gather(&self, tiles: &mut [Tile], most: usize) -> Vec<usize> {
        let segments = self.segments.iter().max().map_or(0, |&last| last as usize + 1);
        let (mut work, mut heaviest) = (vec![0_u64; segments], vec![0_u32; segments]);
        for tile in tiles.iter() {
            let segment = self.segment(tile) as usize;
            work[segment] += u64::from(tile.blocks);
            heaviest[segment] = heaviest[segment].max(tile.blocks);
        }
        let all: u64 = work.iter().sum();
        // By work, too, tiles of like length of a segment are handed out together.
        let is_alike = |tile: &&Tile| tile.blocks * 10 >= heaviest[self.segment(tile) as usize] * 7;
        let alike: u64 = tiles.iter().filter(is_alike).map(|tile| u64::from(tile.blocks)).sum();
        if most == 0 || all == 0 || 4 * alike > 3 * all || work.iter().any(|&one| 2 * one > all) {
            return Vec::new();
        }
        let longest = tiles[0].blocks;
        let by_work = self.time(tiles, &[]);
        for (part, of) in LIGHT {
            let place = |tile: &Tile| {
                let segment = self.segment(tile);
                let is_light = tile.blocks * of <= longest * part;
                (!is_light).then_some((heaviest[segment as usize], Reverse(segment)))
            };
            let mut gathered = tiles.to_vec();
            // Along the rows in a group, stable otherwise: light tiles stay by work.
            gathered.sort_by_key(|tile| (Reverse(place(tile)), place(tile).map(|_| tile.number)));
            let ends = ends_of(&gathered, place, most);
            let is_even = match by_work {
                Some(limit) => {
                    self.time(&gathered, &ends).is_some_and(|time| time <= limit + limit / MOST_LOSS)
                }
                // One tile more or less at the end is then nothing.
                None => 4 * part >= of,
            };
            if is_even {
                tiles.copy_from_slice(&gathered);
                return ends;
            }
        }
        Vec::new()
    }

    /// Whether CTAs finish about together where classes of tiles have so many tenths of their heaviest's blocks: a CTA that takes the heaviest
    /// of a class's last head, when those of the others are under way, ends by at most this much later than the rest of the class, and what
    /// comes behind the class fills that, or it is next to nothing.
    fn has_even_end(&self, tiles: &[Tile], tenths: u32, most: usize) -> bool {
        let TileCtas { workers, heads, .. } = self.ctas;
        let cost = |tile: &Tile| u64::from(tile.blocks) * self.config.block as u64 + TILE_COST;
        let of_ctas = |head: u64| head * heads as u64 / workers as u64;
        let all: u64 = tiles.iter().map(cost).sum();
        let (mut left, mut begin) = (all, 0);
        ends_of_alike(tiles, tenths, most).all(|end| {
            let class = &tiles[begin..end];
            let work: u64 = class.iter().map(cost).sum();
            left -= work;
            begin = end;
            let lightest = class.last().map_or(0, cost);
            let later = class.first().map_or(0, cost).saturating_sub(work / workers as u64).max(lightest);
            later <= of_ctas(left) || later <= of_ctas(all) / UNEVEN
        })
    }

    /// When the last CTA has finished, classes up to `ends` being handed out head by head and the other tiles for all heads each;
    /// `None` where they are too many to try.
    fn time(&self, tiles: &[Tile], ends: &[usize]) -> Option<u64> {
        let TileCtas { workers, heads, .. } = self.ctas;
        if tiles.len() * heads > MOST_ITEMS {
            return None;
        }
        let cost = |tile: &Tile| u64::from(tile.blocks) * self.config.block as u64 + TILE_COST;
        let (mut classes, mut begin) = (Vec::new(), 0);
        for &end in ends {
            classes.push(&tiles[begin..end]);
            begin = end;
        }
        let of_classes = classes
            .into_iter()
            .flat_map(|class| (0..heads).flat_map(move |_| class.iter().map(move |tile| (cost(tile), 1))));
        let others = tiles[begin..].iter().map(|tile| (cost(tile), heads));
        Some(list_time(of_classes.chain(others), workers))
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Band, Mask, Range};

    use super::*;
    use crate::TileDirection;

    fn schedule(text: &str, arrival: Option<usize>) -> TileSchedule {
        let mask: Mask = text.parse().unwrap();
        let bands: Vec<_> = mask.bands().collect();
        let config =
            TileScheduleConfig { arrival, ..TileScheduleConfig::new(TileDirection::Backward, 128, 64) };
        TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config).unwrap()
    }

    fn ctas(heads: usize, workers: usize) -> TileCtas {
        TileCtas { workers, heads, head_passes: 1, half_heads: false }
    }

    fn time(schedule: &TileSchedule, ends: &[usize], ctas: TileCtas) -> u64 {
        let (segments, config) = (Vec::new(), schedule.config);
        Queue { segments, config, ctas }.time(&schedule.tiles, ends).unwrap()
    }

    fn ends_of_classes(classes: &TileClasses) -> Vec<usize> {
        classes.ends.iter().map(|&end| end as usize).collect()
    }

    const DOCUMENTS: &str =
        "varlen-causal:lengths=102,1003,419,356,130,895,108,1718,1139,2048,81,87,27,43,24,5,1,3,2,1";

    #[test]
    fn documents_come_one_after_another_and_light_tiles_last() {
        for (heads, workers, most) in [(8, 132, 16), (16, 132, 5), (1, 8, 16), (3, 8, 4)] {
            let by_work = schedule(DOCUMENTS, None);
            let mut ordered = by_work.clone();
            let ends = ends_of_classes(&ordered.classes(ctas(heads, workers), most));
            assert!(
                ends.len() <= most && ends.is_sorted() && ends.last() == Some(&ordered.tiles.len()),
                "{ends:?}"
            );
            let mut sorted = ordered.tiles.clone();
            sorted.sort_by_key(|tile| Reverse(tile.blocks));
            assert!(sorted.iter().zip(&by_work.tiles).all(|(a, b)| a.blocks == b.blocks));
            let numbers: std::collections::BTreeSet<_> = sorted.iter().map(|tile| tile.number).collect();
            assert_eq!(numbers.len(), sorted.len());

            // The longest documents', each by itself; with few groups the last of them is several.
            let segments = row_segments(&ordered);
            let segment = |tile: &Tile| segments[tile.number as usize];
            let groups = most * 5 / 8;
            let mut begin = 0;
            for &end in &ends[..groups - 1] {
                let group = &ordered.tiles[begin..end];
                if !group.is_sorted_by_key(|tile| tile.number) {
                    break;
                }
                assert!(group.iter().all(|tile| segment(tile) == segment(&group[0])));
                assert!(ordered.tiles[end].blocks <= group[0].blocks);
                begin = end;
            }
            assert!(begin > 0 || groups == 1, "{ends:?}");
            let (after, before) =
                (time(&ordered, &ends, ctas(heads, workers)), time(&by_work, &[], ctas(heads, workers)));
            assert!(after <= before + before / 20, "{after} compared with {before}");
        }
    }

    #[test]
    fn what_is_one_segment_stays_by_work() {
        for text in [
            "varlen-full:lengths=640,896,768,640,700",
            "causal:4096",
            "sliding-window:3000,left=500,right=3",
            "varlen-causal:lengths=3000,500,200",
            "full:90",
        ] {
            let by_work = schedule(text, None);
            let mut ordered = by_work.clone();
            assert_eq!(
                ordered.classes(ctas(8, 132), 16).ends.last(),
                Some(&(by_work.tiles.len() as u32)),
                "{text}"
            );
            assert_eq!(ordered, by_work, "{text}");
        }
    }

    #[test]
    fn long_queues_have_few_classes_and_end_as_early() {
        for (text, heads, few) in [
            ("causal:32768", 16, true),
            ("causal:16384", 64, false),
            ("causal:65536", 8, true),
            ("causal:8192", 16, false),
            ("causal:4096", 8, false),
            ("block-causal:32768,block=2048", 16, true),
        ] {
            let (ctas, by_work) = (ctas(heads, 132), schedule(text, None));
            let mut ordered = by_work.clone();
            let ends = ends_of_classes(&ordered.classes(ctas, 16));
            let mut sorted = by_work.tiles.clone();
            sorted.sort_by_key(|tile| (Reverse(tile.blocks), tile.number));
            assert_eq!(ordered.tiles, sorted, "{text}");
            let fine: Vec<usize> = ends_of_alike(&sorted, ALIKE, 16).collect();
            assert_eq!(ends.len() < fine.len(), few, "{text}: {ends:?}, {fine:?}");
            let (now, before) = (time(&ordered, &ends, ctas), time(&ordered, &fine, ctas));
            println!("{text}, {heads} heads: {} classes, {}; {now} and {before}", ends.len(), fine.len());
            assert!(now <= before + before / UNEVEN, "{text}: {now}, {before}");
        }
    }

    #[test]
    fn tiles_that_wait_come_as_their_work_wants_but_not_first() {
        let text = "varlen-causal:lengths=896,640,768,640,768,896,640";
        for (heads, workers) in [(16, 4), (8, 132), (2, 30)] {
            let whole = schedule(text, None);
            let mut ordered = schedule(text, Some(2304));
            let ready = ordered.ready_tiles();
            let ends = ends_of_classes(&ordered.classes(ctas(heads, workers), 16));
            let first = ordered.ready_tiles();
            assert!(ordered.tiles[..first].iter().all(|tile| tile.end <= 2304));
            assert!(first * heads >= workers || first == ready, "{first} of {ready}");
            assert!(
                ends.len() <= 16
                    && ends.is_sorted_by(|a, b| a < b)
                    && ends.last() == Some(&ordered.tiles.len())
            );
            assert_eq!(ordered.tiles.len(), whole.tiles.len());
            // Somebody who is ready comes after them, where all had waited.
            assert!(first == ready || ordered.tiles[first..].iter().any(|tile| tile.end <= 2304));
        }
    }

    /// All others would wait for the one tile of keys that come.
    #[test]
    fn few_keys_that_many_rows_see_do_not_come_last() {
        let mask: Mask = "varlen-causal:lengths=102,3051,419,2404,680,1536".parse().unwrap();
        let mut bands: Vec<Band> = mask.bands().collect();
        bands.push(Band::full(Range::new(6656, 8192), Range::new(8192, 8300)));
        let config = TileScheduleConfig {
            arrival: Some(8192),
            ..TileScheduleConfig::new(TileDirection::Backward, 128, 64)
        };
        let mut ordered = TileSchedule::new(&bands, 8192, 8300, &config).unwrap();
        let ctas = TileCtas { workers: 132, heads: 8, head_passes: 8, half_heads: false };
        let (count, waiting_last) = (ordered.tiles.len(), time(&ordered, &[], ctas));
        assert_eq!(ordered.ready_tiles(), count - 1);
        let ends = ends_of_classes(&ordered.classes(ctas, 16));
        assert!((17..count - 1).contains(&ordered.ready_tiles()));
        let after = time(&ordered, &ends, ctas);
        assert!(20 * after < 19 * waiting_last, "{after} {waiting_last}");
    }

    #[test]
    fn many_tiles_are_gathered_without_trying() {
        let lengths = vec!["1500"; 200].join(",");
        let mut gathered = schedule(&format!("varlen-causal:lengths={lengths}"), None);
        assert!(gathered.tiles.len() * 8 > MOST_ITEMS);
        let ends = gathered.classes(ctas(8, 132), 16).ends;
        assert_eq!(ends[..9], std::array::from_fn::<u32, 9, _>(|group| 9 * (group as u32 + 1)));
    }

    #[test]
    fn tiles_of_one_length_are_alike() {
        let alike = |blocks: &[u32], tenths, most| {
            let tiles: Vec<Tile> =
                blocks.iter().map(|&blocks| Tile { blocks, ..bytemuck::Zeroable::zeroed() }).collect();
            ends_of_alike(&tiles, tenths, most).collect::<Vec<_>>()
        };
        assert_eq!(alike(&[64; 9], 7, 16), [9]);
        assert_eq!(alike(&[100, 71, 70, 69, 50, 1, 0], 7, 16), [3, 5, 7]);
        assert_eq!(alike(&[100, 71, 70, 70, 50, 1, 0], 10, 16), [1, 2, 4, 5, 7]);
        let many: Vec<u32> = (0..200).rev().map(|x| x * x).collect();
        let ends = alike(&many, 7, 16);
        assert_eq!((ends.len(), ends.last()), (16, Some(&200)));
        assert!(ends.is_sorted_by(|a, b| a < b));
        assert!(alike(&[], 7, 16).is_empty());
    }
}
