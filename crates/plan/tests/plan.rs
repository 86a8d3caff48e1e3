//! What every plan must hold, on random masks: all pairs once, exactly the needed rows, matching splits.

#[allow(dead_code, reason = "the other tests of this crate use the rest")]
mod cases;

use std::collections::{BTreeSet, VecDeque};

use cases::{configs, key_buffer, masks, rows, spec};
use counterpoint_mask::{Documents, Mask, Window};
use counterpoint_plan::{
    AttentionSpec, CostModel, DispatchAlgorithm, GroupPart, KEY_BLOCK, Link, PassStages, Plan, PlanConfig,
    RankPlan, StageCount, StagePlan, plan_rank,
};
use proptest::prelude::*;

fn directions(rank: &RankPlan) -> [&[StagePlan]; 2] {
    [&rank.forward, &rank.backward]
}

/// How often each (row, column) is unmasked in the mask and computed by the plan.
fn check_pairs(mask: &Mask, plan: &Plan) {
    let (seqlen_q, seqlen_k) = (mask.seqlen_q(), mask.seqlen_k());
    let mut wanted = vec![0_u8; seqlen_q * seqlen_k];
    for slice in mask.slices() {
        for row in rows(&[slice.q_range]) {
            for col in rows(&[slice.k_range]) {
                wanted[row * seqlen_k + col] += u8::from(slice.contains(row, col));
            }
        }
    }
    for direction in 0..2 {
        let mut painted = vec![0_u8; seqlen_q * seqlen_k];
        for rank in &plan.ranks {
            let q_rows = rows(&rank.q_ranges);
            assert_eq!(q_rows.len(), rank.q_rows);
            for (index, stage) in directions(rank)[direction].iter().enumerate() {
                let buffer = key_buffer(stage, index, &rank.k_ranges);
                assert_eq!(buffer.len(), stage.key_rows);
                let mut area = 0;
                for band in stage.bands.iter() {
                    for row in rows(&[band.q_range]) {
                        for col in rows(&[band.columns(row)]) {
                            painted[q_rows[row] * seqlen_k + buffer[col]] += 1;
                            area += 1;
                        }
                    }
                }
                assert_eq!(area, stage.area);
            }
            let mut area = directions(rank)[direction].iter().map(|stage| stage.area).sum::<u64>();
            if let Some(hosted) = &rank.hosted {
                let (q_rows, k_rows) = (rows(&hosted.q_ranges), rows(&rank.k_ranges));
                assert_eq!(q_rows.len(), hosted.q_rows);
                let mut hosted_area = 0;
                for band in hosted.bands.iter() {
                    for row in rows(&[band.q_range]) {
                        for col in rows(&[band.columns(row)]) {
                            painted[q_rows[row] * seqlen_k + k_rows[col]] += 1;
                            hosted_area += 1;
                        }
                    }
                }
                assert_eq!(hosted_area, hosted.area);
                area += hosted_area;
            }
            assert_eq!(rank.area, area);
        }
        assert_eq!(painted, wanted, "direction {direction}");
    }
    assert_eq!(plan.ranks.iter().map(|rank| rank.area).sum::<u64>(), mask.area());
}

/// Moves row numbers as a group-cast would and returns what every rank's buffer then holds.
fn group_cast(parts: &[&GroupPart], own_rows: &[usize], inputs: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut wires = vec![VecDeque::new(); parts.len() * parts.len()];
    for (source, part) in parts.iter().enumerate() {
        for split in &part.owned {
            assert!(!split.rows.is_empty() && !split.ranks.is_empty());
            assert!(split.ranks.windows(2).all(|pair| pair[0] < pair[1]));
            for &rank in &split.ranks {
                let message = inputs[source][split.rows.start..split.rows.end].to_vec();
                wires[source * parts.len() + rank as usize].push_back(message);
            }
        }
    }
    let mut outputs = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        let mut buffer = vec![None; own_rows[rank] + part.recv_rows() as usize];
        for split in &part.remote {
            let message: Vec<usize> = wires[split.rank as usize * parts.len() + rank]
                .pop_front()
                .expect("a split without a sender");
            assert_eq!(message.len(), split.rows.len());
            for (place, row) in (split.rows.start..split.rows.end).zip(message) {
                assert_eq!(buffer[place].replace(row), None, "two splits fill row {place}");
            }
        }
        let filled: Option<Vec<usize>> = buffer.into_iter().skip(own_rows[rank]).collect();
        outputs.push(filled.expect("the buffer is packed"));
    }
    assert!(wires.iter().all(VecDeque::is_empty), "something was sent that nobody takes");
    outputs
}

