//! The CUDA transport between ranks that are threads of one process, on one GPU or several, or processes (`process`).
//!
//! Ranks synchronise on the host while a collective is enqueued. *Begin*: a rank records an event "my inputs are ready, my outputs may
//! be written" and publishes it with where its tensors are. *Fetch*: once those that it takes part with have published theirs,
//! it enqueues its work: waits for their events, what moves the rows, and an event "done". *End*: it enqueues waits for the
//! events of those who have used what it published. So every event is recorded before anyone is notified to wait for it, and the
//! device can never be left waiting: not on any number of hardware queues, and not when a rank fails.
//! A call begins by *announcing* all collectives that peers do not know, so that they are matched at once and not one after the other.
//!
//! Who moves the rows is a matter of the [`TransportKind`]: their receivers by kernels that read the others' memory (`pull`),
//! their senders by copy engines (`push`), or NCCL (`exchange`). Where each rank has a GPU of its own, kernels that read or
//! write the others' memory pass device-side barriers (`link`). The last two need the host in the first run only.

mod call;
mod collective;
mod copies;
mod engine;
mod exchange;
mod fused;
mod host_sync;
mod kind;
mod levels;
mod library_sum;
mod link;
mod link_side;
mod lists;
mod means;
mod own_rows;
mod process;
mod pull;
mod push;
mod ready;
mod rows;
mod staging;
mod stand_in;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use counterpoint_exec::collective::{Board, Collective, LateChecks, Post};
use counterpoint_exec::{
    CaptureFault, CollectiveContext, ExecError, OpPlace, PolicyFault, Rendezvous, Transport, World,
};
use counterpoint_schedule::{
    BufferSpec, EngineCollectives, GroupCast, GroupReduce, Mover, Op, OverlapPolicy, PolicySupport, Program,
    RankTransport,
};

use crate::backend::{CudaBackend, CudaBuffer, CudaTables, exec_error};
use crate::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};

use call::{Call, CallError, addresses, unpublished};
pub use collective::CudaCollective;
use collective::{Part, Work};
use copies::CopyPace;
pub use engine::EngineUse;
pub use host_sync::CudaPending;
pub use kind::{TransportKind, TransportKindError};
pub(crate) use levels::Level;
pub use levels::{LevelledCollective, LevelledPending, LevelledTransport};
use link::LinkWork;
pub(crate) use means::Means;
use process::PeerProcesses;
use ready::{OwnPart, ReadyParts};
use stand_in::StandIns;

/// Numbers of collectives of Programs that have a turn: beyond all that are counted, each Program's in a range of its own.
const OF_TURNS: u64 = 1 << 62;
const TURN_BITS: u32 = 24;

/// One rank of the CUDA transport.
pub struct CudaTransport {
    world: Arc<World>,
    board: Arc<Board<Part>>,
    rank: usize,
    device: Device,
    /// Those of all ranks that are threads: memory of a rank that has died stays until all have left, whose kernels may still write
    /// there, or begin to.
    _devices: Arc<[Device]>,
    next: AtomicU64,
    prepared: AtomicU64,
    /// What peers were sent of collectives that are not enqueued yet, by their place among all.
    announced: Mutex<BTreeMap<u64, Arc<Post<Part>>>>,
    /// What ranks have published of collectives when they made them ready.
    ready: Arc<ReadyParts>,
    /// Of calls that did not wait for what the other ranks publish, where these are processes.
    late: Option<LateChecks<Part>>,
    /// Where the other ranks are processes. Before what moves rows, which must not go while others still use it.
    peers: Option<PeerProcesses>,
    /// What other processes have of the caller's tensors.
    stand_ins: Arc<StandIns>,
    means: Means,
    /// For what collectives upload when they are made ready.
    setup: OnceLock<Stream>,
}

