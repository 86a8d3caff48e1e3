//! Whether a transport's collectives start before the computation that should hide them, by Programs as layers and attention have them.

use std::sync::Arc;
use std::time::Duration;

use counterpoint_cuda::kernel::UserKernelSource;
use counterpoint_cuda::{CudaError, CudaMachine, TransportKind, exec_error};
use counterpoint_exec::{Backend, ExecError, Group, HostTensor, Prepared, WorldConfig};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{
    BufferRole, GroupCast, Op, OverlapPolicy, Program, ProgramBuilder, StreamKind, Timeline, UserKernel,
    UserPart,
};

use super::{CalibrationFault, StartCount};

/// Nanoseconds that a computation stays: the one that communication waits for, and the one that should hide it, which is far longer than
/// the rows take.
const STAYS: [(&str, u32); 2] = [("fill", 20_000), ("hide", 1_000_000)];
const ROWS: usize = 64;
const COLUMNS: usize = 1024;
/// Of every wait.
const LIMIT: Duration = Duration::from_secs(30);

/// Counts the rounds in which a group-cast by the transport of `machine` ended before the computation that is enqueued behind it, which fills
/// the GPU from when it starts: a cast that has not begun by then ends later. With `barrier` the computation waits for the cast's start
/// (`kernel-barrier`). Where ranks share a GPU the first one alone computes and receives: that others start is none of its barrier's.
///
/// # Errors
/// Whatever ends a run; when the transport cannot be had.
pub fn count_transport_starts(
    machine: &CudaMachine,
    rounds: u32,
    barrier: bool,
) -> Result<StartCount, ExecError> {
    let (ranks, shared) = (machine.devices().len().max(2), machine.devices().len() < 2);
    let machine = with_kernels(machine.clone());
    let config = WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() };
    let group = Group::connect(&machine, ranks, config)?;
    let mut prepared = group.prepare(|rank| program(rank, ranks, shared, barrier), None)?;
    for rank in &mut prepared {
        let rows = HostTensor::from_vec(vec![ROWS, COLUMNS], vec![1f32; ROWS * COLUMNS]);
        let rows = rank.backend().upload("x", rows)?;
        rank.bind("x", rows)?;
    }
    let mut communication_first = 0;
    // The first run connects the ranks.
    for round in 0..=rounds {
        let timeline = Prepared::run_ranks(&mut prepared)?;
        if round > 0 {
            communication_first += u32::from(is_hidden(&timeline)?);
        }
    }
    Ok(StartCount { rounds, communication_first })
}

/// Whether on every rank that computes the cast ended before the computation did.
fn is_hidden(timeline: &Timeline) -> Result<bool, ExecError> {
    let end = |rank: usize, label: &str| {
        timeline.spans.iter().find(|span| span.rank == rank && span.label == label).map(|span| span.end)
    };
    let ends = (0..timeline.world_size).filter_map(|rank| Some((end(rank, "hide")?, end(rank, "cast"))));
    let mut hidden = true;
    for (computed, cast) in ends {
        let missing = || CudaError::Launch {
            kernel: "a group-cast".to_owned(),
            reason: CalibrationFault::NoTime.into(),
        };
        hidden &= cast.ok_or_else(|| exec_error(0, "a count of starts", missing()))? < computed;
    }
    Ok(hidden)
}