/// Exactly the needed rows arrive, each once over all stages, from cuts at multiples of a key block of one list.
fn check_exchange(mask: &Mask, plan: &Plan) {
    let list = |rank: &RankPlan| rank.forward.iter().flat_map(|stage| rows(&stage.recv_ranges)).collect();
    let lists: Vec<Vec<usize>> = plan.ranks.iter().map(list).collect();
    for direction in 0..2 {
        let inputs: Vec<Vec<usize>> = plan.ranks.iter().map(|rank| rows(&rank.k_ranges)).collect();
        let stages = directions(&plan.ranks[0])[direction].len();
        let mut received = vec![Vec::new(); plan.ranks.len()];
        for stage in 0..stages {
            let parts: Vec<&GroupPart> =
                plan.ranks.iter().map(|rank| &directions(rank)[direction][stage].part).collect();
            let own_rows: Vec<usize> =
                plan.ranks.iter().map(|rank| directions(rank)[direction][stage].own_rows).collect();
            for (rank, buffer) in group_cast(&parts, &own_rows, &inputs).into_iter().enumerate() {
                let stage_plan = &directions(&plan.ranks[rank])[direction][stage];
                assert_eq!(buffer, rows(&stage_plan.recv_ranges));
                if stage == 0 {
                    assert!(stage_plan.part.is_empty());
                }
                assert!(stage_plan.part.owned.iter().all(|split| !split.ranks.contains(&(rank as u32))));
                for pair in stage_plan.part.owned.windows(2) {
                    assert!(pair[0].rows.end <= pair[1].rows.start);
                }
                received[rank].extend(buffer);
            }
            for rank in 0..plan.ranks.len() {
                let later: usize = directions(&plan.ranks[rank])[direction][stage + 1..]
                    .iter()
                    .map(|stage| stage.key_rows)
                    .sum();
                assert!(received[rank].len() % KEY_BLOCK == 0 || later == 0, "a cut inside a key block");
            }
        }
        for (rank, received) in plan.ranks.iter().zip(&received) {
            assert_eq!(directions(rank)[direction].len(), stages, "every rank has the same number of stages");
            let own: BTreeSet<usize> = rows(&rank.k_ranges).into_iter().collect();
            let mut needed = BTreeSet::new();
            let away = rank.hosted.as_ref().map_or_else(Vec::new, |hosted| rows(&hosted.away()));
            for (local, row) in rows(&rank.q_ranges).into_iter().enumerate() {
                if away.contains(&local) {
                    continue;
                }
                for slice in mask.slices().iter().filter(|slice| slice.q_range.contains(row)) {
                    needed.extend(rows(&[slice.band().columns(row)]));
                }
            }
            assert_eq!(*received, lists[rank.rank], "the order does not depend on the stages");
            let mut received = received.clone();
            received.sort_unstable();
            assert_eq!(received, needed.difference(&own).copied().collect::<Vec<_>>());
            assert_eq!(rank.recv_rows(), received.len() as u64);
            assert_eq!(rows(&rank.recv_ranges()), received);
        }
    }
}

