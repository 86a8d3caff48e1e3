//! What moves the rows of a rank.

use counterpoint_exec::World;

use super::EngineUse;
use crate::kernel::LinkAbort;
use crate::nccl::NcclRank;
use crate::{CudaError, Device, Stream, StreamPriority};

/// What moves the rows of one rank.
pub(crate) enum Means {
    /// Kernels that read the other ranks' memory, after events.
    Pull,
    /// Kernels of `num_sms` blocks that do so and meet by themselves, and copy engines beside them.
    Link { num_sms: u32, abort: LinkAbort, engines: EngineUse },
    /// Copy engines.
    Push,
    /// NCCL.
    Exchange(NcclRank),
}

impl Means {
    /// Kernels of a rank that meet by themselves, whose waits end when the world fails: the host may be held up by what waits
    /// behind them.
    pub(crate) fn link(
        world: &World,
        device: &Device,
        num_sms: u32,
        engines: EngineUse,
    ) -> Result<Self, CudaError> {
        let abort = LinkAbort::new(&Stream::new(device, StreamPriority::Low)?)?;
        let ended = abort.clone();
        world.when_failed(move || ended.set());
        Ok(Self::Link { num_sms, abort, engines })
    }
}
