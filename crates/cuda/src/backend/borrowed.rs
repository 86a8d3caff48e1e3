//! Tensors and streams of the caller, as operations of a rank take them.

use std::ops::Range;
use std::sync::Arc;

use counterpoint_driver::{PitchedCopy, RawStream};
use counterpoint_schedule::{AttentionBackward, BufferId, Op, Program, StreamKind};

use super::padding::padded_dim;
use super::{CudaBackend, CudaBuffer, CudaStream};
use crate::sync::lock;
use crate::{CudaError, Stream};

impl CudaBackend {
    /// A stream of the caller's, PyTorch's current one say, for calls to be ordered with. The same handle gives the same stream; 0 is the
    /// legacy default stream.
    ///
    /// # Safety
    /// `raw` is a stream of the primary context of this rank's device, and lives until this rank has gone: its group, and every plan, ticket
    /// and backend that keeps the rank. Until then the driver is asked about it, by calls and whenever memory is looked for.
    pub unsafe fn borrow_stream(&self, raw: RawStream) -> Arc<CudaStream> {
        let mut known = lock(&self.0.borrowed);
        if let Some(stream) = known.iter().find(|stream| stream.queue().raw() == raw) {
            return stream.clone();
        }
        // SAFETY: the caller's promise; the stream is kept by this rank alone.
        let stream = unsafe { Stream::borrow(self.device(), raw) };
        let status = self.0.world.register_stream(self.0.rank, "the caller's", StreamKind::Compute);
        let stream = Arc::new(CudaStream::new(stream, status));
        known.push(stream.clone());
        stream
    }

    /// Whether all operations that use buffer `index` take it with rows and heads that lie apart: kernels for Hopper do as queries, keys
    /// and values.
    pub(super) fn takes_strides(&self, program: &Program, index: usize) -> bool {
        let id = BufferId(index);
        let spec = &program.buffers[index];
        let whole = spec.shape.len() == 3 && padded_dim(spec.shape[2]) == spec.shape[2];
        let uses = |op: &Op| op.reads().contains(&id) || op.writes().contains(&id);
        let takes = |op: &Op| match op.computation() {
            Op::AttentionForward(op) => is_operand(id, op.q, [op.k, op.v], op.arriving.is_some()),
            Op::AttentionBackward(op) => backward_takes(id, op),
            _ => false,
        };
        let mut used = program.ops.iter().map(|op| &op.op).filter(|op| uses(op));
        self.device().arch().is_hopper() && whole && used.all(takes)
    }

    /// Enqueues a copy of a tensor into another of the same shape and type, either of which may have rows and heads that lie apart.
    pub(super) fn copy_tensor(
        &self,
        stream: &Stream,
        from: &CudaBuffer,
        to: &CudaBuffer,
    ) -> Result<(), CudaError> {
        let (Some([rows, heads, elements]), size) = (axes(from), from.dtype().size()) else {
            return to.memory().copy_from(stream, 0, from.memory());
        };
        if from.is_empty() {
            return Ok(());
        }
        let strides = |buffer: &CudaBuffer| buffer.strides().unwrap_or([heads * elements, elements]);
        let ([from_row, from_head], [to_row, to_head]) = (strides(from), strides(to));
        let bytes = |elements: usize| elements * size;
        let (from, to) = (from.address(), to.address());
        let copy = |from, to, width: usize| {
            let (from_pitch, to_pitch) = (bytes(from_row), bytes(to_row));
            let copy = PitchedCopy { from, to, bytes: bytes(width), lines: rows, from_pitch, to_pitch };
            // SAFETY: both tensors hold these lines, which nobody else has before the copy has run.
            unsafe { copy.launch(stream) }
        };
        if [from_head, to_head] == [elements; 2] {
            return copy(from, to, heads * elements);
        }
        (0..heads).try_for_each(|head| {
            let at = |stride: usize| bytes(head * stride) as u64;
            copy(from + at(from_head), to + at(to_head), elements)
        })
    }
}

