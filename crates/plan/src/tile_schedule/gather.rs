use std::cmp::Reverse;

use super::chains::stretches_of_rows;
use super::list_time::{MOST_ITEMS, list_time};
use super::{TILE_COST, Tile, TileSchedule};

/// How heavy a tile may be, as a share of the heaviest's blocks, to be left for the end: the less is left, the more of a stretch is
/// handed out together.
const LIGHT: [(u32, u32); 6] = [(0, 1), (1, 16), (1, 8), (1, 4), (3, 8), (1, 2)];

impl TileSchedule {
    /// Puts tiles that walk rows in common, such as those of a document, next to one another, and gives where each such group
    /// ends. What the tiles of a group read, and what a backward adds to, is then in the second level cache at a time, if groups
    /// are handed out one after the other, head by head; by work alone, a document's tiles run whenever their length's turn comes.
    ///
    /// The group with the heaviest tile comes first. Light tiles of all groups come last, by work and in no group, as many as it
    /// takes for `workers` CTAs to finish about as early as by work alone. Of tiles that need no row from
    /// [`arrival`](super::TileScheduleConfig::arrival) on, and of the others, there are at most `most` groups each, the last of
    /// which may be several. No tile moves where one group would
    /// have most of the work, nor where most tiles of a stretch are about as long as its longest.
    ///
    /// For a schedule by [`TileOrder::Work`](super::TileOrder::Work), each of whose tiles is handed out for `heads` heads.
    ///
    /// # Panics
    /// When `workers` or `most` is 0.
    pub fn gather(&mut self, heads: usize, workers: usize, most: usize) -> Vec<u32> {
        let part = Part {
            stretches: stretches_of_rows(self),
            block: self.config.block as u64,
            heads,
            workers,
            most,
        };
        let mut tiles = std::mem::take(&mut self.tiles);
        let (ready, waiting) = tiles.split_at_mut(self.ready_tiles);
        let after = ready.len();
        let mut ends = part.order(ready);
        ends.extend(part.order(waiting).iter().map(|end| after + end));
        self.tiles = tiles;
        ends.into_iter().map(|end| end as u32).collect()
    }
}

/// What is done with the tiles that can start, and with those that wait.
struct Part {
    /// By [`Tile::number`].
    stretches: Vec<u32>,
    block: u64,
    heads: usize,
    workers: usize,
    most: usize,
}

impl Part {
    fn stretch(&self, tile: &Tile) -> u32 {
        self.stretches[tile.number as usize]
    }

