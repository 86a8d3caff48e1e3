//! Programs written by hand: what validation refuses and what the simulator predicts.

use std::sync::Arc;

use counterpoint_cost::{CostModel, Link, WorkerSharing};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GroupPart, OwnedSplit, RemoteSplit, Topology};
use counterpoint_schedule::*;

const ROWS: usize = 1000;

/// One second of computation a pass over a buffer, two seconds of communication a cast, half a second to start it.
fn cost() -> CostModel {
    let bytes = (ROWS * 4) as f64;
    let link = Link { alpha_seconds: 0.5, bytes_per_second: bytes / 1.5 };
    CostModel {
        forward_flops_per_second: 1.0,
        backward_flops_per_second: 1.0,
        matmul_flops_per_second: 1.0,
        memory_bytes_per_second: 2.0 * bytes,
        launch_seconds: 0.0,
        link,
        network: Link { bytes_per_second: link.bytes_per_second / 2.0, ..link },
        copy_seconds: 0.0,
        engine: None,
        sum_bytes_per_second: None,
        packed_elements_per_second: None,
        sharing: None,
        tiles: None,
    }
}

/// A Program on a compute and a communication stream, with `buffers` tensors of `ROWS` rows.
fn program(rank: usize, world_size: usize, buffers: usize, ops: Vec<(usize, Op)>) -> Program {
    Program {
        name: "test".into(),
        rank,
        world_size,
        streams: [("compute", StreamKind::Compute), ("cast", StreamKind::Communication)]
            .map(|(name, kind)| StreamSpec { name: name.into(), kind })
            .to_vec(),
        buffers: (0..buffers)
            .map(|i| BufferSpec {
                name: format!("b{i}"),
                dtype: DType::F32,
                shape: vec![ROWS, 1],
                role: if i == 0 { BufferRole::Input } else { BufferRole::Scratch },
            })
            .collect(),
        slots: Vec::new(),
        num_events: 2,
        num_barriers: 1,
        num_signals: 1,
        policy: OverlapPolicy::default(),
        ops: ops
            .into_iter()
            .enumerate()
            .map(|(i, (stream, op))| ProgramOp {
                stream: StreamId(stream),
                stage: None,
                label: format!("op{i}"),
                op,
            })
            .collect(),
    }
}

fn copy(src: usize, dst: usize) -> Op {
    Op::Cast { src: BufferId(src), dst: BufferId(dst) }
}

/// All rows of `src` to the other of two ranks, into `dst`.
fn swap(rank: usize, src: usize, dst: usize, arrive: Option<BarrierId>) -> Op {
    let rows = Range::new(0, ROWS);
    let other = 1 - rank as u32;
    let part = GroupPart {
        owned: vec![OwnedSplit { rows, ranks: vec![other] }],
        remote: vec![RemoteSplit { rows, rank: other }],
    };
    let tensors = vec![(BufferId(src), BufferId(dst))];
    Op::GroupCast(GroupCast { part: Arc::new(part), tensors, wire_dtype: DType::F32, arrive, delivery: None })
}

fn spans(timeline: &Timeline, rank: usize) -> Vec<(usize, SpanKind, f64, f64)> {
    let of_rank = timeline.spans.iter().filter(|span| span.rank == rank);
    of_rank.map(|span| (span.stream, span.kind, span.start, span.end)).collect()
}

#[test]
fn communication_runs_under_computation() {
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let ops = vec![
                (1, swap(rank, 0, 1, None)),
                (1, Op::Record(EventId(0))),
                (0, copy(0, 2)),
                (0, Op::Wait(EventId(0))),
                (0, copy(1, 3)),
            ];
            program(rank, 2, 4, ops)
        })
        .collect();
    ranks.iter().for_each(|p| p.validate_order().unwrap());
    let timeline = simulate(&ranks, &Topology::flat(2), &cost()).unwrap();
    let expected = vec![
        (0, SpanKind::Compute, 0.0, 1.0),
        (0, SpanKind::Wait, 1.0, 2.0),
        (0, SpanKind::Compute, 2.0, 3.0),
        (1, SpanKind::Communication, 0.0, 2.0),
    ];
    assert_eq!(spans(&timeline, 0), expected);
    assert_eq!(spans(&timeline, 1), expected);
    let overlap = timeline.overlap();
    assert_eq!((overlap.communication_seconds, overlap.exposed_seconds), (2.0, 1.0));
    assert_eq!(overlap.efficiency, Some(0.5));

    let far = simulate(&ranks, &Topology { world_size: 2, ranks_per_node: 1 }, &cost()).unwrap();
    assert_eq!(far.makespan(), 4.5, "half the bandwidth between nodes: 0.5 + 3, then 1");
}

