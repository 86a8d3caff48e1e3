//! Lesson 6: a kernel of your own overlaps with a collective: what it has computed is gathered from all ranks while it goes on.
//!
//! Run it with `cargo run --example 06-user-kernel`, and with `-- cuda` on GPUs. Every rank has some rows of `x`; all ranks want
//! `y = x sigmoid(x)` of all rows. The kernel computes its rows in parts and raises a signal after each; a communication stream
//! waits for the signal and sends that part to everyone. The Program says so once; on CPU ranks the kernel is a closure, on GPUs it is
//! CUDA source, and any transport moves the rows.

use std::error::Error;
use std::sync::Arc;

use counterpoint::cuda::kernel::UserKernelSource;
use counterpoint::cuda::{CudaMachine, Timing};
use counterpoint::exec::{
    Backend, CpuMachine, CpuUserPart, Group, HostTensor, Machine, Prepared, WorldConfig,
};
use counterpoint::mask::Range;
use counterpoint::plan::{DType, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint::schedule::{
    BufferId, BufferRole, GroupCast, Op, OverlapPolicy, Program, ProgramBuilder, StreamKind, UserKernel,
    UserPart,
};

const COLUMNS: usize = 64;
/// Rows of a part on each rank.
const ROWS: usize = 128;
const PARTS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("cuda") => {
            let machine = CudaMachine::for_ranks(4, Timing::Spans)?;
            let ranks = machine.devices().len().max(2);
            run(&on_gpus(machine), ranks)
        }
        _ => run(&CpuMachine::new(0, None)?.with_kernel("silu", silu), 2),
    }
}

/// The kernel on the CPU: one part.
fn silu(part: CpuUserPart<'_>) {
    let CpuUserPart { reads, mut writes, .. } = part;
    let (x, y) = (reads[0].as_slice::<f32>(), writes[0].as_mut_slice::<f32>());
    for (x, y) in x.into_iter().flatten().zip(y.into_iter().flatten()) {
        *y = x / (1.0 + (-x).exp());
    }
}

/// The kernel on GPUs.
#[allow(unsafe_code)]
fn on_gpus(machine: CudaMachine) -> CudaMachine {
    let source = UserKernelSource {
        text: include_str!("silu.cu").to_owned(),
        entry: "silu".to_owned(),
        blocks: 64,
        threads: 256,
    };
    // SAFETY: it writes the elements of what its parts write and nothing else, and raises the signal of each part after its last write.
    unsafe { machine.with_kernel("silu", source) }
}

/// One rank's Program. `Program::validate` proves before anything runs that no rank reads a part that is not there.
fn program(rank: usize, ranks: usize) -> Program {
    let mut p = ProgramBuilder::new("silu and all-gather", rank, ranks, OverlapPolicy::default());
    let compute = p.stream("compute", StreamKind::Compute);
    let communication = p.stream("communication", StreamKind::Communication);
    let y = p.buffer("y", DType::F32, &[ranks * PARTS * ROWS, COLUMNS], BufferRole::Output);
    let mut buffers = |name: &str, role| -> Vec<BufferId> {
        (0..PARTS)
            .map(|part| p.buffer(&format!("{name}_{part}"), DType::F32, &[ROWS, COLUMNS], role))
            .collect()
    };
    let (x, made) = (buffers("x", BufferRole::Input), buffers("part", BufferRole::Scratch));

    let signal = p.signal();
    let parts = x.iter().zip(&made).map(|(&x, &made)| UserPart { reads: vec![x], writes: vec![made] });
    let kernel = UserKernel { kernel: "silu".to_owned(), parts: parts.collect(), signal: Some(signal) };
    // A producer is queued before what waits for it.
    p.push(compute, None, "silu", Op::UserKernel(kernel));
    for (part, &made) in made.iter().enumerate() {
        let gather = GroupCast {
            part: Arc::new(gather(ranks, part)),
            tensors: vec![(made, y)],
            wire_dtype: DType::F32,
            arrive: None,
            delivery: None,
        };
        p.push(communication, None, "wait for a part", Op::WaitSignal { signal, value: part as u64 + 1 });
        p.push(communication, None, "all-gather", Op::GroupCast(gather));
    }
    p.finish()
}

/// Which rows of a part go to whom, and where the others' go here: rank after rank, part after part.
fn gather(ranks: usize, part: usize) -> GroupPart {
    let everyone: Vec<u32> = (0..ranks as u32).collect();
    let place = |owner: usize| {
        let first = (owner * PARTS + part) * ROWS;
        RemoteSplit { rows: Range::new(first, first + ROWS), rank: owner as u32 }
    };
    // Every rank's rows are the whole of its part.
    let owned = vec![OwnedSplit { rows: Range::new(0, ROWS), ranks: everyone }];
    GroupPart { remote: (0..ranks).map(place).collect(), owned }
}

fn run<M: Machine>(machine: &M, ranks: usize) -> Result<(), Box<dyn Error>> {
    let group = Group::connect(machine, ranks, WorldConfig::default())?;
    let mut prepared = group.prepare(|rank| program(rank, ranks), None)?;
    for (rank, prepared) in prepared.iter_mut().enumerate() {
        for part in 0..PARTS {
            let name = format!("x_{part}");
            let buffer = prepared.backend().upload(&name, rows(rank, part))?;
            prepared.bind(&name, buffer)?;
        }
    }
    // More than once: signals count on, and nothing is reset.
    for _ in 0..3 {
        let timeline = Prepared::run_ranks(&mut prepared)?;
        println!("{:?}", timeline.overlap());
    }
    for rank in &prepared {
        let y = rank.buffer("y").ok_or("y is an output")?;
        let y = rank.backend().download(y)?.to_f64();
        let all = (0..ranks).flat_map(|owner| (0..PARTS).map(move |part| rows(owner, part)));
        let x: Vec<f64> = all.flat_map(|tensor| tensor.to_f64()).collect();
        assert_eq!(y.len(), x.len());
        let right = |(y, x): &(&f64, &f64)| (*y - *x / (1.0 + (-*x).exp())).abs() < 1e-5;
        let wrong = y.len() - y.iter().zip(&x).filter(right).count();
        println!("rank {}: {} elements, {wrong} wrong", rank.program().rank, y.len());
        if wrong > 0 {
            return Err("elements are wrong".into());
        }
    }
    Ok(())
}

/// Numbers without meaning.
fn rows(rank: usize, part: usize) -> HostTensor {
    let value = |index: usize| ((index * 37 + rank * 1000 + part * 11) as f32).sin() * 4.0;
    HostTensor::from_vec(vec![ROWS, COLUMNS], (0..ROWS * COLUMNS).map(value).collect())
}
