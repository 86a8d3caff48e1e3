//! The CUDA backend and transport against the CPU's, with several ranks on one GPU. Each test says so and passes where there
//! is no GPU or no compiler.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_cuda::kernel::{
    Cast, ReduceTypes, RowCopy, RowCopyTensor, RowMove, RowReduce, RowReduceSpec, Scalar,
};
use counterpoint_cuda::{CudaMachine, DeviceBuffer, Event, GraphRun, Stream, StreamPriority, Timing};
use counterpoint_exec::{
    Backend, Communicator, CpuMachine, ExecError, HostData, HostTensor, Machine, Prepared, Reduce, Transport,
    World, WorldConfig,
};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, GroupPart, OwnedSplit, Plan, PlanConfig, RemoteSplit};
use counterpoint_schedule::{
    Accumulate, BarrierId, BufferId, BufferRole, BufferSpec, EventId, GradientReduction, GroupCast, Op,
    OverlapPolicy, Program, ProgramOp, ReduceOp, SignalId, SpanKind, StreamId, StreamKind, StreamSpec,
    lower_attention_backward, lower_attention_forward,
};
use half::{bf16, f16};
use rand::RngExt;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn machine(timing: Timing) -> Option<CudaMachine> {
    match CudaMachine::open(timing) {
        Ok(machine) => Some(machine),
        Err(error) if error.is_missing() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn world(size: usize) -> Arc<World> {
    World::new(size, WorldConfig { limit: Duration::from_secs(20), poison: true, ..WorldConfig::default() })
}

fn tensor(shape: &[usize], dtype: DType, rng: &mut ChaCha8Rng) -> HostTensor {
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|_| rng.random_range(-2.0f32..2.0)).collect();
    let data = match dtype {
        DType::F64 => HostData::F64(values.into_iter().map(f64::from).collect()),
        DType::F32 => HostData::F32(values),
        DType::Bf16 => HostData::Bf16(values.into_iter().map(bf16::from_f32).collect()),
        DType::F16 => HostData::F16(values.into_iter().map(f16::from_f32).collect()),
    };
    HostTensor::new(shape.to_vec(), data)
}

/// Every rank's part and the rows of its owned and remote tensors.
struct Pattern {
    parts: Vec<GroupPart>,
    owned_rows: Vec<usize>,
    remote_rows: Vec<usize>,
}

/// Splits in random places with random destinations (none, some, all, the rank itself), received with gaps between them.
fn pattern(world_size: usize, most_rows: usize, rng: &mut ChaCha8Rng) -> Pattern {
    let mut parts = vec![GroupPart::default(); world_size];
    let owned_rows: Vec<usize> = (0..world_size).map(|_| rng.random_range(0..most_rows)).collect();
    for (part, &rows) in parts.iter_mut().zip(&owned_rows) {
        let mut start = 0;
        while start < rows {
            let end = rng.random_range(start..=rows);
            let chance = rng.random_range(0.0..1.0);
            let ranks = (0..world_size as u32).filter(|_| rng.random_bool(chance)).collect();
            part.owned.push(OwnedSplit { rows: Range::new(start, end), ranks });
            start = end + rng.random_range(0..3);
        }
    }
    let mut remote_rows = vec![0; world_size];
    for rank in 0..world_size {
        let mut waiting: Vec<(u32, Vec<usize>)> = (0..world_size as u32)
            .map(|source| {
                let given =
                    parts[source as usize].owned.iter().filter(|split| split.ranks.contains(&(rank as u32)));
                (source, given.map(|split| split.rows.len()).rev().collect())
            })
            .collect();
        while waiting.iter().any(|(_, lengths)| !lengths.is_empty()) {
            let next = rng.random_range(0..world_size);
            let (source, lengths) = &mut waiting[next];
            let Some(length) = lengths.pop() else { continue };
            let start = remote_rows[rank] + rng.random_range(0..3);
            let rows = Range::new(start, start + length);
            parts[rank].remote.push(RemoteSplit { rows, rank: *source });
            remote_rows[rank] = rows.end;
        }
    }
    Pattern { parts, owned_rows, remote_rows }
}

/// What one random call does; `None` for a group-cast.
struct Call {
    wire: DType,
    reduce: Option<Reduce>,
}

/// Runs one collective on every rank of a machine, `rounds` times on the same inputs, and gives the outputs.
fn collective<M: Machine>(
    machine: &M,
    pattern: &Pattern,
    call: &Call,
    inputs: &[Vec<HostTensor>],
    outputs: &[Vec<HostTensor>],
) -> Vec<Vec<HostTensor>>
where
    M::Backend: Sync,
    M::Transport: Sync,
    <M::Backend as Backend>::Stream: Sync,
{
    let world = world(pattern.parts.len());
    let ranks = machine.connect(&world).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .zip(&pattern.parts)
            .zip(inputs.iter().zip(outputs))
            .map(|(((backend, transport), part), (inputs, outputs))| {
                scope.spawn(move || {
                    let communicator = Communicator::new(backend, transport).unwrap();
                    let backend = communicator.backend();
                    let upload = |tensors: &[HostTensor]| -> Vec<_> {
                        tensors.iter().map(|tensor| backend.upload("t", tensor.clone()).unwrap()).collect()
                    };
                    let (inputs, outputs) = (upload(inputs), upload(outputs));
                    let pairs: Vec<_> = inputs.iter().zip(&outputs).collect();
                    let handle = match call.reduce {
                        None => communicator.group_cast("call", part, &pairs, call.wire),
                        Some(reduce) => communicator.group_reduce("call", part, &pairs, reduce),
                    };
                    handle.unwrap().synchronize().unwrap();
                    outputs.iter().map(|output| backend.download(output).unwrap()).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn one_of<T: Copy>(choices: &[T], rng: &mut ChaCha8Rng) -> T {
    choices[rng.random_range(0..choices.len())]
}

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Bit for bit, but for logarithmic merges, whose exponentials differ in their last bits.
#[test]
fn collectives_equal_the_cpus() {
    let Some(cuda) = machine(Timing::Spans) else { return };
    let cpu = CpuMachine::new(0, None).unwrap();
    for seed in 0..60 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let world_size = rng.random_range(1..6);
        let most_rows = one_of(&[5, 40, 300], &mut rng);
        let pattern = pattern(world_size, most_rows, &mut rng);
        let kind =
            one_of(&[None, None, Some(ReduceOp::Sum), Some(ReduceOp::Avg), Some(ReduceOp::Lse)], &mut rng);
        let (from, wire) = (one_of(&DTYPES, &mut rng), one_of(&DTYPES, &mut rng));
        let (sum, to) = (one_of(&DTYPES, &mut rng), one_of(&DTYPES, &mut rng));
        let accumulate = one_of(&[Accumulate::Start, Accumulate::Continue], &mut rng);
        let reduce = kind.map(|op| Reduce { op, accumulate, wire_dtype: wire, reduce_dtype: sum });
        let call = Call { wire, reduce };
        let heads = rng.random_range(1..4);
        let dim = one_of(&[1, 3, 8, 64, 128, 300], &mut rng);
        let shapes: Vec<Vec<usize>> = match kind {
            Some(ReduceOp::Lse) => vec![vec![heads, dim], vec![heads]],
            _ => (0..rng.random_range(1..4))
                .map(|_| vec![heads, one_of(&[1, 3, 8, 64, 128], &mut rng)])
                .collect(),
        };
        let mut tensors = |rows: &[usize], dtype: DType| -> Vec<Vec<HostTensor>> {
            let of_rank = |&rows: &usize| {
                let one = |(index, shape): (usize, &Vec<usize>)| {
                    let is_lse = kind == Some(ReduceOp::Lse) && index == 1;
                    let shape: Vec<usize> = [rows].into_iter().chain(shape.iter().copied()).collect();
                    tensor(&shape, if is_lse { DType::F32 } else { dtype }, &mut rng)
                };
                shapes.iter().enumerate().map(one).collect()
            };
            rows.iter().map(of_rank).collect()
        };
        let (inputs, outputs) = match kind {
            None => (tensors(&pattern.owned_rows, from), tensors(&pattern.remote_rows, from)),
            Some(_) => (tensors(&pattern.remote_rows, from), tensors(&pattern.owned_rows, to)),
        };
        let expected = collective(&cpu, &pattern, &call, &inputs, &outputs);
        let found = collective(&cuda, &pattern, &call, &inputs, &outputs);
        let what =
            format!("seed {seed}: {kind:?} {from:?} through {wire:?} in {sum:?} to {to:?}, {accumulate:?}");
        if kind == Some(ReduceOp::Lse) {
            let coarse = [from, wire, sum, to].contains(&DType::Bf16);
            let fine = [from, wire, sum, to].iter().all(|dtype| *dtype == DType::F32);
            let bound = if fine {
                2e-6
            } else if coarse {
                4e-2
            } else {
                6e-3
            };
            for (a, b) in expected.iter().flatten().zip(found.iter().flatten()) {
                for (a, b) in a.to_f64().into_iter().zip(b.to_f64()) {
                    assert!(a == b || (a - b).abs() <= bound * (1.0 + a.abs()), "{what}: {a} and {b}");
                }
            }
        } else {
            assert_eq!(expected, found, "{what}");
        }
    }
}

const ROWS: usize = 3000;

/// A Program that uses everything: on two ranks, two streams, events, a barrier, a signal, casts, a copy and a collective.
fn program(rank: usize, world_size: usize) -> Program {
    let buffer =
        |name: &str, dtype, rows, role| BufferSpec { name: name.into(), dtype, shape: vec![rows, 40], role };
    let all = Range::new(0, ROWS);
    let other = (rank + 1) as u32 % world_size as u32;
    let from = (rank + world_size - 1) as u32 % world_size as u32;
    let part = GroupPart {
        owned: vec![OwnedSplit { rows: all, ranks: vec![other] }],
        remote: vec![RemoteSplit { rows: all, rank: from }],
    };
    let cast = |src, dst| Op::Cast { src: BufferId(src), dst: BufferId(dst) };
    let send = |input, output| {
        let tensors = vec![(BufferId(input), BufferId(output))];
        let arrive = Some(BarrierId(0));
        Op::GroupCast(GroupCast { part: Arc::new(part.clone()), tensors, wire_dtype: DType::F32, arrive })
    };
    let ops = vec![
        (1, "send x", send(0, 1)),
        (1, "received", Op::Record(EventId(0))),
        (0, "started", Op::Await { barrier: BarrierId(0), arrivals: 1 }),
        (0, "narrow x", cast(0, 2)),
        (0, "wait", Op::Wait(EventId(0))),
        (0, "narrow received", cast(1, 3)),
        (0, "both", Op::Concat { srcs: vec![BufferId(2), BufferId(3)], dst: BufferId(4) }),
        (0, "ready", Op::Signal { signal: SignalId(0), value: 3 }),
        (1, "wait for both", Op::WaitSignal { signal: SignalId(0), value: 2 }),
        // Overwrites what the peer was given a moment ago, and is read again by it.
        (1, "widen", cast(3, 5)),
        (1, "send on", send(5, 6)),
        (1, "done", Op::Record(EventId(1))),
        (0, "wait for all", Op::Wait(EventId(1))),
        (0, "last", cast(6, 7)),
    ];
    Program {
        name: "everything".into(),
        rank,
        world_size,
        streams: [("compute", StreamKind::Compute), ("communication", StreamKind::Communication)]
            .map(|(name, kind)| StreamSpec { name: name.into(), kind })
            .to_vec(),
        buffers: vec![
            buffer("x", DType::F32, ROWS, BufferRole::Input),
            buffer("received", DType::F32, ROWS, BufferRole::Scratch),
            buffer("narrow_x", DType::Bf16, ROWS, BufferRole::Scratch),
            buffer("narrow_received", DType::Bf16, ROWS, BufferRole::Scratch),
            buffer("both", DType::Bf16, 2 * ROWS, BufferRole::Output),
            buffer("widened", DType::F32, ROWS, BufferRole::Scratch),
            buffer("twice", DType::F32, ROWS, BufferRole::Scratch),
            buffer("last", DType::F16, ROWS, BufferRole::Output),
        ],
        slots: Vec::new(),
        num_events: 2,
        num_barriers: 1,
        num_signals: 1,
        policy: OverlapPolicy::default(),
        ops: ops
            .into_iter()
            .map(|(stream, label, op)| ProgramOp {
                stream: StreamId(stream),
                stage: None,
                label: label.into(),
                op,
            })
            .collect(),
    }
}

type Rank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;

fn prepare<M: Machine>(machine: &M, programs: Vec<Program>) -> Vec<Rank<M>> {
    let world = world(programs.len());
    let ends = machine.connect(&world).unwrap();
    programs
        .into_iter()
        .zip(ends)
        .map(|(p, (backend, transport))| Rank::<M>::new(p, backend, transport).unwrap())
        .collect()
}

fn outputs<B: Backend, T: Transport<B>>(rank: &Prepared<B, T>) -> Vec<HostTensor> {
    ["both", "last"].iter().map(|name| rank.backend().download(rank.buffer(name).unwrap()).unwrap()).collect()
}

#[test]
fn a_program_of_everything_runs_again_and_again() {
    let Some(cuda) = machine(Timing::Spans) else { return };
    let cpu = CpuMachine::new(0, None).unwrap();
    for world_size in [2, 3, 7] {
        let programs: Vec<Program> = (0..world_size).map(|rank| program(rank, world_size)).collect();
        programs.iter().for_each(|program| program.validate().unwrap());
        let mut on_cpu = prepare(&cpu, programs.clone());
        let mut on_cuda = prepare(&cuda, programs);
        let mut rng = ChaCha8Rng::seed_from_u64(world_size as u64);
        for round in 0..20 {
            for (a, b) in on_cpu.iter_mut().zip(&mut on_cuda) {
                let x = tensor(&[ROWS, 40], DType::F32, &mut rng);
                let (on_a, on_b) =
                    (a.backend().upload("x", x.clone()).unwrap(), b.backend().upload("x", x).unwrap());
                a.bind("x", on_a).unwrap();
                b.bind("x", on_b).unwrap();
            }
            Prepared::run_ranks(&mut on_cpu).unwrap();
            let timeline = Prepared::run_ranks(&mut on_cuda).unwrap();
            for (a, b) in on_cpu.iter().zip(&on_cuda) {
                assert_eq!(outputs(a), outputs(b), "round {round}");
            }
            // Every operation has its time, in order within its stream.
            let count = |kind| timeline.spans.iter().filter(|span| span.kind == kind).count();
            assert_eq!(count(SpanKind::Compute), 5 * world_size);
            assert_eq!(count(SpanKind::Communication), 2 * world_size);
            for pair in
                timeline.spans.windows(2).filter(|p| (p[0].rank, p[0].stream) == (p[1].rank, p[1].stream))
            {
                assert!(pair[0].end <= pair[1].start + 2e-6, "{pair:?}");
            }
            assert!(timeline.makespan() < 1.0);
        }
    }
}

/// Alone, a rank sends to itself; the second Program has no collective, so that a graph can hold it.
#[test]
fn a_graph_gives_the_same_results() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let mut whole = program(0, 1);
    whole.ops.retain(|op| !matches!(op.op, Op::GroupCast(_) | Op::Await { .. }));
    for op in &mut whole.ops {
        match &mut op.op {
            Op::Cast { src, .. } if src.0 == 1 => *src = BufferId(0),
            Op::Cast { src, .. } if src.0 == 6 => *src = BufferId(5),
            _ => {}
        }
    }
    whole.validate().unwrap();
    let mut rank = prepare(&cuda, vec![whole]).remove(0);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let x = rank.backend().upload("x", tensor(&[ROWS, 40], DType::F32, &mut rng)).unwrap();
    rank.bind("x", x.clone()).unwrap();
    rank.run(&[]).unwrap();
    let direct = outputs(&rank);
    let mut graph = GraphRun::capture(&mut rank).unwrap();
    for name in ["both", "last"] {
        graph.prepared().backend().poison(graph.prepared().buffer(name).unwrap()).unwrap();
    }
    graph.start().unwrap();
    graph.finish().unwrap();
    assert_eq!(outputs(graph.prepared()), direct);
    let begin = Instant::now();
    for _ in 0..100 {
        graph.start().unwrap();
        graph.finish().unwrap();
    }
    let by_graph = begin.elapsed() / 100;
    drop(graph);
    let begin = Instant::now();
    for _ in 0..100 {
        rank.start(Instant::now()).unwrap();
        rank.finish().unwrap();
    }
    // The direct run fills its outputs with NaN first, as all runs of this file do.
    println!(
        "a run of {} operations: {:?} by graph, {:?} without",
        rank.program().ops.len(),
        by_graph,
        begin.elapsed() / 100
    );
    assert_eq!(outputs(&rank), direct);
}

/// All ranks of a Program with collectives, in one graph.
#[test]
fn a_graph_holds_several_ranks() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let world_size = 3;
    let mut ranks = prepare(&cuda, (0..world_size).map(|rank| program(rank, world_size)).collect());
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    for rank in &mut ranks {
        let x = rank.backend().upload("x", tensor(&[ROWS, 40], DType::F32, &mut rng)).unwrap();
        rank.bind("x", x).unwrap();
    }
    Prepared::run_ranks(&mut ranks).unwrap();
    let direct: Vec<_> = ranks.iter().map(outputs).collect();
    let mut graph = GraphRun::capture_ranks(&mut ranks).unwrap();
    for _ in 0..3 {
        for rank in graph.ranks() {
            ["both", "last"]
                .iter()
                .for_each(|name| rank.backend().poison(rank.buffer(name).unwrap()).unwrap());
        }
        graph.start().unwrap();
        graph.finish().unwrap();
        assert_eq!(graph.ranks().iter().map(outputs).collect::<Vec<_>>(), direct);
    }
    let begin = Instant::now();
    for _ in 0..100 {
        graph.start().unwrap();
        graph.finish().unwrap();
    }
    println!("a run of {world_size} ranks: {:?} by graph", begin.elapsed() / 100);
    drop(graph);
    let error = GraphRun::capture_ranks(&mut ranks[..2]).err().unwrap();
    assert!(error.to_string().contains("all 3 ranks"), "{error}");
    Prepared::run_ranks(&mut ranks).unwrap();
    assert_eq!(ranks.iter().map(outputs).collect::<Vec<_>>(), direct);
}

#[test]
fn who_does_not_come_is_named() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let world = World::new(2, WorldConfig { limit: Duration::from_millis(500), ..WorldConfig::default() });
    let mut ends = cuda.connect(&world).unwrap();
    let (backend, transport) = ends.remove(0);
    let mut rank = Prepared::new(program(0, 2), backend, transport).unwrap();
    let x = rank.backend().upload("x", HostTensor::zeros(vec![ROWS, 40], DType::F32)).unwrap();
    let began = Instant::now();
    let error = rank.run(&[("x", x)]).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(matches!(&error, ExecError::Stalled(stall) if stall.rank == 0 && stall.culprit == 1), "{error}");
    println!("{error}");
    // The device is not left waiting for anything.
    cuda.devices()[0].synchronize().unwrap();
}

#[test]
fn who_disagrees_is_named() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let mut programs: Vec<Program> = (0..2).map(|rank| program(rank, 2)).collect();
    programs[1].ops[0].label = "another".into();
    let mut ranks = prepare(&cuda, programs);
    for rank in &mut ranks {
        let x = rank.backend().upload("x", HostTensor::zeros(vec![ROWS, 40], DType::F32)).unwrap();
        rank.bind("x", x).unwrap();
    }
    let error = Prepared::run_ranks(&mut ranks).unwrap_err();
    assert!(matches!(error, ExecError::CollectiveOrder { sequence: 0, .. }), "{error}");
    cuda.devices()[0].synchronize().unwrap();
}

#[test]
fn f64_is_refused_with_a_reason() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let mut program = program(0, 1);
    program.buffers[7].dtype = DType::F64;
    let world = world(1);
    let (backend, transport) = cuda.connect(&world).unwrap().remove(0);
    let error = Prepared::new(program, backend, transport).err().unwrap();
    assert!(
        matches!(&error, ExecError::Program { reason, .. } if reason.contains("`last` is F64")),
        "{error}"
    );
}

