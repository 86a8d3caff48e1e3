//! GPUs that reach each other's memory: who may, and what must have ended before memory is freed.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, PoisonError, Weak};

use super::{Device, Primary, handle};
use crate::CudaError;
use crate::library::{Driver, call};

/// Whether it and other GPUs reach each other's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerAccess {
    AsTheyDo,
    Refused,
}

impl Device {
    /// Whether the GPU with the number `from` can read and write the memory of GPU `to` in place.
    ///
    /// # Errors
    /// When there are no such GPUs, or the driver does not say.
    pub fn reaches(from: usize, to: usize) -> Result<bool, CudaError> {
        let driver = Driver::get()?;
        let (from, to) = (handle(driver, from)?, handle(driver, to)?);
        let mut can: c_int = 0;
        // SAFETY: both handles are the driver's.
        unsafe { call!(driver, cuDeviceCanAccessPeer(&mut can, from, to)) }?;
        Ok(can != 0)
    }

    /// Lets kernels and copies of this device read and write `peer`'s memory in place. Once is enough, twice is no error.
    ///
    /// # Errors
    /// [`CudaError::NoPeerAccess`] when it cannot be reached.
    pub fn enable_access(&self, peer: &Self) -> Result<(), CudaError> {
        const ALREADY_ENABLED: u32 = 704;
        let driver = self.bind()?;
        if self.peers == PeerAccess::Refused || peer.peers == PeerAccess::Refused {
            let (from, to, reason) = (self.ordinal(), peer.ordinal(), "it is isolated".to_owned());
            return Err(CudaError::NoPeerAccess { from, to, reason });
        }
        // SAFETY: the peer's context lives as long as `peer`.
        match unsafe { call!(driver, cuCtxEnablePeerAccess(peer.primary.context, 0)) } {
            Ok(()) | Err(CudaError::Driver { code: ALREADY_ENABLED, .. }) => {
                peer.primary.reached_by(&self.primary);
                Ok(())
            }
            Err(error) => {
                let (from, to) = (self.ordinal(), peer.ordinal());
                Err(CudaError::NoPeerAccess { from, to, reason: error.to_string() })
            }
        }
    }
}

impl Primary {
    /// Kernels and copies of `other` reach this one's memory from now on.
    fn reached_by(&self, other: &Arc<Self>) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.retain(|peer| peer.strong_count() > 0);
        if !peers.iter().any(|peer| ptr::eq(peer.as_ptr(), Arc::as_ptr(other))) {
            peers.push(Arc::downgrade(other));
        }
    }

    /// Waits for all that is enqueued on this GPU, and on those that reach its memory: no free waits for those.
    pub(super) fn wait_for_users(&self) -> Result<(), CudaError> {
        let peers: Vec<Arc<Self>> = {
            let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.iter().filter_map(Weak::upgrade).collect()
        };
        peers.iter().map(Arc::as_ref).chain([self]).try_for_each(|user| {
            let driver = user.bind()?;
            // SAFETY: the context is current.
            unsafe { call!(driver, cuCtxSynchronize()) }
        })
    }
}
