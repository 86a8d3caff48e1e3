//! What communication hides under, in stages and between nodes, and the memory that stages take.

use counterpoint_choose::{PlanConfig, QueryExchange, StageCount, plan_mask};
use counterpoint_cost::{CostModel, Link};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::*;
use counterpoint_schedule::*;

use crate::{POLICIES, cost, mask, plan, programs, spec};

/// With equal work on both ranks and computation longer than communication, only the first arrival can be exposed, and
/// stage 0 hides that one.
#[test]
fn communication_hides_completely_where_there_is_enough_computation() {
    let seqlen = 2048;
    let all = Range::new(0, seqlen);
    let mask = Mask::new(seqlen, seqlen, vec![AttnSlice::new(all, all, MaskType::Full)]).unwrap();
    let plan = plan(&mask, 2, 128, 2);
    let spec = spec(DType::Bf16, 0);
    let slow = CostModel { forward_flops_per_second: 1e8, backward_flops_per_second: 1e8, ..cost() };
    for policy in ["concurrent", "kernel-barrier"] {
        let [forward, ..] = programs(&plan, &spec, policy);
        let overlap = simulate(&forward, &Topology::flat(2), &slow).unwrap().overlap();
        assert!(overlap.communication_seconds > 0.0);
        assert!(overlap.exposed_seconds < 1e-9, "{policy}: {overlap:?}");
        assert_eq!(overlap.efficiency.map(|e| (e * 1e9).round()), Some(1e9));
    }
}

/// Where a causal mask, dispatched in runs, communicates for as long as it computes, stages hide a good part of it: no stage
/// waits for a few owners that everyone asks at once.
#[test]
fn stages_of_a_causal_mask_pay_off() {
    let (ranks, seqlen) = (8, 65_536);
    let mask = Mask::causal(seqlen).unwrap();
    let spec =
        AttentionSpec { heads_q: 64, heads_kv: 8, head_dim: 128, head_dim_v: 128, ..spec(DType::Bf16, 0) };
    let one_stage = PlanConfig { stages: StageCount::Fixed(1).into(), ..PlanConfig::new(ranks) };
    let flat = plan_mask(&mask, &spec, &one_stage).unwrap();
    let busiest = flat.ranks.iter().map(|rank| rank.recv_rows().max(rank.send_rows())).max().unwrap();
    let compute = spec.flops_forward(mask.area() / ranks as u64) / CostModel::H200.forward_flops_per_second;
    let bytes_per_second = busiest as f64 * spec.kv_row_bytes() as f64 / compute;
    let cost = CostModel { link: Link { bytes_per_second, ..CostModel::H200.link }, ..CostModel::H200 };
    let staged =
        plan_mask(&mask, &spec, &PlanConfig { stages: StageCount::Auto.into(), cost, ..one_stage }).unwrap();
    let seconds = |plan: &Plan| {
        let [forward, backward, _] = programs(plan, &spec, "concurrent");
        [forward, backward].map(|ranks| simulate(&ranks, &Topology::flat(8), &cost).unwrap().makespan())
    };
    let [forward, backward] = seconds(&staged);
    let [flat_forward, flat_backward] = seconds(&flat);
    assert!(forward < 0.85 * flat_forward, "forward {forward} s, in one stage {flat_forward} s");
    assert!(backward < 0.75 * flat_backward, "backward {backward} s, in one stage {flat_backward} s");
}

/// Barriers hold a computation back until the communication that it should hide has started, and no longer.
#[test]
fn barriers_follow_the_casts() {
    let plan = plan(&mask(&[400, 300, 300]), 3, 64, 3);
    let lower =
        |policy| lower_attention_forward(&plan, 0, &spec(DType::F32, 0), policy, KeyBlocks::Unaligned);
    let program = lower("kernel-barrier".parse().unwrap());
    let mut started = 0;
    for op in &program.ops {
        match &op.op {
            Op::GroupCast(cast) => {
                assert!(cast.arrive.is_some());
                started += 1;
            }
            Op::Await { arrivals, .. } => assert_eq!(*arrivals, started),
            _ => {}
        }
    }
    assert_eq!(started, 3);
    let plain = lower(OverlapPolicy::default());
    assert!(plain.ops.iter().all(|op| !matches!(op.op, Op::Await { .. })));
    assert_eq!(plain.num_barriers, 0);
}

