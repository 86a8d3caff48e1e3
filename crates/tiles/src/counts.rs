//! Figures of a tile schedule, counted without writing it out.

use std::cell::Cell;

use counterpoint_mask::{Band, Range};

use super::apart::{BandsApart, TileApart};
use super::fit::FitLists;
use super::interruption::Interruption;
use super::run_builder::{RunBuilder, RunSink};
use super::sweep::Sweep;
use super::{
    TileDirection, TilePlacement, TileScheduleConfig, TileScheduleError, check_rows, turned, turned_merged,
};

/// A mask for which tiles of several sizes are counted: what costs are predicted by, without writing schedules out.
pub struct TileCounting {
    direction: TileDirection,
    /// Owned rows, inner columns.
    bands: Vec<Band>,
    own_rows: usize,
}

/// Figures of the [`TileSchedule`](super::TileSchedule) of [`TileScheduleConfig::new`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TileCounts {
    /// All tiles.
    pub tiles: usize,
    /// Blocks of the tile that has most.
    pub longest_tile: usize,
    /// Blocks of all tiles together.
    pub blocks: u64,
    /// Those of them that bounds are tested for.
    pub bounded_blocks: u64,
    /// By rows, tiles that are alike and follow each other.
    pub alike: Vec<AlikeTiles>,
}

/// Tiles that loop over as many blocks from the same column on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlikeTiles {
    /// How many of them there are.
    pub count: usize,
    /// Blocks of each.
    pub blocks: usize,
    /// Where the first block begins, if there is one.
    pub begin: Option<i32>,
}

/// Counts the runs of one tile.
struct CountedRuns {
    block: usize,
    bounded_blocks: u64,
    /// Where the first run begins.
    begin: Option<i32>,
}

impl RunSink for CountedRuns {
    fn whole(&mut self, columns: &Range) {
        self.begin.get_or_insert(columns.start as i32);
    }

    fn bounded<'a>(&mut self, columns: &Range, _: impl Iterator<Item = &'a Band>) {
        self.begin.get_or_insert(columns.start as i32);
        self.bounded_blocks += columns.len().div_ceil(self.block) as u64;
    }
}

impl TileCounting {
    /// As of [`TileSchedule::new`](super::TileSchedule::new).
    pub fn new(
        bands: &[Band],
        q_rows: usize,
        k_rows: usize,
        direction: TileDirection,
    ) -> Result<Self, TileScheduleError> {
        check_rows(bands, q_rows, k_rows)?;
        Ok(Self { direction, bands: turned(bands, direction), own_rows: direction.own_rows(q_rows, k_rows) })
    }

    /// The same of a forward and of a backward.
    pub fn both(bands: &[Band], q_rows: usize, k_rows: usize) -> Result<[Self; 2], TileScheduleError> {
        check_rows(bands, q_rows, k_rows)?;
        let merged = Band::merged(bands.to_vec());
        let turned = |merged, direction: TileDirection| {
            let own_rows = direction.own_rows(q_rows, k_rows);
            Self { direction, bands: turned_merged(merged, direction), own_rows }
        };
        Ok([turned(merged.clone(), TileDirection::Forward), turned(merged, TileDirection::Backward)])
    }

    /// Of which pass.
    pub fn direction(&self) -> TileDirection {
        self.direction
    }

    /// With tiles of `tile_rows` rows that loop over blocks of `block` columns.
    pub fn counts(&self, tile_rows: usize, block: usize) -> Result<TileCounts, TileScheduleError> {
        self.counts_until(tile_rows, block, Interruption::default())
    }

