//! The board on which ranks publish their parts of collectives, are matched with their peers, and learn that inputs are free again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use counterpoint_mask::Range;

use super::contract::Collective;
use super::pattern::PeerRows;
use super::waiter::Waiter;
use crate::monitor::Monitor;
use crate::world::{Awaited, Blocker, WaitEnd, World};
use crate::{CollectiveDifference, ExecError, OpPlace};

/// In which a rank hears why one of another process has left, if that one failed.
const REASON: Duration = Duration::from_millis(500);
/// A thread drops old posts ([`Board::tidy`]). So many times as many have the rank that publishes drop them.
const LEFT_TO_OTHERS: usize = 4;
/// Between two looks of one who sleeps at what no thread listens to.
const NAP: Duration = Duration::from_micros(200);

/// Where ranks publish their parts in collectives and find those of others, each with a transport's own payload (where its
/// inputs are, say). A post stays until no rank can ask for it.
///
/// Ranks of one process share a board. A rank that is a process has one to itself, on which its transport publishes what
/// the others sent.
pub struct Board<P> {
    slots: Vec<Arc<Monitor<Slot<P>>>>,
    /// The ranks that ask.
    readers: Range,
    /// Per rank that asks: every collective with a smaller number has finished there.
    finished_below: Vec<AtomicU64>,
    /// Whether a thread drops old posts.
    is_tidied: AtomicBool,
}

struct Slot<P> {
    posts: BTreeMap<u64, Entry<P>>,
    /// Finished out of order, on another stream.
    finished: BTreeSet<u64>,
    last_finished: Option<(u64, OpPlace)>,
    last_announced: Option<(u64, OpPlace)>,
    /// The first number that the rank takes no part in, once it has left.
    left_from: Option<u64>,
    /// Number of posts at which old ones are looked for.
    prune_at: usize,
}

impl<P> Slot<P> {
    /// The part of its rank, which is `peer`, or that it has left.
    fn post(
        &self,
        waiter: &Waiter<'_>,
        peer: usize,
        sequence: u64,
    ) -> Option<Result<Arc<Post<P>>, ExecError>> {
        match self.posts.get(&sequence) {
            Some(entry) => Some(Ok(entry.post.clone())),
            None => self
                .left_from
                .filter(|from| *from <= sequence)
                .map(|_| Err(left(peer, waiter.rank, sequence, waiter.place))),
        }
    }
}

struct Entry<P> {
    post: Arc<Post<P>>,
    /// Ranks that have not used it yet, ascending.
    outstanding: Vec<usize>,
    /// Its rank is through with the collective.
    is_finished: bool,
}

impl<P: Payload> Entry<P> {
    /// Lets go of what everyone has used. The post stays, for late comers.
    fn spend(&mut self) {
        let Post { place, collective, at, payload } = &*self.post;
        let (place, collective, payload) = (place.clone(), collective.clone(), payload.spent());
        self.post = Arc::new(Post { place, collective, at: *at, payload });
    }
}

/// One rank's part in one collective, as others see it.
pub struct Post<P> {
    /// Its place in the rank's Program.
    pub place: OpPlace,
    /// Its part.
    pub collective: Arc<Collective>,
    /// When it was published.
    pub at: Instant,
    /// What the transport needs of it.
    pub payload: P,
}

/// What a transport publishes with a part.
pub trait Payload: Send + Sync + 'static {
    /// What is left of it once everyone has used it: a post that is kept for late comers must keep no memory alive.
    fn spent(&self) -> Self;
}

