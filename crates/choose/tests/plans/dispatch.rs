//! What every dispatch must hold, on random masks, and how good it is on real document lengths.

use std::fs;

use crate::cases::masks;
use counterpoint_choose::{DispatchAlgorithm, MAX_CHUNKS, dispatch, dispatch_keys, dispatch_queries};
use counterpoint_mask::{AttnSlice, Documents, Mask, MaskType, Range};
use counterpoint_plan::{ChunkWork, Dispatch, chunk_work, received_rows, received_rows_lower_bound};
use proptest::prelude::*;

const ALGORITHMS: [DispatchAlgorithm; 4] = [
    DispatchAlgorithm::Affinity,
    DispatchAlgorithm::MinHeap,
    DispatchAlgorithm::Sequential,
    DispatchAlgorithm::Zigzag,
];

fn areas(work: &ChunkWork, dispatch: &Dispatch) -> Vec<u64> {
    (0..dispatch.cp_size())
        .map(|rank| dispatch.chunks(rank).iter().map(|&chunk| work.area(chunk as usize)).sum())
        .collect()
}

fn max_area(work: &ChunkWork, dispatch: &Dispatch) -> u64 {
    areas(work, dispatch).into_iter().max().unwrap()
}

/// Masks of self-attention. A filter on the masks, so that a test of many cases does not run out of refused ones.
fn square_masks(longest: usize) -> impl Strategy<Value = Mask> {
    masks(longest).prop_filter("as many queries as keys", |mask| mask.seqlen_q() == mask.seqlen_k())
}

/// Every chunk on exactly one rank, counts that differ by at most one.
fn check_counts(dispatch: &Dispatch) {
    let mut chunks: Vec<u32> =
        (0..dispatch.cp_size()).flat_map(|rank| dispatch.chunks(rank).iter().copied()).collect();
    chunks.sort_unstable();
    assert_eq!(chunks, (0..dispatch.num_chunks() as u32).collect::<Vec<_>>());
    let counts = (0..dispatch.cp_size()).map(|rank| dispatch.chunks(rank).len());
    assert!(counts.clone().max().unwrap() - counts.min().unwrap() <= 1);
}

/// Received rows by painting single rows.
fn painted_received(mask: &Mask, queries: &Dispatch, keys: &Dispatch) -> Vec<u64> {
    (0..queries.cp_size())
        .map(|rank| {
            let mut read = vec![false; mask.seqlen_k()];
            for row in queries.ranges(rank).iter().flat_map(|range| range.start..range.end) {
                for slice in mask.slices().iter().filter(|slice| slice.q_range.contains(row)) {
                    (slice.k_range.start..slice.k_range.end)
                        .for_each(|col| read[col] |= slice.contains(row, col));
                }
            }
            for range in keys.ranges(rank) {
                read[range.start..range.end].fill(false);
            }
            read.iter().filter(|&&read| read).count() as u64
        })
        .collect()
}

/// Chunk `i` to rank `owner(i)`. A dispatch can be read but not built by hand, so it is read.
fn deal(seqlen: usize, chunk_size: usize, cp_size: usize, owner: impl Fn(usize) -> usize) -> Dispatch {
    let mut rank_chunks = vec![Vec::new(); cp_size];
    (0..seqlen.div_ceil(chunk_size)).for_each(|chunk| rank_chunks[owner(chunk)].push(chunk));
    let json = serde_json::json!({ "seqlen": seqlen, "chunk_size": chunk_size, "rank_chunks": rank_chunks });
    serde_json::from_value(json).unwrap()
}

