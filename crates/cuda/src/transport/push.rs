//! Senders have their copy engines write straight into receivers' memory: into the tensors of a group-cast, into a staging
//! buffer for a group-reduce, which is then summed where it lies.

use std::sync::{Arc, Mutex, OnceLock};

use counterpoint_exec::CollectiveCall;
use counterpoint_exec::collective::{Collective, PeerRows};
use counterpoint_schedule::BufferSpec;

use super::collective::Marks;
use super::copies::{CopyPace, CopyStreams, PeerCopies, peer_copies};
use super::lists::Lists;
use super::pull::are_same;
use super::rows::{self, Incoming, RowWork};
use super::staging::Staging;
use super::{Call, CallError, CudaPending, CudaTransport, addresses};
use crate::backend::CudaBuffer;
use crate::kernel::StartMark;
use crate::sync::lock;
use crate::{CudaError, Device, DeviceBuffer, Event, Stream};

/// One rank's part.
pub(super) struct PushWork {
    streams: CopyStreams,
    pace: CopyPace,
    row_bytes: Vec<u64>,
    copies: Mutex<Option<Copies>>,
    reduction: Option<StagedReduction>,
}

/// The copies, and the other ranks' parts that they were made from.
struct Copies {
    parts: Vec<Arc<Collective>>,
    /// What goes to other ranks.
    sent: Vec<PeerCopies>,
    /// What stays.
    kept: Vec<PeerCopies>,
}

/// Where partial results arrive, and what sums them.
struct StagedReduction {
    staging: Staging,
    memory: DeviceBuffer,
    /// Made in the first run, when it is known how many multiprocessors computation leaves.
    rows: OnceLock<RowWork>,
    lists: Lists,
}

impl PushWork {
    pub(super) fn new(
        device: &Device,
        rank: usize,
        collective: &Collective,
        outputs: &[BufferSpec],
        pace: CopyPace,
    ) -> Result<Self, CudaError> {
        let row_bytes = rows::row_bytes(collective);
        let pattern = &collective.pattern;
        let reduction = match collective.reduction {
            None => None,
            Some(_) => {
                rows::load(device, collective, outputs)?;
                let staging = Staging::new(&pattern.incoming, &row_bytes, rank);
                let memory = DeviceBuffer::new(device, staging.bytes as usize)?;
                let (rows, lists) = (OnceLock::new(), Lists::new(device)?);
                Some(StagedReduction { staging, memory, rows, lists })
            }
        };
        let others = pattern.outgoing.iter().map(|peer| peer.rank).filter(|&peer| peer != rank);
        Ok(Self {
            streams: CopyStreams::new(device, others)?,
            pace,
            row_bytes,
            copies: Mutex::new(None),
            reduction,
        })
    }

    /// Where other ranks write.
    pub(super) fn staging(&self) -> Option<DeviceBuffer> {
        self.reduction.as_ref().map(|reduction| reduction.memory.clone())
    }
}

/// The kernels that take the rows of `incoming` from a staging buffer, and the own ones from where they are. See [`staged_input`].
pub(super) fn staged_rows(
    setup: &Stream,
    rank: usize,
    (collective, outputs): (&Collective, &[BufferSpec]),
    incoming: &[PeerRows],
    staging: &Staging,
    sms: Option<u32>,
) -> Result<RowWork, CudaError> {
    let incoming = incoming.iter().map(|peer| {
        let from = if peer.rank == rank { collective.pattern.to(rank) } else { staging.of(peer.rank) };
        Incoming { from, to: &peer.rows }
    });
    RowWork::new(setup, collective, outputs, &incoming.collect::<Vec<_>>(), sms)
}

/// Where such kernels find a tensor of the rank with this index in the pattern.
pub(super) fn staged_input(
    rank: usize,
    incoming: &[PeerRows],
    inputs: &[u64],
    staging: &Staging,
    memory: &DeviceBuffer,
) -> impl Fn(usize, usize) -> u64 {
    move |peer, tensor| match incoming[peer].rank == rank {
        true => inputs[tensor],
        false => memory.address() + staging.tensors[tensor].0,
    }
}

