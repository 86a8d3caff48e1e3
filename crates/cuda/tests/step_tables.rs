//! Step tables for GPUs: made without one, taken by ranks that have one (a driver without a GPU), refused where they are not theirs.

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, StageCount, plan_mask};
use counterpoint_cuda::{Arch, CudaMachine, DescribedGpu, DriverCalls, Timing};
use counterpoint_exec::{
    AttentionTask, Backend, DescribedCpu, DescribedDevice, ExecError, Group, Pass, StepTables, TablesFault,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, lower_attention_backward, lower_attention_forward,
};
use sha2::{Digest, Sha256};

mod hollow_driver;
mod support;

use hollow_driver::processes::config;

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

const MASKS: [&str; 3] = [
    "varlen-causal:lengths=300,1900,60,700,1136",
    "full:2048",
    "sliding-window:4096,left=511,right=0",
];

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
    const FORMAT: &str = "(tables 1)";
    const RECORDED: &str = "recorded";
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
        "tables of {version} are other than those recorded of {FORMAT}, now {found}: count up FORMAT in \
         crates/exec/src/attention/step_tables.rs, and record them here"
    );
}

/// Made from what its description says in another process, they cost a rank the same copies, and nothing else of the driver.
#[test]
fn ranks_upload_what_was_made_ahead() {
    if support::no_compiler() || !hollow_driver::is_loaded("ranks_upload_what_was_made_ahead") {
        return;
    }
    for ranks in [1, 2] {
        let machine = CudaMachine::for_ranks(ranks, Timing::Off).unwrap();
        let group = Group::connect(&machine, ranks, config()).unwrap();
        let described = serde_json::to_string(&group.ranks()[0].backend().described()).unwrap();
        for (mask, deterministic) in MASKS.iter().flat_map(|mask| [(mask, false), (mask, true)]) {
            let plan = plan(mask, ranks);
            let task = task(&plan, deterministic);
            let gpu: DescribedGpu = serde_json::from_str(&described).unwrap();
            let bytes = (0..ranks).map(|rank| task.tables(&gpu, rank).unwrap().to_bytes());
            let ahead: Vec<Tables> = bytes.map(|bytes| Tables::from_bytes(&bytes).unwrap()).collect();
            // The first one loads kernels.
            drop(group.attention_of(&task).unwrap());
            let (made, asked_made) = DriverCalls::of(|| group.attention_of(&task)).unwrap();
            let (given, asked_given) = DriverCalls::of(|| group.attention_with(&task, &ahead)).unwrap();
            let (made, given) = (made.unwrap(), given.unwrap());
            assert_eq!(asked_given.uploads(), asked_made.uploads(), "{mask}, {ranks} ranks");
            assert_eq!(asked_given.synchronizations(), asked_made.synchronizations(), "{mask}, {ranks} ranks");
            assert_eq!(given.forward_operations(), made.forward_operations());
            assert_eq!(given.backward_operations(), made.backward_operations());
        }
        group.close().unwrap();
    }
}

#[test]
fn tables_for_another_device_are_refused() {
    if support::no_compiler() || !hollow_driver::is_loaded("tables_for_another_device_are_refused") {
        return;
    }
    let machine = CudaMachine::for_ranks(1, Timing::Off).unwrap();
    let group = Group::connect(&machine, 1, config()).unwrap();
    let own = group.ranks()[0].backend().described();
    let plan = plan(MASKS[0], 1);
    let task = task(&plan, false);
    let fewer = DescribedGpu { sm_count: own.sm_count - 18, ..own.clone() };
    let error = group.attention_with(&task, &[task.tables(&fewer, 0).unwrap()]).map(drop).unwrap_err();
    assert!(matches!(&error, ExecError::Tables { rank: 0, reason: TablesFault::Device { .. } }), "{error}");
    assert_eq!(
        error.to_string(),
        format!(
            "rank 0 does not take these step tables: they are for {fewer}, and this rank is on {own}; make them by the \
             description of the rank's group"
        )
    );
    let of_cpu = task.tables(&DescribedCpu, 0).unwrap().to_bytes();
    let fault = Tables::from_bytes(&of_cpu).unwrap_err();
    assert_eq!(fault, TablesFault::Device { theirs: "a CPU".to_owned(), own: "a GPU".to_owned() });
    let portable = DescribedGpu { arch: Arch::SM_90, ..own };
    let error = group.attention_with(&task, &[task.tables(&portable, 0).unwrap()]).map(drop).unwrap_err();
    assert!(matches!(error, ExecError::Tables { reason: TablesFault::Device { .. }, .. }), "{error}");
    group.close().unwrap();
}
