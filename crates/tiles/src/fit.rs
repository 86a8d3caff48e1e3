//! Where tiles begin when they may end early.

use counterpoint_mask::{Band, Range};

use super::lanes::{Lane, blocks, lanes_of};
use super::paths::{Path, Paths};
use super::stops::Stops;
use super::sweep::Sweep;
use super::{TILE_COST, TilePlacement, TileScheduleConfig};

/// Segments of rows, one after another from 0 to `rows`, each to be cut into tiles of `config.tile_rows` rows of which the last
/// may be short. `bands` are trimmed and ascending by row.
///
/// Minimises the columns of all blocks, and [`TILE_COST`] for each tile, among tilings whose tiles are full or end at a cut (see [`Stops`]).
/// A tiling is a path along the rows. Paths that end at a cut are all followed, others only as long as no path has overtaken
/// them in rows at no more cost: whoever starts later needs no more tiles for the rest, and hardly ever more blocks. Between
/// two stops a path is a row of full tiles, and where a single band covers them their blocks are summed in closed form; so
/// the time depends on the number of bands, not on that of tiles.
pub(super) fn fit(bands: &[Band], rows: usize, config: &TileScheduleConfig) -> Vec<Range> {
    let mut lists = FitLists::default();
    lists.fit(bands, rows, config);
    lists.segments
}

/// The lists of [`fit`], to be used again.
#[derive(Debug, Default)]
pub(super) struct FitLists {
    stops: Stops,
    active: Vec<Band>,
    lanes: Vec<Lane>,
    paths: Paths,
    visited: Vec<Visited>,
    /// What was found.
    pub(super) segments: Vec<Range>,
}

impl FitLists {
    /// Bytes of all lists.
    pub(super) fn bytes(&self) -> usize {
        self.stops.bytes()
            + self.paths.bytes()
            + self.visited.capacity() * size_of::<Visited>()
            + self.segments.capacity() * size_of::<Range>()
            + self.active.capacity() * size_of::<Band>()
            + self.lanes.capacity() * size_of::<Lane>()
    }

    /// Leaves what [`fit`] gives in `segments`.
    pub(super) fn fit(&mut self, bands: &[Band], rows: usize, config: &TileScheduleConfig) {
        self.stops.fill(bands, rows, config.tile_rows);
        let Self { stops, active, lanes, paths, visited, segments, .. } = self;
        let mut sweep = Sweep::with(bands, std::mem::take(active));
        fit_between(&mut sweep, stops, rows, config, (lanes, paths, visited));
        *active = sweep.into_list();
        fill_segments(visited, segments);
    }
}

