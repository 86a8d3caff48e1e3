//! NCCL: grouped sends and receives of rows where they lie together; else a pass before that packs what is sent, and one after that
//! puts what is received in its place. Sums are formed by a pass of ours, in the order of ranks, unless NCCL's own were asked for.
//!
//! A computation that is to start once NCCL holds its multiprocessors waits for a word that NCCL's own kernel writes: a message of the
//! rank to itself (`StartWord`).

use std::sync::{Arc, OnceLock};

use counterpoint_exec::CollectiveCall;
use counterpoint_exec::collective::{Collective, PeerRows};
use counterpoint_schedule::BufferSpec;

use super::library_sum::LibrarySum;
use super::push::{staged_input, staged_rows};
use super::rows::{self, RowWork};
use super::staging::Staging;
use super::{Call, CallError, CudaPending, CudaTransport, Means, addresses};
use crate::backend::{ExchangeMarks, RaisedCounter};
use crate::kernel::{CountUp, RowCopy, RowMove, StartMark};
use crate::{CudaError, Device, DeviceBuffer, Stream};
use counterpoint_nccl::{NcclMessage, NcclSums};

/// One rank's part.
pub(super) struct ExchangeWork {
    /// Bytes of a row of each tensor.
    row_bytes: Vec<u64>,
    /// Rows that go from their tensors and come into theirs.
    direct: [Vec<PeerRange>; 2],
    sent: Packed,
    received: Packed,
    /// What is received there, and the own rows.
    staged: Vec<PeerRows>,
    pack: RowCopy,
    place: RowWork,
    /// Made by the first call that a barrier counts.
    start: OnceLock<StartWord>,
    /// Likewise: how NCCL sums it itself, where it does.
    library: OnceLock<Option<LibrarySum>>,
    /// Set once the other ranks' parts were found to fit.
    connected: OnceLock<Arc<ExchangeMarks>>,
}

/// Rows of a peer that lie together.
pub(super) struct PeerRange {
    peer: usize,
    pub(super) first: usize,
    pub(super) rows: usize,
}

impl PeerRange {
    /// `None` where they do not.
    pub(super) fn of(peer: &PeerRows) -> Option<Self> {
        peer.as_one().map(|range| Self { peer: peer.rank, first: range.start, rows: range.len() })
    }

    /// One of each tensor.
    fn messages<'a>(
        ranges: &'a [Self],
        tensors: &'a [u64],
        row_bytes: &'a [u64],
    ) -> impl Iterator<Item = NcclMessage> + 'a {
        let each = ranges.iter().flat_map(move |range| {
            tensors.iter().zip(row_bytes).map(move |(&tensor, &row)| NcclMessage {
                peer: range.peer,
                address: tensor + range.first as u64 * row,
                bytes: range.rows as u64 * row,
            })
        });
        each.filter(|message| message.bytes > 0)
    }
}

/// A packed buffer and where each rank's rows are in it.
struct Packed {
    staging: Staging,
    memory: DeviceBuffer,
    messages: Vec<NcclMessage>,
}

impl Packed {
    fn new(device: &Device, staging: Staging) -> Result<Self, CudaError> {
        let memory = DeviceBuffer::new(device, staging.bytes as usize)?;
        let messages = staging.peers.iter().flat_map(|peer| {
            let spans = staging.spans(peer.rank).into_iter();
            spans.map(|(begin, bytes)| (peer.rank, begin, bytes))
        });
        let messages = messages.map(|(peer, begin, bytes)| {
            let address = memory.address() + begin;
            NcclMessage { peer, address, bytes }
        });
        let messages = messages.collect();
        Ok(Self { staging, memory, messages })
    }
}

/// A number that counts the calls of a collective, and the copy of it that NCCL's kernel makes among the messages of each: that this has
/// risen says that the kernel runs. The blocks of it that have not begun by then come before those of streams with a lower priority.
struct StartWord {
    count: CountUp,
    /// The number, and its copy.
    memory: DeviceBuffer,
}

impl StartWord {
    /// Of each. NCCL copies as much at once, so that no reader sees half of a number.
    const BYTES: u64 = 16;

    fn new(setup: &Stream) -> Result<Self, CudaError> {
        let memory = DeviceBuffer::from_slice(setup, &[0u32; 2 * Self::BYTES as usize / size_of::<u32>()])?;
        Ok(Self { count: CountUp::new(setup.device())?, memory })
    }

