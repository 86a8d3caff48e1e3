//! The pool over streams that no device has.

use std::cell::RefCell;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

#[test]
fn blocks_are_a_sixteenth_longer_at_most() {
    for bytes in [1, 511, 512, 513, 4097, 70_000, 1 << 20, (1 << 20) + 1, 123_456_789, 1 << 33] {
        let block = block_bytes(bytes);
        assert!(block >= bytes && block - bytes < SMALLEST.max(bytes / 16 + 1), "{bytes} {block}");
        assert_eq!(block_bytes(block), block);
    }
}

#[test]
fn a_block_is_lent_again_to_what_it_fits() {
    let mut blocks = Blocks::<u64>::default();
    let block = |memory, address, bytes| Block { memory, address, bytes };
    for (memory, address, bytes) in [
        (PoolMemory::Device, 1, 1024),
        (PoolMemory::Device, 2, 4096),
        (PoolMemory::Device, 3, LONG),
        (PoolMemory::Device, 4, LONG + LONG / 4),
        (PoolMemory::Host, 5, 1024),
    ] {
        blocks.put(block(memory, address, bytes));
    }
    let mut fitting = |memory, bytes, fit| blocks.fitting(memory, bytes, fit).map(|block| block.address);
    assert_eq!(fitting(PoolMemory::Device, 500, Fit::Close), None);
    assert_eq!(fitting(PoolMemory::Device, 1000, Fit::Close), Some(1));
    // A short one serves what is shorter, a long one what is nearly as long.
    assert_eq!(fitting(PoolMemory::Device, 1, Fit::Close), None);
    assert_eq!(fitting(PoolMemory::Device, 1, Fit::Short), Some(2));
    assert_eq!(fitting(PoolMemory::Device, 1, Fit::Short), None);
    assert_eq!(fitting(PoolMemory::Device, LONG + 1, Fit::Short), Some(4));
    assert_eq!(fitting(PoolMemory::Device, LONG - 1, Fit::Close), Some(3));
    assert_eq!(fitting(PoolMemory::Host, 1000, Fit::Short), Some(5));
    assert!(blocks.is_empty());
}

/// Otherwise every ask of this length allocates, however much has been given back.
#[test]
fn what_is_made_for_a_length_serves_that_length_again() {
    let mut blocks = Blocks::<u64>::default();
    for bytes in (1..20_000).chain((1 << 20)..(1 << 20) + 5000) {
        let made = Block { memory: PoolMemory::Device, address: 7, bytes: block_bytes(bytes) };
        blocks.put(made);
        assert_eq!(blocks.fitting(PoolMemory::Device, bytes, Fit::Close), Some(made), "{bytes} bytes");
    }
}

/// Streams that do what they are given when the test says so.
#[derive(Default)]
struct FakeStreams(RefCell<Vec<FakeStream>>);

#[derive(Clone, Copy, Default)]
struct FakeStream {
    given: u64,
    done: u64,
    captures: bool,
    /// Whether the driver does not say how far it has come.
    refuses: bool,
}

impl FakeStreams {
    fn is_done(&self, (stream, number): (usize, u64)) -> bool {
        self.0.borrow()[stream].done >= number
    }

    /// One thing more on a stream.
    fn give(&self, stream: usize) -> (usize, u64) {
        let given = &mut self.0.borrow_mut()[stream].given;
        *given += 1;
        (stream, *given)
    }
}

impl StreamPoints for FakeStreams {
    type Point = (usize, u64);

    fn now(&self) -> Result<Option<Vec<(usize, u64)>>, CudaError> {
        let streams = self.0.borrow();
        let captures = streams.iter().any(|stream| stream.captures);
        let points = streams.iter().enumerate().map(|(stream, FakeStream { given, .. })| (stream, *given));
        Ok((!captures).then(|| points.collect()))
    }

    fn is_passed(&self, point: &(usize, u64)) -> Result<bool, CudaError> {
        match self.0.borrow()[point.0].refuses {
            true => Err(CudaError::NoDevice { text: "a capture".to_owned() }),
            false => Ok(self.is_done(*point)),
        }
    }
}

/// A pool of a device that never runs out.
#[derive(Default)]
struct FakeDevice {
    streams: FakeStreams,
    blocks: Blocks<(usize, u64)>,
    /// Blocks that were made, and allocations for them.
    made: usize,
    allocated: usize,
    /// What was enqueued with blocks, each until it is done.
    uses: Vec<(u64, (usize, u64))>,
}

impl FakeDevice {
    fn new(streams: usize) -> Self {
        Self { streams: FakeStreams(RefCell::new(vec![FakeStream::default(); streams])), ..Self::default() }
    }

