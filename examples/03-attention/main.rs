//! Lesson 3: distributed attention from tensors to tensors, checked, and its communication hidden.
//!
//! Run it with `cargo run --release --example 03-attention`. A packed batch on 4 ranks, which are threads of this process:
//! forward and backward, compared with the dense f64 reference; then the same over a slow link, without overlap
//! and with it. With GPUs, `run_attention` is `run_attention_on` a `counterpoint::cuda::CudaMachine`, tensors are bf16 or
//! f16, and nothing else changes.

use std::error::Error;
use std::time::Duration;

use counterpoint::choose::{PlanConfig, StageCount, plan_mask};
use counterpoint::exec::{
    AttentionInputs, CpuMachine, HostTensor, Pass, PreparedAttention, RankProblem, RanksRun, RunConfig,
    SlowLink, run_attention,
};
use counterpoint::mask::{Documents, Mask};
use counterpoint::plan::{AttentionSpec, DType};
use counterpoint::reference::check_attention;
use counterpoint::schedule::{OverlapPolicy, StartOrder};

fn main() -> Result<(), Box<dyn Error>> {
    let ranks = 4;
    let mask = Mask::causal(Documents::from_lengths([700, 64, 300, 900, 84])?)?;
    // Four query heads of 64, of which two read each of the two key heads; scale, softcap and sink are the usual ones.
    let spec = AttentionSpec::new(4, 2, 64, DType::F32);
    let config =
        PlanConfig { chunk_size: Some(64), stages: StageCount::Fixed(3).into(), ..PlanConfig::new(ranks) };
    let plan = plan_mask(&mask, &spec, &config)?;

    // Tensors are of the whole sequence, in its order; where their rows live is the plan's business. A `dout` asks for the
    // backward.
    let rows = mask.seqlen_q();
    let inputs = AttentionInputs {
        q: waves(rows, spec.heads_q, spec.head_dim, 0.37),
        k: waves(rows, spec.heads_kv, spec.head_dim, 0.73),
        v: waves(rows, spec.heads_kv, spec.head_dim_v, 1.19),
        sink: None,
        dout: Some(waves(rows, spec.heads_q, spec.head_dim_v, 1.61)),
        dlse: None,
    };
    let run = run_attention(&plan, &spec, &inputs, &RunConfig::default())?;
    let report = check_attention(&mask, &spec, &inputs, &run.outputs);
    for tensor in &report.tensors {
        println!(
            "{:<4} relative error {:.1e} of {:.0e}",
            tensor.name, tensor.relative_error, tensor.relative_bound
        );
    }
    assert!(report.passed);

    // Deterministic mode: the order in which ranks' partial sums are added is fixed, so that neither the policy nor the number of
    // stages changes a bit.
    let exact = RunConfig { deterministic: true, ..RunConfig::default() };
    let sequential = OverlapPolicy::new(StartOrder::Sequential);
    let one = run_attention(&plan, &spec, &inputs, &exact)?;
    let other =
        run_attention(&plan, &spec, &inputs, &RunConfig { policy: sequential.into(), ..exact.clone() })?;
    assert_eq!(one.outputs, other.outputs);

    // A training step runs the same attention on other tensors, again and again: everything but them is made ready once.
    let machine = CpuMachine::new(0, None)?;
    let problem =
        RankProblem { plan: &plan, spec: &spec, pass: Pass::ForwardBackward, host_bytes: inputs.bytes() };
    let mut attention = PreparedAttention::new(&machine, &problem, &exact, inputs.of_ranks(&plan)?)?;
    let other = AttentionInputs { v: waves(rows, spec.heads_kv, spec.head_dim_v, 2.43), ..inputs.clone() };
    for inputs in [&inputs, &other] {
        let v = inputs.of_ranks(&plan)?.into_iter().map(|rank| rank.v).collect();
        let v = attention.upload("v", v)?;
        attention.bind("v", &v)?;
        attention.forward(&machine)?;
        attention.backward(&machine)?;
        let whole = RanksRun::of_outputs(attention.outputs()?).into_whole(&plan)?;
        assert_eq!(whole.outputs, run_attention(&plan, &spec, inputs, &exact)?.outputs);
    }

    // A link as slow as this makes communication worth hiding. What a timeline measured, a simulator predicts in the same
    // type; see `counterpoint attention --report` for its picture.
    let link = Some(SlowLink { alpha: Duration::from_millis(2), bytes_per_second: 50e6, network: None });
    println!("\n{:<12} {:>10} {:>15} {:>10}", "policy", "forward", "communication", "exposed");
    for start in StartOrder::ALL {
        let policy = OverlapPolicy::new(start);
        let slow = RunConfig { policy: policy.into(), slow_link: link, ..RunConfig::default() };
        let forward = run_attention(&plan, &spec, &inputs, &slow)?.forward;
        let overlap = forward.overlap();
        let ms = 1e3;
        println!(
            "{:<14} {:>5.1} ms {:>12.1} ms {:>7.1} ms",
            start.name(),
            forward.makespan() * ms,
            overlap.communication_seconds * ms,
            overlap.exposed_seconds * ms
        );
        if start == StartOrder::Sequential {
            assert!(overlap.exposed_seconds >= 0.999 * overlap.communication_seconds);
        }
    }
    Ok(())
}

/// A tensor `[rows, heads, dim]` of values that look random enough.
fn waves(rows: usize, heads: usize, dim: usize, step: f64) -> HostTensor {
    let value = |i: usize| (2.0 * (step * i as f64 + 0.5 * (i % 17) as f64).sin()) as f32;
    HostTensor::from_vec(vec![rows, heads, dim], (0..rows * heads * dim).map(value).collect())
}
