//! One rank of a group: what all Programs that run on it share.

mod ticket;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use counterpoint_schedule::{
    BufferRole, BufferSpec, CommunicationPriority, OverlapPolicy, Program, StreamKind, StreamSpec,
    WorkerShare,
};

use self::ticket::EventPool;
pub use self::ticket::Ticket;
use crate::monitor::lock;
use crate::{Backend, ExecError, GlobalBuffer, Rendezvous, Transport};

/// One rank of a group, in this process: its backend, its connection to the other ranks, its streams and its scratch memory.
///
/// Calls follow each other: one begins when the one before has ended on all streams. So they share scratch memory, and a rank needs
/// as much of it as the largest of its Programs, however many are prepared. What runs at the same time is within a call:
/// communication under computation. With two lanes ([`GroupRank::overlap_calls`]) calls on different streams of the caller overlap.
pub struct GroupRank<B: Backend, T: Transport<B>> {
    backend: B,
    transport: T,
    shared: Mutex<Shared<B>>,
    /// Held while a call is enqueued, so that the collectives of one call follow each other.
    order: Mutex<CallOrder<B>>,
    /// A pool for each lane: a lane's calls follow each other, and so do the records of its events.
    events: [EventPool<B>; LANES],
    /// Of Programs that are made ready from now on.
    lanes: AtomicUsize,
    /// Calls so far, which take lanes in turn.
    calls: AtomicUsize,
    /// See [`GroupRank::order_with`].
    neighbours: Mutex<Vec<Arc<B::Stream>>>,
    is_closed: AtomicBool,
    /// What the connection lives on. Last, so that it goes last.
    keeper: Option<Arc<ConnectionKeeper>>,
}

/// What a group keeps as long as anything that was made ready on it lives: its machine, and its rendezvous.
pub(crate) struct ConnectionKeeper {
    pub(crate) _machine: Arc<dyn Any + Send + Sync>,
    pub(crate) rendezvous: Arc<Rendezvous>,
}

struct Shared<B: Backend> {
    streams: Vec<SharedStream<B>>,
    scratch: [GlobalBuffer<B>; LANES],
}

/// Calls that may overlap at most: each has scratch memory of its own.
const LANES: usize = 2;

struct SharedStream<B: Backend> {
    kind: StreamKind,
    /// Multiprocessors that a policy gives to communication, which a device's streams are made for.
    partition: Option<usize>,
    /// Whether it was made of the ordinary priority.
    ordinary: bool,
    stream: Arc<B::Stream>,
}

/// What orders a rank's calls.
pub(crate) struct CallOrder<B: Backend> {
    /// The end of each lane's last call.
    lanes: [Option<CallEnd<B>>; LANES],
    /// The end of the last that went into a graph of the caller, and the stream that it was recorded on.
    pub(crate) captured: Option<(Arc<B::Stream>, B::Event)>,
    /// Recorded where a call's other streams begin.
    pub(crate) fork: Option<B::Event>,
    /// Recorded where they end.
    pub(crate) joins: Vec<B::Event>,
    /// Scratch memory of calls, not of Programs, that graphs of the caller use each time that they are replayed.
    of_graphs: Vec<B::Buffer>,
}

/// The end of a call.
struct CallEnd<B: Backend> {
    /// What it was recorded on.
    on: Arc<B::Stream>,
    ended: B::Event,
    /// Whether calls on other streams of the caller need not follow it.
    overlaps: bool,
}

impl<B: Backend> CallOrder<B> {
    /// Ends of earlier calls that one in `lane` follows: all, but for one of another lane where both may overlap.
    pub(crate) fn before(
        &self,
        lane: usize,
        overlaps: bool,
    ) -> impl Iterator<Item = (&Arc<B::Stream>, &B::Event)> {
        let ends = self.lanes.iter().enumerate().filter_map(|(of, end)| Some((of, end.as_ref()?)));
        let follows = move |(of, end): &(usize, &CallEnd<B>)| *of == lane || !(overlaps && end.overlaps);
        ends.filter(follows).map(|(_, end)| (&end.on, &end.ended))
    }

    /// A call has ended in `lane`, by an event of its pool.
    pub(crate) fn note_end(&mut self, lane: usize, on: &Arc<B::Stream>, ended: &B::Event, overlaps: bool) {
        self.lanes[lane] = Some(CallEnd { on: on.clone(), ended: ended.clone(), overlaps });
    }

    /// Scratch memory of a call that went into a graph of the caller stays: a larger tensor of its name would have other memory take its
    /// place in the rank's, and the graph would write to what is another's by then.
    pub(crate) fn keep_for_graphs<'a>(&mut self, backend: &B, memory: impl Iterator<Item = &'a B::Buffer>)
    where
        B: 'a,
    {
        for one in memory {
            if !self.of_graphs.iter().any(|kept| backend.overlap(kept, one)) {
                self.of_graphs.push(one.clone());
            }
        }
    }

    /// Ends of the last calls, which whoever takes them waits for.
    pub(crate) fn take_ends(&mut self) -> Vec<B::Event> {
        self.lanes.iter_mut().filter_map(|lane| lane.take().map(|end| end.ended)).collect()
    }
}