impl CudaTransport {
    /// A transport for every rank of `world`, the first on the first of `devices` and by the first of `means`.
    pub(crate) fn connect(
        world: &Arc<World>,
        devices: impl IntoIterator<Item = Device>,
        means: impl IntoIterator<Item = Means>,
    ) -> Vec<Self> {
        let (board, ready) = (Arc::new(Board::new(world)), Arc::<ReadyParts>::default());
        let devices: Arc<[Device]> = devices.into_iter().collect();
        let rank = |(rank, means): (usize, Means)| {
            let (world, board, ready) = (world.clone(), board.clone(), ready.clone());
            let (device, devices) = (devices[rank].clone(), devices.clone());
            Self::new(world, (board, ready), rank, device, devices, None, means)
        };
        (0..world.size()).zip(means).map(rank).collect()
    }

    /// The transport of the only rank of `world` in this process. All ranks call it, with the same `name`.
    pub(crate) fn connect_process(
        rendezvous: &Rendezvous,
        world: &Arc<World>,
        device: &Device,
        name: &str,
        means: Means,
    ) -> Result<Self, ExecError> {
        let peers = PeerProcesses::connect(rendezvous, world, device, name)?;
        let (world, device) = (world.clone(), device.clone());
        let heard = (peers.board().clone(), peers.ready().clone());
        Ok(Self::new(world, heard, rendezvous.rank(), device, Arc::default(), Some(peers), means))
    }

    fn new(
        world: Arc<World>,
        (board, ready): (Arc<Board<Part>>, Arc<ReadyParts>),
        rank: usize,
        device: Device,
        devices: Arc<[Device]>,
        peers: Option<PeerProcesses>,
        means: Means,
    ) -> Self {
        let late =
            peers.as_ref().map(|peers| LateChecks::new(&world, &board, rank, peers.hearing(), Part::fits));
        Self {
            world,
            board,
            rank,
            device,
            _devices: devices,
            next: AtomicU64::new(0),
            prepared: AtomicU64::new(0),
            announced: Mutex::default(),
            ready,
            late,
            peers,
            stand_ins: Arc::default(),
            means,
            setup: OnceLock::new(),
        }
    }

    /// A stream with nothing of a run on it.
    fn setup(&self) -> Result<&Stream, CudaError> {
        if let Some(setup) = self.setup.get() {
            return Ok(setup);
        }
        let made = Stream::new(&self.device, StreamPriority::Low)?;
        Ok(self.setup.get_or_init(|| made))
    }

    fn prepare(
        &self,
        place: &OpPlace,
        collective: Result<Collective, ExecError>,
        context: &CollectiveContext<'_>,
    ) -> Result<CudaCollective, ExecError> {
        self.check_policy(context.policy)?;
        let checked = collective.and_then(|collective| {
            let outputs: Vec<BufferSpec> =
                collective.tensors.iter().map(|(_, output)| context.buffers[output.0].clone()).collect();
            rows::check(&collective, &outputs).map_err(|fault| ExecError::BadCollective {
                rank: self.rank,
                collective: place.to_string(),
                reason: fault.into(),
            })?;
            let work = self
                .work(&collective, &outputs, context.policy.mover)
                .map_err(|error| exec_error(self.rank, &format!("the preparation of {place}"), error))?;
            self.collective(place, context.turn, collective, outputs, work)
        });
        // A bad part leaves the other ranks without this one: they are notified of the reason instead of being let wait.
        checked.map_err(|error| self.world.fail(error))
    }

    /// A group-reduce as [`Transport::prepare_reduce`] makes it ready, whose rows are divided by these numbers where it is a mean.
    pub(super) fn prepare_mean(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        divisors: Vec<u32>,
        context: &CollectiveContext<'_>,
    ) -> Result<CudaCollective, ExecError> {
        let collective = Collective::reduce(self.rank, self.world.size(), place, op, context);
        let divided = collective.map(|mut collective| {
            if let Some(reduction) = &mut collective.reduction {
                reduction.operands = divisors;
            }
            collective
        });
        self.prepare(place, divided, context)
    }

    /// Refuses what nothing here moves rows by.
    fn check_policy(&self, policy: &OverlapPolicy) -> Result<(), ExecError> {
        let by_library =
            matches!(self.means, Means::Exchange { .. }).then(|| RankTransport::Nccl.moves_by(policy.mover));
        if let Some(PolicySupport::Refused(reason)) = by_library {
            let (policy, reason) = (policy.to_string(), PolicyFault::Transport { reason: reason.into() });
            return Err(ExecError::Policy { rank: self.rank, policy, reason });
        }
        Ok(())
    }

