//! what a schedule must cover: the pairs of the mask, one by one.

use std::collections::BTreeMap;

use counterpoint_mask::{Mask, Range};
use counterpoint_tiles::*;

/// Rows of the owned axis, and of the inner one.
fn axes(mask: &Mask, direction: TileDirection) -> (usize, usize) {
    match direction {
        TileDirection::Forward => (mask.seqlen_q(), mask.seqlen_k()),
        TileDirection::Backward => (mask.seqlen_k(), mask.seqlen_q()),
    }
}

/// The mask, as `picture[owned][inner]`.
fn picture(mask: &Mask, direction: TileDirection) -> Vec<Vec<bool>> {
    let (own, other) = axes(mask, direction);
    let dense = mask.rasterise();
    let sees = |row: usize, column: usize| match direction {
        TileDirection::Forward => dense[row * mask.seqlen_k() + column],
        TileDirection::Backward => dense[column * mask.seqlen_k() + row],
    };
    (0..own).map(|row| (0..other).map(|column| sees(row, column)).collect()).collect()
}

fn holds(bound: &TileBound, direction: TileDirection, row: i32, column: i32) -> bool {
    let (q, k) = match direction {
        TileDirection::Forward => (row, column),
        TileDirection::Backward => (column, row),
    };
    (bound.q_start..bound.q_end).contains(&q)
        && (bound.k_start..bound.k_end).contains(&k)
        && (bound.diag_min..=bound.diag_max).contains(&(k - q))
}

/// The blocks of a run.
pub(crate) fn blocks(run: &TileRun, block: usize) -> impl Iterator<Item = std::ops::Range<i32>> {
    let end = run.end;
    (run.start..end).step_by(block).map(move |start| start..end.min(start + block as i32))
}

/// What a kernel that follows the schedule adds up: every pair's number of times. On the way, everything that kernels
/// rely on.
fn covered(schedule: &TileSchedule, picture: &[Vec<bool>]) -> Vec<Vec<u8>> {
    let config = schedule.config();
    let (direction, block) = (config.direction, config.block);
    let mut count: Vec<Vec<u8>> = picture.iter().map(|row| vec![0; row.len()]).collect();
    for tile in schedule.tiles() {
        assert!(tile.start < tile.end && (tile.end - tile.start) as usize <= config.tile_rows, "{tile:?}");
        let runs = schedule.runs_of(tile);
        assert!(runs.windows(2).all(|pair| pair[0].end <= pair[1].start), "{runs:?}");
        let all: usize = runs.iter().map(|run| blocks(run, block).count()).sum();
        assert_eq!(all, tile.blocks as usize, "{tile:?} {runs:?}");
        let mut last_block = i32::MIN;
        for run in runs {
            assert!(run.start < run.end && run.end as usize <= picture[0].len(), "{run:?}");
            let bounds = schedule.bounds_of(run);
            for bound in bounds {
                let (q, k) = (bound.q_start..bound.q_end, bound.k_start..bound.k_end);
                let (rows, columns) = if direction == TileDirection::Forward { (q, k) } else { (k, q) };
                assert!(
                    !rows.is_empty() && tile.start <= rows.start && rows.end <= tile.end,
                    "{bound:?} {tile:?}"
                );
                assert!(
                    !columns.is_empty() && run.start <= columns.start && columns.end <= run.end,
                    "{bound:?} {run:?}"
                );
                assert!(
                    -NO_LIMIT <= bound.diag_min && bound.diag_max <= NO_LIMIT && bound.reserved == [0; 2]
                );
            }
            for columns in blocks(run, block) {
                let arrival =
                    config.arrival.filter(|_| direction == TileDirection::Forward).map(|row| row as i32);
                assert!(
                    columns.start >= last_block.saturating_add(block as i32)
                        || arrival.is_some_and(|row| last_block < row && row <= columns.start),
                    "blocks overlap"
                );
                assert!(
                    arrival.is_none_or(|row| columns.end <= row || row <= columns.start),
                    "{columns:?} on both sides"
                );
                last_block = columns.start;
                if config.blocks == TilePlacement::Aligned {
                    assert_eq!(columns.start as usize % block, 0);
                }
                let mut seen = 0;
                for row in tile.start..tile.end {
                    for column in columns.clone() {
                        let sees = bounds.is_empty()
                            || bounds.iter().any(|bound| holds(bound, direction, row, column));
                        count[row as usize][column as usize] += u8::from(sees);
                        seen += usize::from(sees);
                    }
                }
                let pairs = (tile.end - tile.start) as usize * block;
                assert!(seen > 0, "an empty block {columns:?} in {tile:?}");
                // Bounded exactly when it must be.
                assert_eq!(bounds.is_empty(), seen == pairs, "{columns:?} in {tile:?}: {bounds:?}");
            }
        }
        // A run ends where the class or the list of bounds does.
        let list = |run: &TileRun| {
            let bounds = schedule.bounds_of(run).iter();
            bounds.map(|bound| match direction {
                TileDirection::Forward => (bound.q_start, bound.q_end, bound.diag_min, bound.diag_max),
                TileDirection::Backward => (bound.k_start, bound.k_end, bound.diag_min, bound.diag_max),
            })
        };
        for pair in runs.windows(2) {
            let contiguous =
                pair[0].end == pair[1].start && blocks(&pair[0], block).all(|rows| rows.len() == block);
            // Two different pieces may look alike, but full runs are one piece.
            let both_full = [pair[0], pair[1]].iter().all(|run| list(run).next().is_none());
            let cut = config.arrival == Some(pair[0].end as usize) && direction == TileDirection::Forward;
            assert!(cut || !(contiguous && both_full), "{pair:?}");
        }
    }
    count
}

