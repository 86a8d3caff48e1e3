use crate::memory::PinnedBuffer;
use crate::{CudaError, Device};

/// Whether in some run of a kernel a wait for other CTAs of the same launch gave up (`await_value` of the kernels): they have all
/// started, so that is a fault, after which what was computed is wrong.
#[derive(Clone, Debug)]
pub struct MissedWait {
    word: PinnedBuffer,
    what: &'static str,
}

impl MissedWait {
    /// None has. `what` says who waited for what, and what to do about it.
    ///
    /// # Errors
    /// When the host's memory cannot be pinned.
    pub(super) fn new(device: &Device, what: &'static str) -> Result<Self, CudaError> {
        Ok(Self { word: PinnedBuffer::new(device, size_of::<u32>())?, what })
    }

    /// Of the word that kernels set.
    pub(super) fn address(&self) -> u64 {
        self.word.device_address()
    }

    /// Who has waited in vain for what, as far as kernels that have ended tell.
    ///
    /// # Errors
    /// When the word cannot be read.
    pub fn found(&self) -> Result<Option<&'static str>, CudaError> {
        let mut word = [0u32];
        self.word.read(0, &mut word)?;
        Ok((word != [0]).then_some(self.what))
    }
}