proptest! {
    #[test]
    fn chunk_work_is_exact(mask in masks(80), chunk_size in 1_usize..30) {
        let work = chunk_work(&mask, chunk_size);
        prop_assert_eq!(work.num_chunks(), mask.seqlen_q().div_ceil(chunk_size));
        for chunk in 0..work.num_chunks() {
            let mut area = 0;
            let mut read = vec![false; mask.seqlen_k()];
            for row in work.rows(chunk).start..work.rows(chunk).end {
                for col in 0..mask.seqlen_k() {
                    let seen = mask.slices().iter().any(|slice| slice.contains(row, col));
                    area += u64::from(seen);
                    read[col] |= seen;
                }
            }
            prop_assert_eq!(work.area(chunk), area);
            let needs = work.needs(chunk);
            prop_assert!(needs.windows(2).all(|pair| pair[0].end < pair[1].start));
            for (col, &read) in read.iter().enumerate() {
                prop_assert_eq!(needs.iter().any(|range| range.contains(col)), read);
            }
        }
    }

    #[test]
    fn every_dispatch_is_whole_and_pure(mask in masks(120), chunk_size in 1_usize..30, cp_size in 1_usize..12) {
        let work = chunk_work(&mask, chunk_size);
        for algorithm in ALGORITHMS {
            let queries = dispatch_queries(&work, cp_size, algorithm);
            check_counts(&queries);
            prop_assert_eq!(&queries, &dispatch_queries(&chunk_work(&mask, chunk_size), cp_size, algorithm));
            let keys = dispatch_keys(&work, &queries, chunk_size + 1);
            check_counts(&keys);
            prop_assert_eq!(keys.seqlen(), mask.seqlen_k());
            prop_assert_eq!(&keys, &dispatch_keys(&work, &queries, chunk_size + 1));
            prop_assert_eq!(received_rows(&work, &queries, &keys), painted_received(&mask, &queries, &keys));
            if mask.seqlen_q() == mask.seqlen_k() {
                let both = dispatch(&work, cp_size, algorithm);
                check_counts(&both);
                prop_assert_eq!(&both, &dispatch(&work, cp_size, algorithm));
                prop_assert_eq!(received_rows(&work, &both, &both), painted_received(&mask, &both, &both));
            }
        }
    }

    /// Affinity is as balanced as it promises and never receives more than the greedy, in all or on its slowest rank.
    #[test]
    fn affinity_keeps_its_promise(mask in square_masks(400), chunk_size in 1_usize..12, cp_size in 1_usize..9) {
        let work = chunk_work(&mask, chunk_size);
        let greedy = dispatch(&work, cp_size, DispatchAlgorithm::MinHeap);
        let affinity = dispatch(&work, cp_size, DispatchAlgorithm::Affinity);
        let mean = mask.area() as f64 / cp_size as f64;
        let (area, greedy_area) = (max_area(&work, &affinity) as f64, max_area(&work, &greedy) as f64);
        prop_assert!(area <= 1.01 * mean || area <= 1.01 * greedy_area, "{area} of {mean}, greedy {greedy_area}");
        let received = received_rows(&work, &affinity, &affinity);
        let greedy_received = received_rows(&work, &greedy, &greedy);
        prop_assert!(received.iter().sum::<u64>() <= greedy_received.iter().sum());
        prop_assert!(received.iter().max() <= greedy_received.iter().max());
    }

    /// Key chunks live where they are read: no fewer rows are local than with keys dealt out in runs or in turn.
    #[test]
    fn keys_live_where_they_are_read(
        mask in masks(400), chunk_size in 1_usize..30, key_chunk_size in 1_usize..30, cp_size in 1_usize..9,
    ) {
        let work = chunk_work(&mask, chunk_size);
        let chunks = mask.seqlen_k().div_ceil(key_chunk_size);
        let room = |rank: usize| chunks / cp_size + usize::from(rank < chunks % cp_size);
        let in_turn = deal(mask.seqlen_k(), key_chunk_size, cp_size, |chunk| chunk % cp_size);
        let in_runs = deal(mask.seqlen_k(), key_chunk_size, cp_size, |chunk| {
            (0..cp_size).find(|&rank| chunk < (0..=rank).map(room).sum()).unwrap()
        });
        for algorithm in ALGORITHMS {
            let queries = dispatch_queries(&work, cp_size, algorithm);
            let received = |keys: &Dispatch| received_rows(&work, &queries, keys).iter().sum::<u64>();
            let keys = dispatch_keys(&work, &queries, key_chunk_size);
            for other in [&in_turn, &in_runs] {
                check_counts(other);
                prop_assert!(received(&keys) <= received(other), "{} {}", received(&keys), received(other));
            }
        }
    }

    #[test]
    fn the_bound_holds(mask in masks(120), chunk_size in 1_usize..20, cp_size in 1_usize..9) {
        let work = chunk_work(&mask, chunk_size);
        for algorithm in ALGORITHMS {
            let queries = dispatch_queries(&work, cp_size, algorithm);
            let keys = dispatch_keys(&work, &queries, chunk_size);
            let bound = received_rows_lower_bound(&work, &queries, &keys);
            prop_assert!(bound <= received_rows(&work, &queries, &keys).iter().sum());
            if mask.seqlen_q() == mask.seqlen_k() {
                let both = dispatch(&work, cp_size, algorithm);
                let bound = received_rows_lower_bound(&work, &both, &both);
                prop_assert!(bound <= received_rows(&work, &both, &both).iter().sum());
            }
        }
    }
}

