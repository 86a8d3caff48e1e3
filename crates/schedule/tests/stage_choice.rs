//! Stages that are chosen, compared with those that could have been: by the simulator, on the masks of the benchmark.

use std::path::Path;

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_cost::{CostModel, WorkerSharing};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Topology};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, Program, StartOrder, lower_attention_backward,
    lower_attention_forward, simulate,
};

const SPEC: AttentionSpec = AttentionSpec {
    heads_q: 64,
    heads_kv: 8,
    head_dim: 128,
    head_dim_v: 128,
    dtype: DType::Bf16,
    scale: 0.088,
    softcap: 0.0,
    seqlen_sink: 0,
    gradient_shares: GradientShares::Accumulators,
    max_logits: false,
    dlse: false,
};

/// Seconds of a forward and of a backward.
fn seconds(mask: &Mask, ranks: usize, stages: StageCount) -> [f64; 2] {
    let cost = CostModel { sharing: Some(WorkerSharing::H200), ..CostModel::H200 };
    let config = PlanConfig { stages: stages.into(), cost, ..PlanConfig::new(ranks) };
    let plan = plan_mask(mask, &SPEC, &config).unwrap();
    let policy = OverlapPolicy::new(StartOrder::KernelBarrier);
    let makespan = |lower: &dyn Fn(usize) -> Program| {
        let programs: Vec<Program> = (0..ranks).map(lower).collect();
        simulate(&programs, &Topology::flat(ranks), &cost).unwrap().makespan()
    };
    let reduction = GradientReduction::PerStage;
    [
        makespan(&|rank| lower_attention_forward(&plan, rank, &SPEC, policy, KeyBlocks::Unaligned)),
        makespan(&|rank| lower_attention_backward(&plan, rank, &SPEC, policy, reduction)),
    ]
}

#[test]
fn no_other_stages_are_much_faster() {
    for ranks in [2, 4] {
        let rows = 8192 * ranks;
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("../../benches/data/documents_{}k.txt", rows >> 10));
        let text = std::fs::read_to_string(path).unwrap();
        let documents =
            Documents::from_lengths(text.lines().filter_map(|line| line.trim().parse().ok())).unwrap();
        let masks = [
            Mask::full(rows),
            Mask::causal(rows),
            Mask::full(documents.clone()),
            Mask::causal(documents.clone()),
            Mask::block_causal(documents, 2048),
        ];
        for (index, mask) in masks.into_iter().enumerate() {
            let mask = mask.unwrap();
            let chosen = seconds(&mask, ranks, StageCount::Auto);
            for stages in 0..3 {
                let other = seconds(&mask, ranks, StageCount::Fixed(stages));
                for (chosen, other) in chosen.into_iter().zip(other) {
                    assert!(
                        chosen <= 1.03 * other,
                        "mask {index} on {ranks} ranks: {chosen} s, {other} s with {stages} stages"
                    );
                }
            }
        }
    }
}
