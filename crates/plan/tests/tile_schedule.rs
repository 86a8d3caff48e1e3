//! Tile schedules against the dense pictures of their masks.

#[allow(dead_code, reason = "the other tests of this crate use the rest")]
mod cases;

use std::collections::BTreeMap;

use cases::masks;
use counterpoint_mask::{Band, Documents, Mask, Range};
use counterpoint_plan::{
    DqTurns, HeadGroups, MAX_TILE_SCHEDULE_ROWS, NO_LIMIT, Tile, TileBound, TileDirection, TileOrder,
    TilePlacement, TileRun, TileSchedule, TileScheduleConfig, TileScheduleError, TileSplit,
};
use proptest::prelude::*;

fn configs() -> impl Strategy<Value = TileScheduleConfig> {
    let placement = || prop_oneof![Just(TilePlacement::Tight), Just(TilePlacement::Aligned)];
    let split = proptest::option::of((1..200_usize, 1..9_usize));
    let arrival = proptest::option::of(0..200_usize);
    (direction(), 1..70_usize, 1..50_usize, placement(), placement(), order(), split, arrival).prop_map(
        |(direction, tile_rows, block, tiles, blocks, order, split, arrival)| {
            let split = split.map(|(workers, heads)| TileSplit { workers, heads });
            // Sizes that are aligned to divide it.
            let unit = match (direction, tiles, blocks) {
                (TileDirection::Forward, _, TilePlacement::Aligned) => block,
                (TileDirection::Backward, TilePlacement::Aligned, _) => tile_rows,
                _ => 1,
            };
            let arrival = arrival.map(|row| row / unit * unit);
            TileScheduleConfig { direction, tile_rows, block, tiles, blocks, order, split, arrival }
        },
    )
}

fn direction() -> impl Strategy<Value = TileDirection> {
    prop_oneof![Just(TileDirection::Forward), Just(TileDirection::Backward)]
}

fn order() -> impl Strategy<Value = TileOrder> {
    prop_oneof![Just(TileOrder::Work), Just(TileOrder::Chains)]
}

fn schedule(mask: &Mask, config: &TileScheduleConfig) -> TileSchedule {
    let bands: Vec<Band> = mask.bands().collect();
    TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), config).unwrap()
}

/// Rows of the owned axis, and of the walked one.
fn axes(mask: &Mask, direction: TileDirection) -> (usize, usize) {
    match direction {
        TileDirection::Forward => (mask.seqlen_q(), mask.seqlen_k()),
        TileDirection::Backward => (mask.seqlen_k(), mask.seqlen_q()),
    }
}

/// The mask, as `picture[owned][walked]`.
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
fn blocks(run: &TileRun, block: usize) -> impl Iterator<Item = std::ops::Range<i32>> {
    let end = run.end;
    (run.start..end).step_by(block).map(move |start| start..end.min(start + block as i32))
}

/// What a kernel that follows the schedule adds up: every pair's number of times. On the way, everything that kernels
/// rely on.
fn walked(schedule: &TileSchedule, picture: &[Vec<bool>]) -> Vec<Vec<u8>> {
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
            [whole] => assert_eq!(whole.partial, -1),
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
        // Nobody takes turns there.
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
            let weight = |tile: &Tile| {
                let waiting = tiles.iter().filter(|other| {
                    other.number >= tile.number && chains[&other.number] == chains[&tile.number]
                });
                waiting.map(|other| other.blocks).max().unwrap()
            };
            assert!(tiles.is_sorted_by_key(|tile| (u32::MAX - weight(tile), tile.number)));
        }
    }
}