/// Every row of the owned axis once, or once in each part of a split tile.
fn check_rows(schedule: &TileSchedule, rows: usize) {
    let mut numbers: BTreeMap<u32, Vec<&Tile>> = BTreeMap::new();
    for tile in schedule.tiles() {
        numbers.entry(tile.number).or_default().push(tile);
    }
    let (mut row, mut slots) = (0, Vec::new());
    let mut merges: BTreeMap<(i32, i32), _> =
        schedule.merges().iter().map(|merge| ((merge.start, merge.end), merge)).collect();
    for (place, (number, parts)) in numbers.iter().enumerate() {
        assert_eq!(*number as usize, place);
        assert!(parts.iter().all(|part| (part.start, part.end) == (parts[0].start, parts[0].end)));
        assert_eq!(parts[0].start, row);
        row = parts[0].end;
        match parts[..] {
            [whole] if schedule.config().partials == TilePartials::OfSplit => assert_eq!(whole.partial, -1),
            _ => {
                let merge =
                    merges.remove(&(parts[0].start, parts[0].end)).expect("a merge of every split tile");
                let mut own: Vec<i32> = parts.iter().map(|part| part.partial).collect();
                own.sort_unstable();
                assert_eq!(own, (merge.slot_begin as i32..merge.slot_end as i32).collect::<Vec<_>>());
                slots.extend(own);
            }
        }
    }
    assert_eq!(row as usize, rows);
    assert!(merges.is_empty());
    slots.sort_unstable();
    assert_eq!(slots, (0..schedule.partials() as i32).collect::<Vec<_>>());
}

fn check_order(schedule: &TileSchedule) {
    let (ready, waiting) = schedule.tiles().split_at(schedule.ready_tiles());
    let config = schedule.config();
    let arrival = config.arrival.unwrap_or(usize::MAX);
    let needs = |tile: &Tile| match config.direction {
        TileDirection::Forward => schedule.runs_of(tile).iter().any(|run| run.end as usize > arrival),
        TileDirection::Backward => tile.end as usize > arrival,
    };
    assert!(!ready.iter().any(needs) && waiting.iter().all(needs));
    if config.order == TileOrder::Chains && config.direction == TileDirection::Forward && !waiting.is_empty()
    {
        // There is no order there.
        return;
    }
    check_order_of(schedule, ready);
    check_order_of(schedule, waiting);
}