/// Buffers of remote stages reuse memory, so that many stages need the memory of a few.
#[test]
fn stage_buffers_are_reused() {
    let spec = spec(DType::Bf16, 0);
    let mask = Mask::full(4096).unwrap();
    let lowered = |stages| programs(&plan(&mask, 2, 128, stages), &spec, "concurrent");
    let scratch = |program: &Program| program.bytes(|role| role == BufferRole::Scratch) as f64;
    let ([one, one_back, _], [few, few_back, _], [many, many_back, deterministic]) =
        (lowered(1), lowered(3), lowered(12));
    assert_eq!((one[0].slots.len(), few[0].slots.len(), many[0].slots.len()), (2, 6, 6));
    assert!(many[0].slots.iter().all(|slot| slot.len() == 4));
    assert_eq!((few_back[0].slots.len(), many_back[0].slots.len()), (12, 12));
    // Partial sums that wait for one reduction at the end are alive together.
    assert_eq!(deterministic[0].slots.len(), 6);
    let keys =
        one[0].bytes(|role| role == BufferRole::Scratch) as f64 - 4.0 * 2048.0 * (4.0 * 8.0 + 2.0 * 4.0);
    let saved = scratch(&one[0]) - scratch(&many[0]);
    assert!(saved > 0.5 * keys, "{saved} of {keys} bytes: stages are not all of one length");
    // Partial sums of gradients are of twice the width.
    assert!(scratch(&one_back[0]) - scratch(&many_back[0]) > 0.5 * 3.0 * keys);
    // It costs no time where stages are alike.
    let seconds = |ranks: &[Program]| simulate(ranks, &Topology::flat(2), &cost()).unwrap().makespan();
    let alone = |ranks: &[Program]| {
        let no_wait = |op: &ProgramOp| op.label != "wait for a free buffer";
        let free = |program: &Program| {
            let ops = program.ops.iter().filter(|op| no_wait(op)).cloned().collect();
            Program { slots: Vec::new(), ops, ..program.clone() }
        };
        seconds(&ranks.iter().map(free).collect::<Vec<_>>())
    };
    for ranks in [&many, &many_back] {
        assert!(seconds(ranks) <= 1.001 * alone(ranks), "{} s, {} s", seconds(ranks), alone(ranks));
    }
}

/// In two steps what crosses between nodes is what the plan says, and takes less time than fetching for every rank.
#[test]
fn two_levels_cross_once() {
    let mask = Mask::causal(8192).unwrap();
    let topology = Topology { world_size: 8, ranks_per_node: 4 };
    let network = Link { alpha_seconds: 1e-5, bytes_per_second: 2e5 };
    let cost = CostModel { network, ..cost() };
    let (accumulators, elements) = (GradientShares::Accumulators, GradientShares::Elements);
    for (dtype, stages, gradient_shares) in
        [(DType::Bf16, 1, accumulators), (DType::Bf16, 1, elements), (DType::F32, 4, elements)]
    {
        let exact = spec(dtype, 1);
        let spec = AttentionSpec { gradient_shares, ..exact };
        let flat = plan(&mask, 8, 128, stages);
        let exchange = flat.two_levels(&topology);
        let sink = |programs: &[Program]| -> u64 {
            // The sink's gradient goes through rank 0 in either.
            let far = programs.iter().filter(|program| topology.node(program.rank) != 0).count() as u64;
            2 * far * 4 * u64::from(dtype.accumulator().size() as u32)
        };
        let bytes = |programs: &[Program]| -> u64 {
            programs.iter().map(|program| program.inter_node_bytes(&topology)).sum()
        };
        let [flat_forward, flat_backward, _] = programs(&flat, &spec, "concurrent");
        let rows = flat.flat_inter_node_rows(&topology);
        assert_eq!(bytes(&flat_forward), rows * spec.kv_row_bytes() as u64);
        let both = flat.over_nodes(&topology);
        for policy in POLICIES {
            let [forward, backward, deterministic] = programs(&both, &spec, policy);
            assert_eq!(bytes(&forward), exchange.inter_node_rows() * spec.kv_row_bytes() as u64);
            let there = exchange.backward_inter_node_rows();
            let whole = exchange.whole.iter().map(|part| part.inter.send_rows()).sum();
            // One order for any number of stages wants exact partial sums.
            for (programs, back, spec) in [(&backward, there, &spec), (&deterministic, whole, &exact)] {
                let cast = there * spec.kv_row_bytes() as u64;
                let reduced = back * spec.kv_gradient_row_bytes() as u64;
                assert_eq!(bytes(programs), cast + reduced + sink(programs));
            }
            for program in forward.iter().chain(&backward).chain(&deterministic) {
                assert_eq!(program.validate(), Ok(()), "{policy} {}", program.name);
            }
            let seconds = |ranks: &[Program]| simulate(ranks, &topology, &cost).unwrap().makespan();
            if policy == "concurrent" {
                let (two, one) = (seconds(&forward), seconds(&flat_forward));
                assert!(two < 0.7 * one, "forward: {two} s, flat {one} s");
                let (two, one) = (seconds(&backward), seconds(&flat_backward));
                assert!(two < 0.7 * one, "backward: {two} s, flat {one} s");
            }
        }
    }
}

