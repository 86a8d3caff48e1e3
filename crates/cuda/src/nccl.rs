//! Ranks of NCCL, threads or processes: grouped sends and receives, with a limit on every call.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::World;

use crate::backend::lock;
use crate::kernel::ElementType;
use crate::library::{Nccl, NcclConfig, NcclHandle, NcclProgress, NcclUniqueId};
use crate::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};

/// Between two looks at whether the world has failed.
const LOOK: Duration = Duration::from_millis(5);

/// `ncclUint8`: bytes, whatever they mean.
const BYTES: c_int = 1;

/// One rank's end.
pub(crate) struct NcclRank {
    nccl: &'static Nccl,
    end: Arc<End>,
    rank: usize,
    /// Ranks.
    count: usize,
    device: Device,
    world: Arc<World>,
    /// Bytes that were sent.
    sent: Arc<AtomicU64>,
}

/// NCCL's handle, until it is aborted.
struct End {
    nccl: &'static Nccl,
    device: Device,
    handle: Mutex<Option<NcclHandle>>,
}

// SAFETY: a handle may be used from any thread, by one at a time, which the lock sees to.
unsafe impl Send for End {}
// SAFETY: as above.
unsafe impl Sync for End {}

impl End {
    fn new(nccl: &'static Nccl, device: &Device, handle: NcclHandle) -> Arc<Self> {
        Arc::new(Self { nccl, device: device.clone(), handle: Mutex::new(Some(handle)) })
    }

    fn with<R>(&self, call: impl FnOnce(NcclHandle) -> Result<R, CudaError>) -> Result<R, CudaError> {
        let aborted = || CudaError::Transport { transport: "nccl", reason: "it was aborted".to_owned() };
        lock(&self.handle).ok_or_else(aborted).and_then(call)
    }

    /// Ends what is under way. Unlike ncclCommDestroy it waits for nobody, and works on a rank whose peers are gone.
    fn abort(&self) {
        let handle = lock(&self.handle).take();
        if let Some(handle) = handle
            && self.device.bind().is_ok()
        {
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

/// Bytes for or from one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NcclMessage {
    pub(crate) peer: usize,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// A collective of NCCL's own, with the elements that it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NcclCollective {
    /// Of each rank what it sends.
    AllGather,
    /// Of each rank what it receives.
    ReduceScatter,
    /// All.
    AllReduce,
}

impl NcclRank {
    /// Ranks that are threads of this process, the first on the first of `devices`, connected with each other.
    ///
    /// Their calls block, because NCCL starts a thread for each group of calls that does not, which would take longer than most
    /// exchanges. None of them waits for anyone, once the ranks are connected; connecting is left to a thread that is given up
    /// at the limit.
    ///
    /// # Errors
    /// [`CudaError::NoNccl`]; [`CudaError::Transport`] when two ranks share a GPU; NCCL's own, also when it is not ready at
    /// the limit.
    pub(crate) fn connect(devices: &[Device], world: &Arc<World>) -> Result<Vec<Self>, CudaError> {
        let limit = world.config().limit;
        if let Some(rank) = (1..devices.len()).find(|&rank| devices[..rank].contains(&devices[rank])) {
            let reason = format!(
                "rank {rank} shares {:?} with a rank before it, and NCCL wants a GPU for each; use fewer ranks, or another \
                 transport",
                devices[rank]
            );
            return Err(CudaError::Transport { transport: "nccl", reason });
        }
        let nccl = Nccl::get()?;
        never_multicast();
        let (sender, receiver) = mpsc::channel();
        let (count, devices, world) = (devices.len(), devices.to_vec(), world.clone());
        // Nobody receives any more once the limit has passed.
        thread::spawn(move || drop(sender.send(Self::connect_all(nccl, &devices, &world))));
        receiver.recv_timeout(limit).unwrap_or_else(|_| {
            let reason = format!("{count} ranks were not connected after {:.3} s", limit.as_secs_f64());
            Err(CudaError::Transport { transport: "nccl", reason })
        })
    }

    fn connect_all(
        nccl: &'static Nccl,
        devices: &[Device],
        world: &Arc<World>,
    ) -> Result<Vec<Self>, CudaError> {
        let id = unique_id(nccl)?;
        // NCCL writes them until the group has ended.
        let mut handles = vec![ptr::null_mut(); devices.len()];
        group(nccl, || {
            devices.iter().zip(&mut handles).enumerate().try_for_each(|(rank, (device, handle))| {
                device.bind()?;
                let mut config = NcclConfig::blocking();
                let count = devices.len() as c_int;
                // SAFETY: the handle is in a list that outlives the group, the configuration is copied before the call returns.
                let code =
                    unsafe { (nccl.ncclCommInitRankConfig)(handle, count, id, rank as c_int, &mut config) };
                nccl.check("ncclCommInitRankConfig", code).map(|_| ())
            })
        })?;
        let ranks = handles.into_iter().zip(devices).enumerate();
        let count = devices.len();
        let ranks = ranks.map(|(rank, (handle, device))| {
            let (end, device, world) = (End::new(nccl, device, handle), device.clone(), world.clone());
            Self { nccl, end, rank, count, device, world, sent: Arc::default() }
        });
        let ranks: Vec<Self> = ranks.collect();
        ranks.iter().try_for_each(|rank| rank.wait("ncclCommInitRankConfig"))?;
        exchange_once(nccl, ranks)
    }

    /// What all ranks that are processes need to find each other; one of them makes it. `host` as in [`NcclRank::join`].
    ///
    /// # Errors
    /// [`CudaError::NoNccl`]; NCCL's own.
    pub(crate) fn meeting(host: Option<&str>) -> Result<Vec<u8>, CudaError> {
        let nccl = Nccl::get()?;
        never_multicast();
        host_is(host);
        unique_id(nccl).map(|id| id.bytes.to_vec())
    }

    /// The rank `rank` of `world`, the only one of this process, connected with all others, which have the same `meeting`. NCCL
    /// takes ranks of different `host`s for ranks on different hosts, where one is given. What exchanges send is added to `sent`,
    /// in bytes.
    ///
    /// Calls block as those of threads do, for the same reason, and because the host stays close to the device
    /// (`ExchangeMarks`) they find room at once. Connecting is left to a thread that is given up when another rank fails, and at
    /// the limit.
    ///
    /// # Errors
    /// As [`NcclRank::connect`].
    pub(crate) fn join(
        device: &Device,
        rank: usize,
        meeting: &[u8],
        host: Option<&str>,
        world: &Arc<World>,
        sent: &Arc<AtomicU64>,
    ) -> Result<Self, CudaError> {
        let nccl = Nccl::get()?;
        never_multicast();
        host_is(host);
        let id = NcclUniqueId { bytes: std::array::from_fn(|at| meeting.get(at).copied().unwrap_or(0)) };
        let (sender, receiver) = mpsc::channel();
        let (device, for_thread, sent) = (device.clone(), world.clone(), sent.clone());
        thread::spawn(move || drop(sender.send(Self::join_one(nccl, device, rank, id, for_thread, sent))));
        let began = Instant::now();
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(joined) => return joined,
                Err(_) => go_on(world, rank, began, "the other ranks to connect")?,
            }
        }
    }

