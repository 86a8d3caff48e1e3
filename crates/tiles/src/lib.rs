//! What each CTA of a kernel does: of attention, the mask cut into tiles of rows and blocks of columns; of products, [`gemm`].
//!
//! Knows masks and nothing else. What it costs to compute a tile is counted in columns of a block, never in seconds.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod apart;
mod arrange;
mod chains;
mod classes;
mod config;
mod counts;
mod coverage;
mod ctas;
mod dq_order;
mod error;
mod fit;
pub mod gemm;
mod head_groups;
mod interruption;
mod lanes;
mod layout;
mod list_time;
mod nearly_sorted;
mod paths;
mod pod_bytes;
mod row_reads;
mod run_builder;
mod split;
mod statistics;
mod stops;
mod strips;
mod sweep;

pub use classes::TileClasses;
pub use config::{TileDirection, TileOrder, TilePartials, TilePlacement, TileScheduleConfig, TileSplit};
pub use counts::{AlikeTiles, TileCounting, TileCounts};
pub use ctas::TileCtas;
pub use dq_order::{DqOrder, DqOrderSpan};
pub use error::TileScheduleError;
pub use head_groups::HeadGroups;
pub use interruption::Interruption;
pub use layout::{NO_LIMIT, Tile, TileBound, TileMerge, TileRun};
pub use statistics::TileStatistics;

use counterpoint_mask::{Band, Range};
use serde::{Deserialize, Serialize};

use chains::Chains;
use run_builder::{RunBuilder, WrittenRuns};
use split::{Cut, Parts};
use sweep::Sweep;

/// Most query or key rows of a schedule: sums of a row and a diagonal then fit an `i32`.
pub const MAX_TILE_SCHEDULE_ROWS: usize = 1 << 29;

/// Most rows of a tile or a block.
pub const MAX_TILE_SIZE: usize = 1 << 16;

/// What a tile costs besides its blocks, in columns of a block: loading the owned rows, filling and draining the pipeline
/// and storing the results take about as long as 1.25 blocks of 128.
const TILE_COST: u64 = 160;

/// A mask as attention kernels compute it: every *tile* owns rows of one axis and lists, for the other axis, the blocks in
/// which its rows see anything, from all bands that touch it.
///
/// A kernel therefore needs no atomics in the forward, adjacent slices are one, and only blocks that an edge of the mask
/// crosses are tested for it. Size and time are proportional to the tiles and to the bounds that change along them, never to
/// tiles times blocks.
///
/// ```
/// use counterpoint_mask::Mask;
/// use counterpoint_tiles::{TileDirection, TileSchedule, TileScheduleConfig};
///
/// // Two documents, causal; tiles of 128 query rows loop over blocks of 128 keys.
/// let mask: Mask = "varlen-causal:lengths=320,1024".parse()?;
/// let bands: Vec<_> = mask.bands().collect();
/// let config = TileScheduleConfig::new(TileDirection::Forward, 128, 128);
/// let schedule = TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config)?;
///
/// // The heaviest tile first: the last rows of the long document.
/// let tile = schedule.tiles()[0];
/// assert_eq!((tile.start, tile.end, tile.blocks), (1216, 1344, 8));
/// // It sees seven blocks without exception, and the last one up to the diagonal.
/// let runs: Vec<_> = schedule.runs_of(&tile).iter().map(|run| (run.start, run.end)).collect();
/// assert_eq!(runs, [(320, 1216), (1216, 1344)]);
/// assert!(schedule.bounds_of(&schedule.runs_of(&tile)[0]).is_empty());
/// assert_eq!(schedule.bounds_of(&schedule.runs_of(&tile)[1])[0].diag_max, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TileSchedule {
    config: TileScheduleConfig,
    q_rows: usize,
    k_rows: usize,
    area: u64,
    #[serde(with = "pod_bytes")]
    tiles: Vec<Tile>,
    #[serde(with = "pod_bytes")]
    runs: Vec<TileRun>,
    #[serde(with = "pod_bytes")]
    bounds: Vec<TileBound>,
    #[serde(with = "pod_bytes")]
    merges: Vec<TileMerge>,
    partials: usize,
    ready_tiles: usize,
}

