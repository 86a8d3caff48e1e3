//! The CPU attention kernels against the dense reference, and the bits that they promise not to change.

use counterpoint_exec::{AttentionInputs, HostData, HostTensor};
use counterpoint_mask::{AttnSlice, Band, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, KEY_BLOCK};
use counterpoint_reference::{check_attention, reference_attention};
use half::bf16;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{Cuts, TYPES, bits, check, inputs, pool, random_mask, run, run_whole, shatter, spec};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::Bf16, DType::F16];

fn one_slice(seqlen_q: usize, seqlen_k: usize, mask_type: MaskType) -> Mask {
    let slice = AttnSlice::new(Range::new(0, seqlen_q), Range::new(0, seqlen_k), mask_type);
    Mask::new(seqlen_q, seqlen_k, vec![slice]).unwrap()
}

#[test]
fn every_mask_type_and_dtype_square_and_cross() {
    let pool = pool(2);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for mask_type in TYPES {
        for (seqlen_q, seqlen_k) in [(300, 300), (70, 333), (333, 70), (1, 1), (1, 200), (200, 1)] {
            for dtype in DTYPES {
                check(
                    &one_slice(seqlen_q, seqlen_k, mask_type),
                    &spec(2, 1, 16, 16, dtype),
                    1.0,
                    &mut rng,
                    &pool,
                );
            }
        }
    }
}

#[test]
fn head_dims_and_groups() {
    let pool = pool(2);
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mask = random_mask(290, 310, &mut rng);
    for (head_dim, head_dim_v) in
        [(64, 64), (80, 80), (128, 128), (256, 256), (1, 1), (3, 3), (33, 33), (192, 128), (5, 40)]
    {
        for (heads_q, heads_kv) in [(2, 2), (4, 1), (8, 1), (6, 2)] {
            check(&mask, &spec(heads_q, heads_kv, head_dim, head_dim_v, DType::F32), 1.0, &mut rng, &pool);
        }
        check(&mask, &spec(4, 2, head_dim, head_dim_v, DType::F64), 1.0, &mut rng, &pool);
        check(&mask, &spec(4, 2, head_dim, head_dim_v, DType::Bf16), 1.0, &mut rng, &pool);
        check(&mask, &spec(4, 2, head_dim, head_dim_v, DType::F16), 1.0, &mut rng, &pool);
    }
}

