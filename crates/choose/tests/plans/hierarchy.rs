//! The two-level exchange, checked by moving row numbers through it.

use std::collections::{BTreeSet, VecDeque};

use crate::cases::{configs, masks, spec};
use crate::checks::rows;
use counterpoint_choose::{PlanConfig, QueryExchange, plan_mask};
use counterpoint_plan::{GroupPart, HostedWork, Plan, RankPlan, StagePlan, Topology, TwoLevelPart};
use proptest::prelude::*;

/// Moves rows as a group-cast does. `allowed(source, destination)` says which pairs may talk.
fn group_cast(
    parts: &[&GroupPart],
    inputs: &[Vec<usize>],
    buffers: &mut [Vec<usize>],
    allowed: impl Fn(usize, usize) -> bool,
) {
    let mut wires = vec![VecDeque::new(); parts.len() * parts.len()];
    for (source, part) in parts.iter().enumerate() {
        for split in &part.owned {
            assert!(!split.rows.is_empty() && !split.ranks.is_empty());
            assert!(split.ranks.windows(2).all(|pair| pair[0] < pair[1]));
            for &rank in &split.ranks {
                assert!(allowed(source, rank as usize), "{source} must not send to {rank}");
                wires[source * parts.len() + rank as usize]
                    .push_back(&inputs[source][split.rows.start..split.rows.end]);
            }
        }
    }
    for (rank, (part, buffer)) in parts.iter().zip(buffers).enumerate() {
        for split in &part.remote {
            let message =
                wires[split.rank as usize * parts.len() + rank].pop_front().expect("nobody sends this");
            let place = &mut buffer[split.rows.start..split.rows.end];
            assert!(place.iter().all(|&row| row == usize::MAX), "two splits fill {:?}", split.rows);
            place.copy_from_slice(message);
        }
    }
    assert!(wires.iter().all(VecDeque::is_empty), "something was sent that nobody takes");
}

/// The mirror: adds up partial counts where the cast would have read.
fn group_reduce(parts: &[&GroupPart], partials: &[Vec<u64>], sums: &mut [Vec<u64>]) {
    let mut wires = vec![VecDeque::new(); parts.len() * parts.len()];
    for (rank, part) in parts.iter().enumerate() {
        for split in &part.remote {
            wires[rank * parts.len() + split.rank as usize]
                .push_back(&partials[rank][split.rows.start..split.rows.end]);
        }
    }
    for (owner, part) in parts.iter().enumerate() {
        for split in &part.owned {
            for &rank in &split.ranks {
                let message =
                    wires[rank as usize * parts.len() + owner].pop_front().expect("nobody sends this");
                for (sum, partial) in sums[owner][split.rows.start..split.rows.end].iter_mut().zip(message) {
                    *sum += partial;
                }
            }
        }
    }
}

type StagesOf = fn(&RankPlan) -> &[StagePlan];

/// Moves rows through the two steps: `own` rows of each rank to where it has those that it `received`, in this order. How many entered foreign
/// nodes, each of which every row enters once. Own rows that a rank needs in the buffer too come to it inside its node.
fn check_levels(
    own: &[Vec<usize>],
    received: &[Vec<usize>],
    parts: &[&TwoLevelPart],
    topology: &Topology,
) -> u64 {
    let ranks = own.len();
    let node = |rank: usize| topology.node(rank);
    let inter: Vec<&GroupPart> = parts.iter().map(|part| &part.inter).collect();
    let mut first: Vec<Vec<usize>> = parts.iter().map(|part| vec![usize::MAX; part.inter_rows]).collect();
    group_cast(&inter, own, &mut first, |source, rank| node(source) != node(rank));
    let near: Vec<&GroupPart> = parts.iter().map(|part| &part.near).collect();
    let forward: Vec<&GroupPart> = parts.iter().map(|part| &part.forward).collect();
    let mut second: Vec<Vec<usize>> = received.iter().map(|rows| vec![usize::MAX; rows.len()]).collect();
    group_cast(&near, own, &mut second, |source, rank| node(source) == node(rank));
    group_cast(&forward, &first, &mut second, |source, rank| node(source) == node(rank));
    for rank in 0..ranks {
        assert!(first[rank].iter().all(|&row| row != usize::MAX), "the buffer of step one is packed");
        assert_eq!(second[rank], received[rank], "the buffer of rank {rank}");
    }

    // Every row enters a foreign node that needs it once.
    let mut wanted = BTreeSet::new();
    for (rank, rows) in second.iter().enumerate() {
        for row in rows.iter().filter(|row| **row != usize::MAX) {
            let owner =
                own.iter().position(|own| own.binary_search(row).is_ok()).expect("every row has an owner");
            if node(owner) != node(rank) {
                wanted.insert((node(rank), *row));
            }
        }
    }
    let mut entered: Vec<(usize, usize)> = first
        .iter()
        .enumerate()
        .flat_map(|(rank, rows)| rows.iter().map(move |&row| (node(rank), row)))
        .collect();
    entered.sort_unstable();
    assert_eq!(entered, wanted.into_iter().collect::<Vec<_>>());

    // Backwards, every owner's sum has one partial sum from every rank that held a copy.
    let partials: Vec<Vec<u64>> = (0..ranks).map(|rank| vec![1 << rank; second[rank].len()]).collect();
    let zeros =
        |rows: &[Vec<usize>]| -> Vec<Vec<u64>> { rows.iter().map(|rows| vec![0; rows.len()]).collect() };
    let (mut sums, mut partial_sums) = (zeros(own), zeros(&first));
    group_reduce(&near, &partials, &mut sums);
    group_reduce(&forward, &partials, &mut partial_sums);
    group_reduce(&inter, &partial_sums, &mut sums);
    for owner in 0..ranks {
        for (row, &sum) in own[owner].iter().zip(&sums[owner]) {
            let holders = (0..ranks).filter(|&rank| second[rank].contains(row));
            assert_eq!(sum, holders.map(|rank| 1 << rank).sum::<u64>());
        }
    }
    entered.len() as u64
}

