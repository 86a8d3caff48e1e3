//! Connecting ranks, or giving a world ranks that are connected already.

use std::ffi::c_int;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;
use std::{ptr, thread};

use counterpoint_driver::{
    CudaError, Device, DeviceBuffer, Inside, Nccl, NcclUniqueId, Stream, StreamPriority,
};
use counterpoint_exec::World;

use super::variables::host_is_set;
use super::{
    Among, ConnectedRanks, End, LOOK, NcclFault, NcclMessage, NcclRank, NcclSettings, explain, go_on, group,
};

impl NcclRank {
    /// Ranks that are threads of this process, the first on the first of `devices`, connected with each other: those of
    /// `connected` if there are some, which get them back when they are through.
    ///
    /// Their calls block, because NCCL starts a thread for each group of calls that does not, which would take longer than most
    /// exchanges. None of them waits for anyone, once the ranks are connected; connecting is left to a thread that is given up
    /// at the limit.
    ///
    /// # Errors
    /// [`CudaError::NoNccl`]; [`CudaError::Transport`] when two ranks share a GPU; NCCL's own, also when it is not ready at
    /// the limit.
    pub fn connect(
        connected: &ConnectedRanks,
        devices: &[Device],
        world: &Arc<World>,
        settings: NcclSettings,
    ) -> Result<Vec<Self>, CudaError> {
        let limit = world.config().limit;
        if let Some(rank) = (1..devices.len()).find(|&rank| devices[..rank].contains(&devices[rank])) {
            let fault = NcclFault::SharedDevice { rank, device: devices[rank].to_string() };
            return Err(CudaError::Transport { transport: "nccl", reason: fault.into() });
        }
        let nccl = Nccl::get()?;
        let among = Among::Devices(devices.to_vec(), settings);
        if let Some(ends) = connected.0.take(&among) {
            return Ok(Self::of_ends(nccl, connected, among, ends, 0, world, &Arc::default()));
        }
        let (sender, receiver) = mpsc::channel();
        let (count, devices, world) = (devices.len(), devices.to_vec(), world.clone());
        let connected = connected.clone();
        // Nobody receives any more once the limit has passed.
        thread::spawn(move || {
            drop(sender.send(Self::connect_all(nccl, &connected, &devices, &world, settings)))
        });
        receiver.recv_timeout(limit).unwrap_or_else(|_| {
            let reason = NcclFault::NotConnected { ranks: count, limit }.into();
            Err(CudaError::Transport { transport: "nccl", reason })
        })
    }

    fn connect_all(
        nccl: &'static Nccl,
        connected: &ConnectedRanks,
        devices: &[Device],
        world: &Arc<World>,
        settings: NcclSettings,
    ) -> Result<Vec<Self>, CudaError> {
        let _inside = Inside::enter();
        devices.iter().try_for_each(Device::leave_memory)?;
        let id = unique_id(nccl)?;
        // NCCL writes them until the group has ended.
        let mut handles = vec![ptr::null_mut(); devices.len()];
        group(nccl, || {
            devices.iter().zip(&mut handles).enumerate().try_for_each(|(rank, (device, handle))| {
                let _bound = device.make_current()?;
                let mut config = settings.config();
                let count = devices.len() as c_int;
                // SAFETY: the handle is in a list that outlives the group, the configuration is copied before the call returns.
                let code =
                    unsafe { (nccl.ncclCommInitRankConfig)(handle, count, id, rank as c_int, &mut config) };
                nccl.check("ncclCommInitRankConfig", code).map(|_| ())
            })
        })?;
        let ends = handles.into_iter().zip(devices).map(|(handle, device)| End::new(nccl, device, handle));
        let among = Among::Devices(devices.to_vec(), settings);
        let ranks = Self::of_ends(nccl, connected, among, ends.collect(), 0, world, &Arc::default());
        all_connected(ranks)
    }

