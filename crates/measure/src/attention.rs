//! The speed of the CPU's attention kernels compared with that of matrix products, checked.

use std::time::Instant;

use counterpoint_cpu_kernels::{
    BackwardArgs, DeltaArgs, ForwardArgs, ForwardMode, HeadShape, KernelElement, Real, ResultArgs, SinkArgs,
    attention_backward, attention_delta, attention_forward, square_product,
};
use counterpoint_exec::{AttentionInputs, AttentionOutputs, HostElement, HostTensor, with_host_element};
use counterpoint_mask::{Band, Mask};
use counterpoint_plan::AttentionSpec;
use counterpoint_reference::{CheckReport, check_attention};
use counterpoint_schedule::Accumulate;
use rayon::ThreadPool;
use serde::Serialize;

/// Wall-clock seconds of repeated runs of one thing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Seconds {
    /// Runs timed.
    pub iterations: usize,
    /// The fastest.
    pub min: f64,
    /// The middle one.
    pub median: f64,
    /// The slowest.
    pub max: f64,
    /// The mean of all.
    pub mean: f64,
}

impl Seconds {
    /// Of at least one measured time.
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Self {
            iterations: times.len(),
            min: times[0],
            median: times[times.len() / 2],
            max: times[times.len() - 1],
            mean: times.iter().sum::<f64>() / times.len() as f64,
        }
    }
}

/// What the kernels reach on one problem, compared with what matrix products alone reach on the same threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttentionBench {
    /// Unmasked pairs.
    pub area: u64,
    /// Threads used.
    pub threads: usize,
    /// The forward with its finish.
    pub forward: Rate,
    /// The backward with its row statistic, where `dout` is given.
    pub backward: Option<Rate>,
    /// A square product of `matmul_size` rows in the accumulator type, by the library that the kernels use, its rows shared
    /// out evenly among the threads.
    pub matmul: Rate,
    /// Rows and columns of it: as many as the mask has rows, 2,048 at most.
    pub matmul_size: usize,
    /// Comparison with the f64 reference on the first and the last key head with their query heads (all of them where
    /// there are no more): heads do not depend on each other, and the dense reference is slow.
    pub check: CheckReport,
}

/// Time and speed of one part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rate {
    /// Its times.
    pub seconds: Seconds,
    /// Floating-point operations over the median time, in 1e12 a second; masked pairs do not count.
    pub tflops: f64,
    /// The fastest run's operations a second over the fastest matrix product's: 1 is the speed of the library.
    pub of_matmul: f64,
}

/// Rows and columns of the square product that attention is compared with, at most: a small problem must not wait for it.
const MATMUL_SIZE: usize = 2048;

/// Runs the problem `iterations` times (at least once) on `threads`, after one run that does not count, interleaved with a
/// matrix product, so that both meet the same disturbance by other programs; then checks the results.
///
/// # Panics
/// When a tensor's shape or type does not fit `mask` and `spec`.
pub fn bench_attention(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    iterations: usize,
    threads: &ThreadPool,
) -> AttentionBench {
    with_host_element!(spec.dtype, T => bench::<T>(mask, spec, inputs, iterations, threads))
}

