//! GPUs: their contexts, memory in all, and what belongs to one world on one of them.

mod capture_mode;
mod memory;
mod peers;
mod properties;

use std::fmt;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use cudarc::driver::sys::{CUcontext, CUdevice};

use peers::PeerAccess;
use properties::{handle, properties};

pub use memory::MemoryUse;
pub use properties::DeviceProperties;

use crate::CudaError;
use crate::arch::{Arch, Capability};
use crate::guards::Guards;
use crate::host_records::HostRecords;
use crate::inside::{self, Inside};
use crate::library::{Driver, call};
use crate::loaded_kernels::LoadedKernels;
use crate::pool::{Lender, MemoryPool};
use crate::spare_events::SpareEvents;
use crate::stream_ends::{GivenWork, StreamEnds};

/// One GPU and its primary context, which is the one that PyTorch and the runtime API use too, and the kernels that are
/// picked for it. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    primary: Arc<Primary>,
    arch: Arch,
    peers: PeerAccess,
    /// Of what is made by this handle and its clones.
    scope: Arc<Scope>,
}

/// What belongs to one world on one device.
struct Scope {
    primary: Arc<Primary>,
    /// See [`Device::release_nothing`].
    kept: AtomicBool,
    /// What its kernels leave for the host.
    records: HostRecords,
    pool: Arc<MemoryPool>,
    events: SpareEvents,
    /// Of waits among the CTAs of a launch, in nanoseconds.
    wait_limit: AtomicU64,
}

/// Of waits among the CTAs of a launch, where nobody says another.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A device's context as the calling thread's current one. When this goes, the one before is current again: PyTorch, which may
/// have called, keeps its current device there.
#[must_use = "the context is current only as long as this lives"]
pub struct Current {
    _bound: Bound,
}

/// The same, with the driver's functions.
#[must_use = "the context is current only as long as this lives"]
pub(crate) struct Bound {
    driver: &'static Driver,
    /// `None` where the context was current already.
    before: Option<CUcontext>,
}

impl Deref for Bound {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        self.driver
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread, or null. An error is of no use here: the next entry binds its own.
            unsafe { (self.driver.cuCtxSetCurrent)(before) };
        }
    }
}

struct Primary {
    driver: &'static Driver,
    ordinal: usize,
    handle: CUdevice,
    context: CUcontext,
    properties: DeviceProperties,
    kernels: LoadedKernels,
    guards: Guards,
    streams: StreamEnds,
    pools: Mutex<Vec<Weak<MemoryPool>>>,
    // Those whose kernels and copies reach its memory.
    peers: Mutex<Vec<Weak<Primary>>>,
    // The first error of releasing something, for which Drop has no result to put it in.
    release_error: Mutex<Option<CudaError>>,
    // Whether something of it was never released, which the context must outlive.
    kept: AtomicBool,
}

