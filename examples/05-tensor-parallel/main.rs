//! Lesson 5: tensor-parallel linear layers: a transformer's MLP over ranks, its communication under its products.
//!
//! Run it with `cargo run --example 05-tensor-parallel`. Two ranks, threads of this process; with GPUs the group is
//! `Group::connect` on a `counterpoint::cuda::CudaMachine` and nothing else changes. The first layer splits its output features and the second its
//! input features, so the first one's output lies on the ranks as the second one takes it. Activations outside are split by tokens
//! (sequence parallelism).

use std::error::Error;

use counterpoint::cost::CostModel;
use counterpoint::exec::{
    ColumnParallelLinear, Group, HostTensor, LayerGradient, LayerOverlap, LinearOptions, LinearTensor,
    RowParallelLinear, WorldConfig,
};
use counterpoint::plan::{DType, LinearSize, WaveGroups};
use counterpoint::schedule::OverlapPolicy;

const RANKS: usize = 2;
const TOKENS: usize = 64;
const FEATURES: usize = 16;
const HIDDEN: usize = 32;

/// A layer of the tokens that there are.
fn size(in_features: usize, out_features: usize) -> LinearSize {
    LinearSize { tokens: TOKENS, in_features, out_features }
}

fn main() -> Result<(), Box<dyn Error>> {
    // Joined once. Layers of a rank run one after the other, so that all of them share the memory of what they gather.
    let group = Group::local(RANKS, WorldConfig::default())?;

    // A pass is cut into groups of tokens: one is multiplied while another travels. No bit of a result depends on it. Without this line
    // each pass overlaps as is predicted to be fastest on the machine.
    // Gradients of the weight wait in a queue of two, and are added to an f32 `main_grad`.
    let options = LinearOptions {
        overlap: LayerOverlap::Policy(OverlapPolicy::default(), WaveGroups::Fixed(4).into(), CostModel::H200),
        gradient: LayerGradient::Deferred { into: Some(DType::F32), limit: 2 },
        ..LinearOptions::new(DType::F32)
    };
    let mut up = ColumnParallelLinear::new(&group, size(FEATURES, HIDDEN), &options)?;
    let mut down = RowParallelLinear::new(&group, size(HIDDEN, FEATURES), &options)?;
    println!("{} bytes of memory in common", group.scratch_bytes());

    // `scatter` gives every rank its part of a whole tensor; a trainer has the parts already.
    let (up_weight, down_weight) = (tensor(HIDDEN, FEATURES, 1), tensor(FEATURES, HIDDEN, 2));
    let up_parts = up.scatter(LinearTensor::Weight, &up_weight)?;
    let down_parts = down.scatter(LinearTensor::Weight, &down_weight)?;
    up.bind_weight(&up_parts, None)?;
    down.bind_weight(&down_parts, None)?;
    let up_grad = up.scatter(LinearTensor::Weight, &HostTensor::zeros(vec![HIDDEN, FEATURES], DType::F32))?;
    let down_grad =
        down.scatter(LinearTensor::Weight, &HostTensor::zeros(vec![FEATURES, HIDDEN], DType::F32))?;
    up.bind_main_grad(&up_grad, None)?;
    down.bind_main_grad(&down_grad, None)?;

    let x = up.scatter(LinearTensor::Input, &tensor(TOKENS, FEATURES, 3))?;
    let hidden = up.forward(&x)?;
    let y = down.forward(&hidden.result)?;
    println!("y has {:?} elements", down.gather(LinearTensor::Output, &y.result)?.shape());
    println!("forward of the second layer: {:?}", y.timeline.overlap());

    // The backward leaves the gradients of the weights for later: dx is what the layer before waits for.
    let dy = down.scatter(LinearTensor::Output, &tensor(TOKENS, FEATURES, 4))?;
    let d_hidden = down.backward(&hidden.result, &dy)?;
    let dx = up.backward(&x, &d_hidden.result)?;
    println!("dx has {:?} elements", up.gather(LinearTensor::Input, &dx.result)?.shape());
    assert_eq!((up.waiting(), down.waiting()), (1, 1));
    assert!(up.gather(LinearTensor::Weight, &up_grad)?.to_f64().iter().all(|sum| *sum == 0.0));

    // Now they are computed, in time that would else be idle.
    up.flush()?;
    down.flush()?;
    assert!(up.gather(LinearTensor::Weight, &up_grad)?.to_f64().iter().any(|sum| *sum != 0.0));

    // What does not divide is refused with figures.
    match ColumnParallelLinear::new(&group, size(FEATURES, 33), &options) {
        Err(error) => println!("refused: {error}"),
        Ok(_) => return Err("33 features were divided over 2 ranks".into()),
    }
    Ok(())
}

/// Numbers without meaning.
fn tensor(rows: usize, columns: usize, seed: usize) -> HostTensor {
    let value = |index: usize| ((index * 37 + seed * 11) as f32).sin();
    HostTensor::from_vec(vec![rows, columns], (0..rows * columns).map(value).collect())
}
