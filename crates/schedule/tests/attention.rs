//! The lowerings of attention, over random masks and plans: valid, free of races, and the same work under every policy.

use std::collections::BTreeMap;

use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::*;
use counterpoint_schedule::*;
use proptest::prelude::*;

fn spec(dtype: DType, seqlen_sink: usize) -> AttentionSpec {
    AttentionSpec {
        heads_q: 4,
        heads_kv: 2,
        head_dim: 8,
        head_dim_v: 8,
        dtype,
        scale: 0.25,
        softcap: 0.0,
        seqlen_sink,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    }
}

fn cost() -> CostModel {
    let link = Link { alpha_seconds: 1e-5, bytes_per_second: 1e8 };
    CostModel {
        forward_flops_per_second: 1e9,
        backward_flops_per_second: 8e8,
        matmul_flops_per_second: 8e8,
        memory_bytes_per_second: 1e10,
        launch_seconds: 1e-6,
        link,
        network: link,
        copy_seconds: 0.0,
        sharing: None,
        tiles: None,
    }
}

fn config(cp_size: usize, chunk_size: usize, stages: usize) -> PlanConfig {
    PlanConfig {
        chunk_size: Some(chunk_size),
        dispatch: DispatchAlgorithm::MinHeap,
        stages: StageCount::Fixed(stages).into(),
        query_exchange: QueryExchange::Never,
        topology: Topology::flat(cp_size),
        cost: cost(),
    }
}

fn plan(mask: &Mask, cp_size: usize, chunk_size: usize, stages: usize) -> Plan {
    let config = config(cp_size, chunk_size, stages);
    Plan::new(mask, &spec(DType::Bf16, 0), &config).unwrap()
}

/// A packed batch: causal documents of the given lengths, some of them looking back at the first as well.
fn mask(lengths: &[usize]) -> Mask {
    let total = lengths.iter().sum();
    let (mut start, mut slices) = (0, Vec::new());
    for (i, &length) in lengths.iter().enumerate() {
        let own = Range::new(start, start + length);
        slices.push(AttnSlice::new(own, own, MaskType::Causal));
        if i % 2 == 1 {
            slices.push(AttnSlice::new(own, Range::new(0, lengths[0]), MaskType::Full));
        }
        start += length;
    }
    Mask::new(total, total, slices).unwrap()
}

const POLICIES: [&str; 4] = ["sequential", "concurrent", "kernel-barrier", "kernel-barrier+sm-margin=1"];

fn programs(plan: &Plan, spec: &AttentionSpec, policy: &str) -> [Vec<Program>; 3] {
    let policy = policy.parse().unwrap();
    let backward = |reduction| {
        let lower = |rank| lower_attention_backward(plan, rank, spec, policy, reduction);
        (0..plan.cp_size()).map(lower).collect()
    };
    [
        (0..plan.cp_size())
            .map(|rank| lower_attention_forward(plan, rank, spec, policy, KeyBlocks::Suited))
            .collect(),
        backward(GradientReduction::PerStage),
        backward(GradientReduction::Deterministic),
    ]
}

/// The operations without their place: what must not depend on the policy.
fn work(program: &Program) -> Vec<String> {
    let moves = |op: &&ProgramOp| !matches!(op.op, Op::Record(_) | Op::Wait(_) | Op::Await { .. });
    let text = |op: &ProgramOp| match &op.op {
        Op::GroupCast(cast) => format!("{:?}", GroupCast { arrive: None, ..cast.clone() }),
        Op::GroupReduce(reduce) => format!("{:?}", GroupReduce { arrive: None, ..reduce.clone() }),
        other => format!("{other:?}"),
    };
    program.ops.iter().filter(moves).map(text).collect()
}

/// Under every policy valid, free of races, with the same operations, every buffer written that is no input.
fn check(plan: &Plan, spec: &AttentionSpec) -> Result<(), TestCaseError> {
    let reference = programs(plan, spec, POLICIES[0]).map(|ranks| ranks.iter().map(work).collect::<Vec<_>>());
    for policy in POLICIES {
        for (ranks, reference) in programs(plan, spec, policy).iter().zip(&reference) {
            for (program, reference) in ranks.iter().zip(reference) {
                prop_assert_eq!(program.validate(), Ok(()), "{} {}", policy, program.name);
                prop_assert_eq!(&work(program), reference);
                let written: BTreeMap<_, _> =
                    program.ops.iter().flat_map(|op| op.op.writes()).map(|id| (id.0, ())).collect();
                for (id, buffer) in program.buffers.iter().enumerate() {
                    let is_written = written.contains_key(&id);
                    prop_assert_eq!(is_written, buffer.role != BufferRole::Input, "{}", buffer.name);
                }
            }
            let timeline = simulate(ranks, &Topology::flat(plan.cp_size()), &cost()).unwrap();
            prop_assert!(timeline.makespan() > 0.0);
        }
    }
    Ok(())
}