// SAFETY: a context may be used from any thread; the handles are never changed.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Device {
    /// How many GPUs this process sees. At least one: none at all is [`CudaError::NoDevice`].
    ///
    /// # Errors
    /// When there is no driver or no GPU.
    pub fn count() -> Result<usize, CudaError> {
        let mut count = 0;
        let driver = Driver::get()?;
        // SAFETY: the pointer is to a local of the right type.
        unsafe { call!(driver, cuDeviceGetCount(&mut count)) }?;
        match usize::try_from(count).unwrap_or(0) {
            0 => Err(CudaError::NoDevice { text: "it counts 0 devices".to_owned() }),
            count => Ok(count),
        }
    }

    /// The newest CUDA version that the driver supports, such as (13, 0).
    ///
    /// # Errors
    /// When there is no driver or no GPU.
    pub fn driver_version() -> Result<(u32, u32), CudaError> {
        Driver::get()?.version()
    }

    /// What does not change about a GPU, without making a context on it.
    ///
    /// # Errors
    /// When there is no such GPU.
    pub fn properties_of(ordinal: usize) -> Result<DeviceProperties, CudaError> {
        let driver = Driver::get()?;
        properties(driver, handle(driver, ordinal)?)
    }

    /// The GPU with this number, counted from 0 among those that `CUDA_VISIBLE_DEVICES` leaves.
    ///
    /// While one is open, opening it again gives the same: its kernels are loaded once.
    ///
    /// # Errors
    /// When there is no such GPU, or it cannot be used.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        static OPEN: Mutex<Vec<Weak<Primary>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|primary| primary.strong_count() > 0);
        let same = open.iter().filter_map(Weak::upgrade).find(|primary| primary.ordinal == ordinal);
        if let Some(primary) = same {
            return Ok(Self::of(primary));
        }
        let device = Self::retain(ordinal)?;
        open.push(Arc::downgrade(&device.primary));
        Ok(device)
    }

    fn retain(ordinal: usize) -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        let handle = handle(driver, ordinal)?;
        let properties = properties(driver, handle)?;
        let mut context = ptr::null_mut();
        // SAFETY: the handle is the driver's; the retained context is released in drop.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&mut context, handle)) }?;
        let primary = Primary {
            driver,
            ordinal,
            handle,
            context,
            properties,
            kernels: LoadedKernels::default(),
            guards: Guards::default(),
            streams: StreamEnds::default(),
            pools: Mutex::default(),
            peers: Mutex::default(),
            release_error: Mutex::new(None),
            kept: AtomicBool::new(false),
        };
        Ok(Self::of(Arc::new(primary)))
    }

    fn of(primary: Arc<Primary>) -> Self {
        let arch = Arch::of(primary.properties.capability);
        Self { scope: Arc::new(Scope::new(&primary, None)), primary, arch, peers: PeerAccess::AsTheyDo }
    }

    /// The same GPU for one world: when that fails, what was made for it is kept until the process ends, and what was made for others
    /// is not.
    #[must_use]
    pub fn for_world(&self) -> Self {
        self.for_world_of(None)
    }

    /// The same, with the lender's memory where there is one. No other process may open that.
    #[must_use]
    pub fn for_world_of(&self, lender: Option<&Arc<Lender>>) -> Self {
        Self { scope: Arc::new(Scope::new(&self.primary, lender.cloned())), ..self.clone() }
    }

    /// The number that it was opened with.
    pub fn ordinal(&self) -> usize {
        self.primary.ordinal
    }

    /// What does not change about it.
    pub fn properties(&self) -> &DeviceProperties {
        &self.primary.properties
    }

    /// Compute capability.
    pub fn capability(&self) -> Capability {
        self.primary.properties.capability
    }

    /// What kernels are compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The same GPU with the portable kernels, where it would have those of its own architecture: to test and to measure
    /// the one against the other.
    #[must_use]
    pub fn portable(&self) -> Self {
        Self { arch: Arch::portable(self.capability()), ..self.clone() }
    }

    /// The same GPU, whose memory no other reaches and which reaches no other's: to test what becomes of transports.
    #[must_use]
    pub fn isolated(&self) -> Self {
        Self { peers: PeerAccess::Refused, ..self.clone() }
    }

    /// Streaming multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.primary.properties.sm_count
    }

    /// Waits until everything that was ever enqueued on this device has finished.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let driver = self.bind()?;
        // SAFETY: the context is current.
        unsafe { call!(driver, cuCtxSynchronize()) }
    }

    /// Makes this device's context the calling thread's current one, as `cuCtxSetCurrent`, until the guard goes: for calls of other
    /// libraries. The functions of this crate do so by themselves.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn make_current(&self) -> Result<Current, CudaError> {
        self.bind().map(|bound| Current { _bound: bound })
    }

    /// Leaves this device's context to a thread that has none, as CUDA's runtime does at a thread's first launch: each entry would else
    /// set it and take it back, which on an H200's host takes 10 us. Only where the process's runtime keeps the context, as PyTorch's
    /// does. A GPU that is not the runtime's first is left to nobody: it would become the thread's current one.
    pub fn leave_current(&self) {
        if self.primary.ordinal == 0
            && let Ok(mut bound) = self.bind()
            && bound.before.is_some_and(|before| before.is_null())
        {
            bound.before = None;
        }
    }

    /// As [`Device::make_current`], for calls of the driver.
    pub(crate) fn bind(&self) -> Result<Bound, CudaError> {
        self.primary.bind()
    }

    /// Memory that was made by this handle and its clones and that nobody has.
    pub(crate) fn pool(&self) -> &MemoryPool {
        &self.scope.pool
    }

    /// Events that were made by this handle and its clones and that nobody has.
    pub(crate) fn spare_events(&self) -> &SpareEvents {
        &self.scope.events
    }

    /// All that the streams of this GPU have been given so far, to see it end. `None` while one of them captures.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn given_work(&self) -> Result<Option<GivenWork>, CudaError> {
        self.stream_ends().given(&*self.bind()?)
    }

    /// Whether what streams of this GPU had been given has ended; never sleeps.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn has_ended(&self, work: &mut GivenWork) -> Result<bool, CudaError> {
        work.has_ended(&*self.bind()?)
    }

    /// The streams of this GPU.
    pub(crate) fn stream_ends(&self) -> &StreamEnds {
        &self.primary.streams
    }

    /// Where kernels that were made by this handle and its clones leave records for the host.
    pub(crate) fn host_records(&self) -> &HostRecords {
        &self.scope.records
    }

    /// Ends all waits of kernels that were made by this handle and its clones, those that have not begun too.
    pub fn stop_waits(&self) {
        self.scope.records.stop();
    }

    /// Whether the waits of its kernels were called off, or one gave up. Asks no stream, and reads one word.
    pub fn waits_have_ended(&self) -> bool {
        self.scope.records.is_stopped()
    }

    /// How long CTAs of one launch wait for each other.
    pub fn wait_limit(&self) -> Duration {
        Duration::from_nanos(self.scope.wait_limit.load(Ordering::Relaxed))
    }

    /// The same for kernels that are made from now on.
    pub fn set_wait_limit(&self, limit: Duration) {
        let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.scope.wait_limit.store(nanoseconds, Ordering::Relaxed);
    }

    /// The first error that freeing memory or destroying a stream, event, module or graph of this device met since this
    /// was last called. Most often it is the error of a kernel that ran before.
    pub fn take_release_error(&self) -> Option<CudaError> {
        self.primary.release_error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// From now on nothing that was made by this handle and its clones is released: that waits for what is enqueued, which may wait
    /// for an event of a process that is gone. What is kept ends with this process. Other handles go on
    /// ([`Device::for_world`]).
    pub fn release_nothing(&self) {
        self.scope.kept.store(true, Ordering::Relaxed);
        self.primary.kept.store(true, Ordering::Relaxed);
        inside::leave_waiting();
    }

    /// Releases something in a drop, where an error can only be kept for later.
    pub(crate) fn release(&self, release: impl FnOnce(&Driver) -> Result<(), CudaError>) {
        if !self.scope.kept.load(Ordering::Relaxed) {
            self.primary.release(release);
        }
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> CUdevice {
        self.primary.handle
    }

    /// Its primary context.
    pub(crate) fn context(&self) -> CUcontext {
        self.primary.context
    }

    /// Who watches the memory around its buffers.
    pub(crate) fn guards(&self) -> &Guards {
        &self.primary.guards
    }

    /// The kernels that are loaded on it.
    pub(crate) fn kernels(&self) -> &LoadedKernels {
        &self.primary.kernels
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.primary.context == other.primary.context
    }
}

impl Eq for Device {}

impl fmt::Display for Device {
    /// Its number and name, for people.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GPU {} ({})", self.primary.ordinal, self.primary.properties.name)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Device({}, {})", self.primary.ordinal, self.primary.properties.name)
    }
}

