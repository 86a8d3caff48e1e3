//! The orders that the search for a queue's best one looks at: how many long tiles come first, how finely the others are classed.

use std::cmp::Reverse;

use super::super::ctas::{ends_of, ends_of_alike};
use super::Arranger;

/// How light a tile may be, as a share of the heaviest's blocks, to come after those that are gathered.
pub(super) const LIGHT: [(u32, u32); 6] = [(0, 1), (1, 16), (1, 8), (1, 4), (1, 2), (1, 1)];
/// How light a tile of a class of these may be, in tenths of its heaviest's blocks.
pub(super) const ALIKE: [u32; 6] = [3, 5, 7, 8, 9, 10];

/// Makes orders to choose from, of places in the order by work with the ends of classes.
pub(super) struct TileOrders<'a> {
    arranger: &'a Arranger<'a>,
    most: usize,
    has_waiting: bool,
    orders: Vec<(Vec<u32>, Vec<usize>)>,
}

impl<'a> TileOrders<'a> {
    /// Orders of at most `most` classes.
    pub(super) fn new(arranger: &'a Arranger<'a>, most: usize) -> Self {
        let has_waiting = arranger.waits.contains(&true);
        Self { arranger, most, has_waiting, orders: Vec::new() }
    }

    pub(super) fn all(mut self) -> Vec<(Vec<u32>, Vec<usize>)> {
        let Arranger { by_work, ctas, .. } = self.arranger;
        // Long tiles first, as many as there are CTAs, let the queue end early; none, the cache serve all.
        for first in [0, ctas.workers.div_ceil(ctas.heads).min(by_work.len())] {
            let gathered = self.gathered(first);
            let mut last = None;
            for light in LIGHT {
                let begin =
                    first + by_work[first..].partition_point(|tile| !self.is_light(tile.blocks, light));
                if last.replace(begin) != Some(begin) {
                    self.add(first, &gathered, begin);
                }
            }
        }
        self.orders
    }

    fn is_light(&self, blocks: u32, (part, of): (u32, u32)) -> bool {
        let longest = self.arranger.by_work.first().map_or(0, |tile| tile.blocks);
        u64::from(blocks) * u64::from(of) <= u64::from(longest) * u64::from(part)
    }

    /// The places from `first` on, those of a segment next to one another and along its rows.
    fn gathered(&self, first: usize) -> Vec<u32> {
        let Arranger { by_work, segments, .. } = self.arranger;
        let mut heaviest = vec![0; segments.iter().max().map_or(0, |&last| last as usize + 1)];
        for (tile, &segment) in by_work.iter().zip(segments).skip(first) {
            let heaviest = &mut heaviest[segment as usize];
            *heaviest = tile.blocks.max(*heaviest);
        }
        let mut gathered: Vec<u32> = (first as u32..by_work.len() as u32).collect();
        gathered.sort_by_cached_key(|&place| {
            let segment = segments[place as usize];
            (Reverse(heaviest[segment as usize]), segment, by_work[place as usize].number)
        });
        gathered
    }

    /// Adds orders of the `first` tiles, then those that are gathered, then the light ones from place `light` on, by work.
    fn add(&mut self, first: usize, gathered: &[u32], light: usize) {
        let Arranger { by_work, segments, ctas, waits, .. } = self.arranger;
        let mut places: Vec<u32> = Vec::with_capacity(by_work.len());
        places.extend(0..first as u32);
        places.extend(gathered.iter().filter(|&&place| (place as usize) < light));
        places.extend(light as u32..by_work.len() as u32);
        let mut groups: Vec<usize> = (first > 0).then_some(first).into_iter().collect();
        let most = (self.most / 2 - groups.len()).max(1);
        let segment = |place: &u32| Some(segments[*place as usize]);
        groups.extend(ends_of(&places[first..light], segment, most).into_iter().map(|end| first + end));
        let mut added: Vec<Vec<usize>> = Vec::with_capacity(ALIKE.len());
        for alike in ALIKE {
            let mut ends = groups.clone();
            // One class more may come of tiles that wait.
            let others = ends_of_alike(&by_work[light..], alike, self.most - 1 - groups.len());
            ends.extend(others.map(|end| light + end));
            if added.contains(&ends) {
                continue;
            }
            if self.has_waiting {
                self.orders.push(ctas.delay(&places, &ends, |&place| waits[place as usize]));
            }
            self.orders.push((places.clone(), ends.clone()));
            added.push(ends);
        }
    }
}