fn square(seqlen: usize, mask_type: MaskType) -> Mask {
    let all = Range::new(0, seqlen);
    Mask::new(seqlen, seqlen, vec![AttnSlice::new(all, all, mask_type)]).unwrap()
}

fn packed(lengths: impl IntoIterator<Item = usize>) -> Mask {
    let mut end = 0;
    let slices = lengths
        .into_iter()
        .map(|length| {
            let range = Range::new(end, end + length);
            end += length;
            AttnSlice::new(range, range, MaskType::Causal)
        })
        .collect();
    Mask::new(end, end, slices).unwrap()
}

#[test]
fn full_reaches_its_bound() {
    let work = chunk_work(&square(4096, MaskType::Full), 64);
    for algorithm in ALGORITHMS {
        let dispatch = dispatch(&work, 8, algorithm);
        assert_eq!(received_rows(&work, &dispatch, &dispatch), vec![4096 * 7 / 8; 8]);
        assert_eq!(received_rows_lower_bound(&work, &dispatch, &dispatch), 4096 * 7);
    }
}

#[test]
fn causal_keeps_its_balance() {
    let work = chunk_work(&square(1 << 17, MaskType::Causal), 512);
    let affinity = dispatch(&work, 8, DispatchAlgorithm::Affinity);
    let greedy = dispatch(&work, 8, DispatchAlgorithm::MinHeap);
    assert!(max_area(&work, &affinity) <= max_area(&work, &greedy) + max_area(&work, &greedy) / 1000);
    let received: u64 = received_rows(&work, &affinity, &affinity).iter().sum();
    let bound = received_rows_lower_bound(&work, &affinity, &affinity);
    assert!(bound > 8 * 65_000 && received < bound + bound / 4, "{received} rows, at least {bound}");
}

#[test]
fn a_sliding_window_fetches_only_the_window() {
    let (seqlen, window) = (1 << 17, 4096);
    let head = AttnSlice::new(Range::new(0, window), Range::new(0, window), MaskType::Causal);
    let rest = AttnSlice::new(Range::new(window, seqlen), Range::new(1, seqlen), MaskType::BiCausal);
    let work = chunk_work(&Mask::new(seqlen, seqlen, vec![head, rest]).unwrap(), 512);
    let affinity = dispatch(&work, 8, DispatchAlgorithm::Affinity);
    let received = received_rows(&work, &affinity, &affinity);
    assert!(received.iter().all(|&rows| rows < window as u64), "{received:?}");
}

#[test]
fn more_ranks_than_chunks() {
    let work = chunk_work(&square(1000, MaskType::Causal), 300);
    for algorithm in ALGORITHMS {
        let dispatch = dispatch(&work, 7, algorithm);
        check_counts(&dispatch);
        assert_eq!((0..7).map(|rank| dispatch.tokens(rank)).sum::<usize>(), 1000);
        assert_eq!((0..7).filter(|&rank| dispatch.chunks(rank).is_empty()).count(), 3);
    }
}