    /// The others hear of its rows at once, long before they need them.
    fn collective(
        &self,
        place: &OpPlace,
        turn: Option<[u64; 2]>,
        collective: Collective,
        outputs: Vec<BufferSpec>,
        work: Work,
    ) -> Result<CudaCollective, ExecError> {
        let number = match turn {
            Some([turn, number]) => OF_TURNS | turn << TURN_BITS | number,
            None => self.prepared.fetch_add(1, Ordering::Relaxed),
        };
        let (collective, work) = (Arc::new(collective), Arc::new(work));
        let (staging, mailbox) = work.memory();
        let payload = Part { number, inputs: Vec::new(), outputs: Vec::new(), staging, mailbox, marks: None };
        let failed = |error| exec_error(self.rank, &format!("the preparation of {place}"), error);
        let at = Instant::now();
        let post = Arc::new(Post { place: place.clone(), collective: collective.clone(), at, payload });
        if let Some(peers) = &self.peers {
            peers.send_ready(&post).map_err(|error| match error {
                CallError::Exec(error) => error,
                CallError::Cuda(error) => failed(error),
            })?;
        }
        let own = |setup: &Stream| {
            let (work, setup, known) = (work.clone(), setup.clone(), self.ready.clone());
            let (rank, device) = (self.rank, self.device.clone());
            let own = Arc::new(OwnPart { rank, number, post, work, device, setup, known });
            self.ready.add(&own);
            own
        };
        // Of others nothing is gathered, and a stream more may share a hardware queue.
        let ready = work.has_lists().then(|| self.setup().map(own)).transpose().map_err(failed)?;
        Ok(CudaCollective {
            number,
            collective,
            outputs,
            marks: Mutex::new(None),
            last_calls: OnceLock::new(),
            work,
            _ready: ready,
            _departure: self.peers.as_ref().map(|peers| peers.departure(number, &self.stand_ins)),
        })
    }

    /// How rows of a collective are moved. All ranks must find the same, so it depends on what they agree on only.
    fn work(&self, collective: &Collective, outputs: &[BufferSpec], mover: Mover) -> Result<Work, CudaError> {
        let pull = || {
            rows::load(&self.device, collective, outputs)?;
            Ok(Work::Pull(Mutex::new(None)))
        };
        let by_engines = match (&self.means, mover.rules().engines) {
            (Means::Exchange { .. }, _) => false,
            (Means::Push, _) | (_, EngineCollectives::Everything) => true,
            // As `Program::validate` trusts: while a kernel waits for rows nothing else may need a multiprocessor.
            (_, EngineCollectives::PlainCasts) => {
                collective.reduction.is_none() && collective.delivery_parts.is_none()
            }
            (_, EngineCollectives::Nothing) => false,
        };
        // No copy engine rounds.
        let is_rounded =
            || collective.reduction.is_none() && collective.contract.tensors.iter().any(rows::is_rounded);
        match &self.means {
            _ if by_engines && !is_rounded() => {
                let pace = if mover.rules().in_kernels { CopyPace::WITH_KERNELS } else { CopyPace::Full };
                push::PushWork::new(&self.device, self.rank, collective, outputs, pace).map(Work::Push)
            }
            Means::Pull | Means::Push => pull(),
            Means::Link { num_sms, engines } if link::takes(collective) => {
                let place = (self.rank, self.world.size());
                LinkWork::new(self.setup()?, collective, outputs, place, (*num_sms, *engines))
                    .map(|work| Work::Link(Box::new(work)))
            }
            Means::Link { .. } => pull(),
            Means::Exchange { .. } => {
                exchange::ExchangeWork::new(self.setup()?, self.rank, collective, outputs).map(Work::Exchange)
            }
        }
    }
}

impl Drop for CudaTransport {
    /// The rank has left. Those of other processes hear it by its farewell.
    fn drop(&mut self) {
        if self.peers.is_none() {
            self.board.leave(self.rank, self.next.load(Ordering::Relaxed));
        }
    }
}

