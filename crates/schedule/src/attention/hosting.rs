//! Query offload in Programs: queries out to the ranks that have their keys, work on them there, partial results to their owners.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{
    AttentionSpec, DType, GroupPart, HostedWork, OwnedSplit, Plan, RankPlan, RemoteSplit,
};

use super::GradientReduction;
use super::gradient::Gradient;
use super::query_exchange::QueryExchange;
use crate::builder::{Mark, ProgramBuilder};
use crate::{
    Accumulate, AttentionBackward, AttentionFinish, AttentionForward, BarrierId, BufferId, BufferRole,
    ForwardBegin, ForwardEnd, GroupReduce, KeyBlocks, MaxLogits, Op, ReduceOp, StreamId,
};

/// Whether every row of every rank is offloaded: stages then have nothing to compute, to begin or to write, and what hosts compute is
/// all there is.
pub(super) fn hosts_do_all(plan: &Plan) -> bool {
    let all_offloaded =
        |rank: &RankPlan| rank.hosted.as_ref().is_some_and(|work| work.offloaded_rows() == rank.q_rows);
    plan.ranks.iter().all(|rank| all_offloaded(rank) && !rank.is_hosted_in_part())
}

/// Whether stages compute for rows of some rank for which hosts compute too, so that both have to be merged.
pub(super) fn is_hosted_in_part(plan: &Plan) -> bool {
    plan.ranks.iter().any(RankPlan::is_hosted_in_part)
}

/// The work that a rank does for offloaded rows, and how the results of its own such rows come back.
pub(super) struct Hosting<'a> {
    work: &'a HostedWork,
    spec: &'a AttentionSpec,
    compute: StreamId,
    cast: StreamId,
    reduce: StreamId,
    exchange: QueryExchange,
    /// Rows of its own that are offloaded.
    offloaded: Arc<[Range]>,
    rank: usize,
    q_rows: usize,
    /// On some rank stages compute for such rows too: the same on all ranks, as what follows from it is a collective.
    in_part: bool,
}

/// Of a forward, its queries sent.
pub(super) struct HostedForward<'a> {
    hosting: Hosting<'a>,
    q: BufferId,
    arrived: Mark,
    barrier: Option<BarrierId>,
    reduced: Option<(BufferId, BufferId, Mark)>,
    /// What stages compute, in the accumulator's type, where it is to be merged with what hosts do: out and lse.
    staged: Option<(BufferId, BufferId)>,
}

/// Of a backward, its queries sent.
pub(super) struct HostedBackward<'a> {
    hosting: Hosting<'a>,
    q: BufferId,
    dout: BufferId,
    /// (own, hosted): lse and delta.
    lse: (BufferId, BufferId),
    delta: (BufferId, BufferId),
    /// Once the statistics are sent.
    arrived: Option<Mark>,
    barrier: Option<BarrierId>,
    /// Where dq of offloaded rows comes to, and when what crosses between nodes is there, where that is another stream's.
    reduced: Option<(BufferId, Option<Mark>)>,
    /// Partial results of dk and dv.
    partials: Option<(BufferId, BufferId)>,
}

impl<'a> Hosting<'a> {
    /// Of a rank of `plan`, where it has any such work; between nodes on streams of its own for queries and for results.
    pub(super) fn new(
        plan: &'a Plan,
        rank: usize,
        spec: &'a AttentionSpec,
        (compute, cast, reduce): (StreamId, StreamId, StreamId),
        between_nodes: Option<(StreamId, StreamId)>,
    ) -> Option<Self> {
        let work = plan.ranks[rank].hosted.as_ref()?;
        let exchange = QueryExchange::new((plan, rank), work, (cast, reduce), between_nodes);
        let (offloaded, q_rows, in_part) =
            (work.offloaded().into(), plan.ranks[rank].q_rows, is_hosted_in_part(plan));
        Some(Self { work, spec, compute, cast, reduce, exchange, offloaded, rank, q_rows, in_part })
    }

    /// Casts of queries that arrive at a barrier.
    pub(super) fn arrivals(&self) -> u64 {
        self.exchange.arrivals()
    }

