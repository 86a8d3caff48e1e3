//! Ranks of NCCL, threads or processes: grouped sends and receives, with a limit on every call.

#![warn(clippy::unwrap_used)]
#![allow(unsafe_code)]

mod connect;
mod fault;
mod settings;
mod shelf;
mod sums;
mod variables;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_driver::{CudaError, Device, Event, Inside, Nccl, NcclHandle, NcclProgress, Stream};
use counterpoint_exec::World;
use counterpoint_plan::{DType, GemmCollective};

pub use connect::NcclSeat;
pub use fault::NcclFault;
pub use settings::{NcclSettingFault, NcclSettings, NcclSums};
use shelf::{Lent, Shelf};
use sums::KnownSums;
pub use sums::{NcclSum, SumSize};
pub use variables::decide_about_nccl;

/// `ncclUint8`: bytes, whatever they mean.
const BYTES: c_int = 1;

/// How long a rank's own word may take after NCCL has noticed that it is gone.
const WORD: Duration = Duration::from_secs(1);
/// Between two looks for it, and at whether the world has failed.
const LOOK: Duration = Duration::from_millis(5);

/// One rank's end. Once all ranks that are connected with it are through with their worlds, others may have them.
pub struct NcclRank {
    nccl: &'static Nccl,
    lent: Arc<Lent<Among, End>>,
    rank: usize,
    /// Ranks.
    count: usize,
    device: Device,
    world: Arc<World>,
    /// Bytes that were sent.
    sent: Arc<AtomicU64>,
    /// Passed when the last exchange that is no graph's has ended.
    last: Mutex<Option<Event>>,
}

/// Ranks that are connected and not in use. A clone is the same.
#[derive(Clone, Debug, Default)]
pub struct ConnectedRanks(Shelf<Among, End>);

/// Who is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Among {
    /// Threads of this process, a rank on each of these, with these settings.
    Devices(Vec<Device>, NcclSettings),
    /// Processes, since the connection of that number.
    Processes(u64),
}

/// NCCL's handle, until it is aborted.
struct End {
    nccl: &'static Nccl,
    device: Device,
    handle: Mutex<Option<NcclHandle>>,
    /// Of the first rank in this process, for all of them.
    known: KnownSums,
}

// SAFETY: a handle may be used from any thread, by one at a time, which the lock sees to.
unsafe impl Send for End {}
// SAFETY: as above.
unsafe impl Sync for End {}

impl End {
    fn new(nccl: &'static Nccl, device: &Device, handle: NcclHandle) -> Self {
        let (device, handle, known) = (device.clone(), Mutex::new(Some(handle)), KnownSums::default());
        Self { nccl, device, handle, known }
    }

    fn aborted() -> CudaError {
        CudaError::Transport { transport: "nccl", reason: NcclFault::Aborted.into() }
    }

    fn with<R>(&self, call: impl FnOnce(NcclHandle) -> Result<R, CudaError>) -> Result<R, CudaError> {
        lock(&self.handle).ok_or_else(Self::aborted).and_then(call)
    }