impl<P> Post<P> {
    /// Whether the part of `peer` fits this one of `rank` in collective `sequence`.
    ///
    /// # Errors
    /// [`ExecError::Left`] when one closes its group and the other does not; [`ExecError::PlanDiffers`] when it is another plan's, [`ExecError::CollectiveOrder`] when it is another collective, [`ExecError::CollectiveMismatch`] when tensors or splits
    /// do not fit.
    pub fn check_peer(&self, rank: usize, sequence: u64, peer: usize, other: &Self) -> Result<(), ExecError> {
        let (own_contract, other_contract) = (&self.collective.contract, &other.collective.contract);
        match (own_contract.ends_group(), other_contract.ends_group()) {
            (true, false) => return Err(left(rank, peer, sequence, &other.place)),
            (false, true) => return Err(left(peer, rank, sequence, &self.place)),
            _ => {}
        }
        if let (Some(own), Some(theirs)) = (&own_contract.plan, &other_contract.plan)
            && let Some(difference) = own.difference(theirs)
        {
            return Err(ExecError::PlanDiffers {
                rank,
                peer,
                what: difference.what,
                own: difference.own,
                other: difference.other,
            });
        }
        if own_contract.kind != other_contract.kind || self.place.label != other.place.label {
            return Err(ExecError::CollectiveOrder {
                rank,
                peer,
                sequence,
                own: format!("{} {}", own_contract.kind, self.place),
                other: format!("{} {}", other_contract.kind, other.place),
            });
        }
        let mismatch = |difference| ExecError::CollectiveMismatch {
            rank,
            peer,
            sequence,
            collective: self.place.to_string(),
            reason: Box::new(difference),
        };
        if own_contract.tensors != other_contract.tensors {
            let (own, other) = (own_contract.tensors.clone(), other_contract.tensors.clone());
            return Err(mismatch(CollectiveDifference::Tensors { rank, own, peer, other }));
        }
        let (own, other) = (&self.collective.pattern, &other.collective.pattern);
        for (sender, receiver, sent, expected) in
            [(peer, rank, other.to(rank), own.from(peer)), (rank, peer, own.to(peer), other.from(rank))]
        {
            if !sent.iter().map(Range::len).eq(expected.iter().map(Range::len)) {
                let lengths = |rows: &[Range]| rows.iter().map(Range::len).collect::<Vec<_>>();
                let (sent, expected) = (lengths(sent), lengths(expected));
                return Err(mismatch(CollectiveDifference::Splits { sender, sent, receiver, expected }));
            }
        }
        Ok(())
    }
}

impl<P: Payload> Board<P> {
    /// A board for the ranks of `world`, all of which share it.
    pub fn new(world: &World) -> Self {
        Self::read_by(world, Range::new(0, world.size()))
    }

    /// A board that only `rank` asks.
    pub fn of_rank(world: &World, rank: usize) -> Self {
        Self::read_by(world, Range::new(rank, rank + 1))
    }

    fn read_by(world: &World, readers: Range) -> Self {
        let slot = || Slot {
            posts: BTreeMap::new(),
            finished: BTreeSet::new(),
            last_finished: None,
            last_announced: None,
            left_from: None,
            prune_at: 0,
        };
        Self {
            slots: (0..world.size()).map(|_| world.monitor(slot())).collect(),
            readers,
            finished_below: (0..readers.len()).map(|_| AtomicU64::new(0)).collect(),
            is_tidied: AtomicBool::new(false),
        }
    }

    /// Publishes the part of `rank` in collective `sequence`, which `users` will use and acknowledge: those who read its inputs,
    /// say, or those who write its outputs.
    pub fn publish(&self, rank: usize, sequence: u64, post: Post<P>, users: &[PeerRows]) -> Arc<Post<P>> {
        let outstanding = users.iter().map(|peer| peer.rank).collect();
        let post = Arc::new(post);
        let old = self.slots[rank].update(|slot| {
            slot.last_announced = Some((sequence, post.place.clone()));
            slot.posts.insert(sequence, Entry { post: post.clone(), outstanding, is_finished: false });
            let others = if self.is_tidied.load(Ordering::Relaxed) { LEFT_TO_OTHERS } else { 1 };
            (slot.posts.len() > others * slot.prune_at).then(|| self.prune(slot))
        });
        drop(old);
        post
    }

