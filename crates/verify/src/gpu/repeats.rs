//! Group collectives, called again and again with random delays.

use std::time::Duration;

use counterpoint_exec::ExecError;
use counterpoint_plan::DType;
use counterpoint_reference::selftest::SelfCheck;

use counterpoint_bench::gpu::collective::{BenchCollective, CollectiveCase, repeat_collective};
use counterpoint_cuda::CudaMachine;

/// A group-cast and a group-reduce between all GPUs, `calls` times each, with other rows in every call and random delays before every
/// other one: no element may be of another call.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_repeats(machine: &CudaMachine, calls: usize) -> Result<Vec<SelfCheck>, ExecError> {
    let ranks = machine.devices().len().max(2);
    let examine = |(collective, name): (BenchCollective, &str)| {
        let case = CollectiveCase {
            collective,
            ranks,
            dtype: DType::Bf16,
            row_elements: 128,
            rows: 96 * (ranks - 1),
            split_rows: 32,
            warmups: 0,
            iterations: 1,
            samples: 1,
            limit: Duration::from_secs(60),
        };
        let wrong = repeat_collective(machine, &case, calls)?;
        let (transport, gpus) = (machine.transport(), machine.devices().len());
        let name = format!(
            "{calls} {name} by {transport}, {ranks} ranks on {gpus} GPUs, random delays, wrong elements"
        );
        Ok(SelfCheck::of(name, 0, wrong as f64, 0.0))
    };
    [(BenchCollective::GroupCast, "group-casts"), (BenchCollective::GroupReduce, "group-reduces")]
        .into_iter()
        .map(examine)
        .collect()
}
