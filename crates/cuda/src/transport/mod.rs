//! The CUDA transport between ranks that are threads of one process, on one GPU or several, or processes (`process`).
//!
//! A collective meets on the host while it is enqueued. *Begin*: a rank records an event "my inputs are ready, my outputs may
//! be written" and publishes it with where its tensors are. *Fetch*: once those that it takes part with have published theirs,
//! it enqueues its work: waits for their events, what moves the rows, and an event "done". *End*: it enqueues waits for the
//! events of those who have used what it published. So every event is recorded before anyone is told to wait for it, and the
//! device can never be left waiting: not on any number of hardware queues, and not when a rank fails.
//!
//! Who moves the rows is a matter of the [`TransportKind`]: their receivers by kernels that read the others' memory (`pull`),
//! their senders by copy engines (`push`), or NCCL (`exchange`). Where each rank has a GPU of its own, kernels that read or
//! write the others' memory meet by themselves (`link`). The last two need the host's meeting in the first run only.

mod cast_gemm;
mod copies;
mod engine;
mod exchange;
mod fused;
mod gemm_reduce;
mod kind;
mod levels;
mod link;
mod process;
mod pull;
mod push;
mod rows;
mod staging;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use counterpoint_exec::collective::{Board, Collective, Payload, Post, Waiter};
use counterpoint_exec::{CollectiveCall, ExecError, OpPlace, Rendezvous, Transport, World};
use counterpoint_schedule::{BufferSpec, CastGemm, GemmReduce, GroupCast, GroupReduce, Program, SpanKind};

use crate::backend::{CudaBackend, CudaBuffer, SpanStart, exec_error, lock};
use crate::kernel::LinkAbort;
use crate::nccl::NcclRank;
use crate::{CudaError, Device, DeviceBuffer, Event, Stream, StreamPriority};

pub use engine::EngineUse;
pub use kind::TransportKind;
pub(crate) use levels::Level;
pub use levels::{LevelledCollective, LevelledMeeting, LevelledTransport};
use link::LinkWork;
use process::PeerProcesses;

/// One rank of the CUDA transport.
pub struct CudaTransport {
    world: Arc<World>,
    board: Arc<Board<Part>>,
    rank: usize,
    device: Device,
    next: AtomicU64,
    prepared: AtomicU64,
    /// Where the other ranks are processes. Before what moves rows, which must not go while others still use it.
    peers: Option<PeerProcesses>,
    means: Means,
}

/// What moves the rows of one rank.
pub(crate) enum Means {
    /// Kernels that read the other ranks' memory, after events.
    Pull,
    /// Kernels of `num_sms` blocks that do so and meet by themselves, and copy engines beside them.
    Link { num_sms: u32, abort: LinkAbort, engines: EngineUse },
    /// Copy engines.
    Push,
    /// NCCL.
    Exchange(NcclRank),
}

impl Means {
    /// Kernels of a rank that meet by themselves, whose waits end when the world fails: the host may be held up by what waits
    /// behind them.
    pub(crate) fn link(
        world: &World,
        device: &Device,
        num_sms: u32,
        engines: EngineUse,
    ) -> Result<Self, CudaError> {
        let abort = LinkAbort::new(&Stream::new(device, StreamPriority::Low)?)?;
        let ended = abort.clone();
        world.when_failed(move || ended.set());
        Ok(Self::Link { num_sms, abort, engines })
    }
}

/// What a rank publishes of its part in a collective.
struct Part {
    inputs: Vec<CudaBuffer>,
    outputs: Vec<CudaBuffer>,
    /// Where others write partial results, when copy engines do.
    staging: Option<DeviceBuffer>,
    /// Where others' kernels write to, when kernels meet.
    mailbox: Option<DeviceBuffer>,
    /// Passed when the inputs may be read and the outputs be written.
    ready: Event,
    /// Passed when this rank is through with the tensors of others.
    done: Event,
}

impl Payload for Part {
    fn spent(&self) -> Self {
        // Others still wait for the events, and kernels still meet.
        let Self { mailbox, ready, done, .. } = self;
        let (mailbox, ready, done) = (mailbox.clone(), ready.clone(), done.clone());
        Self { inputs: Vec::new(), outputs: Vec::new(), staging: None, mailbox, ready, done }
    }
}

/// One rank's part in a group collective, made ready.
pub struct CudaCollective {
    /// Among those of its transport.
    number: u64,
    collective: Arc<Collective>,
    outputs: Vec<BufferSpec>,
    ready: Mutex<Option<Event>>,
    done: Mutex<Option<Event>>,
    work: Work,
}

