//! The launcher of the Hopper forward on a GPU, against a dense f64 reference. Passes where there is none.
#![allow(unsafe_code)]

use std::sync::Arc;

use counterpoint_cuda::kernel::{
    AttentionForward, AttentionProblem, ElementType, ForwardMode, ForwardModeEnd, ForwardTarget,
    ForwardTensors, HopperForwardTables, ResultTensors, StateTensors,
};
use counterpoint_cuda::{DescribedGpu, Device, DeviceBuffer, Stream, StreamPriority, compiler_version};
use counterpoint_mask::{Band, Mask, Range};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn stream() -> Option<Stream> {
    let device = compiler_version().and_then(|_| Device::open(0));
    match device {
        Ok(device) if device.arch().is_hopper() => Some(Stream::new(&device, StreamPriority::Low).unwrap()),
        Ok(device) => {
            println!("skipped: {} is no Hopper", device.arch());
            None
        }
        Err(error) => {
            assert!(error.is_missing(), "{error}");
            println!("skipped: {error}");
            None
        }
    }
}

/// A problem with its tensors on the host.
struct Case {
    problem: AttentionProblem,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    sink: Vec<f32>,
}

impl Case {
    fn new(mask: &str, heads: (usize, usize), dims: (usize, usize), sinks: usize, seed: u64) -> Self {
        let mask: Mask = mask.parse().unwrap();
        let problem = AttentionProblem {
            bands: mask.bands().collect::<Vec<_>>().into(),
            rows_q: mask.seqlen_q(),
            rows_k: mask.seqlen_k(),
            rows_arriving: 0,
            heads_q: heads.0,
            heads_kv: heads.1,
            head_dim: dims.0,
            head_dim_v: dims.1,
            element: ElementType::Bf16,
            scale: (dims.0 as f32).powf(-0.5),
            softcap: None,
            sm_margin: 0,
            deterministic: false,
        };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut normal = |count: usize| -> Vec<f32> {
            (0..count).map(|_| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0).collect()
        };
        let mut elements = |count| normal(count).into_iter().map(bf16::from_f32).collect();
        let q = elements(problem.rows_q * heads.0 * dims.0);
        let k = elements(problem.rows_k * heads.1 * dims.0);
        let v = elements(problem.rows_k * heads.1 * dims.1);
        let sink = normal(sinks * heads.0);
        Self { problem, q, k, v, sink }
    }