/// [`fit`] between these stops and cuts; its steps are left in the list of visited rows.
// Long: one pass along the rows, each of whose steps looks at where all that is kept of it stands.
fn fit_between(
    sweep: &mut Sweep<'_>,
    Stops { stops, cuts, .. }: &Stops,
    rows: usize,
    config: &TileScheduleConfig,
    (lanes, paths, visited): (&mut Vec<Lane>, &mut Paths, &mut Vec<Visited>),
) {
    let (tile_rows, block) = (config.tile_rows, config.block as u64);
    let (mut stop, mut cut) = (0, 0);
    // Before which stop the last tile was that rectangles alone touch, and what it costs.
    let mut rectangles = (usize::MAX, 0);
    visited.clear();
    paths.start(cuts.len());
    let mut next = Some((0, Path { cost: 0, before: 0 }));
    while let Some((row, path)) = next {
        let before = visited.len() as u32;
        visited.push(Visited { row: row as u32, before: path.before });
        if row == rows {
            break;
        }
        let limit = (row + tile_rows).min(rows);
        let touching = sweep.touching(&Range::new(row, limit));
        while stops[stop] <= row {
            stop += 1;
        }
        while cuts[cut] <= row {
            cut += 1;
        }
        let is_single = paths.are_none(cut);
        // Cuts are stops, so that the next one is the first that a path may meet.
        let mut go = |end: usize, cost: u64, before: u32| match cuts[cut] == end {
            true => paths.add_to_cut(cut, Path { cost, before }),
            false => paths.add(end, Path { cost, before }),
        };
        if stops[stop] >= row + tile_rows {
            // Narrow numbers are divided faster.
            let tiles = ((stops[stop] - row) as u32 / tile_rows as u32) as usize;
            let end = row + tiles * tile_rows;
            if let Some(blocks) = Blocks::of(touching, config) {
                // Of a single path the cost is no difference.
                let cost = match is_single {
                    true => 0,
                    false => block * blocks.of_tiles(row, tile_rows, tiles) + TILE_COST * tiles as u64,
                };
                go(end, path.cost + cost, before);
                next = paths.next(cuts, cut);
                continue;
            }
            if is_single {
                // All further paths have these tiles in common, so what they cost is no difference between them.
                let steps = (1..tiles as u32).map(|tile| Visited {
                    row: (row + tile as usize * tile_rows) as u32,
                    before: before + tile - 1,
                });
                visited.extend(steps);
                go(end, path.cost, visited.len() as u32 - 1);
                next = paths.next(cuts, cut);
                continue;
            }
            if touching.iter().all(Band::is_rectangle) {
                // All tiles up to the stop see the same columns.
                if rectangles.0 != stop {
                    lanes_of(touching, row, limit, lanes);
                    rectangles = (stop, block * blocks(lanes, limit, config) + TILE_COST);
                }
                go(limit, path.cost + rectangles.1, before);
                next = paths.next(cuts, cut);
                continue;
            }
        }
        // A single path on which no tile ends early needs no cost.
        if is_single && cuts[cut] >= limit {
            go(limit, path.cost, before);
            next = paths.next(cuts, cut);
            continue;
        }
        let alone;
        let lanes = match touching {
            [band] => {
                alone = [Lane::of(band, row)];
                &alone
            }
            _ => {
                lanes_of(touching, row, limit, lanes);
                &lanes[..]
            }
        };
        let cost = |end: usize| path.cost + block * blocks(lanes, end, config) + TILE_COST;
        let mut end_cut = cut;
        // The last cut is the last row.
        while cuts[end_cut] < limit {
            paths.add_to_cut(end_cut, Path { cost: cost(cuts[end_cut]), before });
            end_cut += 1;
        }
        match cuts[end_cut] == limit {
            true => paths.add_to_cut(end_cut, Path { cost: cost(limit), before }),
            false => paths.add(limit, Path { cost: cost(limit), before }),
        }
        next = paths.next(cuts, cut);
    }
}

/// A row that the cheapest path to it has reached.
#[derive(Clone, Copy, Debug)]
struct Visited {
    row: u32,
    before: u32,
}

/// The steps on the way to the row visited last.
fn fill_segments(visited: &[Visited], segments: &mut Vec<Range>) {
    segments.clear();
    let mut step = visited.len() - 1;
    while step > 0 {
        let Visited { row: end, before } = visited[step];
        segments.push(Range::new(visited[before as usize].row as usize, end as usize));
        step = before as usize;
    }
    segments.reverse();
}

/// The number of blocks of tiles that lie inside one band's rows, or inside nobody's.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    band: Option<Band>,
    block: i64,
    placement: TilePlacement,
}

impl Blocks {
    /// `None` when several bands touch the tiles.
    fn of(bands: &[Band], config: &TileScheduleConfig) -> Option<Self> {
        let band = match bands {
            [] => None,
            [band] => Some(*band),
            _ => return None,
        };
        Some(Self { band, block: config.block as i64, placement: config.blocks })
    }

    /// All blocks of `tiles` full tiles from `row` on.
    fn of_tiles(&self, row: usize, tile_rows: usize, tiles: usize) -> u64 {
        let Some(band) = &self.band else { return 0 };
        let (row, step, tiles) = (row as i64, tile_rows as i64, tiles as i64);
        // Tile `i` sees the columns [max(k.start, row + i * step + diag_min), min(k.end, row + (i + 1) * step + diag_max)).
        let (low, high) = (row + band.diag_min, row + step + band.diag_max);
        let (start, end) = (band.k_range.start as i64, band.k_range.end as i64);
        // From these tiles on the lower and the upper diagonal, and not the rectangle, is where columns begin and end.
        let from = |distance: i64| distance.clamp(0, tiles * step).div_euclid(step).min(tiles);
        let low_from = from(start - low + step - 1);
        let high_to = from(end - high + step - 1);
        let mut cuts = [0, low_from, high_to, tiles];
        cuts.sort_unstable();
        let part = |pair: &[i64]| {
            let (first, count) = (pair[0], pair[1] - pair[0]);
            if count == 0 {
                return 0;
            }
            let low = if first < low_from { (start, 0) } else { (low + first * step, step) };
            let high = if first < high_to { (high + first * step, step) } else { (end, 0) };
            self.sum(low, high, count)
        };
        cuts.windows(2).map(part).sum()
    }

