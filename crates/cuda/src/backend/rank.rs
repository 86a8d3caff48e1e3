//! What a rank is made of, and how its operations are enqueued.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use counterpoint_exec::{ExecError, OpPlace, RunTimes, World};
use counterpoint_schedule::{Program, SignalId, SpanKind, WorkerShare};

use super::clock::{Clock, RunClock};
use super::counter_waits::CounterWaits;
use super::exchange_marks::{ExchangeMarks, LastCalls};
use super::ranges::NvtxRanges;
use super::row_lists::{RowLists, UnsentLists};
use super::start_gate::{StartGate, StartPace};
use super::{CudaStream, PlainProducts, Timing, exec_error};
use crate::kernel::{CtaWaits, GemmLibrary, LinkEnd, UserKernelSource};
use crate::sync::lock;
use crate::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};
use counterpoint_driver::Partition;

/// What computes besides this crate's kernels.
#[derive(Clone, Debug, Default)]
pub(crate) struct OtherKernels {
    /// Users' own, by name.
    pub(crate) users: Arc<HashMap<String, UserKernelSource>>,
    pub(crate) plain_products: PlainProducts,
}

/// One rank of the CUDA backend.
#[derive(Clone)]
pub struct CudaBackend(
    pub(crate) Arc<Rank>,
    /// The rank's stream for uploads; one that gathers them while something is made ready.
    Stream,
    /// Lists among what it gathers.
    UnsentLists,
);

pub(crate) struct Rank {
    pub(crate) world: Arc<World>,
    pub(crate) rank: usize,
    pub(crate) device: Device,
    /// For uploads and downloads; nothing of a run is on it.
    pub(crate) setup: Stream,
    pub(crate) timing: Timing,
    pub(crate) clock: Arc<Clock>,
    pub(crate) run: Mutex<Option<RunClock>>,
    /// A graph takes no times, and what is captured does not run now.
    pub(crate) capturing: AtomicBool,
    /// Which times the run takes that is being enqueued.
    pub(crate) times: Mutex<RunTimes>,
    /// Waits on the device that may have given up, with their operations' labels.
    pub(crate) waits: Mutex<Vec<(String, CtaWaits)>>,
    /// Likewise waits of streams for kernels.
    pub(super) counters: Mutex<Vec<CounterWaits>>,
    /// Likewise waits of kernels for other ranks.
    pub(crate) links: Mutex<Vec<(String, Arc<LinkEnd>)>>,
    /// And exchanges by other means, which have no limit on the device.
    pub(crate) exchanges: Mutex<Vec<Arc<ExchangeMarks>>>,
    pub(super) last_calls: Mutex<LastCalls>,
    /// Multiprocessors of communication and of computation, of the policies that part them, by the number of the former.
    pub(crate) partition: Mutex<Vec<(usize, Arc<Partition>)>>,
    /// Multiprocessors that computation leaves to communication; 0 where the policy says nothing of it.
    pub(crate) margin: AtomicU32,
    pub(crate) others: OtherKernels,
    /// Opened by the first product that is its.
    pub(crate) library: Mutex<Option<GemmLibrary>>,
    /// Zeros for all who need some, as many as someone has needed.
    pub(crate) zeros: Mutex<Option<DeviceBuffer>>,
    /// Lists of rows that passes share.
    pub(super) lists: RowLists,
    /// What faults strike: the Program that runs, and how many runs there were.
    pub(crate) program: Mutex<(String, u64)>,
    pub(crate) start_gate: StartGate,
    /// Who is notified of what is enqueued, where a profiler is attached.
    pub(super) ranges: Option<Arc<NvtxRanges>>,
    /// Streams of the caller.
    pub(crate) borrowed: Mutex<Vec<Arc<CudaStream>>>,
    waiting_margin: OnceLock<usize>,
}

impl CudaBackend {
    pub(crate) fn new(
        world: &Arc<World>,
        rank: usize,
        device: &Device,
        timing: Timing,
        clock: Arc<Clock>,
        others: OtherKernels,
        pace: Arc<StartPace>,
    ) -> Result<Self, ExecError> {
        device.set_wait_limit(world.config().limit);
        // The host may be held up by what waits behind kernels.
        let failed = device.clone();
        world.when_failed(move || failed.stop_waits());
        let setup = Stream::new(device, StreamPriority::High)
            .map_err(|error| exec_error(rank, "the start of a rank", error))?;
        let rank = Arc::new(Rank {
            world: world.clone(),
            rank,
            device: device.clone(),
            setup: setup.clone(),
            timing,
            clock,
            run: Mutex::new(None),
            capturing: AtomicBool::new(false),
            times: Mutex::default(),
            waits: Mutex::default(),
            counters: Mutex::default(),
            links: Mutex::default(),
            exchanges: Mutex::default(),
            last_calls: Mutex::default(),
            partition: Mutex::default(),
            margin: AtomicU32::new(0),
            others,
            library: Mutex::default(),
            zeros: Mutex::default(),
            lists: RowLists::default(),
            program: Mutex::default(),
            start_gate: StartGate::new(pace),
            ranges: NvtxRanges::of_process(),
            borrowed: Mutex::default(),
            waiting_margin: OnceLock::new(),
        });
        Ok(Self(rank, setup, UnsentLists::default()))
    }

    /// Lets products wait for rows themselves where they leave so many multiprocessors to the collectives that bring them. Not where ranks share a
    /// GPU, whose products would hold all of it together.
    pub(crate) fn let_products_wait(&self, leaving: usize) {
        // The first one counts.
        let _ = self.0.waiting_margin.set(leaving);
    }

