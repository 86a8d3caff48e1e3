//! The trait of what ranks run on, and the machine whose ranks are threads on this process's CPUs.

use std::ops::Range;
use std::sync::Arc;

use counterpoint_choose::LinearMachine;
use counterpoint_cost::{CostModel, Link};
use counterpoint_plan::{DType, Topology};
use counterpoint_schedule::RankTransport;
use rayon::ThreadPool;

use crate::cpu::{CpuUserKernels, CpuUserPart};
use crate::memory::check_memory;
use crate::{Backend, CpuBackend, CpuTransport, ExecError, SlowLink, Transport, World};

/// Backend and transport of one rank of a machine.
pub type Ends<M> = (<M as Machine>::Backend, <M as Machine>::Transport);

/// Element types that a transport moves and combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementTypes {
    /// Of tensors, and on the wire.
    pub tensors: &'static [DType],
    /// In which a group-reduce combines.
    pub sums: &'static [DType],
}

/// Where the ranks of a run live: what makes their backends and transports.
pub trait Machine: Sized {
    /// Backend of a rank.
    type Backend: Backend;
    /// Transport of a rank.
    type Transport: Transport<Self::Backend>;

    /// The number of ranks, where it is not for the caller to choose.
    fn world_size(&self) -> Option<usize> {
        None
    }

    /// What its transport takes: every type, unless it says otherwise.
    fn element_types(&self) -> ElementTypes {
        const ALL: &[DType] = &[DType::F64, DType::F32, DType::Bf16, DType::F16];
        ElementTypes { tensors: ALL, sums: ALL }
    }

    /// Those of `world_size` ranks that are in this process.
    fn ranks_here(&self, world_size: usize) -> Range<usize> {
        0..world_size
    }

    /// What so many ranks can do with passes of layers, and what these cost. The same on all ranks.
    fn linear(&self, ranks: usize) -> LinearMachine;

    /// Backend and transport of every rank of `world` that is in this process, in the order of ranks.
    ///
    /// # Errors
    /// When the machine has too little of something.
    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError>;

    /// Waits until all processes of the world's ranks have come here, so that the run which follows starts on all ranks of a host at one
    /// moment: at once where there is one process.
    ///
    /// # Errors
    /// When one of them does not come.
    fn barrier(&self, _place: &str) -> Result<(), ExecError> {
        Ok(())
    }

    /// Refuses what cannot fit, before anything is allocated: `ranks` bytes of all ranks' buffers, and `host` bytes of tensors
    /// in global order next to them.
    ///
    /// # Errors
    /// [`ExecError::OutOfMemory`] with both figures.
    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError>;
}

/// This process: ranks are threads that share the machine's cores and its memory.
pub struct CpuMachine {
    workers: Arc<ThreadPool>,
    slow_link: Option<SlowLink>,
    user_kernels: CpuUserKernels,
}

impl CpuMachine {
    /// Leaves `sm_margin` cores free; the transport imitates `slow_link`.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no threads.
    pub fn new(sm_margin: usize, slow_link: Option<SlowLink>) -> Result<Self, ExecError> {
        let user_kernels = CpuUserKernels::default();
        Ok(Self { workers: CpuBackend::workers(sm_margin)?, slow_link, user_kernels })
    }

    /// The same with a kernel of the user's own, which Programs call by its name
    /// ([`UserKernel`](counterpoint_schedule::UserKernel)): `body` computes one part.
    #[must_use]
    pub fn with_kernel(mut self, name: &str, body: impl Fn(CpuUserPart<'_>) + Send + Sync + 'static) -> Self {
        self.user_kernels = self.user_kernels.with(name, body);
        self
    }
}

impl Machine for CpuMachine {
    type Backend = CpuBackend;
    type Transport = CpuTransport;

    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError> {
        let transports = CpuTransport::local(world, self.slow_link);
        let kernels = || self.user_kernels.clone();
        let backend = |rank| CpuBackend::new(world, rank, self.workers.clone()).with_user_kernels(kernels());
        Ok(transports.into_iter().map(|transport| (backend(transport.rank()), transport)).collect())
    }

    fn linear(&self, ranks: usize) -> LinearMachine {
        linear_on_cpus(ranks, self.slow_link)
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(ranks.saturating_add(host))
    }
}

/// What CPU ranks can do with passes of linear layers: threads of their own move rows, over the link that is imitated.
pub(crate) fn linear_on_cpus(ranks: usize, slow_link: Option<SlowLink>) -> LinearMachine {
    let overlaps = RankTransport::Cpu.pass_overlaps(false, 0);
    let (mut cost, mut topology) = (CostModel::CPU, Topology::flat(ranks));
    let slowed = |fast: Link, alpha: std::time::Duration, bytes_per_second: f64| Link {
        alpha_seconds: fast.alpha_seconds + alpha.as_secs_f64(),
        bytes_per_second: fast.bytes_per_second.min(bytes_per_second),
    };
    if let Some(SlowLink { alpha, bytes_per_second, network }) = slow_link {
        cost.link = slowed(cost.link, alpha, bytes_per_second);
        if let Some(network) = network {
            cost.network = slowed(cost.network, network.alpha, network.bytes_per_second);
            topology.ranks_per_node = network.topology.ranks_per_node.min(ranks);
        }
    }
    LinearMachine::new(RankTransport::Cpu, overlaps, topology, cost)
}