impl Primary {
    fn bind(&self) -> Result<Bound, CudaError> {
        let Self { driver, context, .. } = *self;
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe { call!(driver, cuCtxGetCurrent(&mut current)) }?;
        if current == context {
            return Ok(Bound { driver, before: None });
        }
        // SAFETY: the context is retained as long as this value lives.
        unsafe { call!(driver, cuCtxSetCurrent(context)) }?;
        Ok(Bound { driver, before: Some(current) })
    }

    fn release(&self, release: impl FnOnce(&Driver) -> Result<(), CudaError>) {
        if let Err(error) = self.bind().and_then(|driver| release(&driver)) {
            self.release_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

impl Scope {
    fn new(primary: &Arc<Primary>, lender: Option<Arc<Lender>>) -> Self {
        let pool = Arc::new(MemoryPool::new(lender));
        let mut pools = primary.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(&pool));
        Self {
            pool,
            primary: primary.clone(),
            kept: AtomicBool::new(false),
            records: HostRecords::default(),
            events: SpareEvents::default(),
            wait_limit: AtomicU64::new(WAIT_LIMIT.as_nanos() as u64),
        }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Relaxed) {
            // It waits for the device, on a thread that listened to another rank maybe, for which nobody waits.
            let _inside = Inside::enter();
            // Who still had a buffer or a stream of it, had this scope.
            self.primary.release(|driver| {
                let users = || self.primary.wait_for_users();
                if self.primary.kept.load(Ordering::Relaxed) {
                    // The driver's own functions that free memory wait as well.
                    users()?;
                }
                let memory = self.records.free(driver).and(self.pool.free_all(driver, users));
                memory.and(self.events.free(driver))
            });
        }
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        if self.kept.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: it was retained when this was made. Errors are of no use here: without a current context nothing can be
        // unloaded, and a context that stays alive until the process ends harms nobody.
        unsafe {
            if (self.driver.cuCtxSetCurrent)(self.context) == 0 {
                self.kernels.unload(self.driver);
            }
            (self.driver.cuDevicePrimaryCtxRelease_v2)(self.handle);
        }
    }
}
