use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::message::{MemoryPlace, PartMessage};
use crate::memory::AllocationPlace;
use crate::{CudaError, Device, DeviceBuffer};

/// What a rank has told the other processes, so that it is told once.
#[derive(Default)]
pub(super) struct Exports {
    allocations: BTreeMap<u64, Export>,
    /// (peer, what it was told of).
    told: BTreeSet<(usize, Told)>,
}

/// Something with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Told {
    Rows(u64),
    Event(u64),
    Memory(u64),
}

struct Export {
    handle: Vec<u8>,
    bytes: usize,
    /// Memory must not be freed while others have it open: it is kept until all have closed it.
    _kept: DeviceBuffer,
}

impl Exports {
    /// Has `send` tell `peer` of `what`, unless it was told.
    pub(super) fn tell<E>(
        &mut self,
        peer: usize,
        what: Told,
        send: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.told.insert((peer, what)) { send() } else { Ok(()) }
    }

    /// Where a buffer lies. Its allocation has a message from now on.
    pub(super) fn place(&mut self, device: &Device, buffer: &DeviceBuffer) -> Result<MemoryPlace, CudaError> {
        if buffer.is_empty() {
            return Ok(MemoryPlace { number: None, offset: 0, bytes: 0 });
        }
        let AllocationPlace { id, base, bytes } = AllocationPlace::of(device, buffer.address())?;
        if let Entry::Vacant(place) = self.allocations.entry(id) {
            let handle = AllocationPlace { id, base, bytes }.handle(device)?;
            place.insert(Export { handle, bytes, _kept: buffer.clone() });
        }
        let offset = (buffer.address() - base) as usize;
        Ok(MemoryPlace { number: Some(id), offset, bytes: buffer.len() })
    }

    /// What tells of an allocation that has a place.
    pub(super) fn message(&self, number: u64) -> Option<PartMessage> {
        let Export { handle, bytes, .. } = self.allocations.get(&number)?;
        Some(PartMessage::Memory { number, handle: handle.clone(), bytes: *bytes })
    }
}