    /// What all ranks that are processes need to find each other; one of them makes it, for its own `seat`.
    ///
    /// # Errors
    /// [`CudaError::NoNccl`]; [`CudaError::Transport`] when a variable of NCCL's must be set first; NCCL's own.
    pub fn unique_id(seat: &NcclSeat<'_>) -> Result<Vec<u8>, CudaError> {
        let nccl = Nccl::get()?;
        host_is_set(seat.host)?;
        unique_id(nccl).map(|id| id.bytes.to_vec())
    }

    /// The rank `seat.rank` of `world`, the only one of this process, connected with all others, which have the same `unique_id`.
    /// Connecting is left to a thread that is given up when another rank fails, and at the limit.
    ///
    /// Calls block as those of threads do, for the same reason, and because the host stays close to the device
    /// (`ExchangeMarks`) they find room at once.
    ///
    /// # Errors
    /// As [`NcclRank::connect`].
    pub fn join(seat: NcclSeat<'_>, number: u64, unique_id: &[u8]) -> Result<Self, CudaError> {
        let nccl = Nccl::get()?;
        host_is_set(seat.host)?;
        let id = NcclUniqueId { bytes: std::array::from_fn(|at| unique_id.get(at).copied().unwrap_or(0)) };
        let NcclSeat { connected, device, rank, world, sent, settings, .. } = seat;
        let (sender, receiver) = mpsc::channel();
        let join = {
            let (connected, device) = (connected.clone(), device.clone());
            let (world, sent) = (world.clone(), sent.clone());
            move || {
                let _inside = Inside::enter();
                let end = init_one(nccl, &device, (rank, world.size()), id, settings);
                let end = end.map_err(|error| explain(&world, rank, error))?;
                let among = Among::Processes(number);
                let ranks = Self::of_ends(nccl, &connected, among, vec![end], rank, &world, &sent);
                ranks.iter().for_each(Self::end_with_world);
                only(all_connected(ranks)?)
            }
        };
        thread::spawn(move || drop(sender.send(join())));
        let began = Instant::now();
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(joined) => return joined,
                Err(_) => go_on(world, rank, began, "the other ranks to connect")?,
            }
        }
    }

    /// The numbers of connections that this process's rank could use again.
    pub fn connections(connected: &ConnectedRanks) -> Vec<u64> {
        let number = |among| match among {
            Among::Processes(number) => Some(number),
            Among::Devices(..) => None,
        };
        connected.0.keys().into_iter().filter_map(number).collect()
    }

    /// The rank that [`NcclRank::join`] connected as this `number`, for another world. All ranks call it.
    ///
    /// # Errors
    /// When there is no such connection.
    pub fn join_again(seat: &NcclSeat<'_>, number: u64) -> Result<Self, CudaError> {
        let among = Among::Processes(number);
        let gone = || {
            let reason = NcclFault::ConnectionInUse { number, rank: seat.rank }.into();
            CudaError::Transport { transport: "nccl", reason }
        };
        let ends = seat.connected.0.take(&among).ok_or_else(gone)?;
        let ranks =
            Self::of_ends(Nccl::get()?, seat.connected, among, ends, seat.rank, seat.world, seat.sent);
        ranks.iter().for_each(Self::end_with_world);
        only(ranks)
    }

    /// The ranks from `first` on of a world, with connected ends.
    fn of_ends(
        nccl: &'static Nccl,
        connected: &ConnectedRanks,
        among: Among,
        ends: Vec<End>,
        first: usize,
        world: &Arc<World>,
        sent: &Arc<AtomicU64>,
    ) -> Vec<Self> {
        let count = world.size();
        let lent = connected.0.lend(among, ends).into_iter().enumerate();
        let rank = |(at, lent): (usize, super::Lent<Among, End>)| {
            let (device, world, sent) = (lent.end().device.clone(), world.clone(), sent.clone());
            let (lent, last) = (Arc::new(lent), Mutex::new(None));
            Self { nccl, lent, rank: first + at, count, device, world, sent, last }
        };
        lent.map(rank).collect()
    }

    /// A host that is held up by what waits behind an exchange could not end that.
    fn end_with_world(&self) {
        // What the next world does with this end is none of this one's affairs.
        let lent = Arc::downgrade(&self.lent);
        self.world.when_failed(move || {
            if let Some(lent) = lent.upgrade() {
                lent.spoil();
                lent.end().abort();
            }
        });
    }
}