    /// out and lse in f64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let AttentionProblem { rows_q, rows_k, heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        let (mut out, mut lse) =
            (vec![0.0; rows_q * heads_q * head_dim_v], vec![f64::NEG_INFINITY; rows_q * heads_q]);
        for row in 0..rows_q {
            for head in 0..heads_q {
                let key_head = head / (heads_q / heads_kv);
                let q = &self.q[(row * heads_q + head) * head_dim..][..head_dim];
                let mut scores = Vec::new();
                for col in
                    (0..rows_k).filter(|&col| self.problem.bands.iter().any(|band| holds(band, row, col)))
                {
                    let k = &self.k[(col * heads_kv + key_head) * head_dim..][..head_dim];
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| a.to_f64() * b.to_f64()).sum();
                    let score = dot * f64::from(self.problem.scale);
                    let cap = self.problem.softcap.map(f64::from);
                    scores.push((col, cap.map_or(score, |cap| cap * (score / cap).tanh())));
                }
                let sinks = self.sink.iter().skip(head).step_by(heads_q).map(|&sink| f64::from(sink));
                let all = scores.iter().map(|&(_, score)| score).chain(sinks);
                let top = all.clone().fold(f64::NEG_INFINITY, f64::max);
                if top == f64::NEG_INFINITY {
                    continue;
                }
                let log_sum = top + all.map(|score| (score - top).exp()).sum::<f64>().ln();
                lse[row * heads_q + head] = log_sum;
                let out = &mut out[(row * heads_q + head) * head_dim_v..][..head_dim_v];
                for (col, score) in scores {
                    let v = &self.v[(col * heads_kv + key_head) * head_dim_v..][..head_dim_v];
                    out.iter_mut().zip(v).for_each(|(out, v)| *out += (score - log_sum).exp() * v.to_f64());
                }
            }
        }
        (out, lse)
    }

    /// Runs it on the device in stages that end before the given key rows, all in all.
    fn run(&self, stream: &Stream, cuts: &[usize]) -> (Vec<bf16>, Vec<f32>) {
        let AttentionProblem { rows_q, rows_k, heads_q, head_dim_v, .. } = self.problem;
        let device = stream.device();
        let upload = |values: &[bf16]| DeviceBuffer::from_slice(stream, values).unwrap();
        let (q, k, v) = (upload(&self.q), upload(&self.k), upload(&self.v));
        let sink = DeviceBuffer::from_slice(stream, &self.sink).unwrap();
        let rows = rows_q * heads_q;
        // What is not written shows: all ones is not a number in either type.
        let poisoned = |bytes| {
            let buffer = DeviceBuffer::new(device, bytes).unwrap();
            buffer.fill(stream, 0xff).unwrap();
            buffer
        };
        let (out, lse) = (poisoned(rows * head_dim_v * 2), poisoned(rows * 4));
        let (acc, row_max, row_sum) =
            (poisoned(rows * head_dim_v * 4), poisoned(rows * 4), poisoned(rows * 4));
        let state =
            StateTensors { acc: acc.address(), row_max: row_max.address(), row_sum: row_sum.address() };
        let result = ResultTensors { sink: sink.address(), out: out.address(), lse: lse.address() };
        let ends: Vec<_> = cuts.iter().copied().chain([rows_k]).collect();
        let mut start = 0;
        let mut kept = Vec::new();
        for (stage, &end) in ends.iter().enumerate() {
            let bands: Vec<_> = self
                .problem
                .bands
                .iter()
                .filter_map(|band| {
                    let first = band.k_range.start.max(start);
                    let k_range = Range::new(first, band.k_range.end.min(end).max(first));
                    (!k_range.is_empty()).then_some(Band { k_range, ..*band })
                })
                .collect();
            let problem = AttentionProblem { bands: Arc::from(bands), ..self.problem.clone() };
            let last = stage + 1 == ends.len();
            let mode = ForwardMode {
                continues: stage > 0,
                end: match last {
                    true => ForwardModeEnd::Result { seqlen_sink: self.sink.len() / heads_q },
                    false => ForwardModeEnd::State,
                },
                max_logits: false,
            };
            let gpu = DescribedGpu::of(stream.device());
            let tables = HopperForwardTables::new(&gpu, &problem, mode).unwrap();
            let forward = AttentionForward::new(stream, &problem, mode, &tables).unwrap();
            let tensors = ForwardTensors {
                q: q.address().into(),
                k: k.address().into(),
                v: v.address().into(),
                arriving: None,
                begin: (stage > 0).then_some(state),
                end: if last { ForwardTarget::Result(result) } else { ForwardTarget::State(state) },
                max_logits: None,
            };
            // SAFETY: the buffers have the sizes of the problem and live until the results are copied.
            unsafe { forward.launch(stream, &tensors) }.unwrap();
            // And once more where that changes nothing: the queue of tiles is as it was found.
            if stage == 0 {
                // SAFETY: as above.
                unsafe { forward.launch(stream, &tensors) }.unwrap();
            }
            kept.push(forward);
            start = end;
        }
        (out.download(stream, 0, rows * head_dim_v).unwrap(), lse.download(stream, 0, rows).unwrap())
    }

    fn check(&self, stream: &Stream, cuts: &[usize], what: &str) {
        let (out, lse) = self.run(stream, cuts);
        let (wanted, wanted_lse) = self.reference();
        let error = |(got, want): (f64, f64)| if got == want { 0.0 } else { (got - want).abs() };
        let square = |x: f64| x * x;
        let off: f64 =
            out.iter().map(|x| x.to_f64()).zip(wanted.iter().copied()).map(error).map(square).sum();
        let all: f64 = wanted.iter().copied().map(square).sum();
        let relative = (off / all.max(1e-30)).sqrt();
        let worst = lse.iter().map(|&x| f64::from(x)).zip(wanted_lse).map(error).fold(0.0, f64::max);
        println!("{what}: out {relative:.2e}, lse {worst:.2e}");
        // Plain attention in bf16: 2.3e-3.
        assert!(relative < 4e-3 && worst < 1e-4, "{what}: out {relative:.2e}, lse {worst:.2e}");
        assert!(out.iter().all(|x| x.is_finite()), "{what}");
    }
}

fn holds(band: &Band, row: usize, col: usize) -> bool {
    let diagonal = col as i64 - row as i64;
    band.q_range.contains(row)
        && band.k_range.contains(col)
        && (band.diag_min..=band.diag_max).contains(&diagonal)
}

const MASKS: [&str; 5] = [
    "full:300",
    "varlen-causal:lengths=1,130,40,7,200",
    "sliding-window:333,left=50,right=3",
    "shared-question:90;30,64,100",
    "block-causal:400,block=96",
];

