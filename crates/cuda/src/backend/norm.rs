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
    residual: BufferId,
    sum: BufferId,
    weight: BufferId,
    out: BufferId,
}

/// What no kernel here does, and what to do instead.
fn refusal(op: &schedule::RmsNorm) -> String {
    let without = if op.residual.is_none() { "a residual" } else { "a weight" };
    let instead = if op.residual.is_none() { "a residual of zeros" } else { "a weight of ones" };
    format!(
        "on GPUs RMSNorm behind a layer has no kernel without {without}; give it {instead}, or use CPU ranks"
    )
}

/// Likewise of its gradients.
pub(super) fn backward_refusal() -> String {
    "on GPUs RMSNorm behind a layer has no kernel for its gradients; make the layer for its forward alone, or use CPU ranks".to_owned()
}

impl Normalisation {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::RmsNorm) -> Result<Self, ExecError> {
        let (Some(residual), Some(weight)) = (op.residual, op.weight) else {
            return Err(prepare.error(refusal(op)));
        };
        let (src, rows) = tensors_of(&op.src);
        let spec = RmsNormSpec {
            rows,
            columns: prepare.spec(weight).shape[0],
            element: prepare.element(op.out)?,
            epsilon: op.epsilon as f32,
        };
        let kernel = RmsNorm::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        Ok(Self { kernel, src, residual, sum: op.sum, weight, out: op.out })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let address = |id: BufferId| buffers[id.0].address();
        let src: Vec<u64> = self.src.iter().map(|id| address(*id)).collect();
        let tensors = RmsNormTensors {
            src: &src,
            residual: Some((address(self.residual), address(self.sum))),
            weight: address(self.weight),
            out: address(self.out),
        };
        // SAFETY: `check_operands` has compared all shapes and types; buffers live as long as what is enqueued; the Program orders
        // who else uses them.
        unsafe { self.kernel.launch(stream, &tensors) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_kernel_says_what_to_do() {
        let op = schedule::RmsNorm {
            src: Vec::new(),
            residual: None,
            sum: BufferId(0),
            weight: Some(BufferId(1)),
            epsilon: 1e-5,
            out: BufferId(2),
        };
        assert!(refusal(&op).contains("without a residual; give it a residual of zeros"));
        let weightless = schedule::RmsNorm { residual: Some(BufferId(3)), weight: None, ..op };
        assert!(refusal(&weightless).contains("without a weight; give it a weight of ones"));
        assert!(backward_refusal().contains("its forward alone"));
    }
}
