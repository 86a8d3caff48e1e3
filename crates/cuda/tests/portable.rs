//! The portable attention kernels on a GPU against the f64 reference. Says so and passes where there is no GPU or compiler.
#![allow(unsafe_code)]

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use counterpoint_cuda::kernel::{
    AttentionProblem, BackwardMode, BackwardTensors, DqBegin, ElementType, ForwardMode, ForwardModeEnd,
    ForwardTarget, ForwardTensors, PortableBackward, PortableBackwardTables, PortableForward, ResultTensors,
    StateTensors,
};
use counterpoint_cuda::{DescribedGpu, Device, DeviceBuffer, Stream, StreamPriority, compiler_version};
use counterpoint_exec::{AttentionInputs, AttentionOutputs, HostElement, HostTensor, Pass, random_inputs};
use counterpoint_mask::{Band, Mask, Range};
use counterpoint_plan::{AttentionSpec, DType, GradientShares};
use counterpoint_reference::check_attention;
use half::{bf16, f16};

fn stream() -> Option<Stream> {
    match compiler_version().and_then(|_| Device::open(0)) {
        Ok(device) => Some(Stream::new(&device, StreamPriority::default()).unwrap()),
        Err(error) if error.is_missing() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A tensor on the device.
fn upload<T: HostElement + NoUninit>(stream: &Stream, tensor: &HostTensor) -> DeviceBuffer {
    DeviceBuffer::from_slice(stream, tensor.as_slice::<T>().unwrap()).unwrap()
}

/// Memory for a tensor, full of NaN.
fn poisoned<T>(stream: &Stream, shape: &[usize]) -> DeviceBuffer {
    let buffer =
        DeviceBuffer::new(stream.device(), shape.iter().product::<usize>() * size_of::<T>()).unwrap();
    buffer.fill(stream, 0xff).unwrap();
    buffer
}

fn download<T: HostElement + AnyBitPattern + NoUninit>(
    stream: &Stream,
    buffer: &DeviceBuffer,
    shape: &[usize],
) -> HostTensor {
    HostTensor::from_vec(shape.to_vec(), buffer.download::<T>(stream, 0, shape.iter().product()).unwrap())
}

/// How a case is computed.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Stages that the key rows are cut into; states go from one to the next.
    stages: usize,
    sm_margin: u32,
    rounds_keys: bool,
    deterministic: bool,
}

/// The bands of every stage: those of the mask, cut at columns.
fn cut(mask: &Mask, stages: usize) -> Vec<Arc<[Band]>> {
    let columns = |stage: usize| mask.seqlen_k() * stage / stages;
    let part = |stage: usize| {
        let cut = Range::new(columns(stage), columns(stage + 1));
        let clip = |band: Band| {
            let (start, end) = (band.k_range.start.max(cut.start), band.k_range.end.min(cut.end));
            (start < end).then(|| Band { k_range: Range::new(start, end), ..band })
        };
        mask.bands().filter_map(clip).collect()
    };
    (0..stages).map(part).collect()
}

fn compute<T: HostElement + AnyBitPattern + NoUninit>(
    stream: &Stream,
    mask: &Mask,
    spec: &AttentionSpec,
    element: ElementType,
    inputs: &AttentionInputs,
    run: Run,
) -> AttentionOutputs {
    let (rows_q, rows_k) = (mask.seqlen_q(), mask.seqlen_k());
    let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, .. } = *spec;
    let problem = |bands: Arc<[Band]>| AttentionProblem {
        bands,
        rows_q,
        rows_k,
        rows_arriving: 0,
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        element,
        scale: spec.scale as f32,
        softcap: (spec.softcap > 0.0).then_some(spec.softcap as f32),
        sm_margin: run.sm_margin,
        deterministic: run.deterministic,
    };
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| upload::<T>(stream, tensor));
    let sink = inputs.sink.as_ref().map(|sink| upload::<f32>(stream, sink));
    let (row_shape, out_shape) = ([rows_q, heads_q], [rows_q, heads_q, head_dim_v]);
    let (out, lse) = (poisoned::<T>(stream, &out_shape), poisoned::<f32>(stream, &row_shape));
    let [acc, row_max, row_sum] =
        [&out_shape[..], &row_shape, &row_shape].map(|shape| poisoned::<f32>(stream, shape));
    let state = StateTensors { acc: acc.address(), row_max: row_max.address(), row_sum: row_sum.address() };
    let sink_address = sink.as_ref().map_or(0, DeviceBuffer::address);
    let result = ResultTensors { sink: sink_address, out: out.address(), lse: lse.address() };
    let max_logits = DeviceBuffer::from_slice(stream, &vec![f32::NEG_INFINITY; heads_q]).unwrap();
    let parts = cut(mask, run.stages);
    for (stage, bands) in parts.iter().enumerate() {
        let (continues, last) = (stage > 0, stage + 1 == run.stages);
        let (end, target) = match last {
            true => (ForwardModeEnd::Result { seqlen_sink: spec.seqlen_sink }, ForwardTarget::Result(result)),
            false => (ForwardModeEnd::State, ForwardTarget::State(state)),
        };
        let mode = ForwardMode { continues, end, max_logits: spec.max_logits };
        let problem = problem(bands.clone());
        let tables = PortableForward::tables(&DescribedGpu::of(stream.device()), &problem, mode).unwrap();
        let forward = PortableForward::new(stream, &problem, mode, &tables).unwrap();
        let begin = continues.then_some(state);
        let tensors = ForwardTensors {
            q: q.address().into(),
            k: k.address().into(),
            v: v.address().into(),
            arriving: None,
            begin,
            end: target,
            max_logits: spec.max_logits.then(|| max_logits.address()),
        };
        // SAFETY: the tensors are those of the problem, and kept until the stream was waited for.
        unsafe { forward.launch(stream, &tensors) }.unwrap();
        // Tensors of the other mode are refused.
        let wrong = ForwardTensors { begin: if continues { None } else { Some(state) }, ..tensors };
        // SAFETY: as above.
        assert!(
            unsafe { forward.launch(stream, &wrong) }.unwrap_err().to_string().contains("it was made for")
        );
        stream.synchronize().unwrap();
    }
    let mut outputs = AttentionOutputs {
        out: download::<T>(stream, &out, &out_shape),
        lse: download::<f32>(stream, &lse, &row_shape),
        max_logits: spec.max_logits.then(|| download::<f32>(stream, &max_logits, &[heads_q])),
        dq: None,
        dk: None,
        dv: None,
        dsink: None,
    };
    let Some(dout) = &inputs.dout else { return outputs };
    let (dout_values, out_values) = (dout.to_f64(), outputs.out.to_f64());
    let rows = dout_values.chunks(head_dim_v).zip(out_values.chunks(head_dim_v));
    let delta: Vec<f32> =
        rows.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() as f32).collect();
    let (dout, delta) = (upload::<T>(stream, dout), DeviceBuffer::from_slice(stream, &delta).unwrap());
    let [q_shape, k_shape, v_shape] =
        [[rows_q, heads_q, head_dim], [rows_k, heads_kv, head_dim], [rows_k, heads_kv, head_dim_v]];
    let dq = poisoned::<f32>(stream, &q_shape);
    let [dk, dv] = [k_shape, v_shape].map(|shape| match run.rounds_keys {
        true => poisoned::<T>(stream, &shape),
        false => poisoned::<f32>(stream, &shape),
    });
    let mode = BackwardMode { dq: DqBegin::Anything, rounds_queries: false, rounds_keys: run.rounds_keys };
    let problem = problem(mask.bands().collect());
    let tables = PortableBackwardTables::new(&DescribedGpu::of(stream.device()), &problem).unwrap();
    let backward = PortableBackward::new(stream, &problem, mode, &tables).unwrap();
    let tensors = BackwardTensors {
        q: q.address().into(),
        k: k.address().into(),
        v: v.address().into(),
        dout: dout.address(),
        lse: lse.address(),
        delta: delta.address(),
        dq: dq.address(),
        rounded_dq: None,
        dk: dk.address(),
        dv: dv.address(),
        rounded: None,
        owners: None,
        arriving: None,
    };
    // SAFETY: as above.
    unsafe { backward.launch(stream, &tensors) }.unwrap();
    stream.synchronize().unwrap();
    let rounded = |buffer: &DeviceBuffer, shape: &[usize], is_rounded: bool| {
        if is_rounded {
            return download::<T>(stream, buffer, shape);
        }
        let values = download::<f32>(stream, buffer, shape).to_f64();
        HostTensor::from_vec(shape.to_vec(), values.into_iter().map(T::from_f64).collect())
    };
    outputs.dq = Some(rounded(&dq, &q_shape, false));
    outputs.dk = Some(rounded(&dk, &k_shape, run.rounds_keys));
    outputs.dv = Some(rounded(&dv, &v_shape, run.rounds_keys));
    outputs
}

