//! How queries travel to their hosts, and what these compute back to the owners: in one step, or over nodes in two.

use std::sync::Arc;

use counterpoint_plan::{DType, GroupPart, HostedWork, Plan};

use crate::builder::{Mark, ProgramBuilder};
use crate::{Accumulate, BarrierId, BufferId, GroupCast, GroupReduce, Op, ReduceOp, StreamId};

/// Moves rows of offloaded queries to their hosts and partial results back.
pub(super) struct QueryExchange {
    cast: StreamId,
    reduce: StreamId,
    route: Route,
}

/// How they travel.
enum Route {
    /// Each row to every host of it by itself.
    Straight { part: Arc<GroupPart>, places: Arc<GroupPart> },
    /// Between nodes, then inside each; results inside each node, then between nodes.
    OverNodes(OverNodes),
}

struct OverNodes {
    inter: Arc<GroupPart>,
    near: Arc<GroupPart>,
    forward: Arc<GroupPart>,
    /// Where results of the own node, and those of others, go among the offloaded rows.
    near_places: Arc<GroupPart>,
    inter_places: Arc<GroupPart>,
    /// Rows that cross to this rank.
    inter_rows: usize,
    cast: StreamId,
    reduce: StreamId,
}

impl QueryExchange {
    /// Of a rank of `plan`, whose hosted work is `work`, on its streams and those that it has between nodes.
    pub(super) fn new(
        (plan, rank): (&Plan, usize),
        work: &HostedWork,
        (cast, reduce): (StreamId, StreamId),
        between_nodes: Option<(StreamId, StreamId)>,
    ) -> Self {
        let levels = plan.two_level.as_ref().and_then(|exchange| exchange.hosted.get(rank));
        let route = match levels.zip(between_nodes) {
            None => {
                Route::Straight { part: Arc::new(work.part.clone()), places: Arc::new(work.owner_part()) }
            }
            Some((levels, (cast, reduce))) => Route::OverNodes(OverNodes {
                near_places: Arc::new(work.with_places(&levels.near)),
                inter_places: Arc::new(work.with_places(&levels.inter)),
                inter: Arc::new(levels.inter.clone()),
                near: Arc::new(levels.near.clone()),
                forward: Arc::new(levels.forward.clone()),
                inter_rows: levels.inter_rows,
                cast,
                reduce,
            }),
        };
        Self { cast, reduce, route }
    }

    /// Casts that arrive at the barrier of [`QueryExchange::send`].
    pub(super) fn arrivals(&self) -> u64 {
        match self.route {
            Route::Straight { .. } => 1,
            Route::OverNodes(_) => 2,
        }
    }

    /// Sends rows of own tensors to where those of the hosts lie, which `label` names, once `ready`.
    pub(super) fn send(
        &self,
        p: &mut ProgramBuilder,
        label: &str,
        wire_dtype: DType,
        tensors: &[(BufferId, BufferId)],
        ready: Option<Mark>,
        arrive: Option<BarrierId>,
    ) {
        let cast = |part: &Arc<GroupPart>, tensors, arrive| {
            Op::GroupCast(GroupCast { part: part.clone(), tensors, wire_dtype, arrive, delivery: None })
        };
        let wait = |p: &mut ProgramBuilder, stream| {
            if let Some(ready) = ready {
                p.after(stream, None, "wait for delta", ready);
            }
        };
        match &self.route {
            Route::Straight { part, .. } => {
                wait(p, self.cast);
                p.push(self.cast, None, &format!("cast {label}"), cast(part, tensors.to_vec(), arrive));
            }
            Route::OverNodes(route) => {
                let (crossing, forwarded): (Vec<_>, Vec<_>) = tensors
                    .iter()
                    .map(|&(own, hosted)| {
                        let far = p.scratch_like(own, "far", route.inter_rows);
                        ((own, far), (far, hosted))
                    })
                    .unzip();
                wait(p, route.cast);
                let between = cast(&route.inter, crossing, arrive);
                p.push(route.cast, None, &format!("cast {label} between nodes"), between);
                let crossed = p.mark(route.cast, None, &format!("{label} crossed"));
                wait(p, self.cast);
                let inside = cast(&route.near, tensors.to_vec(), arrive);
                p.push(self.cast, None, &format!("cast {label} inside the node"), inside);
                p.after(self.cast, None, &format!("wait for {label} of other nodes"), crossed);
                let forward = cast(&route.forward, forwarded, None);
                p.push(self.cast, None, &format!("forward {label}"), forward);
            }
        }
    }

    /// Combines what hosts have computed, which `label` names, into buffers that have a row for each offloaded one, once `done`. When the last
    /// of it has come, where that is not when the stream of reduces has done what it was given.
    pub(super) fn bring_back(
        &self,
        p: &mut ProgramBuilder,
        (label, op, dtype): (&str, ReduceOp, DType),
        tensors: &[(BufferId, BufferId)],
        done: Mark,
        arrive: Option<BarrierId>,
    ) -> Option<Mark> {
        let reduce = |part: &Arc<GroupPart>, tensors, accumulate, arrive| {
            Op::GroupReduce(GroupReduce {
                part: part.clone(),
                tensors,
                op,
                accumulate,
                wire_dtype: dtype,
                reduce_dtype: dtype,
                arrive,
            })
        };
        p.after(self.reduce, None, "wait for partials", done);
        match &self.route {
            Route::Straight { places, .. } => {
                let all = reduce(places, tensors.to_vec(), Accumulate::Start, arrive);
                p.push(self.reduce, None, &format!("reduce {label}"), all);
                None
            }
            Route::OverNodes(route) => {
                let (leaving, crossing): (Vec<_>, Vec<_>) = tensors
                    .iter()
                    .map(|&(partial, reduced)| {
                        let far = p.scratch_like(partial, "far", route.inter_rows);
                        ((partial, far), (far, reduced))
                    })
                    .unzip();
                let others = reduce(&route.forward, leaving, Accumulate::Start, arrive);
                p.push(self.reduce, None, &format!("reduce {label} for other nodes"), others);
                // First, so that the order of what is added is fixed.
                let own = reduce(&route.near_places, tensors.to_vec(), Accumulate::Start, None);
                p.push(self.reduce, None, &format!("reduce {label} inside the node"), own);
                let ready = p.mark(self.reduce, None, &format!("{label} of the node done"));
                p.after(route.reduce, None, &format!("wait for {label} of the node"), ready);
                let between = reduce(&route.inter_places, crossing, Accumulate::Continue, None);
                p.push(route.reduce, None, &format!("reduce {label} between nodes"), between);
                Some(p.mark(route.reduce, None, &format!("{label} crossed")))
            }
        }
    }
}
