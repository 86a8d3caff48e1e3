//! Attention that takes keys as they arrive: what validation asks of it, and what the simulator makes of it.

use std::sync::Arc;

use counterpoint_cost::{CostModel, Link};
use counterpoint_mask::{Band, Range};
use counterpoint_plan::{DType, GroupPart, KEY_BLOCK, OwnedSplit, RemoteSplit, Topology};
use counterpoint_schedule::{
    Accumulate, ArrivingKeys, AttentionForward, BarrierId, BufferId, BufferRole, BufferSpec, Delivery,
    ForwardBegin, ForwardEnd, Gemm, GemmLayout, GroupCast, GroupReduce, KeyBlocks, Op, OverlapPolicy,
    Program, ProgramError, ProgramOp, ReduceOp, RowBlock, SignalId, SpanKind, StreamId, StreamKind,
    StreamSpec, simulate,
};

const ROWS: usize = KEY_BLOCK;
const DELIVERY: Delivery = Delivery { signal: SignalId(0), parts: 2 };

fn rectangle(q: Range, k: Range) -> Band {
    Band { q_range: q, k_range: k, diag_min: Band::NO_MIN, diag_max: Band::NO_MAX }
}

/// One of two ranks: its first rows see its own keys, the others those of the other rank.
fn attention(ops: impl IntoIterator<Item = (usize, Op)>) -> Program {
    let buffer = |name: &str, shape: &[usize], role| BufferSpec {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: shape.to_vec(),
        role,
    };
    let rows = [ROWS, 1, 1];
    let stream = |name: &str, kind| StreamSpec { name: name.to_owned(), kind };
    let ops = ops.into_iter().enumerate().map(|(index, (stream, op))| {
        let label = if matches!(op, Op::GroupCast(_)) { "cast".to_owned() } else { format!("op{index}") };
        ProgramOp { stream: StreamId(stream), stage: None, label, op }
    });
    Program {
        name: "attention forward".into(),
        rank: 0,
        world_size: 2,
        streams: vec![stream("compute", StreamKind::Compute), stream("cast", StreamKind::Communication)],
        buffers: vec![
            buffer("q", &[2 * ROWS, 1, 1], BufferRole::Input),
            buffer("k", &rows, BufferRole::Input),
            buffer("v", &rows, BufferRole::Input),
            buffer("arriving k", &rows, BufferRole::Scratch),
            buffer("arriving v", &rows, BufferRole::Scratch),
            buffer("out", &[2 * ROWS, 1, 1], BufferRole::Output),
            buffer("lse", &[2 * ROWS, 1], BufferRole::Output),
        ],
        slots: Vec::new(),
        num_events: 0,
        num_barriers: 1,
        num_signals: 1,
        policy: OverlapPolicy::default(),
        ops: ops.collect(),
    }
}

fn cast(delivery: Option<Delivery>) -> (usize, Op) {
    let rows = Range::new(0, ROWS);
    let part = GroupPart {
        owned: vec![OwnedSplit { rows, ranks: vec![1] }],
        remote: vec![RemoteSplit { rows, rank: 1 }],
    };
    let tensors = vec![(BufferId(1), BufferId(3)), (BufferId(2), BufferId(4))];
    let arrive = Some(BarrierId(0));
    (1, Op::GroupCast(GroupCast { part: Arc::new(part), tensors, wire_dtype: DType::F32, arrive, delivery }))
}

fn start() -> (usize, Op) {
    (0, Op::Await { barrier: BarrierId(0), arrivals: 1 })
}

fn forward(delivery: Delivery) -> (usize, Op) {
    let bands = [
        rectangle(Range::new(0, ROWS), Range::new(0, ROWS)),
        rectangle(Range::new(ROWS, 2 * ROWS), Range::new(ROWS, 2 * ROWS)),
    ];
    let op = AttentionForward {
        q: BufferId(0),
        k: BufferId(1),
        v: BufferId(2),
        arriving: Some(ArrivingKeys { k: BufferId(3), v: BufferId(4), delivery }),
        blocks: KeyBlocks::Unaligned,
        begin: ForwardBegin::Start,
        end: ForwardEnd::Result { sink: None, out: BufferId(5), lse: BufferId(6) },
        bands: bands.to_vec().into(),
        max_logits: None,
        scale: 1.0,
        softcap: 0.0,
    };
    (0, Op::AttentionForward(op))
}

