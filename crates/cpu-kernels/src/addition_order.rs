//! The order in which threads of a CPU backward add to dq, so that its bits depend on no timing.

use std::sync::{Condvar, Mutex};

use crate::queue::lock;

/// Keeps the order in which key blocks add to a tile: block after block, each moving from tile to tile upwards.
///
/// It knows only the blocks in progress, so it costs no more than the number of threads.
pub(crate) struct AdditionOrder {
    heads: Vec<Head>,
}

struct Head {
    progress: Mutex<Progress>,
    moved: Condvar,
}

#[derive(Default)]
struct Progress {
    /// (block, its next tile) of the blocks in progress.
    active: Vec<(usize, usize)>,
    /// A worker has panicked: whoever waits for it would wait forever.
    failed: bool,
}

impl AdditionOrder {
    /// Nothing in progress. Heads are independent of each other.
    pub(crate) fn new(heads: usize) -> Self {
        let head = || Head { progress: Mutex::default(), moved: Condvar::new() };
        Self { heads: (0..heads).map(|_| head()).collect() }
    }

    /// Enters a block. Blocks of a head are entered in ascending order.
    pub(crate) fn begin(&self, head: usize, block: usize) -> Ticket<'_> {
        let head = &self.heads[head];
        lock(&head.progress).active.push((block, 0));
        Ticket { head, block }
    }
}

/// One block in progress. Dropping it ends the block.
pub(crate) struct Ticket<'a> {
    head: &'a Head,
    block: usize,
}

impl Ticket<'_> {
    /// Waits until all earlier blocks are past `tile`.
    ///
    /// # Panics
    /// When the worker of another block has panicked.
    pub(crate) fn reach(&self, tile: usize) {
        let mut progress = lock(&self.head.progress);
        loop {
            assert!(!progress.failed, "another worker of this backward has panicked");
            if !progress.active.iter().any(|&(block, next)| block < self.block && next <= tile) {
                return;
            }
            progress = self.head.moved.wait(progress).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// This block is past `tile`.
    pub(crate) fn pass(&self, tile: usize) {
        let mut progress = lock(&self.head.progress);
        for (block, next) in &mut progress.active {
            if *block == self.block {
                *next = tile + 1;
            }
        }
        drop(progress);
        self.head.moved.notify_all();
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut progress = lock(&self.head.progress);
        progress.active.retain(|&(block, _)| block != self.block);
        progress.failed |= std::thread::panicking();
        drop(progress);
        self.head.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn blocks_add_to_a_tile_in_order() {
        const BLOCKS: usize = 12;
        const TILES: usize = 20;
        let order = AdditionOrder::new(1);
        let tiles: Vec<Mutex<Vec<usize>>> = (0..TILES).map(|_| Mutex::default()).collect();
        let next = Mutex::new(0);
        thread::scope(|scope| {
            for worker in 0..4u64 {
                let (order, tiles, next) = (&order, &tiles, &next);
                scope.spawn(move || {
                    loop {
                        let (block, ticket) = {
                            let mut next = lock(next);
                            if *next == BLOCKS {
                                break;
                            }
                            *next += 1;
                            (*next - 1, order.begin(0, *next - 1))
                        };
                        // Blocks see different tiles, as under a mask.
                        for tile in (block % 3..TILES).step_by(1 + block % 2) {
                            thread::sleep(Duration::from_micros((worker * 37 + tile as u64 * 11) % 90));
                            ticket.reach(tile);
                            lock(&tiles[tile]).push(block);
                            ticket.pass(tile);
                        }
                    }
                });
            }
        });
        for tile in &tiles {
            let blocks = lock(tile);
            assert!(!blocks.is_empty() && blocks.is_sorted(), "{blocks:?}");
        }
    }

    #[test]
    fn a_panic_frees_who_waits_for_it() {
        let order = AdditionOrder::new(1);
        let waited = AtomicUsize::new(0);
        thread::scope(|scope| {
            let (first, second) = (order.begin(0, 0), order.begin(0, 1));
            let waiter = scope.spawn(|| {
                let second = second;
                waited.fetch_add(1, Ordering::SeqCst);
                second.reach(5);
            });
            let failing = scope.spawn(move || {
                let _first = first;
                panic!("injected");
            });
            assert!(failing.join().is_err());
            assert!(waiter.join().is_err());
        });
        assert_eq!(waited.into_inner(), 1);
    }
}