    fn join_one(
        nccl: &'static Nccl,
        device: Device,
        rank: usize,
        id: NcclUniqueId,
        world: Arc<World>,
        sent: Arc<AtomicU64>,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let count = world.size();
        let mut handle = ptr::null_mut();
        let mut config = NcclConfig::blocking();
        // SAFETY: the pointers are to locals; the handle is written and the configuration copied before the call returns.
        let code = unsafe {
            (nccl.ncclCommInitRankConfig)(&mut handle, count as c_int, id, rank as c_int, &mut config)
        };
        nccl.check("ncclCommInitRankConfig", code)?;
        let end = End::new(nccl, &device, handle);
        // A host that is held up by what waits behind an exchange could not end that.
        let ended = Arc::downgrade(&end);
        world.when_failed(move || {
            if let Some(end) = ended.upgrade() {
                end.abort();
            }
        });
        let own = Self { nccl, end, rank, count, device, world, sent };
        let mut ranks = exchange_once(nccl, vec![own])?;
        let gone = || CudaError::Transport { transport: "nccl", reason: "it has no rank here".to_owned() };
        ranks.pop().ok_or_else(gone)
    }

    /// Enqueues the sends and the receives, which may wait for each other.
    ///
    /// # Safety
    /// The messages lie in memory of this rank's device, which lives until they have been sent or received and which nobody
    /// else touches meanwhile.
    ///
    /// # Errors
    /// NCCL's own, also when it has not enqueued them at the limit.
    pub(crate) unsafe fn exchange(
        &self,
        stream: &Stream,
        sends: &[NcclMessage],
        receives: &[NcclMessage],
    ) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: the caller's promise.
        self.end
            .with(|handle| group(self.nccl, || unsafe { self.enqueue(handle, stream, sends, receives) }))?;
        let bytes = sends.iter().map(|message| message.bytes).sum();
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.wait("ncclGroupEnd")
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
    pub(crate) unsafe fn collective(
        &self,
        stream: &Stream,
        collective: NcclCollective,
        element: ElementType,
        from: u64,
        to: u64,
        count: usize,
    ) -> Result<(), CudaError> {
        /// `ncclSum`.
        const SUM: c_int = 0;
        let nccl = self.nccl;
        // `ncclFloat16` and `ncclBfloat16`.
        let kind = if element == ElementType::F16 { 6 } else { 9 };
        self.device.bind()?;
        let (from, to, queue) = (from as *const c_void, to as *mut c_void, stream.raw());
        // SAFETY: the caller's promise.
        let called = |handle: NcclHandle| unsafe {
            match collective {
                NcclCollective::AllGather => {
                    ("ncclAllGather", (nccl.ncclAllGather)(from, to, count, kind, handle, queue))
                }
                NcclCollective::ReduceScatter => {
                    ("ncclReduceScatter", (nccl.ncclReduceScatter)(from, to, count, kind, SUM, handle, queue))
                }
                NcclCollective::AllReduce => {
                    ("ncclAllReduce", (nccl.ncclAllReduce)(from, to, count, kind, SUM, handle, queue))
                }
            }
        };
        self.end.with(|handle| {
            let (name, code) = called(handle);
            nccl.check(name, code).map(|_| ())
        })
    }