    /// The sum of the blocks of `count` ranges whose ends are `(first, step)`.
    fn sum(&self, low: (i64, i64), high: (i64, i64), count: i64) -> u64 {
        let up = self.block - 1;
        let sum = match self.placement {
            TilePlacement::Tight => {
                let (width, step) = (high.0 - low.0, high.1 - low.1);
                // A sum of shrinking widths, from the last one on, is one of growing widths.
                let least = if step < 0 { width + step * (count - 1) } else { width };
                sum_of_floors(count, self.block, step.abs(), least + up)
            }
            TilePlacement::Aligned => {
                sum_of_floors(count, self.block, high.1, high.0 + up)
                    - sum_of_floors(count, self.block, low.1, low.0)
            }
        };
        sum as u64
    }
}

/// The sum over `0 <= i < count` of `floor((step * i + first) / divisor)`, of numbers that are not negative. Euclid's
/// algorithm on `step` and `divisor`: the lattice points under a line, counted by columns, then by rows, alternating.
fn sum_of_floors(count: i64, divisor: i64, step: i64, first: i64) -> i64 {
    let (mut count, mut divisor, mut step, mut first) = (count, divisor, step, first);
    let mut sum = 0;
    loop {
        sum += (count - 1) * count / 2 * (step / divisor) + count * (first / divisor);
        (step, first) = (step % divisor, first % divisor);
        let top = step * count + first;
        if top < divisor {
            return sum;
        }
        (count, first) = (top / divisor, top % divisor);
        (divisor, step) = (step, divisor);
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask};
    use proptest::prelude::*;

    use super::super::TileDirection;
    use super::super::run_builder::first_block;
    use super::super::sweep::piece;
    use super::*;

    fn config(tile_rows: usize, block: usize, blocks: TilePlacement) -> TileScheduleConfig {
        TileScheduleConfig { blocks, ..TileScheduleConfig::new(TileDirection::Forward, tile_rows, block) }
    }

    /// The blocks of one tile, by definition.
    fn blocks_of_tile(bands: &[Band], rows: Range, config: &TileScheduleConfig) -> u64 {
        let mut columns: Vec<Range> = bands
            .iter()
            .filter(|band| band.q_range.overlaps(&rows))
            .filter_map(|band| Some(piece(band, &rows)?.k_range))
            .collect();
        columns.sort_unstable();
        let (mut blocks, mut covered) = (0, 0);
        for range in columns {
            while range.end > covered {
                covered = first_block(range.start.max(covered), config.block, config.blocks) + config.block;
                blocks += 1;
            }
        }
        blocks
    }

    /// The tiles of segments.
    fn tiles(segments: &[Range], tile_rows: usize) -> Vec<Range> {
        let tiles = |segment: &Range| {
            let end = segment.end;
            (segment.start..end)
                .step_by(tile_rows)
                .map(move |start| Range::new(start, (start + tile_rows).min(end)))
        };
        segments.iter().flat_map(tiles).collect()
    }

    fn cost(bands: &[Band], tiles: &[Range], config: &TileScheduleConfig) -> u64 {
        tiles.iter().map(|rows| config.block as u64 * blocks_of_tile(bands, *rows, config) + TILE_COST).sum()
    }

    /// The cheapest tiling of all whose tiles are full or end where they may, by trying every row.
    fn cheapest(
        bands: &[Band],
        rows: usize,
        config: &TileScheduleConfig,
        may_end: impl Fn(usize) -> bool,
    ) -> u64 {
        let mut least = vec![u64::MAX; rows + 1];
        least[0] = 0;
        for row in 0..rows {
            if least[row] == u64::MAX {
                continue;
            }
            let limit = (row + config.tile_rows).min(rows);
            let tile = Range::new(row, limit);
            let touching: Vec<Band> =
                bands.iter().filter(|band| band.q_range.overlaps(&tile)).copied().collect();
            for end in row + 1..=limit {
                if end == limit || may_end(end) {
                    least[end] =
                        least[end].min(least[row] + cost(&touching, &[Range::new(row, end)], config));
                }
            }
        }
        least[rows]
    }

    fn placement() -> impl Strategy<Value = TilePlacement> {
        prop_oneof![Just(TilePlacement::Tight), Just(TilePlacement::Aligned)]
    }

    /// Bands that may share pairs, which this module does not mind.
    fn bands(rows: usize) -> impl Strategy<Value = Vec<Band>> {
        let rows = rows as i64;
        let band = (0..rows, 1..rows, 0..rows, 1..2 * rows, -rows..rows, 0..2 * rows, 0..4_u8);
        proptest::collection::vec(band, 0..6).prop_map(move |drawn| {
            let trimmed = drawn.into_iter().filter_map(|(q, height, k, width, min, between, limits)| {
                let range = |start: i64, len: i64, end: i64| {
                    Range::new(start as usize, (start + len).min(end) as usize)
                };
                let diag_min = if limits & 1 == 0 { min } else { Band::NO_MIN };
                let diag_max = if limits & 2 == 0 { min + between } else { Band::NO_MAX };
                Band {
                    q_range: range(q, height, rows),
                    k_range: range(k, width, 3 * rows),
                    diag_min,
                    diag_max,
                }
                .trim()
            });
            let mut bands: Vec<Band> = trimmed.collect();
            bands.sort_unstable();
            bands
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn floors_are_summed(count in 0..50_i64, divisor in 1..60_i64, step in 0..200_i64, first in 0..500_i64) {
            let sum = (0..count).map(|i| (step * i + first) / divisor).sum::<i64>();
            prop_assert_eq!(sum_of_floors(count, divisor, step, first), sum);
        }

        #[test]
        fn rows_of_tiles_are_summed(bands in bands(200), tile_rows in 1..40_usize, block in 1..40_usize, blocks in placement()) {
            let config = config(tile_rows, block, blocks);
            for band in bands {
                let closed = Blocks::of(&[band], &config).expect("one band");
                let tiles = band.q_range.len() / tile_rows;
                let rows = |tile: usize| {
                    let start = band.q_range.start + tile * tile_rows;
                    Range::new(start, start + tile_rows)
                };
                let sum = (0..tiles).map(|tile| blocks_of_tile(&[band], rows(tile), &config)).sum::<u64>();
                prop_assert_eq!(closed.of_tiles(band.q_range.start, tile_rows, tiles), sum);
            }
        }

        /// Dropping overtaken paths and taking strides finds nearly what trying everything finds (exactly it in 99 of 100
        /// of these cases).
        #[test]
        fn hardly_any_tiling_is_cheaper(bands in bands(120), tile_rows in 1..40_usize, block in 1..40_usize, blocks in placement()) {
            let config = config(tile_rows, block, blocks);
            let tiles = tiles(&fit(&bands, 120, &config), tile_rows);
            prop_assert_eq!((tiles[0].start, tiles[tiles.len() - 1].end), (0, 120));
            prop_assert!(tiles.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(tiles.iter().all(|tile| (1..=tile_rows).contains(&tile.len())));
            let mut stops = Stops::default();
            stops.fill(&bands, 120, tile_rows);
            let cuts = stops.cuts;
            let found = cost(&bands, &tiles, &config);
            let least = cheapest(&bands, 120, &config, |row| cuts.binary_search(&row).is_ok());
            prop_assert!(found <= least + least / 8, "{found}, but {least} is possible");
        }
    }

    /// Documents as they come: a tiling free to end its tiles at every row is not one percent better.
    #[test]
    fn cuts_are_enough() {
        let lengths =
            [102, 1003, 419, 356, 130, 895, 108, 1718, 1139, 2048, 81, 87, 27, 43, 24, 5, 1, 3, 2, 1];
        let documents = || Documents::from_lengths(lengths).unwrap();
        for mask in [Mask::full(documents()).unwrap(), Mask::causal(documents()).unwrap()] {
            for direction in [TileDirection::Forward, TileDirection::Backward] {
                for (tile_rows, block) in [(128, 128), (128, 176), (192, 112), (128, 64), (16, 128)] {
                    let config = TileScheduleConfig::new(direction, tile_rows, block);
                    let mut bands: Vec<Band> = mask.bands().map(|band| direction.turn(&band)).collect();
                    bands.sort_unstable();
                    let segments = fit(&bands, mask.seqlen_q(), &config);
                    let found = cost(&bands, &tiles(&segments, tile_rows), &config);
                    let least = cheapest(&bands, mask.seqlen_q(), &config, |_| true);
                    assert!(
                        found <= least + least / 100,
                        "{tile_rows} x {block}, {direction:?}: {found} for {least}"
                    );
                }
            }
        }
    }
}
