//! Step tables for GPUs, made without one; what ranks do with them is in `fresh_masks.rs`.

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, StageCount, plan_mask};
use counterpoint_cuda::{Arch, DescribedGpu};
use counterpoint_exec::{AttentionTask, DescribedCpu, DescribedDevice, Pass, StepTables, TablesFault};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, lower_attention_backward, lower_attention_forward,
};
use sha2::{Digest, Sha256};

const SPEC: AttentionSpec = AttentionSpec {
    heads_q: 8,
    heads_kv: 2,
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

type Tables = StepTables<DescribedGpu>;

fn gpus() -> [DescribedGpu; 3] {
    let gpu = |name: &str, arch, sm_count, kilobytes: usize| DescribedGpu {
        name: name.to_owned(),
        arch,
        sm_count,
        shared_bytes_per_block: kilobytes << 10,
    };
    [
        gpu("NVIDIA H200", Arch::SM_90A, 132, 227),
        gpu("NVIDIA H100 PCIe", Arch::SM_90A, 114, 227),
        gpu("NVIDIA A100-SXM4-80GB", Arch::SM_80, 108, 163),
    ]
}

/// Of rows one rank after the other and one stage, so that it depends on no choice.
fn plan(mask: &str, ranks: usize) -> Plan {
    let mask: Mask = mask.parse().unwrap();
    let config = PlanConfig {
        chunk_size: Some(128),
        dispatch: DispatchAlgorithm::Sequential,
        stages: StageCount::Fixed(1).into(),
        ..PlanConfig::new(ranks)
    };
    plan_mask(&mask, &SPEC, &config).unwrap()
}

fn task(plan: &Plan, deterministic: bool) -> AttentionTask<'_> {
    AttentionTask::new(plan, &SPEC, Pass::ForwardBackward, OverlapPolicy::default(), deterministic)
}

const MASKS: [&str; 3] =
    ["varlen-causal:lengths=300,1900,60,700,1136", "full:2048", "sliding-window:4096,left=511,right=0"];

/// Every GPU has its own; what is read is what was written.
#[test]
fn tables_are_values() {
    for (mask, ranks, deterministic) in MASKS.into_iter().flat_map(|mask| {
        [(1, false), (2, false), (2, true)].map(|(ranks, deterministic)| (mask, ranks, deterministic))
    }) {
        let plan = plan(mask, ranks);
        let task = task(&plan, deterministic);
        let made: Vec<Vec<Tables>> = gpus()
            .iter()
            .map(|gpu| (0..ranks).map(|rank| task.tables(gpu, rank).unwrap()).collect())
            .collect();
        for tables in made.iter().flatten() {
            let bytes = tables.to_bytes();
            assert_eq!(Tables::from_bytes(&bytes).as_ref(), Ok(tables), "{mask}");
            assert!(bytes.len() < 1 << 18, "{mask}: {} bytes", bytes.len());
        }
        assert!(made.windows(2).all(|pair| pair[0] != pair[1]));
    }
}

/// Tables of one format are made by many builds, which take each other's: what they are made of may not change unnoticed.
#[test]
fn tables_of_a_format_stay_as_they_are() {
    const FORMAT: &str = "(step tables 1)";
    const RECORDED: &str = "0e6aae97891e5f95c585c279679cfa37913ab1491773a9e413b79da35d4e99dd";
    let mut digest = Sha256::new();
    for (mask, gpu) in MASKS.iter().flat_map(|mask| gpus().map(|gpu| (mask, gpu))) {
        let plan = plan(mask, 2);
        for (rank, deterministic) in [(0, false), (1, false), (1, true)] {
            let blocks = if deterministic { KeyBlocks::Aligned } else { KeyBlocks::Unaligned };
            let reduction = match deterministic {
                true => GradientReduction::Deterministic,
                false => GradientReduction::PerStage,
            };
            let policy = OverlapPolicy::default();
            let forward = lower_attention_forward(&plan, rank, &SPEC, policy, blocks);
            let backward = lower_attention_backward(&plan, rank, &SPEC, policy, reduction);
            for program in [forward, backward] {
                digest.update(serde_json::to_vec(&gpu.tables(&program).unwrap()).unwrap());
            }
        }
    }
    let found: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let one = plan(MASKS[1], 1);
    let bytes = task(&one, false).tables(&gpus()[0], 0).unwrap().to_bytes();
    let version = String::from_utf8_lossy(&bytes[5..5 + bytes[4] as usize]).into_owned();
    assert!(
        version.ends_with(FORMAT) && found == RECORDED,
        "tables of {version} are other than those recorded of {FORMAT}, now {found}: count up that of FORMAT in \
         crates/exec/src/attention/step_tables.rs, and record them here"
    );
}

#[test]
fn tables_of_another_kind_of_device_are_named() {
    let plan = plan(MASKS[0], 1);
    let of_cpu = task(&plan, false).tables(&DescribedCpu, 0).unwrap().to_bytes();
    let fault = Tables::from_bytes(&of_cpu).unwrap_err();
    assert_eq!(fault, TablesFault::Device { theirs: "a CPU".to_owned(), own: "a GPU".to_owned() });
    let of_gpu = task(&plan, false).tables(&gpus()[0], 0).unwrap().to_bytes();
    let fault = StepTables::<DescribedCpu>::from_bytes(&of_gpu).unwrap_err();
    assert_eq!(fault, TablesFault::Device { theirs: gpus()[0].to_string(), own: "a CPU".to_owned() });
}
