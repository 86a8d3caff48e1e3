//! Problems and a single-rank run of the kernels, for the tests of this folder.

use counterpoint_cpu_kernels::{
    BackwardArgs, DeltaArgs, ForwardArgs, ForwardMode, HeadShape, KernelElement, ResultArgs, SinkArgs,
    StateArgs, StateMutArgs, attention_backward, attention_delta, attention_forward,
};
use counterpoint_exec::{AttentionInputs, AttentionOutputs, HostElement, HostTensor};
use counterpoint_mask::{AttnSlice, Band, Mask, MaskType, Range};
use counterpoint_plan::{AttentionSpec, DType, GradientShares};
use counterpoint_schedule::Accumulate;
use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use rayon::{ThreadPool, ThreadPoolBuilder};

pub(crate) const TYPES: [MaskType; 4] =
    [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];

pub(crate) fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

pub(crate) fn spec(
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
    head_dim_v: usize,
    dtype: DType,
) -> AttentionSpec {
    AttentionSpec {
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        dtype,
        scale: 1.0 / (head_dim as f64).sqrt(),
        softcap: 0.0,
        seqlen_sink: 0,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    }
}

fn slice<T: HostElement>(tensor: &HostTensor) -> &[T] {
    tensor.as_slice().unwrap()
}

fn tensor<T: HostElement>(shape: Vec<usize>, mut value: impl FnMut() -> f64) -> HostTensor {
    let len = shape.iter().product();
    HostTensor::from_vec(shape, (0..len).map(|_| T::from_f64(value())).collect())
}

/// Standard normal inputs times `amplitude`.
pub(crate) fn inputs<T: KernelElement>(
    mask: &Mask,
    spec: &AttentionSpec,
    amplitude: f64,
    rng: &mut ChaCha8Rng,
) -> AttentionInputs {
    let mut normal = |factor: f64| {
        let x: f64 = StandardNormal.sample(rng);
        x * factor
    };
    let (sq, sk) = (mask.seqlen_q(), mask.seqlen_k());
    AttentionInputs {
        q: tensor::<T>(vec![sq, spec.heads_q, spec.head_dim], || normal(amplitude)),
        k: tensor::<T>(vec![sk, spec.heads_kv, spec.head_dim], || normal(amplitude)),
        v: tensor::<T>(vec![sk, spec.heads_kv, spec.head_dim_v], || normal(1.0)),
        sink: (spec.seqlen_sink > 0)
            .then(|| tensor::<T::Accumulator>(vec![spec.seqlen_sink, spec.heads_q], || normal(1.0))),
        dout: Some(tensor::<T>(vec![sq, spec.heads_q, spec.head_dim_v], || normal(1.0))),
        dlse: spec.dlse.then(|| tensor::<T::Accumulator>(vec![sq, spec.heads_q], || normal(1.0))),
    }
}

/// How a run is cut up. None of it may change a bit of the result.
pub(crate) struct Cuts<'a> {
    /// Ends of the stages' keys, multiples of the key block but for the last, which is `seqlen_k`.
    pub(crate) stages: &'a [usize],
    pub(crate) bands: &'a [Band],
    pub(crate) pool: &'a ThreadPool,
}