    /// Ends what is under way. Unlike ncclCommDestroy it waits for nobody, and works on a rank whose peers are gone. Whoever comes
    /// second waits for the first.
    fn abort(&self) {
        let mut handle = lock(&self.handle);
        if let Some(handle) = handle.take()
            && self.device.make_current().is_ok()
        {
            let _inside = Inside::enter();
            // SAFETY: a handle of NCCL's, which nobody else has any more.
            unsafe { (self.nccl.ncclCommAbort)(handle) };
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Every critical section only assigns, so that the data stays valid when a holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes for or from one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclMessage {
    /// The rank.
    pub peer: usize,
    /// Where they are, or will be, on this rank's device.
    pub address: u64,
    /// How many.
    pub bytes: u64,
}

/// `ncclSum`.
const SUM: c_int = 0;

impl NcclRank {
    /// Connects ranks that are threads of this process, one on each of these devices, for `world`.
    ///
    /// # Errors
    /// When there is no NCCL, or it does not connect them.
    pub fn among_threads(devices: &[Device], world: &Arc<World>) -> Result<Vec<Self>, CudaError> {
        Self::connect(&ConnectedRanks::default(), devices, world, NcclSettings::PLAIN)
    }

    /// Enqueues the sends and the receives, which may wait for each other, and behind them `ended`, unless a graph is captured.
    ///
    /// # Safety
    /// The messages lie in memory of this rank's device, which lives until they have been sent or received and which nobody
    /// else touches meanwhile.
    ///
    /// # Errors
    /// NCCL's own, also when it has not enqueued them at the limit.
    pub unsafe fn exchange(
        &self,
        stream: &Stream,
        sends: &[NcclMessage],
        receives: &[NcclMessage],
        ended: Option<&Event>,
    ) -> Result<(), CudaError> {
        let _bound = self.device.make_current()?;
        // SAFETY: the caller's promise.
        let calls = |handle| group(self.nccl, || unsafe { self.enqueue(handle, stream, sends, receives) });
        self.lent.end().with(calls).map_err(|error| explain(&self.world, self.rank, error))?;
        let others = sends.iter().filter(|message| message.peer != self.rank);
        let bytes = others.map(|message| message.bytes).sum();
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.enqueued(stream, ended)
    }

    /// Waits on the host until NCCL has enqueued what it was given, and records `ended` behind it.
    fn enqueued(&self, stream: &Stream, ended: Option<&Event>) -> Result<(), CudaError> {
        self.wait("ncclGroupEnd")?;
        if let Some(ended) = ended {
            ended.record(stream)?;
            *lock(&self.last) = Some(ended.clone());
        }
        Ok(())
    }

    /// # Safety
    /// As [`NcclRank::exchange`].
    unsafe fn enqueue(
        &self,
        handle: NcclHandle,
        stream: &Stream,
        sends: &[NcclMessage],
        receives: &[NcclMessage],
    ) -> Result<(), CudaError> {
        let nccl = self.nccl;
        for &NcclMessage { peer, address, bytes } in sends {
            // SAFETY: the caller's promise.
            let code = unsafe {
                (nccl.ncclSend)(address as _, bytes as usize, BYTES, peer as c_int, handle, stream.raw())
            };
            nccl.check("ncclSend", code)?;
        }
        for &NcclMessage { peer, address, bytes } in receives {
            // SAFETY: the caller's promise.
            let code = unsafe {
                (nccl.ncclRecv)(address as _, bytes as usize, BYTES, peer as c_int, handle, stream.raw())
            };
            nccl.check("ncclRecv", code)?;
        }
        Ok(())
    }

    /// Enqueues one of NCCL's own collectives on elements of a type: what others measure themselves against. All ranks call it,
    /// each from a thread of its own.
    ///
    /// # Safety
    /// `from` and `to` are addresses of what the collective reads and writes in memory of this rank's device, which lives until
    /// it has ended and which nobody else touches meanwhile.
    ///
    /// # Errors
    /// NCCL's own.
    pub unsafe fn collective(
        &self,
        stream: &Stream,
        collective: GemmCollective,
        element: DType,
        from: u64,
        to: u64,
        count: usize,
    ) -> Result<(), CudaError> {
        let nccl = self.nccl;
        // `ncclFloat16` and what follows.
        let kind = match element {
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::Bf16 => 9,
        };
        let _bound = self.device.make_current()?;
        let (from, to, queue) = (from as *const c_void, to as *mut c_void, stream.raw());
        // SAFETY: the caller's promise.
        let called = |handle: NcclHandle| unsafe {
            match collective {
                GemmCollective::AllGather => {
                    ("ncclAllGather", (nccl.ncclAllGather)(from, to, count, kind, handle, queue))
                }
                GemmCollective::ReduceScatter => {
                    ("ncclReduceScatter", (nccl.ncclReduceScatter)(from, to, count, kind, SUM, handle, queue))
                }
                GemmCollective::AllReduce => {
                    ("ncclAllReduce", (nccl.ncclAllReduce)(from, to, count, kind, SUM, handle, queue))
                }
            }
        };
        self.lent.end().with(|handle| {
            let (name, code) = called(handle);
            nccl.check(name, code).map(|_| ())
        })
    }

    /// Waits on the host until NCCL has done what it was asked.
    fn wait(&self, call: &'static str) -> Result<(), CudaError> {
        let began = Instant::now();
        loop {
            let progress = self.lent.end().with(|handle| {
                let mut result = 0;
                // SAFETY: the handle is alive, the pointer is to a local.
                let code = unsafe { (self.nccl.ncclCommGetAsyncError)(handle, &mut result) };
                self.nccl.check("ncclCommGetAsyncError", code)?;
                self.nccl.check(call, result)
            });
            if progress.map_err(|error| explain(&self.world, self.rank, error))? == NcclProgress::Done {
                return Ok(());
            }
            go_on(&self.world, self.rank, began, call)?;
            thread::yield_now();
        }
    }

    /// Whether the next world may have this end: nothing is under way that only its abort would end.
    fn is_through(&self) -> bool {
        let is_done = |last: &Event| matches!(last.is_done(), Ok(true));
        !thread::panicking() && !self.world.has_failed() && lock(&self.last).as_ref().is_none_or(is_done)
    }

    /// Ends what is under way, and lets no other world have ranks that are connected with this one.
    fn spoil(&self) {
        self.lent.spoil();
        self.lent.end().abort();
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        if !self.is_through() {
            self.spoil();
        }
    }
}

/// The error of a call that NCCL refuses to `rank`. Where a rank that is a process has gone, NCCL may notice it before what that rank
/// said has come here, and does not know why.
fn explain(world: &World, rank: usize, error: CudaError) -> CudaError {
    let began = Instant::now();
    while !world.has_failed() && began.elapsed() < WORD {
        thread::sleep(LOOK);
    }
    world.failure().map_or(error, |failure| {
        let reason = NcclFault::NoExchange { rank, failure: failure.into() }.into();
        CudaError::Transport { transport: "nccl", reason }
    })
}

/// Whether `rank` is to wait on, for `what`, since `began`: not once another rank has failed, and not beyond the limit.
fn go_on(world: &World, rank: usize, began: Instant, what: &str) -> Result<(), CudaError> {
    let refuse = |fault: NcclFault| Err(CudaError::Transport { transport: "nccl", reason: fault.into() });
    let what = || what.to_owned();
    let limit = world.config().limit;
    if let Some(failure) = world.failure() {
        return refuse(NcclFault::Stopped { rank, what: what(), failure: failure.into() });
    }
    if began.elapsed() > limit {
        return refuse(NcclFault::WaitedFor { rank, what: what(), limit });
    }
    Ok(())
}

/// Calls of a group, begun together. Closed in any case: an open group would swallow this thread's calls from then on.
fn group<R>(nccl: &Nccl, calls: impl FnOnce() -> Result<R, CudaError>) -> Result<R, CudaError> {
    // SAFETY: neither takes anything.
    nccl.check("ncclGroupStart", unsafe { (nccl.ncclGroupStart)() })?;
    let called = calls();
    // SAFETY: as above.
    let ended = nccl.check("ncclGroupEnd", unsafe { (nccl.ncclGroupEnd)() });
    let result = called?;
    ended.map(|_| result)
}
