//! Products whose groups travel under them are made ready with a driver that has no GPU: groups of rows and of columns, under every policy.

#![allow(unsafe_code)]

use std::time::Instant;

use counterpoint_cost::ProblemSize;
use counterpoint_cuda::{CudaMachine, Timing, TransportKind};
use counterpoint_exec::{Backend, GemmCollectiveSpec, random_tensor};
use counterpoint_plan::{DType, GemmCollective, LinearPlan, WaveGroups};
use counterpoint_schedule::{BufferRole, OverlapPolicy, lower_linear_forward};

mod hollow_driver;
mod support;

use hollow_driver::processes::{config, on_processes};

const RANKS: usize = 2;

/// Nothing asks for an address of tables before they are sent, which no rank on the CPU would notice.
#[test]
fn products_in_groups_of_every_form_are_made_ready() {
    if support::no_compiler() || !hollow_driver::is_loaded("products_in_groups_of_every_form_are_made_ready")
    {
        return;
    }
    let machine = CudaMachine::for_ranks(RANKS, Timing::Off).unwrap();
    let groups = [
        WaveGroups::Fixed(1),
        WaveGroups::Fixed(2),
        WaveGroups::Sizes(vec![64, 192]),
        WaveGroups::Columns(4),
    ];
    let waiting = "signals+sm-margin=16".parse().unwrap();
    for policy in [OverlapPolicy::SIGNALS, waiting, OverlapPolicy::default(), OverlapPolicy::SEQUENTIAL] {
        for groups in &groups {
            for collective in
                [GemmCollective::ReduceScatter, GemmCollective::AllReduce, GemmCollective::AllGather]
            {
                if collective == GemmCollective::AllGather && matches!(groups, WaveGroups::Columns(_)) {
                    continue;
                }
                let size = ProblemSize { m: 256 * RANKS, n: 4096, k: 128 };
                let spec = GemmCollectiveSpec { collective, ranks: RANKS, size, dtype: DType::Bf16 };
                let ready = spec.prepare_groups(&machine, groups.clone(), policy, config());
                let ready =
                    ready.unwrap_or_else(|error| panic!("{collective:?}, {groups:?}, {policy}: {error}"));
                assert_eq!(ready.len(), RANKS);
            }
        }
    }
}

/// Ranks that are processes enqueue products that wait for rows, with a margin in one kernel and without one behind each group, whatever brings the
/// rows.
#[test]
fn products_that_wait_for_rows_are_enqueued() {
    if support::no_compiler() || !hollow_driver::is_loaded("products_that_wait_for_rows_are_enqueued") {
        return;
    }
    let spec = GemmCollective::AllGather.layer([256 * RANKS, 4096, 128].into(), DType::Bf16);
    let plan = LinearPlan::new(spec, RANKS, WaveGroups::Fixed(2)).unwrap();
    for transport in [TransportKind::Nvlink, TransportKind::CopyEngine, TransportKind::NCCL] {
        for policy in ["signals", "signals+sm-margin=16"] {
            let policy: OverlapPolicy = policy.parse().unwrap();
            let ended = on_processes(RANKS, transport, |_, group| {
                let lower = |rank| lower_linear_forward(&plan, rank, policy);
                let mut prepared = group.prepare(lower, None).unwrap();
                let rank = &mut prepared[0];
                let inputs: Vec<_> = rank
                    .program()
                    .buffers
                    .iter()
                    .filter(|spec| spec.role == BufferRole::Input)
                    .cloned()
                    .collect();
                for spec in inputs {
                    let tensor = random_tensor(spec.shape.clone(), spec.dtype, 1);
                    let buffer = rank.backend().upload(&spec.name, tensor).unwrap();
                    rank.bind(&spec.name, buffer).unwrap();
                }
                for _ in 0..3 {
                    rank.start(Instant::now()).unwrap();
                    rank.finish().unwrap();
                }
            });
            assert_eq!(ended.len(), RANKS, "{transport}, {policy}");
        }
    }
}