#[test]
fn no_slice_at_all() {
    let pool = pool(2);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mask = Mask::new(150, 140, vec![]).unwrap();
    for seqlen_sink in [0, 3] {
        let spec = AttentionSpec { seqlen_sink, ..spec(2, 1, 8, 8, DType::F32) };
        let inputs = inputs::<f32>(&mask, &spec, 1.0, &mut rng);
        let outputs = run_whole::<f32>(&mask, &spec, &inputs, &pool);
        let zeros =
            |tensor: &HostTensor| matches!(tensor.data(), HostData::F32(v) if v.iter().all(|&x| x == 0.0));
        assert!(zeros(&outputs.out));
        for gradient in [outputs.dq, outputs.dk, outputs.dv].into_iter().chain(outputs.dsink.map(Some)) {
            assert!(zeros(&gradient.unwrap()));
        }
        let HostData::F32(lse) = outputs.lse.data() else { unreachable!() };
        assert!(lse.iter().all(|&x| if seqlen_sink == 0 { x == f32::NEG_INFINITY } else { x.is_finite() }));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn random_masks_match_the_reference(
        seed: u64,
        seqlen_q in 1usize..420,
        seqlen_k in 1usize..420,
        heads in prop::sample::select(vec![(1, 1), (2, 2), (4, 1), (8, 1), (6, 3)]),
        dims in prop::sample::select(vec![(8, 8), (16, 24), (33, 7)]),
        dtype in prop::sample::select(DTYPES.to_vec()),
        softcap in prop::sample::select(vec![0.0, 1.5, 30.0]),
        seqlen_sink in 0usize..3,
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mask = random_mask(seqlen_q, seqlen_k, &mut rng);
        let spec = AttentionSpec {
            softcap, seqlen_sink, max_logits: true, dlse: true, ..spec(heads.0, heads.1, dims.0, dims.1, dtype)
        };
        check(&mask, &spec, 1.0, &mut rng, &pool(2));
    }

    /// Threads, stages and the cutting into bands change no bit; nor does what lay in the buffers.
    #[test]
    fn nothing_but_the_pairs_decides_the_bits(
        seed: u64,
        seqlen_q in 1usize..600,
        seqlen_k in 1usize..900,
        heads in prop::sample::select(vec![(1, 1), (4, 2), (8, 1)]),
        half: bool,
        softcap in prop::sample::select(vec![0.0, 4.0]),
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mask = random_mask(seqlen_q, seqlen_k, &mut rng);
        let spec = AttentionSpec {
            softcap, max_logits: true, dlse: true,
            ..spec(heads.0, heads.1, 12, 20, if half { DType::Bf16 } else { DType::F32 })
        };
        let inputs = if half {
            inputs::<bf16>(&mask, &spec, 1.0, &mut rng)
        } else {
            inputs::<f32>(&mask, &spec, 1.0, &mut rng)
        };
        let run = |stages: &[usize], bands: &[Band], threads: usize| {
            let pool = pool(threads);
            let cuts = Cuts { stages, bands, pool: &pool };
            let outputs = if half {
                run::<bf16>((seqlen_q, seqlen_k), &spec, &inputs, &cuts)
            } else {
                run::<f32>((seqlen_q, seqlen_k), &spec, &inputs, &cuts)
            };
            // Bits, not values: -0.0 is not 0.0.
            bits(&outputs)
        };
        let bands: Vec<Band> = mask.bands().collect();
        let whole = run(&[seqlen_k], &bands, 1);
        let mut stages: Vec<usize> =
            (1..seqlen_k.div_ceil(KEY_BLOCK)).filter(|_| rng.random_bool(0.6)).map(|b| b * KEY_BLOCK).collect();
        stages.push(seqlen_k);
        prop_assert!(whole == run(&stages, &bands, 1), "stages {:?}", stages);
        prop_assert!(whole == run(&[seqlen_k], &bands, 3), "threads");
        prop_assert!(whole == run(&[seqlen_k], &shatter(&bands, &mut rng), 2), "bands");
        prop_assert!(whole == run(&stages, &shatter(&bands, &mut rng), 5), "all");
    }
}

/// `sum(out * dout)` by every input, by central differences in f64 against the kernels' gradients.
#[test]
fn gradients_by_finite_differences() {
    let pool = pool(1);
    for (seed, softcap, seqlen_sink) in [(4, 0.0, 0), (5, 2.0, 2), (6, 0.0, 1)] {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mask = random_mask(11, 13, &mut rng);
        let spec = AttentionSpec { softcap, seqlen_sink, ..spec(4, 2, 3, 5, DType::F64) };
        let inputs = inputs::<f64>(&mask, &spec, 1.0, &mut rng);
        let outputs = run_whole::<f64>(&mask, &spec, &inputs, &pool);
        let values = |tensor: &HostTensor| match tensor.data() {
            HostData::F64(values) => values.clone(),
            _ => unreachable!(),
        };
        let dout = values(inputs.dout.as_ref().unwrap());
        let loss = |inputs: &AttentionInputs| -> f64 {
            let forward = AttentionInputs { dout: None, ..inputs.clone() };
            let out = values(&run_whole::<f64>(&mask, &spec, &forward, &pool).out);
            out.iter().zip(&dout).map(|(x, y)| x * y).sum()
        };
        type Access = fn(&mut AttentionInputs) -> Option<&mut HostTensor>;
        let cases: [(&str, Access, Option<&HostTensor>); 4] = [
            ("q", |i| Some(&mut i.q), outputs.dq.as_ref()),
            ("k", |i| Some(&mut i.k), outputs.dk.as_ref()),
            ("v", |i| Some(&mut i.v), outputs.dv.as_ref()),
            ("sink", |i| i.sink.as_mut(), outputs.dsink.as_ref()),
        ];
        for (name, access, gradient) in cases {
            let Some(gradient) = gradient else { continue };
            for (at, &expected) in values(gradient).iter().enumerate() {
                let moved = |by: f64| {
                    let mut inputs = inputs.clone();
                    match access(&mut inputs).unwrap().data_mut() {
                        HostData::F64(values) => values[at] += by,
                        _ => unreachable!(),
                    }
                    loss(&inputs)
                };
                let step = 1e-5;
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                assert!((slope - expected).abs() < 1e-7, "seed {seed} d{name}[{at}]: {slope} {expected}");
            }
        }
    }
}

fn all_finite(outputs: &counterpoint_exec::AttentionOutputs) -> bool {
    let finite = |tensor: &HostTensor| match tensor.data() {
        HostData::F32(values) => values.iter().all(|x| x.is_finite()),
        HostData::Bf16(values) => values.iter().all(|x| x.is_finite()),
        _ => unreachable!(),
    };
    let gradients = [&outputs.dq, &outputs.dk, &outputs.dv, &outputs.dsink];
    finite(&outputs.out) && finite(&outputs.lse) && gradients.into_iter().flatten().all(finite)
}

#[test]
fn huge_scores_stay_finite() {
    let pool = pool(2);
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mask = one_slice(200, 200, MaskType::Causal);
    // Scores of about 1e4, 1e12 and past the largest f32.
    for amplitude in [1e2, 1e6, 1e19, 1e25] {
        for softcap in [0.0, 50.0] {
            for seqlen_sink in [0, 1] {
                let spec = AttentionSpec { softcap, seqlen_sink, ..spec(4, 2, 16, 16, DType::F32) };
                let mut inputs = inputs::<f32>(&mask, &spec, amplitude, &mut rng);
                let outputs = run_whole::<f32>(&mask, &spec, &inputs, &pool);
                let HostData::F32(out) = outputs.out.data() else { unreachable!() };
                assert!(out.iter().all(|x| x.is_finite()), "out, amplitude {amplitude:e}");
                let HostData::F32(lse) = outputs.lse.data() else { unreachable!() };
                assert!(lse.iter().all(|x| x.is_finite()), "lse, amplitude {amplitude:e}");
                if amplitude < 1e10 {
                    assert!(all_finite(&outputs), "gradients, amplitude {amplitude:e}");
                }
                // In f64 the forward has room: the row's choice of key must be the same where it is clear.
                inputs.dout = None;
                if amplitude == 1e2 {
                    let reference = reference_attention(&mask, &spec, &inputs);
                    let worst = out
                        .iter()
                        .zip(&reference.out)
                        .map(|(&x, y)| (f64::from(x) - y).abs())
                        .fold(0.0, f64::max);
                    assert!(worst < 0.02, "{worst}");
                }
            }
        }
    }
}

#[test]
fn ordinary_scores_far_from_zero() {
    // A constant added to all scores of a row must not matter, however large against exp's range.
    let pool = pool(2);
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let mask = random_mask(260, 400, &mut rng);
    for sign in [-1.0, 1.0] {
        let spec = spec(2, 1, 8, 8, DType::F64);
        let mut inputs = inputs::<f64>(&mask, &spec, 1.0, &mut rng);
        for tensor in [&mut inputs.q, &mut inputs.k] {
            let HostData::F64(values) = tensor.data_mut() else { unreachable!() };
            values.iter_mut().step_by(8).for_each(|x| *x = 100.0);
        }
        let HostData::F64(keys) = inputs.k.data_mut() else { unreachable!() };
        keys.iter_mut().step_by(8).for_each(|x| *x *= sign);
        let outputs = run_whole::<f64>(&mask, &spec, &inputs, &pool);
        let mut report = check_attention(&mask, &spec, &inputs, &outputs);
        // Scores of 3.5e3 carry rounding errors of that many units into the exponent.
        for tensor in &mut report.tensors {
            assert!(tensor.relative_error < 1e-10, "{tensor:?}");
        }
    }
}

/// An untouched row keeps the state of an empty softmax, whatever lay in the buffers.
#[test]
fn rows_without_columns_keep_the_empty_state() {
    use counterpoint_cpu_kernels::{ForwardArgs, ForwardMode, HeadShape, StateMutArgs, attention_forward};

    let shape = HeadShape { heads_q: 2, heads_kv: 1, head_dim: 4, head_dim_v: 3 };
    let (rows, keys) = (300, 200);
    let q = vec![1.0f32; rows * 2 * 4];
    let k = vec![1.0f32; keys * 4];
    let v = vec![1.0f32; keys * 3];
    let (mut acc, mut row_max, mut row_sum) =
        (vec![f32::NAN; rows * 2 * 3], vec![f32::NAN; rows * 2], vec![f32::NAN; rows * 2]);
    let band = AttnSlice::new(Range::new(10, 20), Range::new(130, 190), MaskType::Full).band();
    attention_forward::<f32>(
        ForwardArgs {
            shape,
            q: &q,
            k: &k,
            v: &v,
            mode: ForwardMode::First(StateMutArgs {
                acc: &mut acc,
                row_max: &mut row_max,
                row_sum: &mut row_sum,
            }),
            bands: &[band],
            scale: 0.5,
            softcap: 0.0,
            max_logits: None,
        },
        &pool(2),
    );
    for row in 0..rows {
        let seen = (10..20).contains(&row);
        for head in 0..2 {
            let at = row * 2 + head;
            assert_eq!(row_max[at], if seen { 2.0 } else { f32::NEG_INFINITY });
            assert_eq!(row_sum[at], if seen { 60.0 } else { 0.0 });
            assert_eq!(acc[at * 3..at * 3 + 3], [row_sum[at]; 3]);
        }
    }
}

/// The yardstick of the 16-bit types notices one wrong element of any tensor.
#[test]
fn a_wrong_element_does_not_pass_the_check() {
    let pool = pool(2);
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let mask = random_mask(130, 150, &mut rng);
    let spec = spec(4, 2, 16, 16, DType::Bf16);
    let inputs = inputs::<bf16>(&mask, &spec, 1.0, &mut rng);
    let right = run_whole::<bf16>(&mask, &spec, &inputs, &pool);
    assert!(check_attention(&mask, &spec, &inputs, &right).passed);
    for name in ["out", "dq", "dk", "dv"] {
        let mut wrong = right.clone();
        let tensor = match name {
            "out" => &mut wrong.out,
            "dq" => wrong.dq.as_mut().unwrap(),
            "dk" => wrong.dk.as_mut().unwrap(),
            _ => wrong.dv.as_mut().unwrap(),
        };
        let values = tensor.as_mut_slice::<bf16>().unwrap();
        let largest = values.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        // A few units in the last place of the largest element.
        let at = values.len() / 2;
        values[at] = bf16::from_f32(values[at].to_f32() + largest / 40.0);
        let report = check_attention(&mask, &spec, &inputs, &wrong);
        let failed: Vec<&str> =
            report.tensors.iter().filter(|t| !t.passed).map(|t| t.name.as_str()).collect();
        assert_eq!(failed, [name], "{report:#?}");
    }
}
