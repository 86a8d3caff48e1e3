//! The CUDA transport between ranks of one process: receivers read straight from senders' memory, of their own device or of
//! a peer's.
//!
//! A collective meets on the host while it is enqueued. *Begin*: a rank records an event "my inputs are ready" and publishes
//! it with the inputs' addresses. *Fetch*: once those it receives from have published theirs, it enqueues waits for their
//! events, one kernel that fetches all rows, and an event "I have read". *End*: once those that it sends to have come as
//! far, it enqueues waits for their events; after that its inputs may be overwritten. So every event is recorded before anyone
//! is told to wait for it, and the device can never be left waiting: not on any number of hardware queues, and not when a
//! rank fails.

mod rows;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use counterpoint_exec::collective::{Board, Collective, Payload, Post, Waiter};
use counterpoint_exec::{CollectiveCall, ExecError, OpPlace, Transport, World};
use counterpoint_schedule::{BufferSpec, GroupCast, GroupReduce, SpanKind};

use rows::{Incoming, RowWork};

use crate::backend::{CudaBackend, CudaBuffer, SpanStart, exec_error, lock};
use crate::{CudaError, Device, Event};

/// One rank of the CUDA transport.
pub struct CudaTransport {
    world: Arc<World>,
    board: Arc<Board<Part>>,
    rank: usize,
    device: Device,
    next: AtomicU64,
}

/// What a rank publishes of its part in a collective.
struct Part {
    inputs: Vec<CudaBuffer>,
    /// Passed when the inputs may be read.
    ready: Event,
    /// Passed when this rank has read those of others.
    done: Event,
}

impl Payload for Part {
    fn spent(&self) -> Self {
        // Who has been read from still waits for the reader's event.
        Self { inputs: Vec::new(), ready: self.ready.clone(), done: self.done.clone() }
    }
}

/// One rank's part in a group collective, made ready.
pub struct CudaCollective {
    collective: Arc<Collective>,
    outputs: Vec<BufferSpec>,
    ready: Mutex<Option<Event>>,
    done: Mutex<Option<Event>>,
    /// Made when the ranks first meet, since it takes the peers' rows too, and again only if those change.
    work: Mutex<Option<RowWork>>,
}

impl CudaTransport {
    /// A transport for every rank of `world`, the first on the first of `devices`.
    pub(crate) fn connect(world: &Arc<World>, devices: impl IntoIterator<Item = Device>) -> Vec<Self> {
        let board = Arc::new(Board::new(world));
        let rank = |(rank, device)| {
            let (world, board) = (world.clone(), board.clone());
            Self { world, board, rank, device, next: AtomicU64::new(0) }
        };
        (0..world.size()).zip(devices).map(rank).collect()
    }

    fn prepare(
        &self,
        place: &OpPlace,
        collective: Result<Collective, ExecError>,
        specs: &[BufferSpec],
    ) -> Result<CudaCollective, ExecError> {
        let checked = collective.and_then(|collective| {
            let outputs: Vec<BufferSpec> =
                collective.tensors.iter().map(|(_, output)| specs[output.0].clone()).collect();
            rows::check(&collective, &outputs).map_err(|reason| ExecError::BadCollective {
                rank: self.rank,
                collective: place.to_string(),
                reason,
            })?;
            rows::load(&self.device, &collective, &outputs)
                .map_err(|error| exec_error(self.rank, &format!("the preparation of {place}"), error))?;
            Ok(CudaCollective {
                collective: Arc::new(collective),
                outputs,
                ready: Mutex::new(None),
                done: Mutex::new(None),
                work: Mutex::new(None),
            })
        });
        // A bad part leaves the other ranks without this one: they are told why instead of being let wait.
        checked.map_err(|error| self.world.fail(error))
    }
}

impl Transport<CudaBackend> for CudaTransport {
    type Collective = CudaCollective;
    type Meeting = CudaMeeting;

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world.size()
    }

    fn prepare_cast(
        &self,
        place: &OpPlace,
        op: &GroupCast,
        specs: &[BufferSpec],
    ) -> Result<CudaCollective, ExecError> {
        self.prepare(place, Collective::cast(self.rank, self.world.size(), place, op, specs), specs)
    }

    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        specs: &[BufferSpec],
    ) -> Result<CudaCollective, ExecError> {
        self.prepare(place, Collective::reduce(self.rank, self.world.size(), place, op, specs), specs)
    }

    fn begin(&self, call: &Call<'_>) -> Result<CudaMeeting, ExecError> {
        self.world.check()?;
        self.report(call, self.begin_meeting(call))
    }

    fn fetch(&self, call: &Call<'_>, meeting: &mut CudaMeeting) -> Result<(), ExecError> {
        self.report(call, self.fetch_rows(call, meeting))
    }

    fn end(&self, call: &Call<'_>, meeting: CudaMeeting) -> Result<(), ExecError> {
        self.report(call, self.end_meeting(call, &meeting))
    }
}

type Call<'a> = CollectiveCall<'a, CudaBackend, CudaCollective>;

