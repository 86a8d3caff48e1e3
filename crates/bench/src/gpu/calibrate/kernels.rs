//! Rates of one GPU for `doctor --calibrate`: memory, launches, matrix products, attention forward and backward.

use std::time::Duration;

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_cost::CostModel;
use counterpoint_exec::{ExecError, Pass, ProgramFault, random_inputs};
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{AttentionSpec, DType, Topology};
use counterpoint_report::median;
use counterpoint_schedule::{
    Accumulate, GradientReduction, KeyBlocks, OverlapPolicy, Program, ReduceOp, SUMMING_WORKERS,
    lower_attention_backward, lower_attention_forward, simulate,
};

use crate::gpu::{AttentionBench, BenchClock, BenchPass, GemmBench};
use counterpoint_cuda::exec_error;
use counterpoint_cuda::kernel::{
    ElementType, Gemm, GemmLayout, GemmRunner, GemmSpec, LinkOperands, LinkReduceSpec, ReduceTypes, RowMove,
    Scalar, StagedReduce, StartMark,
};
use counterpoint_cuda::{CudaError, CudaMachine, Device, DeviceBuffer, Event, Stream, StreamPriority};

/// Seconds of `work` on the device, enqueued `count` times after once to warm up.
fn device_seconds(
    device: &Device,
    count: usize,
    mut work: impl FnMut(&Stream) -> Result<(), CudaError>,
) -> Result<f64, ExecError> {
    let mut measure = || {
        let stream = Stream::new(device, StreamPriority::Low)?;
        let (begin, end) = (Event::timing(device)?, Event::timing(device)?);
        work(&stream)?;
        begin.record(&stream)?;
        (0..count).try_for_each(|_| work(&stream))?;
        end.record(&stream)?;
        stream.synchronize()?;
        end.time_since(&begin)
    };
    let took: Result<Duration, CudaError> = measure();
    Ok(took.map_err(|error| exec_error(0, "a calibration", error))?.as_secs_f64() / count as f64)
}

/// Bytes read and written a second by a copy that no cache holds.
pub(super) fn memory_bytes_per_second(device: &Device) -> Result<f64, ExecError> {
    const BYTES: usize = 512 << 20;
    let failed = |error| exec_error(0, "a calibration", error);
    let (from, to) = (
        DeviceBuffer::new(device, BYTES).map_err(failed)?,
        DeviceBuffer::new(device, BYTES).map_err(failed)?,
    );
    let seconds = device_seconds(device, 8, |stream| to.copy_from(stream, 0, &from))?;
    Ok(2.0 * BYTES as f64 / seconds)
}

/// Bytes that one multiprocessor reads, adds and writes a second where as many sum as under a product; `None` where no kernel keeps to so
/// few. Nothing else runs here: a product takes multiprocessors, not what these have.
pub(super) fn sum_bytes_per_second(device: &Device) -> Result<Option<f64>, ExecError> {
    /// Operands, as of four ranks, of rows of bf16.
    const PEERS: usize = 4;
    const ROWS: usize = 8192;
    const ROW_ELEMENTS: u64 = 1024;
    let share =
        ReduceTypes { partial: Scalar::Bf16, wire: Scalar::Bf16, sum: Scalar::F32, result: Scalar::Bf16 };
    if !StagedReduce::takes(device, share, ROW_ELEMENTS, [PEERS, 1]) {
        return Ok(None);
    }
    let spec = LinkReduceSpec {
        op: ReduceOp::Sum,
        accumulate: Accumulate::Start,
        types: share,
        operands: LinkOperands::Announced,
        tensors: vec![(ROWS, ROW_ELEMENTS)],
        divisors: None,
    };
    let rows = Range::new(0, ROWS);
    let moves: Vec<RowMove> = (0..PEERS).map(|peer| RowMove { peer, from: rows, to: rows }).collect();
    let bytes = ROWS * ROW_ELEMENTS as usize * 2;
    let made = || -> Result<_, CudaError> {
        let setup = Stream::new(device, StreamPriority::Low)?;
        let sum = StagedReduce::new(&setup, &spec, &moves, SUMMING_WORKERS as u32)?;
        let memory = DeviceBuffer::new(device, (PEERS + 1) * bytes)?;
        memory.fill(&setup, 0)?;
        setup.synchronize()?;
        Ok((sum, memory))
    };
    let (sum, memory) = made().map_err(|error| exec_error(0, "a calibration", error))?;
    let at = |share: usize| memory.address() + (share * bytes) as u64;
    let seconds = device_seconds(device, 8, |stream| {
        // SAFETY: all rows lie inside `memory`, which lives until they are summed.
        unsafe { sum.launch(stream, PEERS, |peer, _| at(peer), &[at(PEERS)], &StartMark::none()) }
    })?;
    Ok(Some(((PEERS + 1) * bytes) as f64 / seconds / SUMMING_WORKERS as f64))
}

/// From the start of one small operation to that of the next.
pub(super) fn launch_seconds(device: &Device) -> Result<f64, ExecError> {
    let buffer = DeviceBuffer::new(device, 4096).map_err(|error| exec_error(0, "a calibration", error))?;
    device_seconds(device, 256, |stream| buffer.fill(stream, 0))
}

