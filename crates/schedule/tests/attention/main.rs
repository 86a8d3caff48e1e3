//! The lowerings of attention, over random masks and plans: valid, free of races, and the same work under every policy.

mod overlap;
mod properties;
mod sums;

use std::collections::BTreeMap;

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, QueryExchange, StageCount, plan_mask};
use counterpoint_cost::{CostModel, Link};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::*;
use counterpoint_schedule::*;
use proptest::prelude::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};

fn spec(dtype: DType, seqlen_sink: usize) -> AttentionSpec {
    AttentionSpec {
        heads_q: 4,
        heads_kv: 2,
        head_dim: 8,
        head_dim_v: 8,
        dtype,
        scale: 0.25,
        softcap: 0.0,
        seqlen_sink,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    }
}

fn cost() -> CostModel {
    let link = Link { alpha_seconds: 1e-5, bytes_per_second: 1e8 };
    CostModel {
        forward_flops_per_second: 1e9,
        backward_flops_per_second: 8e8,
        matmul_flops_per_second: 8e8,
        memory_bytes_per_second: 1e10,
        launch_seconds: 1e-6,
        link,
        network: link,
        copy_seconds: 0.0,
        engine: None,
        sum_bytes_per_second: None,
        packed_elements_per_second: None,
        sharing: None,
        tiles: None,
    }
}

fn config(cp_size: usize, chunk_size: usize, stages: usize) -> PlanConfig {
    PlanConfig {
        chunk_size: Some(chunk_size),
        dispatch: DispatchAlgorithm::MinHeap,
        stages: StageCount::Fixed(stages).into(),
        query_exchange: QueryExchange::Never,
        topology: Topology::flat(cp_size),
        cost: cost(),
    }
}

fn plan(mask: &Mask, cp_size: usize, chunk_size: usize, stages: usize) -> Plan {
    let config = config(cp_size, chunk_size, stages);
    plan_mask(mask, &spec(DType::Bf16, 0), &config).unwrap()
}

/// A packed batch: causal documents of the given lengths, some of them looking back at the first as well.
fn mask(lengths: &[usize]) -> Mask {
    let total = lengths.iter().sum();
    let (mut start, mut slices) = (0, Vec::new());
    for (i, &length) in lengths.iter().enumerate() {
        let own = Range::new(start, start + length);
        slices.push(AttnSlice::new(own, own, MaskType::Causal));
        if i % 2 == 1 {
            slices.push(AttnSlice::new(own, Range::new(0, lengths[0]), MaskType::Full));
        }
        start += length;
    }
    Mask::new(total, total, slices).unwrap()
}

const POLICIES: [&str; 4] = ["sequential", "concurrent", "kernel-barrier", "kernel-barrier+sm-margin=1"];

fn programs(plan: &Plan, spec: &AttentionSpec, policy: &str) -> [Vec<Program>; 3] {
    let policy = policy.parse().unwrap();
    let backward = |reduction| {
        let lower = |rank| lower_attention_backward(plan, rank, spec, policy, reduction);
        (0..plan.cp_size()).map(lower).collect()
    };
    [
        (0..plan.cp_size())
            .map(|rank| lower_attention_forward(plan, rank, spec, policy, KeyBlocks::Unaligned))
            .collect(),
        backward(GradientReduction::PerStage),
        backward(GradientReduction::Deterministic),
    ]
}

/// The operations without their place: what must not depend on the policy.
fn work(program: &Program) -> Vec<String> {
    let moves = |op: &&ProgramOp| !matches!(op.op, Op::Record(_) | Op::Wait(_) | Op::Await { .. });
    let text = |op: &ProgramOp| match &op.op {
        Op::GroupCast(cast) => format!("{:?}", GroupCast { arrive: None, ..cast.clone() }),
        Op::GroupReduce(reduce) => format!("{:?}", GroupReduce { arrive: None, ..reduce.clone() }),
        other => format!("{other:?}"),
    };
    program.ops.iter().filter(moves).map(text).collect()
}

/// Under every policy valid, free of races, with the same operations, every buffer written that is no input.
fn check(plan: &Plan, spec: &AttentionSpec) -> Result<(), TestCaseError> {
    let reference = programs(plan, spec, POLICIES[0]).map(|ranks| ranks.iter().map(work).collect::<Vec<_>>());
    for policy in POLICIES {
        for (ranks, reference) in programs(plan, spec, policy).iter().zip(&reference) {
            for (program, reference) in ranks.iter().zip(reference) {
                prop_assert_eq!(program.validate(), Ok(()), "{} {}", policy, program.name);
                prop_assert_eq!(&work(program), reference);
                let written: BTreeMap<_, _> =
                    program.ops.iter().flat_map(|op| op.op.writes()).map(|id| (id.0, ())).collect();
                for (id, buffer) in program.buffers.iter().enumerate() {
                    let is_written = written.contains_key(&id);
                    prop_assert_eq!(is_written, buffer.role != BufferRole::Input, "{}", buffer.name);
                }
            }
            let timeline = simulate(ranks, &Topology::flat(plan.cp_size()), &cost()).unwrap();
            prop_assert!(timeline.makespan() > 0.0);
        }
    }
    Ok(())
}

/// The mask with `rows` more rows and keys, the rows seeing everything.
fn last_global(mask: &Mask, rows: usize) -> Mask {
    let seqlen = mask.seqlen_q() + rows;
    let mut slices = mask.slices().to_vec();
    slices.push(AttnSlice::new(Range::new(mask.seqlen_q(), seqlen), Range::new(0, seqlen), MaskType::Full));
    Mask::new(seqlen, seqlen, slices).unwrap()
}