    /// The same, unless it is interrupted: it looks whether it is at every tile.
    pub fn counts_until(
        &self,
        tile_rows: usize,
        block: usize,
        interruption: Interruption<'_>,
    ) -> Result<TileCounts, TileScheduleError> {
        let config = TileScheduleConfig::new(self.direction, tile_rows, block);
        config.validate()?;
        let most = self.own_rows.div_ceil(tile_rows) + self.bands.len();
        let mut counts = TileCounts { alike: Vec::with_capacity(most), ..TileCounts::default() };
        let mut lists = Lists::lent();
        let Lists { fit, builder, active } = &mut *lists;
        fit.fit(&self.bands, self.own_rows, &config);
        builder.sink = CountedRuns { block, bounded_blocks: 0, begin: None };
        builder.reset(block, config.blocks);
        let mut sweep = Sweep::with(&self.bands, std::mem::take(active));
        let mut bands = BandsApart::new(block);
        let segments = &mut fit.segments;
        // Full tiles go on into what follows.
        segments.dedup_by(|next, segment| {
            let is_full = segment.len().is_multiple_of(tile_rows);
            if is_full {
                segment.end = next.end;
            }
            is_full
        });
        for segment in segments.iter() {
            let mut start = segment.start;
            while start < segment.end {
                if interruption.has_come() {
                    return Err(TileScheduleError::Interrupted);
                }
                let rows = Range::new(start, (start + tile_rows).min(segment.end));
                if bands.take(sweep.touching(&rows), &rows) {
                    let alone_to = sweep.alone_to(bands.rows_end()).min(segment.end);
                    let before = start;
                    while start + tile_rows <= alone_to
                        && !interruption.has_come()
                        && let Some(tile) = bands.tile(&Range::new(start, start + tile_rows))
                    {
                        let TileApart { blocks, bounded_blocks, begin } = tile;
                        counts.add(AlikeTiles { count: 1, blocks, begin }, bounded_blocks);
                        start += tile_rows;
                    }
                    if start > before {
                        continue;
                    }
                }
                (builder.sink.bounded_blocks, builder.sink.begin) = (0, None);
                let blocks = builder.tile(&rows, sweep.touched());
                let CountedRuns { bounded_blocks: bounded, begin, .. } = builder.sink;
                let alike_to = sweep.alike_to(&rows).min(segment.end);
                let more = match alike_to == segment.end {
                    true => (alike_to - rows.end).div_ceil(tile_rows),
                    false => (alike_to - rows.end) / tile_rows,
                };
                start = (rows.end + more * tile_rows).min(segment.end);
                counts.add(AlikeTiles { count: 1 + more, blocks, begin }, bounded);
            }
        }
        *active = sweep.into_list();
        lists.give_back();
        Ok(counts)
    }
}

/// The lists of a count. A plan counts hundreds of times, most of them a few tiles: the lists of one serve the next.
struct Lists {
    fit: FitLists,
    builder: RunBuilder<CountedRuns>,
    active: Vec<Band>,
}

impl Lists {
    /// Lists of more bytes are not kept.
    const MOST_KEPT: usize = 1 << 20;

    /// Those of this thread's last count.
    fn lent() -> Box<Self> {
        LISTS.take().unwrap_or_else(|| {
            let sink = CountedRuns { block: 1, bounded_blocks: 0, begin: None };
            let builder = RunBuilder::new(sink, 1, TilePlacement::Tight, None);
            Box::new(Self { fit: FitLists::default(), builder, active: Vec::new() })
        })
    }

    fn give_back(self: Box<Self>) {
        let active = self.active.capacity() * size_of::<Band>();
        if self.fit.bytes() + self.builder.bytes() + active <= Self::MOST_KEPT {
            LISTS.set(Some(self));
        }
    }
}

thread_local! {
    static LISTS: Cell<Option<Box<Lists>>> = const { Cell::new(None) };
}