/// The mask with `rows` more rows and keys, the rows seeing everything.
fn last_global(mask: &Mask, rows: usize) -> Mask {
    let seqlen = mask.seqlen_q() + rows;
    let mut slices = mask.slices().to_vec();
    slices.push(AttnSlice::new(Range::new(mask.seqlen_q(), seqlen), Range::new(0, seqlen), MaskType::Full));
    Mask::new(seqlen, seqlen, slices).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn valid_race_free_and_predictable(
        lengths in prop::collection::vec(1usize..300, 1..8),
        cp_size in 1usize..6, chunk_size in 16usize..100, stages in 1usize..5, sink in 0usize..2,
        rounds in any::<bool>(),
    ) {
        let plan = plan(&mask(&lengths), cp_size, chunk_size, stages);
        let gradient_shares = if rounds { GradientShares::Elements } else { GradientShares::Accumulators };
        check(&plan, &AttentionSpec { gradient_shares, ..spec(DType::Bf16, sink) })?;
    }

    /// Likewise where a last block sees everything and is computed where the keys are.
    #[test]
    fn hosted_work_is_valid_too(
        lengths in prop::collection::vec(100usize..300, 4..8),
        cp_size in 2usize..6, chunk_size in 16usize..100, stages in 0usize..5, sink in 0usize..2,
    ) {
        let mask = last_global(&mask(&lengths), 4);
        // Neighbours stay together, so that the block's owner fetches most of what it sees for the block alone.
        let (dispatch, query_exchange) = (DispatchAlgorithm::Sequential, QueryExchange::FewestBytes);
        let config = PlanConfig { dispatch, query_exchange, ..config(cp_size, chunk_size, stages) };
        let plan = Plan::new(&mask, &spec(DType::Bf16, sink), &config).unwrap();
        // With two ranks it may be predicted to take no longer without; proptest gives up where too few cases are left.
        prop_assume!(plan.ranks.iter().all(|rank| rank.hosted.is_some()));
        check(&plan, &spec(DType::Bf16, sink))?;
    }

    /// Likewise where hosts do all there is to do.
    #[test]
    fn hosts_alone_are_valid_too(
        keys in 500usize..900, cp_size in 2usize..6, chunk_size in 16usize..100, sink in 0usize..2,
    ) {
        let query_exchange = QueryExchange::FewestBytes;
        let mask = Mask::cross_full(cp_size, keys).unwrap();
        let config = PlanConfig { query_exchange, ..config(cp_size, chunk_size, 1) };
        let config = PlanConfig { chunk_size: None, ..config };
        let spec = spec(DType::Bf16, sink);
        let plan = Plan::new(&mask, &spec, &config).unwrap();
        let [forward, backward, _] = programs(&plan, &spec, "concurrent");
        for program in forward.iter().chain(&backward) {
            prop_assert_eq!(program.validate(), Ok(()), "{}", program.name);
            let local = |op: &&ProgramOp| op.stage.is_some() && !matches!(op.op, Op::Record(_) | Op::Wait(_));
            prop_assert_eq!(program.ops.iter().filter(local).count(), 0, "{}", program.name);
        }
    }

    /// Sequential order leaves everything exposed; the other policies never predict a longer run.
    #[test]
    fn overlap_never_predicts_a_loss(
        lengths in prop::collection::vec(1usize..300, 1..8), cp_size in 2usize..6, stages in 1usize..5,
    ) {
        let plan = plan(&mask(&lengths), cp_size, 32, stages);
        let spec = spec(DType::Bf16, 0);
        let predict = |policy| {
            let [forward, backward, _] = programs(&plan, &spec, policy);
            [forward, backward].map(|ranks| simulate(&ranks, &Topology::flat(cp_size), &cost()).unwrap())
        };
        let (sequential, concurrent) = (predict("sequential"), predict("concurrent"));
        for (a, b) in sequential.iter().zip(&concurrent) {
            prop_assert!(b.makespan() <= a.makespan() * (1.0 + 1e-9));
            let alone = a.overlap();
            prop_assert!((alone.exposed_seconds - alone.communication_seconds).abs() <= 1e-12);
        }
    }
}