/// The row counts of the annealer are means over ranks, found by 12 s of annealing at a balance of 1.005.
#[test]
fn affinity_is_within_ten_percent_of_annealing() {
    let lognormal = include_str!("../../../../benches/data/packed_documents_lognormal_1m.txt");
    let pareto = include_str!("../../../../benches/data/packed_documents_pareto_1m.txt");
    for (documents, cp_size, annealed, greedy_mean) in [
        (lognormal, 8, 17_788, 440_999),
        (lognormal, 64, 22_818, 133_809),
        (pareto, 8, 67_810, 677_208),
        (pareto, 64, 95_279, 431_095),
    ] {
        let mask = packed(documents.lines().map(|length| length.parse().unwrap()));
        assert_eq!(mask.seqlen_q(), 1 << 20);
        let work = chunk_work(&mask, 512);
        let mean = |dispatch: &Dispatch| {
            received_rows(&work, dispatch, dispatch).iter().sum::<u64>() / cp_size as u64
        };
        let affinity = dispatch(&work, cp_size, DispatchAlgorithm::Affinity);
        check_counts(&affinity);
        let received = mean(&affinity);
        let bound = received_rows_lower_bound(&work, &affinity, &affinity) / cp_size as u64;
        assert!(received * 10 <= annealed * 11, "{cp_size} ranks: {received} rows, annealed {annealed}");
        assert!(bound <= received, "{cp_size} ranks: {received} rows, at least {bound}");
        let balance = max_area(&work, &affinity) as f64 * cp_size as f64 / mask.area() as f64;
        assert!(balance <= 1.01, "{cp_size} ranks: balance {balance}");
        assert_eq!(mean(&dispatch(&work, cp_size, DispatchAlgorithm::MinHeap)), greedy_mean);
    }
}

/// Masks whose chunks read on both sides of a document's border, or all read the same keys: a tenth of the greedy's
/// traffic, or a quarter where one long document is most of the work.
#[test]
fn other_masks_keep_together_what_reads_together() {
    let lengths = |text: &str| -> Vec<usize> { text.lines().map(|length| length.parse().unwrap()).collect() };
    let lognormal = lengths(include_str!("../../../../benches/data/packed_documents_lognormal_1m.txt"));
    let pareto = lengths(include_str!("../../../../benches/data/packed_documents_pareto_1m.txt"));
    let documents = |lengths: &[usize]| Documents::from_lengths(lengths.iter().copied()).unwrap();
    for (name, mask, cp_size, part) in [
        ("full documents", Mask::full(documents(&lognormal)), 8, 10),
        ("full documents", Mask::full(documents(&pareto)), 64, 4),
        ("video", Mask::block_causal(documents(&pareto), 1560), 64, 4),
        ("prefix-lm", Mask::prefix_lm(documents(&lognormal), 1024), 8, 10),
        ("shared question", Mask::shared_question(16_384, documents(&lognormal)), 8, 10),
    ] {
        let work = chunk_work(&mask.unwrap(), 512);
        let affinity = dispatch(&work, cp_size, DispatchAlgorithm::Affinity);
        let greedy = dispatch(&work, cp_size, DispatchAlgorithm::MinHeap);
        let total = |dispatch: &Dispatch| received_rows(&work, dispatch, dispatch).iter().sum::<u64>();
        let (received, greedy) = (total(&affinity), total(&greedy));
        assert!(received * part <= greedy, "{name}, {cp_size} ranks: {received} rows, greedy {greedy}");
        let balance =
            max_area(&work, &affinity) as f64 * cp_size as f64 / work.areas().iter().sum::<u64>() as f64;
        assert!(balance <= 1.01, "{name}, {cp_size} ranks: balance {balance}");
    }
}