#[test]
fn results() {
    let Some(stream) = stream() else { return };
    for (seed, mask) in MASKS.into_iter().enumerate() {
        for (heads, dims, sinks) in [
            ((2, 2), (128, 128), 0),
            ((8, 1), (128, 128), 2),
            ((3, 1), (64, 64), 1),
            ((2, 1), (72, 88), 0),
            ((2, 2), (192, 128), 0),
            ((2, 1), (192, 192), 0),
            ((8, 1), (256, 256), 1),
        ] {
            let case = Case::new(mask, heads, dims, sinks, seed as u64);
            case.check(&stream, &[], &format!("{mask} heads {heads:?} dims {dims:?} sinks {sinks}"));
        }
    }
}

#[test]
fn transformed_scores() {
    let Some(stream) = stream() else { return };
    let mut case = Case::new("varlen-causal:lengths=100,150", (2, 1), (128, 128), 0, 7);
    case.problem.scale = -0.2;
    case.check(&stream, &[], "negative scale");
    case.problem.scale = 0.0;
    case.check(&stream, &[100], "no scale");
    (case.problem.scale, case.problem.softcap) = (0.5, Some(3.0));
    case.check(&stream, &[], "softcap");
    case.check(&stream, &[77, 130], "softcap in stages");
}

#[test]
fn stages_do_not_change_a_bit() {
    let Some(stream) = stream() else { return };
    for mask in MASKS {
        for dims in [(128, 128), (64, 64), (256, 256)] {
            let mut case = Case::new(mask, (8, 1), dims, 1, 3);
            case.check(&stream, &[77], &format!("{mask} in stages"));
            case.problem.deterministic = true;
            let whole = case.run(&stream, &[]);
            assert!(whole == case.run(&stream, &[128]), "{mask} {dims:?}");
            assert!(whole == case.run(&stream, &[128, 256]), "{mask} {dims:?}");
        }
    }
}

#[test]
fn few_long_tiles_are_split() {
    let Some(stream) = stream() else { return };
    for heads in [(1, 1), (8, 1)] {
        let mut case = Case::new("full:6000", heads, (128, 128), 2, 5);
        case.problem.rows_q = 10;
        case.problem.bands = vec![Band { q_range: Range::new(0, 9), ..case.problem.bands[0] }].into();
        case.q.truncate(10 * heads.0 * 128);
        case.check(&stream, &[], &format!("split, heads {heads:?}"));
    }
}

/// Rows so long that unmasked steps have a loop of their own (`Loop::Interior`; a test of `shape.rs` says from where on), among them
/// rows that see nothing, and bounds inside of blocks.
#[test]
fn long_rows() {
    let Some(stream) = stream() else { return };
    for (heads, dims, sinks) in
        [((2, 2), (64, 64), 0), ((2, 1), (64, 64), 1), ((2, 2), (128, 128), 0), ((8, 1), (128, 128), 2)]
    {
        let mut case = Case::new("causal:6000", heads, dims, sinks, 11);
        let rows = 300;
        let band = |first: usize, last: usize, diag_max: i64, k_end: usize| Band {
            q_range: Range::new(first, last),
            k_range: Range::new(0, k_end),
            diag_max,
            ..case.problem.bands[0]
        };
        let bands = [band(0, 60, 5700, 6000), band(130, 190, 5000, 6000), band(190, 300, 6000, 5801)];
        case.problem.bands = Arc::from(bands);
        case.problem.rows_q = rows;
        case.q.truncate(rows * heads.0 * dims.0);
        case.check(&stream, &[], &format!("long rows, heads {heads:?} dims {dims:?} sinks {sinks}"));
    }
}

/// Many rounds of long rows at head 64, for which three warpgroups share a tile (a test of `shape.rs` says so): on one multiprocessor
/// few rows are enough.
#[test]
fn three_warpgroups() {
    let Some(stream) = stream() else { return };
    for (heads, sinks) in [((3, 3), 0), ((3, 1), 1), ((8, 1), 1)] {
        let mut case = Case::new("causal:10000", heads, (64, 64), sinks, 13);
        case.problem.bands =
            Arc::from([Band { q_range: Range::new(0, 384), diag_max: 9600, ..case.problem.bands[0] }]);
        case.problem.rows_q = 384;
        case.q.truncate(384 * heads.0 * 64);
        case.problem.sm_margin = u32::MAX;
        case.check(&stream, &[], &format!("three warpgroups, heads {heads:?} sinks {sinks}"));
    }
}

#[test]
fn nothing_to_see() {
    let Some(stream) = stream() else { return };
    let mut case = Case::new("full:40", (2, 1), (64, 64), 0, 5);
    case.problem.bands = Arc::from([]);
    case.check(&stream, &[], "no bands");
    (case.problem.rows_k, case.k, case.v) = (0, Vec::new(), Vec::new());
    case.check(&stream, &[], "no keys");
    case.problem.rows_q = 0;
    case.q.clear();
    assert!(case.run(&stream, &[]).0.is_empty());
}
