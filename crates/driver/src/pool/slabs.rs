//! Long allocations that short blocks are cut from. How many blocks are on their way at once grows by ever rarer coincidences of masks; what
//! is allocated grows by quarters, so that it soon grows no more.

use super::PoolMemory;

/// Bytes of the first slab of each kind, and what lengths of others are multiples of: what the driver maps at once.
const FIRST: usize = 2 << 20;

/// Bytes of the longest.
const LONGEST: usize = 64 << 20;

/// The slabs of one pool.
#[derive(Debug, Default)]
pub(super) struct Slabs(Vec<Slab>);

#[derive(Debug)]
struct Slab {
    memory: PoolMemory,
    base: u64,
    bytes: usize,
    used: usize,
}

impl Slabs {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A block that nobody has had; `None` where no slab has room for it.
    pub(super) fn cut(&mut self, memory: PoolMemory, bytes: usize) -> Option<u64> {
        let mut slabs = self.0.iter_mut().rev().filter(|slab| slab.memory == memory);
        let slab = slabs.find(|slab| slab.bytes - slab.used >= bytes)?;
        slab.used += bytes;
        Some(slab.base + (slab.used - bytes) as u64)
    }

    /// How long the next one is to be, for blocks no longer than the first.
    pub(super) fn next_bytes(&self, memory: PoolMemory) -> usize {
        let all: usize = self.of(memory).map(|slab| slab.bytes).sum();
        (all / 4).next_multiple_of(FIRST).clamp(FIRST, LONGEST)
    }

    /// Takes over an allocation.
    pub(super) fn add(&mut self, memory: PoolMemory, base: u64, bytes: usize) {
        self.0.push(Slab { memory, base, bytes, used: 0 });
    }

    /// Whether a block was cut from one.
    pub(super) fn have(&self, memory: PoolMemory, address: u64) -> bool {
        self.of(memory).any(|slab| (slab.base..slab.base + slab.bytes as u64).contains(&address))
    }

    /// Bytes that nothing was cut from yet.
    pub(super) fn uncut_bytes(&self, memory: PoolMemory) -> usize {
        self.of(memory).map(|slab| slab.bytes - slab.used).sum()
    }

    /// Gives all of them up.
    pub(super) fn take(&mut self) -> impl Iterator<Item = (PoolMemory, u64)> + use<> {
        std::mem::take(&mut self.0).into_iter().map(|slab| (slab.memory, slab.base))
    }

    fn of(&self, memory: PoolMemory) -> impl Iterator<Item = &Slab> {
        self.0.iter().filter(move |slab| slab.memory == memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_cut_side_by_side_and_slabs_grow_by_quarters() {
        let mut slabs = Slabs::default();
        let memory = PoolMemory::Device;
        assert_eq!(slabs.cut(memory, 512), None);
        slabs.add(memory, 1 << 30, slabs.next_bytes(memory));
        assert_eq!(slabs.cut(memory, FIRST - 512), Some(1 << 30));
        assert_eq!(slabs.cut(memory, 1024), None);
        assert_eq!(slabs.cut(PoolMemory::Host, 512), None);
        assert_eq!(slabs.cut(memory, 512), Some((1 << 30) + FIRST as u64 - 512));
        assert_eq!((slabs.uncut_bytes(memory), slabs.cut(memory, 512)), (0, None));
        let mut lengths = Vec::new();
        for base in 2..60 {
            lengths.push(slabs.next_bytes(memory));
            slabs.add(memory, base << 30, slabs.next_bytes(memory));
        }
        assert!(lengths.is_sorted() && lengths[0] == FIRST && lengths[57] == LONGEST, "{lengths:?}");
        assert!(slabs.have(memory, 3 << 30) && !slabs.have(memory, 60 << 30));
        assert!(!slabs.have(PoolMemory::Host, 3 << 30));
        assert_eq!((slabs.take().count(), slabs.take().count()), (59, 0));
    }
}
