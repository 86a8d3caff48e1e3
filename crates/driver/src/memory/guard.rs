//! Guard bytes around every allocation, to find kernels that write out of bounds.

use crate::{Device, GuardReport};

/// Watches the memory around buffers. Every buffer that is allocated on the device while this lives has guard bytes in front
/// and behind, which are looked at when the buffer is freed. A test's tool: it makes allocating and freeing slow.
#[derive(Debug)]
pub struct MemoryGuard {
    device: Device,
}

impl MemoryGuard {
    /// Begins to watch.
    pub fn begin(device: &Device) -> Self {
        device.guards().begin();
        Self { device: device.clone() }
    }

    /// What was seen since the beginning or since this was last asked.
    pub fn report(&self) -> GuardReport {
        self.device.guards().report()
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        self.device.guards().end();
    }
}
