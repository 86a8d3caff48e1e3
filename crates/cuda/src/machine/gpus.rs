//! The GPUs of this process, whose ranks are its threads.

use std::sync::Arc;

use counterpoint_choose::{LinearMachine, Offered};
use counterpoint_cost::{MachineProfile, WorkerSharing};
use counterpoint_exec::{ElementTypes, Ends, ExecError, Machine, World, check_memory};
use counterpoint_plan::{DType, Topology};

use super::lender::lender;
use crate::backend::clock::Clock;
use crate::backend::rank::OtherKernels;
use crate::backend::{CudaBackend, PlainProducts, Timing, exec_error};
use crate::kernel::{LINK_BLOCKS, LINK_RANKS, UserKernelSource};
use crate::transport::Means;
use crate::{CudaError, CudaTransport, Device, EngineUse, TransportFault, TransportKind, compiler_version};
use counterpoint_driver::{DeviceAllocator, Lender};
use counterpoint_nccl::{ConnectedRanks, NcclRank};

/// The GPUs of this process. Ranks are dealt out to them in turn: on one GPU they share it.
#[derive(Clone, Debug)]
pub struct CudaMachine {
    devices: Vec<Device>,
    timing: Timing,
    /// Never [`TransportKind::Auto`].
    transport: TransportKind,
    num_sms: u32,
    engines: EngineUse,
    others: OtherKernels,
    /// Of NCCL, for the next world: shared by the clones of a machine.
    connected: ConnectedRanks,
    /// Whose memory ranks have, where not the driver's.
    lender: Option<Arc<Lender>>,
}

/// Multiprocessors that a kernel of the transport takes, by default.
pub(super) const NUM_SMS: u32 = 16;

/// What CUDA transports take.
pub(super) const ELEMENT_TYPES: ElementTypes =
    ElementTypes { tensors: &[DType::F32, DType::Bf16, DType::F16], sums: &[DType::F32] };

impl CudaMachine {
    /// These devices, whose ranks exchange rows in the way that suits them.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`] when there is no compiler for the kernels; the driver's refusal.
    ///
    /// # Panics
    /// When there is no device.
    pub fn new(devices: Vec<Device>, timing: Timing) -> Result<Self, CudaError> {
        assert!(!devices.is_empty(), "a machine has a device");
        compiler_version()?;
        let (transport, engines, others) = (TransportKind::Auto, EngineUse::NEVER, OtherKernels::default());
        let connected = ConnectedRanks::default();
        Self { devices, timing, transport, num_sms: NUM_SMS, engines, others, connected, lender: None }
            .with_transport(TransportKind::Auto)
    }

    /// All ranks on the first GPU.
    ///
    /// # Errors
    /// When there is no driver, GPU or compiler.
    pub fn open(timing: Timing) -> Result<Self, CudaError> {
        Self::new(vec![Device::open(0)?], timing)
    }

    /// A GPU for each of `ranks` ranks, or all that this process sees when there are fewer.
    ///
    /// # Errors
    /// When there is no driver, GPU or compiler.
    pub fn for_ranks(ranks: usize, timing: Timing) -> Result<Self, CudaError> {
        let count = Device::count()?.min(ranks.max(1));
        Self::new((0..count).map(Device::open).collect::<Result<_, _>>()?, timing)
    }

    /// The same with another transport.
    ///
    /// # Errors
    /// [`CudaError::NoPeerAccess`] when GPUs do not reach each other's memory and the transport needs it.
    pub fn with_transport(mut self, transport: TransportKind) -> Result<Self, CudaError> {
        self.engines = if transport == TransportKind::Auto { EngineUse::H200 } else { EngineUse::NEVER };
        self.transport = match (transport, self.reach_each_other()) {
            (TransportKind::Hierarchical(_), _) => {
                let reason = TransportFault::OfProcesses.into();
                return Err(CudaError::Transport { transport: transport.name(), reason });
            }
            (kind @ TransportKind::Nccl(_), _) => kind,
            (TransportKind::Auto, Err(CudaError::NoPeerAccess { .. })) => TransportKind::NCCL,
            (_, Err(error)) => return Err(error),
            (TransportKind::Auto, Ok(())) => TransportKind::Nvlink,
            (kind, Ok(())) => kind,
        };
        Ok(self)
    }

    /// How the work of a rank that has one of these GPUs to itself gets in its own way.
    pub fn worker_sharing(&self) -> WorkerSharing {
        let workers = self.devices.iter().map(|device| device.sm_count()).min().unwrap_or(1) as usize;
        WorkerSharing { workers, communication: self.transport.workers(self.num_sms), ..WorkerSharing::H200 }
    }

    /// The same, whose transport's kernels take at most `num_sms` multiprocessors, and never more than 1,024.
    #[must_use]
    pub fn with_num_sms(mut self, num_sms: u32) -> Self {
        self.num_sms = num_sms.clamp(1, LINK_BLOCKS);
        self
    }

    /// The same, whose kernels leave other group-casts to copy engines than by default: all of [`TransportKind::Nvlink`], and of
    /// [`TransportKind::Auto`] those that `EngineUse::H200` says.
    #[must_use]
    pub fn with_engines(mut self, engines: EngineUse) -> Self {
        self.engines = engines;
        self
    }

    /// The same, which under [`TransportKind::Auto`] leaves to copy engines what they were measured to do faster.
    #[must_use]
    pub fn with_profile(self, profile: &MachineProfile) -> Self {
        let engines = if self.engines == EngineUse::NEVER { self.engines } else { EngineUse::of(profile) };
        Self { engines, ..self }
    }

