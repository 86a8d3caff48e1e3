//! Operations on rows that are computed elsewhere: from buffers of a Program to addresses of a launcher.

use std::sync::Arc;

use counterpoint_exec::{ExecError, OperationFault};
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::{self as schedule, BufferId};

use super::CudaBuffer;
use super::compute::Prepare;
use crate::kernel::{AttentionFinish, ResultTensors};
use crate::{CudaError, Stream};

/// The results of rows whose partial results are merged.
pub(super) struct Finish {
    kernel: AttentionFinish,
    merged_out: BufferId,
    merged_lse: BufferId,
    sink: Option<BufferId>,
    rows: Arc<[Range]>,
    out: BufferId,
    lse: BufferId,
    /// Rows of the sink.
    sink_rows: usize,
    /// Bytes of a row of the merged out, of the result's out, and of a logarithm's row.
    row_bytes: [u64; 3],
}

impl Finish {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::AttentionFinish) -> Result<Self, ExecError> {
        prepare.element(op.out)?;
        let out = prepare.spec(op.out);
        let (heads, dim) = (out.shape[1], out.shape[2]);
        let kernel = AttentionFinish::new(prepare.setup().device(), prepare.scalar(op.out)?, heads, dim);
        let elements = (heads * dim) as u64;
        Ok(Self {
            kernel: kernel.map_err(|error| prepare.device_error(error))?,
            merged_out: op.merged_out,
            merged_lse: op.merged_lse,
            sink: op.sink,
            rows: op.rows.clone(),
            out: op.out,
            lse: op.lse,
            sink_rows: op.sink.map_or(0, |sink| prepare.spec(sink).rows()),
            row_bytes: [elements * 4, elements * out.dtype.size() as u64, heads as u64 * 4],
        })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let address = |id: BufferId| buffers[id.0].address();
        let [merged_bytes, out_bytes, lse_bytes] = self.row_bytes;
        let sink = self.sink.map_or(0, address);
        let mut done = 0;
        for rows in self.rows.iter() {
            let merged = ResultTensors {
                sink: 0,
                out: address(self.merged_out) + done * merged_bytes,
                lse: address(self.merged_lse) + done * lse_bytes,
            };
            let result = ResultTensors {
                sink,
                out: address(self.out) + rows.start as u64 * out_bytes,
                lse: address(self.lse) + rows.start as u64 * lse_bytes,
            };
            // SAFETY: `check_operands` has compared all shapes, types and rows; events of the Program order who else uses
            // the buffers, which live as long as what is enqueued.
            unsafe { self.kernel.result(stream, rows.len(), &merged, self.sink_rows, &result) }?;
            done += rows.len() as u64;
        }
        Ok(())
    }
}

/// Rows to their places.
pub(super) struct Placing {
    kernel: AttentionFinish,
    src: BufferId,
    dst: BufferId,
    rows: Arc<[Range]>,
    /// Bytes of a row of the source and of the destination.
    row_bytes: [u64; 2],
}

impl Placing {
    pub(super) fn new(
        prepare: &Prepare<'_>,
        src: BufferId,
        dst: BufferId,
        rows: &Arc<[Range]>,
    ) -> Result<Self, ExecError> {
        let (from, to) = (prepare.spec(src), prepare.spec(dst));
        if from.dtype != DType::F32 {
            let fault = OperationFault::PlacedDType { name: from.name.clone(), dtype: from.dtype };
            return Err(prepare.error(fault));
        }
        let elements = to.row_elements();
        let kernel = AttentionFinish::new(prepare.setup().device(), prepare.scalar(dst)?, 1, elements);
        Ok(Self {
            kernel: kernel.map_err(|error| prepare.device_error(error))?,
            src,
            dst,
            rows: rows.clone(),
            row_bytes: [4, to.dtype.size()].map(|bytes| (elements * bytes) as u64),
        })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let mut from = buffers[self.src.0].address();
        for rows in self.rows.iter() {
            let to = buffers[self.dst.0].address() + rows.start as u64 * self.row_bytes[1];
            // SAFETY: as in `Finish::launch`.
            unsafe { self.kernel.copy(stream, rows.len(), from, to) }?;
            from += rows.len() as u64 * self.row_bytes[0];
        }
        Ok(())
    }
}