impl CudaTransport {
    pub(super) fn push(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &PushWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { stream, collective, .. } = *call;
        let Some(own) = &pending.own else { return Ok(()) };
        let pattern = &collective.collective.pattern;
        let reduces = work.reduction.is_some();
        let mut receivers: Vec<&PeerRows> =
            pattern.outgoing.iter().filter(|peer| !(reduces && peer.rank == self.rank)).collect();
        // An engine takes one copy after another: all ranks would else send to the first of them at once.
        let ranks = self.world.size();
        receivers.sort_by_key(|peer| (peer.rank + ranks - self.rank) % ranks);
        let posts: Vec<_> =
            receivers.iter().map(|peer| self.post_of(call, pending, peer.rank)).collect::<Result<_, _>>()?;
        let mut copies = lock(&work.copies);
        let current = match copies.take() {
            Some(current) if are_same(&current.parts, &posts) => current,
            _ => {
                let each = receivers.iter().zip(&posts).map(|(peer, post)| {
                    let incoming = &post.collective.pattern;
                    if !reduces {
                        return peer_copies(peer, incoming.from(self.rank), &work.row_bytes);
                    }
                    let theirs = Staging::new(&incoming.incoming, &work.row_bytes, peer.rank);
                    let mut copies = peer_copies(peer, theirs.of(self.rank), &work.row_bytes);
                    copies.runs.iter_mut().for_each(|run| run.to += theirs.tensors[run.tensor].0);
                    copies
                });
                let (kept, sent): (Vec<_>, Vec<_>) = each.partition(|copies| copies.rank == self.rank);
                let sent = sent.into_iter().map(|copies| copies.at(work.pace)).collect();
                Copies { parts: posts.iter().map(|post| post.collective.clone()).collect(), sent, kept }
            }
        };
        let Copies { sent, kept, .. } = copies.insert(current);
        let marks = receivers.iter().zip(&posts).map(|(peer, post)| post.payload.marks_of(peer.rank));
        let marks: Vec<&Marks> = marks.collect::<Result<_, _>>()?;
        let at = |rank: usize| receivers.iter().position(|peer| peer.rank == rank);
        let writable = |rank: usize| -> Option<Event> {
            at(rank).filter(|_| rank != self.rank).map(|at| marks[at].ready.clone())
        };
        let target = |rank: usize, tensor: usize| {
            let part = at(rank).map(|at| &posts[at].payload);
            let staging = part.and_then(|part| part.staging.as_ref()).map(DeviceBuffer::address);
            let output = || part.and_then(|part| part.outputs.get(tensor)).map(CudaBuffer::address);
            staging.or_else(output).unwrap_or(0)
        };
        let Marks { ready, done } = own.payload.marks_of(self.rank)?;
        let (queue, inputs) = (stream.queue(), addresses(call).0);
        // SAFETY: `Post::check_peer` has compared both sides' rows, `Collective`'s checks have seen that they are inside the tensors,
        // posts keep those, and events order everyone else's use of them.
        unsafe { work.streams.start(queue, ready, sent, writable, &inputs, target) }?;
        work.streams.join(queue, sent)?;
        done.record(queue)?;
        // The driver copies within a GPU by a kernel. Under a product it waits for multiprocessors, and nobody else waits for it.
        // SAFETY: as above.
        unsafe { work.streams.start(queue, ready, kept, writable, &inputs, target) }?;
        for peer in &pattern.outgoing {
            self.acknowledge(peer.rank, pending.sequence)?;
        }
        Ok(())
    }

    /// The outputs are complete after it.
    pub(super) fn end_push(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &PushWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { backend, stream, collective, .. } = *call;
        let incoming = &collective.collective.pattern.incoming;
        self.end_after(call, pending, incoming.iter().map(|peer| peer.rank))?;
        if let Some(StagedReduction { staging, memory, rows, lists }) = &work.reduction {
            let (inputs, outputs) = addresses(call);
            let input = staged_input(self.rank, incoming, &inputs, staging, memory);
            let sms = backend.left_to_communication();
            let rows = match rows.get() {
                Some(rows) => rows,
                None => {
                    let of = (&*collective.collective, &collective.outputs[..]);
                    let make = |lists: &Stream| staged_rows(lists, self.rank, of, incoming, staging, sms);
                    let made = lists.upload(self.setup()?, make)?;
                    rows.get_or_init(|| made)
                }
            };
            lists.follow(stream.queue())?;
            rows.launch(stream.queue(), sms, input, &outputs, &StartMark::none())?;
        }
        Ok(())
    }
}