    /// Sends queries, whose cast arrives at `sent`. Results on their way to their owners arrive at `returning`.
    pub(super) fn forward(
        self,
        p: &mut ProgramBuilder,
        q: BufferId,
        sent: Option<BarrierId>,
        returning: Option<BarrierId>,
    ) -> HostedForward<'a> {
        let hosted_q = self.guest(p, "q_hosted", self.spec.dtype, &[self.spec.heads_q, self.spec.head_dim]);
        self.exchange.send(p, "q", self.spec.dtype, &[(q, hosted_q)], None, sent);
        let arrived = p.mark(self.cast, None, "q arrived");
        let staged = self.in_part.then(|| {
            let AttentionSpec { heads_q, head_dim_v, dtype, .. } = *self.spec;
            let out = scratch(p, "out_staged", dtype.accumulator(), self.q_rows, &[heads_q, head_dim_v]);
            (out, scratch(p, "lse_staged", dtype.accumulator(), self.q_rows, &[heads_q]))
        });
        HostedForward { hosting: self, q: hosted_q, arrived, barrier: returning, reduced: None, staged }
    }

    /// Likewise queries and gradients of their results.
    pub(super) fn backward(
        self,
        p: &mut ProgramBuilder,
        (q, dout): (BufferId, BufferId),
        (lse, delta): (BufferId, BufferId),
        sent: Option<BarrierId>,
        returning: Option<BarrierId>,
    ) -> HostedBackward<'a> {
        let AttentionSpec { heads_q, head_dim, head_dim_v, dtype, .. } = *self.spec;
        let hosted_q = self.guest(p, "q_hosted", dtype, &[heads_q, head_dim]);
        let hosted_dout = self.guest(p, "dout_hosted", dtype, &[heads_q, head_dim_v]);
        let hosted_lse = self.guest(p, "lse_hosted", dtype.accumulator(), &[heads_q]);
        let hosted_delta = self.guest(p, "delta_hosted", dtype.accumulator(), &[heads_q]);
        self.exchange.send(p, "q dout", dtype, &[(q, hosted_q), (dout, hosted_dout)], None, sent);
        HostedBackward {
            hosting: self,
            q: hosted_q,
            dout: hosted_dout,
            lse: (lse, hosted_lse),
            delta: (delta, hosted_delta),
            arrived: None,
            barrier: returning,
            reduced: None,
            partials: None,
        }
    }

    /// Takes what hosts computed of the rank's offloaded rows into what its stages have computed of all rows, as soon as both
    /// are there; the computation waits for it.
    fn merge_into(
        &self,
        p: &mut ProgramBuilder,
        (label, wait): (&str, &str),
        tensors: Vec<(BufferId, BufferId)>,
        op: ReduceOp,
    ) {
        let computed = p.mark(self.compute, None, "stages done");
        p.after(self.reduce, None, "wait for stages", computed);
        let (rank, mut place) = (self.rank as u32, 0);
        // Nothing travels: a reduce from a rank to itself.
        let (owned, remote) = self
            .offloaded
            .iter()
            .map(|&rows| {
                place += rows.len();
                let from = Range::new(place - rows.len(), place);
                (OwnedSplit { rows, ranks: vec![rank] }, RemoteSplit { rows: from, rank })
            })
            .unzip();
        let dtype = self.spec.dtype.accumulator();
        let op = GroupReduce {
            part: Arc::new(GroupPart { owned, remote }),
            tensors,
            op,
            accumulate: Accumulate::Continue,
            wire_dtype: dtype,
            reduce_dtype: dtype,
            arrive: None,
        };
        p.push(self.reduce, None, label, Op::GroupReduce(op));
        let merged = p.mark(self.reduce, None, "merged");
        p.after(self.compute, None, wait, merged);
    }

    /// Scratch with a row for every hosted query row.
    fn guest(&self, p: &mut ProgramBuilder, name: &str, dtype: DType, row: &[usize]) -> BufferId {
        scratch(p, name, dtype, self.work.q_rows, row)
    }

    /// Scratch in the accumulator type with a row for every offloaded row.
    fn reduced(&self, p: &mut ProgramBuilder, name: &str, row: &[usize]) -> BufferId {
        scratch(p, name, self.spec.dtype.accumulator(), self.work.offloaded_rows(), row)
    }
}