#[test]
fn a_late_rank_holds_up_those_who_exchange_with_it() {
    let early = program(
        0,
        2,
        3,
        vec![
            (1, swap(0, 0, 1, Some(BarrierId(0)))),
            (0, { Op::Await { barrier: BarrierId(0), arrivals: 1 } }),
            (0, copy(0, 2)),
        ],
    );
    let late = program(
        1,
        2,
        3,
        vec![
            (0, copy(0, 2)),
            (0, Op::Record(EventId(0))),
            (1, Op::Wait(EventId(0))),
            (1, swap(1, 0, 1, None)),
        ],
    );
    let mut late = late;
    late.ops[3].label = "op0".into(); // the same collective on both ranks
    let timeline = simulate(&[early, late], &Topology::flat(2), &cost()).unwrap();
    // The barrier counts starts, so computation does not wait for the late peer.
    assert_eq!(
        spans(&timeline, 0),
        vec![(0, SpanKind::Compute, 0.0, 1.0), (1, SpanKind::Communication, 0.0, 3.0),]
    );
    assert_eq!(spans(&timeline, 1)[2], (1, SpanKind::Communication, 1.0, 3.0));
}

#[test]
fn programs_that_would_hang_or_disagree() {
    let stuck = program(0, 1, 1, vec![(0, Op::WaitSignal { signal: SignalId(0), value: 1 })]);
    assert_eq!(
        stuck.validate_order(),
        Err(ProgramError::NoProducer { op: 0, label: "op0".into(), what: ProgramThing::Signal })
    );
    let error = simulate(&[stuck], &Topology::flat(1), &cost()).unwrap_err();
    assert_eq!(error, SimulateError::Stuck { rank: 0, op: 0, label: "op0".into() });

    let casts = program(0, 2, 2, vec![(1, swap(0, 0, 1, None))]);
    let silent = program(1, 2, 2, vec![]);
    let error = simulate(&[casts, silent], &Topology::flat(2), &cost()).unwrap_err();
    assert!(matches!(error, SimulateError::Mismatch { collective: 0, rank: 0, other: 1, .. }), "{error}");
}

/// Validates a Program of one rank with three buffers.
fn check(ops: Vec<(usize, Op)>, expected: Result<(), &str>) {
    let got = program(0, 1, 3, ops).validate_order();
    assert_eq!(
        got.as_ref().map_err(ToString::to_string),
        expected.as_ref().map(|_| &()).map_err(ToString::to_string)
    );
}

#[test]
fn validation() {
    let (record, wait) = (Op::Record(EventId(0)), Op::Wait(EventId(0)));
    let signal = |value| Op::Signal { signal: SignalId(0), value };
    let wait_signal = |value| Op::WaitSignal { signal: SignalId(0), value };
    check(vec![(0, copy(0, 1)), (0, copy(1, 2))], Ok(()));
    check(vec![(0, copy(0, 1)), (1, copy(0, 2))], Ok(()));
    check(vec![(0, copy(0, 1)), (0, record.clone()), (1, wait.clone()), (1, copy(1, 2))], Ok(()));
    check(vec![(0, copy(0, 1)), (0, signal(2)), (1, wait_signal(1)), (1, copy(1, 2))], Ok(()));
    check(
        vec![(0, copy(0, 1)), (1, copy(1, 2))],
        Err("ops 0 (op0) and 1 (op1) race on buffer `b1`; order them by an event"),
    );
    // The event is recorded before the write that it should cover.
    check(
        vec![(0, record.clone()), (0, copy(0, 1)), (1, wait.clone()), (1, copy(1, 2))],
        Err("ops 1 (op1) and 3 (op3) race on buffer `b1`; order them by an event"),
    );
    // Either signal releases the wait, and only one of them follows the write.
    check(
        vec![(1, signal(1)), (0, copy(0, 1)), (0, signal(1)), (1, wait_signal(1)), (1, copy(1, 2))],
        Err("ops 1 (op1) and 4 (op4) race on buffer `b1`; order them by an event"),
    );
    check(
        vec![(1, wait), (0, record.clone())],
        Err("op 0 (op0) waits for an event that no earlier op produces; queue the producer first"),
    );
    check(vec![(0, record.clone()), (0, record)], Err("op 1 (op1) records event 0 a second time"));
    check(vec![(0, copy(1, 0))], Err("op 0 (op0) writes input `b0`"));
    check(vec![(0, copy(0, 9))], Err("op 0 (op0) names a buffer that the Program does not have"));
    check(vec![(7, copy(0, 1))], Err("op 0 (op0) names a stream that the Program does not have"));
}

