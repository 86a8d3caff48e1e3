use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use counterpoint_exec::{
    ElementTypes, Ends, ExecError, Facet, Machine, Rendezvous, RendezvousError, World, check_memory,
};
use counterpoint_plan::CostModel;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::machine::{ELEMENT_TYPES, NUM_SMS, Timing};
use super::{CudaBackend, cost, exec_error};
use crate::kernel::{LINK_RANKS, LinkAbort};
use crate::memory::{AllocationPlace, OpenedMemory};
use crate::nccl::NcclRank;
use crate::transport::Means;
use crate::{
    CudaError, CudaTransport, Device, DeviceBuffer, Stream, StreamPriority, TransportKind, compiler_version,
};

/// One GPU rank of several that are processes.
pub struct CudaProcess {
    rendezvous: Arc<Rendezvous>,
    device: Device,
    timing: Timing,
    /// Never [`TransportKind::Auto`].
    transport: TransportKind,
    num_sms: u32,
    /// Ranks of the GPU that has most.
    sharing: usize,
    /// Whether all GPUs have kernels that meet by themselves.
    can_meet: bool,
    /// Connections made so far, the same number on every rank.
    connections: AtomicU64,
}

/// What a rank tells of its GPU.
#[derive(Serialize, Deserialize)]
struct Seat {
    uuid: String,
    is_hopper: bool,
    /// A little of its memory, for the others to open: `None` where the driver does not share it.
    probe: Option<Vec<u8>>,
}

/// Bytes of that memory: an allocation that shares nothing with another.
const PROBE_BYTES: usize = 2 << 20;

impl CudaProcess {
    /// This process's rank on its GPU: that with the number `local_rank`, its place among the ranks of its host where the
    /// launcher does not say, counted round when there are fewer GPUs. All ranks call it, with the same `transport`.
    ///
    /// # Errors
    /// When there is no driver, GPU or compiler; [`CudaError::Transport`] for a transport that these ranks cannot use, and
    /// [`CudaError::NoPeerAccess`] when it needs memory that GPUs do not reach; whatever ended the job.
    pub fn new(
        rendezvous: &Arc<Rendezvous>,
        local_rank: Option<usize>,
        timing: Timing,
        transport: TransportKind,
    ) -> Result<Self, ExecError> {
        let rank = rendezvous.rank();
        let neighbours = rendezvous.ranks_on_this_host();
        let place = neighbours.iter().position(|neighbour| *neighbour == rank).unwrap_or(0);
        let failed = |error| rendezvous.fail(exec_error(rank, "the GPU of a rank", error));
        rendezvous.agree("transport", &[Facet::new("the transport", transport)])?;
        let open = || -> Result<(Device, DeviceBuffer), CudaError> {
            compiler_version()?;
            let device = Device::open(local_rank.unwrap_or(place) % Device::count()?)?;
            let probe = DeviceBuffer::new(&device, PROBE_BYTES)?;
            Ok((device, probe))
        };
        let (device, probe) = open().map_err(failed)?;
        let handle = AllocationPlace::of(&device, probe.address()).and_then(|place| place.handle(&device));
        let seat = Seat {
            uuid: device.properties().uuid.clone(),
            is_hopper: device.arch().is_hopper(),
            probe: handle.ok(),
        };
        let seats: Vec<Seat> = gather(rendezvous, "GPUs", &seat)?;
        let unreached: Vec<Option<String>> =
            gather(rendezvous, "memory of GPUs", &unreached(&device, rank, &neighbours, &seats))?;
        // Nobody's memory goes before all have closed it.
        rendezvous.barrier("memory of GPUs closed")?;
        drop(probe);
        let sharing =
            seats.iter().map(|seat| seats.iter().filter(|other| other.uuid == seat.uuid).count()).max();
        let sharing = sharing.unwrap_or(1);
        let reason = unreached.into_iter().flatten().next();
        let transport = match (transport, reason) {
            (TransportKind::Auto, Some(_)) | (TransportKind::Nccl, _) => TransportKind::Nccl,
            (TransportKind::Auto, None) => TransportKind::Nvlink,
            (kind, None) => kind,
            (kind, Some(reason)) => return Err(failed(refused(kind, reason))),
        };
        if transport == TransportKind::Nccl && sharing > 1 {
            let reason = format!(
                "{sharing} ranks share a GPU, and NCCL wants a GPU for each; start fewer processes a host, or use --transport \
                 nvlink where all are on one host"
            );
            return Err(failed(refused(transport, reason)));
        }
        let can_meet = seats.iter().all(|seat| seat.is_hopper);
        let (rendezvous, connections) = (rendezvous.clone(), AtomicU64::new(0));
        Ok(Self { rendezvous, device, timing, transport, num_sms: NUM_SMS, sharing, can_meet, connections })
    }

    /// The same, whose transport's kernels take at most `num_sms` multiprocessors.
    #[must_use]
    pub fn with_num_sms(mut self, num_sms: u32) -> Self {
        self.num_sms = num_sms.max(1);
        self
    }

    /// This rank's GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How ranks exchange rows.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// What work costs: an estimate to plan with.
    pub fn estimated_cost(&self) -> CostModel {
        cost::estimate(self.device.sm_count(), self.sharing)
    }