fn check_stage(plan: &Plan, stages: &[&StagePlan], parts: &[&TwoLevelPart], topology: &Topology) -> u64 {
    let own: Vec<Vec<usize>> = plan.ranks.iter().map(|rank| rows(&rank.k_ranges)).collect();
    // Own rows do not travel.
    let received = stages
        .iter()
        .map(|stage| [vec![usize::MAX; stage.own_rows], rows(&stage.recv_ranges)].concat())
        .collect::<Vec<_>>();
    check_levels(&own, &received, parts, topology)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rows_arrive_and_cross_once(mask in masks(300), config in configs()) {
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        let topology = config.topology;
        let two_level = plan.two_levels(&topology);
        prop_assert_eq!(&two_level, &plan.two_levels(&topology));
        let mut crossed = 0;
        let directions: [(StagesOf, _); 2] =
            [(|rank| &rank.forward, &two_level.forward), (|rank| &rank.backward, &two_level.backward)];
        for (index, (stages, parts)) in directions.into_iter().enumerate() {
            for stage in 0..stages(plan.rank(0)).len() {
                let stage_plans: Vec<&StagePlan> = plan.ranks.iter().map(|rank| &stages(rank)[stage]).collect();
                let stage_parts: Vec<&TwoLevelPart> = parts.iter().map(|parts| &parts[stage]).collect();
                let rows = check_stage(&plan, &stage_plans, &stage_parts, &topology);
                crossed += if index == 0 { rows } else { 0 };
            }
        }
        prop_assert_eq!(two_level.inter_node_rows(), crossed);
        let whole = |rank: &RankPlan| StagePlan {
            recv_ranges: rank.backward.iter().flat_map(|stage| &stage.recv_ranges).copied().collect(),
            own_rows: rank.backward.iter().map(|stage| stage.own_rows).sum(),
            ..rank.backward[0].clone()
        };
        let whole: Vec<StagePlan> = plan.ranks.iter().map(whole).collect();
        let parts: Vec<&TwoLevelPart> = two_level.whole.iter().collect();
        let once = check_stage(&plan, &whole.iter().collect::<Vec<_>>(), &parts, &topology);
        prop_assert!(once <= two_level.backward_inter_node_rows());
        prop_assert!(crossed <= plan.flat_inter_node_rows(&topology));
        if topology.nodes() == 1 {
            prop_assert_eq!(crossed, 0);
            for (rank, parts) in plan.ranks.iter().zip(&two_level.forward) {
                for (stage, part) in rank.forward.iter().zip(parts) {
                    prop_assert_eq!(&stage.part, &part.near);
                }
            }
        }
    }

    /// Queries that travel: they arrive and cross once, and results come to places among the offloaded rows, of which each has its own.
    #[test]
    fn queries_arrive_and_cross_once(mask in masks(400), config in configs()) {
        let config = PlanConfig { query_exchange: QueryExchange::FewestBytes, ..config };
        let plan = plan_mask(&mask, &spec(), &config).unwrap();
        let topology = config.topology;
        let exchange = plan.two_levels(&topology);
        let hosted: Vec<&HostedWork> = plan.ranks.iter().filter_map(|rank| rank.hosted.as_ref()).collect();
        prop_assert_eq!(hosted.len(), exchange.hosted.len());
        prop_assume!(!hosted.is_empty());
        let own: Vec<Vec<usize>> = plan.ranks.iter().map(|rank| rows(&rank.q_ranges)).collect();
        let received: Vec<Vec<usize>> = hosted.iter().map(|work| rows(&work.q_ranges)).collect();
        let parts: Vec<&TwoLevelPart> = exchange.hosted.iter().collect();
        let crossed = check_levels(&own, &received, &parts, &topology);
        prop_assert_eq!(crossed, exchange.query_inter_node_rows());
        prop_assert!(crossed <= plan.flat_query_inter_node_rows(&topology));
        // Inside nodes, then between them: each place gets what the flat exchange brings.
        let reduced = |of: fn(&HostedWork, &TwoLevelPart) -> [GroupPart; 2]| {
            let steps: Vec<[GroupPart; 2]> = hosted.iter().zip(&parts).map(|(work, part)| of(work, part)).collect();
            let step = |at: usize| steps.iter().map(|steps| &steps[at]).collect::<Vec<_>>();
            let partials: Vec<Vec<u64>> =
                hosted.iter().enumerate().map(|(rank, work)| vec![1 << rank; work.q_rows]).collect();
            let mut far: Vec<Vec<u64>> = parts.iter().map(|part| vec![0; part.inter_rows]).collect();
            let forward: Vec<&GroupPart> = parts.iter().map(|part| &part.forward).collect();
            group_reduce(&forward, &partials, &mut far);
            let mut places: Vec<Vec<u64>> = hosted.iter().map(|work| vec![0; work.offloaded_rows()]).collect();
            group_reduce(&step(0), &partials, &mut places);
            group_reduce(&step(1), &far, &mut places);
            places
        };
        let flat = reduced(|work, _| [work.owner_part(), GroupPart::default()]);
        prop_assert_eq!(reduced(|work, part| [work.with_places(&part.near), work.with_places(&part.inter)]), flat);
        for (work, part) in hosted.iter().zip(&parts) {
            let named: Vec<usize> = work.with_places(&part.near).owned.iter().map(|split| split.rows.len()).collect();
            prop_assert_eq!(named.iter().sum::<usize>(), work.offloaded_rows(), "places are begun");
        }
    }
}