fn bench<T: KernelElement>(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    iterations: usize,
    threads: &ThreadPool,
) -> AttentionBench {
    let mut run = Run::<T>::new(mask, spec, inputs);
    let matmul_size = mask.seqlen_q().clamp(1, MATMUL_SIZE);
    let mut product = square_product::<T::Accumulator>(matmul_size);
    let has_backward = inputs.dout.is_some();
    let (mut forward, mut backward, mut matmul) = (Vec::new(), Vec::new(), Vec::new());
    run.forward(threads);
    if has_backward {
        run.backward(threads);
    }
    product(threads);
    for _ in 0..iterations.max(1) {
        matmul.push(seconds(|| product(threads)));
        forward.push(seconds(|| run.forward(threads)));
        if has_backward {
            backward.push(seconds(|| run.backward(threads)));
        }
    }

    let matmul = Seconds::of(matmul);
    let matmul_flops = 2.0 * (matmul_size as f64).powi(3);
    let rate = |flops: f64, seconds: Seconds| Rate {
        seconds,
        tflops: flops / seconds.median / 1e12,
        of_matmul: (flops / seconds.min) / (matmul_flops / matmul.min),
    };
    let area = mask.area();
    AttentionBench {
        area,
        threads: threads.current_num_threads(),
        forward: rate(spec.flops_forward(area), Seconds::of(forward)),
        backward: has_backward.then(|| rate(spec.flops_backward(area), Seconds::of(backward))),
        matmul: rate(matmul_flops, matmul),
        matmul_size,
        check: check_ends(mask, spec, inputs, &run.outputs()),
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// One rank's attention, whole, on one set of inputs, with its buffers kept between runs.
pub(crate) struct Run<'a, T: KernelElement> {
    spec: &'a AttentionSpec,
    shape: HeadShape,
    bands: Vec<Band>,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    dout: Option<&'a [T]>,
    sink: Option<&'a [T::Accumulator]>,
    out: Vec<T>,
    lse: Vec<T::Accumulator>,
    delta: Vec<T::Accumulator>,
    dq: Vec<T::Accumulator>,
    dk: Vec<T::Accumulator>,
    dv: Vec<T::Accumulator>,
    dsink: Vec<T::Accumulator>,
}

impl<'a, T: KernelElement> Run<'a, T> {
    /// # Panics
    /// When a tensor's type does not fit.
    pub(crate) fn new(mask: &Mask, spec: &'a AttentionSpec, inputs: &'a AttentionInputs) -> Self {
        let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, .. } = *spec;
        let (q, k, v) = (elements::<T>(&inputs.q), elements::<T>(&inputs.k), elements::<T>(&inputs.v));
        let dout = inputs.dout.as_ref().map(elements::<T>);
        let sink = inputs.sink.as_ref().map(elements::<T::Accumulator>);
        let zeros = |len: usize| vec![T::Accumulator::ZERO; len];
        let rows = mask.seqlen_q() * heads_q;
        let backward = usize::from(dout.is_some());
        Self {
            spec,
            shape: HeadShape { heads_q, heads_kv, head_dim, head_dim_v },
            bands: mask.bands().collect(),
            q,
            k,
            v,
            dout,
            sink,
            out: vec![T::from_f32(0.0); rows * head_dim_v],
            lse: zeros(rows),
            delta: zeros(rows * backward),
            dq: zeros(q.len() * backward),
            dk: zeros(k.len() * backward),
            dv: zeros(v.len() * backward),
            dsink: zeros(sink.map_or(0, <[_]>::len)),
        }
    }

    pub(crate) fn forward(&mut self, threads: &ThreadPool) {
        attention_forward::<T>(
            ForwardArgs {
                shape: self.shape,
                q: self.q,
                k: self.k,
                v: self.v,
                mode: ForwardMode::Whole(ResultArgs {
                    sink: self.sink,
                    out: &mut self.out,
                    lse: &mut self.lse,
                }),
                bands: &self.bands,
                scale: self.spec.scale,
                softcap: self.spec.softcap,
                max_logits: None,
            },
            threads,
        );
    }

    /// After a forward. Does nothing without `dout`.
    pub(crate) fn backward(&mut self, threads: &ThreadPool) {
        let Some(dout) = self.dout else { return };
        attention_delta::<T>(
            DeltaArgs {
                heads_q: self.shape.heads_q,
                head_dim_v: self.shape.head_dim_v,
                out: &self.out,
                dout,
                lse: &self.lse,
                dlse: None,
                delta: &mut self.delta,
                sink: self.sink.map(|sink| SinkArgs { sink, dsink: &mut self.dsink }),
            },
            threads,
        );
        attention_backward::<T, T::Accumulator>(
            BackwardArgs {
                shape: self.shape,
                q: self.q,
                k: self.k,
                v: self.v,
                dout,
                lse: &self.lse,
                delta: &self.delta,
                dq: &mut self.dq,
                dk: &mut self.dk,
                dv: &mut self.dv,
                bands: &self.bands,
                scale: self.spec.scale,
                softcap: self.spec.softcap,
                accumulate_dq: Accumulate::Start,
            },
            threads,
        );
    }

    fn outputs(&self) -> AttentionOutputs {
        let HeadShape { heads_q, heads_kv, head_dim, head_dim_v } = self.shape;
        let (rows, key_rows) = (self.lse.len() / heads_q, self.k.len() / (heads_kv * head_dim));
        let narrow = |heads: usize, dim: usize, rows: usize, values: &[T::Accumulator]| {
            self.dout.map(|_| {
                let mut narrow = vec![T::from_f32(0.0); values.len()];
                T::narrow_slice(values, &mut narrow);
                HostTensor::from_vec(vec![rows, heads, dim], narrow)
            })
        };
        AttentionOutputs {
            out: HostTensor::from_vec(vec![rows, heads_q, head_dim_v], self.out.clone()),
            lse: HostTensor::from_vec(vec![rows, heads_q], self.lse.clone()),
            max_logits: None,
            dq: narrow(heads_q, head_dim, rows, &self.dq),
            dk: narrow(heads_kv, head_dim, key_rows, &self.dk),
            dv: narrow(heads_kv, head_dim_v, key_rows, &self.dv),
            dsink: self
                .dout
                .and(self.sink)
                .map(|sink| HostTensor::from_vec(vec![sink.len() / heads_q, heads_q], self.dsink.clone())),
        }
    }
}

fn elements<T: HostElement>(tensor: &HostTensor) -> &[T] {
    tensor
        .as_slice()
        .unwrap_or_else(|| panic!("a tensor of {:?} where {:?} is wanted", tensor.dtype(), T::DTYPE))
}

