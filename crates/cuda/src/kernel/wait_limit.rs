//! What ends the waits of kernels, and what those leave that gave up (`wait_limit.cuh`).

use std::time::Duration;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, Device};
use counterpoint_driver::RecordPlace;

/// `WaitFault` of the kernels: left by a wait that gave up.
#[derive(Clone, Copy, Debug, NoUninit, AnyBitPattern)]
#[repr(C)]
struct WaitFault {
    set: u64,
    awaited: u64,
    step: u64,
    seen: u64,
    wanted: u64,
    unused: [u64; 3],
}

/// `WaitLimit` of the kernels: what ends a wait that nothing else ends.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WaitLimit {
    nanoseconds: u64,
    stop: u64,
    fault: u64,
}

impl WaitLimit {
    /// Of kernels that wait for nothing.
    pub(super) const NONE: Self = Self { nanoseconds: 0, stop: 0, fault: 0 };
}

/// A wait that gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissedWait {
    /// The rank that was waited for, where ranks are.
    pub rank: usize,
    /// What it was to do, by the number of a [`super::LinkStep`].
    pub(super) step: u64,
    /// What was there.
    pub seen: u64,
    /// What should have come.
    pub wanted: u64,
}

/// Where one kernel's waits leave that they gave up: a record among those of its world, which all end together
/// (`Device::stop_waits`). Cheap to clone.
#[derive(Clone, Debug)]
pub struct WaitRecord(RecordPlace);

impl WaitRecord {
    /// An empty one.
    ///
    /// # Errors
    /// When the host's memory cannot be pinned.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        RecordPlace::new(device).map(Self)
    }

    /// Waits that last `limit` at most, and leave this record.
    pub fn limit(&self, limit: Duration) -> WaitLimit {
        let (fault, stop) = self.0.addresses();
        WaitLimit { nanoseconds: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX), stop, fault }
    }

    /// The wait that gave up, if one did: what kernels have recorded so far, whether they still run or not.
    pub fn missed(&self) -> Option<MissedWait> {
        let WaitFault { set, awaited, step, seen, wanted, .. } = self.0.read();
        (set != 0).then_some(MissedWait { rank: awaited as usize, step, seen, wanted })
    }
}

/// Where CTAs of one launch wait for each other: they have all started, so that a wait that gives up is a fault, after which what was
/// computed is wrong.
#[derive(Clone, Debug)]
pub struct CtaWaits {
    record: WaitRecord,
    limit: WaitLimit,
    what: &'static str,
}

impl CtaWaits {
    /// None has given up. `what` says who would have waited in vain for what, and what to do about it.
    ///
    /// # Errors
    /// As [`WaitRecord::new`].
    pub(super) fn new(device: &Device, what: &'static str) -> Result<Self, CudaError> {
        let record = WaitRecord::new(device)?;
        Ok(Self { limit: record.limit(device.wait_limit()), record, what })
    }

    /// As kernels take it.
    pub(super) fn limit(&self) -> WaitLimit {
        self.limit
    }

    /// Whether a kernel still has it, apart from who asks.
    pub(crate) fn is_used(&self) -> bool {
        self.record.0.is_shared()
    }

    /// Who has waited in vain for what, if one did.
    pub fn found(&self) -> Option<String> {
        let MissedWait { seen, wanted, .. } = self.record.missed()?;
        Some(format!("{} (a counter is at {seen} and not at {wanted})", self.what))
    }
}

/// Types that the kernels share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("wait_limit.cuh", WaitFault { set, awaited, step, seen, wanted, unused }),
        shared_layout!("wait_limit.cuh", WaitLimit { nanoseconds, stop, fault }),
    ]
}
