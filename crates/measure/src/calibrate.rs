//! What work costs on this machine's CPU.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_cost::{CostModel, Link};
use counterpoint_cpu_kernels::{GemmArgs, KernelElement, gemm};
use counterpoint_exec::{AttentionInputs, HostElement, HostTensor, with_host_element};
use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_plan::AttentionSpec;
use counterpoint_schedule::{Accumulate, GemmLayout};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::attention::Run;

/// What work costs on this machine's CPU when `ranks` ranks share it, measured in a fraction of a second: the kernels on
/// a small problem of the given heads and type, and copies in memory.
///
/// All ranks compute at once, so a rank has its share of the machine's rate. A collective on one machine is copies by
/// ranks that share the cores, after every rank has been woken.
pub fn calibrate(spec: &AttentionSpec, ranks: usize) -> CostModel {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let ranks = ranks.max(1) as f64;
    // A machine that can start no thread of its own still runs the kernels on the global pool's default size.
    let rates = ThreadPoolBuilder::new()
        .num_threads(cores)
        .build()
        .map(|threads| with_host_element!(spec.dtype, T => rates::<T>(spec, &threads)))
        .unwrap_or(FALLBACK);
    let rounds = (ranks / cores as f64).ceil();
    let copy = copy_bytes_per_second();
    let link = Link {
        alpha_seconds: handover_seconds() * rounds,
        // Rows are packed by the sender and unpacked by the receiver.
        bytes_per_second: copy / (2.0 * rounds),
    };
    CostModel {
        forward_flops_per_second: rates.forward / ranks,
        backward_flops_per_second: rates.backward / ranks,
        matmul_flops_per_second: rates.matmul / ranks,
        // A copy reads and writes each byte; a pass over memory runs on all threads.
        memory_bytes_per_second: 2.0 * copy * cores as f64 / ranks,
        launch_seconds: rates.launch * rounds,
        link,
        network: link,
        // Nobody's engines copy.
        copy_seconds: 0.0,
        engine: None,
        sum_bytes_per_second: None,
        packed_elements_per_second: Some(rates.packed_elements / ranks),
        // Rates are those of ranks that all compute at once.
        sharing: None,
        // Kernels of the CPU have no tiles to count; their rates are of whole problems.
        tiles: None,
    }
}

/// Operations a second of the whole machine, and the seconds of a launch with nothing to do.
struct Rates {
    forward: f64,
    backward: f64,
    matmul: f64,
    /// Elements a second.
    packed_elements: f64,
    launch: f64,
}

/// Where no thread can be started to measure anything: a slow core.
const FALLBACK: Rates =
    Rates { forward: 1e9, backward: 1e9, matmul: 1e9, packed_elements: 1e8, launch: 1e-5 };
const FALLBACK_HANDOVER_SECONDS: f64 = 1e-5;

/// Operations of the measured forward.
const FLOPS: f64 = 5e8;
/// No measurement is repeated past this.
const LIMIT: Duration = Duration::from_millis(60);

fn rates<T: KernelElement>(spec: &AttentionSpec, threads: &ThreadPool) -> Rates {
    // Enough heads to occupy the threads; more would make the sequence, and with it the tiles, too short.
    let heads_kv = spec.heads_kv.clamp(1, threads.current_num_threads().max(1));
    let heads_q = heads_kv * (spec.heads_q / spec.heads_kv.max(1)).max(1);
    let spec = AttentionSpec { heads_q, heads_kv, seqlen_sink: 0, ..*spec };
    let rows = ((FLOPS / spec.flops_forward(1)).sqrt() as usize).clamp(128, 2048);
    let measure = |rows: usize| {
        let (mask, inputs) = problem::<T>(&spec, rows);
        let mut run = Run::<T>::new(&mask, &spec, &inputs);
        let forward = fastest(|| run.forward(threads));
        let backward = fastest(|| run.backward(threads));
        (forward, backward, mask.area())
    };
    let launch = measure(1).0;
    let (forward, backward, area) = measure(rows);
    Rates {
        forward: spec.flops_forward(area) / forward,
        backward: spec.flops_backward(area) / backward,
        matmul: matmul_flops_per_second::<T>(threads),
        packed_elements: packed_elements_per_second::<T>(threads),
        launch,
    }
}

/// Of a product that is large enough to occupy the threads.
fn matmul_flops_per_second<T: KernelElement>(threads: &ThreadPool) -> f64 {
    const SIZE: usize = 384;
    2.0 * (SIZE as f64).powi(3) / product_seconds::<T>(SIZE, SIZE, threads)
}

/// Of a product of one row, which packs its second operand and does hardly anything else.
fn packed_elements_per_second<T: KernelElement>(threads: &ThreadPool) -> f64 {
    const SIZE: usize = 1024;
    (SIZE * SIZE) as f64 / product_seconds::<T>(1, SIZE, threads)
}