/// Hosts receive the rows that are away and see some of their keys, and no others; what they send back meets its rows.
fn check_hosting(mask: &Mask, plan: &Plan) {
    let hosting = plan.ranks.iter().filter(|rank| rank.hosted.is_some()).count();
    assert!(hosting == 0 || hosting == plan.cp_size());
    let Some(works) = plan.ranks.iter().map(|rank| rank.hosted.as_ref()).collect::<Option<Vec<_>>>() else {
        return;
    };
    let inputs: Vec<Vec<usize>> = plan.ranks.iter().map(|rank| rows(&rank.q_ranges)).collect();
    let parts: Vec<&GroupPart> = works.iter().map(|work| &work.part).collect();
    let none = vec![0; plan.cp_size()];
    let buffers = group_cast(&parts, &none, &inputs);
    let away = |rank: usize| rows(&works[rank].away()).into_iter().map(|local| inputs[rank][local]).collect();
    let away: Vec<Vec<usize>> = (0..plan.cp_size()).map(away).collect();
    assert!(away.iter().any(|rows| !rows.is_empty()), "hosting of nothing");
    let home: Vec<GroupPart> = works.iter().map(|work| work.home_part()).collect();
    assert_eq!(group_cast(&home.iter().collect::<Vec<_>>(), &none, &away), buffers);
    for ((rank, work), buffer) in plan.ranks.iter().zip(&works).zip(&buffers) {
        assert_eq!(*buffer, rows(&work.q_ranges));
        assert_eq!(work.away_rows(), away[rank.rank].len());
        let wanted: Vec<usize> = away
            .iter()
            .flatten()
            .copied()
            .filter(|&row| {
                rank.k_ranges.iter().any(|keys| {
                    mask.slices().iter().filter(|slice| slice.q_range.contains(row)).any(|slice| {
                        let columns = slice.band().columns(row);
                        !columns.is_empty() && columns.overlaps(keys)
                    })
                })
            })
            .collect::<BTreeSet<usize>>()
            .into_iter()
            .collect();
        assert_eq!(*buffer, wanted);
        let own = buffer.iter().filter(|row| inputs[rank.rank].contains(row)).count() as u64;
        assert_eq!(rank.query_recv_rows(), buffer.len() as u64 - own);
        work.part.check(rank.rank, plan.cp_size(), rank.q_rows, work.q_rows).unwrap();
    }
    let sent = plan.ranks.iter().map(RankPlan::query_send_rows).sum::<u64>();
    assert_eq!(sent, plan.ranks.iter().map(RankPlan::query_recv_rows).sum::<u64>());
}

