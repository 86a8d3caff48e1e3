//! Group collectives against a simple model, on random patterns.

use counterpoint_exec::{
    Communicator, CpuBackend, CpuBuffer, CpuTransport, HostTensor, Reduce, World, WorldConfig,
};
use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{Accumulate, OverlapPolicy, ReduceOp};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::pattern::{DTYPES, Pattern, epsilon, moves, random, round, tensor};

type Local = Communicator<CpuBackend, CpuTransport>;

pub(crate) fn connect(world_size: usize) -> Vec<Local> {
    Communicator::local(&World::new(world_size, WorldConfig::default()), None).unwrap()
}

/// One tensor of every rank.
type PerRank = Vec<CpuBuffer>;

fn buffers(rng: &mut ChaCha8Rng, rows: &[usize], tail: &[usize], dtype: DType) -> PerRank {
    rows.iter()
        .enumerate()
        .map(|(rank, &rows)| {
            let shape = [&[rows], tail].concat();
            let len: usize = shape.iter().product();
            let values: Vec<f64> = (0..len).map(|_| rng.random_range(-4.0..4.0)).collect();
            CpuBuffer::new(rank, "test", tensor(&shape, dtype, &values))
        })
        .collect()
}

fn values(buffers: &PerRank) -> Vec<Vec<f64>> {
    buffers.iter().map(|buffer| buffer.tensor().unwrap().to_f64()).collect()
}

fn cast(ranks: &[Local], pattern: &Pattern, tensors: &[(&PerRank, &PerRank)], wire: DType) {
    let handles: Vec<_> = ranks
        .iter()
        .enumerate()
        .map(|(rank, local)| {
            let tensors: Vec<_> = tensors.iter().map(|(from, to)| (&from[rank], &to[rank])).collect();
            local.group_cast("cast", &pattern.parts[rank], &tensors, wire).unwrap()
        })
        .collect();
    handles.into_iter().for_each(|handle| handle.synchronize().unwrap());
}

fn reduce(ranks: &[Local], pattern: &Pattern, tensors: &[(&PerRank, &PerRank)], how: Reduce) {
    let handles: Vec<_> = ranks
        .iter()
        .enumerate()
        .map(|(rank, local)| {
            let tensors: Vec<_> = tensors.iter().map(|(from, to)| (&from[rank], &to[rank])).collect();
            local.group_reduce("reduce", &pattern.parts[rank], &tensors, how).unwrap()
        })
        .collect();
    handles.into_iter().for_each(|handle| handle.synchronize().unwrap());
}

/// Every combination of types, so that no test leaves one out by chance.
fn combinations() -> Vec<(DType, DType, DType, DType)> {
    let mut out = Vec::new();
    for partial in DTYPES {
        for wire in DTYPES {
            for sum in DTYPES {
                for result in DTYPES {
                    out.push((partial, wire, sum, result));
                }
            }
        }
    }
    out
}

#[test]
fn a_cast_moves_exactly_what_the_pattern_says() {
    for seed in 0..60u64 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let world_size = rng.random_range(1..=6);
        let pattern = random(&mut rng, world_size);
        let ranks = connect(world_size);
        let (first, second, wire) =
            (DTYPES[seed as usize % 4], DTYPES[seed as usize / 4 % 4], DTYPES[seed as usize / 16 % 4]);
        let k = buffers(&mut rng, &pattern.owned_rows, &[3], first);
        let v = buffers(&mut rng, &pattern.owned_rows, &[2, 5], second);
        let k_out = buffers(&mut rng, &pattern.remote_rows, &[3], first);
        let v_out = buffers(&mut rng, &pattern.remote_rows, &[2, 5], second);
        let mut expected = [values(&k_out), values(&v_out)];
        let sent = [values(&k), values(&v)];
        let mut moved = 0;
        for m in moves(&pattern) {
            moved += 1;
            for (tensor, (row, dtype)) in [(3, first), (10, second)].into_iter().enumerate() {
                for i in 0..row {
                    let value = sent[tensor][m.owner][m.owned_row * row + i];
                    expected[tensor][m.holder][m.remote_row * row + i] = round(round(value, wire), dtype);
                }
            }
        }
        assert_eq!(moved, pattern.parts.iter().map(GroupPart::recv_rows).sum::<u64>(), "seed {seed}");
        cast(&ranks, &pattern, &[(&k, &k_out), (&v, &v_out)], wire);
        assert_eq!([values(&k_out), values(&v_out)], expected, "seed {seed}");
    }
}

