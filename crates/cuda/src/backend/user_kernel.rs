//! Kernels of users' own, named in Programs and given to the machine.

use counterpoint_exec::{ExecError, OperationFault};
use counterpoint_schedule::{self as schedule, BufferId, SignalId};

use super::compute::Prepare;
use super::counter_waits::RaisedCounter;
use super::{CudaBuffer, CudaSignal};
use crate::kernel::{UserKernel, UserTensor};
use crate::{CudaError, DeviceBuffer, Stream};

/// A user's kernel with its parts.
pub(super) struct UserWork {
    kernel: UserKernel,
    parts: Vec<Vec<BufferId>>,
    /// The signal that it raises, and the counters that say so.
    raises: Option<(SignalId, DeviceBuffer)>,
}

impl UserWork {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::UserKernel) -> Result<Self, ExecError> {
        let Some(source) = prepare.user_kernel(&op.kernel) else {
            return Err(prepare.error(OperationFault::UserKernel { kernel: op.kernel.clone() }));
        };
        let device = prepare.setup().device();
        let kernel = UserKernel::new(device, source).map_err(|error| prepare.device_error(error))?;
        let counters = |signal| {
            let zeros = vec![0u32; op.parts.len()];
            DeviceBuffer::from_slice(prepare.setup(), &zeros).map(|counters| (signal, counters))
        };
        let raises = op.signal.map(counters).transpose().map_err(|error| prepare.device_error(error))?;
        let parts = op.parts.iter().map(|part| part.reads.iter().chain(&part.writes).copied().collect());
        Ok(Self { kernel, parts: parts.collect(), raises })
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), CudaError> {
        let tensor = |id: &BufferId| {
            let buffer = &buffers[id.0];
            UserTensor { address: buffer.address(), elements: buffer.len() as u64 }
        };
        let parts: Vec<Vec<UserTensor>> =
            self.parts.iter().map(|part| part.iter().map(tensor).collect()).collect();
        let counters = self.raises.as_ref().map_or(0, |(_, counters)| counters.address());
        // SAFETY: whoever gave the machine this kernel has promised that it does what the Program says; buffers and counters live as
        // long as what is enqueued.
        unsafe { self.kernel.launch(stream, &parts, counters) }?;
        if let Some((signal, counters)) = &self.raises {
            let of = |part: usize| RaisedCounter {
                address: counters.address() + (part * size_of::<u32>()) as u64,
                rise: self.kernel.rise(),
            };
            signals[signal.0].raised_by_kernel((0..self.parts.len()).map(of));
        }
        Ok(())
    }
}