/// A rank that is a process.
pub struct NcclSeat<'a> {
    /// What it gets back when the rank is through.
    pub connected: &'a ConnectedRanks,
    /// Its GPU.
    pub device: &'a Device,
    /// The rank.
    pub rank: usize,
    /// NCCL takes ranks of different hosts for ranks on different hosts, where one is given.
    pub host: Option<&'a str>,
    /// What its waits end with.
    pub world: &'a Arc<World>,
    /// How NCCL is set up, the same on all ranks.
    pub settings: NcclSettings,
    /// What exchanges send is added to it, in bytes.
    pub sent: &'a Arc<AtomicU64>,
}

fn init_one(
    nccl: &'static Nccl,
    device: &Device,
    (rank, count): (usize, usize),
    id: NcclUniqueId,
    settings: NcclSettings,
) -> Result<End, CudaError> {
    device.leave_memory()?;
    let _bound = device.make_current()?;
    let mut handle = ptr::null_mut();
    let mut config = settings.config();
    // SAFETY: the pointers are to locals; the handle is written and the configuration copied before the call returns.
    let code =
        unsafe { (nccl.ncclCommInitRankConfig)(&mut handle, count as c_int, id, rank as c_int, &mut config) };
    nccl.check("ncclCommInitRankConfig", code)?;
    Ok(End::new(nccl, device, handle))
}

fn only(mut ranks: Vec<NcclRank>) -> Result<NcclRank, CudaError> {
    let gone = || CudaError::Transport { transport: "nccl", reason: NcclFault::NoRank.into() };
    ranks.pop().ok_or_else(gone)
}

/// Where a rank sends and sums bytes that mean nothing.
pub(crate) struct Place {
    pub(crate) stream: Stream,
    pub(crate) memory: DeviceBuffer,
}

/// Bytes of one message.
const EACH: u64 = 16;

impl Place {
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::High)?;
        let memory = DeviceBuffer::new(device, bytes)?;
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
fn all_connected(ranks: Vec<NcclRank>) -> Result<Vec<NcclRank>, CudaError> {
    let connect = |places: &mut Vec<Place>| {
        ranks.iter().try_for_each(|rank| rank.wait("ncclCommInitRankConfig"))?;
        for rank in &ranks {
            places.push(Place::new(&rank.device, 2 * EACH as usize * rank.count)?);
        }
        exchange_once(&ranks, places)
    };
    let mut places = Vec::new();
    if let Err(error) = connect(&mut places) {
        // Before the places go: freeing their memory would wait for exchanges that nobody ends.
        ranks.iter().for_each(NcclRank::spoil);
        return Err(error);
    }
    Ok(ranks)
}

/// Every rank sends a few bytes to every other. NCCL connects two ranks when they first exchange something, for which both
/// must call at the same time; from here on an exchange waits for no other thread.
fn exchange_once(ranks: &[NcclRank], places: &[Place]) -> Result<(), CudaError> {
    let Some(first) = ranks.first() else { return Ok(()) };
    group(first.nccl, || {
        ranks.iter().zip(places).try_for_each(|(rank, Place { stream, memory })| {
            let message = |peer: usize, half: usize| {
                let address = memory.address() + EACH * (half * rank.count + peer) as u64;
                NcclMessage { peer, address, bytes: EACH }
            };
            let others = || (0..rank.count).filter(|&peer| peer != rank.rank);
            let sends: Vec<_> = others().map(|peer| message(peer, 0)).collect();
            let receives: Vec<_> = others().map(|peer| message(peer, 1)).collect();
            let _bound = rank.device.make_current()?;
            // SAFETY: the messages lie in `memory`, which lives until the streams are idle or the ranks aborted.
            rank.lent.end().with(|handle| unsafe { rank.enqueue(handle, stream, &sends, &receives) })
        })
    })
    .map_err(|error| explain(&first.world, first.rank, error))?;
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
