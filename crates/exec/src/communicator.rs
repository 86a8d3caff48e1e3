//! Group collectives by themselves, without a Program.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use counterpoint_plan::{DType, Dispatch, GroupPart};
use counterpoint_schedule::{OverlapPolicy, StreamKind, StreamSpec};

use crate::monitor::lock;
use crate::{
    Backend, CollectiveRank, CollectiveSpec, CpuBackend, CpuTransport, ExecError, GroupCollective, GroupRank,
    Reduce, SlowLink, TensorPair, Ticket, Transport, World,
};

/// Group collectives by themselves, without a Program: one rank's end of them, on a stream of communication of the rank.
///
/// All ranks must issue the same collectives in the same order. Calls return at once; [`Handle::synchronize`] waits on the
/// host, [`Handle::wait`] orders another stream behind. Those that were called last stay ready; who has one of its own to call again and
/// again prepares it ([`Group::collective`](crate::Group::collective)).
pub struct Communicator<B: Backend, T: Transport<B>> {
    rank: Arc<GroupRank<B, T>>,
    stream: Arc<B::Stream>,
    /// What was called last, that called last at the end.
    kept: Mutex<VecDeque<Ready<B, T>>>,
}

/// A collective that is ready.
type Ready<B, T> = (CollectiveSpec, Arc<CollectiveRank<B, T>>);

/// Collectives that a communicator keeps ready.
const KEPT: usize = 16;

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
        Ok(Self { rank: rank.clone(), stream, kept: Mutex::default() })
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

    /// Rolls a dispatched tensor by `shift` rows along the whole sequence: `to` gets at position `p` the row that `from` has
    /// at `p - shift`, modulo the length, as if it had been undispatched, rolled and dispatched, but every row moves once.
    /// All ranks call it, with the same dispatch and shift.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the tensors do not have the rank's rows.
    pub fn roll(
        &self,
        dispatch: &Dispatch,
        shift: i64,
        from: &B::Buffer,
        to: &B::Buffer,
    ) -> Result<Handle<'_, B, T>, ExecError> {
        let (_, dtype) = self.backend().layout(from);
        self.group_cast("roll", &dispatch.roll_part(self.rank(), shift), &[(from, to)], dtype)
    }

    /// Sends rows of the inputs to the ranks that `part` names and receives theirs into the outputs. The two buffers of a
    /// pair have the same row shape and element type; all pairs travel together. Rows of an output that no split names are
    /// left alone.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the part does not fit the tensors, [`ExecError::Tensor`] when an output shares memory with another
    /// tensor: nothing has been sent then.
    pub fn group_cast(
        &self,
        label: &str,
        part: &GroupPart,
        tensors: &[(&B::Buffer, &B::Buffer)],
        wire_dtype: DType,
    ) -> Result<Handle<'_, B, T>, ExecError> {
        self.call(label, part, tensors, GroupCollective::Cast(wire_dtype))
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
        self.call(label, part, tensors, GroupCollective::Reduce(reduce))
    }

    fn call(
        &self,
        label: &str,
        part: &GroupPart,
        tensors: &[(&B::Buffer, &B::Buffer)],
        what: GroupCollective,
    ) -> Result<Handle<'_, B, T>, ExecError> {
        let pairs = tensors.iter().map(|(input, output)| TensorPair::of(self.backend(), input, output));
        let (label, part) = (label.to_owned(), part.clone());
        let ready = self.ready(CollectiveSpec { label, part, what, tensors: pairs.collect() });
        // Others may be waiting for this rank already: they are to hear of it.
        let ready = ready.map_err(|error| self.backend().fail(error))?;
        Ok(Handle { communicator: self, ticket: ready.call(tensors, None)? })
    }

    /// What is ready of such a collective, or is made so.
    fn ready(&self, spec: CollectiveSpec) -> Result<Arc<CollectiveRank<B, T>>, ExecError> {
        let mut kept = lock(&self.kept);
        let known = kept.iter().position(|(known, _)| *known == spec).and_then(|at| kept.remove(at));
        let (spec, ready) = match known {
            Some(known) => known,
            None => {
                let ready = Arc::new(CollectiveRank::prepare(&self.rank, &spec)?);
                (spec, ready)
            }
        };
        while kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back((spec, ready.clone()));
        Ok(ready)
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
static POLICY: OverlapPolicy = OverlapPolicy::CONCURRENT;
