//! Lesson 7: a training step: a group that lives, eight layers, two micro-batches in flight, a fresh mask each step.
//!
//! Run it with `cargo run --release --example 07-training-step`. Four ranks, threads of this process. The group is joined once. Each
//! step's batch has documents of its own, and its mask is planned and prepared by a loader thread while the step before runs. The step
//! enqueues all forwards and all backwards of both micro-batches without waiting: each call reads and writes tensors of the caller, and
//! calls of a rank follow each other. What a layer gives is the next layer's values, and the gradient of its values is the gradient of
//! what the layer before gave. All results are compared with the dense f64 reference.

use std::error::Error;
use std::sync::mpsc;
use std::thread;

use counterpoint::choose::{PlanConfig, plan_mask};
use counterpoint::exec::{
    AttentionCalls, AttentionInputs, AttentionOutputs, BackwardTensors, CpuBackend, CpuBuffer, CpuMachine,
    ForwardTensors, Group, HostTensor, Pass, Ticket, WorldConfig, dispatch, undispatch,
};
use counterpoint::mask::{Documents, Mask};
use counterpoint::plan::{AttentionSpec, DType, Plan};
use counterpoint::reference::check_attention;
use counterpoint::schedule::OverlapPolicy;

const RANKS: usize = 4;
const LAYERS: usize = 8;
const MICRO_BATCHES: usize = 2;
const STEPS: usize = 3;
const TOKENS: usize = 192;

/// What the loader makes of a batch.
struct Batch {
    mask: Mask,
    plan: Plan,
    attention: AttentionCalls<CpuMachine>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let spec = AttentionSpec::new(2, 2, 16, DType::F32);
    let group = Group::local(RANKS, WorldConfig::default())?;
    thread::scope(|scope| {
        let (batches, loaded) = mpsc::sync_channel(1);
        let loader = group.clone();
        scope.spawn(move || {
            for step in 0..STEPS {
                let batch = load(&loader, &spec, step).map_err(|error| error.to_string());
                if batches.send(batch).is_err() {
                    return;
                }
            }
        });
        for (step, batch) in loaded.iter().enumerate() {
            let batch = batch?;
            let worst = train(&batch, &spec, step)?;
            println!(
                "step {step}: {} documents, {} calls in flight on each rank, largest error {worst:.2} of its bound",
                batch.mask.slices().len(),
                2 * LAYERS * MICRO_BATCHES
            );
        }
        Ok::<_, Box<dyn Error>>(())
    })?;
    println!("{} streams a rank, {} bytes of scratch", group.ranks()[0].num_streams(), group.scratch_bytes());
    group.close()?;
    Ok(())
}

/// The mask of a step, planned and made ready: no other rank is asked, and the step before still runs.
fn load(group: &Group<CpuMachine>, spec: &AttentionSpec, step: usize) -> Result<Batch, Box<dyn Error>> {
    let first = 20 + 31 * step;
    let mask = Mask::causal(Documents::from_lengths([first, 50, TOKENS - 50 - first])?)?;
    let config = PlanConfig { chunk_size: Some(16), ..PlanConfig::new(RANKS) };
    let plan = plan_mask(&mask, spec, &config)?;
    let attention = group.attention(&plan, spec, Pass::ForwardBackward, OverlapPolicy::default(), false)?;
    Ok(Batch { mask, plan, attention })
}

/// A tensor of each rank.
type OfRanks = Vec<CpuBuffer>;

/// A layer's tensors of one micro-batch.
struct Layer {
    q: OfRanks,
    k: OfRanks,
    lse: OfRanks,
    dq: OfRanks,
    dk: OfRanks,
}

/// A micro-batch: what goes from layer to layer, and its gradients the other way.
struct MicroBatch {
    layers: Vec<Layer>,
    /// Of each layer its values, and at the end what the last one gives.
    values: Vec<OfRanks>,
    gradients: Vec<OfRanks>,
}

fn train(batch: &Batch, spec: &AttentionSpec, step: usize) -> Result<f64, Box<dyn Error>> {
    let make = |micro| MicroBatch::new(&batch.plan, spec, 100 * step + 10 * micro);
    let micro_batches: Vec<MicroBatch> = (0..MICRO_BATCHES).map(make).collect::<Result<_, _>>()?;
    let mut tickets: Vec<Ticket<CpuBackend>> = Vec::new();
    for layer in 0..LAYERS {
        for micro in &micro_batches {
            tickets = batch.attention.forward(&micro.forward(layer), None)?;
        }
    }
    for layer in (0..LAYERS).rev() {
        for micro in &micro_batches {
            tickets = batch.attention.backward(&micro.backward(layer), None)?;
        }
    }
    // Nothing has been waited for so far. The calls of a rank end in their order, so that the last one's end is that of all.
    tickets.iter().try_for_each(Ticket::wait)?;
    let mut worst: f64 = 0.0;
    for micro in &micro_batches {
        for layer in 0..LAYERS {
            worst = worst.max(micro.check(layer, batch, spec)?);
        }
    }
    Ok(worst)
}

