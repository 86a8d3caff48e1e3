//! Memory of a backward's own, by which CTAs add up what they share.

use counterpoint_tiles::{DqOrder, DqOrderSpan};

use super::arguments::BackwardSums;
use crate::kernel::AttentionProblem;
use crate::{CudaError, DeviceBuffer, Stream, Swizzle, TensorMapElement, TensorMapSpec};

/// Warpgroups of a CTA that hold dk and dv of keys.
const KEY_WARPGROUPS: usize = 2;

/// dk and dv in f32, to which items of several query heads add, and a word for each warpgroup that has keys of a tile.
#[derive(Clone, Debug)]
pub(super) struct Sums {
    pub(super) arguments: BackwardSums,
    /// What those are addresses of.
    _memory: [DeviceBuffer; 3],
}

impl Sums {
    pub(super) fn new(
        stream: &Stream,
        problem: &AttentionProblem,
        tiles: usize,
        parts: u32,
    ) -> Result<Self, CudaError> {
        let AttentionProblem { rows_k, heads_kv, head_dim, head_dim_v, .. } = *problem;
        // What the launches leave is zeros, too. No buffer is empty.
        let zeros = |words: usize| -> Result<DeviceBuffer, CudaError> {
            let buffer = DeviceBuffer::new(stream.device(), 4 * words.max(1))?;
            buffer.fill(stream, 0)?;
            Ok(buffer)
        };
        let dk = zeros(rows_k * heads_kv * head_dim)?;
        let dv = zeros(rows_k * heads_kv * head_dim_v)?;
        let words = zeros(tiles * heads_kv * KEY_WARPGROUPS)?;
        stream.synchronize()?;
        let map = |name: &str, buffer: &DeviceBuffer, head_dim: usize| {
            let dims = [head_dim, heads_kv, rows_k.max(1)].map(|dim| dim as u64);
            let spec = TensorMapSpec::new(TensorMapElement::F32, buffer.address(), dims, [32, 1, 64]);
            spec.swizzle(Swizzle::Span128).encode(stream.device(), name)
        };
        let arguments = BackwardSums {
            dk_map: map("sums of dk", &dk, head_dim)?,
            dv_map: map("sums of dv", &dv, head_dim_v)?,
            dk: dk.address(),
            dv: dv.address(),
            words: words.address(),
            parts,
        };
        Ok(Self { arguments, _memory: [dk, dv, words] })
    }
}

/// In which order key tiles add to dq.
#[derive(Clone, Debug)]
pub(super) struct DqOrderTables {
    pub(super) spans: DeviceBuffer,
    pub(super) begins: DeviceBuffer,
    pub(super) counters: usize,
}

impl DqOrderTables {
    pub(super) fn new(stream: &Stream, order: &DqOrder) -> Result<Self, CudaError> {
        // No buffer is empty.
        let spans = match order.spans() {
            [] => &[DqOrderSpan { first: 0, end: 0, order: 0, counter: 0 }],
            spans => spans,
        };
        Ok(Self {
            spans: DeviceBuffer::from_slice(stream, spans)?,
            begins: DeviceBuffer::from_slice(stream, order.begins())?,
            counters: order.counters() as usize,
        })
    }
}