/// Sum and average to the last bit: every addition rounded once to the type of the sums, own operand first, then by source
/// rank.
#[test]
fn sums_and_averages_in_every_combination_of_types() {
    for (seed, (partial, wire, sum, result)) in combinations().into_iter().enumerate() {
        let mut rng = ChaCha8Rng::seed_from_u64(seed as u64);
        let world_size = rng.random_range(1..=5);
        let pattern = random(&mut rng, world_size);
        let ranks = connect(world_size);
        for (op, accumulate) in [
            (ReduceOp::Sum, Accumulate::Start),
            (ReduceOp::Sum, Accumulate::Continue),
            (ReduceOp::Avg, Accumulate::Start),
            (ReduceOp::Avg, Accumulate::Continue),
        ] {
            let x = buffers(&mut rng, &pattern.remote_rows, &[7], partial);
            let y = buffers(&mut rng, &pattern.owned_rows, &[7], result);
            let mut expected = values(&y);
            let mut operands: Vec<Vec<u32>> = pattern.owned_rows.iter().map(|&rows| vec![0; rows]).collect();
            if accumulate == Accumulate::Start {
                expected.iter_mut().flatten().for_each(|value| *value = 0.0);
            } else {
                expected.iter_mut().flatten().for_each(|value| *value = round(*value, sum));
                operands.iter_mut().flatten().for_each(|count| *count = 1);
            }
            let partials = values(&x);
            let mut arriving = moves(&pattern);
            arriving.sort_by_key(|m| m.holder);
            for m in &arriving {
                operands[m.owner][m.owned_row] += 1;
                for i in 0..7 {
                    let term = round(round(partials[m.holder][m.remote_row * 7 + i], wire), sum);
                    let total = &mut expected[m.owner][m.owned_row * 7 + i];
                    *total = round(*total + term, sum);
                }
            }
            let own = values(&y);
            for ((row, count), own) in expected
                .iter_mut()
                .zip(&operands)
                .flat_map(|(rows, n)| rows.chunks_mut(7).zip(n))
                .zip(own.iter().flat_map(|rows| rows.chunks(7)))
            {
                // A row that nobody sends is left alone, not rounded.
                if accumulate == Accumulate::Continue && *count == 1 {
                    row.copy_from_slice(own);
                    continue;
                }
                for value in row {
                    if op == ReduceOp::Avg {
                        *value = round(*value / f64::from((*count).max(1)), sum);
                    }
                    *value = round(*value, result);
                }
            }
            let how = Reduce { op, accumulate, wire_dtype: wire, reduce_dtype: sum };
            reduce(&ranks, &pattern, &[(&x, &y)], how);
            assert_eq!(
                values(&y),
                expected,
                "{partial:?} over {wire:?} in {sum:?} to {result:?}, {op:?} {accumulate:?}"
            );
        }
    }
}