impl Transport<CudaBackend> for CudaTransport {
    type Collective = CudaCollective;
    type Pending = CudaPending;

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
        context: &CollectiveContext<'_>,
    ) -> Result<CudaCollective, ExecError> {
        self.prepare(place, Collective::cast(self.rank, self.world.size(), place, op, context), context)
    }

    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        context: &CollectiveContext<'_>,
    ) -> Result<CudaCollective, ExecError> {
        self.prepare(place, Collective::reduce(self.rank, self.world.size(), place, op, context), context)
    }

    fn prepare_fused(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        parts: &[Op],
        program: &Program,
        tables: &CudaTables,
    ) -> Result<Option<CudaCollective>, ExecError> {
        let work = match parts {
            [Op::Gemm(gemm), Op::GroupReduce(reduce)] => {
                self.gemm_reduce_work(backend, place, (gemm, reduce, None), program)
            }
            [Op::Gemm(gemm), Op::GroupReduce(reduce), Op::GroupCast(spread)] => {
                self.gemm_reduce_work(backend, place, (gemm, reduce, Some(spread)), program)
            }
            [Op::GroupCast(cast), Op::Gemm(gemm)] => {
                self.cast_gemm_work(backend, place, (cast, gemm), program)
            }
            [Op::AttentionBackward(backward), Op::GroupReduce(reduce)] => {
                self.backward_reduce_work(backend, place, (backward, reduce), (program, tables))
            }
            _ => Ok(None),
        };
        // As for every collective: the others are notified instead of being let wait.
        let work = work.map_err(|error| self.world.fail(error))?;
        work.map(|(collective, work)| self.collective(place, None, collective, Vec::new(), work)).transpose()
    }

    fn publish_memory(
        &self,
        collective: &CudaCollective,
        buffers: &[Option<CudaBuffer>],
    ) -> Result<(), ExecError> {
        let (Some(peers), Work::Link(work)) = (&self.peers, &*collective.work) else { return Ok(()) };
        let announced = collective.collective.tensors.iter();
        let announced = announced.map(|pair| buffers[work.announced(*pair).0].as_ref());
        let Some(announced) = announced.collect::<Option<Vec<_>>>() else { return Ok(()) };
        let announced: Vec<DeviceBuffer> = announced.into_iter().map(|one| one.memory().clone()).collect();
        let published = peers.publish_memory(&announced, &work.announced_to(&collective.collective.pattern));
        published.map_err(|error| match error {
            CallError::Exec(error) => error,
            CallError::Cuda(error) => exec_error(self.rank, "the memory of a collective", error),
        })
    }

    fn can_be_captured(&self, collective: &CudaCollective) -> Result<(), CaptureFault> {
        collective.can_be_captured()
    }

    fn announce(&self, call: &Call<'_>, between: u64) -> Result<(), ExecError> {
        self.report(call, self.announce_part(call, between))
    }

    fn begin(&self, call: &Call<'_>) -> Result<CudaPending, ExecError> {
        call.backend.strike(call.stream, call.place).map_err(|error| self.world.fail(error))?;
        self.late.as_ref().map_or(Ok(()), LateChecks::look)?;
        self.world.check()?;
        self.report(call, self.begin_collective(call))
    }

    fn fetch(&self, call: &Call<'_>, pending: &mut CudaPending) -> Result<(), ExecError> {
        let stood_in = &pending.as_others_see(call);
        let enqueued = match &*call.collective.work {
            // A rank has its own rows from its own tensors.
            Work::Pull(work) => self.pull(call, pending, work),
            Work::Link(work) => self.link(stood_in, pending, work),
            Work::BackwardReduce(work) => self.backward_reduce(call, pending, work),
            Work::GemmReduce(work) => self.gemm_reduce(stood_in, pending, work),
            Work::CastGemm(work) => self.cast_gemm(stood_in, pending, work),
            Work::Push(work) => self.push(stood_in, pending, work),
            Work::Exchange(work) => self.exchange(call, pending, work),
        };
        self.report(call, enqueued)
    }

    fn end(&self, call: &Call<'_>, pending: CudaPending) -> Result<(), ExecError> {
        self.report(call, self.end_collective(call, &pending))
    }
}