fn check_dispatch(plan: &Plan) {
    for (dispatch, of) in [(&plan.q_dispatch, 0), (&plan.k_dispatch, 1)] {
        let mut seen = vec![0; dispatch.seqlen()];
        for rank in &plan.ranks {
            let ranges = if of == 0 { &rank.q_ranges } else { &rank.k_ranges };
            rows(ranges).into_iter().for_each(|row| seen[row] += 1);
        }
        assert!(seen.iter().all(|&count| count == 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_pair_is_computed_once(mask in masks(160), config in configs()) {
        let plan = Plan::new(&mask, &spec(), &config).unwrap();
        check_dispatch(&plan);
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        check_hosting(&mask, &plan);
    }

    #[test]
    fn cross_attention_of_equal_lengths(mask in masks(96), config in configs()) {
        let plan = Plan::cross_attention(&mask, &spec(), &config).unwrap();
        check_dispatch(&plan);
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        check_hosting(&mask, &plan);
    }

    #[test]
    fn a_rank_alone_is_the_rank_of_the_whole(mask in masks(400), config in configs()) {
        let plan = Plan::new(&mask, &spec(), &config).unwrap();
        prop_assert_eq!(&plan, &Plan::new(&mask, &spec(), &config).unwrap());
        for rank in 0..plan.cp_size() {
            prop_assert_eq!(&plan_rank(&mask, &spec(), &config, rank).unwrap(), plan.rank(rank));
        }
    }
}

/// Masks that people use, on every dispatch.
#[test]
fn masks_of_the_builders() {
    let documents = || Documents::from_lengths([40, 1, 150, 0, 70]).unwrap();
    let window = Window { left: Some(30), right: Some(0), ..Window::default() };
    let masks = [
        Mask::causal(261).unwrap(),
        Mask::full(documents()).unwrap(),
        Mask::causal(documents()).unwrap(),
        Mask::sliding_window(documents(), window).unwrap(),
        Mask::block_causal(documents(), 16).unwrap(),
        Mask::prefix_lm(documents(), 12).unwrap(),
        Mask::shared_question(33, documents()).unwrap(),
        Mask::cross_causal(documents(), Documents::from_lengths([10, 5, 300, 7, 2]).unwrap()).unwrap(),
        Mask::cross_full(Documents::from(70), Documents::from(400)).unwrap(),
    ];
    for mask in &masks {
        for dispatch in [
            DispatchAlgorithm::Affinity,
            DispatchAlgorithm::MinHeap,
            DispatchAlgorithm::Sequential,
            DispatchAlgorithm::Zigzag,
        ] {
            for (ranks, chunk_size) in [(1, 64), (3, 13), (8, 32), (40, 16)] {
                let config = PlanConfig { chunk_size: Some(chunk_size), dispatch, ..PlanConfig::new(ranks) };
                let plan = Plan::new(mask, &spec(), &config).unwrap();
                assert_eq!(plan.q_dispatch.chunk_size(), chunk_size);
                check_dispatch(&plan);
                check_pairs(mask, &plan);
                check_exchange(mask, &plan);
            }
        }
    }
}

/// Long enough for owners' rows to be received in several layers.
#[test]
fn rows_received_in_layers() {
    let mask = Mask::causal(4000).unwrap();
    for dispatch in [DispatchAlgorithm::Affinity, DispatchAlgorithm::MinHeap] {
        for (ranks, chunk_size, stages) in [(2, 100, 3), (3, 64, 5)] {
            let stages = StageCount::Fixed(stages).into();
            let config =
                PlanConfig { chunk_size: Some(chunk_size), dispatch, stages, ..PlanConfig::new(ranks) };
            let plan = Plan::new(&mask, &spec(), &config).unwrap();
            check_pairs(&mask, &plan);
            check_exchange(&mask, &plan);
            check_hosting(&mask, &plan);
            let layered = |rank: &RankPlan| {
                let firsts: Vec<usize> = rank
                    .forward
                    .iter()
                    .flat_map(|stage| &stage.recv_ranges)
                    .map(|range| range.start)
                    .collect();
                firsts.windows(2).filter(|pair| pair[1] < pair[0]).count() > 1
            };
            let in_layers = plan.ranks.iter().any(layered);
            assert_eq!(
                in_layers,
                ranks > 2 || dispatch == DispatchAlgorithm::MinHeap,
                "{dispatch:?} on {ranks}"
            );
        }
    }
}

/// Cutting by chunks and stages must not leave crumbs: pieces that are one band again are one band.
#[test]
fn neighbours_are_fused() {
    let config = |dispatch| PlanConfig {
        chunk_size: Some(64),
        dispatch,
        stages: StageCount::Fixed(3).into(),
        ..PlanConfig::new(4)
    };
    let full = Mask::full(4096).unwrap();
    let plan = Plan::new(&full, &spec(), &config(DispatchAlgorithm::Zigzag)).unwrap();
    for stage in plan.ranks.iter().flat_map(|rank| rank.forward.iter().chain(&rank.backward)) {
        assert_eq!(stage.bands.len(), 1, "16 chunks of rows, 16 runs of columns, one rectangle");
    }
    let causal = Mask::causal(4096).unwrap();
    let plan = Plan::new(&causal, &spec(), &config(DispatchAlgorithm::Sequential)).unwrap();
    for rank in &plan.ranks {
        for stage in &rank.forward {
            assert_eq!(stage.bands.len(), usize::from(stage.key_rows > 0));
        }
    }
    // Zigzag of single causal chunks: a rank's rows are two blocks, each a rectangle and a triangle.
    let config = PlanConfig { chunk_size: Some(512), ..config(DispatchAlgorithm::Zigzag) };
    let plan = Plan::new(&causal, &spec(), &config).unwrap();
    for stage in plan.ranks.iter().flat_map(|rank| &rank.forward) {
        assert!(stage.bands.len() <= 3, "{:?}", stage.bands);
    }
}

/// What one pass is cut into says nothing about the other.
#[test]
fn each_pass_has_its_own_stages() {
    const COUNTS: [StageCount; 4] =
        [StageCount::Auto, StageCount::Fixed(0), StageCount::Fixed(1), StageCount::Fixed(3)];
    let plan = |stages| {
        let config = PlanConfig { chunk_size: Some(128), stages, ..PlanConfig::new(4) };
        Plan::new(&Mask::causal(4096).unwrap(), &spec(), &config).unwrap()
    };
    let same = COUNTS.map(|count| plan(PassStages::from(count)));
    assert_ne!(same[2].ranks[0].forward, same[3].ranks[0].forward);
    for (forward, of_forward) in COUNTS.into_iter().zip(&same) {
        for (backward, of_backward) in COUNTS.into_iter().zip(&same) {
            let both = plan(PassStages { forward, backward });
            for ((rank, of_forward), of_backward) in
                both.ranks.iter().zip(&of_forward.ranks).zip(&of_backward.ranks)
            {
                assert_eq!(rank.forward, of_forward.forward, "{forward} and {backward}");
                assert_eq!(rank.backward, of_backward.backward, "{forward} and {backward}");
            }
        }
    }
}

#[test]
fn all_work_at_once_where_ranks_own_whole_blocks() {
    let config = |chunk_size| PlanConfig {
        chunk_size: Some(chunk_size),
        stages: StageCount::Fixed(0).into(),
        ..PlanConfig::new(4)
    };
    for mask in [Mask::full(2048).unwrap(), Mask::causal(2048).unwrap()] {
        let plan = Plan::new(&mask, &spec(), &config(128)).unwrap();
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        for stages in plan.ranks.iter().flat_map(|rank| [&rank.forward, &rank.backward]) {
            assert_eq!(stages.len(), 2);
            assert_eq!((stages[0].area, stages[1].own_rows), (0, 512));
        }
        // 8 rows less, and ranks own blocks that are cut.
        let plan = Plan::new(&Mask::full(2040).unwrap(), &spec(), &config(128)).unwrap();
        assert!(plan.ranks.iter().all(|rank| rank.forward.len() == 2 && rank.forward[1].own_rows == 0));
    }
    // A GPU gives up overlap where it costs more than it hides, and only there.
    let rows = |cost| {
        let config = PlanConfig { chunk_size: Some(128), cost, ..PlanConfig::new(2) };
        let spec = AttentionSpec { heads_q: 64, heads_kv: 8, head_dim: 128, head_dim_v: 128, ..spec() };
        Plan::new(&Mask::causal(4096).unwrap(), &spec, &config).unwrap().ranks[0].forward[1].own_rows
    };
    assert_eq!(rows(CostModel::H200), 2048);
    assert_eq!(rows(CostModel { tiles: None, ..CostModel::H200 }), 0);
    let link = Link { alpha_seconds: 1e-5, bytes_per_second: 1e10 };
    assert_eq!(rows(CostModel { link, ..CostModel::H200 }), 0);
}

/// Longer sequences, so that lists of remote rows have many key blocks to cut between.
fn long_case() -> impl Strategy<Value = (Mask, PlanConfig)> {
    (masks(1500), configs())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn long_sequences(case in long_case()) {
        let (mask, config) = case;
        let plan = Plan::new(&mask, &spec(), &config).unwrap();
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        check_hosting(&mask, &plan);
        if let StageCount::Fixed(stages) = config.stages.forward {
            let remote = plan.ranks.iter().any(|rank| rank.recv_rows() > 0);
            prop_assert_eq!(plan.rank(0).forward.len(), if remote { stages.max(1) + 1 } else { 1 });
        }
    }
}
