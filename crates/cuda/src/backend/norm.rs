//! Normalisation of rows: from rows of a Program's buffers to tensors of a launcher.

use counterpoint_exec::ExecError;
use counterpoint_schedule::{self as schedule, BufferId};

use super::CudaBuffer;
use super::compute::Prepare;
use super::matrix_rows::tensors_of;
use crate::kernel::{RmsNorm, RmsNormSpec, RmsNormTensors};
use crate::{CudaError, Stream};

/// RMSNorm of rows that come in pieces.
pub(super) struct Normalisation {
    kernel: RmsNorm,
    src: Vec<BufferId>,
    residual: Option<(BufferId, BufferId)>,
    weight: BufferId,
    out: BufferId,
}

impl Normalisation {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::RmsNorm) -> Result<Self, ExecError> {
        let (src, rows) = tensors_of(&op.src);
        let spec = RmsNormSpec {
            rows,
            columns: prepare.spec(op.weight).shape[0],
            element: prepare.element(op.out)?,
            epsilon: op.epsilon as f32,
        };
        let kernel = RmsNorm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        Ok(Self { kernel, src, residual: op.residual, weight: op.weight, out: op.out })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let address = |id: BufferId| buffers[id.0].address();
        let src: Vec<u64> = self.src.iter().map(|id| address(*id)).collect();
        let tensors = RmsNormTensors {
            src: &src,
            residual: self.residual.map(|(residual, sum)| (address(residual), address(sum))),
            weight: address(self.weight),
            out: address(self.out),
        };
        // SAFETY: `check_operands` has compared all shapes and types; buffers live as long as what is enqueued; the Program orders
        // who else uses them.
        unsafe { self.kernel.launch(stream, &tensors) }
    }
}