/// Forward and backward on one rank, every buffer poisoned before it is first written.
pub(crate) fn run<T: KernelElement>(
    seqlens: (usize, usize),
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    cuts: &Cuts<'_>,
) -> AttentionOutputs {
    let (sq, sk) = seqlens;
    let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, scale, softcap, .. } = *spec;
    let shape = HeadShape { heads_q, heads_kv, head_dim, head_dim_v };
    let nan = |len: usize| vec![T::Accumulator::from_f64(f64::NAN); len];
    let (q, k, v) = (slice(&inputs.q), slice(&inputs.k), slice(&inputs.v));
    let sink = inputs.sink.as_ref().map(slice);
    let stages: Vec<(std::ops::Range<usize>, Vec<Band>)> = (0..cuts.stages.len())
        .map(|s| {
            let keys = (if s == 0 { 0 } else { cuts.stages[s - 1] })..cuts.stages[s];
            let bands = cuts
                .bands
                .iter()
                .map(|b| b.clip(&Range::new(0, sq), &Range::new(keys.start, keys.end)))
                .filter(|b| b.area() > 0)
                .map(|b| b.shift(0, -(keys.start as i64)))
                .collect();
            (keys, bands)
        })
        .collect();
    let rows = |data, keys: &std::ops::Range<usize>, width: usize| -> &[T] {
        let data: &[T] = data;
        &data[keys.start * width..keys.end * width]
    };
    let mut acc = nan(sq * heads_q * head_dim_v);
    let (mut row_max, mut row_sum) = (nan(sq * heads_q), nan(sq * heads_q));
    let mut out = vec![T::from_f64(f64::NAN); sq * heads_q * head_dim_v];
    let mut lse = nan(sq * heads_q);
    let mut max_logits = vec![T::Accumulator::from_f64(f64::NEG_INFINITY); heads_q];
    for (s, (keys, bands)) in stages.iter().enumerate() {
        let mode = if s + 1 < stages.len() {
            let state = StateMutArgs { acc: &mut acc, row_max: &mut row_max, row_sum: &mut row_sum };
            if s == 0 { ForwardMode::First(state) } else { ForwardMode::Next(state) }
        } else {
            let result = ResultArgs { sink, out: &mut out, lse: &mut lse };
            let state = StateArgs { acc: &acc, row_max: &row_max, row_sum: &row_sum };
            if s == 0 { ForwardMode::Whole(result) } else { ForwardMode::Last(state, result) }
        };
        attention_forward::<T>(
            ForwardArgs {
                shape,
                q,
                k: rows(k, keys, heads_kv * head_dim),
                v: rows(v, keys, heads_kv * head_dim_v),
                mode,
                bands,
                scale,
                softcap,
                max_logits: spec.max_logits.then_some(&mut max_logits),
            },
            cuts.pool,
        );
    }

    let q_shape = inputs.q.shape().to_vec();
    let mut outputs = AttentionOutputs {
        out: HostTensor::from_vec(vec![sq, heads_q, head_dim_v], out.clone()),
        lse: HostTensor::from_vec(vec![sq, heads_q], lse.clone()),
        max_logits: spec.max_logits.then(|| HostTensor::from_vec(vec![heads_q], max_logits)),
        dq: None,
        dk: None,
        dv: None,
        dsink: None,
    };
    let Some(dout) = &inputs.dout else { return outputs };
    let dout = slice(dout);
    let mut delta = nan(sq * heads_q);
    let mut dsink = sink.map(|sink| nan(sink.len()));
    attention_delta::<T>(
        DeltaArgs {
            heads_q,
            head_dim_v,
            out: &out,
            dout,
            lse: &lse,
            dlse: inputs.dlse.as_ref().map(slice),
            delta: &mut delta,
            sink: sink.zip(dsink.as_deref_mut()).map(|(sink, dsink)| SinkArgs { sink, dsink }),
        },
        cuts.pool,
    );
    let mut dq = nan(sq * heads_q * head_dim);
    let (mut dk, mut dv) = (nan(sk * heads_kv * head_dim), nan(sk * heads_kv * head_dim_v));
    for (s, (keys, bands)) in stages.iter().enumerate() {
        let width = heads_kv * head_dim;
        let width_v = heads_kv * head_dim_v;
        attention_backward::<T, T::Accumulator>(
            BackwardArgs {
                shape,
                q,
                k: rows(k, keys, width),
                v: rows(v, keys, width_v),
                dout,
                lse: &lse,
                delta: &delta,
                dq: &mut dq,
                dk: &mut dk[keys.start * width..keys.end * width],
                dv: &mut dv[keys.start * width_v..keys.end * width_v],
                bands,
                scale,
                softcap,
                accumulate_dq: if s == 0 { Accumulate::Start } else { Accumulate::Continue },
            },
            cuts.pool,
        );
    }
    let rounded = |shape: &[usize], values: &[T::Accumulator]| {
        let mut narrow = vec![T::from_f32(0.0); values.len()];
        T::narrow_slice(values, &mut narrow);
        Some(HostTensor::from_vec(shape.to_vec(), narrow))
    };
    outputs.dq = rounded(&q_shape, &dq);
    outputs.dk = rounded(inputs.k.shape(), &dk);
    outputs.dv = rounded(inputs.v.shape(), &dv);
    outputs.dsink = dsink.map(|dsink| HostTensor::from_vec(vec![spec.seqlen_sink, heads_q], dsink));
    outputs
}

