use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::collective::Contract;
use super::pattern::Pattern;
use crate::cpu::CpuBuffer;
use crate::monitor::Monitor;
use crate::world::{Awaited, Blocker, StreamStatus, WaitEnd, World};
use crate::{ExecError, OpPlace};

/// Where ranks publish their parts in collectives and find those of others. A post stays until no rank can ask for it.
pub(super) struct Board {
    slots: Vec<Arc<Monitor<Slot>>>,
    /// Per rank: every collective with a smaller number has finished there.
    finished_below: Vec<AtomicU64>,
}

#[derive(Default)]
struct Slot {
    posts: BTreeMap<u64, Entry>,
    /// Finished out of order, on another stream.
    finished: BTreeSet<u64>,
    last_finished: Option<(u64, OpPlace)>,
    /// Number of posts at which old ones are looked for.
    prune_at: usize,
}

struct Entry {
    post: Arc<Post>,
    /// Ranks that have not copied yet, ascending.
    outstanding: Vec<usize>,
}

/// One rank's part in one collective, as others see it.
pub(super) struct Post {
    pub(super) place: OpPlace,
    pub(super) contract: Arc<Contract>,
    pub(super) pattern: Arc<Pattern>,
    pub(super) at: Instant,
    /// Empty once everyone has copied, so that a post kept for late comers keeps no memory alive.
    pub(super) inputs: Vec<CpuBuffer>,
}

impl Board {
    pub(super) fn new(world: &World) -> Self {
        Self {
            slots: (0..world.size()).map(|_| world.monitor(Slot::default())).collect(),
            finished_below: (0..world.size()).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(super) fn publish(&self, rank: usize, sequence: u64, post: Post) {
        let outstanding = post.pattern.outgoing.iter().map(|peer| peer.rank).collect();
        self.slots[rank].update(|slot| {
            slot.posts.insert(sequence, Entry { post: Arc::new(post), outstanding });
        });
    }

    /// Waits until `peer` has published its part in collective `sequence`.
    pub(super) fn post_of(
        &self,
        world: &World,
        waiter: &Waiter<'_>,
        peer: usize,
        sequence: u64,
    ) -> Result<Arc<Post>, ExecError> {
        let look = |slot: &Slot| slot.posts.get(&sequence).map(|entry| entry.post.clone());
        if let Some(post) = self.slots[peer].peek(look) {
            return Ok(post);
        }
        let began = Instant::now();
        waiter.status.block(Some(Blocker::Rank(peer)));
        let end = world.wait(&self.slots[peer], world.deadline(), |slot| look(slot));
        let result = end.map_err(|end| self.end_of_wait(end, world, waiter, peer, sequence, began));
        waiter.status.block(None);
        result
    }

    /// `reader` has copied what `rank` published for it.
    pub(super) fn acknowledge(&self, rank: usize, sequence: u64, reader: usize) {
        self.slots[rank].update(|slot| {
            if let Some(entry) = slot.posts.get_mut(&sequence) {
                entry.outstanding.retain(|outstanding| *outstanding != reader);
            }
        });
    }

    /// Waits until everyone has copied what this rank published.
    pub(super) fn all_copied(
        &self,
        world: &World,
        waiter: &Waiter<'_>,
        sequence: u64,
    ) -> Result<(), ExecError> {
        let slot = &self.slots[waiter.rank];
        let first =
            |slot: &Slot| slot.posts.get(&sequence).and_then(|entry| entry.outstanding.first().copied());
        while let Some(peer) = slot.peek(first) {
            let began = Instant::now();
            waiter.status.block(Some(Blocker::Rank(peer)));
            let end = world.wait(slot, world.deadline(), |slot| (first(slot) != Some(peer)).then_some(()));
            let result = end.map_err(|end| self.end_of_wait(end, world, waiter, peer, sequence, began));
            waiter.status.block(None);
            result?;
        }
        Ok(())
    }

    /// This rank is through with collective `sequence`.
    pub(super) fn finish(&self, rank: usize, sequence: u64, place: &OpPlace) {
        self.slots[rank].update(|slot| {
            if let Some(entry) = slot.posts.get_mut(&sequence) {
                let Post { place, contract, pattern, at, .. } = &*entry.post;
                let (place, contract, pattern) = (place.clone(), contract.clone(), pattern.clone());
                entry.post = Arc::new(Post { place, contract, pattern, at: *at, inputs: Vec::new() });
            }
            slot.last_finished = Some((sequence, place.clone()));
            slot.finished.insert(sequence);
            let mut below = self.finished_below[rank].load(Ordering::Relaxed);
            while slot.finished.remove(&below) {
                below += 1;
            }
            self.finished_below[rank].store(below, Ordering::Relaxed);
            if slot.posts.len() > slot.prune_at {
                let low = self.finished_below.iter().map(|below| below.load(Ordering::Relaxed)).min();
                slot.posts = slot.posts.split_off(&low.unwrap_or(0));
                // Looked for again when twice as many have gathered: constant work a collective, whatever the world's size.
                slot.prune_at = (2 * slot.posts.len()).max(2 * self.slots.len());
            }
        });
    }

    /// Number of posts that `rank` still keeps.
    #[cfg(test)]
    pub(super) fn kept(&self, rank: usize) -> usize {
        self.slots[rank].peek(|slot| slot.posts.len())
    }

    fn end_of_wait(
        &self,
        end: WaitEnd,
        world: &World,
        waiter: &Waiter<'_>,
        peer: usize,
        sequence: u64,
        began: Instant,
    ) -> ExecError {
        if let WaitEnd::Failed(error) = end {
            return error;
        }
        let evidence = self.slots[peer].peek(|slot| match &slot.last_finished {
            Some((sequence, place)) => format!("rank {peer} last finished collective {sequence} {place}"),
            None => format!("rank {peer} has finished no collective"),
        });
        let place = format!("collective {sequence} {}", waiter.place);
        let awaited = Awaited { name: format!("rank {peer}"), evidence, blocker: Some(Blocker::Rank(peer)) };
        world.stalled(waiter.rank, place, began, awaited)
    }
}

/// Who waits, for errors and for those who ask what it is doing.
pub(super) struct Waiter<'a> {
    pub(super) rank: usize,
    pub(super) place: &'a OpPlace,
    pub(super) status: &'a StreamStatus,
}
