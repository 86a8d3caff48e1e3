//! Softcaps of every size that the command line takes: slopes without cancellation, and a check that knows what rounding does.

use counterpoint_exec::{AttentionInputs, HostTensor};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::{check_attention, compare_with_reference, reference_attention};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{check, inputs, pool, random_mask, run_whole, spec};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn every_softcap_passes_the_check(
        seed: u64,
        seqlen in 1usize..200,
        exponent in -6.0..2.0,
        // One-dimensional gradients nearly all vanish under a small cap, and twice a plain implementation's error then says nothing.
        (dtype, head_dim) in prop::sample::select(vec![
            (DType::F64, 1), (DType::F64, 16), (DType::F32, 1), (DType::F32, 64), (DType::Bf16, 32), (DType::F16, 64),
        ]),
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mask = random_mask(seqlen, seqlen, &mut rng);
        let spec = AttentionSpec { softcap: 10f64.powf(exponent), ..spec(4, 2, head_dim, 16, dtype) };
        check(&mask, &spec, 1.0, &mut rng, &pool(2));
    }
}

/// Six to eight caps, where `1 - tanh^2` has lost most of its digits in f32. One-dimensional products are exact, so that nothing
/// else is rounded before the slope.
#[test]
fn saturated_scores_have_precise_gradients() {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mask = Mask::causal(64).unwrap();
    for softcap in [1.0, 1.0 / 1024.0, 1.0 / (1 << 19) as f64] {
        let spec = AttentionSpec { softcap, scale: 1.0, ..spec(2, 1, 1, 8, DType::F32) };
        let drawn = inputs::<f32>(&mask, &spec, 1.0, &mut rng);
        let ones = HostTensor::from_vec(vec![64, 2, 1], vec![1.0f32; 128]);
        let keys: Vec<f32> = (0..64).map(|_| rng.random_range(6.0..8.0) * softcap as f32).collect();
        let inputs = AttentionInputs { q: ones, k: HostTensor::from_vec(vec![64, 1, 1], keys), ..drawn };
        let reference = reference_attention(&mask, &spec, &inputs).gradients.unwrap();
        let outputs = run_whole::<f32>(&mask, &spec, &inputs, &pool(1));
        for (name, got, expected) in [("dq", outputs.dq, &reference.dq), ("dk", outputs.dk, &reference.dk)] {
            let got = got.unwrap().to_f64();
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut got.iter().zip(expected).map(|(a, b)| a - b));
            let relative = error / norm(&mut expected.iter().copied());
            assert!(relative < 1e-5, "softcap {softcap:e}: {name} is off by {relative:e}");
        }
    }
}

/// What rounding explains at a small cap does not excuse what it does not.
#[test]
fn the_check_still_sees_wrong_gradients_under_a_small_softcap() {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let mask = Mask::causal(150).unwrap();
    let spec = AttentionSpec { softcap: 1e-3, ..spec(2, 2, 32, 32, DType::F32) };
    let inputs = inputs::<f32>(&mask, &spec, 1.0, &mut rng);
    let mut outputs = run_whole::<f32>(&mask, &spec, &inputs, &pool(1));
    assert!(check_attention(&mask, &spec, &inputs, &outputs).passed);
    let dq = outputs.dq.take().unwrap();
    let wrong: Vec<f32> = dq.as_slice::<f32>().unwrap().iter().map(|x| x * 1.02).collect();
    outputs.dq = Some(HostTensor::from_vec(dq.shape().to_vec(), wrong));
    let reference = reference_attention(&mask, &spec, &inputs);
    let report = compare_with_reference(spec.dtype, &reference, &[], &outputs);
    assert!(!report.passed && report.failures().starts_with("dq"), "{}", report.failures());
}