impl MicroBatch {
    fn new(plan: &Plan, spec: &AttentionSpec, seed: usize) -> Result<Self, Box<dyn Error>> {
        let shape = [TOKENS, spec.heads_q, spec.head_dim];
        let given = |seed| -> Result<OfRanks, Box<dyn Error>> {
            let whole = waves(&shape, seed);
            let rows = |(rank, plan): (usize, &counterpoint::plan::RankPlan)| {
                Ok(CpuBuffer::new(rank, "given", dispatch(&whole, &plan.q_ranges)?))
            };
            plan.ranks.iter().enumerate().map(rows).collect()
        };
        let empty = |shape: &[usize]| -> OfRanks {
            let rows = |(rank, plan): (usize, &counterpoint::plan::RankPlan)| {
                let shape = [&[plan.q_rows], shape].concat();
                CpuBuffer::new(rank, "written", HostTensor::zeros(shape, DType::F32))
            };
            plan.ranks.iter().enumerate().map(rows).collect()
        };
        let row = &shape[1..];
        let layer = |layer: usize| -> Result<Layer, Box<dyn Error>> {
            let (q, k) = (given(seed + 2 * layer + 1)?, given(seed + 2 * layer + 2)?);
            Ok(Layer { q, k, lse: empty(&row[..1]), dq: empty(row), dk: empty(row) })
        };
        let mut values = vec![given(seed)?];
        values.extend((0..LAYERS).map(|_| empty(row)));
        let mut gradients: Vec<OfRanks> = (0..LAYERS).map(|_| empty(row)).collect();
        gradients.push(given(seed + 99)?);
        Ok(Self { layers: (0..LAYERS).map(layer).collect::<Result<_, _>>()?, values, gradients })
    }

    fn forward(&self, layer: usize) -> Vec<ForwardTensors<'_, CpuBackend>> {
        let Layer { q, k, lse, .. } = &self.layers[layer];
        let (v, out) = (&self.values[layer], &self.values[layer + 1]);
        let rank = |rank: usize| ForwardTensors {
            q: &q[rank],
            k: &k[rank],
            v: &v[rank],
            sink: None,
            out: &out[rank],
            lse: &lse[rank],
            max_logits: None,
        };
        (0..RANKS).map(rank).collect()
    }

    fn backward(&self, layer: usize) -> Vec<BackwardTensors<'_, CpuBackend>> {
        let Layer { q, k, lse, dq, dk } = &self.layers[layer];
        let (v, out) = (&self.values[layer], &self.values[layer + 1]);
        let (dv, dout) = (&self.gradients[layer], &self.gradients[layer + 1]);
        let rank = |rank: usize| BackwardTensors {
            dout: &dout[rank],
            q: &q[rank],
            k: &k[rank],
            v: &v[rank],
            sink: None,
            out: &out[rank],
            lse: &lse[rank],
            dlse: None,
            dq: &dq[rank],
            dk: &dk[rank],
            dv: &dv[rank],
            dsink: None,
        };
        (0..RANKS).map(rank).collect()
    }

    /// The largest error of a layer's results, as a part of what it may be.
    fn check(&self, layer: usize, batch: &Batch, spec: &AttentionSpec) -> Result<f64, Box<dyn Error>> {
        let whole = |ranks: &OfRanks| -> Result<HostTensor, Box<dyn Error>> {
            let rows: Vec<HostTensor> = ranks.iter().map(CpuBuffer::tensor).collect::<Result<_, _>>()?;
            Ok(undispatch(&batch.plan.q_dispatch, &rows)?)
        };
        let Layer { q, k, lse, dq, dk } = &self.layers[layer];
        let inputs = AttentionInputs {
            q: whole(q)?,
            k: whole(k)?,
            v: whole(&self.values[layer])?,
            sink: None,
            dout: Some(whole(&self.gradients[layer + 1])?),
            dlse: None,
        };
        let outputs = AttentionOutputs {
            out: whole(&self.values[layer + 1])?,
            lse: whole(lse)?,
            max_logits: None,
            dq: Some(whole(dq)?),
            dk: Some(whole(dk)?),
            dv: Some(whole(&self.gradients[layer])?),
            dsink: None,
        };
        let report = check_attention(&batch.mask, spec, &inputs, &outputs);
        assert!(report.passed, "layer {layer}: {:?}", report.tensors);
        let share = report.tensors.iter().map(|tensor| tensor.relative_error / tensor.relative_bound);
        Ok(share.fold(0.0, f64::max))
    }
}

/// Values that look random enough.
fn waves(shape: &[usize], seed: usize) -> HostTensor {
    let value =
        |i: usize| (2.0 * (0.37 * i as f64 + 0.61 * seed as f64 + 0.5 * (i % 17) as f64).sin()) as f32;
    HostTensor::from_vec(shape.to_vec(), (0..shape.iter().product()).map(value).collect())
}
