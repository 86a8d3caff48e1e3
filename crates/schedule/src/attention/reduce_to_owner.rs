//! Gradients of remote keys back to their owners: a group-reduce a stage or one for all, over nodes in two steps.

use std::sync::Arc;

use counterpoint_plan::{AttentionSpec, DType, GroupPart, TwoLevelPart};

use super::rotation::Rotation;
use crate::builder::{Mark, ProgramBuilder};
use crate::{Accumulate, BarrierId, BufferId, BufferRole, GroupReduce, Op, ReduceOp, StreamId};

/// Sums partial gradients of remote keys into their owners' rows.
pub(super) struct ReduceToOwner<'a> {
    spec: &'a AttentionSpec,
    /// Of partial sums, and of a node's sums of them on their way to another node.
    partial_dtype: DType,
    reduce: StreamId,
    /// The owner's dk and dv.
    sums: (BufferId, BufferId),
    barrier: Option<BarrierId>,
    between_nodes: Option<BetweenNodes>,
}

/// The step between nodes: sums of a node's partial sums, which cross once.
struct BetweenNodes {
    stream: StreamId,
    buffers: Rotation,
    /// When the last one is in the owners' sums. Sums of the node itself are added in turn with those that crossed, so that
    /// their order is fixed.
    last: Option<Mark>,
}

/// How partial sums travel.
#[derive(Clone, Copy)]
pub(super) enum Route<'a> {
    /// In one step.
    Straight(&'a GroupPart),
    /// Inside the node, then between nodes.
    OverNodes(&'a TwoLevelPart),
}

impl<'a> ReduceToOwner<'a> {
    pub(super) fn new(
        spec: &'a AttentionSpec,
        partial_dtype: DType,
        reduce: StreamId,
        sums: (BufferId, BufferId),
        barrier: Option<BarrierId>,
    ) -> Self {
        Self { spec, partial_dtype, reduce, sums, barrier, between_nodes: None }
    }

    /// In two steps, the second on `stream`.
    pub(super) fn over_nodes(self, stream: StreamId, stages: usize) -> Self {
        let between_nodes = BetweenNodes { stream, buffers: Rotation::new(stages), last: None };
        Self { between_nodes: Some(between_nodes), ..self }
    }

    /// Sends the partial sums of stage `s`, or of all stages at once, once `done`.
    pub(super) fn send(
        &mut self,
        p: &mut ProgramBuilder,
        s: Option<usize>,
        route: Route<'_>,
        partials: (BufferId, BufferId),
        done: Mark,
    ) {
        p.after(self.reduce, s, "wait for dk dv", done);
        let (part, sums) = match (route, &mut self.between_nodes) {
            (Route::OverNodes(part), Some(between_nodes)) => (part, between_nodes),
            (Route::OverNodes(TwoLevelPart { near: part, .. }) | Route::Straight(part), _) => {
                let op = self.op(part, partials, self.sums, Accumulate::Continue, self.barrier);
                p.push(self.reduce, s, "reduce dk dv", op);
                return;
            }
        };
        let (stream, last) = (sums.stream, sums.last.take());
        let far = self.far_buffers(p, s, part.inter_rows);
        if let (Some(s), Some(between_nodes)) = (s, &mut self.between_nodes) {
            between_nodes.buffers.take(p, self.reduce, s, far);
        }
        let op = self.op(&part.forward, partials, far, Accumulate::Start, self.barrier);
        p.push(self.reduce, s, "reduce dk dv for other nodes", op);
        if let Some(last) = last {
            p.after(self.reduce, s, "wait for the reduce between nodes", last);
        }
        let op = self.op(&part.near, partials, self.sums, Accumulate::Continue, None);
        p.push(self.reduce, s, "reduce dk dv inside the node", op);
        let mark = p.mark(self.reduce, s, "sums of the node done");
        p.after(stream, s, "wait for the sums of the node", mark);
        let op = self.op(&part.inter, far, self.sums, Accumulate::Continue, None);
        p.push(stream, s, "reduce dk dv between nodes", op);
        let reduced = p.mark(stream, s, "dk dv crossed");
        if let Some(between_nodes) = &mut self.between_nodes {
            if let Some(s) = s {
                between_nodes.buffers.leave(p, stream, s);
            }
            between_nodes.last = Some(reduced);
        }
    }

    /// When all partial sums are at their owners.
    pub(super) fn arrived(mut self, p: &mut ProgramBuilder) -> Mark {
        if let Some(last) = self.between_nodes.take().and_then(|between_nodes| between_nodes.last) {
            p.after(self.reduce, None, "wait for the last reduce between nodes", last);
        }
        p.mark(self.reduce, None, "dk dv reduced")
    }

    fn far_buffers(&self, p: &mut ProgramBuilder, s: Option<usize>, rows: usize) -> (BufferId, BufferId) {
        let mut scratch = |name: &str, dim| {
            let name = s.map_or_else(|| name.to_owned(), |s| format!("{name}_{s}"));
            let shape = [rows, self.spec.heads_kv, dim];
            p.buffer(&name, self.partial_dtype, &shape, BufferRole::Scratch)
        };
        (scratch("dk_far", self.spec.head_dim), scratch("dv_far", self.spec.head_dim_v))
    }

    fn op(
        &self,
        part: &GroupPart,
        from: (BufferId, BufferId),
        to: (BufferId, BufferId),
        accumulate: Accumulate,
        arrive: Option<BarrierId>,
    ) -> Op {
        Op::GroupReduce(GroupReduce {
            part: Arc::new(part.clone()),
            tensors: vec![(from.0, to.0), (from.1, to.1)],
            op: ReduceOp::Sum,
            accumulate,
            wire_dtype: self.partial_dtype,
            reduce_dtype: self.spec.dtype.accumulator(),
            arrive,
        })
    }
}