    /// Counts one more call on `queue`: from where to where NCCL is to copy the number.
    fn next(&self, queue: &Stream) -> Result<(u64, u64), CudaError> {
        let from = self.memory.address();
        // SAFETY: the memory lives as long as the collective; its calls follow each other on one stream.
        unsafe { self.count.launch(queue, from) }?;
        Ok((from, from + Self::BYTES))
    }

    fn counter(&self) -> RaisedCounter {
        RaisedCounter { address: self.memory.address() + Self::BYTES, rise: 1 }
    }
}

impl ExchangeWork {
    pub(super) fn new(
        setup: &Stream,
        rank: usize,
        collective: &Collective,
        outputs: &[BufferSpec],
    ) -> Result<Self, CudaError> {
        let row_bytes = rows::row_bytes(collective);
        let pattern = &collective.pattern;
        let ranges = |peers: &[PeerRows]| -> Vec<PeerRange> {
            peers.iter().filter(|peer| peer.rank != rank).filter_map(PeerRange::of).collect()
        };
        // What is summed or rounded is looked at by a pass of ours.
        let as_it_is =
            collective.reduction.is_none() && !collective.contract.tensors.iter().any(rows::is_rounded);
        let direct =
            [ranges(&pattern.outgoing), if as_it_is { ranges(&pattern.incoming) } else { Vec::new() }];
        let others = |peers: &[PeerRows], direct: &[PeerRange]| -> Vec<PeerRows> {
            let is_direct = |peer: &PeerRows| direct.iter().any(|range| range.peer == peer.rank);
            peers.iter().filter(|peer| !is_direct(peer)).cloned().collect()
        };
        let sent = Staging::new(&others(&pattern.outgoing, &direct[0]), &row_bytes, rank);
        let staged = others(&pattern.incoming, &direct[1]);
        let received = Staging::new(&staged, &row_bytes, rank);
        let moves = sent.peers.iter().flat_map(|peer| {
            pattern.to(peer.rank).iter().zip(&peer.rows).map(|(&from, &to)| RowMove { peer: 0, from, to })
        });
        let moves: Vec<RowMove> = moves.collect();
        let tensors: Vec<_> = collective.contract.tensors.iter().map(rows::unconverted).collect();
        Ok(Self {
            pack: RowCopy::new(setup, &tensors, &moves)?,
            place: staged_rows(setup, rank, (collective, outputs), &staged, &received, None)?,
            sent: Packed::new(setup.device(), sent)?,
            received: Packed::new(setup.device(), received)?,
            staged,
            direct,
            row_bytes,
            start: OnceLock::new(),
            library: OnceLock::new(),
            connected: OnceLock::new(),
        })
    }

    /// The word by which NCCL's kernel says that it has started.
    fn start(&self, setup: &Stream) -> Result<&StartWord, CudaError> {
        if let Some(start) = self.start.get() {
            return Ok(start);
        }
        let made = StartWord::new(setup)?;
        Ok(self.start.get_or_init(|| made))
    }

    /// Whether the ranks have compared their parts.
    pub(super) fn is_connected(&self) -> bool {
        self.connected.get().is_some()
    }
}