/// The largest error of a merge against the formula in f64, in units of what rounding allows.
fn merge_error(seed: u64, types: (DType, DType, DType, DType), accumulate: Accumulate) -> f64 {
    const HEADS: usize = 2;
    const DIM: usize = 3;
    let (partial, wire, sum, result) = types;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let world_size = rng.random_range(1..=5);
    let pattern = random(&mut rng, world_size);
    let ranks = connect(world_size);
    // Statistics as wide as attention keeps them; some sides saw nothing, and hold what must not count.
    let stat = partial.accumulator();
    let mut sides = |rows: &[usize], out_type: DType, lse_type: DType| {
        let out = buffers(&mut rng, rows, &[HEADS, DIM], out_type);
        let lse = buffers(&mut rng, rows, &[HEADS], lse_type);
        for (out, lse) in out.iter().zip(&lse) {
            let (mut outs, mut lses) = (out.tensor().unwrap().to_f64(), lse.tensor().unwrap().to_f64());
            for (at, lse) in lses.iter_mut().enumerate() {
                if rng.random_bool(0.3) {
                    *lse = f64::NEG_INFINITY;
                    outs[at * DIM..(at + 1) * DIM].fill(f64::NAN);
                }
            }
            out.store(tensor(out.shape(), out_type, &outs)).unwrap();
            lse.store(tensor(lse.shape(), lse_type, &lses)).unwrap();
        }
        (out, lse)
    };
    let (out, lse) = sides(&pattern.remote_rows, partial, stat);
    let (out_result, lse_result) = sides(&pattern.owned_rows, result, result.accumulator());

    let (outs, lses) = (values(&out), values(&lse));
    let (own_out, own_lse) = (values(&out_result), values(&lse_result));
    let how = Reduce { op: ReduceOp::Lse, accumulate, wire_dtype: wire, reduce_dtype: sum };
    reduce(&ranks, &pattern, &[(&out, &out_result), (&lse, &lse_result)], how);
    let (got_out, got_lse) = (values(&out_result), values(&lse_result));

    let mut worst = 0.0f64;
    let arriving = moves(&pattern);
    for (owner, &rows) in pattern.owned_rows.iter().enumerate() {
        for at in 0..rows * HEADS {
            let mut sides: Vec<(f64, &[f64])> = Vec::new();
            if accumulate == Accumulate::Continue {
                sides.push((own_lse[owner][at], &own_out[owner][at * DIM..][..DIM]));
            }
            for m in arriving.iter().filter(|m| m.owner == owner && m.owned_row == at / HEADS) {
                let from = m.remote_row * HEADS + at % HEADS;
                sides.push((lses[m.holder][from], &outs[m.holder][from * DIM..][..DIM]));
            }
            if sides.len() == 1 && accumulate == Accumulate::Continue {
                continue; // Nothing arrived: the row is as it was.
            }
            sides.retain(|(lse, _)| *lse > f64::NEG_INFINITY);
            let total: f64 = sides.iter().map(|(lse, _)| lse.exp()).sum();
            let expected_lse = total.ln();
            // Every merge rounds the statistic (at most 6 here) and with it the weights of what came before.
            let unit = (1.0 + sides.len() as f64)
                * (8.0 * epsilon(sum) + 4.0 * epsilon(wire) + epsilon(result) + epsilon(stat));
            let lse = got_lse[owner][at];
            if sides.is_empty() {
                assert_eq!(lse, f64::NEG_INFINITY);
            } else {
                worst = worst.max((lse - expected_lse).abs() / unit / 4.0);
            }
            for i in 0..DIM {
                let expected: f64 = sides.iter().map(|(lse, out)| (lse - expected_lse).exp() * out[i]).sum();
                let got = got_out[owner][at * DIM + i];
                if sides.is_empty() {
                    assert_eq!(got, 0.0);
                }
                worst = worst.max((got - expected).abs() / unit / 4.0);
                assert!(got.is_finite());
            }
        }
    }
    worst
}

#[test]
fn merges_of_attention_results_in_every_combination_of_types() {
    for (seed, types) in combinations().into_iter().enumerate() {
        for accumulate in [Accumulate::Start, Accumulate::Continue] {
            let error = merge_error(seed as u64, types, accumulate);
            assert!(error <= 1.0, "seed {seed}, {types:?}, {accumulate:?}: {error} of the bound");
        }
    }
}

