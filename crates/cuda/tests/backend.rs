//! The CUDA backend and transport against the CPU's, with several ranks on one GPU. Each test says so and passes where there
//! is no GPU or no compiler.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use counterpoint_cuda::{CudaBackend, CudaMachine, GraphRun, Timing};
use counterpoint_exec::{
    Backend, CpuMachine, ExecError, HostData, HostTensor, Machine, OpPlace, Prepared, Transport, World,
    WorldConfig,
};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{
    BarrierId, BufferId, BufferRole, BufferSpec, EventId, GroupCast, Op, OverlapPolicy, Program, ProgramOp,
    SignalId, SpanKind, StreamId, StreamKind, StreamSpec,
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

/// Rows of every buffer of `program`.
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
        Op::GroupCast(GroupCast {
            part: Arc::new(part.clone()),
            tensors,
            wire_dtype: DType::F32,
            arrive,
            delivery: None,
        })
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
        poison(graph.prepared(), name);
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
        for rank in graph.passes()[0].iter() {
            ["both", "last"].iter().for_each(|name| poison(rank, name));
        }
        graph.start().unwrap();
        graph.finish().unwrap();
        assert_eq!(graph.passes()[0].iter().map(outputs).collect::<Vec<_>>(), direct);
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
        matches!(&error, ExecError::Program { reason, .. } if reason.to_string().contains("`last` is f64")),
        "{error}"
    );
}

/// NaN in every element of an output, before anything else is enqueued.
fn poison<T: Transport<CudaBackend>>(rank: &Prepared<CudaBackend, T>, name: &str) {
    let (backend, stream) = (rank.backend(), &*rank.streams()[0]);
    backend.poison(stream, &OpPlace::new(0, "poison"), vec![rank.buffer(name).unwrap().clone()]).unwrap();
    backend.synchronize(&[stream]).unwrap();
}