    /// Drops posts that no rank can ask for any more, where many have gathered. For a thread of its own: old posts are in no cache.
    /// Without it the rank that publishes drops them later.
    pub(super) fn tidy(&self) {
        self.is_tidied.store(true, Ordering::Relaxed);
        for slot in &self.slots {
            drop(slot.update(|slot| (slot.posts.len() > slot.prune_at).then(|| self.prune(slot))));
        }
    }

    /// The posts of a slot that no rank can ask for any more, to be dropped without the slot's lock.
    fn prune(&self, slot: &mut Slot<P>) -> BTreeMap<u64, Entry<P>> {
        let low = self.finished_below.iter().map(|below| below.load(Ordering::Relaxed)).min();
        let kept = slot.posts.split_off(&low.unwrap_or(0));
        // Looked for again when twice as many have gathered: constant work a collective, whatever the world's size.
        slot.prune_at = (2 * kept.len()).max(2 * self.slots.len());
        std::mem::replace(&mut slot.posts, kept)
    }

    /// `rank` takes part in no collective from number `sequence` on: whoever waits for it there waits no longer.
    pub fn leave(&self, rank: usize, sequence: u64) {
        self.slots[rank].update(|slot| {
            slot.left_from = Some(slot.left_from.map_or(sequence, |known| known.min(sequence)));
        });
    }

    /// Waits until `peer` has published its part in collective `sequence`.
    ///
    /// # Errors
    /// The world's error; [`ExecError::Left`] when `peer` has left and never will; [`ExecError::Stalled`] at the limit.
    pub fn post_of(
        &self,
        world: &World,
        waiter: &Waiter<'_>,
        peer: usize,
        sequence: u64,
    ) -> Result<Arc<Post<P>>, ExecError> {
        let look = |slot: &Slot<P>| slot.post(waiter, peer, sequence);
        let or_failure = |left| self.end_of_peer(world, peer, left);
        let listen = || waiter.listener.is_some_and(|listener| listener.listen(peer));
        let began = Instant::now();
        let mut waits = false;
        let must_listen = loop {
            // What has come is on the board before it is looked at.
            let must_listen = listen();
            if let Some(found) = self.slots[peer].peek(look) {
                return found.map_err(or_failure);
            }
            if !std::mem::replace(&mut waits, true) {
                world.note_wait();
            }
            if began.elapsed() >= waiter.polls {
                break must_listen;
            }
            std::hint::spin_loop();
        };
        waiter.status.block(Some(Blocker::Rank(peer)));
        let deadline = world.deadline();
        let end = loop {
            let until = if must_listen { deadline.min(Instant::now() + NAP) } else { deadline };
            match world.wait(&self.slots[peer], until, |slot| look(slot)) {
                Err(WaitEnd::Limit) if until < deadline => _ = listen(),
                end => break end,
            }
        };
        let found = end.map_err(|end| self.end_of_wait(end, world, waiter, peer, sequence, began))?;
        let post = found.map_err(or_failure)?;
        // Not after a failure: others whose limits end now must not take this stream for one that works.
        waiter.status.block(None);
        Ok(post)
    }

    /// The part of `peer` in collective `sequence`, if it has come: nobody waits, but has known since `began` that it must.
    ///
    /// # Errors
    /// As [`Board::post_of`].
    pub(super) fn found(
        &self,
        world: &World,
        waiter: &Waiter<'_>,
        peer: usize,
        sequence: u64,
        began: Instant,
    ) -> Result<Option<Arc<Post<P>>>, ExecError> {
        waiter.listener.map(|listener| listener.listen(peer));
        match self.slots[peer].peek(|slot| slot.post(waiter, peer, sequence)) {
            Some(found) => found.map(Some).map_err(|left| self.end_of_peer(world, peer, left)),
            None if began.elapsed() < world.config().limit => Ok(None),
            None => Err(self.end_of_wait(WaitEnd::Limit, world, waiter, peer, sequence, began)),
        }
    }

