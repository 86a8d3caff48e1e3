//! Tensors of distributed attention: dispatched, rolled and put together again; refused where they fit nothing.

use counterpoint_choose::{DispatchAlgorithm, StageCount, plan_mask};
use counterpoint_exec::{
    AttentionInputs, Communicator, CpuBuffer, ExecError, HostTensor, RunConfig, World, WorldConfig,
    available_memory, dispatch, run_attention, undispatch,
};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::attention::{DISPATCHES, causal, config, inputs};
use crate::support::{random_mask, spec};

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mask = causal(64);
    let with_sink = AttentionSpec { seqlen_sink: 2, ..spec(4, 2, 16, 8, DType::F32) };
    let plan =
        plan_mask(&mask, &with_sink, &config(2, 16, StageCount::Auto, DispatchAlgorithm::Affinity)).unwrap();
    let good = inputs(&mask, &with_sink, &mut rng);
    let other = |shape: &[usize]| HostTensor::zeros(shape.to_vec(), DType::F32);
    for (name, bad) in [
        ("q", AttentionInputs { q: other(&[64, 4, 8]), ..good.clone() }),
        ("k", AttentionInputs { k: other(&[63, 2, 16]), ..good.clone() }),
        ("v", AttentionInputs { v: HostTensor::zeros(vec![64, 2, 8], DType::F64), ..good.clone() }),
        ("sink", AttentionInputs { sink: None, ..good.clone() }),
        ("sink", AttentionInputs { sink: Some(other(&[2, 2])), ..good.clone() }),
        ("dout", AttentionInputs { dout: Some(other(&[64, 4, 16])), ..good.clone() }),
        ("dlse", AttentionInputs { dlse: Some(other(&[64, 4])), ..good.clone() }),
    ] {
        let error = run_attention(&plan, &with_sink, &bad, &RunConfig::default()).map(drop).unwrap_err();
        assert!(matches!(&error, ExecError::Tensor { name: named, .. } if named == name), "{error}");
    }
}

#[test]
fn what_cannot_fit_into_memory_is_refused_before_it_is_allocated() {
    // 4,096 ranks that each receive nearly all of 32 MiB of keys and values.
    if available_memory().is_none_or(|available| available > 100 << 30) {
        return;
    }
    let seqlen = 4096;
    let whole = Range::new(0, seqlen);
    let mask = Mask::new(seqlen, seqlen, vec![AttnSlice::new(whole, whole, MaskType::Full)]).unwrap();
    let spec = spec(1, 1, 1024, 1024, DType::F32);
    let plan = plan_mask(&mask, &spec, &config(4096, 1, StageCount::Fixed(1), DispatchAlgorithm::Sequential))
        .unwrap();
    let tensor = || HostTensor::zeros(vec![seqlen, 1, 1024], DType::F32);
    let inputs =
        AttentionInputs { q: tensor(), k: tensor(), v: tensor(), sink: None, dout: None, dlse: None };
    match run_attention(&plan, &spec, &inputs, &RunConfig::default()) {
        Err(ExecError::OutOfMemory { needed, available, .. }) => {
            assert!(needed > available);
            assert!(needed > 4095 * (32 << 20), "{needed}");
        }
        other => panic!("{:?}", other.map(|run| run.forward)),
    }
}

#[test]
fn dispatch_and_back() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for _ in 0..50 {
        let seqlen = rng.random_range(1..200);
        let mask = random_mask(seqlen, seqlen, &mut rng);
        let spec = spec(1, 1, 4, 4, DType::F64);
        let (cp_size, chunk_size) = (rng.random_range(1..7), rng.random_range(1..50));
        let algorithm = DISPATCHES[rng.random_range(0..4)];
        let plan =
            plan_mask(&mask, &spec, &config(cp_size, chunk_size, StageCount::Auto, algorithm)).unwrap();
        let whole = HostTensor::from_vec(vec![seqlen, 3], (0..3 * seqlen).map(|i| i as f64).collect());
        let locals: Vec<_> =
            plan.ranks.iter().map(|rank| dispatch(&whole, &rank.q_ranges).unwrap()).collect();
        for (rank, local) in locals.iter().enumerate() {
            let positions: Vec<f64> = local.to_f64().chunks(3).map(|row| row[0] / 3.0).collect();
            assert!(positions.iter().copied().eq(plan.q_dispatch.position_ids(rank).map(|p| p as f64)));
        }
        assert_eq!(undispatch(&plan.q_dispatch, &locals).unwrap(), whole);
    }
}

#[test]
fn rolling_is_undispatch_roll_dispatch() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for _ in 0..20 {
        let seqlen = rng.random_range(1..200);
        let cp_size = rng.random_range(1..6);
        let config = config(cp_size, rng.random_range(1..50), StageCount::Auto, DispatchAlgorithm::Zigzag);
        let plan = plan_mask(&causal(seqlen), &spec(1, 1, 4, 4, DType::F32), &config).unwrap();
        let shift = rng.random_range(-300..300i64);
        let rolled = |shift: i64| {
            let row = |p: usize| (p as i64 - shift).rem_euclid(seqlen as i64) as f32;
            HostTensor::from_vec(vec![seqlen, 1], (0..seqlen).map(row).collect())
        };
        let ranks = Communicator::local(&World::new(cp_size, WorldConfig::default()), None).unwrap();
        let locals = |whole: &HostTensor| -> Vec<CpuBuffer> {
            let local = |rank: usize| dispatch(whole, &plan.ranks[rank].q_ranges).unwrap();
            (0..cp_size).map(|rank| CpuBuffer::new(rank, "rows", local(rank))).collect()
        };
        let (from, to) = (locals(&rolled(0)), locals(&rolled(0)));
        let mut handles = Vec::new();
        for (rank, communicator) in ranks.iter().enumerate() {
            handles.push(communicator.roll(&plan.q_dispatch, shift, &from[rank], &to[rank]).unwrap());
        }
        handles.into_iter().for_each(|handle| handle.synchronize().unwrap());
        let got: Vec<_> = to.iter().map(|buffer| buffer.tensor().unwrap()).collect();
        assert_eq!(undispatch(&plan.q_dispatch, &got).unwrap(), rolled(shift));
    }
}

#[test]
fn undispatch_refuses_what_does_not_fit() {
    let mask = causal(10);
    let spec = spec(1, 1, 4, 4, DType::F64);
    let plan = plan_mask(&mask, &spec, &config(2, 2, StageCount::Auto, DispatchAlgorithm::MinHeap)).unwrap();
    let rows = |rank: usize| plan.q_dispatch.tokens(rank);
    let tensor = |rows, width, dtype| HostTensor::zeros(vec![rows, width], dtype);
    let first = tensor(rows(0), 3, DType::F32);
    for (locals, reason) in [
        (vec![first.clone()], "1 tensors for 2 ranks"),
        (vec![first.clone(), tensor(rows(1) + 1, 3, DType::F32)], "the rank owns"),
        (vec![first.clone(), tensor(rows(1), 2, DType::F32)], "rank 0's is"),
        (vec![first.clone(), tensor(rows(1), 3, DType::F64)], "rank 0's is"),
    ] {
        let error = undispatch(&plan.q_dispatch, &locals).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let error = dispatch(&first, &[Range::new(0, 11)]).unwrap_err().to_string();
    assert!(error.contains("rows 0..11"), "{error}");
}