/// Of a product that many waves of tiles share.
pub(super) fn matmul_flops_per_second(device: &Device) -> Result<f64, ExecError> {
    let spec = GemmSpec::new(8192, 8192, 4096, GemmLayout::Nt, ElementType::Bf16);
    let measure = || {
        let bench = GemmBench::new(device, &spec)?;
        let runner = GemmRunner::Ours(Gemm::new(bench.stream(), &spec)?);
        bench.seconds(&[runner], &[0; 6])
    };
    let seconds = measure().map_err(|error: CudaError| exec_error(0, "a calibration", error))?;
    Ok(spec.flops() / median(&seconds.concat()))
}

/// Masks whose times the rates are fitted to: dense ones, where a rate is nearly all that there is. What documents cost besides
/// is the kernels' own.
const MASKS: [&str; 2] = ["full:8k", "causal:8k"];

const FORWARD_ONLY: Option<GradientReduction> = None;

/// Sets the rates of attention, so that what the cost model says of [`MASKS`] is what they take, in the geometric mean.
pub(super) fn attention_rates(machine: &CudaMachine, cost: &mut CostModel) -> Result<(), ExecError> {
    let spec = AttentionSpec::new(32, 8, 128, DType::Bf16);
    let masks: Vec<Mask> = MASKS.iter().filter_map(|text| text.parse().ok()).collect();
    let Some(first) = masks.first() else { return Ok(()) };
    let inputs = random_inputs(first, &spec, 7, Pass::ForwardBackward);
    let bench = AttentionBench::new(machine, &spec, &inputs)?;
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for mask in &masks {
        let mut case = bench.case(mask)?;
        case.prepare(BenchPass::Backward)?;
        let mut seconds = |pass| Ok::<_, ExecError>(median(&case.seconds(pass, BenchClock::Device, 6)?));
        let (forward_seconds, backward_seconds) =
            (seconds(BenchPass::Forward)?, seconds(BenchPass::Backward)?);
        forward.push(Timed { program: program(mask, &spec, FORWARD_ONLY)?, seconds: forward_seconds });
        let reduction = Some(GradientReduction::PerStage);
        backward.push(Timed { program: program(mask, &spec, reduction)?, seconds: backward_seconds });
    }
    cost.forward_flops_per_second =
        rate(&forward, |rate| CostModel { forward_flops_per_second: rate, ..*cost });
    cost.backward_flops_per_second =
        rate(&backward, |rate| CostModel { backward_flops_per_second: rate, ..*cost });
    Ok(())
}

/// A Program of one rank and what it took.
struct Timed {
    program: Program,
    seconds: f64,
}

fn program(
    mask: &Mask,
    spec: &AttentionSpec,
    backward: Option<GradientReduction>,
) -> Result<Program, ExecError> {
    let refused = |reason: String| ExecError::Program {
        program: "calibration".to_owned(),
        rank: 0,
        reason: ProgramFault::NotPlanned { reason },
    };
    let plan = plan_mask(mask, spec, &PlanConfig::new(1)).map_err(|error| refused(error.to_string()))?;
    let policy = OverlapPolicy::SEQUENTIAL;
    Ok(match backward {
        None => lower_attention_forward(&plan, 0, spec, policy, KeyBlocks::Unaligned),
        Some(reduction) => lower_attention_backward(&plan, 0, spec, policy, reduction),
    })
}

/// The rate with which the predicted times are the measured ones in the geometric mean. Predictions fall with the rate, so
/// halving an interval finds it.
fn rate(timed: &[Timed], cost: impl Fn(f64) -> CostModel) -> f64 {
    let log_error = |rate: f64| -> f64 {
        let cost = cost(rate);
        let each = timed.iter().map(|timed| {
            let predicted = simulate(std::slice::from_ref(&timed.program), &Topology::flat(1), &cost);
            let predicted = predicted.map_or(f64::NAN, |timeline| timeline.makespan());
            (predicted / timed.seconds).ln()
        });
        each.sum()
    };
    let (mut slow, mut fast) = (1e9_f64, 1e18_f64);
    for _ in 0..80 {
        let middle = (slow * fast).sqrt();
        if log_error(middle) > 0.0 { slow = middle } else { fast = middle }
    }
    (slow * fast).sqrt()
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::GradientShares;

    use super::*;

    #[test]
    fn the_rate_that_times_were_made_with_is_found() {
        let spec = AttentionSpec {
            heads_q: 8,
            heads_kv: 2,
            head_dim: 128,
            head_dim_v: 128,
            dtype: DType::Bf16,
            scale: 0.1,
            softcap: 0.0,
            seqlen_sink: 0,
            gradient_shares: GradientShares::Accumulators,
            max_logits: false,
            dlse: false,
        };
        let model = |rate| CostModel { forward_flops_per_second: rate, ..CostModel::H200 };
        let timed: Vec<Timed> = ["full:4k", "varlen-causal:lengths=2000,700"]
            .into_iter()
            .map(|mask| {
                let program = program(&mask.parse().unwrap(), &spec, FORWARD_ONLY).unwrap();
                let programs = std::slice::from_ref(&program);
                let seconds = simulate(programs, &Topology::flat(1), &model(321e12)).unwrap().makespan();
                Timed { program, seconds }
            })
            .collect();
        let found = rate(&timed, model);
        assert!((found / 321e12 - 1.0).abs() < 1e-6, "{found}");
        for mask in MASKS {
            assert!(mask.parse::<Mask>().is_ok_and(|mask| mask.seqlen_q() == 8192), "{mask}");
        }
    }
}
