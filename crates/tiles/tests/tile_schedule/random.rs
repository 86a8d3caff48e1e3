//! Random masks and settings.

use std::collections::BTreeMap;

use counterpoint_mask::*;
use counterpoint_tiles::*;
use proptest::prelude::*;

use crate::oracle::*;
use crate::random_masks::masks;
use crate::schedule;

fn configs() -> impl Strategy<Value = TileScheduleConfig> {
    let placement = || prop_oneof![Just(TilePlacement::Tight), Just(TilePlacement::Aligned)];
    let split = proptest::option::of((1..200_usize, 1..9_usize));
    let arrival = proptest::option::of(0..200_usize);
    let partials = prop_oneof![Just(TilePartials::OfSplit), Just(TilePartials::OfAll)];
    (direction(), 1..70_usize, 1..50_usize, placement(), placement(), order(), split, partials, arrival)
        .prop_map(|(direction, tile_rows, block, tiles, blocks, order, split, partials, arrival)| {
            let split =
                split.map(|(workers, heads)| TileSplit { workers, heads, last_round_partials: usize::MAX });
            // Sizes that are aligned to divide it.
            let unit = match (direction, tiles, blocks) {
                (TileDirection::Forward, _, TilePlacement::Aligned) => block,
                (TileDirection::Backward, TilePlacement::Aligned, _) => tile_rows,
                _ => 1,
            };
            let arrival = arrival.map(|row| row / unit * unit);
            TileScheduleConfig { direction, tile_rows, block, tiles, blocks, order, split, partials, arrival }
        })
}

fn direction() -> impl Strategy<Value = TileDirection> {
    prop_oneof![Just(TileDirection::Forward), Just(TileDirection::Backward)]
}

fn order() -> impl Strategy<Value = TileOrder> {
    prop_oneof![Just(TileOrder::Work), Just(TileOrder::Chains)]
}

proptest! {
    // Splitting pays only where rows see thousands of columns.
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn parts_cover_every_pair_once(mask in masks(1600), config in configs(), workers in 50..2000_usize) {
        let config = TileScheduleConfig { split: Some(TileSplit { workers, heads: 1, last_round_partials: usize::MAX }), ..config };
        check(&mask, &config, &schedule(&mask, &config));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_schedule_covers_every_pair_once(mask in masks(220), config in configs()) {
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
            let runs = tiles.map(|tile| {
                let runs = schedule.runs_of(tile).iter();
                let blocks = runs.flat_map(|run| blocks(run, config.block).map(|block| (block.start, full(run))));
                (tile.start, tile.end, blocks.collect::<Vec<_>>())
            });
            runs.collect::<Vec<_>>()
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
        // Forward: the keys that a stage holds are the inner axis. Backward: they are owned.
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
    fn key_tiles_add_in_order(mask in masks(260), tile_rows in 1..70_usize, block in 1..50_usize, split in proptest::option::of(1..300_usize)) {
        let config = TileScheduleConfig {
            blocks: TilePlacement::Aligned,
            order: TileOrder::Chains,
            split: split.map(|workers| TileSplit { workers, heads: 1, last_round_partials: usize::MAX }),
            ..TileScheduleConfig::new(TileDirection::Backward, tile_rows, block)
        };
        let schedule = schedule(&mask, &config);
        let order = schedule.dq_order().unwrap();
        let numbers = schedule.tiles().iter().map(|tile| tile.number).max().map_or(0, |last| last + 1);
        let chains = chains(&schedule);
        let count = mask.seqlen_q().div_ceil(block);
        let mut adders: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        let mut counters: BTreeMap<u32, (usize, u32)> = BTreeMap::new();
        prop_assert_eq!(order.begins().len(), count + 1);
        for number in 0..numbers {
            let parts = schedule.tiles().iter().filter(|tile| tile.number == number);
            let mut touched: Vec<usize> = parts
                .flat_map(|tile| schedule.runs_of(tile))
                .flat_map(|run| blocks(run, block).map(|rows| rows.start as usize / block))
                .collect();
            touched.sort_unstable();
            touched.dedup();
            for index in 0..count {
                let found = order.place(index, number);
                if touched.contains(&index) {
                    let place = (index, chains[&number]);
                    let before = adders.entry(place).or_default();
                    let (counter, found) = found.unwrap();
                    prop_assert_eq!(found, *before);
                    *before += 1;
                    // A counter is one chain's, at one block.
                    prop_assert!(counter < order.counters());
                    prop_assert_eq!(*counters.entry(counter).or_insert(place), place);
                } else {
                    prop_assert_eq!(found, None);
                }
            }
        }
        prop_assert_eq!(counters.len(), adders.len());
        let spans_touch = |order: &DqOrder, index: usize| {
            let spans = &order.spans()[order.begins()[index] as usize..order.begins()[index + 1] as usize];
            spans.windows(2).any(|pair| pair[0].end > pair[1].first || (pair[0].end == pair[1].first && pair[0].counter == pair[1].counter))
        };
        prop_assert!(!(0..order.begins().len() - 1).any(|index| spans_touch(&order, index)));
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