    fn take(&mut self, memory: PoolMemory, bytes: usize) -> Block {
        let close = self.blocks.fitting(memory, bytes, Fit::Close);
        let found = close.or_else(|| self.blocks.look(&self.streams, memory, bytes).unwrap());
        let block = found.unwrap_or_else(|| {
            self.made += 1;
            let bytes = block_bytes(bytes);
            let slabs = &mut self.blocks.slabs;
            let cut = if bytes < LONG { slabs.cut(memory, bytes) } else { None };
            let address = cut.unwrap_or_else(|| {
                self.allocated += 1;
                let base = (self.allocated as u64) << 32;
                if bytes >= LONG {
                    return base;
                }
                slabs.add(memory, base, slabs.next_bytes(memory));
                slabs.cut(memory, bytes).unwrap()
            });
            Block { memory, address, bytes }
        });
        assert!(block.bytes >= bytes && block.memory == memory);
        let streams = &self.streams;
        self.uses.retain(|(_, work)| !streams.is_done(*work));
        assert!(
            self.uses.iter().all(|(address, _)| *address != block.address),
            "block {} is still in use",
            block.address
        );
        block
    }

    fn enqueue(&mut self, stream: usize, block: Block) {
        let work = self.streams.give(stream);
        self.uses.push((block.address, work));
    }
}

/// What a group does with masks of seven sizes: a mask's tables and tensors come, are used on two streams, stay for a while, and go in
/// another order, while the device is up to eight masks behind.
#[test]
fn masks_of_known_sizes_make_nothing_new() {
    const PERIOD: usize = 5 * 7 * 8;
    let mut device = FakeDevice::new(2);
    let mut kept: Vec<Vec<Block>> = Vec::new();
    let mut made = Vec::new();
    for number in 0..40 * PERIOD {
        let rows = 256 * (1 + number * 5 % 7);
        let lengths =
            [rows * 2048, rows * 32, rows / 128 * 20, rows / 64 * 12 + 4, 12, rows / 3, rows / 2 + 1];
        let mut blocks: Vec<Block> =
            lengths.iter().map(|bytes| device.take(PoolMemory::Device, *bytes)).collect();
        blocks.push(device.take(PoolMemory::Host, rows / 2 + 1));
        for (at, block) in blocks.iter().enumerate() {
            device.enqueue(at % 2, *block);
        }
        kept.push(blocks);
        if kept.len() > 5 {
            device.blocks.dropped.extend(kept.swap_remove(number * 3 % 5));
        }
        if number.is_multiple_of(8) {
            device.streams.0.borrow_mut().iter_mut().for_each(|stream| stream.done = stream.given);
        }
        if number.is_multiple_of(PERIOD) {
            made.push(device.made);
        }
    }
    assert!(made[2..].iter().all(|count| *count == made[2]), "{made:?}");
}

/// Four ranks prepare masks of 64 plans ahead, use each on a stream and drop it in an order of their own, while the device is up to sixteen
/// masks behind: what the soak of the self-test does on a GPU. Coincidences become rarer and never end; what is allocated does.
#[test]
fn thousands_of_masks_allocate_nothing_after_the_first_hundred() {
    const MASKS: usize = 3000;
    for seed in 0..2 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let plans: Vec<Vec<usize>> = (0..64)
            .map(|_| {
                let rows = 64 * rng.random_range(2..18);
                let tensors = [512, 256, 256, 512, 512, 16, 512, 256, 256].map(|bytes| bytes * rows);
                let tables = [65_536, 65_536, 65_536, 512, 512, 512].into_iter();
                tensors
                    .into_iter()
                    .chain(tables)
                    .chain((0..8).map(|_| rng.random_range(300..60_000)))
                    .collect()
            })
            .collect();
        let mut device = FakeDevice::new(4);
        let mut kept: Vec<Vec<Vec<Block>>> = vec![Vec::new(); 4];
        let mut given: Vec<u64> = Vec::new();
        let mut allocated = 0;
        for mask in 0..MASKS {
            let plan = rng.random_range(0..plans.len());
            for (rank, kept) in kept.iter_mut().enumerate() {
                let blocks: Vec<Block> =
                    plans[plan].iter().map(|bytes| device.take(PoolMemory::Device, *bytes)).collect();
                let work = device.streams.give(rank);
                device.uses.extend(blocks.iter().map(|block| (block.address, work)));
                kept.push(blocks);
                while kept.len() > rng.random_range(2..9) {
                    device.blocks.dropped.extend(kept.swap_remove(rng.random_range(0..kept.len())));
                }
            }
            given.push(mask as u64 + 1);
            for stream in device.streams.0.borrow_mut().iter_mut() {
                let behind = given.len().saturating_sub(rng.random_range(1..=16));
                stream.done = stream.done.max(given[behind]);
            }
            if mask == 100 {
                allocated = device.allocated;
            }
        }
        let more = device.allocated - allocated;
        println!(
            "seed {seed}: {} blocks of {} allocations, {more} of them after the first 100",
            device.made, device.allocated
        );
        assert!(more <= 4, "seed {seed}: {more} allocations after {allocated}");
    }
}