impl<B: Backend, T: Transport<B>> GroupRank<B, T> {
    /// Takes over a rank's backend and its connection.
    pub fn new(backend: B, transport: T) -> Arc<Self> {
        Self::kept_by(backend, transport, None)
    }

    pub(crate) fn kept_by(backend: B, transport: T, keeper: Option<Arc<ConnectionKeeper>>) -> Arc<Self> {
        Arc::new(Self {
            keeper,
            backend,
            transport,
            shared: Mutex::new(Shared { streams: Vec::new(), scratch: Default::default() }),
            order: Mutex::new(CallOrder {
                lanes: Default::default(),
                captured: None,
                fork: None,
                joins: Vec::new(),
                of_graphs: Vec::new(),
            }),
            events: Default::default(),
            lanes: AtomicUsize::new(1),
            calls: AtomicUsize::new(0),
            neighbours: Mutex::default(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.backend.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.backend.world_size()
    }

    /// The backend, to make buffers.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Its connection to the other ranks.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// Bytes of scratch memory that its Programs share.
    pub fn scratch_bytes(&self) -> u64 {
        lock(&self.shared).scratch.iter().map(GlobalBuffer::bytes).sum()
    }

    /// Has calls on different streams of the caller overlap, for what is made ready from now on; see [`Group::overlap_calls`](crate::Group::overlap_calls).
    pub fn overlap_calls(&self) {
        self.lanes.store(LANES, Ordering::Relaxed);
    }

    /// Lanes of a Program that is made ready now: more than one where its calls may overlap others.
    pub(crate) fn lanes_of(&self, program: &Program) -> usize {
        let overlaps = self.world_size() > 1 && program.overlaps_other_calls();
        if overlaps { self.lanes.load(Ordering::Relaxed) } else { 1 }
    }

    /// The lane of the next call of a Program that has so many.
    pub(crate) fn next_lane(&self, lanes: usize) -> usize {
        self.calls.fetch_add(1, Ordering::Relaxed) % lanes
    }

    /// Number of streams that it has.
    pub fn num_streams(&self) -> usize {
        lock(&self.shared).streams.len()
    }

    /// Whether a call may be enqueued.
    ///
    /// # Errors
    /// [`ExecError::Closed`]; the group's first error.
    pub fn check(&self) -> Result<(), ExecError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(ExecError::Closed { rank: self.rank() });
        }
        self.backend.check()
    }

    /// Ends the group for all ranks, which hear `reason` of this one from whatever they wait for. Gives the group's error, which is
    /// another where that came first.
    pub fn fail(&self, reason: impl Into<String>) -> ExecError {
        self.backend.fail(ExecError::GaveUp { rank: self.rank(), reason: reason.into() })
    }

    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Leaves the rendezvous; see [`Rendezvous::leave`].
    pub(crate) fn leave(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.rendezvous.leave();
        }
    }

    /// Sleeps until everything on its streams has ended.
    pub(crate) fn synchronize(&self) -> Result<(), ExecError> {
        let streams = self.streams_of_calls();
        self.backend.synchronize(&streams.iter().map(|stream| &**stream).collect::<Vec<_>>())
    }

    /// Sleeps until no call uses its tensors any more, also in a failed group, for the group's limit at most. Whether it came to that.
    pub fn drain(&self) -> bool {
        let streams = self.streams_of_calls();
        self.backend.drain(&streams.iter().map(|stream| &**stream).collect::<Vec<_>>())
    }

    /// Its streams, and those of the caller that its last calls ended on.
    fn streams_of_calls(&self) -> Vec<Arc<B::Stream>> {
        let mut streams: Vec<_> =
            lock(&self.shared).streams.iter().map(|shared| shared.stream.clone()).collect();
        for end in lock(&self.order).lanes.iter().flatten() {
            if !streams.iter().any(|stream| Arc::ptr_eq(stream, &end.on)) {
                streams.push(end.on.clone());
            }
        }
        streams
    }

