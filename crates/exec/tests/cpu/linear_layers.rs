//! Layers that are prepared once: several micro-batches, queues of gradients, scratch memory in common.

use counterpoint_cost::CostModel;
use counterpoint_exec::{
    ColumnParallelLinear, CpuBuffer, CpuMachine, ExecError, Group, HostTensor, LayerCall, LayerGradient,
    LayerOverlap, LinearInputs, LinearLayer, LinearOptions, LinearOutputs, LinearTensor, RowParallelLinear,
    WorldConfig,
};
use counterpoint_plan::{Activations, DType, LinearSize, WaveGroups};
use counterpoint_reference::{LinearSample, SumRounding, check_linear_part};
use counterpoint_schedule::{OverlapPolicy, StartOrder, WeightGradient};

const RANKS: usize = 3;
const TOKENS: usize = 20;

/// Small whole numbers, whose sums are exact.
fn whole(rows: usize, columns: usize, seed: usize) -> HostTensor {
    let values = (0..rows * columns).map(|i| (((i + seed) * 7919) % 13) as f32 - 6.0);
    HostTensor::from_vec(vec![rows, columns], values.collect())
}

fn values(tensor: &HostTensor) -> &[f32] {
    tensor.as_slice().unwrap()
}

/// `a [m, k]` times `b [n, k]` transposed.
fn times_transposed(a: &HostTensor, b: &HostTensor) -> HostTensor {
    let k = a.row_elements();
    let rows = values(a).chunks_exact(k);
    let product = rows.flat_map(|row| {
        values(b).chunks_exact(k).map(move |column| row.iter().zip(column).map(|(x, y)| x * y).sum::<f32>())
    });
    HostTensor::from_vec(vec![a.rows(), b.rows()], product.collect())
}

fn transposed(a: &HostTensor) -> HostTensor {
    let columns = a.row_elements();
    let values = (0..columns).flat_map(|c| values(a).chunks_exact(columns).map(move |row| row[c]));
    HostTensor::from_vec(vec![columns, a.rows()], values.collect())
}

fn sum(tensors: &[HostTensor]) -> HostTensor {
    let mut sum = tensors[0].clone();
    for tensor in &tensors[1..] {
        sum.as_mut_slice::<f32>().unwrap().iter_mut().zip(values(tensor)).for_each(|(sum, x)| *sum += x);
    }
    sum
}

fn options(gradient: LayerGradient, activations: Activations) -> LinearOptions {
    LinearOptions {
        gradient,
        activations,
        overlap: LayerOverlap::Policy(
            OverlapPolicy::new(StartOrder::Concurrent),
            WaveGroups::Fixed(2).into(),
            CostModel::H200,
        ),
        ..LinearOptions::new(DType::F32)
    }
}

/// Runs micro-batches through a layer that adds its gradients to one `main_grad`; compares all results with the definition.
/// Returns how many gradients waited after each backward.
fn micro_batches(layer: &mut LinearLayer<CpuMachine>, count: usize) -> Vec<usize> {
    let spec = layer.plan().spec;
    let weight = whole(spec.out_features, spec.in_features, 1);
    let before = whole(spec.out_features, spec.in_features, 2);
    let main_grad = layer.scatter(LinearTensor::Weight, &before).unwrap();
    let parts = layer.scatter(LinearTensor::Weight, &weight).unwrap();
    layer.bind_weight(&parts, None).unwrap();
    layer.bind_main_grad(&main_grad, None).unwrap();
    let mut gradients = vec![before];
    let mut waited = Vec::new();
    for batch in 0..count {
        let (x, dy) =
            (whole(TOKENS, spec.in_features, 10 + batch), whole(TOKENS, spec.out_features, 20 + batch));
        let x_parts = layer.scatter(LinearTensor::Input, &x).unwrap();
        let dy_parts = layer.scatter(LinearTensor::Output, &dy).unwrap();
        let y = layer.forward(&x_parts).unwrap().result;
        assert_eq!(layer.gather(LinearTensor::Output, &y).unwrap(), times_transposed(&x, &weight));
        let dx = layer.backward(&x_parts, &dy_parts).unwrap().result;
        let wanted = times_transposed(&dy, &transposed(&weight));
        assert_eq!(layer.gather(LinearTensor::Input, &dx).unwrap(), wanted);
        gradients.push(times_transposed(&transposed(&dy), &transposed(&x)));
        waited.push(layer.waiting());
        let done = layer.gather(LinearTensor::Weight, &main_grad).unwrap();
        assert_eq!(done, sum(&gradients[..gradients.len() - layer.waiting()]), "batch {batch}");
    }
    // One after the other, or as calls that the host does not wait for.
    if layer.waiting() < count {
        layer.flush().unwrap();
    } else {
        layer.enqueue_flush(None).unwrap().iter().for_each(|ticket| ticket.wait().unwrap());
    }
    assert_eq!(layer.waiting(), 0);
    assert_eq!(layer.gather(LinearTensor::Weight, &main_grad).unwrap(), sum(&gradients));
    waited
}

