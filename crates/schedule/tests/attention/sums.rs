//! Where states, sums of gradients and results are made, kept and written.

use counterpoint_cost::{CostModel, WorkerSharing};
use counterpoint_plan::*;
use counterpoint_schedule::*;

use crate::{cost, mask, plan, programs, spec};

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

/// The sums of dq persist from run to run where one operation begins and rounds them, which may then leave zeros; where stages add
/// in turn they are scratch.
#[test]
fn sums_of_one_operation_persist() {
    let spec = spec(DType::Bf16, 0);
    let (one, two) = (mask(&[500]), mask(&[400, 300, 300]));
    let plans = [plan(&one, 1, 64, 1), plan(&two, 2, 64, 0), plan(&two, 3, 64, 3)];
    let mut found = [0; 2];
    for program in plans.iter().flat_map(|plan| programs(plan, &spec, "concurrent")).flatten() {
        let ops: Vec<&AttentionBackward> = program.ops.iter().filter_map(|op| op.op.backward()).collect();
        let Some(first) = ops.first() else { continue };
        let alone = ops.len() == 1;
        let role = if alone { BufferRole::Persistent } else { BufferRole::Scratch };
        assert_eq!(program.buffers[first.dq.0].role, role);
        assert!(ops.iter().all(|op| op.dq == first.dq));
        assert!(!alone || (first.accumulate_dq == Accumulate::Start && first.rounded_dq.is_some()));
        found[usize::from(alone)] += 1;
    }
    assert!(found.iter().all(|&count| count > 0), "{found:?}");
}

/// A backward and the sums of its gradients.
fn sums(op: &Op) -> Option<(&AttentionBackward, &GroupReduce)> {
    match op.parts() {
        [Op::AttentionBackward(backward), Op::GroupReduce(reduce)] => Some((backward, reduce)),
        _ => None,
    }
}

/// One stage that does all work ends with the sums: of all partial sums, the own ones too, and rounded. In deterministic mode, whose own
/// partial sum comes first, it does not. While gradients leave under the computation, only their addition is left.
#[test]
fn all_work_at_once_ends_with_the_sums() {
    let (plan, spec) = (plan(&mask(&[1024]), 2, 128, 0), spec(DType::Bf16, 0));
    let [_, backward, deterministic] = programs(&plan, &spec, "concurrent");
    for program in &backward {
        let found: Vec<_> = program.ops.iter().filter_map(|op| sums(&op.op)).collect();
        let [(backward, reduce)] = found[..] else { panic!("{} sums", found.len()) };
        assert!(program.ops.iter().all(|op| !matches!(op.op, Op::Cast { .. } | Op::CopyRows { .. })));
        assert_eq!(reduce.accumulate, Accumulate::Start);
        for (&(partial, sum), name) in reduce.tensors.iter().zip(["dk", "dv"]) {
            let (partial, sum) = (&program.buffers[partial.0], &program.buffers[sum.0]);
            assert_eq!((sum.name.as_str(), sum.dtype, sum.role), (name, DType::Bf16, BufferRole::Output));
            assert_eq!((partial.dtype, sum.rows()), (DType::F32, 512));
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
        Op::Fused(_) => false,
        Op::GroupReduce(reduce) => reduce.accumulate == Accumulate::Continue,
        _ => true,
    }));
    // What the last rank to come waits for no other: a start of 10 us, and its rows of 2 heads of 8 elements, dk and dv, 128 bytes each by the
    // link; or, sent meanwhile, read with the own ones and written in half the bytes.
    for (sharing, bytes_per_second) in [(None, 1e8), (Some(WorkerSharing::H200), 1e10)] {
        let timeline = simulate(&backward, &Topology::flat(2), &CostModel { sharing, ..cost() }).unwrap();
        let beyond = backward.iter().map(|program| {
            let Some((_, GroupReduce { part, .. })) = program.ops.iter().find_map(|op| sums(&op.op)) else {
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
