//! Group collectives by themselves, without a Program.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{
    Accumulate, BufferId, BufferRole, BufferSpec, GroupCast, GroupReduce, OverlapPolicy, ReduceOp,
    StartOrder, StreamKind, StreamSpec,
};

use crate::{
    Backend, CollectiveCall, CollectiveContext, CpuBackend, CpuTransport, ExecError, GroupRank, OpPlace,
    SlowLink, Ticket, Transport, World,
};

/// Group collectives by themselves, without a Program: one rank's end of them, on a stream of communication of the rank.
///
/// All ranks must issue the same collectives in the same order. Calls return at once; [`Handle::synchronize`] waits on the
/// host, [`Handle::wait`] orders another stream behind.
pub struct Communicator<B: Backend, T: Transport<B>> {
    rank: Arc<GroupRank<B, T>>,
    stream: Arc<B::Stream>,
    calls: AtomicUsize,
}

/// How a group-reduce combines partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduce {
    /// The operation.
    pub op: ReduceOp,
    /// Whether the result's own contents are the first operand.
    pub accumulate: Accumulate,
    /// Type on the wire (the logarithms of [`ReduceOp::Lse`] travel as they are stored).
    pub wire_dtype: DType,
    /// Type in which operands are combined.
    pub reduce_dtype: DType,
}

impl Communicator<CpuBackend, CpuTransport> {
    /// A communicator for every rank of `world`, all in this process.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no threads.
    pub fn local(world: &Arc<World>, slow_link: Option<SlowLink>) -> Result<Vec<Self>, ExecError> {
        let workers = CpuBackend::workers(0)?;
        CpuTransport::local(world, slow_link)
            .into_iter()
            .enumerate()
            .map(|(rank, transport)| Self::new(CpuBackend::new(world, rank, workers.clone()), transport))
            .collect()
    }
}

/// Of a rank's lanes the one that its collectives take, which follow all its calls.
const LANE: usize = 0;

impl<B: Backend, T: Transport<B>> Communicator<B, T> {
    /// Takes over one rank's backend and transport.
    ///
    /// # Errors
    /// When the backend has no stream left.
    pub fn new(backend: B, transport: T) -> Result<Self, ExecError> {
        Self::on(&GroupRank::new(backend, transport))
    }

    /// Collectives of a group's rank: they follow its calls, and its calls follow them.
    ///
    /// # Errors
    /// When the backend has no stream left.
    pub fn on(rank: &Arc<GroupRank<B, T>>) -> Result<Self, ExecError> {
        let spec = StreamSpec { name: "collectives".to_owned(), kind: StreamKind::Communication };
        let stream = rank.streams_for(&[spec], &POLICY)?.swap_remove(0);
        Ok(Self { rank: rank.clone(), stream, calls: AtomicUsize::new(0) })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.rank.world_size()
    }

    /// The backend, to make buffers and streams.
    pub fn backend(&self) -> &B {
        self.rank.backend()
    }

