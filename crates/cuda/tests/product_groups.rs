//! Products whose groups travel under them are made ready with a driver that has no GPU: groups of rows and of columns, under every policy.

#![allow(unsafe_code)]

use counterpoint_cost::ProblemSize;
use counterpoint_cuda::{CudaMachine, Timing};
use counterpoint_exec::GemmCollectiveSpec;
use counterpoint_plan::{DType, GemmCollective, WaveGroups};
use counterpoint_schedule::OverlapPolicy;

// Ranks are threads of one process here.
#[expect(dead_code)]
mod hollow_driver;
mod support;

use hollow_driver::processes::config;

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
    for policy in [OverlapPolicy::SIGNALS, OverlapPolicy::default(), OverlapPolicy::SEQUENTIAL] {
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
