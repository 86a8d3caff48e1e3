//! Group-casts whose ranks pass device-side barriers, and whose long copies are made by copy engines: nothing of them takes a
//! multiprocessor but the kernels of the barriers. Each sender decides for each receiver, by rows that both know.
//!
//! Engines take addresses from the host, so receivers publish theirs for such senders in every run. Events order what
//! follows a kernel of one's own only; everyone else is waited for inside kernels.

use std::sync::Arc;

use counterpoint_cost::{LinkPoint, MachineProfile};
use counterpoint_exec::collective::{Pattern, PeerRows, Post};
use counterpoint_exec::{CollectiveCall, CollectiveFault, ExecError};

use super::collective::PeerPost;
use super::copies::{CopyStreams, PeerCopies, peer_copies};
use super::{Call, CallError, CudaPending, CudaTransport, Part, TransportKind, addresses};
use crate::backend::CudaBuffer;
use crate::kernel::{LinkCall, LinkCopy, LinkPhase};
use crate::{CudaError, Device, Event};

/// Where copy engines move the rows of group-casts that kernels could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineUse {
    /// Bytes that a rank sends at least, when it sends as much to everyone.
    pub least_bytes: u64,
    /// Bytes of one copy at least, on average: an engine takes some microseconds to begin one.
    pub least_copy: u64,
}

impl EngineUse {
    /// Nowhere.
    pub const NEVER: Self = Self { least_bytes: u64::MAX, least_copy: u64::MAX };
    /// Everywhere: a test tool.
    pub const ALWAYS: Self = Self { least_bytes: 0, least_copy: 0 };
    /// What was found on NVLink of an H200 (`docs/experiments/042-link-limits.md`): kernels move 365 GB/s, engines 390, which take 20 us
    /// more to begin and 2.6 us for each copy.
    pub const H200: Self = Self { least_bytes: 128 << 20, least_copy: 16 << 20 };

    /// As this machine was measured: from where on engines were the faster at all larger sizes. Nowhere, when they never were;
    /// [`EngineUse::H200`] when it was not measured.
    pub fn of(profile: &MachineProfile) -> Self {
        let casts = |kind: TransportKind| {
            let named = profile.transports.iter().find(|one| one.transport == kind.name());
            named.map(|one| &one.cast[..]).filter(|points| !points.is_empty())
        };
        match (casts(TransportKind::Nvlink), casts(TransportKind::CopyEngine)) {
            (Some(kernels), Some(engines)) => match overtaken(kernels, engines) {
                Some(least_bytes) => Self { least_bytes, ..Self::H200 },
                None => Self::NEVER,
            },
            _ => Self::H200,
        }
    }

    /// Whether so many bytes that one of the ranks sends another are enough.
    pub(super) fn may_take(self, bytes: u64, ranks: usize) -> bool {
        bytes > 0 && bytes.saturating_mul(ranks.saturating_sub(1) as u64) >= self.least_bytes
    }

    fn takes(self, copies: &PeerCopies, ranks: usize) -> bool {
        let bytes: u64 = copies.runs.iter().map(|run| run.bytes * run.lines).sum();
        self.may_take(bytes, ranks) && bytes / copies.runs.len() as u64 >= self.least_copy
    }
}

/// The bytes from which on `second` takes less than `first`, both measured at the same sizes, on straight lines in between.
fn overtaken(first: &[LinkPoint], second: &[LinkPoint]) -> Option<u64> {
    let lead: Vec<(f64, f64)> =
        first.iter().zip(second).map(|(a, b)| (a.bytes as f64, a.seconds - b.seconds)).collect();
    let behind = lead.iter().rposition(|(_, lead)| *lead <= 0.0);
    match behind {
        None => Some(0),
        Some(last) if last + 1 == lead.len() => None,
        Some(last) => {
            let ((from, lost), (to, won)) = (lead[last], lead[last + 1]);
            Some((from + (to - from) * -lost / (won - lost)) as u64)
        }
    }
}

/// The pairs of one rank, in a collective, whose rows engines move.
pub(super) struct LinkEngine {
    streams: CopyStreams,
    /// To whom it sends so.
    copies: Vec<PeerCopies>,
    /// From whom it receives so.
    senders: Vec<PeerRows>,
    /// Passed when the others' tensors may be written.
    begun: Event,
}

impl LinkEngine {
    /// Of `rank` of so many, whose part this is, with those that it exchanges rows with; `None` when kernels move everything.
    pub(super) fn new(
        device: &Device,
        engines: EngineUse,
        (rank, ranks): (usize, usize),
        own: &Pattern,
        posts: &[PeerPost],
        row_bytes: &[u64],
    ) -> Result<Option<Self>, CudaError> {
        let others = || posts.iter().filter(|(peer, _)| *peer != rank);
        let to = |sender: &Pattern, receiver: usize| {
            let rows = sender.outgoing.iter().find(|peer| peer.rank == receiver);
            rows.cloned().unwrap_or(PeerRows { rank: receiver, rows: Vec::new() })
        };
        let copies = others()
            .map(|(peer, post)| peer_copies(&to(own, *peer), post.collective.pattern.from(rank), row_bytes));
        let mut copies: Vec<PeerCopies> = copies.filter(|copies| engines.takes(copies, ranks)).collect();
        // Each rank begins with another, so that not all go to one at first.
        copies.sort_by_key(|copies| (copies.rank + ranks - rank) % ranks);
        let senders = others().filter(|(peer, post)| {
            let theirs = peer_copies(&to(&post.collective.pattern, rank), own.from(*peer), row_bytes);
            engines.takes(&theirs, ranks)
        });
        let senders: Vec<PeerRows> =
            senders.map(|(peer, _)| PeerRows { rank: *peer, rows: Vec::new() }).collect();
        if copies.is_empty() && senders.is_empty() {
            return Ok(None);
        }
        let streams = CopyStreams::new(device, copies.iter().map(|copies| copies.rank))?;
        Ok(Some(Self { streams, copies, senders, begun: Event::new(device)? }))
    }

