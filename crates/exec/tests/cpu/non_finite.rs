//! NaN and infinity in the inputs: which results they make NaN, and that no other result changes by a bit.

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_cpu_kernels::{BackwardArgs, HeadShape, attention_backward};
use counterpoint_exec::{AttentionInputs, AttentionOutputs, HostTensor, RunConfig, run_attention};
use counterpoint_mask::{AttnSlice, Band, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, KEY_BLOCK};
use counterpoint_schedule::Accumulate;
use half::{bf16, f16};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{Cuts, inputs, pool, random_mask, run, spec};

const BAD: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Places of numbers that are not finite, as (row, head) of each tensor.
#[derive(Debug, Default)]
struct Places {
    q: Vec<(usize, usize)>,
    k: Vec<(usize, usize)>,
    v: Vec<(usize, usize)>,
    dout: Vec<(usize, usize)>,
}

/// Whether an element of a result must be NaN, by (row, head); `dsink` by head alone.
struct Expected {
    forward: Vec<bool>,
    dq: Vec<bool>,
    keys: Vec<bool>,
    dsink: Vec<bool>,
}

impl Expected {
    /// The definition: pair by pair.
    fn new(mask: &Mask, spec: &AttentionSpec, places: &Places) -> Self {
        let (rows, cols) = (mask.seqlen_q(), mask.seqlen_k());
        let group = spec.heads_q / spec.heads_kv;
        let bands: Vec<Band> = mask.bands().collect();
        let mut forward = vec![false; rows * spec.heads_q];
        let mut dq = forward.clone();
        let mut keys = vec![false; cols * spec.heads_kv];
        let mut dsink = vec![false; spec.seqlen_sink * spec.heads_q];
        for row in 0..rows {
            let seen: Vec<usize> =
                (0..cols).filter(|&col| bands.iter().any(|band| band.contains(row, col))).collect();
            if seen.is_empty() {
                continue;
            }
            for head in 0..spec.heads_q {
                let kv = head / group;
                let sees = |places: &[(usize, usize)]| {
                    places.iter().any(|&(col, head)| head == kv && seen.contains(&col))
                };
                let at = row * spec.heads_q + head;
                forward[at] = places.q.contains(&(row, head)) || sees(&places.k) || sees(&places.v);
                dq[at] = forward[at] || places.dout.contains(&(row, head));
                if dq[at] {
                    seen.iter().for_each(|col| keys[col * spec.heads_kv + kv] = true);
                    dsink.iter_mut().skip(head).step_by(spec.heads_q).for_each(|x| *x = true);
                }
            }
        }
        Self { forward, dq, keys, dsink }
    }
}

/// NaN where `expected`, one entry for each row and head, says so; else the bits of `clean`.
fn compare(name: &str, poisoned: &HostTensor, clean: &HostTensor, expected: &[bool]) {
    let (poisoned, clean) = (poisoned.to_f64(), clean.to_f64());
    assert_eq!(poisoned.len(), clean.len());
    let width = poisoned.len() / expected.len().max(1);
    for (at, (x, y)) in poisoned.iter().zip(&clean).enumerate() {
        if expected[at / width] {
            assert!(x.is_nan(), "{name}[{at}] is {x}, not NaN");
        } else {
            // Bits, not values: -0.0 is not 0.0.
            assert!(x.to_bits() == y.to_bits(), "{name}[{at}] is {x:e}, was {y:e}");
        }
    }
}

fn compare_all(poisoned: &AttentionOutputs, clean: &AttentionOutputs, expected: &Expected) {
    compare("out", &poisoned.out, &clean.out, &expected.forward);
    compare("lse", &poisoned.lse, &clean.lse, &expected.forward);
    for (name, poisoned, clean, expected) in [
        ("dq", &poisoned.dq, &clean.dq, &expected.dq),
        ("dk", &poisoned.dk, &clean.dk, &expected.keys),
        ("dv", &poisoned.dv, &clean.dv, &expected.keys),
        ("dsink", &poisoned.dsink, &clean.dsink, &expected.dsink),
    ] {
        assert_eq!(poisoned.is_some(), clean.is_some());
        if let (Some(poisoned), Some(clean)) = (poisoned, clean) {
            compare(name, poisoned, clean, expected);
        }
    }
}

