//! A backward whose gradients of other ranks' keys leave while it is computed, each rank on a GPU of its own. They go into memory of
//! the rank that owns the keys, a place for each rank that has some; once all of these are through with their computation, which
//! a device-side barrier says, it adds what has come to its own partial sums, in the order of ranks.

use counterpoint_exec::collective::{Collective, Pattern, PeerRows};
use counterpoint_exec::{CollectiveCall, CollectiveContext, ExecError, OpPlace};
use counterpoint_mask::Range;
use counterpoint_schedule::{
    Accumulate, AttentionBackward, BufferId, BufferSpec, GroupReduce, Program, ReduceOp, SpanKind,
};

use crate::backend::{Backward, CudaBackend, CudaTables};
use crate::kernel::{GradientOwners, LinkOperands, LinkPeers, LinkReduce, LinkReduceSpec, RowMove};
use crate::transport::collective::PeerPost;
use crate::transport::link_side::LinkSide;
use crate::transport::staging::Staging;
use crate::transport::{Call, CallError, CudaPending, CudaTransport, Means, Work, link, rows, unpublished};
use crate::{CallFault, CudaError, DeviceBuffer, Stream};

/// One rank's part.
pub(in crate::transport) struct BackwardReduceWork {
    backward: Backward,
    spec: LinkReduceSpec,
    /// Bytes of a row of each of the tensors.
    row_bytes: Vec<u64>,
    /// Rows of this rank of which it alone has gradients, as far as the backward itself makes results of them.
    alone: Vec<Range>,
    /// The rank's partial sums, and the sums.
    tensors: Vec<(BufferId, BufferId)>,
    /// Where the others' partial sums of this rank's rows come in.
    delivered: Staging,
    memory: DeviceBuffer,
    /// Blocks that add.
    adders: u32,
    pub(in crate::transport) side: LinkSide<Connected>,
}

/// What a rank knows of the others.
pub(in crate::transport) struct Connected {
    peers: LinkPeers,
    sums: LinkReduce,
    /// The first row of others, and where each of those rows is at its owner.
    owners: (Option<usize>, DeviceBuffer),
    /// Where others take partial sums in.
    _memory: Vec<DeviceBuffer>,
}

impl BackwardReduceWork {
    pub(in crate::transport) fn memory(&self) -> DeviceBuffer {
        self.memory.clone()
    }

    /// What rank `own` knows by where the others take partial sums in, with lists that are gathered on `lists`.
    pub(in crate::transport) fn gather(
        &self,
        own: usize,
        collective: &Collective,
        posts: &[PeerPost],
        lists: &Stream,
    ) -> Result<Connected, CallError> {
        let pattern = &collective.pattern;
        let of = |peers: &[PeerRows]| -> Vec<usize> {
            peers.iter().map(|peer| peer.rank).filter(|&rank| rank != own).collect()
        };
        // Those to whom this rank's partial sums go add them once it announces that it is through.
        let (announce_to, work_on) = (of(&pattern.outgoing), of(&pattern.incoming));
        let (mut mailboxes, mut memory) = (Vec::new(), Vec::new());
        // The own rows that go to others, and where the first of each range is at its owner.
        let mut owners: Vec<(Range, [u64; 2])> = Vec::new();
        for (rank, post) in posts.iter().filter(|(rank, _)| *rank != own) {
            let rank = *rank;
            let (Some(mailbox), Some(delivered)) = (&post.payload.mailbox, &post.payload.staging) else {
                return Err(unpublished(rank));
            };
            mailboxes.push((rank, mailbox.clone()));
            memory.push(delivered.clone());
            let theirs = Staging::new(&post.collective.pattern.incoming, &self.row_bytes, rank);
            let place = |row: usize| {
                let of_tensor = |at: usize| {
                    let (offset, row_bytes) = theirs.tensors[at];
                    delivered.address() + offset + row as u64 * row_bytes
                };
                [of_tensor(0), of_tensor(1)]
            };
            let ranges = pattern.to(rank).iter().zip(theirs.of(own));
            owners.extend(ranges.map(|(from, to)| (*from, place(to.start))));
        }
        owners.sort_unstable();
        let first_row = owners.first().map(|owner| owner.0.start);
        // The kernel finds a row's owner by its number.
        if owners.windows(2).any(|pair| pair[0].0.end != pair[1].0.start) {
            let reason = CallFault::KeysApart.into();
            return Err(CudaError::Launch { kernel: collective.contract.kind.clone(), reason }.into());
        }
        let row = |(rows, first): &(Range, [u64; 2])| {
            let (count, first) = (rows.len() as u64, *first);
            (0..count).map(move |at| [0, 1].map(|tensor| first[tensor] + at * self.row_bytes[tensor]))
        };
        let mut addresses: Vec<[u64; 2]> = owners.iter().flat_map(row).collect();
        // No buffer is empty.
        addresses.resize(addresses.len().max(1), [0; 2]);
        let table = DeviceBuffer::from_slice(lists, &addresses)?;
        let moves = moves(pattern, own, &self.delivered, &self.alone);
        let sums = LinkReduce::new(lists, &self.spec, &moves, self.adders)?;
        Ok(Connected {
            peers: LinkPeers { mailboxes, announce_to, work_on },
            sums,
            owners: (first_row, table),
            _memory: memory,
        })
    }
}

