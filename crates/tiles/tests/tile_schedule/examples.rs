//! Masks whose schedules are known.

use counterpoint_mask::*;
use counterpoint_tiles::*;

use crate::oracle::*;
use crate::schedule;

#[test]
fn adjacent_slices_are_one() {
    let (rows, left, right) = (Range::new(0, 128), Range::new(0, 100), Range::new(100, 384));
    let config = TileScheduleConfig::new(TileDirection::Forward, 128, 128);
    let rectangle =
        TileSchedule::new(&[Band::full(rows, left), Band::full(rows, right)], 128, 384, &config).unwrap();
    assert_eq!(rectangle.statistics().bounded_blocks, 0);
    assert_eq!((rectangle.tiles().len(), rectangle.runs().len()), (1, 1));
    // A full slice next to a causal one: only the diagonal is bounded, by one bound.
    let causal = Band { diag_max: 256, ..Band::full(rows, Range::new(200, 384)) };
    let schedule =
        TileSchedule::new(&[Band::full(rows, Range::new(0, 200)), causal], 128, 384, &config).unwrap();
    let statistics = schedule.statistics();
    assert_eq!((statistics.blocks, statistics.bounded_blocks, schedule.bounds().len()), (3, 1, 1));
    // Rows of two documents that together see whole blocks.
    let slices = [
        Band::full(Range::new(0, 60), Range::new(0, 256)),
        Band::full(Range::new(60, 128), Range::new(128, 512)),
    ];
    let aligned = TileScheduleConfig { tiles: TilePlacement::Aligned, ..config };
    let schedule = TileSchedule::new(&slices, 128, 512, &aligned).unwrap();
    let runs: Vec<_> =
        schedule.runs().iter().map(|run| (run.start, run.end, schedule.bounds_of(run).len())).collect();
    assert_eq!(runs, [(0, 128, 1), (128, 256, 0), (256, 512, 1)]);
}

#[test]
fn few_tiles_are_split() {
    // One query that sees a million keys, 8 key heads, 132 CTAs: 16 parts a head are 128 items.
    let bands = [Band::full(Range::new(0, 1), Range::new(0, 1 << 20))];
    let split = Some(TileSplit { workers: 132, heads: 8, last_round_partials: 0 });
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
    let split = Some(TileSplit { workers: 132, heads: 16, last_round_partials: 24 });
    let config = TileScheduleConfig { split, ..TileScheduleConfig::new(TileDirection::Forward, 8, 128) };
    // 64 tiles of 16 heads are 7.76 rounds of 132 CTAs.
    let mask = Mask::cross_full(8 * 64, 1 << 14).unwrap();
    let cut = schedule(&mask, &config);
    check(&mask, &config, &cut);
    let whole = schedule(&mask, &TileScheduleConfig { split: None, ..config });
    assert!((7..=8).contains(&cut.merges().len()) && cut.partials() <= 24, "{} parts", cut.partials());
    assert!(100 * cut.makespan(132, 16) < 98 * whole.makespan(132, 16));
    // Not for more partial results than there is memory for.
    let short = TileSplit { last_round_partials: 5, ..config.split.unwrap() };
    assert_eq!(schedule(&mask, &TileScheduleConfig { split: Some(short), ..config }).partials(), 0);
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
fn spans_of_an_order_are_as_many_as_the_mask_has_edges() {
    for mask in [Mask::causal(1 << 20).unwrap(), Mask::full(1 << 20).unwrap()] {
        let config = TileScheduleConfig {
            tiles: TilePlacement::Aligned,
            blocks: TilePlacement::Aligned,
            order: TileOrder::Chains,
            ..TileScheduleConfig::new(TileDirection::Backward, 128, 64)
        };
        let order = schedule(&mask, &config).dq_order().unwrap();
        assert_eq!(order.spans().len(), (1 << 20) / 64);
        // The last rows see every key.
        let last = ((1 << 20) / 64 - 1) as u32;
        assert_eq!(order.place(last as usize, (1 << 13) - 1), Some((last, (1 << 13) - 1)));
        assert_eq!(order.counters(), last + 1);
    }
    // Blocks of a forward, or blocks that do not meet each other, have no order.
    let config = TileScheduleConfig::new(TileDirection::Backward, 128, 64);
    assert_eq!(schedule(&Mask::causal(1024).unwrap(), &config).dq_order(), None);
    let forward =
        TileScheduleConfig { direction: TileDirection::Forward, blocks: TilePlacement::Aligned, ..config };
    assert_eq!(schedule(&Mask::causal(1024).unwrap(), &forward).dq_order(), None);
}

#[test]
fn documents_have_orders_of_their_own() {
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
    let order = schedule.dq_order().unwrap();
    let (first, second) = (order.place(1, 0).unwrap(), order.place(1, 1).unwrap());
    assert_eq!((first.1, second.1), (0, 0));
    assert_ne!(first.0, second.0);
    assert_eq!(order.place(1, 2), Some((second.0, 1)));
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
    // As many tiles, of which one reads both documents.
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
        text(new(
            &[],
            10,
            &TileScheduleConfig {
                split: Some(TileSplit { workers: 0, heads: 1, last_round_partials: 0 }),
                ..config
            }
        )),
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
