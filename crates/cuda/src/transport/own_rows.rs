//! The rows of a group-cast that a rank has for itself, copied by a copy engine of its GPU concurrently with the kernel that sends the
//! others: in the kernel's list they would alternate with those, and a link would wait for memory.

use counterpoint_exec::collective::{Pattern, PeerRows};

use super::copies::{CopyStreams, PeerCopies, peer_copies};
use crate::{CudaError, Device, Event, Stream};

/// Bytes of all such rows, and of one copy on average, at least: an engine takes some microseconds to begin one.
const LEAST_BYTES: u64 = 2 << 20;
const LEAST_COPY: u64 = 1 << 20;

/// The copies of one rank.
pub(super) struct OwnRows {
    stream: CopyStreams,
    copies: [PeerCopies; 1],
    /// Passed when its inputs are there and its outputs may be written.
    begun: Event,
}

impl OwnRows {
    /// Of `rank`; `None` where the kernel copies them.
    pub(super) fn new(
        device: &Device,
        rank: usize,
        pattern: &Pattern,
        row_bytes: &[u64],
    ) -> Result<Option<Self>, CudaError> {
        let Some(copies) = copies(rank, pattern, row_bytes) else { return Ok(None) };
        let stream = CopyStreams::new(device, [rank].into_iter())?;
        Ok(Some(Self { stream, copies: [copies], begun: Event::new(device)? }))
    }

    /// Enqueues them behind what is on `queue`, which does not wait for them before [`OwnRows::join`].
    ///
    /// # Safety
    /// As [`CopyStreams::start`].
    pub(super) unsafe fn start(
        &self,
        queue: &Stream,
        inputs: &[u64],
        outputs: &[u64],
    ) -> Result<(), CudaError> {
        self.begun.record(queue)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.stream.start(queue, &self.begun, &self.copies, |_| None, inputs, |_, tensor| outputs[tensor])
        }
    }

    /// What is enqueued on `queue` from now on comes after them.
    pub(super) fn join(&self, queue: &Stream) -> Result<(), CudaError> {
        self.stream.join(queue, &self.copies)
    }
}

fn copies(rank: usize, pattern: &Pattern, row_bytes: &[u64]) -> Option<PeerCopies> {
    let own = PeerRows { rank, rows: pattern.to(rank).to_vec() };
    let copies = peer_copies(&own, pattern.from(rank), row_bytes);
    let bytes = copies.bytes();
    (bytes >= LEAST_BYTES && bytes / copies.runs.len() as u64 >= LEAST_COPY).then_some(copies)
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    #[test]
    fn few_long_copies_leave_the_kernel() {
        let rows = |starts: &[usize], length: usize| -> Vec<PeerRows> {
            let rows = starts.iter().map(|&start| Range::new(start, start + length)).collect();
            vec![PeerRows { rank: 3, rows }]
        };
        let taken = |starts: &[usize], length: usize| {
            let received: Vec<usize> = (0..starts.len()).map(|at| at * length).collect();
            let pattern = Pattern { outgoing: rows(starts, length), incoming: rows(&received, length) };
            copies(3, &pattern, &[1024]).is_some()
        };
        assert!(taken(&[0], 2048));
        assert!(!taken(&[0], 2047));
        // Neighbours are one copy, of others at unlike distances every two.
        assert!(taken(&[0, 511, 1022, 1533, 2044, 2555, 3066, 3577], 511));
        assert!(!taken(&[0, 1100, 2300, 3600, 5000, 6500, 8100, 9800], 511));
        assert!(copies(2, &Pattern::default(), &[1024]).is_none());
    }
}