impl HostedForward<'_> {
    /// Computes with the rank's own keys, and sends the partial results to their owners.
    pub(super) fn compute(
        &mut self,
        p: &mut ProgramBuilder,
        (k, v): (BufferId, BufferId),
        max_logits: Option<MaxLogits>,
    ) {
        let hosting = &self.hosting;
        let AttentionSpec { heads_q, head_dim_v, dtype, scale, softcap, .. } = *hosting.spec;
        p.after(hosting.compute, None, "wait for q", self.arrived);
        let out = hosting.guest(p, "out_hosted", dtype.accumulator(), &[heads_q, head_dim_v]);
        let lse = hosting.guest(p, "lse_hosted", dtype.accumulator(), &[heads_q]);
        let op = AttentionForward {
            q: self.q,
            k,
            v,
            arriving: None,
            // They are one stage whatever the others are cut into.
            blocks: KeyBlocks::Unaligned,
            begin: ForwardBegin::Start,
            end: ForwardEnd::Result { sink: None, out, lse },
            max_logits,
            bands: hosting.work.bands.clone(),
            scale,
            softcap,
        };
        p.push(hosting.compute, None, "hosted attention forward", Op::AttentionForward(op));
        let done = p.mark(hosting.compute, None, "partials done");
        let reduced_out = hosting.reduced(p, "out_reduced", &[heads_q, head_dim_v]);
        let reduced_lse = hosting.reduced(p, "lse_reduced", &[heads_q]);
        let tensors = [(out, reduced_out), (lse, reduced_lse)];
        let what = ("out lse", ReduceOp::Lse, dtype.accumulator());
        let crossed = hosting.exchange.bring_back(p, what, &tensors, done, self.barrier);
        let reduced = crossed.unwrap_or_else(|| p.mark(hosting.reduce, None, "out lse reduced"));
        self.reduced = Some((reduced_out, reduced_lse, reduced));
    }

    /// Where stages leave what they compute, for [`HostedForward::finish`]: the results where it is not to be merged.
    pub(super) fn staged(&self) -> Option<(BufferId, BufferId)> {
        self.staged
    }

    /// Puts the results in their places, once stages have written theirs.
    pub(super) fn finish(
        self,
        p: &mut ProgramBuilder,
        sink: Option<BufferId>,
        (out, lse): (BufferId, BufferId),
    ) {
        let Some((reduced_out, reduced_lse, reduced)) = self.reduced else { return };
        let hosting = &self.hosting;
        let (label, rows, (merged_out, merged_lse)) = match self.staged {
            Some(staged) => {
                let tensors = vec![(reduced_out, staged.0), (reduced_lse, staged.1)];
                p.after(hosting.reduce, None, "wait for out lse of other nodes", reduced);
                hosting.merge_into(p, ("merge out lse of hosts", "wait for out lse"), tensors, ReduceOp::Lse);
                let all: Arc<[Range]> =
                    (hosting.q_rows > 0).then_some(Range::new(0, hosting.q_rows)).into_iter().collect();
                ("finish rows", all, staged)
            }
            None => {
                p.after(hosting.compute, None, "wait for out lse", reduced);
                ("finish offloaded rows", hosting.offloaded.clone(), (reduced_out, reduced_lse))
            }
        };
        if !rows.is_empty() {
            let op = AttentionFinish { merged_out, merged_lse, sink, rows, out, lse };
            p.push(hosting.compute, None, label, Op::AttentionFinish(op));
        }
    }
}