/// What outputs hold, bit for bit.
pub(crate) fn bits(outputs: &AttentionOutputs) -> Vec<Vec<u8>> {
    let AttentionOutputs { out, lse, max_logits, dq, dk, dv, dsink } = outputs;
    let tensors =
        [Some(out), Some(lse), max_logits.as_ref(), dq.as_ref(), dk.as_ref(), dv.as_ref(), dsink.as_ref()];
    tensors.into_iter().map(|tensor| tensor.map_or(Vec::new(), |tensor| tensor.bytes().to_vec())).collect()
}

/// A whole run in one stage.
pub(crate) fn run_whole<T: KernelElement>(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    pool: &ThreadPool,
) -> AttentionOutputs {
    let bands: Vec<Band> = mask.bands().collect();
    let cuts = Cuts { stages: &[mask.seqlen_k()], bands: &bands, pool };
    run::<T>((mask.seqlen_q(), mask.seqlen_k()), spec, inputs, &cuts)
}

/// Ascending cut points of `[0, len)`, unaligned, both ends included.
fn random_cuts(len: usize, pieces: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
    let mut cuts: Vec<usize> = (1..pieces).map(|_| rng.random_range(0..=len)).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// Disjoint slices of all types in a random, unaligned grid; some cells are empty, so that rows are covered by none, one
/// or many.
pub(crate) fn random_mask(seqlen_q: usize, seqlen_k: usize, rng: &mut ChaCha8Rng) -> Mask {
    let row_cuts = random_cuts(seqlen_q, rng.random_range(1..8), rng);
    let mut slices = Vec::new();
    for rows in row_cuts.windows(2) {
        let col_cuts = random_cuts(seqlen_k, rng.random_range(1..8), rng);
        for cols in col_cuts.windows(2) {
            if rng.random_bool(0.7) {
                slices.push(AttnSlice::new(
                    Range::new(rows[0], rows[1]),
                    Range::new(cols[0], cols[1]),
                    TYPES[rng.random_range(0..4)],
                ));
            }
        }
    }
    Mask::new(seqlen_q, seqlen_k, slices).unwrap()
}

/// Every band in random pieces: the same pairs, cut otherwise, in another order.
pub(crate) fn shatter(bands: &[Band], rng: &mut ChaCha8Rng) -> Vec<Band> {
    let mut pieces = Vec::new();
    for band in bands {
        let (q, k) = (band.q_range, band.k_range);
        let row_cuts = random_cuts(q.len(), rng.random_range(1..4), rng);
        for rows in row_cuts.windows(2) {
            let col_cuts = random_cuts(k.len(), rng.random_range(1..4), rng);
            for cols in col_cuts.windows(2) {
                pieces.push(band.clip(
                    &Range::new(q.start + rows[0], q.start + rows[1]),
                    &Range::new(k.start + cols[0], k.start + cols[1]),
                ));
            }
        }
    }
    for i in (1..pieces.len()).rev() {
        pieces.swap(i, rng.random_range(0..=i));
    }
    pieces
}

/// Random inputs through the kernels and against the reference.
pub(crate) fn check(
    mask: &Mask,
    spec: &AttentionSpec,
    amplitude: f64,
    rng: &mut ChaCha8Rng,
    pool: &ThreadPool,
) {
    fn one<T: KernelElement>(
        mask: &Mask,
        spec: &AttentionSpec,
        amplitude: f64,
        rng: &mut ChaCha8Rng,
        pool: &ThreadPool,
    ) {
        let inputs = inputs::<T>(mask, spec, amplitude, rng);
        let outputs = run_whole::<T>(mask, spec, &inputs, pool);
        let report = counterpoint_reference::check_attention(mask, spec, &inputs, &outputs);
        assert!(report.passed, "{spec:?} {:?}\n{report:#?}", mask.slices());
    }
    match spec.dtype {
        DType::F64 => one::<f64>(mask, spec, amplitude, rng, pool),
        DType::F32 => one::<f32>(mask, spec, amplitude, rng, pool),
        DType::Bf16 => one::<bf16>(mask, spec, amplitude, rng, pool),
        DType::F16 => one::<f16>(mask, spec, amplitude, rng, pool),
    }
}
