//! The CUDA transport between ranks of one process: receivers read straight from senders' memory, of their own device or of
//! a peer's.
//!
//! A collective meets on the host while it is enqueued. A rank records an event "my inputs are ready", publishes it with the
//! inputs' addresses, waits on the host until those it receives from have published theirs, and enqueues waits for their
//! events, one kernel that fetches all rows, and an event "I have read". Then it waits on the host until those that it
//! sends to have come as far, and enqueues waits for theirs: after that its inputs may be overwritten. So every event is
//! recorded before anyone is told to wait for it, and the device can never be left waiting: not on any number of hardware
//! queues, and not when a rank fails.

mod rows;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use counterpoint_exec::collective::{Board, Collective, Payload, Post, Waiter};
use counterpoint_exec::{ExecError, OpPlace, Transport, World};
use counterpoint_schedule::{BufferSpec, GroupCast, GroupReduce, SpanKind};

use rows::{Incoming, RowWork};

use crate::backend::{CudaBackend, CudaBarrier, CudaBuffer, CudaStream, exec_error, lock};
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

    fn enqueue(
        &self,
        backend: &CudaBackend,
        stream: &CudaStream,
        place: &OpPlace,
        collective: &CudaCollective,
        buffers: &[CudaBuffer],
        barrier: Option<&CudaBarrier>,
    ) -> Result<(), ExecError> {
        self.world.check()?;
        let call = Call {
            transport: self,
            backend,
            stream,
            place,
            collective,
            sequence: self.next.fetch_add(1, Ordering::Relaxed),
        };
        let enqueued = stream.enqueue(place, SpanKind::Communication, backend.timed(), |queue| {
            if let Some(barrier) = barrier {
                barrier.arrive(queue)?;
            }
            call.enqueue(buffers)
        });
        enqueued.map_err(|error| {
            self.world.fail(match error {
                CallError::Exec(error) => error,
                CallError::Cuda(error) => backend.error(place, error),
            })
        })
    }
}

/// One collective as it is enqueued.
struct Call<'a> {
    transport: &'a CudaTransport,
    backend: &'a CudaBackend,
    stream: &'a CudaStream,
    place: &'a OpPlace,
    collective: &'a CudaCollective,
    sequence: u64,
}

impl Call<'_> {
    fn enqueue(&self, buffers: &[CudaBuffer]) -> Result<(), CallError> {
        let Self { collective, sequence, .. } = *self;
        let CudaTransport { world, board, rank, .. } = self.transport;
        let (rank, queue) = (*rank, self.stream.queue());
        let tensors = &collective.collective.tensors;
        let part = Part {
            inputs: tensors.iter().map(|(input, _)| buffers[input.0].clone()).collect(),
            ready: self.event(&collective.ready)?,
            done: self.event(&collective.done)?,
        };
        let done = part.done.clone();
        part.ready.record(queue)?;
        let post = Post {
            place: self.place.clone(),
            collective: collective.collective.clone(),
            at: Instant::now(),
            payload: part,
        };
        let own = board.publish(rank, sequence, post);
        let waiter = Waiter { rank, place: self.place, status: self.stream.status() };
        let post_of = |peer: usize| -> Result<Arc<Post<Part>>, CallError> {
            let post = board.post_of(world, &waiter, peer, sequence)?;
            own.meet(rank, sequence, peer, &post)?;
            Ok(post)
        };

        let pattern = &collective.collective.pattern;
        let mut incoming = Vec::with_capacity(pattern.incoming.len());
        for peer in &pattern.incoming {
            let post = post_of(peer.rank)?;
            if peer.rank != rank {
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
        let outputs: Vec<u64> = tensors.iter().map(|(_, output)| buffers[output.0].address()).collect();
        let mut work = lock(&collective.work);
        let current = match work.take() {
            Some(work) if work.is_for(&parts) => work,
            _ => {
                RowWork::new(self.backend.setup(), rank, &collective.collective, &collective.outputs, &parts)?
            }
        };
        let work = work.insert(current);
        work.launch(queue, &parts, &outputs)?;
        done.record(queue)?;

        for peer in &pattern.incoming {
            board.acknowledge(peer.rank, sequence, rank);
        }
        let outgoing: Vec<_> =
            pattern.outgoing.iter().map(|peer| post_of(peer.rank)).collect::<Result<_, _>>()?;
        board.all_copied(world, &waiter, sequence)?;
        for (post, peer) in outgoing.iter().zip(&pattern.outgoing) {
            if peer.rank != rank {
                queue.wait(&post.payload.done)?;
            }
        }
        board.finish(rank, sequence, self.place);
        Ok(())
    }

    /// The collective's event, made on its first run.
    fn event(&self, slot: &Mutex<Option<Event>>) -> Result<Event, CudaError> {
        let mut slot = lock(slot);
        if let Some(event) = &*slot {
            return Ok(event.clone());
        }
        Ok(slot.insert(Event::new(self.backend.device())?).clone())
    }
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
