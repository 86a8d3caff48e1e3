//! How ranks synchronise on the host while a collective is enqueued: what each publishes, and whom it waits for.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counterpoint_exec::collective::{PeerRows, Post, Waiter};
use counterpoint_exec::{CollectiveCall, ExecError};
use counterpoint_schedule::SpanKind;

use super::collective::{Marks, Part, PeerPost, Work};
use super::process::{PeerProcesses, Readers};
use super::stand_in::StoodIn;
use super::{Call, CallError, CudaCollective, CudaTransport};
use crate::backend::{CallMarks, CudaBuffer, SpanStart};
use crate::sync::lock;
use crate::{CudaError, Event};

/// How long a thread polls for a peer's message before it sleeps: a message between processes takes about as long.
const POLL: Duration = Duration::from_micros(150);

/// Who learns where a rank's tensors lie, those of `users` that use them: every rank of a product learns where the others' are, but
/// elsewhere memory of the caller's has a stand-in only where somebody uses its rows.
fn readers<'a>(work: &Work, users: &'a [PeerRows]) -> Readers<'a> {
    match work {
        Work::Pull(_) | Work::Push(_) | Work::Link(_) => Readers::Those(users),
        Work::BackwardReduce(_) | Work::GemmReduce(_) | Work::CastGemm(_) | Work::Exchange(_) => Readers::All,
    }
}

/// A collective that is being enqueued.
pub struct CudaPending {
    pub(super) sequence: u64,
    /// `None` where nobody needs to know any more.
    pub(super) own: Option<Arc<Post<Part>>>,
    /// Where its time is taken, when it is.
    pub(super) started: Option<SpanStart>,
    /// Where it begins and ends on the device, of ranks that are processes and follow each other by events.
    marks: Option<CallMarks>,
    /// What other processes have of the caller's tensors.
    stood_in: Option<StoodIn>,
}

impl CudaPending {
    /// A call with the tensors that other processes use.
    pub(super) fn as_others_see<'a>(&'a self, call: &Call<'a>) -> Call<'a> {
        let buffers = self.stood_in.as_ref().map_or(call.buffers, |stood_in| &stood_in.table);
        CollectiveCall { buffers, ..*call }
    }
}

impl CudaTransport {
    pub(super) fn begin_collective(&self, call: &Call<'_>) -> Result<CudaPending, CallError> {
        let CollectiveCall { backend, stream, place, collective, barrier, .. } = *call;
        let queue = stream.queue();
        let _bound = backend.device().make_current()?;
        stream.status().begin(place);
        let started = stream.start_span(backend.timed())?;
        match &*collective.work {
            // Their kernels say themselves when they have started.
            Work::Link(_) | Work::Pull(_) | Work::Exchange(_) => {}
            // Copy engines hold no multiprocessor; the others are computation.
            Work::Push(_) | Work::BackwardReduce(_) | Work::GemmReduce(_) | Work::CastGemm(_) => {
                barrier.map_or(Ok(()), |barrier| barrier.arrive(queue))?;
            }
        }
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let marks = self.marks_of_next(call)?;
        let stood_in = self.stand_in(call)?;
        if collective.is_connected() {
            return Ok(CudaPending { sequence, own: None, started, marks, stood_in });
        }
        let announced = lock(&self.announced).remove(&sequence);
        let own = match announced {
            Some(post) => post,
            None => {
                let buffers = stood_in.as_ref().map_or(call.buffers, |stood_in| &stood_in.table);
                self.publish(call, buffers, sequence)?
            }
        };
        Ok(CudaPending { sequence, own: Some(own), started, marks, stood_in })
    }

    /// Of a call whose ranks are processes and follow each other by events, once the host is not too far ahead of the device: the driver
    /// would hold it up for ever where a process is gone that was to record one.
    fn marks_of_next(&self, call: &Call<'_>) -> Result<Option<CallMarks>, CallError> {
        let CollectiveCall { backend, stream, collective, .. } = *call;
        let by_events = self.peers.is_some() && collective.synchronises_by_events();
        if !by_events || stream.queue().is_capturing()? {
            return Ok(None);
        }
        let marks = backend.marks_of_next(self.watched(call, &collective.last_calls)?)?;
        marks.begun.record(stream.queue())?;
        Ok(Some(marks))
    }