/// Seconds of a product of so many rows with a square of this size.
fn product_seconds<T: KernelElement>(rows: usize, size: usize, threads: &ThreadPool) -> f64 {
    let values =
        |rows: usize| -> Vec<T> { (0..rows * size).map(|i| T::from_f64((i as f64 * 0.7).sin())).collect() };
    let (a, b, mut out) = (values(rows), values(size), values(rows));
    fastest(|| {
        let args = GemmArgs {
            columns: None,
            layout: GemmLayout::Nt,
            a: vec![&a[..]],
            a_columns: size,
            b: vec![&b[..]],
            b_columns: size,
            out: &mut out,
            n: size,
            out_rows: &[Range::new(0, rows)],
            bias: None,
            accumulate: Accumulate::Start,
        };
        gemm::<T, T>(args, threads);
    })
}

/// A full mask of `rows` square. The numbers do not matter, as long as none is special.
fn problem<T: HostElement>(spec: &AttentionSpec, rows: usize) -> (Mask, AttentionInputs) {
    let all = Range::new(0, rows);
    let slices = vec![AttnSlice::new(all, all, MaskType::Full)];
    // One slice inside its sequence is a valid mask; an empty one would only make the measurement meaningless.
    let mask = Mask::new(rows, rows, slices).unwrap_or_else(|error| unreachable!("{error}"));
    let tensor = |heads: usize, dim: usize| {
        let values = (0..rows * heads * dim).map(|i| T::from_f64((i as f64 * 0.7).sin())).collect();
        HostTensor::from_vec(vec![rows, heads, dim], values)
    };
    let inputs = AttentionInputs {
        q: tensor(spec.heads_q, spec.head_dim),
        k: tensor(spec.heads_kv, spec.head_dim),
        v: tensor(spec.heads_kv, spec.head_dim_v),
        sink: None,
        dout: Some(tensor(spec.heads_q, spec.head_dim_v)),
        dlse: None,
    };
    (mask, inputs)
}

/// Seconds of the fastest of up to four runs.
fn fastest(mut work: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
        if begin.elapsed() > LIMIT {
            break;
        }
    }
    // A clock too coarse to see the work must not make it free.
    best.max(1e-9)
}

fn copy_bytes_per_second() -> f64 {
    // Past the caches of a core, as rows of a stage are.
    const BYTES: usize = 8 << 20;
    let src = vec![1u8; BYTES];
    let mut dst = vec![0u8; BYTES];
    let seconds = fastest(|| dst.copy_from_slice(std::hint::black_box(&src)));
    std::hint::black_box(&dst);
    BYTES as f64 / seconds
}

/// Seconds from one thread's message to another thread's having it.
fn handover_seconds() -> f64 {
    const ROUNDS: usize = 20;
    let (to_echo, at_echo) = mpsc::channel::<()>();
    let (to_us, at_us) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let echo = move || while at_echo.recv().is_ok() && to_us.send(()).is_ok() {};
        if thread::Builder::new().spawn_scoped(scope, echo).is_err() {
            return FALLBACK_HANDOVER_SECONDS;
        }
        let seconds = fastest(|| {
            for _ in 0..ROUNDS {
                if to_echo.send(()).is_err() || at_us.recv().is_err() {
                    break;
                }
            }
        });
        drop(to_echo);
        seconds / (2 * ROUNDS) as f64
    })
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::DType;
    use counterpoint_plan::GradientShares;

    use super::*;

    #[test]
    fn costs_are_positive_and_shared_among_ranks() {
        for dtype in [DType::F32, DType::Bf16, DType::F64] {
            let spec = AttentionSpec {
                heads_q: 8,
                heads_kv: 2,
                head_dim: 64,
                head_dim_v: 32,
                dtype,
                scale: 0.125,
                softcap: 0.0,
                seqlen_sink: 0,
                gradient_shares: GradientShares::Accumulators,
                max_logits: false,
                dlse: false,
            };
            let (one, many) = (calibrate(&spec, 1), calibrate(&spec, 64));
            for cost in [&one, &many] {
                for value in [
                    cost.forward_flops_per_second,
                    cost.backward_flops_per_second,
                    cost.matmul_flops_per_second,
                    cost.memory_bytes_per_second,
                    cost.packed_elements_per_second.unwrap_or(0.0),
                    cost.launch_seconds,
                    cost.link.alpha_seconds,
                    cost.link.bytes_per_second,
                ] {
                    assert!(value.is_finite() && value > 0.0, "{cost:?}");
                }
            }
            // 64 ranks have a 64th each; a factor of 4 is left to a busy machine.
            assert!(many.forward_flops_per_second < one.forward_flops_per_second / 16.0, "{one:?} {many:?}");
        }
    }
}