impl TileCounts {
    /// Adds `tiles`, each with so many bounded blocks.
    fn add(&mut self, tiles: AlikeTiles, bounded: u64) {
        let AlikeTiles { count, blocks, .. } = tiles;
        self.tiles += count;
        self.longest_tile = self.longest_tile.max(blocks);
        self.blocks += (count * blocks) as u64;
        self.bounded_blocks += count as u64 * bounded;
        self.alike.push(tiles);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;
    use crate::TileSchedule;

    /// Within one pass over the tiles of a rank, in the way that most tiles are counted and in the other.
    #[test]
    fn a_count_is_interrupted_where_it_is() {
        const DOCUMENTS: usize = 400_000;
        let document = |at: usize, rows: usize, columns: usize| Band {
            q_range: Range::new(at * rows, (at + 1) * rows),
            k_range: Range::new(at * columns, (at + 1) * columns),
            diag_min: Band::NO_MIN,
            diag_max: (at * columns) as i64 - (at * rows) as i64,
        };
        for (rows, columns, tile_rows) in [(5, 5, 128), (64, 64, 16)] {
            let bands: Vec<Band> =
                (0..DOCUMENTS).filter_map(|at| document(at, rows, columns).trim()).collect();
            let (q_rows, k_rows) = (DOCUMENTS * rows, DOCUMENTS * columns);
            let counting = TileCounting::new(&bands, q_rows, k_rows, TileDirection::Forward).unwrap();
            let whole = counting.counts(tile_rows, 64).unwrap();
            assert!(whole.tiles > 10_000, "{}", whole.tiles);
            let flag = AtomicBool::new(false);
            assert_eq!(counting.counts_until(tile_rows, 64, Interruption::by(&flag)), Ok(whole));
            thread::scope(|scope| {
                let counting = scope.spawn(|| {
                    let mut passes = 0;
                    while counting.counts_until(tile_rows, 64, Interruption::by(&flag)).is_ok() {
                        passes += 1;
                    }
                    passes
                });
                flag.store(true, Ordering::Relaxed);
                let began = Instant::now();
                counting.join().unwrap();
                assert!(began.elapsed() < Duration::from_secs(5));
            });
            let interrupted = counting.counts_until(tile_rows, 64, Interruption::by(&flag));
            assert_eq!(interrupted, Err(TileScheduleError::Interrupted));
        }
    }

    proptest! {
        /// What is counted is what a schedule that is written out has.
        #[test]
        fn counts_are_those_of_the_schedule(
            drawn in prop::collection::vec((1..90_usize, 0..4_usize, 0..400_usize, 1..300_usize, -100..300_i64, 0..400_i64, 0..6_u8), 0..24),
            tile_rows in prop_oneof![Just(16), Just(128), 1..40_usize],
            block in prop_oneof![Just(64), Just(176), 1..70_usize],
        ) {
            let mut row = 0;
            let mut bands = Vec::new();
            for (rows, gap, start, columns, min, width, limits) in drawn {
                // Several bands next to each other in the same rows, most of them rectangles.
                row += if gap == 3 { 200 } else { gap };
                let q_range = Range::new(row, row + rows);
                let limited = if limits == 0 { (min, min + width) } else { (Band::NO_MIN, Band::NO_MAX) };
                let [first, second] = [0, 700].map(|column| {
                    let k_range = Range::new(start + column, start + column + columns);
                    Band { q_range, k_range, diag_min: limited.0 + column as i64, diag_max: limited.1 }
                });
                bands.extend(first.trim());
                if limits == 1 || limits == 0 {
                    bands.extend(Band { diag_min: Band::NO_MIN, diag_max: Band::NO_MAX, ..second }.trim());
                }
                row += rows;
            }
            let (q_rows, k_rows) = (row + 50, 1500);
            for direction in [TileDirection::Forward, TileDirection::Backward] {
                let config = TileScheduleConfig::new(direction, tile_rows, block);
                let schedule = TileSchedule::new(&bands, q_rows, k_rows, &config).unwrap();
                let counting = TileCounting::new(&bands, q_rows, k_rows, direction).unwrap();
                let counts = counting.counts(tile_rows, block).unwrap();
                let figures = schedule.statistics();
                prop_assert_eq!(counts.tiles, figures.tiles);
                prop_assert_eq!(counts.longest_tile, figures.longest_tile);
                prop_assert_eq!(counts.blocks, figures.blocks);
                prop_assert_eq!(counts.bounded_blocks, figures.bounded_blocks);
                let mut tiles = schedule.tiles().to_vec();
                tiles.sort_unstable_by_key(|tile| tile.number);
                let wanted: Vec<(usize, Option<i32>)> = tiles
                    .iter()
                    .map(|tile| (tile.blocks as usize, schedule.runs_of(tile).first().map(|run| run.start)))
                    .collect();
                let counted: Vec<(usize, Option<i32>)> = counts
                    .alike
                    .iter()
                    .flat_map(|alike| std::iter::repeat_n((alike.blocks, alike.begin), alike.count))
                    .collect();
                prop_assert_eq!(counted, wanted);
            }
        }
    }
}