    /// Whether products of a Program wait for rows themselves.
    pub(super) fn waits_inside(&self, program: &Program) -> bool {
        let Some(&needed) = self.0.waiting_margin.get() else { return false };
        let left = match program.policy.workers {
            WorkerShare::Margin(workers) | WorkerShare::Partition(workers) => workers,
            WorkerShare::Common => 0,
        };
        // Copy engines take none, and who says that they are through is one thread.
        let needed = if program.policy.moves_by_engines() { 1 } else { needed.max(1) };
        self.0.device.arch().is_hopper() && left >= needed
    }

    /// The highest value of a signal for which products of a Program wait themselves; `None` where none do.
    pub(super) fn awaited_inside(&self, program: &Program, signal: SignalId) -> Option<u64> {
        let arrivals = program.ops.iter().filter_map(|op| op.op.arrivals());
        let of_signal = arrivals.filter(|arrivals| arrivals.signal == signal && self.waits_inside(program));
        of_signal.flat_map(|arrivals| arrivals.values.iter().copied()).max()
    }

    /// What the ranks share.
    pub fn world(&self) -> &Arc<World> {
        &self.0.world
    }

    /// The rank's device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// A stream with nothing of a run on it, for uploads that are waited for, here or when all that is made ready has been gathered.
    pub fn setup(&self) -> &Stream {
        &self.1
    }

    /// The same rank, by a handle that gathers uploads.
    pub(crate) fn with_gathered_uploads(&self) -> Self {
        Self(self.0.clone(), self.0.setup.gathering(), UnsentLists::default())
    }

    /// Lists of rows that passes share, and those that this handle makes.
    pub(super) fn lists(&self) -> (&RowLists, &UnsentLists) {
        (&self.0.lists, &self.2)
    }

    /// What this handle has gathered has been sent: others may use its lists.
    pub(super) fn publish_lists(&self) {
        self.0.lists.add(&self.2);
    }

    /// cuBLASLt on this device, where plain products are its.
    pub(crate) fn library(&self) -> Result<Option<GemmLibrary>, CudaError> {
        if self.0.others.plain_products == PlainProducts::Ours {
            return Ok(None);
        }
        let mut library = lock(&self.0.library);
        if library.is_none() {
            *library = Some(GemmLibrary::open(self.device())?);
        }
        Ok(library.clone())
    }

    /// At least so many bytes of zeros, which nobody writes. Waits for the device where there were not as many before.
    pub(crate) fn zeros(&self, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        let mut zeros = lock(&self.0.zeros);
        if let Some(zeros) = zeros.as_ref().filter(|zeros| zeros.len() >= bytes) {
            return Ok(zeros.clone());
        }
        let made = DeviceBuffer::new(self.device(), bytes)?;
        made.fill(&self.0.setup, 0)?;
        self.0.setup.synchronize()?;
        Ok(zeros.insert(made).clone())
    }

    /// A kernel that a user has given the machine.
    pub(crate) fn user_kernel(&self, name: &str) -> Option<&UserKernelSource> {
        self.0.others.users.get(name)
    }

    /// Whether operations take times.
    pub(crate) fn timed(&self) -> bool {
        self.takes_times() && *lock(&self.0.times) == RunTimes::Operations
    }

    /// Whether the time of a whole run is taken instead.
    pub(crate) fn times_whole_runs(&self) -> bool {
        self.takes_times() && *lock(&self.0.times) == RunTimes::Whole
    }

    pub(crate) fn takes_times(&self) -> bool {
        self.0.timing == Timing::Spans && !self.is_capturing() && *lock(&self.0.times) != RunTimes::Nothing
    }

    /// Multiprocessors that the policy leaves to communication. A kernel that takes more holds up the computation after it, whose
    /// blocks all want to start at once.
    pub(crate) fn left_to_communication(&self) -> Option<u32> {
        Some(self.0.margin.load(Ordering::Relaxed)).filter(|margin| *margin > 0)
    }

    /// Whether operations go into a graph instead of running.
    pub(crate) fn is_capturing(&self) -> bool {
        self.0.capturing.load(Ordering::Relaxed)
    }

    /// An error of the driver as one of this rank, at a place of a run.
    pub fn error(&self, place: &dyn std::fmt::Display, error: CudaError) -> ExecError {
        exec_error(self.0.rank, &place.to_string(), error)
    }

    /// Lets injected faults strike an operation that is about to be enqueued on `stream`.
    pub(crate) fn strike(&self, stream: &CudaStream, place: &OpPlace) -> Result<(), ExecError> {
        let Rank { world, rank, program, .. } = &*self.0;
        if world.config().faults.is_empty() {
            return Ok(());
        }
        let (name, runs) = lock(program).clone();
        // Those who wait for this rank meanwhile ask what it does.
        stream.status().begin(place);
        world.strike(*rank, &name, place, runs)
    }

    /// Enqueues an operation; a failed world takes none.
    pub(crate) fn enqueue(
        &self,
        stream: &CudaStream,
        place: &OpPlace,
        kind: SpanKind,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<(), ExecError> {
        self.strike(stream, place)?;
        self.0.world.check()?;
        // This thread may be new to the device, and a launcher that encodes a tensor map needs a current context.
        let _bound = self.0.device.make_current().map_err(|error| self.error(place, error))?;
        stream.enqueue(place, kind, self.timed(), work).map_err(|error| self.error(place, error))
    }
}