    /// Sends rows of the inputs to the ranks that `part` names and receives theirs into the outputs. The two buffers of a
    /// pair have the same row shape and element type; all pairs travel together. Rows of an output that no split names are
    /// left alone.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the part does not fit the tensors: nothing has been sent then.
    pub fn group_cast(
        &self,
        label: &str,
        part: &GroupPart,
        tensors: &[(&B::Buffer, &B::Buffer)],
        wire_dtype: DType,
    ) -> Result<Handle<'_, B, T>, ExecError> {
        let table = Table::new(self.backend(), tensors);
        let op = GroupCast {
            part: Arc::new(part.clone()),
            tensors: table.pairs.clone(),
            wire_dtype,
            arrive: None,
            delivery: None,
        };
        let place = self.place(label);
        let collective = self.rank.transport().prepare_cast(&place, &op, &table.context());
        // Others may be waiting for this rank already: they are to hear of it.
        let collective = collective.map_err(|error| self.backend().fail(error))?;
        self.enqueue(&place, &collective, &table.buffers)
    }

    /// Sends partial results (rows of the first buffer of each pair) to their owners and combines what arrives into the
    /// second, in the order of source ranks.
    ///
    /// # Errors
    /// As [`Communicator::group_cast`].
    pub fn group_reduce(
        &self,
        label: &str,
        part: &GroupPart,
        tensors: &[(&B::Buffer, &B::Buffer)],
        reduce: Reduce,
    ) -> Result<Handle<'_, B, T>, ExecError> {
        let table = Table::new(self.backend(), tensors);
        let Reduce { op, accumulate, wire_dtype, reduce_dtype } = reduce;
        let op = GroupReduce {
            part: Arc::new(part.clone()),
            tensors: table.pairs.clone(),
            op,
            accumulate,
            wire_dtype,
            reduce_dtype,
            arrive: None,
        };
        let place = self.place(label);
        let collective = self.rank.transport().prepare_reduce(&place, &op, &table.context());
        let collective = collective.map_err(|error| self.backend().fail(error))?;
        self.enqueue(&place, &collective, &table.buffers)
    }

    fn place(&self, label: &str) -> OpPlace {
        OpPlace::new(self.calls.fetch_add(1, Ordering::Relaxed), label)
    }

    fn enqueue(
        &self,
        place: &OpPlace,
        collective: &T::Collective,
        buffers: &[B::Buffer],
    ) -> Result<Handle<'_, B, T>, ExecError> {
        let (backend, transport, stream) = (self.backend(), self.rank.transport(), &*self.stream);
        let mut order = self.rank.order();
        self.rank.check()?;
        for (_, ended) in order.before(LANE, false).filter(|(on, _)| !Arc::ptr_eq(on, &self.stream)) {
            backend.wait(stream, place, ended)?;
        }
        transport.enqueue(&CollectiveCall {
            backend,
            stream,
            place,
            collective,
            buffers,
            barrier: None,
            signal: None,
        })?;
        let events = self.rank.events(LANE);
        let finished = events.take(backend)?;
        backend.record(stream, place, &finished)?;
        order.note_end(LANE, &self.stream, &finished, false);
        let ticket = Ticket::new(backend, finished, place.clone(), events);
        Ok(Handle { communicator: self, ticket })
    }
}

/// A collective on its way.
#[must_use = "the collective may still run: wait for it before its buffers are used"]
pub struct Handle<'a, B: Backend, T: Transport<B>> {
    communicator: &'a Communicator<B, T>,
    ticket: Ticket<B>,
}

impl<B: Backend, T: Transport<B>> Handle<'_, B, T> {
    /// What is enqueued on `stream` from now on starts after the collective.
    ///
    /// # Errors
    /// The world's error, when it has failed.
    pub fn wait(&self, stream: &B::Stream) -> Result<(), ExecError> {
        self.ticket.order(stream)
    }

    /// Sleeps until the collective, and all that this communicator was given before it, has finished.
    ///
    /// # Errors
    /// The first error of any rank of the world.
    pub fn synchronize(self) -> Result<(), ExecError> {
        let Communicator { rank, stream, .. } = self.communicator;
        rank.backend().synchronize(&[&**stream])
    }
}

/// Rows are moved as the transport likes best.
static POLICY: OverlapPolicy = OverlapPolicy::new(StartOrder::Concurrent);

/// Buffers of one call as the table that operations index; a buffer passed twice has two entries.
struct Table<B: Backend> {
    buffers: Vec<B::Buffer>,
    specs: Vec<BufferSpec>,
    pairs: Vec<(BufferId, BufferId)>,
}

impl<B: Backend> Table<B> {
    fn new(backend: &B, tensors: &[(&B::Buffer, &B::Buffer)]) -> Self {
        let mut table = Self { buffers: Vec::new(), specs: Vec::new(), pairs: Vec::new() };
        for (index, (input, output)) in tensors.iter().enumerate() {
            let input = table.push(backend, input, format!("input {index}"), BufferRole::Input);
            let output = table.push(backend, output, format!("output {index}"), BufferRole::Output);
            table.pairs.push((input, output));
        }
        table
    }

    fn context(&self) -> CollectiveContext<'_> {
        CollectiveContext { buffers: &self.specs, policy: &POLICY, plan: None }
    }

    fn push(&mut self, backend: &B, buffer: &B::Buffer, name: String, role: BufferRole) -> BufferId {
        let (shape, dtype) = backend.layout(buffer);
        self.specs.push(BufferSpec { name, dtype, shape, role });
        self.buffers.push(buffer.clone());
        BufferId(self.buffers.len() - 1)
    }
}
