//! Receivers read straight from senders' memory, after the senders' events.

use std::sync::{Arc, Mutex};

use counterpoint_exec::CollectiveCall;
use counterpoint_exec::collective::{Collective, Post};

use super::lists::Lists;
use super::rows::{Incoming, RowWork};
use super::{Call, CallError, CudaPending, CudaTransport, Part, addresses};
use crate::backend::CudaBuffer;
use crate::kernel::StartMark;
use crate::sync::lock;
use crate::{CudaBarrier, Stream};

/// The kernels of a rank, and the other ranks' parts that their lists were made from.
pub(super) struct PullWork {
    parts: Vec<Arc<Collective>>,
    rows: RowWork,
    lists: Lists,
}

/// Whether these are the same parts: the same values, not only equal ones.
pub(super) fn are_same(parts: &[Arc<Collective>], posts: &[Arc<Post<Part>>]) -> bool {
    parts.len() == posts.len()
        && parts.iter().zip(posts).all(|(part, post)| Arc::ptr_eq(part, &post.collective))
}

impl CudaTransport {
    pub(super) fn pull(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &Mutex<Option<PullWork>>,
    ) -> Result<(), CallError> {
        let CollectiveCall { backend, stream, collective, barrier, .. } = *call;
        let queue = stream.queue();
        let pattern = &collective.collective.pattern;
        let mut posts = Vec::with_capacity(pattern.incoming.len());
        for peer in &pattern.incoming {
            let post = self.post_of(call, pending, peer.rank)?;
            if peer.rank != self.rank {
                queue.wait(&post.payload.marks_of(peer.rank)?.ready)?;
            }
            posts.push(post);
        }
        let mut work = lock(work);
        let current = match work.take() {
            Some(work) if are_same(&work.parts, &posts) => work,
            _ => {
                let incoming: Vec<Incoming<'_>> = posts
                    .iter()
                    .zip(&pattern.incoming)
                    .map(|(post, peer)| Incoming {
                        from: post.collective.pattern.to(self.rank),
                        to: &peer.rows,
                    })
                    .collect();
                let (setup, own) = (self.setup()?, &collective.collective);
                let lists = Lists::new(&self.device)?;
                let make = |lists: &Stream| RowWork::new(lists, own, &collective.outputs, &incoming, None);
                let rows = lists.upload(setup, make)?;
                let parts = posts.iter().map(|post| post.collective.clone()).collect();
                PullWork { parts, rows, lists }
            }
        };
        let (own, outputs) = addresses(call);
        let input = |peer: usize, tensor: usize| match pattern.incoming[peer].rank == self.rank {
            // Not from what stands in for it where others read: that has their rows alone.
            true => own[tensor],
            false => posts[peer].payload.inputs.get(tensor).map_or(0, CudaBuffer::address),
        };
        let current = work.insert(current);
        current.lists.follow(queue)?;
        let started = StartMark::of(barrier.map(CudaBarrier::arrival).transpose()?);
        let sms = backend.left_to_communication();
        current.rows.launch(queue, sms, input, &outputs, &started)?;
        started.record_rest(queue)?;
        if let Some(own) = &pending.own {
            own.payload.marks_of(self.rank)?.done.record(queue)?;
        }
        for peer in &pattern.incoming {
            self.acknowledge(peer.rank, pending.sequence)?;
        }
        Ok(())
    }

    /// The inputs may be overwritten after it.
    pub(super) fn end_pull(&self, call: &Call<'_>, pending: &CudaPending) -> Result<(), CallError> {
        let pattern = &call.collective.collective.pattern;
        self.end_after(call, pending, pattern.outgoing.iter().map(|peer| peer.rank))
    }

    /// What is enqueued from now on comes after all that `users` have done with what this rank published.
    pub(super) fn end_after(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        users: impl Iterator<Item = usize>,
    ) -> Result<(), CallError> {
        let posts = users.map(|rank| Ok((rank, self.post_of(call, pending, rank)?)));
        let posts: Vec<_> = posts.collect::<Result<_, CallError>>()?;
        self.board.all_used(&self.world, &self.waiter(call), pending.sequence)?;
        for (rank, post) in &posts {
            if *rank != self.rank {
                call.stream.queue().wait(&post.payload.marks_of(*rank)?.done)?;
            }
        }
        Ok(())
    }
}
