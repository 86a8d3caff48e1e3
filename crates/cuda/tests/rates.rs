//! Rates of the helper kernels on a GPU, compared with the driver's own copy: `cargo test --test rates -- --ignored --nocapture`.
#![allow(unsafe_code)]

use std::time::Instant;

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_cuda::kernel::{
    AttentionDelta, Cast, DeltaTensors, ElementType, ReduceTypes, RowCopy, RowCopyTensor, RowMerge,
    RowMergeSpec, RowMove, RowReduce, RowReduceSpec, Scalar, StartMark,
};
use counterpoint_cuda::{CudaMachine, DeviceBuffer, Event, Stream, StreamPriority, Timing};
use counterpoint_exec::{AttentionInputs, HostTensor, RunConfig, run_attention_on};
use counterpoint_mask::{Documents, Mask, Range};
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_schedule::{Accumulate, ReduceOp};

fn machine(timing: Timing) -> Option<CudaMachine> {
    match CudaMachine::open(timing) {
        Ok(machine) => Some(machine),
        Err(error) if error.is_missing() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// All in one run.
#[test]
#[ignore = "a measurement"]
fn rates() {
    let Some(cuda) = machine(Timing::Off) else { return };
    let device = &cuda.devices()[0];
    let stream = Stream::new(device, StreamPriority::High).unwrap();
    let bytes = 1usize << 30;
    let (a, b) = (DeviceBuffer::new(device, bytes).unwrap(), DeviceBuffer::new(device, bytes).unwrap());
    let (c, d) = (DeviceBuffer::new(device, bytes).unwrap(), DeviceBuffer::new(device, bytes).unwrap());
    for buffer in [&a, &b, &c, &d] {
        buffer.fill_words(&stream, 0x3f3f_3f3f).unwrap();
    }
    let copy = seconds(&stream, || b.copy_from(&stream, 0, &a).unwrap());
    let reference = 2.0 * bytes as f64 / copy;
    println!("{:44} {:7.0} GB/s", "cuMemcpyDtoD, read and write", reference / 1e9);
    let report = |what: &str, moved: f64, seconds: f64| {
        let rate = moved / seconds;
        println!("{what:44} {:7.0} GB/s, {:.3} of the copy", rate / 1e9, rate / reference);
    };
    let again = seconds(&stream, || b.copy_from(&stream, 0, &a).unwrap());
    report("cuMemcpyDtoD again", 2.0 * bytes as f64, again);
    for (row, run) in [(2048u64, 1usize), (2048, 128), (2048, 4096), (256, 1), (1030, 7)] {
        // k and v of half the bytes each, every other run of rows.
        let rows = (bytes as u64 / 2 / row) as usize;
        let moves: Vec<RowMove> = (0..rows / (2 * run))
            .map(|i| RowMove {
                peer: i % 2,
                from: Range::new(2 * i * run, (2 * i + 1) * run),
                to: Range::new(i * run, (i + 1) * run),
            })
            .collect();
        let moved: usize = moves.iter().map(|step| step.from.len()).sum();
        let tensor = RowCopyTensor { scalar: Scalar::Bf16, row_elements: row / 2, wire: Scalar::Bf16 };
        let work = RowCopy::new(&stream, &[tensor; 2], &moves).unwrap();
        let half = bytes as u64 / 2;
        let source = |_: usize, tensor: usize| a.address() + tensor as u64 * half;
        // SAFETY: all rows are inside of the halves of the two buffers.
        let time = seconds(&stream, || unsafe {
            work.launch(&stream, source, &[b.address(), b.address() + half], &StartMark::none()).unwrap();
        });
        report(&format!("row copy, rows of {row} B, runs of {run}"), 4.0 * (moved as u64 * row) as f64, time);
    }
    for (peers, run) in [(1usize, 128usize), (2, 128), (3, 1)] {
        let row_elements = 1024u64;
        let rows = bytes / 4 / row_elements as usize / 2;
        let moves: Vec<RowMove> = (0..rows / run)
            .flat_map(|i| {
                (0..peers).map(move |peer| RowMove {
                    peer,
                    from: Range::new(i * run, (i + 1) * run),
                    to: Range::new(i * run, (i + 1) * run),
                })
            })
            .collect();
        let f32s =
            ReduceTypes { partial: Scalar::F32, wire: Scalar::F32, sum: Scalar::F32, result: Scalar::F32 };
        let spec = RowReduceSpec {
            op: ReduceOp::Sum,
            accumulate: Accumulate::Continue,
            types: f32s,
            rows,
            row_elements,
            divisors: None,
        };
        let work = RowReduce::new(&stream, &spec, &moves).unwrap();
        let sources = [a.address(), c.address(), d.address()];
        // SAFETY: all rows are inside of the buffers.
        let time = seconds(&stream, || unsafe {
            work.launch(&stream, None, |peer| sources[peer], b.address(), &StartMark::none()).unwrap()
        });
        let moved = (rows / run * run) as f64 * row_elements as f64 * 4.0 * (peers + 2) as f64;
        report(&format!("row reduce, {peers} operands, runs of {run}"), moved, time);
    }
    let (heads, dim) = (16usize, 128usize);
    let types =
        ReduceTypes { partial: Scalar::F32, wire: Scalar::F32, sum: Scalar::F32, result: Scalar::F32 };
    let rows = bytes / 4 / (heads * dim) / 2;
    for peers in [1usize, 2] {
        let moves: Vec<RowMove> = (0..peers)
            .map(|peer| RowMove { peer, from: Range::new(0, rows), to: Range::new(0, rows) })
            .collect();
        let spec = RowMergeSpec {
            accumulate: Accumulate::Continue,
            types,
            rows,
            heads: heads as u32,
            dim: dim as u32,
        };
        let work = RowMerge::new(&stream, &spec, &moves).unwrap();
        let half = bytes as u64 / 2;
        let pairs = [a.address(), c.address(), b.address()].map(|address| (address, address + half));
        // SAFETY: out of all rows is the first half of a buffer, lse is in the second.
        let time = seconds(&stream, || unsafe {
            work.launch(&stream, |peer| pairs[peer], pairs[2], &StartMark::none()).unwrap();
        });
        let moved = (rows * heads * (dim + 1) * 4 * (peers + 2)) as f64;
        report(&format!("merge of (out, lse), {peers} operands, f32"), moved, time);
    }
    for dim in [64usize, 128, 256] {
        let rows = bytes / 4 / (heads * dim);
        let delta = AttentionDelta::new(&stream, ElementType::Bf16, [rows, heads, dim], 0).unwrap();
        let tensors = DeltaTensors {
            out: a.address(),
            dout: b.address(),
            lse: c.address(),
            dlse: None,
            delta: d.address(),
            sink: None,
        };
        // SAFETY: out and dout take half of their buffers, the statistics less.
        let time = seconds(&stream, || unsafe { delta.launch(&stream, &tensors).unwrap() });
        report(&format!("delta, heads of {dim}, bf16"), (rows * heads * (4 * dim + 4)) as f64, time);
    }
    for (src, dst) in [(Scalar::F32, Scalar::Bf16), (Scalar::F32, Scalar::F16), (Scalar::Bf16, Scalar::F32)] {
        let cast = Cast::new(device, src, dst).unwrap();
        let count = bytes as u64 / 4;
        // SAFETY: both buffers hold that many elements of 4 bytes.
        let time =
            seconds(&stream, || unsafe { cast.launch(&stream, a.address(), b.address(), count).unwrap() });
        report(&format!("cast {src:?} to {dst:?}"), (count * (src.bytes() + dst.bytes())) as f64, time);
    }
}

/// What a process's first forward and backward take: run it twice with one `COUNTERPOINT_CACHE_DIR`, empty before the first, and
/// the difference of first and second call is compiling, then reading what is compiled.
#[test]
#[ignore = "a measurement"]
fn first_call() {
    let begin = Instant::now();
    let Some(cuda) = machine(Timing::Off) else { return };
    println!("{:44} {:7.1} ms", "driver, devices", begin.elapsed().as_secs_f64() * 1e3);
    let rows = 2048;
    let mask = Mask::causal(Documents::from_lengths([rows]).unwrap()).unwrap();
    let spec = AttentionSpec::new(16, 16, 128, DType::Bf16);
    let plan = plan_mask(&mask, &spec, &PlanConfig::new(1)).unwrap();
    let tensor = || HostTensor::zeros(vec![rows, 16, 128], DType::Bf16);
    let inputs = AttentionInputs {
        q: tensor(),
        k: tensor(),
        v: tensor(),
        sink: None,
        dout: Some(tensor()),
        dlse: None,
    };
    let call = || {
        let begin = Instant::now();
        run_attention_on(&cuda, &plan, &spec, &inputs, &RunConfig::default()).unwrap();
        begin.elapsed().as_secs_f64() * 1e3
    };
    let (first, second, third) = (call(), call(), call());
    println!("{:44} {first:7.1} ms", "first call, forward and backward");
    println!("{:44} {second:7.1} ms, {third:.1} ms", "second, third");
    println!("{:44} {:7.1} ms", "what the first takes more", first - second.min(third));
}

/// The fastest of some runs, by the device's clock.
fn seconds(stream: &Stream, mut work: impl FnMut()) -> f64 {
    let (start, end) = (Event::timing(stream.device()).unwrap(), Event::timing(stream.device()).unwrap());
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        start.record(stream).unwrap();
        work();
        end.record(stream).unwrap();
        end.synchronize().unwrap();
        best = best.min(end.time_since(&start).unwrap().as_secs_f64());
    }
    best
}