/// How its rows are moved. What depends on the other ranks' rows is made when they first meet, and again only if those change.
enum Work {
    Pull(Mutex<Option<pull::PullWork>>),
    Link(LinkWork),
    GemmReduce(Box<gemm_reduce::GemmReduceWork>),
    CastGemm(Box<cast_gemm::CastGemmWork>),
    Push(push::PushWork),
    Exchange(exchange::ExchangeWork),
}

impl CudaCollective {
    /// Parts in which its rows are told of as they come.
    fn delivery_parts(&self) -> Option<usize> {
        self.collective.delivery_parts
    }

    /// Whether its ranks have met, where kernels or NCCL do without the host from then on.
    fn has_met(&self) -> bool {
        match &self.work {
            Work::Link(link) => link.has_met(),
            Work::GemmReduce(work) => work.has_met(),
            Work::CastGemm(work) => work.has_met(),
            Work::Exchange(exchange) => exchange.has_met(),
            Work::Pull(_) | Work::Push(_) => false,
        }
    }
}

impl CudaTransport {
    /// A transport for every rank of `world`, the first on the first of `devices` and by the first of `means`.
    pub(crate) fn connect(
        world: &Arc<World>,
        devices: impl IntoIterator<Item = Device>,
        means: impl IntoIterator<Item = Means>,
    ) -> Vec<Self> {
        let board = Arc::new(Board::new(world));
        let rank = |(rank, (device, means))| {
            let (world, board) = (world.clone(), board.clone());
            let (next, prepared) = (AtomicU64::new(0), AtomicU64::new(0));
            Self { world, board, rank, device, next, prepared, peers: None, means }
        };
        (0..world.size()).zip(devices.into_iter().zip(means)).map(rank).collect()
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
        let (world, board, device) = (world.clone(), peers.board().clone(), device.clone());
        let (next, prepared) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { world, board, rank: rendezvous.rank(), device, next, prepared, peers: Some(peers), means })
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
            let work = self
                .work(&collective, &outputs)
                .map_err(|error| exec_error(self.rank, &format!("the preparation of {place}"), error))?;
            Ok(self.collective(collective, outputs, work))
        });
        // A bad part leaves the other ranks without this one: they are told why instead of being let wait.
        checked.map_err(|error| self.world.fail(error))
    }

    fn collective(&self, collective: Collective, outputs: Vec<BufferSpec>, work: Work) -> CudaCollective {
        CudaCollective {
            number: self.prepared.fetch_add(1, Ordering::Relaxed),
            collective: Arc::new(collective),
            outputs,
            ready: Mutex::new(None),
            done: Mutex::new(None),
            work,
        }
    }

    /// How rows of a collective are moved. All ranks must find the same, so it depends on what they agree on only.
    fn work(&self, collective: &Collective, outputs: &[BufferSpec]) -> Result<Work, CudaError> {
        let pull = || {
            rows::load(&self.device, collective, outputs)?;
            Ok(Work::Pull(Mutex::new(None)))
        };
        match &self.means {
            Means::Pull => pull(),
            Means::Link { num_sms, abort, engines } if link::takes(collective) => {
                LinkWork::new(&self.device, collective, outputs, *num_sms, abort, *engines).map(Work::Link)
            }
            Means::Link { .. } => pull(),
            // No copy engine rounds.
            Means::Push
                if collective.reduction.is_none()
                    && collective.contract.tensors.iter().any(rows::is_rounded) =>
            {
                pull()
            }
            Means::Push => push::PushWork::new(&self.device, self.rank, collective, outputs).map(Work::Push),
            Means::Exchange(_) => {
                exchange::ExchangeWork::new(&self.device, self.rank, collective, outputs).map(Work::Exchange)
            }
        }
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

    fn prepare_gemm_reduce(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        op: &GemmReduce,
        program: &Program,
    ) -> Result<Option<CudaCollective>, ExecError> {
        let work = self.gemm_reduce_work(backend, place, op, program);
        // As for every collective: the others are told instead of being let wait.
        let work = work.map_err(|error| self.world.fail(error))?;
        Ok(work.map(|(collective, work)| self.collective(collective, Vec::new(), work)))
    }

    fn prepare_cast_gemm(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        op: &CastGemm,
        program: &Program,
    ) -> Result<Option<CudaCollective>, ExecError> {
        let work = self.cast_gemm_work(backend, place, op, program);
        let work = work.map_err(|error| self.world.fail(error))?;
        Ok(work.map(|(collective, work)| self.collective(collective, Vec::new(), work)))
    }

    fn begin(&self, call: &Call<'_>) -> Result<CudaMeeting, ExecError> {
        call.backend.strike(call.stream, call.place).map_err(|error| self.world.fail(error))?;
        self.world.check()?;
        self.report(call, self.begin_meeting(call))
    }

    fn fetch(&self, call: &Call<'_>, meeting: &mut CudaMeeting) -> Result<(), ExecError> {
        let enqueued = match &call.collective.work {
            Work::Pull(work) => self.pull(call, meeting, work),
            Work::Link(work) => self.link(call, meeting, work),
            Work::GemmReduce(work) => self.gemm_reduce(call, meeting, work),
            Work::CastGemm(work) => self.cast_gemm(call, meeting, work),
            Work::Push(work) => self.push(call, meeting, work),
            Work::Exchange(work) => self.exchange(call, meeting, work),
        };
        self.report(call, enqueued)
    }

    fn end(&self, call: &Call<'_>, meeting: CudaMeeting) -> Result<(), ExecError> {
        self.report(call, self.end_meeting(call, &meeting))
    }
}