    fn order(&self, tiles: &mut [Tile]) -> Vec<usize> {
        let stretches = self.stretches.iter().max().map_or(0, |&last| last as usize + 1);
        let (mut work, mut heaviest) = (vec![0_u64; stretches], vec![0_u32; stretches]);
        for tile in tiles.iter() {
            let stretch = self.stretch(tile) as usize;
            work[stretch] += u64::from(tile.blocks);
            heaviest[stretch] = heaviest[stretch].max(tile.blocks);
        }
        let all: u64 = work.iter().sum();
        // By work, too, tiles of like length of a stretch are handed out together.
        let is_alike = |tile: &&Tile| tile.blocks * 10 >= heaviest[self.stretch(tile) as usize] * 7;
        let alike: u64 = tiles.iter().filter(is_alike).map(|tile| u64::from(tile.blocks)).sum();
        if all == 0 || 4 * alike > 3 * all || work.iter().any(|&one| 2 * one > all) {
            return Vec::new();
        }
        let longest = tiles[0].blocks;
        let by_work = self.time(tiles, &[]);
        for (part, of) in LIGHT {
            let place = |tile: &Tile| {
                let stretch = self.stretch(tile);
                let is_light = tile.blocks * of <= longest * part;
                (!is_light).then_some((heaviest[stretch as usize], Reverse(stretch)))
            };
            let mut gathered = tiles.to_vec();
            // Along the rows in a group, stable otherwise: light tiles stay by work.
            gathered.sort_by_key(|tile| (Reverse(place(tile)), place(tile).map(|_| tile.number)));
            let ends = ends_of(&gathered, place, self.most);
            let is_even = match by_work {
                Some(limit) => self.time(&gathered, &ends).is_some_and(|time| time <= limit + limit / 100),
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

    /// When the last CTA has finished, groups up to `ends` being handed out head by head and the other tiles for all heads each;
    /// `None` where they are too many to try.
    fn time(&self, tiles: &[Tile], ends: &[usize]) -> Option<u64> {
        if tiles.len() * self.heads > MOST_ITEMS {
            return None;
        }
        let cost = |tile: &Tile| u64::from(tile.blocks) * self.block + TILE_COST;
        let (mut groups, mut begin) = (Vec::new(), 0);
        for &end in ends {
            groups.push(&tiles[begin..end]);
            begin = end;
        }
        let of_groups = groups.into_iter().flat_map(|group| {
            (0..self.heads).flat_map(move |_| group.iter().map(move |tile| (cost(tile), 1)))
        });
        let others = tiles[begin..].iter().map(|tile| (cost(tile), self.heads));
        Some(list_time(of_groups.chain(others), self.workers))
    }
}

/// Where groups of one place end, at most `most`, the last one of which takes the rest of those that have one.
fn ends_of<P: PartialEq>(tiles: &[Tile], place: impl Fn(&Tile) -> Option<P>, most: usize) -> Vec<usize> {
    let grouped = tiles.partition_point(|tile| place(tile).is_some());
    let mut ends: Vec<_> =
        (1..grouped).filter(|&index| place(&tiles[index]) != place(&tiles[index - 1])).collect();
    ends.truncate(most - 1);
    if grouped > 0 {
        ends.push(grouped);
    }
    ends
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Mask;

    use super::*;
    use crate::{TileDirection, TileScheduleConfig};

    fn schedule(text: &str, arrival: Option<usize>) -> TileSchedule {
        let mask: Mask = text.parse().unwrap();
        let bands: Vec<_> = mask.bands().collect();
        let config =
            TileScheduleConfig { arrival, ..TileScheduleConfig::new(TileDirection::Backward, 128, 64) };
        TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config).unwrap()
    }

    fn time(schedule: &TileSchedule, ends: &[usize], heads: usize, workers: usize) -> u64 {
        Part { stretches: Vec::new(), block: 64, heads, workers, most: 1 }
            .time(&schedule.tiles, ends)
            .unwrap()
    }

    #[test]
    fn documents_come_one_after_another_and_light_tiles_last() {
        let text =
            "varlen-causal:lengths=102,1003,419,356,130,895,108,1718,1139,2048,81,87,27,43,24,5,1,3,2,1";
        for (heads, workers, most) in [(8, 132, 10), (16, 132, 3), (1, 8, 10), (3, 8, 1)] {
            let by_work = schedule(text, None);
            let mut gathered = by_work.clone();
            let ends: Vec<_> =
                gathered.gather(heads, workers, most).iter().map(|&end| end as usize).collect();
            assert!(!ends.is_empty() && ends.len() <= most && ends.is_sorted(), "{ends:?}");
            let mut sorted = gathered.tiles.clone();
            sorted.sort_by_key(|tile| Reverse(tile.blocks));
            assert!(sorted.iter().zip(&by_work.tiles).all(|(a, b)| a.blocks == b.blocks));
            let numbers: std::collections::BTreeSet<_> = sorted.iter().map(|tile| tile.number).collect();
            assert_eq!(numbers.len(), sorted.len());

            let stretches = stretches_of_rows(&gathered);
            let stretch = |tile: &Tile| stretches[tile.number as usize];
            let mut begin = 0;
            for &end in &ends[..ends.len() - 1] {
                let group = &gathered.tiles[begin..end];
                assert!(group.iter().all(|tile| stretch(tile) == stretch(&group[0])));
                assert!(group.is_sorted_by_key(|tile| tile.number));
                assert!(gathered.tiles[end].blocks <= group[0].blocks);
                begin = end;
            }
            let light = &gathered.tiles[ends[ends.len() - 1]..];
            assert!(light.is_sorted_by_key(|tile| Reverse(tile.blocks)));
            assert!(light.iter().all(|tile| 2 * tile.blocks <= gathered.tiles[0].blocks));
            let (after, before) =
                (time(&gathered, &ends, heads, workers), time(&by_work, &[], heads, workers));
            assert!(after <= before + before / 100, "{after} beside {before}");
        }
    }

    #[test]
    fn what_is_one_stretch_stays_by_work() {
        for text in [
            "varlen-full:lengths=640,896,768,640,700",
            "causal:4096",
            "sliding-window:3000,left=500,right=3",
            "varlen-causal:lengths=3000,500,200",
            "full:90",
        ] {
            let by_work = schedule(text, None);
            let mut gathered = by_work.clone();
            assert!(gathered.gather(8, 132, 10).is_empty(), "{text}");
            assert_eq!(gathered, by_work, "{text}");
        }
    }

    #[test]
    fn tiles_that_wait_stay_behind_those_that_do_not() {
        let mut gathered = schedule("varlen-causal:lengths=896,640,768,640,768,896,640", Some(2304));
        let ready = gathered.ready_tiles();
        let ends = gathered.gather(16, 4, 5);
        assert!(gathered.tiles[..ready].iter().all(|tile| tile.end <= 2304));
        assert!(gathered.tiles[ready..].iter().all(|tile| tile.start >= 2304));
        let groups =
            |end: fn(usize, usize) -> bool| ends.iter().filter(|&&one| end(one as usize, ready)).count();
        assert_eq!((groups(|end, ready| end <= ready), groups(|end, ready| end > ready)), (3, 4), "{ends:?}");
    }

    #[test]
    fn many_tiles_are_gathered_without_trying() {
        let lengths = vec!["1500"; 200].join(",");
        let mut gathered = schedule(&format!("varlen-causal:lengths={lengths}"), None);
        assert!(gathered.tiles.len() * 8 > MOST_ITEMS);
        let ends = gathered.gather(8, 132, 10);
        assert_eq!(ends.len(), 10);
        assert_eq!(ends[..9], std::array::from_fn::<u32, 9, _>(|group| 9 * (group as u32 + 1)));
    }
}
