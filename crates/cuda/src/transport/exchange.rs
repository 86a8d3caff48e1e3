//! NCCL: a pass that packs what is sent, grouped sends and receives, and a pass that puts what is received in its place or
//! sums it.

use std::sync::{Arc, OnceLock};

use counterpoint_exec::CollectiveCall;
use counterpoint_exec::collective::Collective;
use counterpoint_schedule::BufferSpec;

use super::push::{staged_input, staged_rows};
use super::rows::{self, RowWork};
use super::staging::Staging;
use super::{Call, CallError, CudaMeeting, CudaTransport, Means, addresses};
use crate::backend::ExchangeMarks;
use crate::kernel::{RowCopy, RowMove};
use crate::nccl::NcclMessage;
use crate::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};

/// One rank's part.
pub(super) struct ExchangeWork {
    sent: Packed,
    received: Packed,
    pack: RowCopy,
    place: RowWork,
    /// Set once the other ranks' parts were found to fit.
    met: OnceLock<Arc<ExchangeMarks>>,
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

impl ExchangeWork {
    pub(super) fn new(
        device: &Device,
        rank: usize,
        collective: &Collective,
        outputs: &[BufferSpec],
    ) -> Result<Self, CudaError> {
        let setup = Stream::new(device, StreamPriority::Low)?;
        let row_bytes = rows::row_bytes(collective);
        let pattern = &collective.pattern;
        let sent = Staging::new(&pattern.outgoing, &row_bytes, rank);
        let received = Staging::new(&pattern.incoming, &row_bytes, rank);
        let moves = sent.peers.iter().flat_map(|peer| {
            pattern.to(peer.rank).iter().zip(&peer.rows).map(|(&from, &to)| RowMove { peer: 0, from, to })
        });
        let moves: Vec<RowMove> = moves.collect();
        let tensors: Vec<_> = collective.contract.tensors.iter().map(rows::unconverted).collect();
        Ok(Self {
            pack: RowCopy::new(&setup, &tensors, &moves)?,
            place: staged_rows(&setup, rank, collective, outputs, &received)?,
            sent: Packed::new(device, sent)?,
            received: Packed::new(device, received)?,
            met: OnceLock::new(),
        })
    }

    /// Whether the ranks have compared their parts.
    pub(super) fn has_met(&self) -> bool {
        self.met.get().is_some()
    }
}

impl CudaTransport {
    pub(super) fn exchange(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        work: &ExchangeWork,
    ) -> Result<(), CallError> {
        let Means::Exchange(nccl) = &self.means else { return Ok(()) };
        let CollectiveCall { backend, stream, collective, .. } = *call;
        let pattern = &collective.collective.pattern;
        // NCCL would wait for ever for one that sends something else.
        if !work.has_met() {
            for peer in pattern.incoming.iter().chain(&pattern.outgoing) {
                self.post_of(call, meeting, peer.rank)?;
            }
            let marks = Arc::new(self.marks(call)?);
            backend.watch_exchange(work.met.get_or_init(|| marks).clone());
        }
        let queue = stream.queue();
        // A graph is captured, not run.
        let marks = work.met.get().filter(|_| !backend.is_capturing());
        let marks = marks.map(|marks| backend.marks_of_next(marks)).transpose()?;
        let (inputs, outputs) = addresses(call);
        let ExchangeWork { sent, received, pack, place, .. } = work;
        let targets: Vec<u64> =
            sent.staging.tensors.iter().map(|(begin, _)| sent.memory.address() + begin).collect();
        // SAFETY: the rows lie inside the tensors and the staging buffers, which live as long as this collective; the stream
        // orders their uses.
        unsafe {
            pack.launch(queue, |_, tensor| inputs[tensor], &targets)?;
            marks.as_ref().map_or(Ok(()), |marks| marks.begun.record(queue))?;
            nccl.exchange(queue, &sent.messages, &received.messages)?;
        }
        marks.map_or(Ok(()), |marks| marks.ended.record(queue))?;
        let input = staged_input(self.rank, &pattern.incoming, &inputs, &received.staging, &received.memory);
        place.launch(queue, input, &outputs)?;
        Ok(())
    }

    fn marks(&self, call: &Call<'_>) -> Result<ExchangeMarks, CudaError> {
        let pattern = &call.collective.collective.pattern;
        let mut peers: Vec<usize> =
            pattern.incoming.iter().chain(&pattern.outgoing).map(|peer| peer.rank).collect();
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|peer| *peer != self.rank);
        ExchangeMarks::new(&self.device, call.place.to_string(), peers)
    }
}