    /// The same, whose plain products are computed so. A machine without cuBLASLt says so when a layer is made ready.
    #[must_use]
    pub fn with_plain_products(mut self, by: PlainProducts) -> Self {
        self.others.plain_products = by;
        self
    }

    /// The same with a kernel of the user's own, which Programs call by its name
    /// ([`UserKernel`](counterpoint_schedule::UserKernel)).
    ///
    /// # Safety
    /// The kernel writes the tensors that its parts write and nothing else, reads what they read, and signals each part once it is
    /// written: Programs are proven to be free of races on that word.
    #[must_use]
    pub unsafe fn with_kernel(mut self, name: &str, kernel: UserKernelSource) -> Self {
        let mut kernels = (*self.others.users).clone();
        kernels.insert(name.to_owned(), kernel);
        self.others.users = Arc::new(kernels);
        self
    }

    /// The same, whose ranks have their memory of `allocator`. A machine of several devices keeps to the driver's: peers reach that.
    ///
    /// # Errors
    /// When the driver has no stream left.
    pub fn with_allocator(mut self, allocator: Arc<dyn DeviceAllocator>) -> Result<Self, CudaError> {
        if let [device] = &self.devices[..] {
            self.lender = Some(lender(device, allocator)?);
        }
        Ok(self)
    }

    /// A machine of each of its devices.
    pub fn each_alone(&self) -> Vec<Self> {
        self.devices.iter().map(|device| Self { devices: vec![device.clone()], ..self.clone() }).collect()
    }

    fn reach_each_other(&self) -> Result<(), CudaError> {
        for device in &self.devices {
            for peer in self.devices.iter().filter(|peer| *peer != device) {
                device.enable_access(peer)?;
            }
        }
        Ok(())
    }

    /// The devices.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// How ranks exchange rows.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// The device of each rank of a new world.
    fn of_ranks(&self, ranks: usize) -> Vec<Device> {
        let of_world = |device: &Device| device.for_world_of(self.lender.as_ref());
        let devices: Vec<Device> = self.devices.iter().map(of_world).collect();
        (0..ranks).map(|rank| devices[rank % devices.len()].clone()).collect()
    }

    /// Whether kernels of so many ranks can wait for each other: all must be running.
    fn has_barriers(&self, ranks: usize) -> bool {
        let alone = ranks <= self.devices.len().min(LINK_RANKS);
        alone && ranks > 1 && self.devices.iter().take(ranks).all(|device| device.arch().is_hopper())
    }

    /// What moves the rows of each rank of a world.
    fn means(&self, world: &Arc<World>, devices: &[Device]) -> Result<Vec<Means>, CudaError> {
        match self.transport {
            TransportKind::Nccl(settings) => {
                let ranks = NcclRank::connect(&self.connected, devices, world, settings)?;
                let sums = settings.sums;
                Ok(ranks.into_iter().map(|nccl| Means::Exchange { nccl, sums }).collect())
            }
            TransportKind::CopyEngine => Ok(devices.iter().map(|_| Means::Push).collect()),
            TransportKind::Nvlink | TransportKind::Hierarchical(_) | TransportKind::Auto
                if self.has_barriers(world.size()) =>
            {
                let link = |_: &Device| Means::Link { num_sms: self.num_sms, engines: self.engines };
                Ok(devices.iter().map(link).collect())
            }
            TransportKind::Nvlink | TransportKind::Hierarchical(_) | TransportKind::Auto => {
                Ok(devices.iter().map(|_| Means::Pull).collect())
            }
        }
    }
}

impl Machine for CudaMachine {
    type Backend = CudaBackend;
    type Transport = CudaTransport;

    fn element_types(&self) -> ElementTypes {
        ELEMENT_TYPES
    }

    fn linear(&self, ranks: usize) -> LinearMachine {
        let overlaps =
            self.transport.pass_overlaps(self.has_barriers(ranks), self.transport.workers(self.num_sms));
        LinearMachine::new(
            self.transport.transport(),
            overlaps,
            Topology::flat(ranks),
            self.cost(None, ranks),
        )
        .with_column_groups(Offered::Tuned)
        .with_arriving_rows(Offered::Tuned)
    }

    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError> {
        let clocks: Vec<Arc<Clock>> = self.devices.iter().map(|_| Arc::default()).collect();
        let devices = self.of_ranks(world.size());
        let means = self.means(world, &devices);
        let means = means.map_err(|error| exec_error(0, "the connection of ranks", error))?;
        CudaTransport::connect(world, devices.clone(), means)
            .into_iter()
            .enumerate()
            .map(|(rank, transport)| {
                let (device, clock) = (&devices[rank], clocks[rank % self.devices.len()].clone());
                let (others, pace) = (self.others.clone(), Arc::default());
                let backend = CudaBackend::new(world, rank, device, self.timing, clock, others, pace)?;
                if world.size() <= self.devices.len() {
                    backend.let_products_wait(self.transport.waiting_margin(self.num_sms));
                }
                Ok((backend, transport))
            })
            .collect()
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(host)?;
        let mut available = 0u64;
        for device in &self.devices {
            let memory = device.memory().map_err(|error| exec_error(0, "the memory of a device", error))?;
            available = available.saturating_add(memory.free as u64);
        }
        if ranks > available {
            return Err(ExecError::OutOfMemory { rank: None, needed: ranks, available });
        }
        Ok(())
    }
}