/// What the kernel adds to the rows of `rank`: from its own partial sums, but for rows that are `alone`, and from what the others have
/// delivered.
fn moves(pattern: &Pattern, rank: usize, delivered: &Staging, alone: &[Range]) -> Vec<RowMove> {
    let of_peer = |peer: &PeerRows| -> Vec<RowMove> {
        let from = if peer.rank == rank { pattern.to(rank) } else { delivered.of(peer.rank) };
        from.iter()
            .zip(&peer.rows)
            .flat_map(|(&from, &to)| {
                let kept = if peer.rank == rank { without(to, alone) } else { vec![to] };
                kept.into_iter().map(move |rows| {
                    let begin = from.start + rows.start - to.start;
                    RowMove { peer: peer.rank, from: Range::new(begin, begin + rows.len()), to: rows }
                })
            })
            .collect()
    };
    pattern.incoming.iter().flat_map(of_peer).collect()
}

/// What is left of `rows` without those of `others`, which are disjoint.
fn without(rows: Range, others: &[Range]) -> Vec<Range> {
    let mut others: Vec<Range> = others.iter().map(|other| other.intersect(&rows)).collect();
    others.retain(|other| !other.is_empty());
    others.sort_unstable();
    let begins = std::iter::once(rows.start).chain(others.iter().map(|other| other.end));
    let ends = others.iter().map(|other| other.start).chain([rows.end]);
    let left = begins.zip(ends).map(|(begin, end)| Range::new(begin, end));
    left.filter(|range| !range.is_empty()).collect()
}

impl CudaTransport {
    /// The operation as a kernel that sends and one that adds, and what its ranks must agree on; `None` when there are none.
    pub(in crate::transport) fn backward_reduce_work(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        (backward, reduce): (&AttentionBackward, &GroupReduce),
        (program, tables): (&Program, &CudaTables),
    ) -> Result<Option<(Collective, Work)>, ExecError> {
        let Means::Link { .. } = &self.means else { return Ok(None) };
        let context =
            CollectiveContext { buffers: &program.buffers, policy: &program.policy, plan: None, turn: None };
        let mut collective = Collective::reduce(self.rank, self.world.size(), place, reduce, &context)?;
        let partials: Vec<BufferId> = reduce.tensors.iter().map(|tensor| tensor.0).collect();
        let alike = partials == [backward.dk, backward.dv]
            && reduce.op == ReduceOp::Sum
            && reduce.accumulate == Accumulate::Start
            && link::takes(&collective);
        if !alike {
            return Ok(None);
        }
        let mut work = backend.backward(program, place.index, tables, backward)?;
        let Some(reduction) = collective.reduction.as_ref().filter(|_| work.sends_gradients()) else {
            return Ok(None);
        };
        let outputs: Vec<BufferSpec> =
            reduce.tensors.iter().map(|tensor| program.buffers[tensor.1.0].clone()).collect();
        let element = program.buffers[backward.k.0].dtype;
        let make = || -> Result<BackwardReduceWork, CudaError> {
            let setup = backend.setup();
            let operands = LinkOperands::Delivered { rank: self.rank };
            let spec = link::reduce_spec(&collective, reduction, &outputs, operands)?;
            LinkReduce::load(&self.device, spec.types)?;
            let row_bytes = rows::row_bytes(&collective);
            let incoming = &collective.pattern.incoming;
            let others = incoming.iter().filter(|peer| peer.rank != self.rank);
            let shared: Vec<Range> = others.flat_map(|peer| peer.rows.iter().copied()).collect();
            let is_element = outputs.iter().all(|output| output.dtype == element);
            let alone = if is_element { work.round_alone(setup, &shared)? } else { Vec::new() };
            let delivered = Staging::new(&collective.pattern.incoming, &row_bytes, self.rank);
            Ok(BackwardReduceWork {
                side: LinkSide::new(setup)?,
                backward: work,
                spec,
                row_bytes,
                alone,
                tensors: reduce.tensors.clone(),
                // No buffer is empty.
                memory: DeviceBuffer::new(&self.device, (delivered.bytes as usize).max(1))?,
                delivered,
                // Nothing computes concurrently with it. But it waits for others, and other collectives must find room meanwhile.
                adders: (self.device.sm_count() / 2).max(1),
            })
        };
        let work = make().map_err(|error| backend.error(place, error))?;
        collective.contract.kind = "a backward and the sum of its gradients over ranks".to_owned();
        Ok(Some((collective, Work::BackwardReduce(Box::new(work)))))
    }

