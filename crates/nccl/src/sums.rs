//! Reduce-scatters of NCCL's own, and what comes before the first of a size.
//!
//! NCCL connects what an algorithm sums by (a ring, a tree) inside the first call that takes it, which waits there for the calls of all other
//! ranks; which algorithm that is depends on the sizes. One thread may enqueue several ranks, one after the other: the first would wait for
//! ever. So the first reduce-scatter of a size is called for all ranks of this process at once, on memory of its own and by a thread that
//! is given up at the limit. From then on a call of that size waits for nobody.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Instant;

use counterpoint_driver::{CudaError, Event, Inside, Nccl, NcclHandle, Stream};
use counterpoint_exec::World;
use counterpoint_plan::DType;

use super::connect::Place;
use super::{Among, End, LOOK, Lent, NcclRank, SUM, explain, go_on, group};
use crate::lock;

/// What one rank has of a reduce-scatter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclSum {
    /// Where its shares for all ranks begin.
    pub from: u64,
    /// Where its sums go.
    pub to: u64,
    /// How large it is.
    pub size: SumSize,
}

/// How much it is, by which NCCL chooses an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SumSize {
    /// Of one rank.
    pub elements: usize,
    /// Their type.
    pub dtype: DType,
}

/// The sizes of calls after whose like nothing is left to connect.
pub(crate) type KnownSums = Mutex<BTreeSet<Vec<SumSize>>>;

impl SumSize {
    /// Of one rank's share.
    fn bytes(self) -> u64 {
        (self.elements * self.dtype.size()) as u64
    }

    /// `ncclDataType_t`.
    fn kind(self) -> c_int {
        match self.dtype {
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::Bf16 => 9,
        }
    }
}

/// # Safety
/// As [`NcclRank::reduce_scatter`], of the rank whose handle this is and whose device is current.
unsafe fn enqueue(
    nccl: &Nccl,
    handle: NcclHandle,
    stream: &Stream,
    sums: &[NcclSum],
) -> Result<(), CudaError> {
    sums.iter().try_for_each(|&NcclSum { from, to, size }| {
        let (kind, queue) = (size.kind(), stream.raw());
        // SAFETY: the caller's promise.
        let code =
            unsafe { (nccl.ncclReduceScatter)(from as _, to as _, size.elements, kind, SUM, handle, queue) };
        nccl.check("ncclReduceScatter", code).map(|_| ())
    })
}

impl NcclRank {
    /// Enqueues reduce-scatters of NCCL's own, all at once, and behind them `ended`, unless a graph is captured.
    ///
    /// # Safety
    /// As [`NcclRank::exchange`]; all ranks make the same call, and have connected for it ([`NcclRank::connect_sums`]).
    ///
    /// # Errors
    /// As [`NcclRank::exchange`].
    pub unsafe fn reduce_scatter(
        &self,
        stream: &Stream,
        sums: &[NcclSum],
        ended: Option<&Event>,
    ) -> Result<(), CudaError> {
        let _bound = self.device.make_current()?;
        // SAFETY: the caller's promise.
        let calls = |handle| group(self.nccl, || unsafe { enqueue(self.nccl, handle, stream, sums) });
        self.lent.end().with(calls).map_err(|error| explain(&self.world, self.rank, error))?;
        let others = (self.count - 1) as u64;
        let bytes = sums.iter().map(|sum| others * sum.size.bytes()).sum();
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        self.enqueued(stream, ended)
    }

    /// Has NCCL connect what calls of these sums need, where they are the first of their sizes. All ranks call it, and are inside no other
    /// call of NCCL's; of those in this process one suffices.
    ///
    /// # Errors
    /// NCCL's own; when it is not done at the limit, or another rank fails.
    pub fn connect_sums(&self, sums: &[NcclSum]) -> Result<(), CudaError> {
        let Some(end) = self.lent.ends().first() else { return Ok(()) };
        let sizes: Vec<SumSize> = sums.iter().map(|sum| sum.size).collect();
        // Other ranks of this process wait here.
        let mut known = lock(&end.known);
        if known.contains(&sizes) {
            return Ok(());
        }
        let first = FirstSum {
            nccl: self.nccl,
            lent: self.lent.clone(),
            world: self.world.clone(),
            rank: self.rank,
            count: self.count,
            sizes: sizes.clone(),
        };
        let (sender, receiver) = mpsc::channel();
        // Nobody receives any more once the limit has passed.
        thread::spawn(move || drop(sender.send(first.run())));
        let began = Instant::now();
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(summed) => {
                    summed.map_err(|error| explain(&self.world, self.rank, error))?;
                    known.insert(sizes);
                    return Ok(());
                }
                Err(_) => go_on(&self.world, self.rank, began, FirstSum::NAME)?,
            }
        }
    }
}

/// The first reduce-scatters of their sizes, by all ranks of this process at once.
struct FirstSum {
    nccl: &'static Nccl,
    lent: Arc<Lent<Among, End>>,
    world: Arc<World>,
    /// Who asks.
    rank: usize,
    /// Ranks, of all processes.
    count: usize,
    sizes: Vec<SumSize>,
}

impl FirstSum {
    const NAME: &str = "NCCL to connect the ranks for a sum";

    fn run(&self) -> Result<(), CudaError> {
        let _inside = Inside::enter();
        let mut places = Vec::new();
        let summed = self.sum(&mut places);
        if summed.is_err() || self.world.has_failed() {
            // Before the places go: freeing their memory would wait for sums that nobody ends.
            self.lent.spoil();
            self.lent.ends().iter().for_each(End::abort);
        }
        summed
    }

    fn sum(&self, places: &mut Vec<Place>) -> Result<(), CudaError> {
        let ends = self.lent.ends();
        let share: u64 = self.sizes.iter().map(|size| size.bytes().next_multiple_of(ALIGN)).sum();
        for end in ends {
            places.push(Place::new(&end.device, share as usize * (self.count + 1))?);
        }
        let taken: Vec<TakenHandle<'_>> = ends.iter().map(End::take).collect::<Result<_, _>>()?;
        group(self.nccl, || {
            taken.iter().zip(&*places).try_for_each(|(taken, place)| {
                let mut next = place.memory.address();
                let each = self.sizes.iter().map(|&size| {
                    let (to, from) = (next, next + size.bytes().next_multiple_of(ALIGN));
                    next = from + self.count as u64 * size.bytes().next_multiple_of(ALIGN);
                    NcclSum { from, to, size }
                });
                let sums: Vec<NcclSum> = each.collect();
                let _bound = taken.end.device.make_current()?;
                // SAFETY: the sums lie in the memory of the place, which lives until the streams are idle or the ranks aborted.
                unsafe { enqueue(self.nccl, taken.handle, &place.stream, &sums) }
            })
        })?;
        drop(taken);
        let began = Instant::now();
        for place in places {
            while !place.stream.is_idle()? {
                go_on(&self.world, self.rank, began, Self::NAME)?;
                thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Of what NCCL reads and writes.
const ALIGN: u64 = 256;

/// The handle of an end, for a call that may wait for others as long as it likes: who aborts the end meanwhile finds none.
struct TakenHandle<'a> {
    end: &'a End,
    handle: NcclHandle,
}

impl End {
    fn take(&self) -> Result<TakenHandle<'_>, CudaError> {
        let handle = lock(&self.handle).take().ok_or_else(Self::aborted)?;
        Ok(TakenHandle { end: self, handle })
    }
}

impl Drop for TakenHandle<'_> {
    fn drop(&mut self) {
        *lock(&self.end.handle) = Some(self.handle);
    }
}
