//! Rings of small messages between the processes of one host, in memory that both map: who polls reads them without the system, where a
//! socket and the thread that listens to it took 110 to 217 us (`docs/experiments/076-fresh-masks.md`). As NCCL's shared-memory transport,
//! which takes rows as well.
//!
//! Unsafe code is the mapping, whose file can neither shrink nor be anything but memory of this job (`Segment`), and views of its words.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::process;
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::monitor::lock;
use crate::{ExecError, Rendezvous};

/// Words of a message.
pub const RING_WORDS: usize = 2;
/// Messages that a ring holds. Who finds it full sends by another way.
const SLOTS: u64 = 256;
/// Words of a segment before its rings: by them a process knows that it has opened the right one.
const HEAD: usize = 8;
/// Words of a ring before its slots: how many messages have been written, and in another cache line how many have been read.
const WRITTEN: usize = 0;
const READ: usize = 8;
const COUNTERS: usize = 16;
const RING: usize = COUNTERS + RING_WORDS * SLOTS as usize;

/// The rings of one process, to and from each of the others of its host. Where one cannot be made, nobody writes to it.
#[derive(Debug, Default)]
pub struct SharedRings {
    rank: usize,
    /// What this rank writes.
    own: Option<Segment>,
    /// By rank: whether it reads that, and a lock, for messages are written one after the other.
    readers: Vec<Option<Mutex<()>>>,
    /// By rank: what it writes, likewise.
    writers: Vec<Option<Mutex<Segment>>>,
}

/// Where a process finds the segment of another.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Address {
    process: u32,
    descriptor: i32,
    nonce: [u64; 2],
}

impl SharedRings {
    /// Connects this rank to all others of its host, which do the same with the same `name`.
    ///
    /// # Errors
    /// The rendezvous'. That there is no such memory is none.
    pub fn connect(rendezvous: &Rendezvous, name: &str) -> Result<Self, ExecError> {
        let (rank, ranks) = (rendezvous.rank(), rendezvous.world_size());
        let made = Segment::create(ranks);
        let address = made.as_ref().map(|(_, _, address)| address.clone());
        let addresses: Vec<Option<Address>> = rendezvous.gather(&format!("rings {name}"), &address)?;
        let open = |(peer, address): (usize, &Option<Address>)| {
            let address = address.as_ref().filter(|_| peer != rank)?;
            Segment::open(address, ranks)
        };
        let opened: Vec<Option<Segment>> = addresses.iter().enumerate().map(open).collect();
        let reads: Vec<bool> = opened.iter().map(Option::is_some).collect();
        // From here on nobody opens anything.
        let all: Vec<Vec<bool>> = rendezvous.gather(&format!("open rings {name}"), &reads)?;
        let is_read = |reads: &Vec<bool>| reads.get(rank).copied().unwrap_or(false);
        Ok(Self {
            rank,
            own: made.map(|(segment, _, _)| segment),
            readers: all.iter().map(|reads| is_read(reads).then(Mutex::default)).collect(),
            writers: opened.into_iter().map(|segment| segment.map(Mutex::new)).collect(),
        })
    }

    /// Writes a message to `peer`; false where it reads none, or has not read those that its ring holds.
    pub fn write(&self, peer: usize, message: [u64; RING_WORDS]) -> bool {
        let (Some(own), Some(Some(turn))) = (&self.own, self.readers.get(peer)) else { return false };
        let _turn = lock(turn);
        own.write(peer, message)
    }

    /// Whether `peer` may write to this rank.
    pub fn reads(&self, peer: usize) -> bool {
        self.writers.get(peer).is_some_and(Option::is_some)
    }

    /// Gives `take` the messages of `peer` in their order, up to the first that it does not take, which stays.
    pub fn read(&self, peer: usize, mut take: impl FnMut([u64; RING_WORDS]) -> bool) {
        if let Some(Some(segment)) = self.writers.get(peer) {
            let segment = lock(segment);
            while segment.first(self.rank).is_some_and(&mut take) {
                segment.pass(self.rank);
            }
        }
    }
}

/// The memory to which one process writes, a ring for each rank.
#[derive(Debug)]
struct Segment {
    words: NonNull<u64>,
    count: usize,
}

// SAFETY: it is memory that stays until it is dropped, and its words are read and written as atomics only.
unsafe impl Send for Segment {}
// SAFETY: likewise.
unsafe impl Sync for Segment {}

