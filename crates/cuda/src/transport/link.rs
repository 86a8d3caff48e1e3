//! Kernels that move rows between GPUs, with device-side barriers. In the first run the host exchanges all ranks'
//! rows and mailboxes; from then on a run is one launch, but for casts some of whose rows copy engines move (`engine`).

use counterpoint_exec::collective::{Collective, Pattern, PeerRows, Reduction};
use counterpoint_exec::{CollectiveCall, WireTensor};
use counterpoint_mask::Range;
use counterpoint_schedule::{BufferId, BufferSpec, Delivery, ReduceOp};

use super::collective::PeerPost;
use super::engine::{EngineUse, LinkEngine};
use super::link_side::LinkSide;
use super::own_rows::OwnRows;
use super::rows;
use super::{Call, CallError, CudaPending, CudaTransport, addresses};
use crate::kernel::{
    LINK_PARTS, LINK_TENSORS, LinkArrivals, LinkCall, LinkCast, LinkCopy, LinkDelivery, LinkDirection,
    LinkMerge, LinkOperands, LinkPeers, LinkPhase, LinkReduce, LinkReduceSpec, LinkSum, RowCopyTensor,
    RowMergeSpec, RowMove, RowReduceSpec, Scalar,
};
use crate::{CallFault, CudaBarrier, CudaError, Device, Stream};

/// Who moves the rows of a group-cast.
const CAST: LinkDirection = LinkDirection::Push;

/// One rank's part.
pub(super) struct LinkWork {
    /// This rank, and of how many.
    place: (usize, usize),
    num_sms: u32,
    engines: EngineUse,
    /// Whether rows may be left to them: what takes rows as they arrive holds all multiprocessors, and the launch that ends a call of
    /// copy engines needs one.
    may_use_engines: bool,
    /// Those from whom, and to whom, so many rows go that they may be left to engines. Both sides of them find the same.
    may_leave: [Vec<PeerRows>; 2],
    spec: LinkSpec,
    pub(super) side: LinkSide<Connected>,
}

/// What a rank knows of the others.
pub(super) struct Connected {
    kernel: LinkKernel,
    /// Of a group-cast some of whose rows are not in the kernel's list: those for others, and the rank's own.
    engine: Option<LinkEngine>,
    own_rows: Option<OwnRows>,
    peers: LinkPeers,
}

enum LinkKernel {
    Copy(LinkCopy),
    Cast(LinkCast),
    Reduce(LinkReduce),
    Sum(LinkSum),
    Merge(LinkMerge),
}

/// What the kernel of a collective does with the rows.
enum LinkSpec {
    Copy,
    /// Elements that are rounded on their way, or rows that are no multiples of 16 bytes.
    Cast(Vec<RowCopyTensor>),
    /// Sums in f32 of what comes as it is.
    Reduce(LinkReduceSpec),
    /// Sums in other types, or of what is rounded on its way; a tensor each.
    Sum(Vec<RowReduceSpec>),
    /// A merge by logarithms.
    Merge(RowMergeSpec),
}

impl LinkSpec {
    fn of(collective: &Collective, outputs: &[BufferSpec]) -> Result<Self, CudaError> {
        let Some(reduction) = &collective.reduction else {
            return Ok(if is_bytes(collective) {
                Self::Copy
            } else {
                Self::Cast(rows::copy_tensors(collective)?)
            });
        };
        let tensors = &collective.contract.tensors;
        Ok(match (reduction.op, &tensors[..], outputs) {
            (ReduceOp::Lse, [out, lse], [result, _]) => {
                Self::Merge(rows::merge_spec(collective, reduction, [out, lse], result)?)
            }
            _ if tensors.iter().all(|tensor| is_copied(tensor, reduction)) => {
                Self::Reduce(reduce_spec(collective, reduction, outputs, LinkOperands::Announced)?)
            }
            _ => Self::Sum(rows::sum_specs(collective, reduction, outputs)?),
        })
    }

    fn load(&self, device: &Device) -> Result<(), CudaError> {
        match self {
            Self::Copy => LinkCopy::load(device, CAST),
            Self::Cast(tensors) => LinkCast::load(device, tensors),
            Self::Reduce(spec) => LinkReduce::load(device, spec.types),
            Self::Sum(specs) => specs.first().map_or(Ok(()), |spec| LinkSum::load(device, spec.types)),
            Self::Merge(spec) => LinkMerge::load(device, spec.types),
        }
    }
}