    /// Waits on the host until NCCL has done what it was asked.
    fn wait(&self, call: &'static str) -> Result<(), CudaError> {
        let began = Instant::now();
        loop {
            let progress = self.end.with(|handle| {
                let mut result = 0;
                // SAFETY: the handle is alive, the pointer is to a local.
                let code = unsafe { (self.nccl.ncclCommGetAsyncError)(handle, &mut result) };
                self.nccl.check("ncclCommGetAsyncError", code)?;
                self.nccl.check(call, result)
            });
            if progress? == NcclProgress::Done {
                return Ok(());
            }
            go_on(&self.world, self.rank, began, call)?;
            thread::yield_now();
        }
    }
}

/// Whether `rank` is to wait on, for `what`, since `began`: not once another rank has failed, and not beyond the limit.
fn go_on(world: &World, rank: usize, began: Instant, what: &str) -> Result<(), CudaError> {
    let refuse = |reason| Err(CudaError::Transport { transport: "nccl", reason });
    let limit = world.config().limit;
    if let Some(error) = world.failure() {
        return refuse(format!("rank {rank} stopped to wait for {what}: {error}"));
    }
    if began.elapsed() > limit {
        return refuse(format!("rank {rank} waited {:.3} s for {what}", limit.as_secs_f64()));
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

/// Where a rank sends a few bytes from and receives them.
struct Place {
    stream: Stream,
    memory: DeviceBuffer,
}

/// Bytes of one message.
const EACH: u64 = 16;

impl Place {
    fn new(device: &Device, ranks: usize) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::High)?;
        let memory = DeviceBuffer::new(device, 2 * EACH as usize * ranks)?;
        memory.fill(&stream, 0)?;
        Ok(Self { stream, memory })
    }
}

/// Names a new group of ranks.
fn unique_id(nccl: &Nccl) -> Result<NcclUniqueId, CudaError> {
    let mut id = NcclUniqueId { bytes: [0; 128] };
    // SAFETY: the pointer is to a local.
    nccl.check("ncclGetUniqueId", unsafe { (nccl.ncclGetUniqueId)(&mut id) })?;
    Ok(id)
}

/// The ranks of this process, connected with all others.
fn exchange_once(nccl: &Nccl, ranks: Vec<NcclRank>) -> Result<Vec<NcclRank>, CudaError> {
    let places = ranks.iter().map(|rank| Place::new(&rank.device, rank.count));
    let places: Vec<Place> = places.collect::<Result<_, _>>()?;
    if let Err(error) = meet(nccl, &ranks, &places) {
        // Before the places go: freeing their memory would wait for exchanges that nobody ends.
        drop(ranks);
        return Err(error);
    }
    Ok(ranks)
}

/// Every rank sends a few bytes to every other. NCCL connects two ranks when they first exchange something, for which both
/// must call at the same time; from here on an exchange waits for no other thread.
fn meet(nccl: &Nccl, ranks: &[NcclRank], places: &[Place]) -> Result<(), CudaError> {
    group(nccl, || {
        ranks.iter().zip(places).try_for_each(|(rank, Place { stream, memory })| {
            let message = |peer: usize, half: usize| {
                let address = memory.address() + EACH * (half * rank.count + peer) as u64;
                NcclMessage { peer, address, bytes: EACH }
            };
            let others = || (0..rank.count).filter(|&peer| peer != rank.rank);
            let sends: Vec<_> = others().map(|peer| message(peer, 0)).collect();
            let receives: Vec<_> = others().map(|peer| message(peer, 1)).collect();
            rank.device.bind()?;
            // SAFETY: the messages lie in `memory`, which lives until the streams are idle or the ranks aborted.
            rank.end.with(|handle| unsafe { rank.enqueue(handle, stream, &sends, &receives) })
        })
    })?;
    ranks.iter().try_for_each(|rank| rank.wait("the first exchange"))?;
    for (rank, place) in ranks.iter().zip(places) {
        let began = Instant::now();
        while !place.stream.is_idle()? {
            go_on(&rank.world, rank.rank, began, "the first exchange")?;
            thread::yield_now();
        }
    }
    Ok(())
}

/// NCCL makes multicast objects for reductions in the switch, which sends and receives do not use and which a host may not
/// allow.
fn never_multicast() {
    decide("NCCL_NVLS_ENABLE", "0");
}

/// Ranks of one host may stand for ranks of several.
fn host_is(host: Option<&str>) {
    if let Some(host) = host {
        decide("NCCL_HOSTID", host);
    }
}

/// Sets a variable of NCCL's. Whoever has decided about it keeps their choice.
fn decide(name: &str, value: &str) {
    if std::env::var_os(name).is_none() {
        // SAFETY: before this process's first communicator, so NCCL does not read it now; this program's own reads go
        // through the standard library, which orders them.
        unsafe { std::env::set_var(name, value) };
    }
}
