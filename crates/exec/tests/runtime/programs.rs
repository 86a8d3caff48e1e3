//! Programs written by hand: what the interpreter refuses, what it promises, kernel barriers and signals.

use std::sync::Arc;
use std::time::Duration;

use counterpoint_exec::{
    CpuBackend, CpuBuffer, CpuTransport, ExecError, FaultInjection, FaultKind, FaultPoint, Prepared, World,
    WorldConfig,
};
use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{
    BarrierId, BufferId, BufferRole, GroupCast, Op, OverlapPolicy, Program, ProgramBuilder, SpanKind,
    StreamId, StreamKind,
};

use crate::collectives::buffer;

pub(crate) type Rank = Prepared<CpuBackend, CpuTransport>;

/// A Program under construction, with a compute and a communication stream.
pub(crate) struct Draft {
    pub(crate) p: ProgramBuilder,
    pub(crate) compute: StreamId,
    pub(crate) communication: StreamId,
}

impl Draft {
    pub(crate) fn new(rank: usize, world_size: usize) -> Self {
        let mut p = ProgramBuilder::new("draft", rank, world_size, OverlapPolicy::default());
        let compute = p.stream("compute", StreamKind::Compute);
        let communication = p.stream("communication", StreamKind::Communication);
        Self { p, compute, communication }
    }

    pub(crate) fn buffer(&mut self, name: &str, rows: usize, role: BufferRole) -> BufferId {
        self.p.buffer(name, DType::F64, &[rows, 1], role)
    }

    pub(crate) fn compute(&mut self, stage: Option<usize>, label: &str, op: Op) {
        self.p.push(self.compute, stage, label, op);
    }

    pub(crate) fn communicate(&mut self, stage: Option<usize>, label: &str, op: Op) {
        self.p.push(self.communication, stage, label, op);
    }

    pub(crate) fn cast(
        &mut self,
        stage: usize,
        part: &GroupPart,
        pair: (BufferId, BufferId),
        arrive: Option<BarrierId>,
    ) {
        let op = GroupCast {
            part: Arc::new(part.clone()),
            tensors: vec![pair],
            wire_dtype: DType::F64,
            arrive,
            delivery: None,
        };
        self.communicate(Some(stage), "cast", Op::GroupCast(op));
    }
}

pub(crate) fn prepare(programs: Vec<Program>, config: WorldConfig) -> Result<Vec<Rank>, ExecError> {
    let world = World::new(programs.len(), config);
    let workers = CpuBackend::workers(0)?;
    programs
        .into_iter()
        .zip(CpuTransport::local(&world, None))
        .enumerate()
        .map(|(rank, (program, transport))| {
            Rank::new(program, CpuBackend::new(&world, rank, workers.clone()), transport)
        })
        .collect()
}

#[test]
fn what_is_not_well_formed_is_refused() {
    let refused = |program: Program| match prepare(vec![program], WorldConfig::default()) {
        Err(ExecError::Program { reason, .. }) => reason.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("was taken"),
    };
    let mut twice = Draft::new(0, 1);
    twice.buffer("x", 1, BufferRole::Input);
    twice.buffer("x", 1, BufferRole::Output);
    assert!(refused(twice.p.finish()).contains("two buffers are named `x`"));

    let mut race = Draft::new(0, 1);
    let (x, y) = (race.buffer("x", 1, BufferRole::Input), race.buffer("y", 1, BufferRole::Output));
    race.compute(None, "first", Op::Cast { src: x, dst: y });
    race.communicate(None, "second", Op::Cast { src: x, dst: y });
    assert!(refused(race.p.finish()).contains("race on buffer `y`"));

    let mut shapes = Draft::new(0, 1);
    let (x, y) = (shapes.buffer("x", 1, BufferRole::Input), shapes.buffer("y", 2, BufferRole::Output));
    shapes.compute(None, "copy", Op::Cast { src: x, dst: y });
    assert!(refused(shapes.p.finish()).contains("`y` must be f64 [1, 1], not f64 [2, 1]"));

    assert!(refused(Draft::new(0, 3).p.finish()).contains("rank 0 of 3"));
}