/// Whatever comes and goes: no block is lent that something enqueued uses, and no more blocks are made than the most that were in use at
/// once, of each size.
#[test]
fn a_block_is_lent_behind_what_uses_it() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    const LENGTHS: [usize; 9] = [1, 513, 700, 1025, 1228, 1537, 5000, 70_000, 1 << 20];
    let mut device = FakeDevice::new(4);
    let mut held: Vec<Block> = Vec::new();
    for _ in 0..20_000 {
        match rng.random_range(0..6) {
            0 | 1 if held.len() < 40 => {
                let memory = if rng.random_bool(0.3) { PoolMemory::Host } else { PoolMemory::Device };
                let block = device.take(memory, LENGTHS[rng.random_range(0..LENGTHS.len())]);
                held.push(block);
            }
            2 if !held.is_empty() => {
                let block = held[rng.random_range(0..held.len())];
                device.enqueue(rng.random_range(0..4), block);
            }
            3 if !held.is_empty() => {
                let at = rng.random_range(0..held.len());
                device.blocks.dropped.push(held.swap_remove(at));
            }
            4 => {
                let stream = &mut device.streams.0.borrow_mut()[rng.random_range(0..4)];
                stream.done = rng.random_range(stream.done..=stream.given);
            }
            _ => {
                let stream = &mut device.streams.0.borrow_mut()[rng.random_range(0..4)];
                // Captures are short, and what is enqueued meanwhile is no work.
                stream.captures = !stream.captures && rng.random_bool(0.1);
            }
        }
    }
    // At most 40 are held; the rest are on their way. Growth without end would make thousands.
    assert!(device.made < 1500, "{} blocks were made", device.made);
}

/// While a stream cannot be asked, nothing that waits is lent, and nothing is forgotten.
#[test]
fn blocks_outlive_a_stream_that_cannot_be_asked() {
    let mut device = FakeDevice::new(2);
    let blocks = [0, 1].map(|_| device.take(PoolMemory::Device, LONG));
    let refuse = |refuses| device.streams.0.borrow_mut()[1].refuses = refuses;
    for block in blocks {
        let point = device.streams.give(1);
        device.blocks.pending.push((vec![point], vec![block]));
    }
    refuse(true);
    assert!(device.blocks.look(&device.streams, PoolMemory::Device, LONG).is_err());
    refuse(false);
    assert_eq!(device.blocks.look(&device.streams, PoolMemory::Device, LONG).unwrap(), None);
    device.streams.0.borrow_mut()[1].done = 2;
    for _ in blocks {
        let found = device.blocks.look(&device.streams, PoolMemory::Device, LONG).unwrap();
        assert!(found.is_some_and(|found| blocks.contains(&found)), "{found:?}");
    }
}

#[test]
fn long_blocks_of_the_device_go_back_to_a_lender() {
    let mut blocks = Blocks::<u64>::default();
    for (memory, address, bytes) in [
        (PoolMemory::Device, 1, LONG - 1),
        (PoolMemory::Device, 2, LONG),
        (PoolMemory::Device, 3, 7 * LONG),
        (PoolMemory::Device, 4, 7 * LONG),
        (PoolMemory::Host, 5, 7 * LONG),
    ] {
        blocks.put(Block { memory, address, bytes });
    }
    assert_eq!(blocks.long_blocks(), [2, 3, 4]);
    assert!(blocks.long_blocks().is_empty());
    assert_eq!(blocks.all(), [(PoolMemory::Device, 1), (PoolMemory::Host, 5)]);
    assert!(blocks.is_empty());
}

#[test]
fn what_other_processes_have_open_stays() {
    let mut blocks = Blocks::<u64>::default();
    let block = |address| Block { memory: PoolMemory::Device, address, bytes: 4096 };
    [1, 2, 3].into_iter().for_each(|address| blocks.put(block(address)));
    blocks.exported.insert(2);
    assert_eq!(blocks.unused(), [(PoolMemory::Device, 1), (PoolMemory::Device, 3)]);
    assert_eq!(blocks.all(), [(PoolMemory::Device, 2)]);
}

/// Whoever waits for a device holds up nobody, and takes what was given back before alone.
#[test]
fn memory_is_given_back_while_another_thread_waits_for_the_device() {
    let pool = MemoryPool::default();
    let block = |address| Block { memory: PoolMemory::Device, address, bytes: 4096 };
    pool.give_back(block(1));
    let give_back =
        |address| std::thread::scope(|scope| scope.spawn(|| pool.give_back(block(address))).join());
    let taken = pool
        .taken_out(|| give_back(2).map_err(|_| CudaError::NoDevice { text: String::new() }), Blocks::unused);
    assert_eq!(taken.unwrap(), [(PoolMemory::Device, 1)]);
    assert_eq!(pool.unused_bytes(PoolMemory::Device), 4096);
    // What could not be waited for stays as well.
    let failed = pool.taken_out(|| Err(CudaError::NoDevice { text: String::new() }), Blocks::all);
    assert!(failed.is_err() && pool.unused_bytes(PoolMemory::Device) == 4096);
    assert_eq!(pool.taken_out(|| Ok(()), Blocks::all).unwrap(), [(PoolMemory::Device, 2)]);
}