fn size(tokens: usize, in_features: usize, out_features: usize) -> LinearSize {
    LinearSize { tokens, in_features, out_features }
}

#[test]
fn queues_hold_as_many_gradients_as_they_may() {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    for activations in [Activations::Replicated, Activations::SequenceParallel] {
        for (gradient, wanted) in [
            (LayerGradient::Accumulated(DType::F32), [0, 0, 0, 0, 0]),
            (LayerGradient::Deferred { into: Some(DType::F32), limit: 1 }, [1, 1, 1, 1, 1]),
            (LayerGradient::Deferred { into: Some(DType::F32), limit: 3 }, [1, 2, 3, 3, 3]),
            (LayerGradient::Deferred { into: Some(DType::F32), limit: 0 }, [1, 2, 3, 4, 5]),
        ] {
            let options = options(gradient, activations);
            let mut column = ColumnParallelLinear::new(&group, size(TOKENS, 5, 6), &options).unwrap();
            assert_eq!(micro_batches(&mut column, 5), wanted);
            let mut row = RowParallelLinear::new(&group, size(TOKENS, 9, 4), &options).unwrap();
            assert_eq!(micro_batches(&mut row, 5), wanted);
        }
    }
}

/// A block of a transformer: what the one gives is what the other takes, as it lies on the ranks. Layers of other sizes use the
/// same memory between.
#[test]
fn layers_follow_each_other_and_share_memory() {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    let (features, hidden) = (8, 12);
    let options = options(LayerGradient::Frozen, Activations::SequenceParallel);
    let up = |hidden| ColumnParallelLinear::new(&group, size(TOKENS, features, hidden), &options).unwrap();
    let mut first = up(hidden);
    let bytes = group.scratch_bytes();
    let mut second = up(hidden);
    assert_eq!((group.scratch_bytes(), bytes > 0), (bytes, true));
    let mut down = RowParallelLinear::new(&group, size(TOKENS, hidden, features), &options).unwrap();

    let (w1, w2) = (whole(hidden, features, 3), whole(features, hidden, 4));
    for layer in [&mut first, &mut second] {
        let parts = layer.scatter(LinearTensor::Weight, &w1).unwrap();
        layer.bind_weight(&parts, None).unwrap();
    }
    let parts = down.scatter(LinearTensor::Weight, &w2).unwrap();
    down.bind_weight(&parts, None).unwrap();
    let x = whole(TOKENS, features, 5);
    for layer in [&mut first, &mut second] {
        let parts = layer.scatter(LinearTensor::Input, &x).unwrap();
        let h = layer.forward(&parts).unwrap().result;
        let y = down.forward(&h).unwrap().result;
        let wanted = times_transposed(&times_transposed(&x, &w1), &w2);
        assert_eq!(down.gather(LinearTensor::Output, &y).unwrap(), wanted);
    }
}

/// What each rank has is right by itself, and one wrong element of any of its tensors is found, at its place in the whole.
#[test]
fn parts_of_results_are_judged_by_rank() {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    for activations in [Activations::Replicated, Activations::SequenceParallel] {
        let options = options(LayerGradient::Written, activations);
        let mut column = ColumnParallelLinear::new(&group, size(TOKENS, 5, 6), &options).unwrap();
        judge_parts(&mut column);
        let mut row = RowParallelLinear::new(&group, size(TOKENS, 9, 4), &options).unwrap();
        judge_parts(&mut row);
    }
}

