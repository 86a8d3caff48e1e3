//! A device's memory as a whole: what is free, and what nobody has.

use std::sync::{Arc, PoisonError, Weak};

use super::Device;
use crate::CudaError;
use crate::library::call;
use crate::pool::{MemoryPool, PoolMemory};

/// Bytes of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Not allocated by anyone, or kept by this process to be used again.
    pub free: usize,
    /// In all.
    pub total: usize,
}

impl Device {
    /// Bytes of device memory, now.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn memory(&self) -> Result<MemoryUse, CudaError> {
        let MemoryUse { free, total } = self.driver_memory()?;
        let unused: usize = self.pools().iter().map(|pool| pool.unused_bytes(PoolMemory::Device)).sum();
        Ok(MemoryUse { free: free + unused, total })
    }

    /// Bytes that the allocator which it was given could still lend without asking the device; 0 where it has none.
    pub fn lendable_memory(&self) -> u64 {
        self.pool().lender().map_or(0, |lender| lender.cached())
    }

    /// What the driver has left, without what pools have.
    fn driver_memory(&self) -> Result<MemoryUse, CudaError> {
        let driver = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to locals of the right type.
        unsafe { call!(driver, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(MemoryUse { free, total })
    }

    fn pools(&self) -> Vec<Arc<MemoryPool>> {
        let pools = self.primary.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.iter().filter_map(Weak::upgrade).collect()
    }

    /// Frees memory that was made by any handle of this GPU and that nobody has. Waits for all that is enqueued.
    pub(crate) fn free_unused_memory(&self) -> Result<(), CudaError> {
        let driver = self.bind()?;
        let wait = || self.primary.wait_for_users();
        self.pools().iter().try_for_each(|pool| pool.free_unused(&driver, wait))
    }

    /// Has the driver keep some memory for a library that asks it for some, where all that is left is in pools. Waits for all that is
    /// enqueued then.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn leave_memory(&self) -> Result<(), CudaError> {
        /// What NCCL takes to connect ranks is less.
        const ENOUGH: usize = 1 << 30;
        if self.driver_memory()?.free < ENOUGH { self.free_unused_memory() } else { Ok(()) }
    }
}