/// By number, the least number of the tiles that it is joined with by rows that both walk.
fn chains(schedule: &TileSchedule) -> BTreeMap<u32, u32> {
    let tiles = schedule.tiles();
    let mut chains: BTreeMap<u32, u32> = tiles.iter().map(|tile| (tile.number, tile.number)).collect();
    loop {
        let before = chains.clone();
        for (a, b) in tiles.iter().flat_map(|a| tiles.iter().map(move |b| (a, b))) {
            if walk_a_row_in_common(schedule, a, b) {
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

/// The walked rows that a tile has unmasked pairs in, of each run as far as its bounds say.
fn walked_rows(schedule: &TileSchedule, tile: &Tile) -> Vec<Range> {
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

fn walk_a_row_in_common(schedule: &TileSchedule, a: &Tile, b: &Tile) -> bool {
    let (a, b) = (walked_rows(schedule, a), walked_rows(schedule, b));
    a.iter().any(|a| b.iter().any(|b| a.overlaps(b)))
}

/// All that must hold for any schedule of `mask`.
fn check(mask: &Mask, config: &TileScheduleConfig, schedule: &TileSchedule) {
    let picture = picture(mask, config.direction);
    for (row, (count, sees)) in walked(schedule, &picture).iter().zip(&picture).enumerate() {
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

proptest! {
    // Splitting pays only where rows see thousands of columns.
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn parts_walk_every_pair_once(mask in masks(1600), config in configs(), workers in 50..2000_usize) {
        let config = TileScheduleConfig { split: Some(TileSplit { workers, heads: 1 }), ..config };
        check(&mask, &config, &schedule(&mask, &config));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_schedule_walks_every_pair_once(mask in masks(220), config in configs()) {
        check(&mask, &config, &schedule(&mask, &config));
    }

    /// The order of slices, and how they were cut by rows or columns, is nobody's business.
    #[test]
    fn a_schedule_depends_on_the_pairs_alone(mask in masks(120), config in configs(), row in 0..120_usize) {
        let mut bands: Vec<Band> = mask.bands().collect();
        let whole = TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config).unwrap();
        bands.reverse();
        prop_assert_eq!(&TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config).unwrap(), &whole);
        prop_assert_eq!(whole.clone().bytes(), whole.bytes());
        let aligned = TileScheduleConfig { tiles: TilePlacement::Aligned, split: None, ..config };
        let outline = |bands: &[Band]| {
            let schedule = TileSchedule::new(bands, mask.seqlen_q(), mask.seqlen_k(), &aligned).unwrap();
            let full = |run: &TileRun| schedule.bounds_of(run).is_empty();
            let tiles = schedule.tiles().iter();
            let walk = tiles.map(|tile| {
                let runs = schedule.runs_of(tile).iter();
                let blocks = runs.flat_map(|run| blocks(run, config.block).map(|block| (block.start, full(run))));
                (tile.start, tile.end, blocks.collect::<Vec<_>>())
            });
            walk.collect::<Vec<_>>()
        };
        let cut: Vec<Band> = bands.iter().flat_map(|band| { let (above, below) = band.cut_rows(row); [above, below] }).collect();
        let cut: Vec<Band> = cut.iter().flat_map(|band| { let (left, right) = band.cut_cols(row / 2); [left, right] }).collect();
        prop_assert_eq!(outline(&cut), outline(&bands));
    }

    /// A stage holds some of the columns, cut at multiples of a block. Aligned blocks (and, for a backward, tiles) of its
    /// schedule are those of the whole.
    #[test]
    fn aligned_blocks_do_not_depend_on_stages(
        mask in masks(300), tile_rows in 1..70_usize, block in 1..50_usize, cuts in proptest::collection::vec(1..6_usize, 1..5),
        direction in direction(),
    ) {
        // Forward: the keys that a stage holds are walked. Backward: they are owned.
        let unit = if direction == TileDirection::Forward { block } else { tile_rows };
        let config = TileScheduleConfig {
            tiles: TilePlacement::Aligned,
            blocks: TilePlacement::Aligned,
            order: TileOrder::Chains,
            ..TileScheduleConfig::new(direction, tile_rows, block)
        };
        let blocks_of = |schedule: &TileSchedule, keys_before: usize| {
            let mut found = Vec::new();
            let before = keys_before as i32;
            for tile in schedule.tiles() {
                for run in schedule.runs_of(tile) {
                    let full = schedule.bounds_of(run).is_empty();
                    found.extend(blocks(run, block).map(|block| match direction {
                        TileDirection::Forward => (tile.start, block.start + before, full),
                        TileDirection::Backward => (tile.start + before, block.start, full),
                    }));
                }
            }
            found
        };
        let mut in_stages = Vec::new();
        let mut start = 0;
        for size in cuts.iter().cycle() {
            let end = (start + size * unit).min(mask.seqlen_k());
            let keys = Range::new(start, end);
            let bands: Vec<Band> = mask
                .bands()
                .map(|band| band.clip(&band.q_range, &keys))
                .filter(|band| !band.is_empty())
                .map(|band| band.shift(0, -(start as i64)))
                .collect();
            let stage = TileSchedule::new(&bands, mask.seqlen_q(), end - start, &config).unwrap();
            in_stages.extend(blocks_of(&stage, start));
            start = end;
            if start == mask.seqlen_k() {
                break;
            }
        }
        let mut whole = blocks_of(&schedule(&mask, &config), 0);
        whole.sort_unstable();
        in_stages.sort_unstable();
        prop_assert_eq!(in_stages, whole);
    }

    #[test]
    fn key_tiles_take_turns(mask in masks(260), tile_rows in 1..70_usize, block in 1..50_usize, split in proptest::option::of(1..300_usize)) {
        let config = TileScheduleConfig {
            blocks: TilePlacement::Aligned,
            order: TileOrder::Chains,
            split: split.map(|workers| TileSplit { workers, heads: 1 }),
            ..TileScheduleConfig::new(TileDirection::Backward, tile_rows, block)
        };
        let schedule = schedule(&mask, &config);
        let turns = schedule.dq_turns().unwrap();
        let numbers = schedule.tiles().iter().map(|tile| tile.number).max().map_or(0, |last| last + 1);
        let chains = chains(&schedule);
        let count = mask.seqlen_q().div_ceil(block);
        let mut adders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        let mut counters: BTreeMap<u32, (usize, u32)> = BTreeMap::new();
        prop_assert_eq!(turns.begins().len(), count + 1);
        for number in 0..numbers {
            let parts = schedule.tiles().iter().filter(|tile| tile.number == number);
            let mut touched: Vec<usize> = parts
                .flat_map(|tile| schedule.runs_of(tile))
                .flat_map(|run| blocks(run, block).map(|rows| rows.start as usize / block))
                .collect();
            touched.sort_unstable();
            touched.dedup();
            for index in 0..count {
                let found = turns.turn(index, number);
                if touched.contains(&index) {
                    let place = (index, chains[&number]);
                    let turn = adders.entry(place).or_default();
                    let (counter, found) = found.unwrap();
                    prop_assert_eq!(found, *turn);
                    *turn += 1;
                    // A counter is one chain's, at one block.
                    prop_assert!(counter < turns.counters());
                    prop_assert_eq!(*counters.entry(counter).or_insert(place), place);
                } else {
                    prop_assert_eq!(found, None);
                }
            }
        }
        prop_assert_eq!(counters.len(), adders.len());
        let spans_touch = |turns: &DqTurns, index: usize| {
            let spans = &turns.spans()[turns.begins()[index] as usize..turns.begins()[index + 1] as usize];
            spans.windows(2).any(|pair| pair[0].end > pair[1].first || (pair[0].end == pair[1].first && pair[0].counter == pair[1].counter))
        };
        prop_assert!(!(0..turns.begins().len() - 1).any(|index| spans_touch(&turns, index)));
    }

    /// Ending tiles early must not cost anything; the search is nearly exact.
    #[test]
    fn tight_tiles_are_no_worse_than_aligned_ones(mask in masks(400), tile_rows in 1..90_usize, block in 1..60_usize, direction in direction()) {
        let tight = TileScheduleConfig::new(direction, tile_rows, block);
        let aligned = TileScheduleConfig { tiles: TilePlacement::Aligned, ..tight };
        let cost = |config: &TileScheduleConfig| {
            let statistics = schedule(&mask, config).statistics();
            block as u64 * statistics.blocks + 160 * statistics.tiles as u64
        };
        let (tight, aligned) = (cost(&tight), cost(&aligned));
        prop_assert!(tight <= aligned + aligned / 16, "{tight} {aligned}");
    }
}

#[test]
fn adjacent_slices_are_one() {
    let (rows, left, right) = (Range::new(0, 128), Range::new(0, 100), Range::new(100, 384));
    let config = TileScheduleConfig::new(TileDirection::Forward, 128, 128);
    let rectangle =
        TileSchedule::new(&[Band::full(rows, left), Band::full(rows, right)], 128, 384, &config).unwrap();
    assert_eq!(rectangle.statistics().bounded_blocks, 0);
    assert_eq!((rectangle.tiles().len(), rectangle.runs().len()), (1, 1));
    // A full slice beside a causal one: only the diagonal is bounded, by one bound.
    let causal = Band { diag_max: 256, ..Band::full(rows, Range::new(200, 384)) };
    let schedule =
        TileSchedule::new(&[Band::full(rows, Range::new(0, 200)), causal], 128, 384, &config).unwrap();
    let statistics = schedule.statistics();
    assert_eq!((statistics.blocks, statistics.bounded_blocks, schedule.bounds().len()), (3, 1, 1));
    // Rows of two documents that together see whole blocks.
    let halves = [
        Band::full(Range::new(0, 60), Range::new(0, 256)),
        Band::full(Range::new(60, 128), Range::new(128, 512)),
    ];
    let aligned = TileScheduleConfig { tiles: TilePlacement::Aligned, ..config };
    let schedule = TileSchedule::new(&halves, 128, 512, &aligned).unwrap();
    let runs: Vec<_> =
        schedule.runs().iter().map(|run| (run.start, run.end, schedule.bounds_of(run).len())).collect();
    assert_eq!(runs, [(0, 128, 1), (128, 256, 0), (256, 512, 1)]);
}

#[test]
fn few_tiles_are_split() {
    // One query that sees a million keys, 8 key heads, 132 CTAs: 16 parts a head are 128 items.
    let bands = [Band::full(Range::new(0, 1), Range::new(0, 1 << 20))];
    let split = Some(TileSplit { workers: 132, heads: 8 });
    let config = TileScheduleConfig { split, ..TileScheduleConfig::new(TileDirection::Forward, 16, 128) };
    let schedule = TileSchedule::new(&bands, 1, 1 << 20, &config).unwrap();
    assert_eq!((schedule.tiles().len(), schedule.partials(), schedule.merges().len()), (16, 16, 1));
    assert!(schedule.tiles().iter().all(|tile| tile.blocks == 512));
    // Enough tiles for everyone, or too little to share.
    for (rows, keys) in [(16 * 132, 1 << 14), (16, 7 * 128)] {
        let bands = [Band::full(Range::new(0, rows), Range::new(0, keys))];
        let schedule = TileSchedule::new(&bands, rows, keys, &config).unwrap();
        assert_eq!(schedule.partials(), 0);
        assert!(schedule.tiles().iter().all(|tile| tile.partial == -1));
    }
    // One tile in a hundred is long: only that one is split.
    let mut bands = vec![Band::full(Range::new(0, 16), Range::new(0, 1 << 18))];
    bands.extend(
        (1..100).map(|tile| Band::full(Range::new(16 * tile, 16 * (tile + 1)), Range::new(0, 128 * tile))),
    );
    let schedule = TileSchedule::new(&bands, 1600, 1 << 18, &config).unwrap();
    let split: Vec<&Tile> = schedule.tiles().iter().filter(|tile| tile.partial >= 0).collect();
    assert!(split.iter().all(|tile| (tile.start, tile.end) == (0, 16)) && split.len() == 5);
    assert_eq!(schedule.merges().len(), 1);
}

#[test]
fn an_incomplete_last_round_is_cut() {
    let split = Some(TileSplit { workers: 132, heads: 16 });
    let config = TileScheduleConfig { split, ..TileScheduleConfig::new(TileDirection::Forward, 8, 128) };
    // 64 tiles of 16 heads are 7.76 rounds of 132 CTAs.
    let mask = Mask::cross_full(8 * 64, 1 << 14).unwrap();
    let cut = schedule(&mask, &config);
    check(&mask, &config, &cut);
    let whole = schedule(&mask, &TileScheduleConfig { split: None, ..config });
    assert!((7..=8).contains(&cut.merges().len()) && cut.partials() <= 24, "{} parts", cut.partials());
    assert!(100 * cut.makespan(132, 16) < 98 * whole.makespan(132, 16));
    // 66 are eight whole ones.
    assert_eq!(schedule(&Mask::cross_full(8 * 66, 1 << 14).unwrap(), &config).partials(), 0);
}

#[test]
fn heads_go_by_groups_that_a_cache_holds() {
    let config = TileScheduleConfig::new(TileDirection::Forward, 128, 128);
    let full = schedule(&Mask::full(1 << 15).unwrap(), &config);
    assert_eq!(full.head_groups(full.tiles(), 16, 1, 16 << 15, 132), HeadGroups { tiles: 0, heads: 16 });
    // Five fit: even groups of four. Query heads stay with their key head.
    assert_eq!(full.head_groups(full.tiles(), 16, 1, 5 << 15, 132), HeadGroups { tiles: 256, heads: 4 });
    assert_eq!(full.head_groups(full.tiles(), 4, 8, 1, 132), HeadGroups { tiles: 256, heads: 8 });
    // Tiles of up to 16 blocks, whose keys fit for all heads, come last.
    let causal = schedule(&Mask::causal(1 << 15).unwrap(), &config);
    assert_eq!(causal.head_groups(causal.tiles(), 16, 1, 1 << 15, 132), HeadGroups { tiles: 240, heads: 1 });
    // A short launch must not end with the long tiles of its last group.
    let short = schedule(&Mask::causal(1 << 12).unwrap(), &config);
    let HeadGroups { heads, .. } = short.head_groups(short.tiles(), 16, 1, 1, 132);
    assert!(heads > 1);
}

#[test]
fn a_dense_causal_mask_of_four_million_rows_is_small() {
    let mask = Mask::causal(4 << 20).unwrap();
    for direction in [TileDirection::Forward, TileDirection::Backward] {
        let schedule = schedule(&mask, &TileScheduleConfig::new(direction, 128, 128));
        let statistics = schedule.statistics();
        assert_eq!(statistics.tiles, 1 << 15);
        assert_eq!(statistics.blocks, (1 << 15) * ((1 << 15) + 1) / 2);
        assert_eq!(statistics.bounded_blocks, 1 << 15);
        assert!(statistics.bytes < 4 << 20, "{} bytes", statistics.bytes);
    }
}

#[test]
fn turns_are_as_many_as_the_mask_has_edges() {
    for mask in [Mask::causal(1 << 20).unwrap(), Mask::full(1 << 20).unwrap()] {
        let config = TileScheduleConfig {
            tiles: TilePlacement::Aligned,
            blocks: TilePlacement::Aligned,
            order: TileOrder::Chains,
            ..TileScheduleConfig::new(TileDirection::Backward, 128, 64)
        };
        let turns = schedule(&mask, &config).dq_turns().unwrap();
        assert_eq!(turns.spans().len(), (1 << 20) / 64);
        // The last rows see every key.
        let last = ((1 << 20) / 64 - 1) as u32;
        assert_eq!(turns.turn(last as usize, (1 << 13) - 1), Some((last, (1 << 13) - 1)));
        assert_eq!(turns.counters(), last + 1);
    }
    // Blocks of a forward, or blocks that do not meet each other, have no order.
    let config = TileScheduleConfig::new(TileDirection::Backward, 128, 64);
    assert_eq!(schedule(&Mask::causal(1024).unwrap(), &config).dq_turns(), None);
    let forward =
        TileScheduleConfig { direction: TileDirection::Forward, blocks: TilePlacement::Aligned, ..config };
    assert_eq!(schedule(&Mask::causal(1024).unwrap(), &forward).dq_turns(), None);
}

#[test]
fn documents_take_turns_of_their_own() {
    let documents = Documents::from_lengths([100, 1000, 2000]).unwrap();
    let config = TileScheduleConfig {
        blocks: TilePlacement::Aligned,
        order: TileOrder::Chains,
        ..TileScheduleConfig::new(TileDirection::Backward, 128, 64)
    };
    let schedule = schedule(&Mask::full(documents).unwrap(), &config);
    // The longest first, its tiles in the order of their rows.
    let starts: Vec<i32> = schedule.tiles().iter().map(|tile| tile.start).collect();
    assert!(starts.iter().position(|&start| start == 0).unwrap() == starts.len() - 1, "{starts:?}");
    assert!(starts[..16].is_sorted() && starts[0] >= 1100 && starts[16..24].is_sorted(), "{starts:?}");
    // Rows 64 to 128 are of two documents, and nobody waits for the other's tiles.
    let turns = schedule.dq_turns().unwrap();
    let (first, second) = (turns.turn(1, 0).unwrap(), turns.turn(1, 1).unwrap());
    assert_eq!((first.1, second.1), (0, 0));
    assert_ne!(first.0, second.0);
    assert_eq!(turns.turn(1, 2), Some((second.0, 1)));
}

#[test]
fn documents_are_not_straddled_for_nothing() {
    // Two long documents, the first of which ends in the middle of a tile; both need as many tiles as without the other.
    let documents = Documents::from_lengths([128 * 20 + 64, 128 * 20]).unwrap();
    let mask = Mask::full(documents).unwrap();
    let config = TileScheduleConfig::new(TileDirection::Forward, 128, 128);
    let tight = schedule(&mask, &config).statistics();
    let aligned =
        schedule(&mask, &TileScheduleConfig { tiles: TilePlacement::Aligned, ..config }).statistics();
    assert_eq!((tight.tiles, tight.blocks), (41, 21 * 21 + 20 * 20));
    // As many tiles, of which one walks both documents.
    assert_eq!((aligned.tiles, aligned.blocks), (41, 20 * 21 + 41 + 20 * 20));
}

#[test]
fn workers_take_the_next_tile() {
    // Four tiles of 1 to 4 blocks, for two heads.
    let mask = Mask::causal(4 * 128).unwrap();
    let schedule = schedule(&mask, &TileScheduleConfig::new(TileDirection::Forward, 128, 128));
    assert_eq!(schedule.makespan(1, 2), 20 * 128 + 8 * 160);
    // 4 + 1, 4 + 1, 3 + 2, 3 + 2.
    assert_eq!(schedule.makespan(4, 2), 5 * 128 + 2 * 160);
    assert_eq!(schedule.makespan(100, 2), 4 * 128 + 160);
}

#[test]
fn what_no_kernel_can_do_is_said() {
    let config = TileScheduleConfig::new(TileDirection::Forward, 128, 128);
    let new =
        |bands: &[Band], q_rows, config: &TileScheduleConfig| TileSchedule::new(bands, q_rows, 10, config);
    let text = |result: Result<TileSchedule, TileScheduleError>| result.unwrap_err().to_string();
    assert_eq!(
        text(new(&[], 10, &TileScheduleConfig { tile_rows: 0, ..config })),
        "tile_rows is 0 tokens; choose 1 to 65536"
    );
    assert_eq!(
        text(new(&[], 10, &TileScheduleConfig { split: Some(TileSplit { workers: 0, heads: 1 }), ..config })),
        "split.workers is 0; give at least 1, or leave split out"
    );
    assert_eq!(
        text(new(&[Band::full(Range::new(0, 3), Range::new(8, 11))], 10, &config)),
        "band 0 is key rows [8, 11) of 10; clip it to the rows of the tensors"
    );
    assert!(text(new(&[], MAX_TILE_SCHEDULE_ROWS + 1, &config)).starts_with("536870913 query rows"));
    // No rows and no work are fine.
    assert_eq!(new(&[], 0, &config).unwrap().tiles(), []);
    let idle = new(&[], 200, &config).unwrap();
    assert_eq!(idle.tiles().len(), 2);
    assert!(idle.tiles().iter().all(|tile| tile.blocks == 0 && tile.run_begin == tile.run_end));
    assert_eq!(idle.statistics().idle_tiles, 2);
}

/// Release builds take 0.5 to 1 ms (docs/tile-schedules.md); the limit is for busy machines and builds with checks.
#[test]
fn a_million_tokens_take_milliseconds() {
    for name in ["lognormal", "pareto"] {
        let path =
            format!("{}/../../benches/data/packed_documents_{name}_1m.txt", env!("CARGO_MANIFEST_DIR"));
        let lengths = std::fs::read_to_string(path).unwrap();
        let documents =
            Documents::from_lengths(lengths.lines().map(|length| length.parse().unwrap())).unwrap();
        for mask in [Mask::full(documents.clone()).unwrap(), Mask::causal(documents).unwrap()] {
            for (direction, tile_rows) in [(TileDirection::Forward, 16), (TileDirection::Backward, 128)] {
                let config = TileScheduleConfig::new(direction, tile_rows, 128);
                let started = std::time::Instant::now();
                let schedule = schedule(&mask, &config);
                let seconds = started.elapsed().as_secs_f64();
                assert!(seconds < 0.3, "{seconds} s");
                let statistics = schedule.statistics();
                assert_eq!(statistics.area, mask.area());
                assert!(statistics.bytes < 128 * statistics.tiles, "{statistics:?}");
            }
        }
    }
}