type Call<'a> = CollectiveCall<'a, CudaBackend, CudaCollective>;

/// A collective that is being enqueued.
pub struct CudaMeeting {
    sequence: u64,
    /// `None` where nobody needs to know any more.
    own: Option<Arc<Post<Part>>>,
    /// Where its time is taken, when it is.
    started: Option<SpanStart>,
}

impl CudaTransport {
    fn begin_meeting(&self, call: &Call<'_>) -> Result<CudaMeeting, CallError> {
        let CollectiveCall { backend, stream, place, collective, buffers, barrier, .. } = *call;
        let queue = stream.queue();
        backend.device().bind()?;
        stream.status().begin(place);
        let started = stream.start_span(backend.timed())?;
        // Kernels that meet by themselves say themselves when they have started.
        match barrier {
            Some(barrier) if !matches!(collective.work, Work::Link(_)) => barrier.arrive(queue)?,
            _ => {}
        }
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let pattern = &collective.collective.pattern;
        if collective.has_met() {
            return Ok(CudaMeeting { sequence, own: None, started });
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
                part.mailbox = Some(link.mailbox());
                let told = link.told_of_outputs(pattern);
                if !told.is_empty() {
                    part.outputs = outputs();
                }
                told
            }
            Work::GemmReduce(work) => {
                part.mailbox = Some(work.mailbox());
                part.staging = Some(work.exchange());
                part.outputs = work.written_by_others(buffers);
                &pattern.incoming[..]
            }
            Work::CastGemm(work) => {
                part.mailbox = Some(work.mailbox());
                part.staging = Some(work.exchange());
                part.outputs = vec![work.written_by_others(buffers)];
                &pattern.outgoing[..]
            }
            Work::Exchange(_) => &[][..],
        };
        part.ready.record(queue)?;
        let post = Post {
            place: place.clone(),
            collective: collective.collective.clone(),
            at: Instant::now(),
            payload: part,
        };
        let own = self.board.publish(self.rank, sequence, post, users);
        if let Some(peers) = &self.peers {
            peers.tell(sequence, collective.number, &own)?;
        }
        Ok(CudaMeeting { sequence, own: Some(own), started })
    }

    fn end_meeting(&self, call: &Call<'_>, meeting: &CudaMeeting) -> Result<(), CallError> {
        let CollectiveCall { stream, place, collective, .. } = *call;
        match &collective.work {
            Work::Pull(_) => self.end_pull(call, meeting)?,
            Work::Push(work) => self.end_push(call, meeting, work)?,
            // Who has not learnt yet where this rank's memory is must find it told.
            Work::Link(_) | Work::GemmReduce(_) | Work::CastGemm(_) if meeting.own.is_some() => {
                self.board.all_used(&self.world, &self.waiter(call), meeting.sequence)?;
            }
            Work::Link(_) | Work::GemmReduce(_) | Work::CastGemm(_) | Work::Exchange(_) => {}
        }
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
    fn post_of(
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
    fn acknowledge(&self, peer: usize, sequence: u64) -> Result<(), ExecError> {
        self.board.acknowledge(peer, sequence, self.rank);
        match &self.peers {
            Some(peers) => peers.used(peer, sequence),
            None => Ok(()),
        }
    }

    /// A collective's event, made on its first run.
    fn event(&self, slot: &Mutex<Option<Event>>) -> Result<Event, CudaError> {
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

/// Addresses of a call's tensors.
fn addresses(call: &Call<'_>) -> (Vec<u64>, Vec<u64>) {
    let tensors = call.collective.collective.tensors.iter();
    tensors.map(|(input, output)| (call.buffers[input.0].address(), call.buffers[output.0].address())).unzip()
}

/// The error of a rank that has not told where its memory is: nothing may be enqueued then.
fn untold(rank: usize) -> CallError {
    let reason = format!("rank {rank} has not told where its memory is; this is a bug, please report it");
    CallError::Cuda(CudaError::Launch { kernel: "a product whose rows travel".to_owned(), reason })
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