#[test]
fn what_arrives_is_delivered_by_a_cast_that_has_started() {
    let error = |ops: Vec<(usize, Op)>| attention(ops).validate_order().unwrap_err();
    attention([cast(Some(DELIVERY)), start(), forward(DELIVERY)]).validate_order().unwrap();
    // It holds all workers while the cast wants some.
    let not_started = error(vec![cast(Some(DELIVERY)), forward(DELIVERY)]);
    assert_eq!(not_started, ProgramError::StartNotAwaited { op: 1, label: "op1".into() });
    // No one signals the rows, or only afterwards, or in other parts.
    let other = Delivery { parts: 3, ..DELIVERY };
    for ops in [
        vec![cast(None), start(), forward(DELIVERY)],
        vec![cast(Some(other)), start(), forward(DELIVERY)],
        vec![forward(DELIVERY), cast(Some(DELIVERY))],
    ] {
        let found = error(ops);
        assert!(matches!(found, ProgramError::NoProducer { .. }), "{found}");
    }
}

/// A product whose sums travel on to the other rank: both halves arrive at the barrier that the cast of the keys arrives at.
fn product_before() -> (usize, Op) {
    let (_, cast) = cast(None);
    let Op::GroupCast(cast) = cast else { unreachable!("a cast") };
    let rows = Range::new(0, ROWS);
    let block = |buffer| vec![RowBlock { buffer: BufferId(buffer), rows }];
    let gemm = Gemm {
        layout: GemmLayout::Nt,
        a: block(1).into(),
        b: block(2).into(),
        out: BufferId(7),
        out_rows: vec![rows].into(),
        pass_rows: ROWS,
        columns: None,
        bias: None,
        accumulate: Accumulate::Start,
    };
    let reduce = GroupReduce {
        part: cast.part.clone(),
        tensors: vec![(BufferId(7), BufferId(8))],
        op: ReduceOp::Sum,
        accumulate: Accumulate::Start,
        wire_dtype: DType::F32,
        reduce_dtype: DType::F32,
        arrive: cast.arrive,
    };
    let spread = GroupCast { tensors: vec![(BufferId(8), BufferId(7))], ..cast };
    (1, Op::Fused(vec![Op::Gemm(gemm), Op::GroupReduce(reduce), Op::GroupCast(spread)]))
}

#[test]
fn every_collective_before_a_cast_counts_at_its_barrier() {
    let awaiting = |arrivals| {
        let awaits = (0, Op::Await { barrier: BarrierId(0), arrivals });
        let mut program = attention([product_before(), cast(Some(DELIVERY)), awaits, forward(DELIVERY)]);
        let scratch = |name: &str| BufferSpec { name: name.into(), ..program.buffers[3].clone() };
        let more = [scratch("product"), scratch("sums")];
        program.buffers.extend(more);
        program.validate_order()
    };
    // Two arrivals are those of the product; the third is the cast's.
    assert_eq!(awaiting(2), Err(ProgramError::StartNotAwaited { op: 3, label: "op3".into() }));
    awaiting(3).unwrap();
}

#[test]
fn reading_what_arrives_is_the_only_thing_that_a_delivery_orders() {
    // The keys that are there from the start are read before anything has come.
    let mut program = attention([cast(Some(DELIVERY)), start(), forward(DELIVERY)]);
    if let Op::AttentionForward(op) = &mut program.ops[2].op {
        op.k = BufferId(3);
    }
    assert!(matches!(program.validate_order(), Err(ProgramError::Race { first: 0, second: 2, .. })));
    // After it everything has come, but this rank's rows may still be on their way.
    let again = (0, Op::Cast { src: BufferId(1), dst: BufferId(3) });
    let program = attention([cast(Some(DELIVERY)), start(), forward(DELIVERY), again]);
    assert!(matches!(program.validate_order(), Err(ProgramError::Race { first: 0, second: 3, .. })));
}

#[test]
fn work_that_is_ready_hides_the_cast() {
    // The two halves take a second each.
    let pairs = (ROWS * ROWS) as f64;
    let cost = |cast_seconds: f64| {
        let link = Link { alpha_seconds: 0.0, bytes_per_second: (2 * 4 * ROWS) as f64 / cast_seconds };
        CostModel {
            forward_flops_per_second: 4.0 * pairs,
            memory_bytes_per_second: f64::INFINITY,
            launch_seconds: 0.0,
            link,
            network: link,
            sharing: None,
            tiles: None,
            ..CostModel::H200
        }
    };
    let run = |cast_seconds: f64| {
        // What comes after it is reached.
        let after = (0, Op::Cast { src: BufferId(5), dst: BufferId(5) });
        let program = attention([cast(Some(DELIVERY)), start(), forward(DELIVERY), after]);
        let timeline = simulate(&[program], &Topology::flat(2), &cost(cast_seconds)).unwrap();
        let spans = timeline.spans.iter().filter(|span| span.kind == SpanKind::Compute);
        (timeline.makespan(), spans.count())
    };
    let is = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    for (cast_seconds, expected) in [(0.5, 2.0), (1.0, 2.0), (1.5, 2.5), (4.0, 5.0)] {
        let (makespan, spans) = run(cast_seconds);
        is(makespan, expected);
        assert_eq!(spans, 1, "it is one operation");
    }
}