/// A product whose rows travel while it is computed may hold all workers, so nothing else that needs some may wait for other ranks
/// concurrently with it.
#[test]
fn fused_products_are_alone() {
    let block = |buffer, rows| vec![RowBlock { buffer: BufferId(buffer), rows: Range::new(0, rows) }];
    let fused = |rank: usize| {
        let Op::GroupCast(cast) = swap(rank, 0, 1, None) else { unreachable!() };
        let gemm = Gemm {
            layout: GemmLayout::Nt,
            a: block(1, ROWS).into(),
            b: block(0, ROWS).into(),
            out: BufferId(2),
            out_rows: vec![Range::new(0, ROWS)].into(),
            pass_rows: ROWS,
            columns: None,
            bias: None,
            accumulate: Accumulate::Start,
        };
        Op::Fused(vec![Op::GroupCast(cast), Op::Gemm(gemm)])
    };
    let twice = vec![(0, Op::Fused(vec![fused(0), swap(0, 0, 3, None)]))];
    let error = program(0, 2, 4, twice).validate_order().unwrap_err();
    assert_eq!(error, ProgramError::NotFusable { op: 0, label: "op0".into() });
    let apart = vec![(0, fused(0)), (1, swap(0, 0, 3, None))];
    let error = program(0, 2, 4, apart).validate_order().unwrap_err();
    assert!(matches!(error, ProgramError::UnorderedFused { first: 0, second: 1, .. }), "{error}");
    assert!(error.to_string().contains("order them by an event"), "{error}");
    let (record, wait) = (Op::Record(EventId(0)), Op::Wait(EventId(0)));
    let ordered = vec![(0, fused(0)), (0, record), (1, wait), (1, swap(0, 0, 3, None))];
    assert_eq!(program(0, 2, 4, ordered).validate_order(), Ok(()));
    // Copy engines need no worker, sums do.
    let by_engines = |op| {
        let policy = OverlapPolicy { mover: Mover::Fused, ..OverlapPolicy::default() };
        Program { policy, ..program(0, 2, 4, vec![(0, fused(0)), (1, op)]) }.validate_order()
    };
    assert_eq!(by_engines(swap(0, 0, 3, None)), Ok(()));
    let Op::GroupCast(cast) = swap(0, 0, 3, None) else { unreachable!() };
    let sums = Op::GroupReduce(GroupReduce {
        part: cast.part,
        tensors: cast.tensors,
        op: ReduceOp::Sum,
        accumulate: Accumulate::Start,
        wire_dtype: DType::F32,
        reduce_dtype: DType::F32,
        arrive: None,
    });
    assert!(matches!(by_engines(sums), Err(ProgramError::UnorderedFused { first: 0, second: 1, .. })));
}

/// What is in order may still be of the wrong shape.
#[test]
fn tensors_must_fit_their_operation() {
    let concat = |srcs: &[usize]| Op::Concat {
        srcs: srcs.iter().map(|&src| BufferId(src)).collect(),
        dst: BufferId(1),
    };
    assert_eq!(program(0, 1, 2, vec![(0, concat(&[0]))]).validate(), Ok(()));
    let too_many = program(0, 1, 2, vec![(0, concat(&[0, 0]))]);
    assert_eq!(too_many.validate_order(), Ok(()));
    let error = too_many.validate().unwrap_err();
    let fault = OperandFault::Layout {
        name: "b1".into(),
        dtype: DType::F32,
        shape: vec![2 * ROWS, 1],
        found_dtype: DType::F32,
        found_shape: vec![ROWS, 1],
    };
    assert_eq!(error, ProgramError::Operand { op: 0, label: "op0".into(), fault });
    assert_eq!(error.to_string(), "op 0 (op0): buffer `b1` must be f32 [2000, 1], not f32 [1000, 1]");
    let named = |name: &str| {
        let mut program = program(0, 1, 2, Vec::new());
        program.buffers[1].name = name.into();
        program.validate()
    };
    assert_eq!(named("b0"), Err(ProgramError::NamedTwice { name: "b0".into() }));
}