#[test]
fn the_logarithm_of_a_merge_is_never_narrowed() {
    // Over a bf16 wire the weights must still come from the f32 statistic: 8.015625 is no bf16.
    let ranks = connect(2);
    let parts = [GroupPart::from_splits([(1, &[1u32][..])], []), GroupPart::from_splits([], [(1, 0)])];
    let out = [buffer(&[1, 1, 1], DType::F32, &[1.0]), buffer(&[1, 1, 1], DType::F32, &[3.0])];
    let lse = [buffer(&[1, 1], DType::F32, &[f64::NEG_INFINITY]), buffer(&[1, 1], DType::F32, &[8.015625])];
    let results = [buffer(&[1, 1, 1], DType::F32, &[0.0]), buffer(&[1, 1], DType::F32, &[0.0])];
    let unused = [buffer(&[1, 1, 1], DType::F32, &[0.0]), buffer(&[1, 1], DType::F32, &[0.0])];
    let how = Reduce {
        op: ReduceOp::Lse,
        accumulate: Accumulate::Start,
        wire_dtype: DType::Bf16,
        reduce_dtype: DType::F32,
    };
    let first =
        ranks[0].group_reduce("merge", &parts[0], &[(&out[0], &results[0]), (&lse[0], &results[1])], how);
    let second =
        ranks[1].group_reduce("merge", &parts[1], &[(&out[1], &unused[0]), (&lse[1], &unused[1])], how);
    first.unwrap().synchronize().unwrap();
    second.unwrap().synchronize().unwrap();
    assert_eq!(results[1].tensor().unwrap().to_f64(), [8.015625]);
    assert_eq!(results[0].tensor().unwrap().to_f64(), [3.0]);
}

pub(crate) fn buffer(shape: &[usize], dtype: DType, values: &[f64]) -> CpuBuffer {
    CpuBuffer::new(0, "test", tensor(shape, dtype, values))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// `<cast(x), y> = <x, reduce(y)>`, exactly, on integers.
    #[test]
    fn reduce_is_the_adjoint_of_cast(seed: u64, world_size in 1usize..7) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let pattern = random(&mut rng, world_size);
        let ranks = connect(world_size);
        let integers = |rng: &mut ChaCha8Rng, rows: &[usize]| -> PerRank {
            let one = |&rows: &usize| {
                let values: Vec<f64> = (0..rows * 3).map(|_| f64::from(rng.random_range(-9..=9i32))).collect();
                buffer(&[rows, 3], DType::F64, &values)
            };
            rows.iter().map(one).collect()
        };
        let zeros = |rows: &[usize]| -> PerRank {
            rows.iter().map(|&rows| CpuBuffer::new(0, "zeros", HostTensor::zeros(vec![rows, 3], DType::F64))).collect()
        };
        let (x, y) = (integers(&mut rng, &pattern.owned_rows), integers(&mut rng, &pattern.remote_rows));
        let (cast_x, reduced_y) = (zeros(&pattern.remote_rows), zeros(&pattern.owned_rows));
        cast(&ranks, &pattern, &[(&x, &cast_x)], DType::F64);
        let how = Reduce {
            op: ReduceOp::Sum, accumulate: Accumulate::Start, wire_dtype: DType::F64, reduce_dtype: DType::F64,
        };
        reduce(&ranks, &pattern, &[(&y, &reduced_y)], how);
        let dot = |a: &PerRank, b: &PerRank| -> f64 {
            values(a).concat().iter().zip(values(b).concat()).map(|(a, b)| a * b).sum()
        };
        prop_assert_eq!(dot(&cast_x, &y), dot(&x, &reduced_y));
    }

    /// Same bits in every repetition, though partial sums in bf16 depend strongly on the order of operands.
    #[test]
    fn repeats_are_bit_equal(seed: u64) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let pattern = random(&mut rng, 5);
        let ranks = connect(5);
        let x = buffers(&mut rng, &pattern.remote_rows, &[4], DType::Bf16);
        let y = buffers(&mut rng, &pattern.owned_rows, &[4], DType::F32);
        let initial: Vec<HostTensor> = y.iter().map(|buffer| buffer.tensor().unwrap()).collect();
        let how = Reduce {
            op: ReduceOp::Sum, accumulate: Accumulate::Continue, wire_dtype: DType::Bf16, reduce_dtype: DType::Bf16,
        };
        let mut first = None;
        for _ in 0..5 {
            y.iter().zip(&initial).for_each(|(buffer, tensor)| buffer.store(tensor.clone()).unwrap());
            reduce(&ranks, &pattern, &[(&x, &y)], how);
            let got = values(&y);
            prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
        }
    }
}