    /// What became of a `peer` that has left: one that has failed leaves too, and of another process this rank hears why by another way.
    fn end_of_peer(&self, world: &World, peer: usize, left: ExecError) -> ExecError {
        let now = Instant::now();
        let soon = if self.reads(peer) { now } else { world.deadline().min(now + REASON) };
        match world.wait(&self.slots[peer], soon, |_| None::<()>) {
            Err(WaitEnd::Failed(error)) => error,
            Ok(()) | Err(WaitEnd::Limit) => left,
        }
    }

    /// `user` has used what `rank` published for it.
    pub fn acknowledge(&self, rank: usize, sequence: u64, user: usize) {
        self.slots[rank].update(|slot| {
            if let Some(entry) = slot.posts.get_mut(&sequence) {
                entry.outstanding.retain(|outstanding| *outstanding != user);
                // One of another process does not finish here, so that nobody else lets go of what it sent.
                if !self.reads(rank) || (entry.is_finished && entry.outstanding.is_empty()) {
                    entry.spend();
                }
            }
        });
    }

    fn reads(&self, rank: usize) -> bool {
        (self.readers.start..self.readers.end).contains(&rank)
    }

    /// Waits until everyone has used what this rank published.
    ///
    /// # Errors
    /// As [`Board::post_of`].
    pub fn all_used(&self, world: &World, waiter: &Waiter<'_>, sequence: u64) -> Result<(), ExecError> {
        let slot = &self.slots[waiter.rank];
        let first =
            |slot: &Slot<P>| slot.posts.get(&sequence).and_then(|entry| entry.outstanding.first().copied());
        while let Some(peer) = slot.peek(first) {
            let began = Instant::now();
            waiter.status.block(Some(Blocker::Rank(peer)));
            let end = world.wait(slot, world.deadline(), |slot| (first(slot) != Some(peer)).then_some(()));
            end.map_err(|end| self.end_of_wait(end, world, waiter, peer, sequence, began))?;
            waiter.status.block(None);
        }
        Ok(())
    }

    /// This rank is through with collective `sequence`. What it published stays for those who have not used it.
    pub fn finish(&self, rank: usize, sequence: u64, place: &OpPlace) {
        self.slots[rank].update(|slot| {
            if let Some(entry) = slot.posts.get_mut(&sequence) {
                entry.is_finished = true;
                if entry.outstanding.is_empty() {
                    entry.spend();
                }
            }
            slot.last_finished = Some((sequence, place.clone()));
            slot.finished.insert(sequence);
            let finished_below = &self.finished_below[rank - self.readers.start];
            let mut below = finished_below.load(Ordering::Relaxed);
            while slot.finished.remove(&below) {
                below += 1;
            }
            finished_below.store(below, Ordering::Relaxed);
        });
    }

    /// Number of posts that `rank` still keeps.
    #[cfg(test)]
    pub(crate) fn kept(&self, rank: usize) -> usize {
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
        let evidence = self.slots[peer].peek(|slot| match (&slot.last_finished, &slot.last_announced) {
            (Some((sequence, place)), _) => {
                format!("rank {peer} last finished collective {sequence} {place}")
            }
            (None, Some((sequence, place))) if !self.reads(peer) => {
                format!("rank {peer} last announced its part in collective {sequence} {place}")
            }
            _ if self.reads(peer) => format!("rank {peer} has finished no collective"),
            _ => format!("rank {peer} has announced its part in no collective"),
        });
        let place = collective_at(sequence, waiter.place);
        let awaited = Awaited { name: format!("rank {peer}"), evidence, blocker: Some(Blocker::Rank(peer)) };
        world.stalled(waiter.rank, place, began, awaited)
    }
}

/// `leaver` takes no part in what `rank` has begun.
fn left(leaver: usize, rank: usize, sequence: u64, place: &OpPlace) -> ExecError {
    ExecError::Left { left: leaver, rank, place: collective_at(sequence, place) }
}

fn collective_at(sequence: u64, place: &OpPlace) -> String {
    format!("collective {sequence} {place}")
}

#[cfg(test)]
mod tests;