/// Overwrites the element `at`.
fn set(tensor: &mut HostTensor, at: usize, value: f64) {
    if let Some(values) = tensor.as_mut_slice::<f64>() {
        values[at] = value;
    } else if let Some(values) = tensor.as_mut_slice::<f32>() {
        values[at] = value as f32;
    } else if let Some(values) = tensor.as_mut_slice::<bf16>() {
        values[at] = bf16::from_f64(value);
    } else if let Some(values) = tensor.as_mut_slice::<f16>() {
        values[at] = f16::from_f64(value);
    }
}

/// Overwrites `count` random elements of a tensor `[rows, heads, width]` and returns their (row, head).
fn poison(tensor: &mut HostTensor, count: usize, rng: &mut ChaCha8Rng) -> Vec<(usize, usize)> {
    let &[rows, heads, width] = tensor.shape() else { unreachable!() };
    (0..count)
        .map(|_| {
            let at = rng.random_range(0..rows * heads * width);
            set(tensor, at, BAD[rng.random_range(0..BAD.len())]);
            (at / width / heads, at / width % heads)
        })
        .collect()
}

fn random_inputs(mask: &Mask, spec: &AttentionSpec, rng: &mut ChaCha8Rng) -> AttentionInputs {
    match spec.dtype {
        DType::F64 => inputs::<f64>(mask, spec, 1.0, rng),
        DType::F32 => inputs::<f32>(mask, spec, 1.0, rng),
        DType::Bf16 => inputs::<bf16>(mask, spec, 1.0, rng),
        DType::F16 => inputs::<f16>(mask, spec, 1.0, rng),
    }
}