/// Queries that travel cross between nodes once for each node, and so do results; both take less time than one by one.
#[test]
fn queries_cross_once() {
    let (ranks, topology) = (8, Topology { world_size: 8, ranks_per_node: 4 });
    let network = Link { alpha_seconds: 1e-5, bytes_per_second: 2e5 };
    let cost = CostModel { network, ..cost() };
    let spec = spec(DType::Bf16, 0);
    // All ranks host all of the 64 queries; then also rows that others compute with some of their keys.
    let alone = Mask::cross_full(64, 4096).unwrap();
    let query_exchange = QueryExchange::FewestBytes;
    let config = PlanConfig { query_exchange, ..PlanConfig::new(ranks) };
    let whole = plan_mask(&alone, &spec, &config).unwrap();
    let equal = AttentionSpec { heads_kv: 4, ..spec };
    let in_part = crate::last_global(&mask(&[1024; 4]), 256);
    let config = PlanConfig { chunk_size: Some(64), ..config };
    let in_part = plan_mask(&in_part, &equal, &config).unwrap();
    assert!(in_part.ranks.iter().any(RankPlan::is_hosted_in_part));
    for (name, flat, spec, most) in [("whole", whole, spec, 0.26), ("in part", in_part, equal, 0.8)] {
        let (one_by_one, both) =
            (flat.flat_query_inter_node_rows(&topology), flat.clone().over_nodes(&topology));
        let crossing = both.two_level.as_ref().unwrap().query_inter_node_rows();
        assert!(
            crossing > 0 && crossing as f64 <= most * one_by_one as f64,
            "{name}: {crossing} of {one_by_one}"
        );
        let queries = |programs: &[Program]| -> u64 {
            let of_program = |program: &Program| {
                // Without keys, whose operations have a stage.
                let ops = program.ops.iter().filter(|op| op.stage.is_none() && !op.label.contains("dk dv"));
                Program { ops: ops.cloned().collect(), ..program.clone() }.inter_node_bytes(&topology)
            };
            programs.iter().map(of_program).sum()
        };
        let seconds = |ranks: &[Program]| simulate(ranks, &topology, &cost).unwrap().makespan();
        let [flat_forward, flat_backward, _] = programs(&flat, &spec, "concurrent");
        for policy in POLICIES {
            let [forward, backward, deterministic] = programs(&both, &spec, policy);
            assert_eq!(queries(&forward), crossing * spec.hosted_forward_bytes().total() as u64, "{name}");
            for backward in [&backward, &deterministic] {
                assert_eq!(
                    queries(backward),
                    crossing * spec.hosted_backward_bytes().total() as u64,
                    "{name}"
                );
            }
            for program in forward.iter().chain(&backward).chain(&deterministic) {
                assert_eq!(program.validate(), Ok(()), "{policy} {}", program.name);
            }
            if policy == "concurrent" {
                for (two, one) in [(&forward, &flat_forward), (&backward, &flat_backward)] {
                    let (two, one) = (seconds(two), seconds(one));
                    assert!(two < 0.8 * one, "{name}: {two} s, flat {one} s");
                }
            }
        }
        assert_eq!(queries(&flat_forward), one_by_one * spec.hosted_forward_bytes().total() as u64, "{name}");
        assert_eq!(
            queries(&flat_backward),
            one_by_one * spec.hosted_backward_bytes().total() as u64,
            "{name}"
        );
    }
}