impl HostedBackward<'_> {
    /// Sends what a row's softmax was, once it is known.
    pub(super) fn send_statistics(&mut self, p: &mut ProgramBuilder) {
        let hosting = &self.hosting;
        let known = p.mark(hosting.compute, None, "delta done");
        let dtype = hosting.spec.dtype.accumulator();
        hosting.exchange.send(p, "lse delta", dtype, &[self.lse, self.delta], Some(known), None);
        self.arrived = Some(p.mark(hosting.cast, None, "q dout lse delta arrived"));
    }

    /// Computes with the rank's own keys, and sends the partial results of dq to their owners. What it computes of dk and dv are `results` where it
    /// is all there is.
    pub(super) fn compute(
        &mut self,
        p: &mut ProgramBuilder,
        (k, v): (BufferId, BufferId),
        results: Option<(BufferId, BufferId)>,
        reduction: GradientReduction,
    ) {
        let hosting = &self.hosting;
        let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, dtype, scale, softcap, .. } =
            *hosting.spec;
        let acc_dtype = dtype.accumulator();
        if let Some(mark) = self.arrived {
            p.after(hosting.compute, None, "wait for q dout lse delta", mark);
        }
        let rows = p.rows(k);
        let dq = hosting.guest(p, "dq_hosted", acc_dtype, &[heads_q, head_dim]);
        let (dk, dv) = results.unwrap_or_else(|| {
            let dk = scratch(p, "dk_hosted", acc_dtype, rows, &[heads_kv, head_dim]);
            let dv = scratch(p, "dv_hosted", acc_dtype, rows, &[heads_kv, head_dim_v]);
            self.partials = Some((dk, dv));
            (dk, dv)
        });
        let op = AttentionBackward {
            q: self.q,
            k,
            v,
            arriving: None,
            dout: self.dout,
            lse: self.lse.1,
            delta: self.delta.1,
            dq,
            rounded_dq: None,
            dk,
            dv,
            bands: hosting.work.bands.clone(),
            scale,
            softcap,
            accumulate_dq: Accumulate::Start,
            deterministic: reduction == GradientReduction::Deterministic,
        };
        p.push(hosting.compute, None, "hosted attention backward", Op::AttentionBackward(op));
        let done = p.mark(hosting.compute, None, "partials done");
        let reduced = hosting.reduced(p, "dq_reduced", &[heads_q, head_dim]);
        let what = ("dq", ReduceOp::Sum, acc_dtype);
        let crossed = hosting.exchange.bring_back(p, what, &[(dq, reduced)], done, self.barrier);
        self.reduced = Some((reduced, crossed));
    }

    /// Adds the partial sums of dk and dv to the rank's own sums, once its stages have begun these.
    pub(super) fn add_own(
        &mut self,
        p: &mut ProgramBuilder,
        rank: usize,
        (dk_sum, dv_sum): (BufferId, BufferId),
    ) {
        let hosting = &self.hosting;
        let Some((dk, dv)) = self.partials.take() else { return };
        let begun = p.mark(hosting.compute, None, "own dk dv begun");
        p.after(hosting.reduce, None, "wait for own dk dv", begun);
        // Nothing travels: a reduce from a rank to itself adds concurrently with the computation of the next stage.
        let dtype = hosting.spec.dtype.accumulator();
        let op = GroupReduce {
            part: Arc::new(from_itself(rank, p.rows(dk))),
            tensors: vec![(dk, dk_sum), (dv, dv_sum)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Continue,
            wire_dtype: dtype,
            reduce_dtype: dtype,
            arrive: None,
        };
        p.push(hosting.reduce, None, "add hosted dk dv", Op::GroupReduce(op));
    }

    /// Puts dq in its places, once stages have written theirs and everything has come; adds it to theirs and rounds the sums where stages
    /// compute for these rows too.
    pub(super) fn finish(self, p: &mut ProgramBuilder, dq: &Gradient) {
        let Some((src, crossed)) = self.reduced else { return };
        let hosting = &self.hosting;
        if let Some(crossed) = crossed {
            let stream = if hosting.in_part { hosting.reduce } else { hosting.compute };
            p.after(stream, None, "wait for dq of other nodes", crossed);
        }
        if hosting.in_part {
            hosting.merge_into(p, ("add dq of hosts", "wait for dq"), vec![(src, dq.written)], ReduceOp::Sum);
            dq.round(p, hosting.compute, "round dq");
        } else if !hosting.offloaded.is_empty() {
            let (dst, rows) = (dq.rounded.unwrap_or(dq.written), hosting.offloaded.clone());
            p.push(hosting.compute, None, "place dq of offloaded rows", Op::PlaceRows { src, dst, rows });
        }
    }
}

fn scratch(p: &mut ProgramBuilder, name: &str, dtype: DType, rows: usize, row: &[usize]) -> BufferId {
    let shape: Vec<usize> = std::iter::once(rows).chain(row.iter().copied()).collect();
    p.buffer(name, dtype, &shape, BufferRole::Scratch)
}

/// The pattern in which `rank` holds a copy of its own `rows` rows.
fn from_itself(rank: usize, rows: usize) -> GroupPart {
    if rows == 0 {
        return GroupPart::default();
    }
    let (rows, rank) = (Range::new(0, rows), rank as u32);
    GroupPart {
        owned: vec![OwnedSplit { rows, ranks: vec![rank] }],
        remote: vec![RemoteSplit { rows, rank }],
    }
}