/// With equal work on both ranks and computation longer than communication, only the first arrival can be exposed, and
/// stage 0 hides that one.
#[test]
fn communication_hides_completely_where_there_is_enough_computation() {
    let seqlen = 2048;
    let all = Range::new(0, seqlen);
    let mask = Mask::new(seqlen, seqlen, vec![AttnSlice::new(all, all, MaskType::Full)]).unwrap();
    let plan = plan(&mask, 2, 128, 2);
    let spec = spec(DType::Bf16, 0);
    let slow = CostModel { forward_flops_per_second: 1e8, backward_flops_per_second: 1e8, ..cost() };
    for policy in ["concurrent", "kernel-barrier"] {
        let [forward, ..] = programs(&plan, &spec, policy);
        let overlap = simulate(&forward, &Topology::flat(2), &slow).unwrap().overlap();
        assert!(overlap.communication_seconds > 0.0);
        assert!(overlap.exposed_seconds < 1e-9, "{policy}: {overlap:?}");
        assert_eq!(overlap.efficiency.map(|e| (e * 1e9).round()), Some(1e9));
    }
}

/// Where a causal mask, dispatched in runs, communicates for as long as it computes, stages hide a good part of it: no stage
/// waits for a few owners that everyone asks at once.
#[test]
fn stages_of_a_causal_mask_pay_off() {
    let (ranks, seqlen) = (8, 65_536);
    let mask = Mask::causal(seqlen).unwrap();
    let spec =
        AttentionSpec { heads_q: 64, heads_kv: 8, head_dim: 128, head_dim_v: 128, ..spec(DType::Bf16, 0) };
    let one_stage = PlanConfig { stages: StageCount::Fixed(1).into(), ..PlanConfig::new(ranks) };
    let flat = Plan::new(&mask, &spec, &one_stage).unwrap();
    let busiest = flat.ranks.iter().map(|rank| rank.recv_rows().max(rank.send_rows())).max().unwrap();
    let compute = spec.flops_forward(mask.area() / ranks as u64) / CostModel::H200.forward_flops_per_second;
    let bytes_per_second = busiest as f64 * spec.kv_row_bytes() as f64 / compute;
    let cost = CostModel { link: Link { bytes_per_second, ..CostModel::H200.link }, ..CostModel::H200 };
    let staged =
        Plan::new(&mask, &spec, &PlanConfig { stages: StageCount::Auto.into(), cost, ..one_stage }).unwrap();
    let seconds = |plan: &Plan| {
        let [forward, backward, _] = programs(plan, &spec, "concurrent");
        [forward, backward].map(|ranks| simulate(&ranks, &Topology::flat(8), &cost).unwrap().makespan())
    };
    let [forward, backward] = seconds(&staged);
    let [flat_forward, flat_backward] = seconds(&flat);
    assert!(forward < 0.85 * flat_forward, "forward {forward} s, in one stage {flat_forward} s");
    assert!(backward < 0.75 * flat_backward, "backward {backward} s, in one stage {flat_backward} s");
}