    pub(in crate::transport) fn backward_reduce(
        &self,
        call: &Call<'_>,
        pending: &mut CudaPending,
        work: &BackwardReduceWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { backend, stream, place, buffers, .. } = *call;
        let is_first = !work.side.is_connected();
        let own = &call.collective.collective;
        let peers = || own.pattern.peers().into_iter().filter(|rank| *rank != self.rank).collect();
        let posts = || self.posts_of(call, pending, peers());
        let gather = |posts: &[_], lists: &Stream| work.gather(self.rank, own, posts, lists);
        let goes_ahead = || self.goes_ahead(call, pending);
        let connected = work.side.connected_by(call, self.setup()?, goes_ahead, posts, gather)?;
        if is_first {
            own.pattern.outgoing.iter().for_each(|peer| self.release_post(peer.rank, pending.sequence));
        }
        let results = [0, 1].map(|at: usize| buffers[work.tensors[at].1.0].address());
        let (first_row, table) = &connected.owners;
        let owners = first_row.map(|first_row| GradientOwners { first_row, addresses: table.address() });
        work.backward.launch(stream.queue(), buffers, call.signal, Some(results), owners)?;
        stream.end_span(place, SpanKind::Compute, pending.started.take())?;
        pending.started = stream.start_span(backend.timed())?;
        let delivered = work.delivered.tensors.iter().map(|(offset, _)| work.memory.address() + offset);
        let address = |id: BufferId| buffers[id.0].address();
        let sums = work.tensors.iter().map(|tensor| address(tensor.1));
        let partials = work.tensors.iter().map(|tensor| address(tensor.0));
        let own: Vec<u64> = sums.chain(delivered).chain(partials).collect();
        // Nobody reads what is announced: all that others have is here once they announce it.
        let link = self.link_call(&work.side, &connected.peers, &own, &own)?;
        // SAFETY: `Post::check_peer` has compared both sides' rows, `Collective`'s checks have seen that they are inside the tensors, and
        // `delivered` has room for all that comes; the others' memory lives as long as `connected`. All ranks make the same calls, each on a
        // GPU of its own, and a rank's partial sums are sent again only after all who add them have said that they are through.
        unsafe { connected.sums.launch(stream.queue(), &link, None) }?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(rank: usize, rows: &[(usize, usize)]) -> PeerRows {
        PeerRows { rank, rows: rows.iter().map(|&(start, end)| Range::new(start, end)).collect() }
    }

    /// Rank 1 owns ten rows; ranks 0 and 2 hold some of them, and it holds all.
    #[test]
    fn what_comes_lies_rank_by_rank_and_the_own_partial_sum_where_it_is() {
        let pattern = Pattern {
            outgoing: vec![peer(0, &[(10, 14)]), peer(1, &[(0, 10)])],
            incoming: vec![peer(0, &[(7, 9), (2, 5)]), peer(1, &[(0, 10)]), peer(2, &[(4, 10)])],
        };
        let moves = moves(&pattern, 1, &Staging::new(&pattern.incoming, &[16], 1), &[]);
        let step = |peer, from: (usize, usize), to: (usize, usize)| RowMove {
            peer,
            from: Range::new(from.0, from.1),
            to: Range::new(to.0, to.1),
        };
        let expected = [
            step(0, (0, 2), (7, 9)),
            step(0, (2, 5), (2, 5)),
            step(1, (0, 10), (0, 10)),
            step(2, (5, 11), (4, 10)),
        ];
        assert_eq!(moves, expected);
    }
    /// Of its ten rows, only those that others have are added.
    #[test]
    fn rows_that_are_alone_are_not_added() {
        let pattern = Pattern {
            outgoing: vec![peer(1, &[(20, 30)])],
            incoming: vec![peer(0, &[(4, 6)]), peer(1, &[(0, 10)])],
        };
        let delivered = Staging::new(&pattern.incoming, &[16], 1);
        let alone = [Range::new(7, 10), Range::new(0, 3)];
        let added: Vec<_> = moves(&pattern, 1, &delivered, &alone)
            .into_iter()
            .map(|step| (step.peer, step.from, step.to))
            .collect();
        assert_eq!(
            added,
            [(0, Range::new(0, 2), Range::new(4, 6)), (1, Range::new(23, 27), Range::new(3, 7))]
        );
        assert!(without(Range::new(2, 5), &[Range::new(0, 9)]).is_empty());
        assert_eq!(without(Range::new(2, 5), &[]), [Range::new(2, 5)]);
    }
}
