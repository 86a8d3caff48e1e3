//! CUDA IPC, the sender's side: memory, events and patterns that peers have been sent, each once.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::message::{MemoryPlace, PartMessage};
use crate::{CudaError, Device, DeviceBuffer, TransportFault};
use counterpoint_driver::AllocationPlace;

/// What a rank has published to the other processes, so that it is published once.
#[derive(Default)]
pub(super) struct Exports {
    allocations: BTreeMap<u64, Export>,
    /// (peer, what was published to it).
    sent: BTreeSet<(usize, Sent)>,
}

/// Something with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sent {
    Ready(u64),
    Event(u64),
    Memory(u64),
}

struct Export {
    handle: Vec<u8>,
    bytes: usize,
    /// Memory must not be freed while others have it open: where it is not its world's, which keeps it, it is kept until all have closed
    /// it.
    _kept: Option<DeviceBuffer>,
}

/// The numbers of the events of a collective: ready and done.
pub(super) fn events_of(number: u64) -> [u64; 2] {
    [2 * number, 2 * number + 1]
}

impl Exports {
    /// Has `send` send `what` to `peer`, unless it was.
    pub(super) fn send<E>(
        &mut self,
        peer: usize,
        what: Sent,
        send: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.sent.insert((peer, what)) { send() } else { Ok(()) }
    }

    /// Forgets a collective of this number, and gives the peers that it was published to.
    pub(super) fn forget(&mut self, number: u64) -> BTreeSet<usize> {
        let [ready, done] = events_of(number);
        let of_it = [Sent::Ready(number), Sent::Event(ready), Sent::Event(done)];
        self.sent.extract_if(.., |(_, published)| of_it.contains(published)).map(|(peer, _)| peer).collect()
    }

    /// Where a buffer lies. Its allocation has a message from now on.
    pub(super) fn place(&mut self, device: &Device, buffer: &DeviceBuffer) -> Result<MemoryPlace, CudaError> {
        if buffer.is_empty() {
            return Ok(MemoryPlace { number: None, offset: 0, bytes: 0 });
        }
        if buffer.is_borrowed() {
            let reason = TransportFault::BorrowedMemory.into();
            return Err(CudaError::Transport { transport: "between processes", reason });
        }
        let AllocationPlace { id, base, bytes } = AllocationPlace::of(device, buffer.address())?;
        if let Entry::Vacant(place) = self.allocations.entry(id) {
            let handle = AllocationPlace { id, base, bytes }.handle(device)?;
            // Memory of the world is lent again, under the same number, which others have open.
            let kept = (!buffer.stays_allocated()).then(|| buffer.clone());
            place.insert(Export { handle, bytes, _kept: kept });
        }
        let offset = (buffer.address() - base) as usize;
        Ok(MemoryPlace { number: Some(id), offset, bytes: buffer.len() })
    }

    /// What publishes an allocation that has a place.
    pub(super) fn message(&self, number: u64) -> Option<PartMessage> {
        let Export { handle, bytes, .. } = self.allocations.get(&number)?;
        Some(PartMessage::Memory { number, handle: handle.clone(), bytes: *bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collective_that_is_gone_is_forgotten_and_memory_is_not() {
        let mut exports = Exports::default();
        let mut publish = |peer, what| exports.send::<()>(peer, what, || Ok(())).unwrap();
        for peer in [1, 3] {
            for what in [Sent::Ready(7), Sent::Event(14), Sent::Event(15), Sent::Ready(8), Sent::Memory(7)] {
                publish(peer, what);
            }
        }
        publish(2, Sent::Event(16));
        assert_eq!(exports.forget(7), BTreeSet::from([1, 3]));
        assert_eq!(exports.forget(7), BTreeSet::new());
        assert_eq!(exports.forget(8), BTreeSet::from([1, 2, 3]));
        assert_eq!(exports.sent, BTreeSet::from([(1, Sent::Memory(7)), (3, Sent::Memory(7))]));
    }
}