impl Segment {
    /// With a ring for each of so many ranks; the file, which others open, and where they find it. `None` where the system has none.
    fn create(ranks: usize) -> Option<(Self, File, Address)> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).ok()?;
        let nonce: [u64; 2] = bytemuck::cast(random);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("counterpoint rings", flags).ok()?);
        ftruncate(&file, bytes(ranks)).ok()?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
        let segment = Self::map(&file, ranks)?;
        for (at, word) in nonce.into_iter().enumerate() {
            segment.word(at).store(word, Ordering::Relaxed);
        }
        let address = Address { process: process::id(), descriptor: file.as_raw_fd(), nonce };
        Some((segment, file, address))
    }

    /// That of another process; `None` where it cannot be opened, as of another host or container, or is not what was announced.
    fn open(address: &Address, ranks: usize) -> Option<Self> {
        let path = format!("/proc/{}/fd/{}", address.process, address.descriptor);
        // A device or a pipe of somebody else's is not even opened.
        let is_ours = |file: std::io::Result<std::fs::Metadata>| {
            let of = |data: &std::fs::Metadata| (data.is_file(), data.uid(), data.len());
            file.is_ok_and(|data| of(&data) == (true, geteuid().as_raw(), bytes(ranks)))
        };
        if !is_ours(std::fs::metadata(&path)) {
            return None;
        }
        let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()?;
        let seals = fcntl_get_seals(&file).ok()?;
        if !is_ours(file.metadata()) || !seals.contains(SealFlags::SHRINK) {
            return None;
        }
        let segment = Self::map(&file, ranks)?;
        let nonce = [0, 1].map(|at| segment.word(at).load(Ordering::Relaxed));
        (nonce == address.nonce).then_some(segment)
    }

    fn map(file: &File, ranks: usize) -> Option<Self> {
        let length = bytes(ranks) as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, where the system has room, of a file of this length that cannot shrink.
        let memory = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) }.ok()?;
        Some(Self { words: NonNull::new(memory.cast())?, count: length / size_of::<u64>() })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.count);
        // SAFETY: within the mapping, which is aligned to pages and lives as long as `self`; everyone's access to it is atomic.
        unsafe { AtomicU64::from_ptr(self.words.as_ptr().add(at)) }
    }

    fn counter(&self, reader: usize, which: usize) -> &AtomicU64 {
        self.word(HEAD + reader * RING + which)
    }

    fn slot(&self, reader: usize, number: u64) -> [&AtomicU64; RING_WORDS] {
        let begin = HEAD + reader * RING + COUNTERS + (number % SLOTS) as usize * RING_WORDS;
        [self.word(begin), self.word(begin + 1)]
    }

    /// Only one thread at a time; false when the ring is full.
    fn write(&self, reader: usize, message: [u64; RING_WORDS]) -> bool {
        let written = self.counter(reader, WRITTEN).load(Ordering::Relaxed);
        if written.wrapping_sub(self.counter(reader, READ).load(Ordering::Acquire)) >= SLOTS {
            return false;
        }
        for (word, value) in self.slot(reader, written).into_iter().zip(message) {
            word.store(value, Ordering::Relaxed);
        }
        self.counter(reader, WRITTEN).store(written.wrapping_add(1), Ordering::Release);
        true
    }

    /// The first message that has not been read. Only one thread at a time.
    fn first(&self, reader: usize) -> Option<[u64; RING_WORDS]> {
        let read = self.counter(reader, READ).load(Ordering::Relaxed);
        let is_written = self.counter(reader, WRITTEN).load(Ordering::Acquire) != read;
        is_written.then(|| self.slot(reader, read).map(|word| word.load(Ordering::Relaxed)))
    }

    /// That one has been read.
    fn pass(&self, reader: usize) {
        let read = self.counter(reader, READ).load(Ordering::Relaxed);
        self.counter(reader, READ).store(read.wrapping_add(1), Ordering::Release);
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made, of which no view is left.
        unsafe { munmap(self.words.as_ptr().cast(), self.count * size_of::<u64>()) }.ok();
    }
}

/// Of a segment for so many ranks.
fn bytes(ranks: usize) -> u64 {
    ((HEAD + ranks * RING) * size_of::<u64>()) as u64
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// The segment that rank 0 of two writes, as it has it and as rank 1 has it, which finds it as another process would.
    fn both() -> (Segment, Segment, File, Address) {
        let (own, file, address) = Segment::create(2).unwrap();
        let opened = Segment::open(&address, 2).unwrap();
        (own, opened, file, address)
    }

    #[test]
    fn messages_come_in_their_order_while_they_are_written() {
        let (own, opened, ..) = both();
        let rings = |own, readers: usize, writers: Vec<Option<Segment>>, rank| SharedRings {
            rank,
            own,
            readers: (0..2).map(|peer| (peer == readers).then(Mutex::default)).collect(),
            writers: writers.into_iter().map(|segment| segment.map(Mutex::new)).collect(),
        };
        let writer = rings(Some(own), 1, vec![None, None], 0);
        let reader = rings(None, 2, vec![Some(opened), None], 1);
        assert!(reader.reads(0) && !reader.reads(1) && !writer.reads(1));
        assert!(!writer.write(0, [0; 2]) && !reader.write(0, [0; 2]), "nobody reads these");
        const COUNT: u64 = 100_000;
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..COUNT {
                    while !writer.write(1, [number, !number]) {
                        thread::yield_now();
                    }
                }
            });
            let mut next = 0;
            while next < COUNT {
                // What is not taken comes again.
                let stops_at = next + 100;
                reader.read(0, |message| {
                    let takes = next < stops_at;
                    if takes {
                        assert_eq!(message, [next, !next]);
                        next += 1;
                    }
                    takes
                });
            }
        });
    }

    #[test]
    fn a_full_ring_takes_nothing_until_somebody_reads() {
        let (own, opened, ..) = both();
        assert!((0..SLOTS).all(|number| own.write(1, [number, 0])));
        assert!(!own.write(1, [SLOTS, 0]));
        assert_eq!(opened.first(1), Some([0, 0]));
        opened.pass(1);
        assert!(own.write(1, [SLOTS, 0]));
        assert_eq!((opened.first(1), opened.first(0)), (Some([1, 0]), None));
    }

    #[test]
    fn only_the_segment_that_was_announced_is_opened() {
        let (_own, _opened, file, address) = both();
        assert!(Segment::open(&Address { nonce: [0; 2], ..address.clone() }, 2).is_none());
        assert!(Segment::open(&Address { process: u32::MAX, ..address.clone() }, 2).is_none());
        assert!(Segment::open(&address, 3).is_none(), "another length");
        let ordinary = tempfile::tempfile().unwrap();
        ordinary.set_len(bytes(2)).unwrap();
        let descriptor = ordinary.as_raw_fd();
        assert!(Segment::open(&Address { descriptor, ..address.clone() }, 2).is_none(), "it can shrink");
        assert!(file.set_len(8).is_err(), "what others map does not shrink");
        drop(file);
        assert!(Segment::open(&address, 2).is_none());
    }
}