/// Rates of the helper kernels beside the driver's own copy, in the same run: `--ignored --nocapture` prints them.
#[test]
#[ignore = "a measurement"]
fn rates() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let device = &cuda.devices()[0];
    let stream = Stream::new(device, StreamPriority::High).unwrap();
    let bytes = 1usize << 30;
    let (a, b) = (DeviceBuffer::new(device, bytes).unwrap(), DeviceBuffer::new(device, bytes).unwrap());
    let (c, d) = (DeviceBuffer::new(device, bytes).unwrap(), DeviceBuffer::new(device, bytes).unwrap());
    for buffer in [&a, &b, &c, &d] {
        buffer.fill_words(&stream, 0x3f3f_3f3f).unwrap();
    }
    let copy = seconds(&stream, || b.copy_from(&stream, 0, &a).unwrap());
    let reference = 2.0 * bytes as f64 / copy;
    println!("{:44} {:7.0} GB/s", "cuMemcpyDtoD, read and write", reference / 1e9);
    let report = |what: &str, moved: f64, seconds: f64| {
        let rate = moved / seconds;
        println!("{what:44} {:7.0} GB/s, {:.3} of the copy", rate / 1e9, rate / reference);
    };
    let again = seconds(&stream, || b.copy_from(&stream, 0, &a).unwrap());
    report("cuMemcpyDtoD again", 2.0 * bytes as f64, again);
    for (row, run) in [(2048u64, 1usize), (2048, 128), (2048, 4096), (256, 1), (1030, 7)] {
        // k and v of half the bytes each, every other run of rows.
        let rows = (bytes as u64 / 2 / row) as usize;
        let moves: Vec<RowMove> = (0..rows / (2 * run))
            .map(|i| RowMove {
                peer: i % 2,
                from: Range::new(2 * i * run, (2 * i + 1) * run),
                to: Range::new(i * run, (i + 1) * run),
            })
            .collect();
        let moved: usize = moves.iter().map(|step| step.from.len()).sum();
        let tensor = RowCopyTensor { scalar: Scalar::Bf16, row_elements: row / 2, wire: Scalar::Bf16 };
        let work = RowCopy::new(&stream, &[tensor; 2], &moves).unwrap();
        let half = bytes as u64 / 2;
        let source = |_: usize, tensor: usize| a.address() + tensor as u64 * half;
        // SAFETY: all rows are inside of the halves of the two buffers.
        let time = seconds(&stream, || unsafe {
            work.launch(&stream, source, &[b.address(), b.address() + half]).unwrap();
        });
        report(&format!("row copy, rows of {row} B, runs of {run}"), 4.0 * (moved as u64 * row) as f64, time);
    }
    for (peers, run) in [(1usize, 128usize), (2, 128), (3, 1)] {
        let row_elements = 1024u64;
        let rows = bytes / 4 / row_elements as usize / 2;
        let moves: Vec<RowMove> = (0..rows / run)
            .flat_map(|i| {
                (0..peers).map(move |peer| RowMove {
                    peer,
                    from: Range::new(i * run, (i + 1) * run),
                    to: Range::new(i * run, (i + 1) * run),
                })
            })
            .collect();
        let f32s =
            ReduceTypes { partial: Scalar::F32, wire: Scalar::F32, sum: Scalar::F32, result: Scalar::F32 };
        let spec = RowReduceSpec {
            op: ReduceOp::Sum,
            accumulate: Accumulate::Continue,
            types: f32s,
            rows,
            row_elements,
        };
        let work = RowReduce::new(&stream, &spec, &moves).unwrap();
        let sources = [a.address(), c.address(), d.address()];
        // SAFETY: all rows are inside of the buffers.
        let time =
            seconds(&stream, || unsafe { work.launch(&stream, |peer| sources[peer], b.address()).unwrap() });
        let moved = (rows / run * run) as f64 * row_elements as f64 * 4.0 * (peers + 2) as f64;
        report(&format!("row reduce, {peers} operands, runs of {run}"), moved, time);
    }
    for (src, dst) in [(Scalar::F32, Scalar::Bf16), (Scalar::F32, Scalar::F16), (Scalar::Bf16, Scalar::F32)] {
        let cast = Cast::new(device, src, dst).unwrap();
        let count = bytes as u64 / 4;
        // SAFETY: both buffers hold that many elements of 4 bytes.
        let time =
            seconds(&stream, || unsafe { cast.launch(&stream, a.address(), b.address(), count).unwrap() });
        report(&format!("cast {src:?} to {dst:?}"), (count * (src.bytes() + dst.bytes())) as f64, time);
    }
}

