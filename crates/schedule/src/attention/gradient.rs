//! Buffers of dq, dk and dv: written at once in the tensors' type, or summed in the accumulator's and rounded at the end.

use counterpoint_plan::DType;

use crate::builder::ProgramBuilder;
use crate::{BufferId, BufferRole, Op, StreamId};

/// A gradient: the buffer that kernels write and reductions add to, and the result that it is rounded to once at the end,
/// where that is another buffer.
pub(super) struct Gradient {
    pub(super) written: BufferId,
    pub(super) rounded: Option<BufferId>,
}

impl Gradient {
    /// One whose first write is the result.
    pub(super) fn whole(p: &mut ProgramBuilder, name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self { written: p.buffer(name, dtype, shape, BufferRole::Output), rounded: None }
    }

    /// One that is summed, in the accumulator type.
    pub(super) fn summed(p: &mut ProgramBuilder, name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self::summed_in(p, name, dtype, shape, BufferRole::Scratch)
    }

    /// One that a single operation sums and rounds, which may leave its sums at zero for the next run.
    pub(super) fn summed_at_once(p: &mut ProgramBuilder, name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self::summed_in(p, name, dtype, shape, BufferRole::Persistent)
    }

    fn summed_in(
        p: &mut ProgramBuilder,
        name: &str,
        dtype: DType,
        shape: &[usize],
        role: BufferRole,
    ) -> Self {
        let acc_dtype = dtype.accumulator();
        if acc_dtype == dtype {
            return Self::whole(p, name, dtype, shape);
        }
        let written = p.buffer(&format!("{name}_acc"), acc_dtype, shape, role);
        Self { written, rounded: Some(p.buffer(name, dtype, shape, BufferRole::Output)) }
    }

    pub(super) fn round(&self, p: &mut ProgramBuilder, stream: StreamId, label: &str) {
        if let Some(dst) = self.rounded {
            p.push(stream, None, label, Op::Cast { src: self.written, dst });
        }
    }
}