/// Whether copy engines of multiprocessors fetch what a sum adds of this tensor.
fn is_copied(tensor: &WireTensor, reduction: &Reduction) -> bool {
    let [partial, wire, sum] = [tensor.dtype, tensor.wire, reduction.dtype].map(Scalar::of);
    let types = partial.zip(wire).zip(sum);
    types.is_some_and(|((partial, wire), sum)| {
        LinkReduce::takes(partial, wire, sum, tensor.row_elements as u64)
    })
}

/// Whether rows of a group-cast are words of 16 bytes that stay as they are.
fn is_bytes(collective: &Collective) -> bool {
    let rows = collective.contract.tensors.iter().zip(rows::row_bytes(collective));
    rows.into_iter().all(|(tensor, row)| !rows::is_rounded(tensor) && LinkCopy::takes(row))
}

/// Whether there is a kernel for a collective. Depends on what all ranks agree on only.
pub(super) fn takes(collective: &Collective) -> bool {
    let tensors = &collective.contract.tensors;
    if tensors.len() > LINK_TENSORS || collective.delivery_parts.is_some_and(|parts| parts > LINK_PARTS) {
        return false;
    }
    match &collective.reduction {
        // Who takes rows as they arrive waits inside of a kernel for those of another.
        None => collective.delivery_parts.is_none() || is_bytes(collective),
        Some(reduction) => {
            let alike =
                tensors.windows(2).all(|pair| pair[0].dtype == pair[1].dtype && pair[0].wire == pair[1].wire);
            match reduction.op {
                ReduceOp::Lse => tensors.len() == 2,
                ReduceOp::Sum | ReduceOp::Avg => alike,
            }
        }
    }
}

impl LinkWork {
    pub(super) fn new(
        setup: &Stream,
        collective: &Collective,
        outputs: &[BufferSpec],
        place: (usize, usize),
        (num_sms, engines): (u32, EngineUse),
    ) -> Result<Self, CudaError> {
        let spec = LinkSpec::of(collective, outputs)?;
        spec.load(setup.device())?;
        let may_use_engines = matches!(spec, LinkSpec::Copy) && collective.delivery_parts.is_none();
        let row_bytes: u64 = rows::row_bytes(collective).iter().sum();
        let enough = |peer: &&PeerRows| {
            let bytes = peer.total() as u64 * row_bytes;
            may_use_engines && peer.rank != place.0 && engines.may_take(bytes, place.1)
        };
        let of_side = |peers: &[PeerRows]| peers.iter().filter(enough).map(PeerRows::without_rows).collect();
        let may_leave =
            [&collective.pattern.incoming, &collective.pattern.outgoing].map(|side| of_side(side));
        let side = LinkSide::new(setup)?;
        Ok(Self { place, num_sms, engines, may_use_engines, may_leave, spec, side })
    }

    /// Whether the ranks know each other, and all that they need to know in every run.
    pub(super) fn is_connected(&self) -> bool {
        self.side.connected().is_some_and(|connected| connected.engine.is_none())
    }

    /// Whether the ranks are connected.
    pub(super) fn knows_others(&self) -> bool {
        self.side.is_connected()
    }

    /// Whether other ranks write this one's outputs; else they read its inputs.
    pub(super) fn writes_outputs(&self) -> bool {
        matches!(self.spec, LinkSpec::Copy) && CAST == LinkDirection::Push
    }

    /// Of an input and its output, the one whose place a call announces.
    pub(super) fn announced(&self, (input, output): (BufferId, BufferId)) -> BufferId {
        if self.writes_outputs() { output } else { input }
    }

    /// The ranks to which it does.
    pub(super) fn announced_to(&self, pattern: &Pattern) -> Vec<usize> {
        let peers = if self.writes_outputs() { &pattern.incoming } else { &pattern.outgoing };
        peers.iter().map(|peer| peer.rank).collect()
    }

    /// Who needs to know where the outputs are: in the first run those that send so many rows of a group-cast that they may leave them
    /// to an engine.
    pub(super) fn output_readers(&self) -> &[PeerRows] {
        match self.side.connected() {
            None => &self.may_leave[0],
            Some(connected) => connected.engine.as_ref().map_or(&[], LinkEngine::senders),
        }
    }