impl TileSchedule {
    /// The schedule of `bands`, which are disjoint (those of a mask, or of a stage), over `q_rows` query rows and `k_rows`
    /// key rows. It depends on nothing else; the order of the bands does not matter.
    ///
    /// # Errors
    /// A `config` without sense, more rows than [`MAX_TILE_SCHEDULE_ROWS`], a band that reaches past the rows, or a mask
    /// that is too fine for 32-bit indices.
    pub fn new(
        bands: &[Band],
        q_rows: usize,
        k_rows: usize,
        config: &TileScheduleConfig,
    ) -> Result<Self, TileScheduleError> {
        config.validate()?;
        check_rows(bands, q_rows, k_rows)?;
        let direction = config.direction;
        let turned = turned(bands, direction);
        let own_rows = direction.own_rows(q_rows, k_rows);
        let mut segments = match config.tiles {
            TilePlacement::Tight => fit::fit(&turned, own_rows, config),
            TilePlacement::Aligned => vec![Range::new(0, own_rows)],
        };
        if direction == TileDirection::Backward
            && let Some(arrival) = config.arrival
        {
            segments = cut_at(&segments, arrival);
        }
        let count = segments.iter().map(|segment| segment.len().div_ceil(config.tile_rows)).sum();
        let inner_arrival = config.arrival.filter(|_| direction == TileDirection::Forward);
        let written = WrittenRuns::new(direction, count);
        let mut builder = RunBuilder::new(written, config.block, config.blocks, inner_arrival);
        let mut sweep = Sweep::new(&turned);
        let mut tiles = Vec::with_capacity(count);
        for segment in &segments {
            let mut start = segment.start;
            while start < segment.end {
                let rows = Range::new(start, (start + config.tile_rows).min(segment.end));
                let run_begin = builder.sink.runs.len() as u32;
                let blocks = builder.tile(&rows, sweep.touching(&rows));
                tiles.push(Tile {
                    start: rows.start as i32,
                    end: rows.end as i32,
                    run_begin,
                    run_end: builder.sink.runs.len() as u32,
                    partial: -1,
                    blocks: blocks as u32,
                    number: tiles.len() as u32,
                    reserved: 0,
                });
                start = rows.end;
            }
        }
        let WrittenRuns { runs, bounds, .. } = builder.sink;
        for (what, entries) in [("runs", runs.len()), ("bounds", bounds.len())] {
            if entries > u32::MAX as usize {
                return Err(TileScheduleError::TooFine { what, entries, limit: u32::MAX as usize });
            }
        }
        let area = turned.iter().map(Band::area).sum();
        let (config, merges) = (*config, Vec::new());
        let mut schedule =
            Self { config, q_rows, k_rows, area, tiles, runs, bounds, merges, partials: 0, ready_tiles: 0 };
        let cuts = config.split.and_then(|split| split::cuts(&schedule.tiles, config.block, &split));
        match (cuts, config.partials) {
            (Some(cuts), _) => schedule.split(&cuts),
            (None, TilePartials::OfAll) => schedule.split(&vec![Cut::WHOLE; schedule.tiles.len()]),
            (None, TilePartials::OfSplit) => {}
        }
        match config.order {
            TileOrder::Work => sort_by_work(&mut schedule.tiles),
            TileOrder::Chains => Chains::of(&schedule).sort(&mut schedule.tiles),
        }
        schedule.put_ready_tiles_first();
        Ok(schedule)
    }

    fn split(&mut self, cuts: &[Cut]) {
        let TileScheduleConfig { direction, block, partials, .. } = self.config;
        let lists = (&*self.tiles, &*self.runs, &*self.bounds);
        let parts = Parts::new(lists, (block, partials), cuts, |bound, run| bound.clip(direction, run));
        (self.tiles, self.runs, self.bounds) = (parts.tiles, parts.runs, parts.bounds);
        (self.merges, self.partials) = (parts.merges, parts.slots as usize);
    }

    /// Whether a tile needs rows from [`TileScheduleConfig::arrival`] on.
    fn waits(&self, tile: &Tile) -> bool {
        let last = match self.config.direction {
            TileDirection::Forward => self.runs_of(tile).last().map_or(0, |run| run.end),
            TileDirection::Backward => tile.end,
        };
        self.config.arrival.is_some_and(|arrival| last as usize > arrival)
    }

    /// Otherwise tiles stay in their order.
    fn put_ready_tiles_first(&mut self) {
        let mut tiles = std::mem::take(&mut self.tiles);
        self.ready_tiles = tiles.iter().filter(|tile| !self.waits(tile)).count();
        if self.ready_tiles < tiles.len() {
            tiles.sort_by_key(|tile| self.waits(tile));
        }
        self.tiles = tiles;
    }

    /// How many of the first tiles need no row from [`TileScheduleConfig::arrival`] on, up to the first one that does.
    pub fn ready_tiles(&self) -> usize {
        self.ready_tiles
    }

