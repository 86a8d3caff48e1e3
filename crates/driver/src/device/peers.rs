//! GPUs that reach each other's memory: who may, and what must have ended before memory is freed.

use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use super::{Device, Primary, handle};
use crate::library::{Driver, call};
use crate::{CudaError, Inside};

/// In which a GPU that may have been left with work that never ends is to end what it has.
const SOON: Duration = Duration::from_secs(1);
/// Between looks at whether it has been.
const LOOK: Duration = Duration::from_millis(5);

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
            let (from, to, text) = (self.ordinal(), peer.ordinal(), "it is isolated".to_owned());
            return Err(CudaError::NoPeerAccess { from, to, text });
        }
        // SAFETY: the peer's context lives as long as `peer`.
        match unsafe { call!(driver, cuCtxEnablePeerAccess(peer.primary.context, 0)) } {
            Ok(()) | Err(CudaError::Driver { code: ALREADY_ENABLED, .. }) => {
                peer.primary.reached_by(&self.primary);
                Ok(())
            }
            Err(error) => {
                let (from, to) = (self.ordinal(), peer.ordinal());
                Err(CudaError::NoPeerAccess { from, to, text: error.to_string() })
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

    /// Waits for all that is enqueued on this GPU, and on those that reach its memory: no free waits for those. Not for ever where a GPU may
    /// have been left with work that never ends ([`Device::release_nothing`]).
    pub(super) fn wait_for_users(self: &Arc<Self>) -> Result<(), CudaError> {
        let peers: Vec<Arc<Self>> = {
            let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.iter().filter_map(Weak::upgrade).collect()
        };
        peers.iter().chain([self]).try_for_each(|user| user.wait_for_all())
    }

    /// The driver has no such wait with a limit, a process may be lost while it lasts, and a stream that nobody has any more cannot be asked:
    /// so a thread waits, that may never come back. The end of the process knows of it.
    fn wait_for_all(self: &Arc<Self>) -> Result<(), CudaError> {
        let (ended, end) = mpsc::channel();
        let waiting = self.clone();
        let synchronize = move || {
            let _inside = Inside::enter();
            let waited = waiting.bind().and_then(|driver| {
                // SAFETY: the context is current.
                unsafe { call!(driver, cuCtxSynchronize()) }
            });
            // Whoever waits is to be the last who has the context, and may have gone.
            drop(waiting);
            ended.send(waited).ok();
        };
        let name = "the end of a GPU's work".to_owned();
        let spawned = thread::Builder::new().name(name).spawn(synchronize);
        spawned.map_err(|error| CudaError::NoThread { text: error.to_string() })?;
        let never = || CudaError::NeverEnds { waited: SOON };
        let mut lost: Option<Instant> = None;
        loop {
            match end.recv_timeout(LOOK) {
                Ok(waited) => return waited,
                Err(RecvTimeoutError::Disconnected) => return Err(never()),
                Err(RecvTimeoutError::Timeout) if self.kept.load(Ordering::Relaxed) => {
                    if lost.get_or_insert_with(Instant::now).elapsed() >= SOON {
                        return Err(never());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}