#[test]
fn special_cases() {
    let ranks = connect(3);
    let lengths = [2usize, 0, 3];
    let own: PerRank = (0..3)
        .map(|rank| {
            let values: Vec<f64> = (0..lengths[rank]).map(|row| (10 * rank + row) as f64).collect();
            buffer(&[lengths[rank], 1], DType::F32, &values)
        })
        .collect();
    let all: PerRank = (0..3).map(|_| buffer(&[5, 1], DType::F32, &[0.0; 5])).collect();
    let parts: Vec<_> = (0..3).map(|rank| GroupPart::all_gather_v(rank, &lengths)).collect();
    let gather = Pattern { parts, owned_rows: lengths.to_vec(), remote_rows: vec![5; 3] };
    cast(&ranks, &gather, &[(&own, &all)], DType::F32);
    assert_eq!(values(&all), vec![vec![0.0, 1.0, 20.0, 21.0, 22.0]; 3]);
    // Mirrored: a reduce-scatter of three equal partial results.
    let how = Reduce {
        op: ReduceOp::Sum,
        accumulate: Accumulate::Start,
        wire_dtype: DType::F32,
        reduce_dtype: DType::F32,
    };
    reduce(&ranks, &gather, &[(&all, &own)], how);
    assert_eq!(values(&own), [vec![0.0, 3.0], vec![], vec![60.0, 63.0, 66.0]]);
    // A broadcast from rank 2.
    let parts: Vec<_> = (0..3).map(|rank| GroupPart::broadcast(rank, 3, 2, 3)).collect();
    let broadcast = Pattern { parts, owned_rows: lengths.to_vec(), remote_rows: vec![3; 3] };
    let out: PerRank = (0..3).map(|_| buffer(&[3, 1], DType::F32, &[0.0; 3])).collect();
    cast(&ranks, &broadcast, &[(&own, &out)], DType::F32);
    assert_eq!(values(&out), vec![vec![60.0, 63.0, 66.0]; 3]);
}

#[test]
fn a_handle_orders_another_stream() {
    use counterpoint_exec::Backend;
    use counterpoint_schedule::{StreamKind, StreamSpec};
    let ranks = connect(2);
    let parts = [GroupPart::from_splits([(1, &[1u32][..])], []), GroupPart::from_splits([], [(1, 0)])];
    let from = [buffer(&[1], DType::F64, &[5.0]), buffer(&[1], DType::F64, &[6.0])];
    let to = [buffer(&[1], DType::F64, &[0.0]), buffer(&[1], DType::F64, &[0.0])];
    // Rank 1 first, alone. What it receives is not looked at before rank 0 has come: it may be about to be written.
    let receiving = ranks[1].group_cast("cast", &parts[1], &[(&from[1], &to[1])], DType::F64).unwrap();
    let backend = ranks[1].backend();
    let spec = StreamSpec { name: "other".into(), kind: StreamKind::Compute };
    let other = backend.create_stream(&spec, &OverlapPolicy::default()).unwrap();
    receiving.wait(&other).unwrap();
    ranks[0].group_cast("cast", &parts[0], &[(&from[0], &to[0])], DType::F64).unwrap().synchronize().unwrap();
    backend.synchronize(&[&other]).unwrap();
    assert_eq!(to[1].tensor().unwrap().to_f64(), [5.0]);
}