    pub(crate) fn order(&self) -> MutexGuard<'_, CallOrder<B>> {
        lock(&self.order)
    }

    /// Events for calls in a lane.
    pub(crate) fn events(&self, lane: usize) -> &EventPool<B> {
        &self.events[lane]
    }

    /// The streams of a Program: the first of each kind for its first of that kind, and so on. New ones are made only for a Program
    /// that has more than any before.
    pub(crate) fn streams_for(
        &self,
        specs: &[StreamSpec],
        policy: &OverlapPolicy,
    ) -> Result<Vec<Arc<B::Stream>>, ExecError> {
        let mut shared = lock(&self.shared);
        let (partition, ordinary) =
            (partition_of(policy), policy.priority == CommunicationPriority::Ordinary);
        let mut taken: Vec<Arc<B::Stream>> = Vec::with_capacity(specs.len());
        for spec in specs {
            let fits = |known: &&SharedStream<B>| {
                known.kind == spec.kind
                    && known.partition == partition
                    && known.ordinary == ordinary
                    && !taken.iter().any(|stream| Arc::ptr_eq(stream, &known.stream))
            };
            let stream = match shared.streams.iter().find(fits) {
                Some(known) => known.stream.clone(),
                None => {
                    let stream = Arc::new(self.backend.create_stream(spec, policy)?);
                    let kind = spec.kind;
                    shared.streams.push(SharedStream { kind, partition, ordinary, stream: stream.clone() });
                    stream
                }
            };
            taken.push(stream);
        }
        Ok(taken)
    }

    /// A stream of the rank for work of the caller's own, which calls can be ordered with.
    ///
    /// # Errors
    /// When the system has none left.
    pub fn create_stream(&self, name: &str, kind: StreamKind) -> Result<B::Stream, ExecError> {
        self.backend.create_stream(&StreamSpec { name: name.to_owned(), kind }, &OverlapPolicy::default())
    }

    /// From now on calls of this rank and what is enqueued on `stream` follow each other: a call begins once all that the stream was
    /// given before has ended, and what the stream is given later begins once the call has ended.
    ///
    /// For communication of another library. A kernel that waits for those of other ranks may hold all multiprocessors until they come, and
    /// so may a collective of NCCL on a stream of its own: side by side, one rank's first and the other's second may wait for each
    /// other until the limit. Name that stream here on every rank, and enqueue calls and the library's collectives in the same order on
    /// all of them.
    pub fn order_with(&self, stream: Arc<B::Stream>) {
        let mut neighbours = lock(&self.neighbours);
        if !neighbours.iter().any(|known| Arc::ptr_eq(known, &stream)) {
            neighbours.push(stream);
        }
    }

    pub(crate) fn neighbours(&self) -> Vec<Arc<B::Stream>> {
        lock(&self.neighbours).clone()
    }

    /// Memory that is needed within a call only, by calls in a lane.
    pub(crate) fn scratch(&self, lane: usize, spec: &BufferSpec) -> Result<B::Buffer, ExecError> {
        lock(&self.shared).scratch[lane].view(&self.backend, spec)
    }

    /// Has memory for `rows` of a tensor that is needed within calls in a lane: as many allocate nothing later.
    pub(crate) fn reserve(&self, lane: usize, spec: &BufferSpec, rows: usize) -> Result<(), ExecError> {
        let needed =
            (rows as u64).saturating_mul(spec.row_elements() as u64).saturating_mul(spec.dtype.size() as u64);
        let mut wanted = spec.clone();
        wanted.shape[0] = rows;
        let mut shared = lock(&self.shared);
        let memory = &mut shared.scratch[lane];
        // What no number says is in no memory.
        let has_number = needed < u64::MAX;
        if has_number && memory.has(&wanted) {
            return Ok(());
        }
        match self.backend.available_memory(needed).filter(|available| *available < needed) {
            Some(available) => Err(ExecError::OutOfMemory { rank: Some(self.rank()), needed, available }),
            None => memory.reserve(&self.backend, &wanted),
        }
    }

    /// Refuses a Program whose scratch and persistent buffers cannot fit.
    pub(crate) fn check_memory(&self, program: &Program) -> Result<(), ExecError> {
        let persistent = program.bytes(|role| role == BufferRole::Persistent);
        let scratch = program.bytes(|role| role == BufferRole::Scratch) * self.lanes_of(program) as u64;
        let needed = persistent.saturating_add(scratch.saturating_sub(self.scratch_bytes()));
        if needed == 0 {
            return Ok(());
        }
        match self.backend.available_memory(needed).filter(|available| *available < needed) {
            Some(available) => Err(ExecError::OutOfMemory { rank: Some(self.rank()), needed, available }),
            None => Ok(()),
        }
    }
}

fn partition_of(policy: &OverlapPolicy) -> Option<usize> {
    match policy.workers {
        WorkerShare::Partition(workers) => Some(workers),
        WorkerShare::Common | WorkerShare::Margin(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::DType;

    use super::*;
    use crate::{CpuBuffer, Group, WorldConfig};

    #[test]
    fn what_a_graph_uses_stays_when_the_scratch_memory_grows() {
        let group = Group::local(1, WorldConfig::default()).unwrap();
        let rank = &group.ranks()[0];
        let dense = |rows: usize| {
            let (name, shape) = ("dense dout".to_owned(), vec![rows, 3]);
            rank.scratch(0, &BufferSpec { name, dtype: DType::F32, shape, role: BufferRole::Scratch })
                .unwrap()
        };
        let keep = |memory: &CpuBuffer| {
            rank.order().keep_for_graphs(rank.backend(), [memory].into_iter());
            rank.order().of_graphs.len()
        };
        let first = dense(10);
        // A shorter one is of the same memory, which is kept once.
        assert_eq!([keep(&first), keep(&dense(4)), keep(&first)], [1, 1, 1]);
        let larger = dense(100);
        assert!(!rank.backend().overlap(&first, &larger));
        assert_eq!(first.handles(), 2, "the rank has the memory of the first still");
        assert_eq!(keep(&larger), 2);
    }
}
