//! Column-parallel layers that share one input: what they are alone, with one sum of its gradient.

use counterpoint_cost::CostModel;
use counterpoint_exec::{
    CpuMachine, Group, HostTensor, LayerGradient, LayerOverlap, LinearOptions, RankBuffers,
    SharedInputLinear, WorldConfig,
};
use counterpoint_plan::{Activations, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_schedule::{
    InputGradient, Op, OverlapPolicy, SharedInput, WeightGradient, lower_shared_input_backward,
};

const RANKS: usize = 3;
const TOKENS: usize = 22;
const FEATURES: usize = 5;
/// As of grouped-query attention: q is wider than k and v.
const OUTPUTS: [usize; 3] = [12, 6, 6];

/// Small whole numbers, whose sums are exact.
fn whole(shape: &[usize], seed: usize) -> HostTensor {
    let values = (0..shape.iter().product()).map(|i: usize| (((i + seed) * 7919) % 13) as f32 - 6.0);
    HostTensor::from_vec(shape.to_vec(), values.collect())
}

/// `sum over k of a(i, k) b(k, j)`.
fn product(
    [m, k, n]: [usize; 3],
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let element = |i: usize, j: usize| (0..k).map(|k| a(i, k) * b(k, j)).sum();
    (0..m).flat_map(|i| (0..n).map(|j| element(i, j)).collect::<Vec<f64>>()).collect()
}

fn options(gradient: LayerGradient, activations: Activations, has_bias: bool, policy: &str) -> LinearOptions {
    let groups = match policy.len() % 3 {
        1 => WaveGroups::Columns(2),
        more => WaveGroups::Fixed(1 + more),
    };
    let overlap = LayerOverlap::Policy(policy.parse().unwrap(), groups.into(), CostModel::H200);
    LinearOptions { activations, has_bias, gradient, overlap, ..LinearOptions::new(DType::F32) }
}

/// Rows of all ranks one after the other, or columns side by side.
fn joined(parts: &[HostTensor], are_columns: bool) -> Vec<f64> {
    let values: Vec<Vec<f64>> = parts.iter().map(HostTensor::to_f64).collect();
    if !are_columns {
        return values.concat();
    }
    let width = parts[0].row_elements();
    let row = |row: usize| values.iter().flat_map(move |part| part[row * width..][..width].to_vec());
    (0..parts[0].rows()).flat_map(row).collect()
}

struct Run {
    y: Vec<Vec<f64>>,
    /// Of each rank.
    dx: Vec<Vec<f64>>,
    dweight: Vec<Vec<f64>>,
}

fn run(options: &LinearOptions, input: InputGradient) -> Run {
    let group = Group::local(RANKS, WorldConfig { poison: true, ..WorldConfig::default() }).unwrap();
    let mut layers =
        SharedInputLinear::<CpuMachine>::new(&group, TOKENS, FEATURES, &OUTPUTS, options, input).unwrap();
    let tensors = |shape: &dyn Fn(usize) -> Vec<usize>, seed: usize| -> Vec<HostTensor> {
        OUTPUTS.iter().enumerate().map(|(at, &out)| whole(&shape(out), seed + at)).collect()
    };
    let weights = layers.scatter_weights(&tensors(&|out| vec![out, FEATURES], 10)).unwrap();
    let biases = match options.has_bias {
        true => layers.scatter_biases(&tensors(&|out| vec![out], 20)).unwrap(),
        false => Vec::new(),
    };
    layers.bind_weights(&weights, &biases).unwrap();
    let mut sums = None;
    if !matches!(
        options.gradient,
        LayerGradient::Frozen | LayerGradient::Written | LayerGradient::Deferred { into: None, .. }
    ) {
        let of_weights = layers.scatter_weights(&tensors(&|out| vec![out, FEATURES], 30)).unwrap();
        let of_biases = match options.has_bias {
            true => layers.scatter_biases(&tensors(&|out| vec![out], 40)).unwrap(),
            false => Vec::new(),
        };
        layers.bind_main_grads(&of_weights, &of_biases).unwrap();
        sums = Some(of_weights);
    }
    let x = layers.scatter_input(&whole(&[TOKENS, FEATURES], 1)).unwrap();
    let y = layers.forward(&x).unwrap().ys;
    let dys = layers.scatter_outputs(&tensors(&|out| vec![TOKENS, out], 50)).unwrap();
    let dx = layers.backward(&x, &dys).unwrap().result;
    assert_eq!(
        layers.flush().unwrap().len(),
        usize::from(matches!(options.gradient, LayerGradient::Deferred { .. }))
    );
    let all = |parts: &[RankBuffers<CpuMachine>], are_columns: bool| -> Vec<Vec<f64>> {
        parts.iter().map(|parts| joined(&layers.download(parts).unwrap(), are_columns)).collect()
    };
    let dweight = sums.or_else(|| layers.weight_gradients()).unwrap_or_default();
    Run {
        y: all(&y, true),
        dx: layers.download(&dx).unwrap().iter().map(HostTensor::to_f64).collect(),
        dweight: all(&dweight, false),
    }
}

/// Element by element, the definition: of every layer, of the sum of what all give to the input's gradient.
fn check(run: &Run, options: &LinearOptions, input: InputGradient, words: &str) {
    let x = whole(&[TOKENS, FEATURES], 1).to_f64();
    let mut dx = vec![0.0; TOKENS * FEATURES];
    for (at, &out) in OUTPUTS.iter().enumerate() {
        let (weight, bias) = (whole(&[out, FEATURES], 10 + at).to_f64(), whole(&[out], 20 + at).to_f64());
        let dy = whole(&[TOKENS, out], 50 + at).to_f64();
        let mut y =
            product([TOKENS, FEATURES, out], |i, k| x[i * FEATURES + k], |k, j| weight[j * FEATURES + k]);
        if options.has_bias {
            y.iter_mut().enumerate().for_each(|(index, y)| *y += bias[index % out]);
        }
        assert_eq!(run.y[at], y, "{words}, y of layer {at}");
        let given = product([TOKENS, out, FEATURES], |i, k| dy[i * out + k], |k, j| weight[k * FEATURES + j]);
        dx.iter_mut().zip(given).for_each(|(dx, given)| *dx += given);
        let mut dweight =
            product([out, TOKENS, FEATURES], |i, k| dy[k * out + i], |k, j| x[k * FEATURES + j]);
        if let LayerGradient::Accumulated(_) | LayerGradient::Deferred { into: Some(_), .. } =
            options.gradient
        {
            let before = whole(&[out, FEATURES], 30 + at).to_f64();
            dweight.iter_mut().zip(before).for_each(|(sum, before)| *sum += before);
        }
        match options.gradient {
            LayerGradient::Frozen => assert!(run.dweight.is_empty()),
            _ => assert_eq!(run.dweight[at], dweight, "{words}, dweight of layer {at}"),
        }
    }
    match (options.activations, input) {
        (Activations::SequenceParallel, _) => assert_eq!(run.dx.concat(), dx, "{words}, dx"),
        (_, InputGradient::Summed) => {
            run.dx.iter().for_each(|found| assert_eq!(found, &dx, "{words}, dx"));
        }
        (_, InputGradient::Partial) => {
            let sum = |index: usize| run.dx.iter().map(|of_rank| of_rank[index]).sum::<f64>();
            assert_eq!((0..dx.len()).map(sum).collect::<Vec<f64>>(), dx, "{words}, partial dx");
            assert_ne!(run.dx[0], dx, "{words}: nothing is summed");
        }
    }
}

#[test]
fn layers_are_what_they_are_alone() {
    let gradients = [
        LayerGradient::Frozen,
        LayerGradient::Written,
        LayerGradient::Accumulated(DType::F32),
        LayerGradient::Replaced(DType::F32),
        LayerGradient::Deferred { into: None, limit: 1 },
        LayerGradient::Deferred { into: Some(DType::F32), limit: 2 },
    ];
    for gradient in gradients {
        for activations in [Activations::Replicated, Activations::SequenceParallel] {
            for policy in ["sequential", "concurrent", "kernel-barrier", "signals", "concurrent+sm-margin=1"]
            {
                let options = options(gradient, activations, policy.len() % 2 == 0, policy);
                let words = format!("{gradient:?} {activations} {policy}");
                check(&run(&options, InputGradient::Summed), &options, InputGradient::Summed, &words);
            }
        }
        for policy in ["sequential", "concurrent"] {
            let options = options(gradient, Activations::Replicated, false, policy);
            let words = format!("{gradient:?} partial {policy}");
            check(&run(&options, InputGradient::Partial), &options, InputGradient::Partial, &words);
        }
    }
}

/// Another number of tensors than of ranks is refused, and does not leave ranks with what they had.
#[test]
fn every_rank_has_its_tensor() {
    let options = options(
        LayerGradient::Deferred { into: None, limit: 1 },
        Activations::Replicated,
        false,
        "sequential",
    );
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    let mut layers = SharedInputLinear::<CpuMachine>::new(
        &group,
        TOKENS,
        FEATURES,
        &OUTPUTS,
        &options,
        InputGradient::Summed,
    )
    .unwrap();
    let weights: Vec<HostTensor> = OUTPUTS.iter().map(|&out| whole(&[out, FEATURES], 10)).collect();
    layers.bind_weights(&layers.scatter_weights(&weights).unwrap(), &[]).unwrap();
    let x = layers.scatter_input(&whole(&[TOKENS, FEATURES], 1)).unwrap();
    layers.forward(&x).unwrap();
    let dys: Vec<HostTensor> = OUTPUTS.iter().map(|&out| whole(&[TOKENS, out], 50)).collect();
    let dys = layers.scatter_outputs(&dys).unwrap();
    let words = "buffers for the 3 ranks here";
    for fewer in [0, 1, RANKS - 1] {
        let error = layers.forward(&x[..fewer].to_vec()).err().unwrap().to_string();
        assert!(error.contains(&format!("{fewer} {words}")), "{error}");
        let error = layers.backward(&x[..fewer].to_vec(), &dys).err().unwrap().to_string();
        assert!(error.contains(&format!("{fewer} {words}")), "{error}");
    }
    // Nothing of it counts as a backward.
    assert_eq!(layers.waiting(), 0);
    layers.backward(&x, &dys).unwrap();
    assert_eq!(layers.flush().unwrap().len(), 1);
}

/// The gradient of the input is summed over ranks once for all layers, and not at all where the caller does it.
#[test]
fn one_sum_serves_all_layers() {
    let spec = LinearSpec {
        kind: LinearKind::Column,
        activations: Activations::Replicated,
        tokens: TOKENS,
        in_features: FEATURES,
        out_features: OUTPUTS.iter().sum(),
        has_bias: false,
        dtype: DType::Bf16,
    };
    let plan = LinearPlan::new(spec, RANKS, WaveGroups::Fixed(2)).unwrap();
    let outputs = OUTPUTS.map(|out| out / RANKS);
    let collectives = |input| {
        let layers = SharedInput { plan: &plan, outputs: &outputs };
        let policy = OverlapPolicy::default();
        let program = lower_shared_input_backward(layers, 1, (WeightGradient::Written, input), policy);
        let count = |is: fn(&Op) -> bool| program.ops.iter().filter(|op| is(&op.op)).count();
        [count(|op| matches!(op, Op::GroupReduce(_))), count(|op| matches!(op, Op::GroupCast(_)))]
    };
    // Two groups, each reduced and sent back.
    assert_eq!(collectives(InputGradient::Summed), [2, 2]);
    assert_eq!(collectives(InputGradient::Partial), [0, 0]);
}

/// Queues hold as many backwards as they may, what each has gathered included, and add all of them in the end.
#[test]
fn gradients_of_all_layers_wait_together() {
    for activations in [Activations::Replicated, Activations::SequenceParallel] {
        for (limit, waiting) in [(1, [1, 1, 1, 1]), (2, [1, 2, 2, 2]), (0, [1, 2, 3, 4])] {
            let gradient = LayerGradient::Deferred { into: Some(DType::F32), limit };
            let options = options(gradient, activations, false, "concurrent");
            let group = Group::local(RANKS, WorldConfig { poison: true, ..WorldConfig::default() }).unwrap();
            let new = SharedInputLinear::<CpuMachine>::new;
            let mut layers =
                new(&group, TOKENS, FEATURES, &OUTPUTS, &options, InputGradient::Summed).unwrap();
            let of_weights = |seed: usize| OUTPUTS.map(|out| whole(&[out, FEATURES], seed + out));
            let weights = layers.scatter_weights(&of_weights(1)).unwrap();
            layers.bind_weights(&weights, &[]).unwrap();
            let main_grads = layers.scatter_weights(&of_weights(2)).unwrap();
            layers.bind_main_grads(&main_grads, &[]).unwrap();
            let mut wanted = of_weights(2).map(|before| before.to_f64());
            for (batch, waiting) in waiting.into_iter().enumerate() {
                let x = whole(&[TOKENS, FEATURES], 3 + batch);
                let dys = OUTPUTS.map(|out| whole(&[TOKENS, out], 5 + batch + out));
                let (x_parts, dy_parts) =
                    (layers.scatter_input(&x).unwrap(), layers.scatter_outputs(&dys).unwrap());
                layers.backward(&x_parts, &dy_parts).unwrap();
                assert_eq!(layers.waiting(), waiting, "limit {limit}, batch {batch}");
                let x = x.to_f64();
                for ((wanted, dy), out) in wanted.iter_mut().zip(&dys).zip(OUTPUTS) {
                    let dy = dy.to_f64();
                    let added =
                        product([out, TOKENS, FEATURES], |i, k| dy[k * out + i], |k, j| x[k * FEATURES + j]);
                    wanted.iter_mut().zip(added).for_each(|(sum, added)| *sum += added);
                }
            }
            layers.enqueue_flush(None).unwrap().iter().for_each(|ticket| ticket.wait().unwrap());
            assert_eq!(layers.waiting(), 0);
            for (parts, wanted) in main_grads.iter().zip(&wanted) {
                assert_eq!(&joined(&layers.download(parts).unwrap(), false), wanted, "limit {limit}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let group = Group::local(RANKS, WorldConfig::default()).unwrap();
    let made = |outputs: &[usize], gradient, activations, input| {
        let options = options(gradient, activations, false, "concurrent");
        SharedInputLinear::<CpuMachine>::new(&group, TOKENS, FEATURES, outputs, &options, input)
    };
    let refused = |outputs: &[usize], gradient, activations, input| {
        made(outputs, gradient, activations, input).err().unwrap().to_string()
    };
    let (written, summed) = (LayerGradient::Written, InputGradient::Summed);
    let replicated = Activations::Replicated;
    assert!(refused(&[6, 7], written, replicated, summed).contains("out_features is"));
    assert!(refused(&[6, 0], written, replicated, summed).contains("out_features is 0"));
    assert!(refused(&[], written, replicated, summed).contains("out_features is 0"));
    let deferred = LayerGradient::Deferred { into: None, limit: 2 };
    assert!(refused(&[6], deferred, replicated, summed).contains("needs a main_grad"));
    let partial = InputGradient::Partial;
    assert!(refused(&[6], written, Activations::SequenceParallel, partial).contains("sequence parallelism"));
    let mut layers = made(&[6, 3], written, replicated, summed).ok().unwrap();
    let one = layers.scatter_weights(&[whole(&[6, FEATURES], 1)]).err().unwrap().to_string();
    assert!(one.contains("1 tensors for 2 layers"), "{one}");
    let x = layers.scatter_input(&whole(&[TOKENS, FEATURES], 1)).unwrap();
    assert!(layers.forward(&x).err().unwrap().to_string().contains("weight_0"));
    assert!(layers.bind_main_grads(&[], &[]).is_err());
}
