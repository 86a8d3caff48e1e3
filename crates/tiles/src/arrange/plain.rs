//! The same search by definition: every order, every way to halve it, and every item given to whoever is free first.

use std::cmp::Reverse;

use counterpoint_mask::Range;

use super::super::chains::row_segments;
use super::super::ctas::{TileCtas, ends_of, ends_of_alike};
use super::super::list_time::list_time;
use super::super::{TILE_COST, Tile, TileSchedule};
use super::orders::{ALIKE, LIGHT};
use super::trials::UNEVEN;
use super::{ARRIVAL, HALF_COST, HALVED, LATE, MANY_ITEMS, Order, READING, TRIALS};

pub(super) struct Plain<'a> {
    schedule: &'a TileSchedule,
    by_work: Vec<Tile>,
    ctas: TileCtas,
    segments: Vec<u32>,
}

impl<'a> Plain<'a> {
    pub(super) fn new(schedule: &'a TileSchedule, by_work: &[Tile], ctas: TileCtas) -> Self {
        Self { schedule, by_work: by_work.to_vec(), ctas, segments: row_segments(schedule) }
    }

    pub(super) fn arrange(&self, most: usize) -> Order {
        let TileCtas { workers, heads, half_heads, .. } = self.ctas;
        let are_many = self.by_work.len() * heads > MANY_ITEMS * workers;
        let ways = if half_heads && !are_many { HALVED.len() } else { 1 };
        let orders = self.orders(most).into_iter();
        let halved = orders.flat_map(|order| {
            HALVED
                .into_iter()
                .take(ways)
                .map(move |halved| Order { halved: halved.min(order.ends.len()), ..order.clone() })
        });
        // The first of several.
        halved
            .min_by_key(|order| (self.time(order, if are_many { 1 } else { TRIALS }), self.reading(order)))
            .unwrap()
    }

    fn orders(&self, most: usize) -> Vec<Order> {
        let has_waiting = self.by_work.iter().any(|tile| self.schedule.waits(tile));
        let mut orders = Vec::new();
        for first in [0, self.ctas.workers.div_ceil(self.ctas.heads).min(self.by_work.len())] {
            for light in LIGHT {
                let (tiles, groups) = self.gather(first, light, most / 2);
                let begin = groups.last().copied().unwrap_or(0);
                for alike in ALIKE {
                    let others = ends_of_alike(&tiles[begin..], alike, most - 1 - groups.len());
                    let ends: Vec<usize> =
                        groups.iter().copied().chain(others.map(|end| begin + end)).collect();
                    if has_waiting {
                        let (tiles, ends) = self.ctas.delay(&tiles, &ends, |tile| self.schedule.waits(tile));
                        orders.push(Order { tiles, ends, halved: 0 });
                    }
                    orders.push(Order { tiles: tiles.clone(), ends, halved: 0 });
                }
            }
        }
        orders
    }

    fn gather(&self, first: usize, light: (u32, u32), most: usize) -> (Vec<Tile>, Vec<usize>) {
        let mut tiles = self.by_work.clone();
        let segment = |tile: &Tile| self.segments[tile.number as usize];
        let heaviest = |tile: &Tile| {
            let others = self.by_work[first..].iter().filter(|other| segment(other) == segment(tile));
            others.map(|other| other.blocks).max()
        };
        let place = |tile: &Tile| {
            let is_light = tile.blocks * light.1 <= self.by_work[0].blocks * light.0;
            (!is_light).then(|| (heaviest(tile), Reverse(segment(tile))))
        };
        tiles[first..].sort_by_cached_key(|tile| (Reverse(place(tile)), place(tile).map(|_| tile.number)));
        let mut ends: Vec<usize> = (first > 0).then_some(first).into_iter().collect();
        let groups = ends_of(&tiles[first..], place, (most - ends.len()).max(1));
        ends.extend(groups.into_iter().map(|end| first + end));
        (tiles, ends)
    }

    fn classes(order: &Order) -> impl Iterator<Item = &[Tile]> {
        let begins = std::iter::once(0).chain(order.ends.iter().copied());
        begins.zip(&order.ends).map(|(begin, &end)| &order.tiles[begin..end])
    }

    pub(super) fn rows_of(&self, class: &[Tile]) -> u64 {
        let runs = class.iter().flat_map(|tile| self.schedule.runs_of(tile));
        let rows = Range::merged(runs.map(|run| Range::new(run.start as usize, run.end as usize)).collect());
        rows.iter().map(|range| range.len() as u64).sum()
    }

    pub(super) fn reading(&self, order: &Order) -> u64 {
        let TileCtas { workers, heads, head_passes, .. } = self.ctas;
        let rows: u64 = Self::classes(order).map(|class| self.rows_of(class)).sum();
        rows * (heads * head_passes) as u64 * READING.0 / READING.1 / workers as u64
    }

    fn cost(&self, tile: &Tile) -> u64 {
        let of_run = |run| {
            let config = self.schedule.config();
            let is_whole = self.schedule.bounds_of(run).is_empty();
            let seeing = if is_whole { (tile.end - tile.start) as usize } else { 0 };
            ((run.end - run.start) as usize).div_ceil(config.block) as u64 * config.block_cost(seeing)
        };
        let columns: u64 = self.schedule.runs_of(tile).iter().map(of_run).sum();
        columns * self.ctas.head_passes as u64 + TILE_COST
    }

    pub(super) fn time(&self, order: &Order, trials: usize) -> u64 {
        let TileCtas { workers, heads, head_passes, .. } = self.ctas;
        let mut items = Vec::new();
        for (at, class) in Self::classes(order).enumerate() {
            let blocks: u64 = class.iter().map(|tile| u64::from(tile.blocks)).sum();
            let reading = self.rows_of(class) * head_passes as u64 * READING.0 / READING.1;
            let is_halved = at < order.halved;
            for _ in 0..heads * if is_halved { 2 } else { 1 } {
                items.extend(class.iter().map(|tile| {
                    let whole = self.cost(tile) + reading * u64::from(tile.blocks) / blocks.max(1);
                    let half = (whole - TILE_COST) / 2 + TILE_COST + HALF_COST;
                    (if is_halved { half } else { whole }, self.schedule.waits(tile))
                }));
            }
        }
        let arriving = self.schedule.k_rows - self.schedule.config().arrival.unwrap_or(self.schedule.k_rows);
        let arrival = arriving as u64 * ARRIVAL.0 / ARRIVAL.1;
        let trial = |trial: usize| {
            let mut draw = trial as u32;
            let items = items.iter().enumerate().map(|(at, &(cost, waits))| {
                draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let cost = cost - cost / UNEVEN + cost * u64::from(draw >> 16) / (UNEVEN << 15);
                (cost + if at < workers && waits { arrival } else { 0 }, 1)
            });
            list_time(items, workers)
        };
        let last = (1..=trials).map(trial).sum::<u64>() / trials as u64;
        let even = items.iter().map(|item| item.0).sum::<u64>() / workers as u64;
        even + last.saturating_sub(even) / LATE
    }
}
