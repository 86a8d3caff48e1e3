//! Query offload in Programs: queries out to the ranks that have their keys, work on them there, partial results to their owners.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{
    AttentionSpec, DType, GroupPart, HostedWork, OwnedSplit, Plan, RankPlan, RemoteSplit,
};

use super::GradientReduction;
use crate::builder::{Mark, ProgramBuilder};
use crate::{
    Accumulate, AttentionBackward, AttentionFinish, AttentionForward, BarrierId, BufferId, BufferRole,
    ForwardBegin, ForwardEnd, GroupCast, GroupReduce, KeyBlocks, MaxLogits, Op, ReduceOp, StreamId,
};

/// Whether every row of every rank is offloaded: stages then have nothing to compute, to begin or to write, and what hosts compute is
/// all there is.
pub(super) fn hosts_do_all(plan: &Plan) -> bool {
    let all_offloaded =
        |rank: &RankPlan| rank.hosted.as_ref().is_some_and(|work| work.offloaded_rows() == rank.q_rows);
    plan.ranks.iter().all(all_offloaded)
}

/// The work that a rank does for offloaded rows, and how the results of its own such rows come back.
pub(super) struct Hosting<'a> {
    work: &'a HostedWork,
    spec: &'a AttentionSpec,
    compute: StreamId,
    cast: StreamId,
    reduce: StreamId,
    part: Arc<GroupPart>,
    owner_part: Arc<GroupPart>,
    /// Rows of its own that are offloaded.
    offloaded: Arc<[Range]>,
}

/// Of a forward, its queries sent.
pub(super) struct HostedForward<'a> {
    hosting: Hosting<'a>,
    q: BufferId,
    arrived: Mark,
    barrier: Option<BarrierId>,
    reduced: Option<(BufferId, BufferId, Mark)>,
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
    reduced: Option<BufferId>,
    /// Partial results of dk and dv.
    partials: Option<(BufferId, BufferId)>,
}

impl<'a> Hosting<'a> {
    pub(super) fn new(
        work: &'a HostedWork,
        spec: &'a AttentionSpec,
        compute: StreamId,
        cast: StreamId,
        reduce: StreamId,
    ) -> Self {
        let (part, owner_part) = (Arc::new(work.part.clone()), Arc::new(work.owner_part()));
        Self { work, spec, compute, cast, reduce, part, owner_part, offloaded: work.offloaded().into() }
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
        self.send(p, "cast q", self.spec.dtype, vec![(q, hosted_q)], sent);
        let arrived = p.mark(self.cast, None, "q arrived");
        HostedForward { hosting: self, q: hosted_q, arrived, barrier: returning, reduced: None }
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
        self.send(p, "cast q dout", dtype, vec![(q, hosted_q), (dout, hosted_dout)], sent);
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

    fn send(
        &self,
        p: &mut ProgramBuilder,
        label: &str,
        wire_dtype: DType,
        tensors: Vec<(BufferId, BufferId)>,
        arrive: Option<BarrierId>,
    ) {
        let op = GroupCast { part: self.part.clone(), tensors, wire_dtype, arrive, delivery: None };
        p.push(self.cast, None, label, Op::GroupCast(op));
    }

    /// Brings partial results of rows to their owners, into buffers that have the offloaded rows.
    fn reduce_to_owner(
        &self,
        p: &mut ProgramBuilder,
        label: &str,
        tensors: Vec<(BufferId, BufferId)>,
        op: ReduceOp,
        arrive: Option<BarrierId>,
    ) {
        let dtype = self.spec.dtype.accumulator();
        let op = GroupReduce {
            part: self.owner_part.clone(),
            tensors,
            op,
            accumulate: Accumulate::Start,
            wire_dtype: dtype,
            reduce_dtype: dtype,
            arrive,
        };
        p.push(self.reduce, None, label, Op::GroupReduce(op));
    }

    /// Scratch with a row for every hosted query row.
    fn guest(&self, p: &mut ProgramBuilder, name: &str, dtype: DType, row: &[usize]) -> BufferId {
        scratch(p, name, dtype, self.work.q_rows, row)
    }

    /// Scratch in the accumulator type with a row for every row that is offloaded.
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
        p.after(hosting.reduce, None, "wait for partials", done);
        let reduced_out = hosting.reduced(p, "out_reduced", &[heads_q, head_dim_v]);
        let reduced_lse = hosting.reduced(p, "lse_reduced", &[heads_q]);
        hosting.reduce_to_owner(
            p,
            "reduce out lse",
            vec![(out, reduced_out), (lse, reduced_lse)],
            ReduceOp::Lse,
            self.barrier,
        );
        self.reduced = Some((reduced_out, reduced_lse, p.mark(hosting.reduce, None, "out lse reduced")));
    }

    /// Puts the results in their places, once stages have written theirs.
    pub(super) fn finish(
        self,
        p: &mut ProgramBuilder,
        sink: Option<BufferId>,
        (out, lse): (BufferId, BufferId),
    ) {
        let Some((merged_out, merged_lse, reduced)) = self.reduced else { return };
        let Hosting { compute, offloaded, .. } = self.hosting;
        p.after(compute, None, "wait for out lse", reduced);
        if !offloaded.is_empty() {
            let op = AttentionFinish { merged_out, merged_lse, sink, rows: offloaded, out, lse };
            p.push(compute, None, "finish offloaded rows", Op::AttentionFinish(op));
        }
    }
}

impl HostedBackward<'_> {
    /// Sends what a row's softmax was, once it is known.
    pub(super) fn send_statistics(&mut self, p: &mut ProgramBuilder) {
        let hosting = &self.hosting;
        let known = p.mark(hosting.compute, None, "delta done");
        p.after(hosting.cast, None, "wait for delta", known);
        hosting.send(p, "cast lse delta", hosting.spec.dtype.accumulator(), vec![self.lse, self.delta], None);
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
        p.after(hosting.reduce, None, "wait for partials", done);
        let reduced = hosting.reduced(p, "dq_reduced", &[heads_q, head_dim]);
        hosting.reduce_to_owner(p, "reduce dq", vec![(dq, reduced)], ReduceOp::Sum, self.barrier);
        self.reduced = Some(reduced);
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

    /// Puts dq in its places, once stages have written theirs and everything has come.
    pub(super) fn finish(self, p: &mut ProgramBuilder, dq: BufferId) {
        let Hosting { compute, offloaded, .. } = self.hosting;
        if let (Some(src), false) = (self.reduced, offloaded.is_empty()) {
            let op = Op::PlaceRows { src, dst: dq, rows: offloaded };
            p.push(compute, None, "place dq of offloaded rows", op);
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