/// Buffers of a slot are one piece of memory: unordered uses race, and nobody reads what the next one has overwritten.
#[test]
fn reuse_of_a_slot_is_checked() {
    let reuse = |slots: &[&[usize]], ops: Vec<(usize, Op)>| {
        let slots = slots.iter().map(|slot| slot.iter().map(|&id| BufferId(id)).collect()).collect();
        Program { slots, ..program(0, 1, 4, ops) }.validate_order()
    };
    let in_turn = vec![(0, copy(0, 1)), (0, copy(1, 3)), (0, copy(0, 2)), (0, copy(2, 3))];
    assert_eq!(reuse(&[&[1, 2]], in_turn), Ok(()));
    let late = || vec![(0, copy(0, 1)), (0, copy(0, 2)), (0, copy(1, 3))];
    assert_eq!(reuse(&[], late()), Ok(()));
    assert!(matches!(reuse(&[&[1, 2]], late()), Err(ProgramError::Overwritten { op: 2, .. })));
    let apart = || vec![(0, copy(0, 1)), (1, copy(0, 2))];
    assert_eq!(reuse(&[], apart()), Ok(()));
    assert!(matches!(reuse(&[&[1, 2]], apart()), Err(ProgramError::Race { first: 0, second: 1, .. })));
    let onto_itself = vec![(0, copy(0, 1)), (0, copy(1, 2))];
    assert!(matches!(reuse(&[&[1, 2]], onto_itself), Err(ProgramError::Race { first: 1, second: 1, .. })));
    for slots in [&[&[0][..]][..], &[&[9]], &[&[1], &[1]]] {
        assert!(matches!(reuse(slots, Vec::new()), Err(ProgramError::Slot { .. })), "{slots:?}");
    }
}

/// A group of a product that raises a signal may be used once that has come, and not before; the rest of the product runs on meanwhile.
#[test]
fn groups_travel_while_the_rest_is_computed() {
    // Inputs are 0, the groups' results 1 and 2, and where they are copied to 3 and 4.
    let block = |rows| vec![RowBlock { buffer: BufferId(0), rows: Range::new(0, rows) }];
    let group = |out| Gemm {
        layout: GemmLayout::Nt,
        a: block(ROWS).into(),
        b: block(1).into(),
        out: BufferId(out),
        out_rows: vec![Range::new(0, ROWS)].into(),
        pass_rows: 2 * ROWS,
        columns: None,
        bias: None,
        accumulate: Accumulate::Start,
    };
    let signal = SignalId(0);
    let rows = RowsOrigin::default();
    let waves = || {
        let (groups, rows) = (vec![group(1), group(2)], rows.clone());
        (0, Op::WaveGemm(WaveGemm { groups, grouped: false, signal: Some(signal), arrivals: None, rows }))
    };
    let wait = |value| (1, Op::WaitSignal { signal, value });
    let in_turn = program(0, 1, 5, vec![waves(), wait(1), (1, copy(1, 3)), wait(2), (1, copy(2, 4))]);
    assert_eq!(in_turn.validate_order(), Ok(()));
    for (early, buffer) in
        [(vec![waves(), (1, copy(1, 3))], "b1"), (vec![waves(), wait(1), (1, copy(2, 3))], "b2")]
    {
        let error = program(0, 1, 5, early).validate_order().unwrap_err();
        assert!(matches!(&error, ProgramError::Race { buffer: found, .. } if found == buffer), "{error}");
    }
    let error = program(0, 1, 5, vec![wait(1), waves()]).validate_order().unwrap_err();
    assert!(matches!(error, ProgramError::NoProducer { op: 0, .. }), "{error}");
    let error = program(0, 1, 5, vec![waves(), wait(3)]).validate_order().unwrap_err();
    assert!(matches!(error, ProgramError::NoProducer { op: 1, .. }), "{error}");
    // Each group takes a second, and so does each copy: the first copy runs under the second group.
    let cost = CostModel { matmul_flops_per_second: 2.0 * ROWS as f64, ..cost() };
    let timeline = simulate(&[in_turn], &Topology::flat(1), &cost).unwrap();
    let span =
        |label: &str| timeline.spans.iter().find(|span| span.label == label && span.kind != SpanKind::Wait);
    let times = ["op0", "op2", "op4"].map(|label| span(label).map(|span| (span.start, span.end)).unwrap());
    assert_eq!(times, [(0.0, 2.0), (1.0, 2.0), (2.0, 3.0)]);
}