fn judge_parts(layer: &mut LinearLayer<CpuMachine>) {
    let spec = layer.plan().spec;
    let inputs = LinearInputs {
        x: whole(TOKENS, spec.in_features, 10),
        weight: whole(spec.out_features, spec.in_features, 1),
        bias: None,
        dy: Some(whole(TOKENS, spec.out_features, 20)),
        main_grad: None,
    };
    let weight = layer.scatter(LinearTensor::Weight, &inputs.weight).unwrap();
    layer.bind_weight(&weight, None).unwrap();
    let x = layer.scatter(LinearTensor::Input, &inputs.x).unwrap();
    let dy = layer.scatter(LinearTensor::Output, inputs.dy.as_ref().unwrap()).unwrap();
    let y = layer.forward(&x).unwrap().result;
    let dx = layer.backward(&x, &dy).unwrap().result;
    let (dweight, _) = layer.weight_gradient().unwrap();
    let [y, dx, dweight] = [y, dx, dweight].map(|parts| layer.download(&parts).unwrap());
    assert_eq!(layer.ranks().collect::<Vec<_>>(), (0..RANKS).collect::<Vec<_>>());
    for rank in 0..RANKS {
        let outputs = |spoiled: usize| {
            let mut parts = [&y, &dx, &dweight].map(|parts| parts[rank].clone());
            if let Some(part) = parts.get_mut(spoiled) {
                *part.as_mut_slice::<f32>().unwrap().last_mut().unwrap() += 1.0;
            }
            let [y, dx, dweight] = parts;
            LinearOutputs { y, dx: Some(dx), dweight: Some(dweight), dbias: None }
        };
        let judged = |spoiled, sample| {
            let outputs = outputs(spoiled);
            let (gradient, rounding) = (WeightGradient::Written, SumRounding::default());
            check_linear_part(layer.plan(), rank, &inputs, gradient, &outputs, sample, rounding)
        };
        for sample in [LinearSample::Whole, LinearSample::Spread(3)] {
            assert!(judged(3, sample).is_ok_and(|share| share <= 1.0));
            for (spoiled, name) in ["y[", "dx[", "dweight["].into_iter().enumerate() {
                assert!(judged(spoiled, sample).unwrap_err().to_string().starts_with(name));
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let group = Group::local(2, WorldConfig::default()).unwrap();
    let refused = |error: ExecError, words: &[&str]| {
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{word} in {text}");
        }
    };
    let frozen = options(LayerGradient::Frozen, Activations::SequenceParallel);
    let new = |gradient, sizes| {
        let options = LinearOptions { gradient, ..frozen.clone() };
        let [tokens, in_features, out_features] = sizes;
        let size = size(tokens, in_features, out_features);
        ColumnParallelLinear::new(&group, size, &options).map(|_| ()).unwrap_err()
    };
    refused(new(LayerGradient::Frozen, [8, 4, 7]), &["out_features", "7", "2 ranks"]);
    let none = LayerGradient::Deferred { into: None, limit: 0 };
    refused(new(none, [8, 4, 6]), &["queue without a limit", "main_grad"]);
    let nowhere = LayerGradient::Deferred { into: None, limit: 2 };
    refused(new(nowhere, [8, 4, 6]), &["queue of 2", "main_grad"]);

    let mut layer = ColumnParallelLinear::new(&group, size(8, 4, 6), &frozen).unwrap();
    refused(
        layer.scatter(LinearTensor::Input, &whole(7, 4, 0)).map(|_| ()).unwrap_err(),
        &["input", "[8, 4]", "[7, 4]"],
    );
    let weight = layer.scatter(LinearTensor::Weight, &whole(6, 4, 0)).unwrap();
    refused(layer.bind_weight(&weight[..1].to_vec(), None).unwrap_err(), &["weight", "1 buffers", "2 ranks"]);
    refused(layer.bind_weight(&weight, Some(&weight)).unwrap_err(), &["bias", "no use"]);
    refused(layer.bind_main_grad(&weight, None).unwrap_err(), &["main_grad", "no use"]);
    let x = layer.scatter(LinearTensor::Input, &whole(8, 4, 0)).unwrap();
    refused(layer.forward(&x).map(|_| ()).unwrap_err(), &["weight", "never bound"]);
}

/// Two micro-batches of a layer in flight, each on tensors of the caller, whose gradients are added to one `main_grad`: at once, or
/// later from what the backwards have kept.
#[test]
fn calls_use_the_tensors_of_the_caller() {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    let deferred = LayerGradient::Deferred { into: Some(DType::F32), limit: 1 };
    for (gradient, activations) in [
        (LayerGradient::Accumulated(DType::F32), Activations::SequenceParallel),
        (deferred, Activations::SequenceParallel),
        (deferred, Activations::Replicated),
    ] {
        let layer =
            RowParallelLinear::new(&group, size(TOKENS, 9, 4), &options(gradient, activations)).unwrap();
        let whole_weight = whole(4, 9, 1);
        let weight = layer.scatter(LinearTensor::Weight, &whole_weight).unwrap();
        let main_grad = layer.scatter(LinearTensor::Weight, &whole(4, 9, 2)).unwrap();
        let fresh = |call| -> Vec<Vec<(String, CpuBuffer)>> {
            let zeros = |spec: counterpoint_schedule::BufferSpec| {
                let tensor = HostTensor::zeros(spec.shape, spec.dtype);
                (spec.name.clone(), CpuBuffer::new(0, &spec.name, tensor))
            };
            (0..RANKS)
                .map(|rank| layer.tensors(call, rank).unwrap().into_iter().map(zeros).collect())
                .collect()
        };
        let mut tickets = Vec::new();
        let mut results = Vec::new();
        for batch in 0..2 {
            let x = layer.scatter(LinearTensor::Input, &whole(TOKENS, 9, 10 + batch)).unwrap();
            let dy = layer.scatter(LinearTensor::Output, &whole(TOKENS, 4, 20 + batch)).unwrap();
            let given = [("x", &x), ("dy", &dy), ("weight", &weight), ("main_grad", &main_grad)];
            let mut kept: Vec<Vec<(String, CpuBuffer)>> = vec![Vec::new(); RANKS];
            let mut call = |call| {
                let mut tensors = fresh(call);
                for (rank, tensors) in tensors.iter_mut().enumerate() {
                    for (name, tensor) in tensors {
                        let before = given.iter().find(|(given, _)| given == name).map(|(_, of)| &of[rank]);
                        let kept = kept[rank].iter().find(|(kept, _)| kept == name).map(|(_, tensor)| tensor);
                        *tensor = before.or(kept).unwrap_or(tensor).clone();
                    }
                }
                let named: Vec<Vec<(&str, CpuBuffer)>> = tensors
                    .iter()
                    .map(|tensors| tensors.iter().map(|(name, tensor)| (&**name, tensor.clone())).collect())
                    .collect();
                tickets.extend(layer.enqueue(call, &named, None).unwrap());
                kept.iter_mut()
                    .zip(&tensors)
                    .for_each(|(kept, tensors)| kept.extend(tensors.iter().cloned()));
                let written = |name: &str| -> Option<Vec<CpuBuffer>> {
                    let of = |tensors: &Vec<(String, CpuBuffer)>| {
                        tensors.iter().find(|(other, _)| other == name).map(|(_, tensor)| tensor.clone())
                    };
                    tensors.iter().map(of).collect()
                };
                written("y").or_else(|| written("dx"))
            };
            let (y, dx) = (call(LayerCall::Forward).unwrap(), call(LayerCall::Backward).unwrap());
            if gradient == deferred {
                call(LayerCall::WeightGradient);
            }
            results.push((y, dx));
        }
        tickets.iter().for_each(|ticket| ticket.wait().unwrap());
        let mut sums = vec![whole(4, 9, 2)];
        for (batch, (y, dx)) in results.iter().enumerate() {
            let (x, dy) = (whole(TOKENS, 9, 10 + batch), whole(TOKENS, 4, 20 + batch));
            assert_eq!(layer.gather(LinearTensor::Output, y).unwrap(), times_transposed(&x, &whole_weight));
            let right = times_transposed(&dy, &transposed(&whole_weight));
            assert_eq!(layer.gather(LinearTensor::Input, dx).unwrap(), right);
            sums.push(times_transposed(&transposed(&dy), &transposed(&x)));
        }
        assert_eq!(layer.gather(LinearTensor::Weight, &main_grad).unwrap(), sum(&sums));
    }
}