#[test]
fn bindings_are_checked() {
    let mut draft = Draft::new(0, 1);
    let (x, y) = (draft.buffer("x", 2, BufferRole::Input), draft.buffer("y", 2, BufferRole::Output));
    let hidden = draft.buffer("hidden", 2, BufferRole::Scratch);
    draft.compute(None, "copy", Op::Cast { src: x, dst: hidden });
    draft.compute(None, "copy", Op::Cast { src: hidden, dst: y });
    let mut rank = prepare(vec![draft.p.finish()], WorldConfig::default()).unwrap().remove(0);
    for (name, shape, reason) in [
        ("z", [2, 1], "no input or output"),
        ("hidden", [2, 1], "no input or output"),
        ("x", [3, 1], "must be f64 [2, 1], not f64 [3, 1]"),
    ] {
        let error = rank.bind(name, buffer(&shape, DType::F64, &vec![0.0; shape[0]])).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    let input = buffer(&[2, 1], DType::F64, &[1.0, 2.0]);
    rank.run(&[("x", input.clone())]).unwrap();
    assert_eq!(rank.buffer("y").unwrap().tensor().unwrap().to_f64(), [1.0, 2.0]);
    // Prepared once, run many times, on memory that the caller owns.
    let mine = buffer(&[2, 1], DType::F64, &[0.0, 0.0]);
    rank.bind("y", mine.clone()).unwrap();
    for round in 0..20 {
        let value = f64::from(round);
        input.store(crate::pattern::tensor(&[2, 1], DType::F64, &[value, -value])).unwrap();
        rank.run(&[]).unwrap();
        assert_eq!(mine.tensor().unwrap().to_f64(), [value, -value]);
    }
}

#[test]
fn an_input_that_was_not_bound_ends_the_run() {
    let mut draft = Draft::new(0, 1);
    draft.buffer("x", 2, BufferRole::Input);
    let mut rank = prepare(vec![draft.p.finish()], WorldConfig::default()).unwrap().remove(0);
    assert!(matches!(rank.run(&[]), Err(ExecError::Tensor { name, .. }) if name == "x"));
}

#[test]
fn what_nobody_wrote_shows() {
    let mut draft = Draft::new(0, 1);
    let (x, y) = (draft.buffer("x", 1, BufferRole::Scratch), draft.buffer("y", 1, BufferRole::Output));
    draft.compute(None, "copy", Op::Cast { src: x, dst: y });
    let config = WorldConfig { poison: true, ..WorldConfig::default() };
    let mut rank = prepare(vec![draft.p.finish()], config).unwrap().remove(0);
    rank.run(&[]).unwrap();
    assert!(rank.buffer("y").unwrap().tensor().unwrap().to_f64()[0].is_nan());
}

/// Delays before every operation of every rank, different in every run.
pub(crate) fn delays(world_size: usize, seed: u64, max: Duration) -> Vec<FaultInjection> {
    let delay = |rank| FaultInjection {
        rank,
        program: None,
        at: FaultPoint::Everywhere,
        kind: FaultKind::Delay { seed: seed + rank as u64, max },
    };
    (0..world_size).map(delay).collect()
}

const STAGES: usize = 4;

/// Two ranks exchange rows in [`STAGES`] casts; under a barrier each computation awaits the start of the cast after its own.
fn staged_program(rank: usize, with_barrier: bool) -> Program {
    let mut draft = Draft::new(rank, 2);
    let barrier = with_barrier.then(|| draft.p.start_barrier());
    let own = draft.buffer("own", 1, BufferRole::Input);
    let other = (1 - rank) as u32;
    let part = GroupPart::from_splits([(1, &[other][..])], [(1, other)]);
    let mut arrived = Vec::new();
    for stage in 0..STAGES {
        let received = draft.buffer(&format!("received {stage}"), 1, BufferRole::Scratch);
        draft.cast(stage, &part, (own, received), barrier);
        arrived.push((received, draft.p.mark(draft.communication, Some(stage), "arrived")));
    }
    for (stage, (received, event)) in arrived.into_iter().enumerate() {
        draft.p.after(draft.compute, Some(stage), "wait", event);
        let arrivals = (stage as u64 + 2).min(STAGES as u64);
        draft.p.after_start(draft.compute, Some(stage), "await", barrier, arrivals);
        let result = draft.buffer(&format!("result {stage}"), 1, BufferRole::Output);
        draft.compute(Some(stage), "compute", Op::Cast { src: received, dst: result });
    }
    draft.p.finish()
}

/// Runs the staged programs; counts computations, and those that started before the cast that they should hide.
fn early_starts(with_barrier: bool, seed: u64, max: Duration, runs: usize) -> (usize, usize) {
    let faults = delays(2, seed, max);
    let config = WorldConfig { limit: Duration::from_secs(20), faults, ..WorldConfig::default() };
    let mut ranks = prepare((0..2).map(|rank| staged_program(rank, with_barrier)).collect(), config).unwrap();
    for (rank, prepared) in ranks.iter_mut().enumerate() {
        prepared.bind("own", buffer(&[1, 1], DType::F64, &[rank as f64])).unwrap();
    }
    let (mut computations, mut early) = (0, 0);
    for _ in 0..runs {
        let timeline = Prepared::run_ranks(&mut ranks).unwrap();
        for rank in 0..2 {
            let of = |kind, stage| {
                let mut spans = timeline.spans.iter();
                spans
                    .find(|span| span.rank == rank && span.kind == kind && span.stage == Some(stage))
                    .unwrap()
            };
            for stage in 0..STAGES {
                let compute = of(SpanKind::Compute, stage);
                assert!(compute.start >= of(SpanKind::Communication, stage).end);
                computations += 1;
                let hidden = (stage + 1).min(STAGES - 1);
                early += usize::from(compute.start < of(SpanKind::Communication, hidden).start);
                let result =
                    ranks[rank].buffer(&format!("result {stage}")).unwrap().tensor().unwrap().to_f64();
                assert_eq!(result, [1.0 - rank as f64]);
            }
        }
    }
    (computations, early)
}

/// In thousands of rounds, whatever the delays, no computation starts before the cast that it should hide; without the
/// barrier some do.
#[test]
fn the_kernel_barrier_holds_under_random_delays() {
    let mut rounds = 0;
    for (seed, max, runs) in [(1, 0, 600), (2, 30, 120), (3, 200, 30)] {
        let (computations, early) = early_starts(true, seed, Duration::from_micros(max), runs);
        assert_eq!(early, 0);
        rounds += computations;
    }
    assert!(rounds >= 3000, "{rounds}");
    let (_, early) = early_starts(false, 3, Duration::from_micros(200), 30);
    assert!(early > 0, "the delays prove nothing");
}

/// A value goes round between two streams through one cell each; only signals order them, and they are raised in steps.
#[test]
fn signals_hold_under_random_delays() {
    const STEPS: u64 = 8;
    let mut draft = Draft::new(0, 1);
    let (there, back) = (draft.p.signal(), draft.p.signal());
    let start = draft.buffer("start", 1, BufferRole::Input);
    let (mut from, mut rounds) = (start, 0);
    for step in 1..=STEPS {
        let role = if step == STEPS { BufferRole::Output } else { BufferRole::Scratch };
        let middle = draft.buffer(&format!("middle {step}"), 1, BufferRole::Scratch);
        let next = draft.buffer(&format!("round {step}"), 1, role);
        draft.compute(None, "there", Op::Cast { src: from, dst: middle });
        draft.compute(None, "raise", Op::Signal { signal: there, value: 3 * step });
        draft.communicate(None, "wait", Op::WaitSignal { signal: there, value: 3 * step - 1 });
        draft.communicate(None, "back", Op::Cast { src: middle, dst: next });
        draft.communicate(None, "raise", Op::Signal { signal: back, value: step });
        draft.compute(None, "wait", Op::WaitSignal { signal: back, value: step });
        from = next;
    }
    let program = draft.p.finish();
    program.validate().unwrap();
    for (seed, max, runs) in [(1, 0, 300), (2, 50, 80)] {
        let faults = delays(1, seed, Duration::from_micros(max));
        let config =
            WorldConfig { limit: Duration::from_secs(20), faults, poison: true, ..WorldConfig::default() };
        let mut rank = prepare(vec![program.clone()], config).unwrap().remove(0);
        for run in 0..runs {
            let value = f64::from(run);
            rank.run(&[("start", buffer(&[1, 1], DType::F64, &[value]))]).unwrap();
            assert_eq!(rank.buffer(&format!("round {STEPS}")).unwrap().tensor().unwrap().to_f64(), [value]);
            rounds += STEPS;
        }
    }
    assert!(rounds >= 3000, "{rounds}");
}

/// The promise behind `CpuBuffer`: operations that share a buffer without order are caught in the act. Two Programs of one
/// rank share a buffer that neither of them knows the other to use.
#[test]
fn a_race_in_the_act_names_both_sides() {
    let shared = buffer(&[1 << 20, 1], DType::F64, &vec![0.0; 1 << 20]);
    let world = World::new(1, WorldConfig { poison: false, ..WorldConfig::default() });
    let workers = CpuBackend::workers(0).unwrap();
    let copy = |label: &str, other: &CpuBuffer| {
        let mut draft = Draft::new(0, 1);
        let (x, y) =
            (draft.buffer("x", 1 << 20, BufferRole::Input), draft.buffer("y", 1 << 20, BufferRole::Output));
        (0..50).for_each(|_| draft.compute(None, label, Op::Cast { src: x, dst: y }));
        let transport = CpuTransport::local(&world, None).remove(0);
        let mut rank =
            Rank::new(draft.p.finish(), CpuBackend::new(&world, 0, workers.clone()), transport).unwrap();
        rank.bind("x", other.clone()).unwrap();
        rank.bind("y", shared.clone()).unwrap();
        rank
    };
    let source = buffer(&[1 << 20, 1], DType::F64, &vec![1.0; 1 << 20]);
    let mut ranks = [copy("one", &source), copy("two", &source)];
    let error = Prepared::run_ranks(&mut ranks).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ExecError::DataRace { .. }), "{text}");
    assert!(text.contains("`one`") && text.contains("`two`"), "{text}");
}
