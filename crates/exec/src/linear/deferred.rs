//! Gradients of a layer's weight that are computed later.

use std::collections::VecDeque;
use std::sync::Arc;

use counterpoint_plan::DType;
use counterpoint_schedule::{BufferRole, Timeline};

use super::layer::{Rank, RankBuffers};
use crate::{Backend, ExecError, Machine, Prepared, TensorFault, Ticket};

/// Gradients of a layer's weight, or of those of layers that share an input, that wait to be computed.
pub(super) struct Deferred<M: Machine> {
    ranks: Vec<Rank<M>>,
    limit: usize,
    waiting: VecDeque<Kept<M>>,
    /// Buffers of gradients that have been computed, for the next ones.
    free: Vec<Vec<(String, RankBuffers<M>)>>,
    /// Those of the backward that runs.
    current: Vec<(String, RankBuffers<M>)>,
}

/// What one gradient is computed from.
struct Kept<M: Machine> {
    /// The backward's `x` and `dy`, by name.
    given: Vec<(String, RankBuffers<M>)>,
    /// What the backward has kept, by name.
    kept: Vec<(String, RankBuffers<M>)>,
}

impl<M: Machine> Kept<M> {
    fn all(&self) -> impl Iterator<Item = (&str, &RankBuffers<M>)> {
        self.given.iter().chain(&self.kept).map(|(name, buffers)| (name.as_str(), buffers))
    }
}

impl<M: Machine> Deferred<M> {
    /// A queue of at most `limit` gradients, each of which `ranks` add to a `main_grad` of the type `into`, or write.
    pub(super) fn new(
        ranks: impl FnOnce() -> Result<Vec<Rank<M>>, ExecError>,
        into: Option<DType>,
        limit: usize,
    ) -> Result<Self, ExecError> {
        if into.is_none() && limit != 1 {
            return Err(ExecError::tensor("dweight", TensorFault::Queue { limit }));
        }
        Ok(Self { ranks: ranks()?, limit, waiting: VecDeque::new(), free: Vec::new(), current: Vec::new() })
    }

    pub(super) fn ranks(&mut self) -> &mut Vec<Rank<M>> {
        &mut self.ranks
    }

    /// Whose outputs the last gradient is in.
    pub(super) fn written(&self) -> &[Rank<M>] {
        &self.ranks
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Makes room for one more, and gives a backward memory for what it keeps. What a full queue computes is a call before the backward,
    /// which waits for it on its streams and not on the host.
    pub(super) fn begin(&mut self, backward: &mut [Rank<M>]) -> Result<(), ExecError> {
        while self.limit > 0 && self.waiting.len() >= self.limit {
            self.enqueue_oldest(None)?;
        }
        self.current = match self.free.pop() {
            Some(kept) => kept,
            None => self.allocate(backward)?,
        };
        self.current.iter().try_for_each(|(name, buffers)| Prepared::bind_ranks(backward, name, buffers))
    }

    /// What a backward leaves for the gradient: its outputs of which that makes inputs.
    fn allocate(&self, backward: &[Rank<M>]) -> Result<Vec<(String, RankBuffers<M>)>, ExecError> {
        let Some((first, gradient)) = backward.first().zip(self.ranks.first()) else { return Ok(Vec::new()) };
        let kept = first
            .program()
            .buffers
            .iter()
            .filter(|spec| spec.role == BufferRole::Output && gradient.takes(&spec.name));
        let of_ranks = |name: &str| {
            let of_rank = |rank: &Rank<M>| {
                let spec = rank.program().buffers.iter().find(|spec| spec.name == name);
                spec.map(|spec| rank.backend().allocate(spec))
            };
            backward.iter().filter_map(of_rank).collect::<Result<Vec<_>, _>>()
        };
        kept.map(|spec| Ok((spec.name.clone(), of_ranks(&spec.name)?))).collect()
    }

    /// A backward has run.
    pub(super) fn push(&mut self, given: Vec<(String, RankBuffers<M>)>) {
        let kept = std::mem::take(&mut self.current);
        self.waiting.push_back(Kept { given, kept });
    }

    pub(super) fn flush(&mut self) -> Result<Vec<Timeline>, ExecError> {
        let mut timelines = Vec::with_capacity(self.waiting.len());
        while let Some(timeline) = self.compute_oldest()? {
            timelines.push(timeline);
        }
        Ok(timelines)
    }

    /// Enqueues all gradients that wait, the oldest first.
    pub(super) fn enqueue(
        &mut self,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let mut last = Vec::new();
        while let Some(tickets) = self.enqueue_oldest(streams)? {
            last = tickets;
        }
        Ok(last)
    }

    fn enqueue_oldest(
        &mut self,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Option<Vec<Ticket<M::Backend>>>, ExecError> {
        let Some(oldest) = self.waiting.front() else { return Ok(None) };
        let named: Vec<(&str, &RankBuffers<M>)> = oldest.all().collect();
        let ranks: Vec<&Rank<M>> = self.ranks.iter().collect();
        let of_rank = |(index, rank): (usize, &&Rank<M>)| {
            let taken = named.iter().filter(|(name, _)| rank.takes(name));
            taken.map(|(name, buffers)| (*name, buffers[index].clone())).collect()
        };
        let tensors: Vec<Vec<_>> = ranks.iter().enumerate().map(of_rank).collect();
        let tickets = Prepared::call_ranks(&ranks, &tensors, streams)?;
        // Calls of a group follow each other, so a backward that is given this memory again comes after.
        self.free.extend(self.waiting.pop_front().map(|done| done.kept));
        Ok(Some(tickets))
    }

    fn compute_oldest(&mut self) -> Result<Option<Timeline>, ExecError> {
        let Some(oldest) = self.waiting.pop_front() else { return Ok(None) };
        for (name, buffers) in oldest.all() {
            if self.ranks.iter().all(|rank| rank.takes(name)) {
                Prepared::bind_ranks(&mut self.ranks, name, buffers)?;
            }
        }
        let timeline = Prepared::run_ranks(&mut self.ranks)?;
        self.free.push(oldest.kept);
        Ok(Some(timeline))
    }
}