/// Whether `id` is an operand of attention that may have strides, and no other.
fn is_operand(id: BufferId, q: BufferId, keys: [BufferId; 2], gathers: bool) -> bool {
    (id == q && !keys.contains(&id)) || (id != q && keys.contains(&id) && !gathers)
}

fn backward_takes(id: BufferId, op: &AttentionBackward) -> bool {
    id != op.dout && is_operand(id, op.q, [op.k, op.v], op.arriving.is_some())
}

fn axes(buffer: &CudaBuffer) -> Option<[usize; 3]> {
    buffer.shape().try_into().ok()
}

/// Whether two tensors have a byte in common. Those of one packed tensor, whose rows are equally far apart, may lie between each other.
pub(super) fn overlap(a: &CudaBuffer, b: &CudaBuffer) -> bool {
    let bytes = |buffer: &CudaBuffer| buffer.address()..buffer.address() + buffer.memory().len() as u64;
    // Most tensors lie apart: their rows need not be looked at.
    if bytes(a).end <= bytes(b).start || bytes(b).end <= bytes(a).start {
        return false;
    }
    overlap_in(&bytes(a), row_window(a), &bytes(b), row_window(b))
}

/// The bytes from a row to the next and those that a row spans, where rows do not lie inside of heads.
fn row_window(buffer: &CudaBuffer) -> Option<(u64, u64)> {
    let [_, heads, elements] = axes(buffer)?;
    let [row, head] = buffer.strides().unwrap_or([heads * elements, elements]);
    let window = (heads.max(1) - 1) * head + elements;
    let size = buffer.dtype().size();
    (window <= row).then_some(((row * size) as u64, (window * size) as u64))
}

fn overlap_in(a: &Range<u64>, of_a: Option<(u64, u64)>, b: &Range<u64>, of_b: Option<(u64, u64)>) -> bool {
    if a.start >= b.end || b.start >= a.end {
        return false;
    }
    match (of_a, of_b) {
        (Some((row, window_a)), Some((row_b, window_b))) if row == row_b => {
            // How far behind the begin of a row of `a` one of `b` begins.
            let behind = (b.start as i128 - a.start as i128).rem_euclid(i128::from(row));
            behind < i128::from(window_a) || behind + i128::from(window_b) > i128::from(row)
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_packed_tensor_lie_between_each_other() {
        // Rows of 100 bytes: q is the first 60, k 20 behind them, v the last 20.
        let part = |offset: u64, window: u64| (offset..offset + 9 * 100 + window, Some((100, window)));
        let (q, k, v) = (part(1000, 60), part(1060, 20), part(1080, 20));
        let overlap = |a: &(Range<u64>, _), b: &(Range<u64>, _)| {
            let one = overlap_in(&a.0, a.1, &b.0, b.1);
            assert_eq!(one, overlap_in(&b.0, b.1, &a.0, a.1));
            one
        };
        assert!(!overlap(&q, &k) && !overlap(&k, &v) && !overlap(&q, &v));
        assert!(overlap(&q, &q) && overlap(&q, &part(1050, 20)) && overlap(&v, &part(1090, 20)));
        // Another row of the same tensor.
        assert!(overlap(&q, &part(1300, 60)) && !overlap(&q, &part(1360, 40)));
        // Behind it, and without known rows.
        assert!(!overlap(&q, &(1960..2000, None)) && overlap(&q, &(1959..2000, None)));
    }

    #[test]
    fn queries_keys_and_values_have_strides_and_nothing_else() {
        let [q, k, v, other] = [0, 1, 2, 3].map(BufferId);
        assert!(is_operand(q, q, [k, v], true) && is_operand(v, q, [k, v], false));
        assert!(!is_operand(v, q, [k, v], true) && !is_operand(other, q, [k, v], false));
        assert!(!is_operand(q, q, [q, v], false));
    }
}