#[test]
fn portable_attention_is_right() {
    let Some(stream) = stream() else { return };
    let masks = [
        "full:300",
        "causal:333",
        "varlen-causal:lengths=1,40,200,3,129",
        "sliding-window:400,left=63,right=0",
        "varlen-block-causal:0,150,417,block=64",
        "shared-question:100;50,70,90",
    ];
    let one = Run { stages: 1, sm_margin: 0, rounds_keys: true, deterministic: false };
    let mut number = 0;
    for mask in masks {
        let mask: Mask = mask.parse().unwrap();
        for (head_dim, head_dim_v) in [(64, 64), (80, 96), (128, 128), (192, 128), (256, 256)] {
            number += 1;
            let softcap = if number % 4 == 3 { 5.0 } else { 0.0 };
            let dtype = if number % 3 == 0 { DType::F16 } else { DType::Bf16 };
            let scale = (head_dim as f64).powf(-0.5) * if number % 5 == 1 { -1.0 } else { 1.0 };
            let mut spec = AttentionSpec {
                heads_q: 4,
                heads_kv: if number % 2 == 0 { 4 } else { 2 },
                head_dim,
                head_dim_v,
                dtype,
                scale,
                softcap,
                seqlen_sink: 0,
                gradient_shares: GradientShares::Accumulators,
                max_logits: number % 2 == 0,
                dlse: false,
            };
            let mut run = Run { stages: 1 + number % 3, sm_margin: (number % 2 * 130) as u32, ..one };
            run.rounds_keys = number % 4 < 2;
            run.deterministic = number % 3 == 1;
            // The sink's gradient is another kernel's.
            let backward = number % 7 != 0;
            spec.seqlen_sink = if backward { 0 } else { 2 };
            let pass = if backward { Pass::ForwardBackward } else { Pass::Forward };
            let inputs = random_inputs(&mask, &spec, number as u64, pass);
            let compute = || match dtype {
                DType::F16 => compute::<f16>(&stream, &mask, &spec, ElementType::F16, &inputs, run),
                _ => compute::<bf16>(&stream, &mask, &spec, ElementType::Bf16, &inputs, run),
            };
            let outputs = compute();
            if run.deterministic {
                assert!(compute() == outputs, "{number}: two runs differ");
            }
            let report = check_attention(&mask, &spec, &inputs, &outputs);
            assert!(report.passed, "{number}: {spec:?} {run:?} {report:#?}");
        }
    }
    println!("{number} cases are right");
}