/// A forward has a state only between stages with work, and its last stage with work writes the results; without remote
/// stages the backward writes `dk` and `dv` themselves.
#[test]
fn a_single_stage_writes_results_at_once() {
    let spec = spec(DType::Bf16, 1);
    let buffer = |program: &Program, id: BufferId| program.buffers[id.0].clone();
    let forwards = |program: &Program| -> Vec<AttentionForward> {
        let ops = program.ops.iter().filter_map(|op| match &op.op {
            Op::AttentionForward(op) => Some(op.clone()),
            _ => None,
        });
        ops.collect()
    };
    let alone = plan(&mask(&[500]), 1, 64, 1);
    let [forward, backward, _] = programs(&alone, &spec, "concurrent");
    let ops = forwards(&forward[0]);
    assert_eq!(ops.len(), 1);
    assert_eq!(ops[0].begin, ForwardBegin::Start);
    assert!(matches!(ops[0].end, ForwardEnd::Result { sink: Some(_), .. }));
    assert!(forward[0].buffers.iter().all(|buffer| buffer.role != BufferRole::Scratch));
    for op in &backward[0].ops {
        if let Op::AttentionBackward(op) = &op.op {
            for (id, name) in [(op.dk, "dk"), (op.dv, "dv")] {
                let written = buffer(&backward[0], id);
                assert_eq!((written.name.as_str(), written.dtype), (name, DType::Bf16));
            }
            assert_eq!(buffer(&backward[0], op.dq).dtype, DType::F32);
        }
    }

    let several = plan(&mask(&[400, 300, 300]), 3, 64, 3);
    let [forward, ..] = programs(&several, &spec, "concurrent");
    let mut states = 0;
    for program in &forward {
        let ops = forwards(program);
        for (i, op) in ops.iter().enumerate() {
            assert_eq!(op.begin == ForwardBegin::Start, i == 0);
            assert_eq!(matches!(op.end, ForwardEnd::Result { .. }), i + 1 == ops.len());
            assert!(ops.len() == 1 || !op.bands.is_empty());
            states += usize::from(matches!(op.end, ForwardEnd::State(_)));
        }
    }
    assert!(states > 0, "some rank needs keys of others");
}

/// The sums of dq are carried from run to run where one operation begins and rounds them, which may then leave zeros; where stages add
/// in turn they are scratch.
#[test]
fn sums_of_one_operation_are_carried() {
    let spec = spec(DType::Bf16, 0);
    let (one, two) = (mask(&[500]), mask(&[400, 300, 300]));
    let plans = [plan(&one, 1, 64, 1), plan(&two, 2, 64, 0), plan(&two, 3, 64, 3)];
    let mut found = [0; 2];
    for program in plans.iter().flat_map(|plan| programs(plan, &spec, "concurrent")).flatten() {
        let ops: Vec<&AttentionBackward> = program
            .ops
            .iter()
            .filter_map(|op| match &op.op {
                Op::AttentionBackward(op) => Some(op),
                Op::BackwardReduce(both) => Some(&both.backward),
                _ => None,
            })
            .collect();
        let Some(first) = ops.first() else { continue };
        let alone = ops.len() == 1;
        let role = if alone { BufferRole::Carried } else { BufferRole::Scratch };
        assert_eq!(program.buffers[first.dq.0].role, role);
        assert!(ops.iter().all(|op| op.dq == first.dq));
        assert!(!alone || (first.accumulate_dq == Accumulate::Start && first.rounded_dq.is_some()));
        found[usize::from(alone)] += 1;
    }
    assert!(found.iter().all(|&count| count > 0), "{found:?}");
}