/// All dispatches of `chunks` chunks to ranks with the given room.
fn all_dispatches(chunks: u32, room: &[usize]) -> Vec<Vec<usize>> {
    let mut found = vec![(Vec::new(), room.to_vec())];
    for _ in 0..chunks {
        found = found
            .into_iter()
            .flat_map(|(owners, room): (Vec<usize>, Vec<usize>)| {
                (0..room.len())
                    .filter(|&rank| room[rank] > 0)
                    .map(|rank| {
                        let (mut owners, mut room) = (owners.clone(), room.clone());
                        owners.push(rank);
                        room[rank] -= 1;
                        (owners, room)
                    })
                    .collect::<Vec<_>>()
            })
            .collect();
    }
    found.into_iter().map(|(owners, _)| owners).collect()
}

/// On small sequences of packed documents every dispatch can be looked at.
#[test]
fn affinity_against_the_optimum() {
    let (mut received_sum, mut optimum_sum, mut exact) = (0, 0, 0);
    let cases = 60;
    for case in 0..cases {
        let mut state = case as u64;
        let mut draw = |end: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % end
        };
        let mut lengths = Vec::new();
        while lengths.iter().sum::<usize>() < 80 {
            let length = 1 + draw(40);
            lengths.push(length.min(80 - lengths.iter().sum::<usize>()));
        }
        let mask = packed(lengths);
        let work = chunk_work(&mask, 8);
        let affinity = dispatch(&work, 3, DispatchAlgorithm::Affinity);
        let received: u64 = received_rows(&work, &affinity, &affinity).iter().sum();
        // The best of all that are no worse in balance.
        let most = max_area(&work, &affinity);
        let read = |owners: &[usize]| -> u64 {
            (0..3)
                .map(|rank| {
                    let own = |chunk: usize| owners[chunk] == rank;
                    let mut read = [false; 80];
                    (0..10).filter(|&chunk| own(chunk)).flat_map(|chunk| work.needs(chunk)).for_each(
                        |range| {
                            read[range.start..range.end].fill(true);
                        },
                    );
                    (0..80).filter(|&row| read[row] && !own(row / 8)).count() as u64
                })
                .sum()
        };
        let optimum = all_dispatches(10, &[4, 3, 3])
            .iter()
            .filter(|owners| {
                let area = |rank| {
                    (0..10).filter(|&chunk| owners[chunk] == rank).map(|chunk| work.area(chunk)).sum::<u64>()
                };
                (0..3).all(|rank| area(rank) <= most)
            })
            .map(|owners| read(owners))
            .min()
            .unwrap();
        let bound = received_rows_lower_bound(&work, &affinity, &affinity);
        assert!(bound <= optimum && optimum <= received, "case {case}: {bound}, {optimum}, {received}");
        received_sum += received;
        optimum_sum += optimum;
        exact += u32::from(received == optimum);
    }
    println!("received {received_sum}, optimum {optimum_sum}, optimal in {exact} of {cases}");
    assert!(received_sum * 100 <= optimum_sum * 115, "{received_sum} rows, optimum {optimum_sum}");
}

/// Seconds in which this thread had a core, which tests that run meanwhile do not make more.
fn on_core() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse::<f64>().unwrap() * 1e-9
}

/// A million chunks that each read everything before them. Anything that grows with the square of their number takes ten
/// seconds and more here.
#[test]
fn a_million_chunks_are_dispatched_in_time() {
    let mask = Mask::causal(MAX_CHUNKS).unwrap();
    let started = on_core();
    let work = chunk_work(&mask, 1);
    let dispatched = dispatch(&work, 4, DispatchAlgorithm::Affinity);
    let seconds = on_core() - started;
    println!("{MAX_CHUNKS} chunks dispatched in {seconds:.2} s");
    assert!((0..4).all(|rank| dispatched.chunks(rank).len() == MAX_CHUNKS / 4));
    assert!(seconds < 6.0, "{seconds} s");
}
