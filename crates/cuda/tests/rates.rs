//! Rates of the helper kernels on a GPU, beside the driver's own copy: `cargo test --test rates -- --ignored --nocapture`.
#![allow(unsafe_code)]

use counterpoint_cuda::kernel::{
    Cast, ReduceTypes, RowCopy, RowCopyTensor, RowMove, RowReduce, RowReduceSpec, Scalar,
};
use counterpoint_cuda::{CudaMachine, DeviceBuffer, Event, Stream, StreamPriority, Timing};
use counterpoint_mask::Range;
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
            work.launch(&stream, source, &[b.address(), b.address() + half]).unwrap();
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
        };
        let work = RowReduce::new(&stream, &spec, &moves).unwrap();
        let sources = [a.address(), c.address(), d.address()];
        // SAFETY: all rows are inside of the buffers.
        let time = seconds(&stream, || unsafe {
            work.launch(&stream, None, |peer| sources[peer], b.address()).unwrap()
        });
        let moved = (rows / run * run) as f64 * row_elements as f64 * 4.0 * (peers + 2) as f64;
        report(&format!("row reduce, {peers} operands, runs of {run}"), moved, time);
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
