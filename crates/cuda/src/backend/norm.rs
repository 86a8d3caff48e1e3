//! Normalisation of rows and its gradients: from rows of a Program's buffers to tensors of a launcher.

use counterpoint_exec::ExecError;
use counterpoint_schedule::{self as schedule, BufferId};

use super::CudaBuffer;
use super::compute::Prepare;
use super::matrix_rows::tensors_of;
use crate::kernel::{
    RmsNorm, RmsNormBackward, RmsNormBackwardSpec, RmsNormBackwardTensors, RmsNormSpec, RmsNormTensors,
};
use crate::{CudaError, Stream};

/// RMSNorm of rows that come in pieces.
pub(super) struct Normalisation {
    kernel: RmsNorm,
    src: Vec<BufferId>,
    op: schedule::RmsNorm,
}

impl Normalisation {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::RmsNorm) -> Result<Self, ExecError> {
        let (src, rows) = tensors_of(op.src.iter().copied());
        let spec = RmsNormSpec {
            rows,
            columns: prepare.spec(op.out).row_elements(),
            element: prepare.element(op.out)?,
            epsilon: op.epsilon as f32,
        };
        let kernel = RmsNorm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        Ok(Self { kernel, src, op: op.clone() })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let address = |id: BufferId| buffers[id.0].address();
        let src: Vec<u64> = self.src.iter().map(|id| address(*id)).collect();
        let tensors = RmsNormTensors {
            src: &src,
            residual: self.op.residual.map(address),
            sum: address(self.op.sum),
            weight: self.op.weight.map(address),
            out: address(self.op.out),
        };
        // SAFETY: `check_operands` has compared all shapes and types; buffers live as long as what is enqueued; the Program orders
        // who else uses them.
        unsafe { self.kernel.launch(stream, &tensors) }
    }
}

/// The gradients of RMSNorm.
pub(super) struct NormalisationGradients {
    /// None where there are no rows.
    kernel: Option<RmsNormBackward>,
    op: schedule::RmsNormBackward,
}

impl NormalisationGradients {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::RmsNormBackward) -> Result<Self, ExecError> {
        let sum = prepare.spec(op.sum);
        let spec = RmsNormBackwardSpec {
            rows: sum.shape[0],
            columns: sum.row_elements(),
            element: prepare.element(op.sum)?,
            epsilon: op.epsilon as f32,
            has_weight: op.weight.is_some(),
        };
        let kernel = (spec.rows > 0).then(|| RmsNormBackward::new(prepare.setup(), &spec));
        let kernel = kernel.transpose().map_err(|error| prepare.device_error(error))?;
        Ok(Self { kernel, op: op.clone() })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let (op, address) = (&self.op, |id: BufferId| buffers[id.0].address());
        let Some(kernel) = &self.kernel else {
            // A sum over no rows.
            return op.weight.map_or(Ok(()), |(_, dweight)| buffers[dweight.0].memory().fill(stream, 0));
        };
        let tensors = RmsNormBackwardTensors {
            dout: address(op.dout),
            sum: address(op.sum),
            weight: op.weight.map(|(weight, dweight)| (address(weight), address(dweight))),
            dsum: op.dsum.map(address),
            dh: address(op.dh),
        };
        // SAFETY: as above.
        unsafe { kernel.launch(stream, &tensors) }
    }
}