fn run_cut(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    stages: &[usize],
) -> AttentionOutputs {
    let (bands, pool): (Vec<Band>, _) = (mask.bands().collect(), pool(2));
    let cuts = Cuts { stages, bands: &bands, pool: &pool };
    let seqlens = (mask.seqlen_q(), mask.seqlen_k());
    match spec.dtype {
        DType::F64 => run::<f64>(seqlens, spec, inputs, &cuts),
        DType::F32 => run::<f32>(seqlens, spec, inputs, &cuts),
        DType::Bf16 => run::<bf16>(seqlens, spec, inputs, &cuts),
        DType::F16 => run::<f16>(seqlens, spec, inputs, &cuts),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn exactly_what_depends_on_them_is_nan(
        seed: u64,
        seqlen_q in 1usize..330,
        seqlen_k in 1usize..330,
        heads in prop::sample::select(vec![(1, 1), (2, 2), (4, 2), (8, 1)]),
        dims in prop::sample::select(vec![(8, 8), (5, 20), (33, 7)]),
        dtype in prop::sample::select(vec![DType::F64, DType::F32, DType::Bf16, DType::F16]),
        softcap in prop::sample::select(vec![0.0, 1.5]),
        seqlen_sink in 0usize..3,
        // Bad numbers in q, k, v, dout.
        counts in prop::sample::select(
            vec![[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1], [3, 2, 0, 5], [40, 9, 9, 40]],
        ),
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mask = random_mask(seqlen_q, seqlen_k, &mut rng);
        let spec = AttentionSpec { softcap, seqlen_sink, ..spec(heads.0, heads.1, dims.0, dims.1, dtype) };
        let clean = random_inputs(&mask, &spec, &mut rng);
        let mut bad = clean.clone();
        let places = Places {
            q: poison(&mut bad.q, counts[0], &mut rng),
            k: poison(&mut bad.k, counts[1], &mut rng),
            v: poison(&mut bad.v, counts[2], &mut rng),
            dout: poison(bad.dout.as_mut().unwrap(), counts[3], &mut rng),
        };
        let mut stages: Vec<usize> =
            (1..seqlen_k.div_ceil(KEY_BLOCK)).filter(|_| rng.random_bool(0.5)).map(|b| b * KEY_BLOCK).collect();
        stages.push(seqlen_k);
        let expected = Expected::new(&mask, &spec, &places);
        let clean = run_cut(&mask, &spec, &clean, &stages);
        compare_all(&run_cut(&mask, &spec, &bad, &stages), &clean, &expected);
    }
}

/// A sink that is not a number is seen by every row of its head; `-inf` draws nothing and is no accident.
#[test]
fn sinks() {
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    let mask = random_mask(150, 170, &mut rng);
    for dtype in [DType::F64, DType::F32] {
        let spec = AttentionSpec { seqlen_sink: 2, ..spec(4, 2, 8, 8, dtype) };
        let clean = random_inputs(&mask, &spec, &mut rng);
        let with = |at: usize, value: f64| {
            let mut inputs = clean.clone();
            set(inputs.sink.as_mut().unwrap(), at, value);
            run_cut(&mask, &spec, &inputs, &[170])
        };
        let ordinary = run_cut(&mask, &spec, &clean, &[170]);
        for value in [f64::NAN, f64::INFINITY] {
            // Entry 1 of head 2.
            let poisoned = with(6, value);
            // What every query row of head 2 does, whatever it sees, and what it does to the keys.
            let of_head: Vec<bool> = (0..150 * 4).map(|at| at % 4 == 2).collect();
            compare("out", &poisoned.out, &ordinary.out, &of_head);
            compare("lse", &poisoned.lse, &ordinary.lse, &of_head);
            let seeing = Expected::new(
                &mask,
                &spec,
                &Places { q: (0..150).map(|row| (row, 2)).collect(), ..Places::default() },
            );
            compare("dq", poisoned.dq.as_ref().unwrap(), ordinary.dq.as_ref().unwrap(), &seeing.dq);
            compare("dk", poisoned.dk.as_ref().unwrap(), ordinary.dk.as_ref().unwrap(), &seeing.keys);
            compare("dv", poisoned.dv.as_ref().unwrap(), ordinary.dv.as_ref().unwrap(), &seeing.keys);
            let dsink: Vec<bool> = (0..8).map(|at| at % 4 == 2).collect();
            compare("dsink", poisoned.dsink.as_ref().unwrap(), ordinary.dsink.as_ref().unwrap(), &dsink);
        }
        let absent = with(6, f64::NEG_INFINITY);
        for tensor in [&absent.out, absent.dq.as_ref().unwrap(), absent.dsink.as_ref().unwrap()] {
            assert!(tensor.to_f64().iter().all(|x| x.is_finite()));
        }
        assert_eq!(absent.dsink.unwrap().to_f64()[6], 0.0);
    }
}

/// Padding that no pair touches, between documents and behind them, on several ranks.
#[test]
fn garbage_in_padding_changes_nothing() {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let documents = [Range::new(0, 90), Range::new(101, 260)];
    let slices = documents.map(|range| AttnSlice::new(range, range, MaskType::Causal)).to_vec();
    let mask = Mask::new(300, 300, slices).unwrap();
    for (dtype, seqlen_sink) in [(DType::F32, 0), (DType::Bf16, 1)] {
        let spec = AttentionSpec { seqlen_sink, ..spec(4, 2, 8, 8, dtype) };
        let clean = random_inputs(&mask, &spec, &mut rng);
        let mut bad = clean.clone();
        for tensor in [&mut bad.q, &mut bad.k, &mut bad.v, bad.dout.as_mut().unwrap()] {
            let row_elements: usize = tensor.shape()[1..].iter().product();
            for row in (0..300).filter(|&row| !documents.iter().any(|range| range.contains(row))) {
                for at in row * row_elements..(row + 1) * row_elements {
                    set(tensor, at, BAD[at % BAD.len()]);
                }
            }
        }
        let config = PlanConfig { chunk_size: Some(16), ..PlanConfig::new(3) };
        let plan = plan_mask(&mask, &spec, &config).unwrap();
        let config = RunConfig { deterministic: true, ..RunConfig::default() };
        let run = |inputs: &AttentionInputs| run_attention(&plan, &spec, inputs, &config).unwrap().outputs;
        compare_all(&run(&bad), &run(&clean), &Expected::new(&mask, &spec, &Places::default()));
    }
}

/// One backward over a full mask, with each of its inputs poisoned on its own: the others are as after a clean forward.
#[test]
fn a_backward_alone() {
    let shape = HeadShape { heads_q: 2, heads_kv: 1, head_dim: 4, head_dim_v: 3 };
    let (rows, keys) = (140, 135);
    let wave = |len: usize, by: f32| -> Vec<f32> { (0..len).map(|x| (x as f32 * by).sin()).collect() };
    // q, k, v, dout, lse, delta
    let clean = [
        wave(rows * 2 * 4, 0.37),
        wave(keys * 4, 0.41),
        wave(keys * 3, 0.43),
        wave(rows * 2 * 3, 0.47),
        vec![5.0; rows * 2],
        wave(rows * 2, 0.53),
    ];
    let backward = |tensors: &[Vec<f32>; 6]| {
        let [q, k, v, dout, lse, delta] = tensors;
        let (mut dq, mut dk, mut dv) = (vec![9.0; rows * 2 * 4], vec![9.0; keys * 4], vec![9.0; keys * 3]);
        let band = Band::full(Range::new(1, rows), Range::new(0, keys - 1));
        attention_backward::<f32, f32>(
            BackwardArgs {
                shape,
                q,
                k,
                v,
                dout,
                lse,
                delta,
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                bands: &[band],
                scale: 0.5,
                softcap: 0.0,
                accumulate_dq: Accumulate::Start,
            },
            &pool(2),
        );
        [(dq, 4), (dk, 4), (dv, 3)]
            .map(|(values, width)| HostTensor::from_vec(vec![values.len() / width, width], values))
    };
    let ordinary = backward(&clean);
    let rows_all: Vec<bool> = (0..rows * 2).map(|at| at / 2 > 0).collect();
    let cols_all: Vec<bool> = (0..keys).map(|col| col < keys - 1).collect();
    let one = |len: usize, at: usize| -> Vec<bool> { (0..len).map(|x| x == at).collect() };
    // (tensor, element, what dq, dk and dv become)
    let cases = [
        (0, (7 * 2 + 1) * 4 + 3, one(rows * 2, 15), cols_all.clone()),
        (1, 133 * 4 + 1, rows_all.clone(), one(keys, 133)),
        (2, 2, rows_all, one(keys, 0)),
        (3, (139 * 2) * 3, one(rows * 2, 278), cols_all.clone()),
        (4, 130, one(rows * 2, 130), cols_all.clone()),
        (5, 3, one(rows * 2, 3), cols_all),
        // Row 0 sees nothing, and nothing sees the last column.
        (0, 2, vec![false; rows * 2], vec![false; keys]),
        (1, (keys - 1) * 4, vec![false; rows * 2], vec![false; keys]),
        (2, keys * 3 - 1, vec![false; rows * 2], vec![false; keys]),
        (3, 5, vec![false; rows * 2], vec![false; keys]),
        (4, 1, vec![false; rows * 2], vec![false; keys]),
        (5, 0, vec![false; rows * 2], vec![false; keys]),
    ];
    for (tensor, at, dq, keys) in cases {
        for value in [f32::NAN, f32::INFINITY] {
            let mut bad = clean.clone();
            bad[tensor][at] = value;
            let poisoned = backward(&bad);
            for (name, index, expected) in [("dq", 0, &dq), ("dk", 1, &keys), ("dv", 2, &keys)] {
                let name = format!("{value} in tensor {tensor}: {name}");
                compare(&name, &poisoned[index], &ordinary[index], expected);
            }
        }
    }
}