/// The check of the first and the last key head.
fn check_ends(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    outputs: &AttentionOutputs,
) -> CheckReport {
    let group = spec.heads_q / spec.heads_kv;
    let mut key_heads = vec![0, spec.heads_kv - 1];
    key_heads.dedup();
    let query_heads: Vec<usize> = key_heads.iter().flat_map(|h| h * group..(h + 1) * group).collect();
    let spec = AttentionSpec { heads_q: query_heads.len(), heads_kv: key_heads.len(), ..*spec };
    let of_q = |tensor: &HostTensor| pick_heads(tensor, &query_heads);
    let of_k = |tensor: &HostTensor| pick_heads(tensor, &key_heads);
    let inputs = AttentionInputs {
        q: of_q(&inputs.q),
        k: of_k(&inputs.k),
        v: of_k(&inputs.v),
        sink: inputs.sink.as_ref().map(of_q),
        dout: inputs.dout.as_ref().map(of_q),
        dlse: inputs.dlse.as_ref().map(of_q),
    };
    let outputs = AttentionOutputs {
        out: of_q(&outputs.out),
        lse: of_q(&outputs.lse),
        max_logits: None,
        dq: outputs.dq.as_ref().map(of_q),
        dk: outputs.dk.as_ref().map(of_k),
        dv: outputs.dv.as_ref().map(of_k),
        dsink: outputs.dsink.as_ref().map(of_q),
    };
    check_attention(mask, &spec, &inputs, &outputs)
}

/// Some heads of a tensor `[rows, heads, …]`.
fn pick_heads(tensor: &HostTensor, heads: &[usize]) -> HostTensor {
    fn pick<T: HostElement>(tensor: &HostTensor, heads: &[usize]) -> HostTensor {
        let (all, width) = (tensor.shape()[1], tensor.shape()[2..].iter().product::<usize>());
        let data = elements::<T>(tensor);
        let mut shape = tensor.shape().to_vec();
        shape[1] = heads.len();
        let picked = data
            .chunks_exact(all * width)
            .flat_map(|row| heads.iter().flat_map(|&head| &row[head * width..(head + 1) * width]))
            .copied()
            .collect();
        HostTensor::from_vec(shape, picked)
    }
    with_host_element!(tensor.dtype(), T => pick::<T>(tensor, heads))
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{AttnSlice, MaskType, Range};
    use counterpoint_plan::DType;
    use counterpoint_plan::GradientShares;

    use super::*;

    fn problem(heads_q: usize, heads_kv: usize) -> (Mask, AttentionSpec, AttentionInputs) {
        let rows = 150;
        let slices = vec![AttnSlice::new(Range::new(0, rows), Range::new(0, rows), MaskType::Causal)];
        let mask = Mask::new(rows, rows, slices).unwrap();
        let spec = AttentionSpec {
            heads_q,
            heads_kv,
            head_dim: 16,
            head_dim_v: 8,
            dtype: DType::F32,
            scale: 0.25,
            softcap: 0.0,
            seqlen_sink: 1,
            gradient_shares: GradientShares::Accumulators,
            max_logits: false,
            dlse: false,
        };
        let mut step = 0.0f32;
        let mut tensor = |shape: Vec<usize>| {
            let values = (0..shape.iter().product()).map(|_| {
                step += 0.71;
                (step * step).sin()
            });
            HostTensor::from_vec(shape.clone(), values.collect())
        };
        let inputs = AttentionInputs {
            q: tensor(vec![rows, heads_q, 16]),
            k: tensor(vec![rows, heads_kv, 16]),
            v: tensor(vec![rows, heads_kv, 8]),
            sink: Some(tensor(vec![1, heads_q])),
            dout: Some(tensor(vec![rows, heads_q, 8])),
            dlse: None,
        };
        (mask, spec, inputs)
    }

    #[test]
    fn a_bench_is_checked_and_its_figures_agree() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (mask, spec, inputs) = problem(6, 3);
        let bench = bench_attention(&mask, &spec, &inputs, 2, &threads);
        assert!(bench.check.passed, "{:?}", bench.check);
        assert_eq!((bench.area, bench.threads), (mask.area(), 2));
        let rate = bench.forward;
        assert_eq!(rate.seconds.iterations, 2);
        assert!(rate.seconds.min > 0.0 && rate.seconds.min <= rate.seconds.median);
        assert!(rate.seconds.median <= rate.seconds.max);
        let flops = spec.flops_forward(mask.area());
        assert!((rate.tflops * 1e12 * rate.seconds.median / flops - 1.0).abs() < 1e-9);
        assert!((bench.matmul.of_matmul - 1.0).abs() < 1e-12);
        assert!(bench.backward.is_some());
    }

    #[test]
    fn the_check_sees_both_end_heads() {
        let (mask, spec, inputs) = problem(6, 3);
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let mut run = Run::<f32>::new(&mask, &spec, &inputs);
        run.forward(&threads);
        run.backward(&threads);
        assert!(check_ends(&mask, &spec, &inputs, &run.outputs()).passed);
        for head in [0, 5] {
            let out = &mut run.out[7 * 6 * 8 + head * 8];
            let right = std::mem::replace(out, 9.0);
            assert!(!check_ends(&mask, &spec, &inputs, &run.outputs()).passed, "head {head}");
            run.out[7 * 6 * 8 + head * 8] = right;
        }
    }
}