    /// Whether engines move what goes to `rank`.
    pub(super) fn sends_to(&self, rank: usize) -> bool {
        self.copies.iter().any(|copies| copies.rank == rank)
    }

    /// To whom this rank sends so, which publish to it where their outputs are.
    pub(super) fn receivers(&self) -> impl Iterator<Item = usize> {
        self.copies.iter().map(|copies| copies.rank)
    }

    /// Who needs to know where this rank's outputs are, in every run.
    pub(super) fn senders(&self) -> &[PeerRows] {
        &self.senders
    }
}

impl CudaTransport {
    /// Enqueues a group-cast: what engines move, and what is in the list of `copy`.
    pub(super) fn link_by_engines(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        (copy, engine): (&LinkCopy, &LinkEngine),
        link: &LinkCall,
        started: Option<&Event>,
    ) -> Result<(), CallError> {
        let CollectiveCall { stream, place, .. } = *call;
        let LinkEngine { streams, copies, begun, .. } = engine;
        let posts = copies.iter().map(|copies| self.post_of(call, pending, copies.rank));
        let posts: Vec<Arc<Post<Part>>> = posts.collect::<Result<_, _>>()?;
        let outputs = |post: &Arc<Post<Part>>| -> Vec<u64> {
            post.payload.outputs.iter().map(CudaBuffer::address).collect()
        };
        let targets: Vec<(usize, Vec<u64>)> =
            copies.iter().map(|copies| copies.rank).zip(posts.iter().map(outputs)).collect();
        let tensors = call.collective.collective.tensors.len();
        if let Some((peer, _)) = targets.iter().find(|(_, outputs)| outputs.len() != tensors) {
            // It decided otherwise, which it cannot where all have the same `EngineUse`.
            let reason = CollectiveFault::UnpublishedOutputs { rank: *peer }.into();
            let (rank, collective) = (self.rank, place.to_string());
            return Err(ExecError::BadCollective { rank, collective, reason }.into());
        }
        let target = |rank: usize, tensor: usize| {
            targets.iter().find(|(peer, _)| *peer == rank).map_or(0, |(_, outputs)| outputs[tensor])
        };
        let queue = stream.queue();
        // SAFETY: as of all launches of a link (`CudaTransport::link`); between begin and end the receivers' tensors are this
        // rank's to write, and posts keep them.
        unsafe {
            // What kernels copy takes the most multiprocessors, where there is some.
            let (beginning, working) = if copy.is_empty() { (started, None) } else { (None, started) };
            copy.launch(queue, link, LinkPhase::Begin, beginning)?;
            begun.record(queue)?;
            streams.start(queue, begun, copies, |_| None, &addresses(call).0, target)?;
            if !copy.is_empty() {
                copy.launch(queue, link, LinkPhase::Work, working)?;
            }
            streams.join(queue, copies)?;
            copy.launch(queue, link, LinkPhase::End, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    #[test]
    fn engines_begin_where_they_overtake_for_good() {
        let points = |seconds: [f64; 4]| -> Vec<LinkPoint> {
            let sizes = [1u64, 10, 20, 40].into_iter().zip(seconds);
            sizes.map(|(bytes, seconds)| LinkPoint { bytes, seconds }).collect()
        };
        let kernels = points([1.0, 2.0, 4.0, 8.0]);
        for (engines, expected) in [
            ([0.5, 1.0, 3.0, 7.0], Some(0)),
            ([2.0, 3.0, 3.0, 7.0], Some(15)),
            // Faster in between does not count.
            ([2.0, 1.0, 5.0, 7.0], Some(30)),
            ([0.5, 1.0, 3.0, 9.0], None),
        ] {
            assert_eq!(overtaken(&kernels, &points(engines)), expected, "{engines:?}");
        }
    }

    /// What a sender decides, its receiver finds too, for both look at the same rows.
    #[test]
    fn few_long_copies_are_for_engines() {
        let rows = |starts: &[usize], length: usize| -> Vec<Range> {
            starts.iter().map(|&start| Range::new(start, start + length)).collect()
        };
        let engines = EngineUse { least_bytes: 6000, least_copy: 1600 };
        let takes = |starts: &[usize], length, ranks| {
            let outgoing = PeerRows { rank: 1, rows: rows(starts, length) };
            let received = rows(&(0..starts.len()).map(|at| at * length).collect::<Vec<_>>(), length);
            engines.takes(&peer_copies(&outgoing, &received, &[10]), ranks)
        };
        assert!(takes(&[0, 1000], 300, 2));
        assert!(!takes(&[0, 1000], 299, 2));
        assert!(takes(&[0, 1000], 150, 3));
        // At unlike distances: four copies.
        assert!(!takes(&[0, 100, 300, 450, 700, 800, 1000], 90, 2));
        assert!(!takes(&[], 0, 2));
    }
}
