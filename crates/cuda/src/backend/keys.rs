//! The keys of an attention, some of which may arrive while it runs.

use counterpoint_exec::ExecError;
use counterpoint_schedule::{ArrivingKeys, BufferId, Delivery, SignalId};

use super::attention::Operand;
use super::compute::Prepare;
use super::{CudaBuffer, CudaSignal};
use crate::kernel::ArrivingTensors;
use crate::{CudaError, Stream};

/// The keys and values of a stage.
pub(super) struct Keys {
    pub(super) k: Operand,
    pub(super) v: Operand,
    arriving: Arriving,
}

/// What of them comes while the kernel runs.
enum Arriving {
    Nothing,
    /// Rows that the kernel takes where they are.
    Inside(ArrivingKeys),
    /// Rows that are waited for, and gathered with the others.
    Before(Delivery),
}

impl Keys {
    /// Of a kernel that may take rows `inside`.
    pub(super) fn new(
        prepare: &Prepare<'_>,
        (k, v): (BufferId, BufferId),
        arriving: Option<&ArrivingKeys>,
        inside: bool,
    ) -> Result<Self, ExecError> {
        let operand = |id| Operand::new(prepare, id);
        Ok(match arriving {
            None => Self { k: operand(k)?, v: operand(v)?, arriving: Arriving::Nothing },
            Some(keys) if inside => {
                Self { k: operand(k)?, v: operand(v)?, arriving: Arriving::Inside(*keys) }
            }
            Some(keys) => Self {
                k: Operand::gathered(prepare, [k, keys.k])?,
                v: Operand::gathered(prepare, [v, keys.v])?,
                arriving: Arriving::Before(keys.delivery),
            },
        })
    }

    /// The signal of rows that arrive, in a Program's table.
    pub(super) fn signal(&self) -> Option<SignalId> {
        match &self.arriving {
            Arriving::Nothing => None,
            Arriving::Inside(ArrivingKeys { delivery, .. }) | Arriving::Before(delivery) => {
                Some(delivery.signal)
            }
        }
    }

    /// What the kernel, which is enqueued next, is given of the rows that arrive. Before it the operands may enter. `signal` is that of
    /// [`Keys::signal`].
    pub(super) fn arriving(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signal: Option<&CudaSignal>,
    ) -> Result<Option<ArrivingTensors>, CudaError> {
        match (&self.arriving, signal) {
            (Arriving::Nothing, _) | (_, None) => Ok(None),
            (Arriving::Inside(ArrivingKeys { k, v, .. }), Some(signal)) => {
                let [k, v] = [k, v].map(|id| buffers[id.0].address());
                Ok(Some(ArrivingTensors { k, v, arrivals: signal.arrivals(stream)? }))
            }
            (Arriving::Before(_), Some(signal)) => signal.wait_for_all(stream).map(|()| None),
        }
    }
}
