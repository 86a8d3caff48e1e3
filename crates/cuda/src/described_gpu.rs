//! What of a GPU tables depend on, as a value that a process without a GPU can have.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Arch, Device};

/// A GPU as the tables of its kernels depend on it: which kernels it runs, and how many CTAs of them at a time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DescribedGpu {
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// What its kernels are compiled for.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Bytes of shared memory that one block may have when it asks for them.
    pub shared_bytes_per_block: usize,
}

impl DescribedGpu {
    /// Of one that is there.
    pub fn of(device: &Device) -> Self {
        let properties = device.properties();
        Self {
            name: properties.name.clone(),
            arch: device.arch(),
            sm_count: device.sm_count(),
            shared_bytes_per_block: properties.shared_bytes_per_block,
        }
    }

    /// CTAs of a kernel that fills the GPU but for a margin.
    pub(crate) fn workers(&self, sm_margin: u32) -> u32 {
        self.sm_count.saturating_sub(sm_margin).max(1)
    }
}

impl fmt::Display for DescribedGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, arch, sm_count, shared_bytes_per_block } = self;
        let kilobytes = shared_bytes_per_block >> 10;
        write!(f, "{name} ({arch}, {sm_count} multiprocessors, {kilobytes} KB of shared memory a block)")
    }
}