    /// Announces to the peers this rank's part in a collective that comes after `between` others, as far as its ranks synchronise on the
    /// device and are not connected yet, and no peer needs to know where memory lies that a call brings.
    pub(super) fn announce_part(&self, call: &Call<'_>, between: u64) -> Result<(), CallError> {
        let CudaCollective { work, .. } = call.collective;
        if work.is_known() && !call.collective.is_connected() {
            let sequence = self.next.load(Ordering::Relaxed) + between;
            let post = self.publish(call, call.buffers, sequence)?;
            lock(&self.announced).insert(sequence, post);
        }
        Ok(())
    }

    /// Publishes this rank's part in a collective, whose tensors others see in `buffers`.
    fn publish(
        &self,
        call: &Call<'_>,
        buffers: &[CudaBuffer],
        sequence: u64,
    ) -> Result<Arc<Post<Part>>, CallError> {
        let CollectiveCall { place, collective, .. } = *call;
        let pattern = &collective.collective.pattern;
        let tensors = &collective.collective.tensors;
        let inputs = || tensors.iter().map(|(input, _)| buffers[input.0].clone()).collect();
        let outputs = || tensors.iter().map(|(_, output)| buffers[output.0].clone()).collect();
        let mut part = Part {
            number: collective.number,
            inputs: Vec::new(),
            outputs: Vec::new(),
            staging: None,
            mailbox: None,
            marks: collective.synchronises_by_events().then(|| self.marks_of(collective)).transpose()?,
        };
        let users = match &*collective.work {
            Work::Pull(_) => {
                part.inputs = inputs();
                &pattern.outgoing[..]
            }
            Work::Push(push) => {
                part.staging = push.staging();
                if part.staging.is_none() {
                    part.outputs = outputs();
                }
                &pattern.incoming[..]
            }
            Work::Link(link) => {
                part.mailbox = Some(link.side.mailbox());
                let readers_of_outputs = link.output_readers();
                if !readers_of_outputs.is_empty() {
                    part.outputs = outputs();
                }
                readers_of_outputs
            }
            Work::BackwardReduce(work) => {
                part.mailbox = Some(work.side.mailbox());
                part.staging = Some(work.memory());
                &pattern.incoming[..]
            }
            Work::GemmReduce(work) => {
                work.side.publish(&mut part, buffers);
                &pattern.incoming[..]
            }
            Work::CastGemm(work) => {
                work.side.publish(&mut part, buffers);
                &pattern.outgoing[..]
            }
            Work::Exchange(_) => &[][..],
        };
        // Before peers are notified: a wait for an event that was not recorded ends at once.
        if let Some(marks) = &part.marks {
            marks.ready.record(call.stream.queue())?;
        }
        let post = Post {
            place: place.clone(),
            collective: collective.collective.clone(),
            at: Instant::now(),
            payload: part,
        };
        // Other processes get a copy by message; where device-side barriers order ranks nobody needs their acknowledgement.
        let awaited = if self.peers.is_none() || collective.synchronises_by_events() { users } else { &[] };
        let own = self.board.publish(self.rank, sequence, post, awaited);
        match &self.peers {
            Some(peers) if collective.work.is_known() => {
                peers.send_call(sequence, collective.number, pattern)?;
            }
            Some(peers) => peers.send_post(sequence, &own, readers(&collective.work, users))?,
            None => {}
        }
        Ok(own)
    }