/// A collective that is being enqueued.
pub struct CudaMeeting {
    sequence: u64,
    own: Arc<Post<Part>>,
    /// Where its time is taken, when it is.
    started: Option<SpanStart>,
}

impl CudaTransport {
    fn begin_meeting(&self, call: &Call<'_>) -> Result<CudaMeeting, CallError> {
        let CollectiveCall { backend, stream, place, collective, buffers, barrier } = *call;
        let queue = stream.queue();
        backend.device().bind()?;
        stream.status().begin(place);
        let started = stream.start_span(backend.timed())?;
        if let Some(barrier) = barrier {
            barrier.arrive(queue)?;
        }
        let tensors = &collective.collective.tensors;
        let part = Part {
            inputs: tensors.iter().map(|(input, _)| buffers[input.0].clone()).collect(),
            ready: event(&collective.ready, backend.device())?,
            done: event(&collective.done, backend.device())?,
        };
        part.ready.record(queue)?;
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let post = Post {
            place: place.clone(),
            collective: collective.collective.clone(),
            at: Instant::now(),
            payload: part,
        };
        let users = &call.collective.collective.pattern.outgoing;
        let own = self.board.publish(self.rank, sequence, post, users);
        Ok(CudaMeeting { sequence, own, started })
    }

    fn fetch_rows(&self, call: &Call<'_>, meeting: &CudaMeeting) -> Result<(), CallError> {
        let CollectiveCall { backend, stream, collective, buffers, .. } = *call;
        let queue = stream.queue();
        let pattern = &collective.collective.pattern;
        let mut incoming = Vec::with_capacity(pattern.incoming.len());
        for peer in &pattern.incoming {
            let post = self.post_of(call, meeting, peer.rank)?;
            if peer.rank != self.rank {
                queue.wait(&post.payload.ready)?;
            }
            incoming.push(post);
        }
        let parts: Vec<Incoming<'_>> = incoming
            .iter()
            .zip(&pattern.incoming)
            .map(|(post, peer)| Incoming {
                collective: &post.collective,
                inputs: &post.payload.inputs,
                rows: &peer.rows,
            })
            .collect();
        let tensors = &collective.collective.tensors;
        let outputs: Vec<u64> = tensors.iter().map(|(_, output)| buffers[output.0].address()).collect();
        let mut work = lock(&collective.work);
        let current = match work.take() {
            Some(work) if work.is_for(&parts) => work,
            _ => {
                RowWork::new(backend.setup(), self.rank, &collective.collective, &collective.outputs, &parts)?
            }
        };
        work.insert(current).launch(queue, &parts, &outputs)?;
        meeting.own.payload.done.record(queue)?;
        for peer in &pattern.incoming {
            self.board.acknowledge(peer.rank, meeting.sequence, self.rank);
        }
        Ok(())
    }

    fn end_meeting(&self, call: &Call<'_>, meeting: &CudaMeeting) -> Result<(), CallError> {
        let CollectiveCall { stream, place, collective, .. } = *call;
        let pattern = &collective.collective.pattern;
        let outgoing: Vec<_> = pattern
            .outgoing
            .iter()
            .map(|peer| self.post_of(call, meeting, peer.rank))
            .collect::<Result<_, _>>()?;
        self.board.all_used(&self.world, &self.waiter(call), meeting.sequence)?;
        for (post, peer) in outgoing.iter().zip(&pattern.outgoing) {
            if peer.rank != self.rank {
                stream.queue().wait(&post.payload.done)?;
            }
        }
        self.board.finish(self.rank, meeting.sequence, place);
        stream.end_span(place, SpanKind::Communication, meeting.started)?;
        stream.status().end();
        Ok(())
    }

    /// The part of `peer`, once it has begun, which must fit the own one.
    fn post_of(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        peer: usize,
    ) -> Result<Arc<Post<Part>>, ExecError> {
        let post = self.board.post_of(&self.world, &self.waiter(call), peer, meeting.sequence)?;
        meeting.own.meet(self.rank, meeting.sequence, peer, &post)?;
        Ok(post)
    }

    fn waiter<'a>(&self, call: &Call<'a>) -> Waiter<'a> {
        Waiter { rank: self.rank, place: call.place, status: call.stream.status() }
    }

    fn report<R>(&self, call: &Call<'_>, result: Result<R, CallError>) -> Result<R, ExecError> {
        result.map_err(|error| {
            self.world.fail(match error {
                CallError::Exec(error) => error,
                CallError::Cuda(error) => call.backend.error(call.place, error),
            })
        })
    }
}

/// A collective's event, made on its first run.
fn event(slot: &Mutex<Option<Event>>, device: &Device) -> Result<Event, CudaError> {
    let mut slot = lock(slot);
    if let Some(event) = &*slot {
        return Ok(event.clone());
    }
    Ok(slot.insert(Event::new(device)?).clone())
}

/// Why a collective cannot be enqueued.
enum CallError {
    Exec(ExecError),
    Cuda(CudaError),
}

impl From<ExecError> for CallError {
    fn from(error: ExecError) -> Self {
        Self::Exec(error)
    }
}

impl From<CudaError> for CallError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}
