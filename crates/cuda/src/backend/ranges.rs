//! Ranges of NVTX, by which profilers show operations of Programs next to the kernels that they launch.

use std::sync::{Arc, Mutex, Weak};

use counterpoint_driver::NvtxDomain;
use counterpoint_exec::Profiler;

use crate::sync::lock;

/// This crate's domain of NVTX, which the ranks of a process share: ranges of a thread nest within one domain only.
pub(crate) struct NvtxRanges(NvtxDomain);

impl NvtxRanges {
    /// The process's, where a profiler is attached. It goes with the last rank.
    pub(crate) fn of_process() -> Option<Arc<Self>> {
        static RANGES: Mutex<Weak<NvtxRanges>> = Mutex::new(Weak::new());
        let mut shared = lock(&RANGES);
        if let Some(ranges) = shared.upgrade() {
            return Some(ranges);
        }
        let ranges = Arc::new(Self(NvtxDomain::open(c"counterpoint")?));
        *shared = Arc::downgrade(&ranges);
        Some(ranges)
    }
}

impl Profiler for NvtxRanges {
    fn begin(&self, name: &str) {
        self.0.push(name);
    }

    fn end(&self) {
        self.0.pop();
    }
}
