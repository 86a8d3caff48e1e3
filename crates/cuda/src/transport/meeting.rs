//! How ranks meet on the host while a collective is enqueued: what each publishes, and whom it waits for.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use counterpoint_exec::collective::{PeerRows, Post, Waiter};
use counterpoint_exec::{CollectiveCall, ExecError};
use counterpoint_schedule::SpanKind;

use super::collective::{Part, Work};
use super::process::Readers;
use super::stand_in::StoodIn;
use super::{Call, CallError, CudaTransport};
use crate::backend::SpanStart;
use crate::sync::lock;
use crate::{CudaError, Event};

/// Whom a rank tells where its tensors lie, those of `users` that use them: every rank of a product learns where the others' are, but
/// elsewhere memory of the caller's has a stand-in only where somebody uses its rows.
fn readers<'a>(work: &Work, users: &'a [PeerRows]) -> Readers<'a> {
    match work {
        Work::Pull(_) | Work::Push(_) | Work::Link(_) => Readers::Those(users),
        Work::BackwardReduce(_) | Work::GemmReduce(_) | Work::CastGemm(_) | Work::Exchange(_) => Readers::All,
    }
}

/// A collective that is being enqueued.
pub struct CudaMeeting {
    pub(super) sequence: u64,
    /// `None` where nobody needs to know any more.
    pub(super) own: Option<Arc<Post<Part>>>,
    /// Where its time is taken, when it is.
    pub(super) started: Option<SpanStart>,
    /// What other processes have of the caller's tensors.
    stood_in: Option<StoodIn>,
}

impl CudaMeeting {
    /// A call with the tensors that other processes use.
    pub(super) fn as_others_see<'a>(&'a self, call: &Call<'a>) -> Call<'a> {
        let buffers = self.stood_in.as_ref().map_or(call.buffers, |stood_in| &stood_in.table);
        CollectiveCall { buffers, ..*call }
    }
}

impl CudaTransport {
    pub(super) fn begin_meeting(&self, call: &Call<'_>) -> Result<CudaMeeting, CallError> {
        let CollectiveCall { backend, stream, place, collective, barrier, .. } = *call;
        let queue = stream.queue();
        let _bound = backend.device().make_current()?;
        stream.status().begin(place);
        let started = stream.start_span(backend.timed())?;
        // Kernels that meet by themselves say themselves when they have started.
        match barrier {
            Some(barrier) if !matches!(collective.work, Work::Link(_)) => barrier.arrive(queue)?,
            _ => {}
        }
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let stood_in = self.stand_in(call)?;
        let buffers = stood_in.as_ref().map_or(call.buffers, |stood_in| &stood_in.table);
        let pattern = &collective.collective.pattern;
        if collective.has_met() {
            return Ok(CudaMeeting { sequence, own: None, started, stood_in });
        }
        let tensors = &collective.collective.tensors;
        let inputs = || tensors.iter().map(|(input, _)| buffers[input.0].clone()).collect();
        let outputs = || tensors.iter().map(|(_, output)| buffers[output.0].clone()).collect();
        let mut part = Part {
            inputs: Vec::new(),
            outputs: Vec::new(),
            staging: None,
            mailbox: None,
            ready: self.event(&collective.ready)?,
            done: self.event(&collective.done)?,
        };
        let users = match &collective.work {
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
                let told = link.told_of_outputs(pattern);
                if !told.is_empty() {
                    part.outputs = outputs();
                }
                told
            }
            Work::BackwardReduce(work) => {
                part.mailbox = Some(work.side.mailbox());
                part.staging = Some(work.memory());
                &pattern.incoming[..]
            }
            Work::GemmReduce(work) => {
                work.side.tell(&mut part, buffers);
                &pattern.incoming[..]
            }
            Work::CastGemm(work) => {
                work.side.tell(&mut part, buffers);
                &pattern.outgoing[..]
            }
            Work::Exchange(_) => &[][..],
        };
        // Others synchronise by device-side barriers.
        if matches!(collective.work, Work::Pull(_) | Work::Push(_)) {
            part.ready.record(queue)?;
        }
        let post = Post {
            place: place.clone(),
            collective: collective.collective.clone(),
            at: Instant::now(),
            payload: part,
        };
        let own = self.board.publish(self.rank, sequence, post, users);
        if let Some(peers) = &self.peers {
            peers.tell(sequence, collective.number, &own, readers(&collective.work, users))?;
        }
        Ok(CudaMeeting { sequence, own: Some(own), started, stood_in })
    }

    pub(super) fn end_meeting(&self, call: &Call<'_>, meeting: &CudaMeeting) -> Result<(), CallError> {
        let CollectiveCall { stream, place, collective, .. } = *call;
        match &collective.work {
            Work::Pull(_) => self.end_pull(call, meeting)?,
            Work::Push(work) => self.end_push(&meeting.as_others_see(call), meeting, work)?,
            // Who has not learnt yet where this rank's memory is must find it told.
            Work::Link(_) | Work::BackwardReduce(_) | Work::GemmReduce(_) | Work::CastGemm(_)
                if meeting.own.is_some() =>
            {
                self.board.all_used(&self.world, &self.waiter(call), meeting.sequence)?;
            }
            Work::Link(_)
            | Work::BackwardReduce(_)
            | Work::GemmReduce(_)
            | Work::CastGemm(_)
            | Work::Exchange(_) => {}
        }
        meeting.stood_in.as_ref().map_or(Ok(()), |stood_in| stood_in.give(stream.queue()))?;
        if let Some((signal, parts)) = call.signal.zip(collective.collective.delivery_parts) {
            signal.raise(stream.queue(), parts as u64)?;
        }
        self.board.finish(self.rank, meeting.sequence, place);
        let kind = match &collective.work {
            Work::GemmReduce(_) | Work::CastGemm(_) => SpanKind::Compute,
            _ => SpanKind::Communication,
        };
        stream.end_span(place, kind, meeting.started)?;
        stream.status().end();
        Ok(())
    }

    /// The part of `peer`, once it has begun, which must fit the own one.
    pub(super) fn post_of(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        peer: usize,
    ) -> Result<Arc<Post<Part>>, ExecError> {
        let post = self.board.post_of(&self.world, &self.waiter(call), peer, meeting.sequence)?;
        if let Some(own) = &meeting.own {
            own.meet(self.rank, meeting.sequence, peer, &post)?;
        }
        Ok(post)
    }

    /// Lets `peer` know that this rank has enqueued its use of what that one published.
    pub(super) fn acknowledge(&self, peer: usize, sequence: u64) -> Result<(), ExecError> {
        self.board.acknowledge(peer, sequence, self.rank);
        match &self.peers {
            Some(peers) => peers.used(peer, sequence),
            None => Ok(()),
        }
    }

    /// A collective's event, made on its first run.
    pub(super) fn event(&self, slot: &Mutex<Option<Event>>) -> Result<Event, CudaError> {
        let mut slot = lock(slot);
        if let Some(event) = &*slot {
            return Ok(event.clone());
        }
        let made = match self.peers {
            Some(_) => Event::shared(&self.device)?,
            None => Event::new(&self.device)?,
        };
        Ok(slot.insert(made).clone())
    }

    pub(super) fn waiter<'a>(&self, call: &Call<'a>) -> Waiter<'a> {
        Waiter { rank: self.rank, place: call.place, status: call.stream.status() }
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