    pub(super) fn end_collective(&self, call: &Call<'_>, pending: &CudaPending) -> Result<(), CallError> {
        let CollectiveCall { stream, place, collective, .. } = *call;
        match &*collective.work {
            Work::Pull(_) => self.end_pull(call, pending)?,
            Work::Push(work) => self.end_push(&pending.as_others_see(call), pending, work)?,
            // What was published stays for who has not learnt yet where this rank's memory is.
            Work::Link(_)
            | Work::BackwardReduce(_)
            | Work::GemmReduce(_)
            | Work::CastGemm(_)
            | Work::Exchange(_) => {}
        }
        pending.stood_in.as_ref().map_or(Ok(()), |stood_in| stood_in.give(stream.queue()))?;
        pending.marks.as_ref().map_or(Ok(()), |marks| marks.ended.record(stream.queue()))?;
        if let Some((signal, parts)) = call.signal.zip(collective.collective.delivery_parts) {
            signal.raise(stream.queue(), parts as u64)?;
        }
        match &self.late {
            Some(late) => late.finish(pending.sequence, place),
            None => self.board.finish(self.rank, pending.sequence, place),
        }
        let kind = match &*collective.work {
            Work::GemmReduce(_) | Work::CastGemm(_) => SpanKind::Compute,
            _ => SpanKind::Communication,
        };
        stream.end_span(place, kind, pending.started)?;
        stream.status().end();
        Ok(())
    }

    /// The part of `peer`, once it has begun, which must fit the own one.
    pub(super) fn post_of(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        peer: usize,
    ) -> Result<Arc<Post<Part>>, ExecError> {
        let post = self.board.post_of(&self.world, &self.waiter(call), peer, pending.sequence)?;
        if let Some(own) = &pending.own {
            own.check_peer(self.rank, pending.sequence, peer, &post)?;
        }
        Ok(post)
    }

    /// The parts of `peers`.
    pub(super) fn posts_of(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        peers: Vec<usize>,
    ) -> Result<Vec<PeerPost>, CallError> {
        peers.into_iter().map(|peer| Ok((peer, self.post_of(call, pending, peer)?))).collect()
    }

    /// Lets `peer` know that this rank has enqueued its use of what that one published.
    pub(super) fn acknowledge(&self, peer: usize, sequence: u64) -> Result<(), ExecError> {
        self.board.acknowledge(peer, sequence, self.rank);
        match &self.peers {
            Some(peers) => peers.used(peer, sequence),
            None => Ok(()),
        }
    }

    /// Whether the first call of a collective needs nothing of its peers that these have not published when they made theirs ready, by which its
    /// lists were gathered. From then on it is checked whether they call the same, as this call goes on.
    pub(super) fn goes_ahead(&self, call: &Call<'_>, pending: &CudaPending) -> bool {
        let (Some(late), Some(own)) = (&self.late, &pending.own) else { return false };
        let CudaCollective { number, collective, work, .. } = call.collective;
        let mut peers = collective.pattern.peers();
        peers.retain(|peer| *peer != self.rank);
        // One that has dropped what it published has made it ready anew, if it calls it.
        let is_known = |peer: &usize| self.ready.of(*peer, *number).is_some();
        let goes = work.is_known() && peers.iter().all(is_known);
        if goes {
            late.open(pending.sequence, own.clone(), peers);
        }
        goes
    }

    /// Acknowledges the post of `peer` in a collective whose ranks synchronise on the device: this rank has the addresses that it needs.
    pub(super) fn release_post(&self, peer: usize, sequence: u64) {
        if self.peers.is_none() {
            self.board.acknowledge(peer, sequence, self.rank);
        }
    }

    /// A collective's events, made on its first run.
    fn marks_of(&self, collective: &CudaCollective) -> Result<Marks, CudaError> {
        let mut slot = lock(&collective.marks);
        if let Some(marks) = &*slot {
            return Ok(marks.clone());
        }
        let event = || match self.peers {
            Some(_) => Event::shared(&self.device),
            None => Event::new(&self.device),
        };
        Ok(slot.insert(Marks { ready: event()?, done: event()? }).clone())
    }

    pub(super) fn waiter<'a>(&'a self, call: &Call<'a>) -> Waiter<'a> {
        Waiter {
            rank: self.rank,
            place: call.place,
            status: call.stream.status(),
            polls: POLL,
            listener: self.peers.as_ref().map(PeerProcesses::listener),
        }
    }

    pub(super) fn report<R>(&self, call: &Call<'_>, result: Result<R, CallError>) -> Result<R, ExecError> {
        result.map_err(|error| {
            self.world.fail(match error {
                CallError::Exec(error) => error,
                CallError::Cuda(error) => call.backend.error(call.place, error),
            })
        })
    }
}