    /// What this rank knows by the others' rows and mailboxes, with lists that are gathered on `lists`.
    pub(super) fn gather(
        &self,
        device: &Device,
        collective: &Collective,
        posts: &[PeerPost],
        lists: &Stream,
    ) -> Result<Connected, CallError> {
        let (pattern, row_bytes) = (&collective.pattern, rows::row_bytes(collective));
        let (own, _) = self.place;
        let engine = match self.may_leave.iter().all(Vec::is_empty) {
            true => None,
            false => LinkEngine::new(device, self.engines, self.place, pattern, posts, &row_bytes)?,
        };
        let own_rows = match self.may_use_engines {
            true => OwnRows::new(device, own, pattern, &row_bytes)?,
            false => None,
        };
        let mut mailboxes = Vec::with_capacity(posts.len());
        let signalled = collective.delivery_parts;
        let mut parts = vec![Vec::new(); signalled.unwrap_or(1)];
        let pushes = self.writes_outputs();
        for (rank, post) in posts {
            let (rank, theirs) = (*rank, &post.collective.pattern);
            let pairs = match pushes {
                true => pattern.to(rank).iter().zip(theirs.from(own)),
                false => theirs.to(own).iter().zip(pattern.from(rank)),
            };
            let by_engine = engine.as_ref().is_some_and(|engine| engine.sends_to(rank))
                || (own_rows.is_some() && rank == own);
            if !by_engine {
                let rows = theirs.incoming.iter().map(PeerRows::total).sum();
                for (&from, &to) in pairs {
                    cut_into_parts(RowMove { peer: rank, from, to }, rows, &mut parts);
                }
            }
            if let Some(mailbox) = &post.payload.mailbox {
                mailboxes.push((rank, mailbox.clone()));
            }
        }
        let announce_to = self.announced_to(pattern);
        let work_on = if pushes { &pattern.outgoing } else { &pattern.incoming };
        let work_on = work_on.iter().map(|peer| peer.rank).collect();
        let kernel = match &self.spec {
            LinkSpec::Copy => {
                let delivery = signalled.map_or(LinkDelivery::Whole, |_| LinkDelivery::Parts);
                LinkKernel::Copy(LinkCopy::new(lists, CAST, &row_bytes, &parts, delivery, self.num_sms)?)
            }
            LinkSpec::Cast(tensors) => {
                LinkKernel::Cast(LinkCast::new(lists, tensors, &parts.concat(), self.num_sms)?)
            }
            LinkSpec::Reduce(spec) => {
                LinkKernel::Reduce(LinkReduce::new(lists, spec, &parts.concat(), self.num_sms)?)
            }
            LinkSpec::Sum(specs) => {
                LinkKernel::Sum(LinkSum::new(lists, specs, &parts.concat(), self.num_sms)?)
            }
            LinkSpec::Merge(spec) => {
                LinkKernel::Merge(LinkMerge::new(lists, spec, &parts.concat(), self.num_sms)?)
            }
        };
        let peers = LinkPeers { mailboxes, announce_to, work_on };
        Ok(Connected { kernel, engine, own_rows, peers })
    }
}