impl CudaTransport {
    pub(super) fn exchange(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &ExchangeWork,
    ) -> Result<(), CallError> {
        let Means::Exchange { nccl, sums } = &self.means else { return Ok(()) };
        let CollectiveCall { backend, stream, collective, barrier, .. } = *call;
        let pattern = &collective.collective.pattern;
        // NCCL would wait for ever for one that sends something else.
        if !work.is_connected() {
            let posts = self.posts_of(call, pending, pattern.peers())?;
            let (parts, ranks) = (posts.iter().map(|(_, post)| &post.collective.pattern), self.world.size());
            let library = (*sums == NcclSums::Library)
                .then(|| LibrarySum::of(&collective.collective, &collective.outputs, parts, ranks));
            work.library.get_or_init(|| library.flatten());
            self.watched(call, &work.connected)?;
        }
        let queue = stream.queue();
        // A graph is captured, not run.
        let captured = queue.is_capturing()?;
        let marks = work.connected.get().filter(|_| !captured);
        let marks = marks.map(|marks| backend.marks_of_next(marks)).transpose()?;
        if let Some(sum) = work.library.get().copied().flatten() {
            return self.library_sum(call, nccl, sum, marks.as_ref());
        }
        let (inputs, outputs) = addresses(call);
        let ExchangeWork { row_bytes, direct, sent, received, staged, pack, place, .. } = work;
        let mut sends: Vec<NcclMessage> = PeerRange::messages(&direct[0], &inputs, row_bytes)
            .chain(sent.messages.iter().copied())
            .collect();
        let mut receives: Vec<NcclMessage> = PeerRange::messages(&direct[1], &outputs, row_bytes)
            .chain(received.messages.iter().copied())
            .collect();
        let targets: Vec<u64> =
            sent.staging.tensors.iter().map(|(begin, _)| sent.memory.address() + begin).collect();
        // SAFETY: the rows lie inside the tensors and the staging buffers, which live as long as this collective and what is enqueued;
        // the stream orders their uses.
        unsafe {
            pack.launch(queue, |_, tensor| inputs[tensor], &targets, &StartMark::none())?;
        }
        marks.as_ref().map_or(Ok(()), |marks| marks.begun.record(queue))?;
        // A rank that exchanges nothing has no kernel of NCCL's, and what puts its rows in place is the first.
        let exchanges = !sends.is_empty() || !receives.is_empty();
        let start = barrier.filter(|_| exchanges).map(|_| work.start(self.setup()?)).transpose()?;
        if let Some(start) = start {
            let message = start.next(queue)?;
            let of = |address| NcclMessage { peer: self.rank, address, bytes: StartWord::BYTES };
            // Before the others: NCCL serves a rank's own message first.
            sends.insert(0, of(message.0));
            receives.insert(0, of(message.1));
        }
        // SAFETY: as above; a word of the start is nobody else's.
        unsafe { nccl.exchange(queue, &sends, &receives, marks.as_ref().map(|marks| &marks.ended)) }?;
        let placed = StartMark::of(match (barrier, start) {
            (Some(barrier), Some(start)) => {
                barrier.arrive_by(start.counter());
                None
            }
            (Some(barrier), None) => Some(barrier.arrival()?),
            (None, _) => None,
        });
        let input = staged_input(self.rank, staged, &inputs, &received.staging, &received.memory);
        place.launch(queue, backend.left_to_communication(), input, &outputs, &placed)?;
        placed.record_rest(queue)?;
        Ok(())
    }

    /// The marks of an exchange, made by its first call and registered for errors of waits for the device.
    pub(super) fn watched<'a>(
        &self,
        call: &Call<'_>,
        marks: &'a OnceLock<Arc<ExchangeMarks>>,
    ) -> Result<&'a Arc<ExchangeMarks>, CudaError> {
        if let Some(marks) = marks.get() {
            return Ok(marks);
        }
        let made = Arc::new(self.exchange_marks(call)?);
        let marks = marks.get_or_init(|| made);
        call.backend.watch_exchange(marks.clone());
        Ok(marks)
    }

    fn exchange_marks(&self, call: &Call<'_>) -> Result<ExchangeMarks, CudaError> {
        let pattern = &call.collective.collective.pattern;
        let mut peers: Vec<usize> =
            pattern.incoming.iter().chain(&pattern.outgoing).map(|peer| peer.rank).collect();
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|peer| *peer != self.rank);
        ExchangeMarks::new(&self.device, call.place.to_string(), peers)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    #[test]
    fn rows_that_lie_together_are_one_message_a_tensor() {
        let peer = |rank, rows: &[(usize, usize)]| PeerRows {
            rank,
            rows: rows.iter().map(|&(start, end)| Range::new(start, end)).collect(),
        };
        let together = PeerRange::of(&peer(3, &[(5, 8), (8, 12)])).unwrap();
        let found: Vec<_> = PeerRange::messages(&[together], &[1000, 9000], &[16, 0]).collect();
        assert_eq!(found, [NcclMessage { peer: 3, address: 1080, bytes: 112 }]);
        for apart in [&[(5, 8), (9, 12)][..], &[(8, 12), (5, 8)], &[]] {
            assert!(PeerRange::of(&peer(3, apart)).is_none(), "{apart:?}");
        }
    }
}