    /// How it was made.
    pub fn config(&self) -> &TileScheduleConfig {
        &self.config
    }

    /// Query rows that it is for.
    pub fn q_rows(&self) -> usize {
        self.q_rows
    }

    /// Key rows that it is for.
    pub fn k_rows(&self) -> usize {
        self.k_rows
    }

    /// The tiles, in the order in which to hand them out. Every row of the owned axis is in exactly one of them, or in all
    /// parts of one.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// The runs of all tiles. Those of one tile are ascending and disjoint.
    pub fn runs(&self) -> &[TileRun] {
        &self.runs
    }

    /// The bounds of all runs.
    pub fn bounds(&self) -> &[TileBound] {
        &self.bounds
    }

    /// Which partial results make up the rows of each split tile.
    pub fn merges(&self) -> &[TileMerge] {
        &self.merges
    }

    /// Number of partial results, each of one part's rows.
    pub fn partials(&self) -> usize {
        self.partials
    }

    /// The runs of `tile`, one of this schedule's.
    pub fn runs_of(&self, tile: &Tile) -> &[TileRun] {
        &self.runs[tile.run_begin as usize..tile.run_end as usize]
    }

    /// The bounds of `run`, one of this schedule's; none when the run is full.
    pub fn bounds_of(&self, run: &TileRun) -> &[TileBound] {
        &self.bounds[run.bound_begin as usize..run.bound_end as usize]
    }

    /// Bytes of its lists, here and on a device.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.tiles)
            + size_of_val(&*self.runs)
            + size_of_val(&*self.bounds)
            + size_of_val(&*self.merges)
    }
}

impl TileBound {
    /// The part inside a run's rows; `None` when the bound has no pair there.
    fn clip(&self, direction: TileDirection, run: &TileRun) -> Option<TileBound> {
        let mut bound = *self;
        let (start, end) = match direction {
            TileDirection::Forward => (&mut bound.k_start, &mut bound.k_end),
            TileDirection::Backward => (&mut bound.q_start, &mut bound.q_end),
        };
        *start = (*start).max(run.start);
        *end = (*end).min(run.end);
        (*start < *end).then_some(bound)
    }
}

/// `bands` by owned rows, as few as are found.
fn turned(bands: &[Band], direction: TileDirection) -> Vec<Band> {
    turned_merged(Band::merged(bands.to_vec()), direction)
}

fn turned_merged(mut turned: Vec<Band>, direction: TileDirection) -> Vec<Band> {
    turned.iter_mut().for_each(|band| *band = direction.turn(band));
    turned.sort_unstable();
    strips::recut(turned)
}

/// The segments, one of which ends at `row`.
fn cut_at(segments: &[Range], row: usize) -> Vec<Range> {
    let sides = |segment: &Range| {
        let cut = row.clamp(segment.start, segment.end);
        [Range::new(segment.start, cut), Range::new(cut, segment.end)]
    };
    segments.iter().flat_map(sides).filter(|side| !side.is_empty()).collect()
}

fn check_rows(bands: &[Band], q_rows: usize, k_rows: usize) -> Result<(), TileScheduleError> {
    for (axis, rows) in [("query", q_rows), ("key", k_rows)] {
        if rows > MAX_TILE_SCHEDULE_ROWS {
            return Err(TileScheduleError::TooManyRows { axis, rows, limit: MAX_TILE_SCHEDULE_ROWS });
        }
    }
    for (index, band) in bands.iter().enumerate() {
        for (axis, range, rows) in [("query", band.q_range, q_rows), ("key", band.k_range, k_rows)] {
            if range.end > rows {
                return Err(TileScheduleError::PastTheRows { index, axis, range, rows });
            }
        }
    }
    Ok(())
}

/// Most blocks first, ties in the order that they are in. Counting is faster than comparing, and moving tiles in place than
/// touching new memory.
fn sort_by_work(tiles: &mut [Tile]) {
    let most = tiles.iter().map(|tile| tile.blocks as usize).max().unwrap_or(0);
    let mut next = vec![0; most + 2];
    for tile in tiles.iter() {
        next[most - tile.blocks as usize + 1] += 1;
    }
    for index in 0..=most {
        next[index + 1] += next[index];
    }
    let place = |tile: &Tile| {
        let place = &mut next[most - tile.blocks as usize];
        *place += 1;
        *place - 1
    };
    let mut places: Vec<u32> = tiles.iter().map(place).collect();
    for index in 0..tiles.len() {
        while places[index] as usize != index {
            let to = places[index] as usize;
            tiles.swap(index, to);
            places.swap(index, to);
        }
    }
}