    /// What moves this rank's rows.
    fn means(&self, world: &Arc<World>, number: u64) -> Result<Means, ExecError> {
        let rank = self.rendezvous.rank();
        let failed = |error| exec_error(rank, "the connection of ranks", error);
        let meets = self.sharing == 1 && self.can_meet && (2..=LINK_RANKS).contains(&world.size());
        match self.transport {
            TransportKind::Nccl => {
                let key = format!("nccl {number}");
                if rank == 0 {
                    let meeting = NcclRank::meeting().map_err(failed)?;
                    self.rendezvous.set(&key, &meeting)?;
                }
                let meeting = self.rendezvous.get(&key)?;
                // Here a rank that never comes has a name.
                self.rendezvous.barrier(&key)?;
                NcclRank::join(&self.device, rank, &meeting, world).map(Means::Exchange).map_err(failed)
            }
            TransportKind::CopyEngine => Ok(Means::Push),
            TransportKind::Nvlink | TransportKind::Auto if meets => {
                let abort = Stream::new(&self.device, StreamPriority::Low);
                let abort = abort.and_then(|stream| LinkAbort::new(&stream)).map_err(failed)?;
                Ok(Means::Link { num_sms: self.num_sms, abort })
            }
            TransportKind::Nvlink | TransportKind::Auto => Ok(Means::Pull),
        }
    }
}

impl Machine for CudaProcess {
    type Backend = CudaBackend;
    type Transport = CudaTransport;

    fn world_size(&self) -> Option<usize> {
        Some(self.rendezvous.world_size())
    }

    fn element_types(&self) -> ElementTypes {
        ELEMENT_TYPES
    }

    fn ranks_here(&self, _: usize) -> Range<usize> {
        self.rendezvous.rank()..self.rendezvous.rank() + 1
    }

    fn meet(&self, place: &str) -> Result<(), ExecError> {
        self.rendezvous.barrier(place)
    }

    /// The ends of this process's rank. All ranks must call it, as often as each other.
    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError> {
        let rank = self.rendezvous.rank();
        if world.size() != self.rendezvous.world_size() {
            let reason =
                format!("its world has {} ranks and {} have met", world.size(), self.rendezvous.world_size());
            let collective = "connecting the ranks".to_owned();
            return Err(ExecError::BadCollective { rank, collective, reason });
        }
        self.rendezvous.attach(world);
        let number = self.connections.fetch_add(1, Ordering::Relaxed);
        let connect = || {
            let means = self.means(world, number)?;
            let abort = means.abort();
            let (rendezvous, device) = (&self.rendezvous, &self.device);
            let transport = CudaTransport::connect_process(rendezvous, world, device, number, means)?;
            let backend = CudaBackend::new(world, rank, device, self.timing, Arc::default(), abort)?;
            Ok(vec![(backend, transport)])
        };
        connect().map_err(|error| world.fail(error))
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(host)?;
        let memory = self.device.memory();
        let memory =
            memory.map_err(|error| exec_error(self.rendezvous.rank(), "the memory of a device", error))?;
        let available = memory.free as u64;
        if ranks > available {
            return Err(ExecError::OutOfMemory { needed: ranks, available });
        }
        Ok(())
    }
}

/// Why this rank cannot reach the memory of every other's GPU, if it cannot.
fn unreached(device: &Device, rank: usize, neighbours: &[usize], seats: &[Seat]) -> Option<String> {
    let far: Vec<String> =
        (0..seats.len()).filter(|peer| !neighbours.contains(peer)).map(|peer| peer.to_string()).collect();
    if !far.is_empty() {
        return Some(format!(
            "rank {rank} has no other GPU's memory in reach on the hosts of ranks {}",
            far.join(", ")
        ));
    }
    let reach = |peer: usize| -> Result<(), String> {
        let Some(handle) = &seats[peer].probe else {
            return Err("its driver shares no memory between processes".to_owned());
        };
        // Closed at once.
        OpenedMemory::open(device, handle, PROBE_BYTES).map(drop).map_err(|error| error.to_string())
    };
    let others = (0..seats.len()).filter(|peer| *peer != rank);
    let mut failures = others.filter_map(|peer| reach(peer).err().map(|reason| (peer, reason)));
    failures.next().map(|(peer, reason)| format!("rank {rank} cannot open memory of rank {peer}: {reason}"))
}

fn refused(transport: TransportKind, reason: String) -> CudaError {
    let name =
        TransportKind::NAMES.into_iter().find(|(_, kind)| *kind == transport).map_or("", |(name, _)| name);
    let reason = match transport {
        TransportKind::Nccl => reason,
        _ => format!("{reason}; use --transport nccl"),
    };
    CudaError::Transport { transport: name, reason }
}

fn gather<T: Serialize + DeserializeOwned>(
    rendezvous: &Rendezvous,
    place: &str,
    own: &T,
) -> Result<Vec<T>, ExecError> {
    let broken = |error: serde_json::Error| {
        ExecError::from(RendezvousError::Broken { rank: rendezvous.rank(), reason: error.to_string() })
    };
    let own = serde_json::to_vec(own).map_err(broken)?;
    let all = rendezvous.all_gather(place, &own)?;
    all.iter().map(|one| serde_json::from_slice(one).map_err(broken)).collect()
}
