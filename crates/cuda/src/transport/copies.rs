//! The copy engines: each rank pushes its rows into the other ranks' memory, on a stream for each of them.

use counterpoint_exec::collective::PeerRows;
use counterpoint_mask::Range;

use crate::library::call;
use crate::{CudaError, Device, Event, Stream, StreamPriority};

/// One copy of bytes that lie together on both sides, of the tensor with this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRun {
    pub(super) tensor: usize,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
}

/// What goes to one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerCopies {
    pub(super) rank: usize,
    pub(super) runs: Vec<CopyRun>,
}

/// The rows that go to one rank and those that it receives them as, as the fewest copies. Ranges that follow each other on
/// both sides are one.
pub(super) fn peer_copies(outgoing: &PeerRows, received: &[Range], row_bytes: &[u64]) -> PeerCopies {
    let mut rows: Vec<(Range, Range)> = Vec::new();
    for (&from, &to) in outgoing.rows.iter().zip(received) {
        match rows.last_mut() {
            Some((last_from, last_to)) if last_from.end == from.start && last_to.end == to.start => {
                (last_from.end, last_to.end) = (from.end, to.end);
            }
            _ => rows.push((from, to)),
        }
    }
    let runs = rows.iter().flat_map(|(from, to)| {
        row_bytes.iter().enumerate().map(|(tensor, row)| CopyRun {
            tensor,
            from: from.start as u64 * row,
            to: to.start as u64 * row,
            bytes: from.len() as u64 * row,
        })
    });
    PeerCopies { rank: outgoing.rank, runs: runs.filter(|run| run.bytes > 0).collect() }
}

/// A stream of a rank for each rank that it copies to, and the event that ends what is there.
pub(super) struct CopyStreams {
    streams: Vec<(usize, Stream, Event)>,
}

impl CopyStreams {
    /// Streams to `peers`.
    pub(super) fn new(device: &Device, peers: impl Iterator<Item = usize>) -> Result<Self, CudaError> {
        let stream = |peer| -> Result<_, CudaError> {
            Ok((peer, Stream::new(device, StreamPriority::High)?, Event::new(device)?))
        };
        Ok(Self { streams: peers.map(stream).collect::<Result<_, _>>()? })
    }

    /// Enqueues the copies to all of `peers` between what is on `queue` and what will be: each after the event that says that
    /// its target may be written. `inputs` are the tensors' addresses, `targets` those of a rank's.
    ///
    /// # Safety
    /// The runs lie inside the tensors, which live until the copies are made, and nobody else touches them meanwhile.
    pub(super) unsafe fn launch(
        &self,
        queue: &Stream,
        ready: &Event,
        peers: &[PeerCopies],
        writable: impl Fn(usize) -> Option<Event>,
        inputs: &[u64],
        targets: impl Fn(usize, usize) -> u64,
    ) -> Result<(), CudaError> {
        for peer in peers {
            let own = self.streams.iter().find(|(rank, ..)| *rank == peer.rank);
            let stream = own.map_or(queue, |(_, stream, _)| stream);
            if own.is_some() {
                stream.wait(ready)?;
            }
            if let Some(writable) = writable(peer.rank) {
                stream.wait(&writable)?;
            }
            for run in &peer.runs {
                let driver = queue.device().bind()?;
                let (to, from) = (targets(peer.rank, run.tensor) + run.to, inputs[run.tensor] + run.from);
                // SAFETY: the caller's promise.
                unsafe { call!(driver, cuMemcpyAsync(to, from, run.bytes as usize, stream.raw())) }?;
            }
        }
        for (_, stream, copied) in
            self.streams.iter().filter(|(rank, ..)| peers.iter().any(|peer| peer.rank == *rank))
        {
            copied.record(stream)?;
            queue.wait(copied)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_both_sides_are_one_copy() {
        let range = |start, end| Range::new(start, end);
        let outgoing = PeerRows { rank: 2, rows: vec![range(0, 4), range(4, 6), range(6, 7), range(9, 10)] };
        let received = [range(10, 14), range(14, 16), range(20, 21), range(21, 22)];
        let run = |tensor, from, to, bytes| CopyRun { tensor, from, to, bytes };
        let expected = vec![
            run(0, 0, 80, 48),
            run(1, 0, 30, 18),
            run(0, 48, 160, 8),
            run(1, 18, 60, 3),
            run(0, 72, 168, 8),
            run(1, 27, 63, 3),
        ];
        assert_eq!(peer_copies(&outgoing, &received, &[8, 3]), PeerCopies { rank: 2, runs: expected });
    }
}
