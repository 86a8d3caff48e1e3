//! Memory that is given back behind what is enqueued, and used again: dropping a buffer waits for nothing and calls no driver.
//!
//! Freeing device or pinned memory waits for the whole device, and would end a capture of somebody else's. So memory stays with
//! its world until that ends. A block that was given back is lent again once every stream of the device has passed the
//! point at which it stood when somebody next looked. Where somebody else's allocator lends the memory, long blocks go back there then;
//! where not, short ones are cut from slabs.

mod lender;
mod slabs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use self::lender::Lender;
pub use self::lender::{AllocationError, DeviceAllocator};
use self::slabs::Slabs;
use crate::CudaError;
use crate::library::{Driver, call};
use crate::stream_ends::{Point, StreamEnds};

/// Which memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PoolMemory {
    /// Of the device, by `cuMemAlloc`: never from a pool of the driver's, whose memory peers cannot open.
    Device,
    /// Of the host, pinned.
    Host,
}

/// Some memory of a pool. Its size is that of what was allocated, which is no less than was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) memory: PoolMemory,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// Blocks of one world on one device that nobody has.
#[derive(Debug, Default)]
pub(crate) struct MemoryPool {
    blocks: Mutex<Blocks<Arc<Point>>>,
    /// Whose memory of the device it is, where not the driver's.
    lender: Option<Arc<Lender>>,
}

/// The pool's bookkeeping, which needs no device: `P` is a point of a stream.
#[derive(Debug)]
struct Blocks<P> {
    free: BTreeMap<(PoolMemory, usize), Vec<u64>>,
    /// Given back since anyone looked at the streams.
    dropped: Vec<Block>,
    /// Given back before these points of streams.
    pending: Vec<(Vec<P>, Vec<Block>)>,
    /// First bytes of blocks that other processes have open, until the world ends.
    exported: BTreeSet<u64>,
    /// What short blocks are cut from.
    slabs: Slabs,
}

/// How much longer a block may be than what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fit {
    /// A quarter, or as long as what would be made.
    Close,
    /// Likewise, or any that is short.
    Short,
}

/// What memory that is given back waits for.
trait StreamPoints {
    /// Where a stream stood.
    type Point;

    /// Where all streams stand now. `None` while one of them captures: nothing that is marked there would ever be passed.
    fn now(&self) -> Result<Option<Vec<Self::Point>>, CudaError>;

    /// Whether a stream has done all that it had been given then.
    fn is_passed(&self, point: &Self::Point) -> Result<bool, CudaError>;
}

/// Those of a device, whose context is current.
struct DevicePoints<'a> {
    driver: &'a Driver,
    ends: &'a StreamEnds,
}