/// What a graph saves of a run of attention, host and device together: `--ignored --nocapture` prints it.
#[test]
#[ignore = "a measurement"]
fn launches() {
    let Some(cuda) = machine(Timing::Off) else { return };
    for (seqlen, ranks) in [(512, 1), (1024, 1), (2048, 1), (4096, 1), (2048, 2), (4096, 4)] {
        let whole = Range::new(0, seqlen);
        let mask = Mask::new(seqlen, seqlen, vec![AttnSlice::new(whole, whole, MaskType::Causal)]).unwrap();
        let spec = AttentionSpec {
            heads_q: 16,
            heads_kv: 16,
            head_dim: 128,
            head_dim_v: 128,
            dtype: DType::Bf16,
            scale: 0.088,
            softcap: 0.0,
            seqlen_sink: 0,
        };
        let plan = Plan::new(&mask, &spec, &PlanConfig::new(ranks)).unwrap();
        let policy = OverlapPolicy::default();
        let forward = |rank| lower_attention_forward(&plan, rank, &spec, policy);
        let backward =
            |rank| lower_attention_backward(&plan, rank, &spec, policy, GradientReduction::PerStage);
        let passes: [(&str, Vec<Program>); 2] = [
            ("forward", (0..ranks).map(forward).collect()),
            ("backward", (0..ranks).map(backward).collect()),
        ];
        for (name, programs) in passes {
            let world = World::new(ranks, WorldConfig { poison: false, ..WorldConfig::default() });
            let ends = cuda.connect(&world).unwrap();
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            let mut prepared: Vec<Rank<CudaMachine>> = programs
                .into_iter()
                .zip(ends)
                .map(|(program, (backend, transport))| {
                    let inputs: Vec<BufferSpec> = program
                        .buffers
                        .iter()
                        .filter(|spec| spec.role == BufferRole::Input)
                        .cloned()
                        .collect();
                    let mut rank = Prepared::new(program, backend, transport).unwrap();
                    for input in inputs {
                        let data = tensor(&input.shape, input.dtype, &mut rng);
                        let buffer = rank.backend().upload(&input.name, data).unwrap();
                        rank.bind(&input.name, buffer).unwrap();
                    }
                    rank
                })
                .collect();
            let median = |mut run: Box<dyn FnMut() + '_>| {
                let mut times: Vec<Duration> = (0..200)
                    .map(|_| {
                        let begin = Instant::now();
                        run();
                        begin.elapsed()
                    })
                    .collect();
                times.sort_unstable();
                times[times.len() / 2]
            };
            let direct = median(Box::new(|| drop(Prepared::run_ranks(&mut prepared).unwrap())));
            let mut graph = GraphRun::capture_ranks(&mut prepared).unwrap();
            let by_graph = median(Box::new(|| {
                graph.start().unwrap();
                graph.finish().unwrap();
            }));
            println!("causal {seqlen}, {ranks} ranks, {name}: {direct:?} direct, {by_graph:?} by graph");
        }
    }
}

/// The fastest of some runs, by the device's clock.
fn seconds(stream: &Stream, mut work: impl FnMut()) -> f64 {
    let (start, end) = (Event::timing(stream.device()).unwrap(), Event::timing(stream.device()).unwrap());
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        start.record(stream).unwrap();
        work();
        end.record(stream).unwrap();
        end.synchronize().unwrap();
        best = best.min(end.time_since(&start).unwrap().as_secs_f64());
    }
    best
}