fn check_order_of(schedule: &TileSchedule, tiles: &[Tile]) {
    match schedule.config().order {
        TileOrder::Work => {
            assert!(tiles.is_sorted_by_key(|tile| (u32::MAX - tile.blocks, tile.number)));
        }
        TileOrder::Chains => {
            let chains = chains(schedule);
            // Tiles that wait for rows are waited for too.
            let weight = |tile: &Tile| {
                let waiting = schedule.tiles().iter().filter(|other| {
                    other.number >= tile.number && chains[&other.number] == chains[&tile.number]
                });
                waiting.map(|other| other.blocks).max().unwrap()
            };
            assert!(tiles.is_sorted_by_key(|tile| (u32::MAX - weight(tile), tile.number)));
        }
    }
}

/// By number, the least number of the tiles that it is joined with by rows that both read.
pub(crate) fn chains(schedule: &TileSchedule) -> BTreeMap<u32, u32> {
    let tiles = schedule.tiles();
    let mut chains: BTreeMap<u32, u32> = tiles.iter().map(|tile| (tile.number, tile.number)).collect();
    loop {
        let before = chains.clone();
        for (a, b) in tiles.iter().flat_map(|a| tiles.iter().map(move |b| (a, b))) {
            if read_a_row_in_common(schedule, a, b) {
                let least = chains[&a.number].min(chains[&b.number]);
                chains.insert(a.number, least);
                chains.insert(b.number, least);
            }
        }
        if chains == before {
            return chains;
        }
    }
}

/// The inner rows that a tile has unmasked pairs in, of each run as far as its bounds say.
fn inner_rows(schedule: &TileSchedule, tile: &Tile) -> Vec<Range> {
    let forward = schedule.config().direction == TileDirection::Forward;
    let range = |start: i32, end: i32| Range::new(start as usize, end as usize);
    let rows = schedule.runs_of(tile).iter().flat_map(|run| match schedule.bounds_of(run) {
        [] => Vec::from([range(run.start, run.end)]),
        bounds => {
            let rows = bounds.iter().map(|bound| match forward {
                true => range(bound.k_start, bound.k_end),
                false => range(bound.q_start, bound.q_end),
            });
            rows.collect()
        }
    });
    rows.collect()
}

fn read_a_row_in_common(schedule: &TileSchedule, a: &Tile, b: &Tile) -> bool {
    let (a, b) = (inner_rows(schedule, a), inner_rows(schedule, b));
    a.iter().any(|a| b.iter().any(|b| a.overlaps(b)))
}

/// All that must hold for any schedule of `mask`.
pub(crate) fn check(mask: &Mask, config: &TileScheduleConfig, schedule: &TileSchedule) {
    let picture = picture(mask, config.direction);
    for (row, (count, sees)) in covered(schedule, &picture).iter().zip(&picture).enumerate() {
        assert!(count.iter().zip(sees).all(|(&count, &sees)| count == u8::from(sees)), "row {row}");
    }
    check_rows(schedule, axes(mask, config.direction).0);
    check_order(schedule);
    let statistics = schedule.statistics();
    let bounded = schedule.runs().iter().filter(|run| !schedule.bounds_of(run).is_empty());
    let bounded = bounded.map(|run| blocks(run, config.block).count() as u64).sum::<u64>();
    assert_eq!(statistics.bounded_blocks, bounded);
    assert_eq!(statistics.blocks, schedule.tiles().iter().map(|tile| u64::from(tile.blocks)).sum::<u64>());
    assert_eq!(statistics.area, mask.area());
    assert!(0.0 < statistics.efficiency && statistics.efficiency <= 1.0);
}