/// One stage that does all work ends with the sums: of all shares, the own ones too, and rounded. In deterministic mode, whose own
/// share comes first, it does not. While gradients leave under the computation, only their addition is left.
#[test]
fn all_work_at_once_ends_with_the_sums() {
    let (plan, spec) = (plan(&mask(&[1024]), 2, 128, 0), spec(DType::Bf16, 0));
    let [_, backward, deterministic] = programs(&plan, &spec, "concurrent");
    for program in &backward {
        let sums: Vec<&BackwardReduce> = program
            .ops
            .iter()
            .filter_map(|op| match &op.op {
                Op::BackwardReduce(both) => Some(&**both),
                _ => None,
            })
            .collect();
        let [BackwardReduce { backward, reduce }] = sums[..] else { panic!("{} sums", sums.len()) };
        assert!(program.ops.iter().all(|op| !matches!(op.op, Op::Cast { .. } | Op::CopyRows { .. })));
        assert_eq!(reduce.accumulate, Accumulate::Start);
        for (&(share, sum), name) in reduce.tensors.iter().zip(["dk", "dv"]) {
            let (share, sum) = (&program.buffers[share.0], &program.buffers[sum.0]);
            assert_eq!((sum.name.as_str(), sum.dtype, sum.role), (name, DType::Bf16, BufferRole::Output));
            assert_eq!((share.dtype, sum.rows()), (DType::F32, 512));
            let rows = |rank: usize| -> usize {
                let owned = reduce.part.owned.iter().filter(|split| split.ranks.contains(&(rank as u32)));
                owned.map(|split| split.rows.len()).sum()
            };
            assert_eq!(rows(program.rank), 512);
            assert!(rows(1 - program.rank) > 0);
        }
        assert_eq!([backward.dk, backward.dv], [0, 1].map(|at| reduce.tensors[at].0));
    }
    assert!(deterministic.iter().flat_map(|program| &program.ops).all(|op| match &op.op {
        Op::BackwardReduce(_) => false,
        Op::GroupReduce(reduce) => reduce.accumulate == Accumulate::Continue,
        _ => true,
    }));
    // What the last rank to come waits for no other: a start of 10 us, and its rows of 2 heads of 8 elements, dk and dv, 128 bytes each by the
    // link; or, sent meanwhile, read with the own ones and written in half the bytes.
    for (sharing, bytes_per_second) in [(None, 1e8), (Some(WorkerSharing::H200), 1e10)] {
        let timeline = simulate(&backward, &Topology::flat(2), &CostModel { sharing, ..cost() }).unwrap();
        let beyond = backward.iter().map(|program| {
            let Some(part) = program.ops.iter().find_map(|op| match &op.op {
                Op::BackwardReduce(both) => Some(&both.reduce.part),
                _ => None,
            }) else {
                panic!("no sum")
            };
            let others = |rows: usize| rows - 512;
            let owned = part.owned.iter().map(|split| split.rows.len() * split.ranks.len()).sum::<usize>();
            let held = part.remote.iter().map(|split| split.rows.len()).sum::<usize>();
            let bytes = match sharing {
                None => 128 * others(owned).max(others(held)),
                Some(_) => 128 * owned + 64 * 512,
            };
            let of_rank = timeline.spans.iter().filter(|span| span.rank == program.rank);
            let mut sums = of_rank
                .filter(|span| span.kind == SpanKind::Communication && span.label == "attention backward");
            let sum = sums.next().unwrap();
            sum.end - sum.start - 1e-5 - bytes as f64 / bytes_per_second
        });
        let beyond = beyond.fold(f64::INFINITY, f64::min);
        assert!(beyond.abs() < 1e-9, "{beyond}");
    }
}

/// Barriers hold a computation back until the communication that it should hide has started, and no longer.
#[test]
fn barriers_follow_the_casts() {
    let plan = plan(&mask(&[400, 300, 300]), 3, 64, 3);
    let lower = |policy| lower_attention_forward(&plan, 0, &spec(DType::F32, 0), policy, KeyBlocks::Suited);
    let program = lower("kernel-barrier".parse().unwrap());
    let mut started = 0;
    for op in &program.ops {
        match &op.op {
            Op::GroupCast(cast) => {
                assert!(cast.arrive.is_some());
                started += 1;
            }
            Op::Await { arrivals, .. } => assert_eq!(*arrivals, started),
            _ => {}
        }
    }
    assert_eq!(started, 3);
    let plain = lower(OverlapPolicy::default());
    assert!(plain.ops.iter().all(|op| !matches!(op.op, Op::Await { .. })));
    assert_eq!(plain.num_barriers, 0);
}

/// Buffers of remote stages take turns, so that many stages need the memory of a few.
#[test]
fn stage_buffers_take_turns() {
    let spec = spec(DType::Bf16, 0);
    let mask = Mask::full(4096).unwrap();
    let lowered = |stages| programs(&plan(&mask, 2, 128, stages), &spec, "concurrent");
    let scratch = |program: &Program| program.bytes(|role| role == BufferRole::Scratch) as f64;
    let ([one, one_back, _], [few, few_back, _], [many, many_back, deterministic]) =
        (lowered(1), lowered(3), lowered(12));
    assert_eq!((one[0].slots.len(), few[0].slots.len(), many[0].slots.len()), (2, 6, 6));
    assert!(many[0].slots.iter().all(|slot| slot.len() == 4));
    assert_eq!((few_back[0].slots.len(), many_back[0].slots.len()), (12, 12));
    // Shares that wait for one reduction at the end are alive together.
    assert_eq!(deterministic[0].slots.len(), 6);
    let keys =
        one[0].bytes(|role| role == BufferRole::Scratch) as f64 - 4.0 * 2048.0 * (4.0 * 8.0 + 2.0 * 4.0);
    let saved = scratch(&one[0]) - scratch(&many[0]);
    assert!(saved > 0.5 * keys, "{saved} of {keys} bytes: stages are not all of one length");
    // Shares of gradients are of twice the width.
    assert!(scratch(&one_back[0]) - scratch(&many_back[0]) > 0.5 * 3.0 * keys);
    // It costs no time where stages are alike.
    let seconds = |ranks: &[Program]| simulate(ranks, &Topology::flat(2), &cost()).unwrap().makespan();
    let alone = |ranks: &[Program]| {
        let no_turn = |op: &ProgramOp| op.label != "wait for a free buffer";
        let free = |program: &Program| {
            let ops = program.ops.iter().filter(|op| no_turn(op)).cloned().collect();
            Program { slots: Vec::new(), ops, ..program.clone() }
        };
        seconds(&ranks.iter().map(free).collect::<Vec<_>>())
    };
    for ranks in [&many, &many_back] {
        assert!(seconds(ranks) <= 1.001 * alone(ranks), "{} s, {} s", seconds(ranks), alone(ranks));
    }
}