/// A product may read a group of rows once the signal of their arrival has come, and not before; the simulator has it do meanwhile what is
/// there, and begin the waves of a group that comes late anew.
#[test]
fn groups_are_multiplied_as_they_arrive() {
    // Own rows are 0, groups come into 1 and 2, the second operand is 3 and the result 4.
    let group = |from: usize, at: usize| Gemm {
        layout: GemmLayout::Nt,
        a: vec![RowBlock { buffer: BufferId(from), rows: Range::new(0, 10) }].into(),
        b: vec![RowBlock { buffer: BufferId(3), rows: Range::new(0, 1) }].into(),
        out: BufferId(4),
        out_rows: vec![Range::new(at, at + 10)].into(),
        pass_rows: 30,
        columns: None,
        bias: None,
        accumulate: Accumulate::Start,
    };
    let signal = SignalId(0);
    let product = |values: &[u64], grouped| {
        let groups = vec![group(0, 0), group(1, 10), group(2, 20)];
        let (arrivals, rows) = (Some(RowArrivals { signal, values: values.to_vec() }), RowsOrigin::default());
        (0, Op::WaveGemm(WaveGemm { groups, grouped, signal: None, arrivals, rows }))
    };
    let comes = |to, value| [(1, copy(3, to)), (1, Op::Signal { signal, value })];
    let all = |values: &[u64]| {
        let mut ops = [comes(1, 1), comes(2, 2)].concat();
        ops.push(product(values, false));
        program(0, 1, 5, ops)
    };
    let in_turn = all(&[0, 1, 2]);
    assert_eq!(in_turn.validate(), Ok(()));
    for (values, buffer) in [([0, 0, 2], "b1"), ([0, 1, 1], "b2"), ([0, 0, 0], "b1")] {
        let error = all(&values).validate_order().unwrap_err();
        assert!(matches!(&error, ProgramError::Race { buffer: found, .. } if found == buffer), "{error}");
    }
    // What follows the product in its stream follows what it waited for.
    let mut behind = in_turn.clone();
    behind.ops.push(ProgramOp { op: copy(2, 1), ..behind.ops[4].clone() });
    assert_eq!(behind.validate_order(), Ok(()));
    let error = all(&[0, 1, 3]).validate_order().unwrap_err();
    assert!(matches!(error, ProgramError::NoProducer { op: 4, .. }), "{error}");
    let mut early = in_turn.clone();
    early.ops.swap(3, 4);
    assert!(matches!(early.validate_order().unwrap_err(), ProgramError::NoProducer { op: 3, .. }));
    for wrong in [all(&[0, 1]).ops[4].op.clone(), product(&[0, 1, 2], true).1] {
        let mut wrongly = in_turn.clone();
        wrongly.ops[4].op = wrong;
        let error = wrongly.check_operands(4).unwrap_err();
        assert!(error.to_string().contains("rows arrive for"), "{error}");
    }
    // Each group takes a second, and so does the way of each: the first arrives as own rows are done, the second a second after that.
    let times = |cost: &CostModel| -> Vec<(SpanKind, f64, f64)> {
        let timeline = simulate(std::slice::from_ref(&in_turn), &Topology::flat(1), cost).unwrap();
        let of_product = timeline.spans.into_iter().filter(|span| span.label == "op4");
        of_product.map(|span| (span.kind, span.start, span.end)).collect()
    };
    let slow = CostModel { matmul_flops_per_second: 40.0, ..cost() };
    assert_eq!(
        times(&slow),
        [
            (SpanKind::Compute, 0.0, 0.5),
            (SpanKind::Wait, 0.5, 1.0),
            (SpanKind::Compute, 1.0, 1.5),
            (SpanKind::Wait, 1.5, 2.0),
            (SpanKind::Compute, 2.0, 2.5)
        ]
    );
    assert_eq!(
        times(&CostModel { matmul_flops_per_second: 10.0, ..cost() }),
        [(SpanKind::Compute, 0.0, 6.0)]
    );
    // Of three workers ten rows take two: what is there fills waves together, what comes late has waves of its own.
    let sharing = Some(WorkerSharing { workers: 3, communication: 0, gemm_tile: [5, 1] });
    let tiles = |flops| CostModel { sharing, matmul_flops_per_second: flops, ..cost() };
    assert_eq!(times(&tiles(3.0)), [(SpanKind::Compute, 0.0, 20.0)]);
    let of_late = times(&tiles(60.0));
    assert_eq!(
        of_late.last().map(|(kind, start, end)| (*kind, *start, end - start < 0.5)),
        Some((SpanKind::Compute, 2.0, true))
    );
}
