//! The caller's streams as every rank of a group in this process has them.

use std::sync::{Arc, Mutex};

use counterpoint_exec::{Backend, Group, Machine};

use super::lock;
use crate::borrow::InPlace;

/// A stream of the caller's.
pub(crate) type CallerStream<M> = Arc<<<M as Machine>::Backend as Backend>::Stream>;

/// The same as every rank here has it.
pub(super) type CallerStreams<M> = Arc<[CallerStream<M>]>;

/// Streams of the caller that are kept; PyTorch has 32 of each priority, of which few are in use.
const KEPT: usize = 16;

/// The streams that came last, by their handles, latest first. A call knows by them that it follows one on the same stream, which then
/// orders them by itself.
pub(super) struct Callers<M: Machine>(Mutex<Vec<(u64, CallerStreams<M>)>>);

impl<M: Machine> Default for Callers<M> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<M: Machine> Callers<M>
where
    M::Backend: InPlace,
{
    /// The stream with this handle as every rank here has it, on the thread of a call; `None` where there is no such thing.
    pub(super) fn of(&self, group: &Group<M>, stream: u64) -> Option<CallerStreams<M>> {
        group.ranks().iter().for_each(|rank| rank.backend().enter());
        let mut known = lock(&self.0);
        let latest = match known.iter().position(|(handle, _)| *handle == stream) {
            Some(index) => known.remove(index),
            None => {
                let of_ranks = group.ranks().iter().map(|rank| rank.backend().caller(stream));
                (stream, of_ranks.collect::<Option<_>>()?)
            }
        };
        let streams = latest.1.clone();
        known.insert(0, latest);
        known.truncate(KEPT);
        Some(streams)
    }
}