impl StreamPoints for DevicePoints<'_> {
    type Point = Arc<Point>;

    fn now(&self) -> Result<Option<Vec<Arc<Point>>>, CudaError> {
        self.ends.now(self.driver)
    }

    fn is_passed(&self, point: &Arc<Point>) -> Result<bool, CudaError> {
        point.is_passed(self.driver)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryPool {
    /// A pool of the driver's memory, or the lender's.
    pub(crate) fn new(lender: Option<Arc<Lender>>) -> Self {
        Self { lender, ..Self::default() }
    }

    /// Whose memory of the device it is, where not the driver's.
    pub(crate) fn lender(&self) -> Option<&Arc<Lender>> {
        self.lender.as_ref()
    }

    /// A block of `bytes` at least that was given back, if there is one that nothing enqueued still uses.
    pub(crate) fn take(
        &self,
        driver: &Driver,
        ends: &StreamEnds,
        memory: PoolMemory,
        bytes: usize,
    ) -> Result<Option<Block>, CudaError> {
        let mut blocks = lock(&self.blocks);
        if let Some(block) = blocks.fitting(memory, bytes, Fit::Close) {
            return Ok(Some(block));
        }
        let found = blocks.look(&DevicePoints { driver, ends }, memory, bytes)?;
        let Some(lender) = &self.lender else { return Ok(found) };
        let long = blocks.long_blocks();
        // The lender may wait for who waits for this.
        drop(blocks);
        long.into_iter().for_each(|address| lender.free(address));
        Ok(found)
    }

    /// A new block of `bytes`, cut from a slab; `allocate` makes a slab of so many bytes where none has room. `None` for a block that is
    /// allocated by itself: a long one, and all of a lender's.
    pub(crate) fn cut(
        &self,
        memory: PoolMemory,
        bytes: usize,
        allocate: impl FnOnce(usize) -> Result<u64, CudaError>,
    ) -> Result<Option<u64>, CudaError> {
        if bytes >= LONG || (memory == PoolMemory::Device && self.lender.is_some()) {
            return Ok(None);
        }
        let length = {
            let slabs = &mut lock(&self.blocks).slabs;
            if let Some(address) = slabs.cut(memory, bytes) {
                return Ok(Some(address));
            }
            slabs.next_bytes(memory)
        };
        // Whoever finds no room asks what pools have.
        let base = allocate(length)?;
        let slabs = &mut lock(&self.blocks).slabs;
        slabs.add(memory, base, length);
        Ok(slabs.cut(memory, bytes))
    }

    /// Takes a block back. What was enqueued may still use it.
    pub(crate) fn give_back(&self, block: Block) {
        lock(&self.blocks).dropped.push(block);
    }

    /// Other processes have the allocation that begins here open until the world ends.
    pub(crate) fn export(&self, base: u64) {
        lock(&self.blocks).exported.insert(base);
    }

    /// Bytes of a kind that nobody has, whether or not they are still used.
    pub(crate) fn unused_bytes(&self, memory: PoolMemory) -> usize {
        let blocks = lock(&self.blocks);
        let of_kind = blocks.free.range((memory, 0)..=(memory, usize::MAX));
        let free: usize = of_kind.map(|((_, bytes), addresses)| bytes * addresses.len()).sum();
        let others = blocks.dropped.iter().chain(blocks.pending.iter().flat_map(|(_, blocks)| blocks));
        let others: usize = others.filter(|block| block.memory == memory).map(|block| block.bytes).sum();
        free + others + blocks.slabs.uncut_bytes(memory)
    }

    /// Frees what is unused and not open in another process. `wait` waits for all that may use it; the device's context is current.
    pub(crate) fn free_unused(
        &self,
        driver: &Driver,
        wait: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.free(driver, wait, Blocks::unused)
    }

    /// Frees all of it, at the end of a world.
    pub(crate) fn free_all(
        &self,
        driver: &Driver,
        wait: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.free(driver, wait, Blocks::all)
    }

    fn free(
        &self,
        driver: &Driver,
        wait: impl FnOnce() -> Result<(), CudaError>,
        take_out: impl FnOnce(&mut Blocks<Arc<Point>>) -> Vec<(PoolMemory, u64)>,
    ) -> Result<(), CudaError> {
        let mut result = Ok(());
        for (memory, address) in self.taken_out(wait, take_out)? {
            // SAFETY: allocated for the pool by these functions, and nothing uses it any more.
            let freed = unsafe {
                match (memory, &self.lender) {
                    (PoolMemory::Device, Some(lender)) => {
                        lender.free(address);
                        Ok(())
                    }
                    (PoolMemory::Device, None) => call!(driver, cuMemFree_v2(address)),
                    (PoolMemory::Host, _) => call!(driver, cuMemFreeHost(address as *mut _)),
                }
            };
            result = result.and(freed);
        }
        result
    }

    /// What `take_out` takes out of the free blocks. First `wait` waits for all work that may use what was given back so far. The lock is
    /// not held meanwhile, so that others give memory back without waiting; that memory stays.
    fn taken_out(
        &self,
        wait: impl FnOnce() -> Result<(), CudaError>,
        take_out: impl FnOnce(&mut Blocks<Arc<Point>>) -> Vec<(PoolMemory, u64)>,
    ) -> Result<Vec<(PoolMemory, u64)>, CudaError> {
        let came_back = {
            let mut blocks = lock(&self.blocks);
            if blocks.is_empty() {
                return Ok(Vec::new());
            }
            blocks.what_came_back()
        };
        let waited = wait();
        let mut blocks = lock(&self.blocks);
        if let Err(error) = waited {
            blocks.dropped.extend(came_back);
            return Err(error);
        }
        came_back.into_iter().for_each(|block| blocks.put(block));
        Ok(take_out(&mut blocks))
    }
}

impl<P> Default for Blocks<P> {
    fn default() -> Self {
        Self {
            free: BTreeMap::new(),
            dropped: Vec::new(),
            pending: Vec::new(),
            exported: BTreeSet::new(),
            slabs: Slabs::default(),
        }
    }
}

impl<P> Blocks<P> {
    fn is_empty(&self) -> bool {
        self.slabs.is_empty() && self.free.is_empty() && self.dropped.is_empty() && self.pending.is_empty()
    }

    /// Free allocations, taken out; without slabs and what other processes have open.
    fn unused(&mut self) -> Vec<(PoolMemory, u64)> {
        let Self { free, exported, slabs, .. } = self;
        let mut unused = Vec::new();
        for ((memory, _), addresses) in free.iter_mut() {
            let is_free = |address: &mut u64| !(exported.contains(address) || slabs.have(*memory, *address));
            let taken = addresses.extract_if(.., is_free);
            unused.extend(taken.map(|address| (*memory, address)));
        }
        free.retain(|_, addresses| !addresses.is_empty());
        unused
    }

    /// All free allocations, taken out, at the end of a world.
    fn all(&mut self) -> Vec<(PoolMemory, u64)> {
        let free = std::mem::take(&mut self.free).into_iter();
        let blocks =
            free.flat_map(|((memory, _), addresses)| addresses.into_iter().map(move |at| (memory, at)));
        let mut all: Vec<_> = blocks.filter(|(memory, at)| !self.slabs.have(*memory, *at)).collect();
        all.extend(self.slabs.take());
        all
    }

    /// What was given back and may still be used, taken out.
    fn what_came_back(&mut self) -> Vec<Block> {
        let mut given_back = std::mem::take(&mut self.dropped);
        given_back.extend(std::mem::take(&mut self.pending).into_iter().flat_map(|(_, blocks)| blocks));
        given_back
    }

    /// The free blocks of the device that are worth more elsewhere than here, taken out.
    fn long_blocks(&mut self) -> Vec<u64> {
        let mut shorter = std::mem::take(&mut self.free);
        let mut long = shorter.split_off(&(PoolMemory::Device, LONG));
        self.free = long.split_off(&(PoolMemory::Host, 0));
        self.free.append(&mut shorter);
        long.into_values().flatten().collect()
    }

    /// A free block, where there was none of about this length before streams were looked at: now any short one serves what is shorter.
    /// Blocks of each length by itself would grow in number by ever new coincidences of masks.
    fn look(
        &mut self,
        streams: &impl StreamPoints<Point = P>,
        memory: PoolMemory,
        bytes: usize,
    ) -> Result<Option<Block>, CudaError> {
        self.sweep(streams)?;
        let close = self.fitting(memory, bytes, Fit::Close);
        Ok(close.or_else(|| self.fitting(memory, bytes, Fit::Short)))
    }

    /// The smallest free block that is long enough.
    fn fitting(&mut self, memory: PoolMemory, bytes: usize, fit: Fit) -> Option<Block> {
        let close = bytes.saturating_add(bytes / 4).max(block_bytes(bytes));
        let most = match fit {
            Fit::Short if bytes < LONG => close.max(LONG - 1),
            Fit::Short | Fit::Close => close,
        };
        let (&(_, bytes), addresses) = self.free.range_mut((memory, bytes)..=(memory, most)).next()?;
        let address = addresses.pop()?;
        if addresses.is_empty() {
            self.free.remove(&(memory, bytes));
        }
        Some(Block { memory, address, bytes })
    }

    /// Frees what all streams have passed.
    fn sweep(&mut self, streams: &impl StreamPoints<Point = P>) -> Result<(), CudaError> {
        if !self.dropped.is_empty()
            && self.pending.len() < MOST_PENDING
            && let Some(points) = streams.now()?
        {
            let blocks = std::mem::take(&mut self.dropped);
            self.pending.push((points, blocks));
        }
        // A stream that stands still holds up what was given back before it stood still, and nothing else.
        // Where a stream cannot be asked, as while another thread captures, all that was not looked at stays.
        let mut at = 0;
        while let Some((points, _)) = self.pending.get_mut(at) {
            while let Some(point) = points.last()
                && streams.is_passed(point)?
            {
                points.pop();
            }
            if points.is_empty() {
                let (_, blocks) = self.pending.remove(at);
                blocks.into_iter().for_each(|block| self.put(block));
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    fn put(&mut self, block: Block) {
        self.free.entry((block.memory, block.bytes)).or_default().push(block.address);
    }
}

/// Bytes from which on a block that is not used goes back to a lender: what PyTorch's allocator takes from large segments.
const LONG: usize = 1 << 20;

/// Times at which what had been given back then still waits for streams, at most: each takes an event of every stream.
const MOST_PENDING: usize = 8;

/// Bytes of the smallest blocks.
const SMALLEST: usize = 512;

/// How long a block is made for `bytes`: a sixteenth longer at most, or [`SMALLEST`], so that blocks of like sizes serve each other.
pub(crate) fn block_bytes(bytes: usize) -> usize {
    // No device has as many that this overflows.
    let step = (bytes.checked_next_power_of_two().unwrap_or(0) / 32).max(SMALLEST);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

#[cfg(test)]
mod tests;