impl CudaTransport {
    pub(super) fn link(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &LinkWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { stream, place, barrier, collective, .. } = *call;
        let is_first = !work.side.is_connected();
        let own = &collective.collective;
        let posts = || self.posts_of(call, pending, own.pattern.peers());
        let gather = |posts: &[_], lists: &Stream| work.gather(&self.device, own, posts, lists);
        let goes_ahead = || self.goes_ahead(call, pending);
        let connected = work.side.connected_by(call, self.setup()?, goes_ahead, posts, gather)?;
        // A sum also makes the rows that have no operand.
        if connected.peers.mailboxes.is_empty() && matches!(work.spec, LinkSpec::Copy | LinkSpec::Cast(_)) {
            barrier.map_or(Ok(()), |barrier| barrier.arrive(stream.queue()))?;
            return Ok(());
        }
        let (inputs, outputs) = addresses(call);
        let pushes = matches!((&connected.kernel, CAST), (LinkKernel::Copy(_), LinkDirection::Push));
        let (announced, own) = if pushes { (outputs, inputs) } else { (inputs, outputs) };
        let mut link: LinkCall = self.link_call(&work.side, &connected.peers, &announced, &own)?;
        if let Some(processes) = &self.peers {
            let tensors = call.collective.collective.tensors.iter().map(|pair| work.announced(*pair));
            let announced: Vec<_> = tensors.map(|id| call.buffers[id.0].memory().clone()).collect();
            let (setup, peers) = (self.setup()?, &connected.peers.announce_to);
            link = link.shifted(&processes.shifts(place, (setup, stream.queue()), &announced, peers)?);
        }
        if let Some((signal, parts)) = call.signal.zip(call.collective.collective.delivery_parts) {
            signal.deliver(LinkArrivals::of(&link, parts));
        }
        // Who waits for the start of this goes on once all its blocks hold their multiprocessors.
        let started = barrier.map(CudaBarrier::arrival).transpose()?;
        let started = started.as_ref();
        if let Some(own_rows) = &connected.own_rows {
            let (inputs, outputs) = addresses(call);
            // SAFETY: `Collective`'s checks have seen that the rows are inside the tensors, which the rank's buffers keep; neither the
            // others nor the kernel touch them.
            unsafe { own_rows.start(stream.queue(), &inputs, &outputs) }?;
        }
        // SAFETY: `Post::check_peer` has compared both sides' rows, `Collective`'s checks have seen that they are inside the tensors,
        // which the ranks' buffers keep; all ranks make the same calls, each on a GPU of its own.
        match &connected.kernel {
            LinkKernel::Copy(copy) => match &connected.engine {
                Some(engine) => self.link_by_engines(call, pending, (copy, engine), &link, started)?,
                None => unsafe { copy.launch(stream.queue(), &link, LinkPhase::Whole, started) }?,
            },
            LinkKernel::Cast(cast) => unsafe { cast.launch(stream.queue(), &link, started) }?,
            LinkKernel::Reduce(reduce) => unsafe { reduce.launch(stream.queue(), &link, started) }?,
            LinkKernel::Sum(sum) => unsafe { sum.launch(stream.queue(), &link, started) }?,
            LinkKernel::Merge(merge) => unsafe { merge.launch(stream.queue(), &link, started) }?,
        }
        connected.own_rows.as_ref().map_or(Ok(()), |own_rows| own_rows.join(stream.queue()))?;
        // Those that have published where their outputs are.
        let published: Vec<usize> = match (&connected.kernel, &connected.engine) {
            (LinkKernel::Copy(_), _) if is_first => work.may_leave[1].iter().map(|peer| peer.rank).collect(),
            (_, Some(engine)) => engine.receivers().collect(),
            _ => Vec::new(),
        };
        published.into_iter().for_each(|rank| self.release_post(rank, pending.sequence));
        Ok(())
    }
}

/// The sum that a kernel makes of a collective's rows.
pub(super) fn reduce_spec(
    collective: &Collective,
    reduction: &Reduction,
    outputs: &[BufferSpec],
    operands: LinkOperands,
) -> Result<LinkReduceSpec, CudaError> {
    let refuse = |fault| rows::refused(collective, fault);
    let tensors = collective.contract.tensors.iter().zip(outputs);
    let mut types = tensors.clone().map(|(tensor, output)| rows::types(tensor, reduction, output));
    let first = types.next().ok_or(CallFault::NoTensor).and_then(|first| Ok(first?)).map_err(refuse)?;
    if types.any(|other| other != Ok(first)) {
        return Err(refuse(CallFault::OtherTypes));
    }
    Ok(LinkReduceSpec {
        op: reduction.op,
        accumulate: reduction.accumulate,
        types: first,
        operands,
        tensors: tensors.map(|(tensor, output)| (output.rows(), tensor.row_elements as u64)).collect(),
        divisors: rows::divisors(reduction),
    })
}

/// Adds a move to the parts in which its receiver, who receives so many `rows`, is notified of them.
fn cut_into_parts(whole: RowMove, rows: usize, parts: &mut [Vec<RowMove>]) {
    let count = parts.len();
    let mut begin = 0;
    for (part, moves) in parts.iter_mut().enumerate() {
        let end = if part + 1 == count { usize::MAX } else { Delivery::end(part, count, rows) };
        let to = whole.to.intersect(&Range::new(begin, end));
        if !to.is_empty() {
            let skipped = to.start - whole.to.start;
            let from = whole.from.start + skipped;
            moves.push(RowMove { from: Range::new(from, from + to.len()), to, ..whole });
        }
        begin = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_the_part_that_signals_it() {
        let whole = RowMove { peer: 1, from: Range::new(100, 170), to: Range::new(20, 90) };
        let mut parts = vec![Vec::new(); 3];
        cut_into_parts(whole, 100, &mut parts);
        let rows = |part: usize| parts[part].iter().map(|step| (step.from, step.to)).collect::<Vec<_>>();
        assert_eq!(rows(0), [(Range::new(100, 113), Range::new(20, 33))]);
        assert_eq!(rows(1), [(Range::new(113, 146), Range::new(33, 66))]);
        assert_eq!(rows(2), [(Range::new(146, 170), Range::new(66, 90))]);
        let mut one = vec![Vec::new()];
        cut_into_parts(whole, 90, &mut one);
        assert_eq!(one[0], [whole]);
    }
}