/// In two steps what crosses between nodes is what the plan says, and takes less time than fetching for every rank.
#[test]
fn two_levels_cross_once() {
    let mask = Mask::causal(8192).unwrap();
    let topology = Topology { world_size: 8, ranks_per_node: 4 };
    let network = Link { alpha_seconds: 1e-5, bytes_per_second: 2e5 };
    let cost = CostModel { network, ..cost() };
    let (accumulators, elements) = (GradientShares::Accumulators, GradientShares::Elements);
    for (dtype, stages, gradient_shares) in
        [(DType::Bf16, 1, accumulators), (DType::Bf16, 1, elements), (DType::F32, 4, elements)]
    {
        let exact = spec(dtype, 1);
        let spec = AttentionSpec { gradient_shares, ..exact };
        let flat = plan(&mask, 8, 128, stages);
        let exchange = flat.two_levels(&topology);
        let sink = |programs: &[Program]| -> u64 {
            // The sink's gradient goes through rank 0 in either.
            let far = programs.iter().filter(|program| topology.node(program.rank) != 0).count() as u64;
            2 * far * 4 * u64::from(dtype.accumulator().size() as u32)
        };
        let bytes = |programs: &[Program]| -> u64 {
            programs.iter().map(|program| program.crossing_bytes(&topology)).sum()
        };
        let [flat_forward, flat_backward, _] = programs(&flat, &spec, "concurrent");
        let rows = flat.flat_crossing_rows(&topology);
        assert_eq!(bytes(&flat_forward), rows * spec.kv_row_bytes() as u64);
        let both = flat.over_nodes(&topology);
        for policy in POLICIES {
            let [forward, backward, deterministic] = programs(&both, &spec, policy);
            assert_eq!(bytes(&forward), exchange.crossing_rows() * spec.kv_row_bytes() as u64);
            let there = exchange.backward_crossing_rows();
            let whole = exchange.whole.iter().map(|part| part.inter.send_rows()).sum();
            // One order for any number of stages wants exact shares.
            for (programs, back, spec) in [(&backward, there, &spec), (&deterministic, whole, &exact)] {
                let cast = there * spec.kv_row_bytes() as u64;
                let reduced = back * spec.kv_gradient_row_bytes() as u64;
                assert_eq!(bytes(programs), cast + reduced + sink(programs));
            }
            for program in forward.iter().chain(&backward).chain(&deterministic) {
                assert_eq!(program.validate(), Ok(()), "{policy} {}", program.name);
            }
            let seconds = |ranks: &[Program]| simulate(ranks, &topology, &cost).unwrap().makespan();
            if policy == "concurrent" {
                let (two, one) = (seconds(&forward), seconds(&flat_forward));
                assert!(two < 0.7 * one, "forward: {two} s, flat {one} s");
                let (two, one) = (seconds(&backward), seconds(&flat_backward));
                assert!(two < 0.7 * one, "backward: {two} s, flat {one} s");
            }
        }
    }
}

/// A Program is plain data: it can be written down and read back.
#[test]
fn programs_serialise() {
    let plan = plan(&mask(&[100, 200]), 2, 32, 2);
    for program in programs(&plan, &spec(DType::F16, 1), "concurrent").iter().flatten() {
        let text = serde_json::to_string(program).unwrap();
        assert_eq!(&serde_json::from_str::<Program>(&text).unwrap(), program);
    }
}
