//! Lesson 6: a kernel of one's own takes part: what it makes is gathered from all ranks while it goes on.
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
    BufferId, BufferRole, BufferSpec, GroupCast, Op, OverlapPolicy, Program, ProgramOp, SignalId, StreamId,
    StreamKind, StreamSpec, UserKernel, UserPart,
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
    // SAFETY: it writes the elements of what its parts write and nothing else, and tells of each part after its last write.
    unsafe { machine.with_kernel("silu", source) }
}

/// One rank's Program. Buffers, streams, signals and operations are plain values; `Program::validate` proves before anything runs that
/// nobody reads a part that is not there.
fn program(rank: usize, ranks: usize) -> Program {
    let buffer = |name: String, rows: usize, role: BufferRole| BufferSpec {
        name,
        dtype: DType::F32,
        shape: vec![rows, COLUMNS],
        role,
    };
    // Buffers: the parts of x, those of y, and y of all ranks.
    let mut buffers = Vec::new();
    for (name, role) in [("x", BufferRole::Input), ("part", BufferRole::Scratch)] {
        buffers.extend((0..PARTS).map(|part| buffer(format!("{name}_{part}"), ROWS, role)));
    }
    buffers.push(buffer("y".to_owned(), ranks * PARTS * ROWS, BufferRole::Output));
    let (x, made, y) = (|part| BufferId(part), |part| BufferId(PARTS + part), BufferId(2 * PARTS));

    let signal = SignalId(0);
    let parts = (0..PARTS).map(|part| UserPart { reads: vec![x(part)], writes: vec![made(part)] });
    let kernel = UserKernel { kernel: "silu".to_owned(), parts: parts.collect(), signal: Some(signal) };
    let on = |stream: usize, label: &str, op: Op| ProgramOp {
        stream: StreamId(stream),
        stage: None,
        label: label.to_owned(),
        op,
    };
    // A producer is queued before whoever waits for it.
    let mut ops = vec![on(0, "silu", Op::UserKernel(kernel))];
    for part in 0..PARTS {
        let gather = GroupCast {
            part: Arc::new(gather(ranks, part)),
            tensors: vec![(made(part), y)],
            wire_dtype: DType::F32,
            arrive: None,
            delivery: None,
        };
        ops.push(on(1, "wait for a part", Op::WaitSignal { signal, value: part as u64 + 1 }));
        ops.push(on(1, "all-gather", Op::GroupCast(gather)));
    }
    let stream = |name: &str, kind| StreamSpec { name: name.to_owned(), kind };
    Program {
        name: "silu and all-gather".to_owned(),
        rank,
        world_size: ranks,
        streams: vec![
            stream("compute", StreamKind::Compute),
            stream("communication", StreamKind::Communication),
        ],
        buffers,
        slots: Vec::new(),
        num_events: 0,
        num_barriers: 0,
        num_signals: 1,
        policy: OverlapPolicy::default(),
        ops,
    }
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