/// One rank: a computation, behind it a cast that waits for it, and a computation that should hide the cast.
fn program(rank: usize, ranks: usize, shared: bool, barrier: bool) -> Program {
    let policy = if barrier { OverlapPolicy::KERNEL_BARRIER } else { OverlapPolicy::CONCURRENT };
    let mut p = ProgramBuilder::new("starts", rank, ranks, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let communication = p.stream("communication", StreamKind::Communication);
    let x = p.buffer("x", DType::F32, &[ROWS, COLUMNS], BufferRole::Input);
    let y = p.buffer("y", DType::F32, &[ranks * ROWS, COLUMNS], BufferRole::Output);
    let arrive = p.barrier();
    let computes = !shared || rank == 0;
    let stay = |p: &mut ProgramBuilder, (name, _): (&str, u32)| {
        let written = p.buffer(&format!("of {name}"), DType::F32, &[1, 4], BufferRole::Scratch);
        let part = UserPart { reads: Vec::new(), writes: vec![written] };
        let kernel = UserKernel { kernel: name.to_owned(), parts: vec![part], signal: None };
        p.push(compute, None, name, Op::UserKernel(kernel));
    };
    if computes {
        stay(&mut p, STAYS[0]);
        let filled = p.mark(compute, None, "filled");
        p.after(communication, None, "wait until the GPU was filled", filled);
    }
    let cast = GroupCast {
        part: Arc::new(part(rank, ranks, shared)),
        tensors: vec![(x, y)],
        wire_dtype: DType::F32,
        arrive,
        delivery: None,
    };
    p.push(communication, None, "cast", Op::GroupCast(cast));
    if computes {
        p.after_start(compute, None, "wait until the cast has started", arrive, 1);
        stay(&mut p, STAYS[1]);
    }
    p.finish()
}

/// All rows of every rank go to all others; where ranks share a GPU to the first rank alone.
fn part(rank: usize, ranks: usize, shared: bool) -> GroupPart {
    let gets = |to: usize, from: usize| to != from && (!shared || to == 0);
    let to = (0..ranks).filter(|to| gets(*to, rank)).map(|to| to as u32).collect();
    let owned = vec![OwnedSplit { rows: Range::new(0, ROWS), ranks: to }];
    let from = (0..ranks).filter(|from| gets(rank, *from));
    let place =
        |from: usize| RemoteSplit { rows: Range::new(from * ROWS, (from + 1) * ROWS), rank: from as u32 };
    GroupPart { remote: from.map(place).collect(), owned }
}

/// The same machine with kernels that hold every thread of every multiprocessor for a while.
fn with_kernels(machine: CudaMachine) -> CudaMachine {
    let sms = machine.devices().iter().map(|device| device.sm_count()).max().unwrap_or(1);
    // Threads of a multiprocessor are those of two blocks.
    let threads = match machine.devices().first().map(|device| device.capability()) {
        Some(capability) if matches!((capability.major, capability.minor), (8, 1..) | (12, _)) => 768,
        _ => 1024,
    };
    STAYS.into_iter().fold(machine, |machine, (name, nanoseconds)| {
        let text = format!(
            "#include \"user_kernel.cuh\"
extern \"C\" __global__ void __launch_bounds__({threads}, 2) {name}(const __grid_constant__ counterpoint::UserCall call) {{
  const counterpoint::u64 begin = counterpoint::global_nanoseconds();
  if (blockIdx.x == 0 && threadIdx.x < 4) counterpoint::user_tensor<float>(call, 0, 0)[threadIdx.x] = 1.0f;
  while (counterpoint::global_nanoseconds() - begin < {nanoseconds}) {{
  }}
}}"
        );
        let source = UserKernelSource { text, entry: name.to_owned(), blocks: 2 * sms, threads };
        // SAFETY: it writes the four elements that its part writes, and nobody waits for a signal of it.
        unsafe { machine.with_kernel(name, source) }
    })
}

/// The transports that ranks on so many GPUs can be counted with: the copy engines and NCCL need two, as copies within a GPU are
/// the driver's kernels.
pub fn counted_transports(gpus: usize) -> &'static [TransportKind] {
    match gpus {
        0 | 1 => &[TransportKind::Nvlink],
        _ => &[TransportKind::Nvlink, TransportKind::CopyEngine, TransportKind::NCCL],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_all_ranks_are_valid() {
        for (ranks, shared) in [(2, true), (2, false), (4, false)] {
            for barrier in [false, true] {
                let programs: Vec<Program> =
                    (0..ranks).map(|rank| program(rank, ranks, shared, barrier)).collect();
                programs.iter().for_each(|program| program.validate().unwrap());
            }
        }
    }
}
