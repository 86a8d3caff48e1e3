//! Keys and values of the next stage, prefetched under the computation of this one; what a stage waits for.

use std::sync::Arc;

use counterpoint_plan::{AttentionSpec, GroupPart, StagePlan, TwoLevelPart};

use super::LocalTensors;
use super::rotation::Rotation;
use crate::builder::{Mark, ProgramBuilder};
use crate::{ArrivingKeys, BarrierId, BufferId, BufferRole, Delivery, GroupCast, Op, StreamId};

/// Gives each stage its keys and values while those of the next are on their way.
pub(super) struct KeyPrefetch<'a> {
    stages: &'a [StagePlan],
    spec: &'a AttentionSpec,
    local: (BufferId, BufferId),
    compute: StreamId,
    cast: StreamId,
    barrier: Option<BarrierId>,
    buffers: Rotation,
    between_nodes: Option<BetweenNodes<'a>>,
    /// Whether hosted work comes between stage 0 and stage 1: it hides the cast that stage 0 hides else, and stage 0 that of
    /// queries.
    hosting: bool,
    /// Where one stage does all work while its rows come: the parts that they come in.
    delivery_parts: Option<usize>,
    /// Of the stage to be entered next, and when they are there.
    keys: StageKeys,
    arrived: Option<Arrived>,
    /// Arrivals at the barrier of all casts so far.
    started: u64,
}

/// The keys and values of a stage.
#[derive(Clone, Copy)]
pub(super) struct StageKeys {
    pub(super) k: BufferId,
    pub(super) v: BufferId,
    /// Those that come while it computes.
    pub(super) arriving: Option<ArrivingKeys>,
}

/// What a stage that needs rows of others waits for.
enum Arrived {
    /// All of them.
    All(Mark),
    /// That they are on their way: so many arrivals at a barrier.
    Start(BarrierId, u64),
}

impl<'a> KeyPrefetch<'a> {
    pub(super) fn new(
        local: &LocalTensors,
        stages: &'a [StagePlan],
        spec: &'a AttentionSpec,
        compute: StreamId,
        cast: StreamId,
        barrier: Option<BarrierId>,
        between_nodes: Option<(&'a [TwoLevelPart], StreamId)>,
    ) -> Self {
        let (local, buffers) = ((local.k, local.v), Rotation::new(stages.len()));
        let between_nodes = between_nodes.map(|(parts, stream)| BetweenNodes {
            parts,
            stream,
            buffers: Rotation::new(stages.len()),
        });
        Self {
            stages,
            spec,
            local,
            compute,
            cast,
            barrier,
            buffers,
            between_nodes,
            hosting: false,
            delivery_parts: None,
            keys: StageKeys { k: local.0, v: local.1, arriving: None },
            arrived: None,
            started: 0,
        }
    }

    /// Casts of queries to their hosts, of which so many arrive at the same barrier, are on their way; hosted work follows stage 0.
    pub(super) fn after_queries(&mut self, arrivals: u64) {
        self.hosting = true;
        self.started += arrivals;
    }

    /// Stage 1 does all work, and its rows come in so many parts meanwhile.
    pub(super) fn deliver_in(&mut self, parts: Option<usize>) {
        self.delivery_parts = parts;
    }

    /// The rank's own keys, for hosted work: sends those of stage 1 on their way, and has the computation wait until they are.
    pub(super) fn enter_hosted(&mut self, p: &mut ProgramBuilder) -> (BufferId, BufferId) {
        if self.send(p, 1) {
            self.await_start(p, None);
        }
        self.local
    }

    /// Sends the keys of stage `s + 1` on their way, has the computation wait for those of stage `s` (or until they are on their
    /// way, if they come meanwhile), and returns them.
    pub(super) fn enter(&mut self, p: &mut ProgramBuilder, s: usize) -> StageKeys {
        let (keys, arrived) = (self.keys, self.arrived.take());
        let hides = if self.hosting && s == 0 { true } else { self.send(p, s + 1) };
        match arrived {
            Some(Arrived::All(mark)) => p.after(self.compute, Some(s), "wait for k v", mark),
            Some(Arrived::Start(barrier, arrivals)) => {
                p.after_start(
                    self.compute,
                    Some(s),
                    "wait until k v are on their way",
                    Some(barrier),
                    arrivals,
                );
            }
            None => {}
        }
        if hides {
            self.await_start(p, Some(s));
        }
        keys
    }

    fn await_start(&self, p: &mut ProgramBuilder, s: Option<usize>) {
        p.after_start(self.compute, s, "wait until the next cast has started", self.barrier, self.started);
    }

    /// Sends the keys of stage `s` on their way, if there is such a stage; whether there is.
    fn send(&mut self, p: &mut ProgramBuilder, s: usize) -> bool {
        let Some(stage) = self.stages.get(s) else { return false };
        // In two steps both the one between nodes and the one of own rows arrive.
        self.started += if self.between_nodes.is_some() { 2 } else { 1 };
        match self.delivery_parts {
            Some(parts) => self.deliver(p, s, stage, parts),
            None => self.cast(p, s, stage),
        }
        true
    }

    /// Stage `s` has been computed.
    pub(super) fn leave(&mut self, p: &mut ProgramBuilder, s: usize) {
        self.buffers.leave(p, self.compute, s);
    }

    fn cast(&mut self, p: &mut ProgramBuilder, s: usize, stage: &StagePlan) {
        let (k, v) = key_buffers(p, ("k", "v"), s, stage.key_rows, self.spec);
        self.buffers.take(p, self.cast, s, (k, v));
        let op = |part: &GroupPart, from: (BufferId, BufferId), to: (BufferId, BufferId), arrive| {
            let (part, tensors) = (Arc::new(part.clone()), vec![(from.0, to.0), (from.1, to.1)]);
            Op::GroupCast(GroupCast { part, tensors, wire_dtype: self.spec.dtype, arrive, delivery: None })
        };
        match &mut self.between_nodes {
            None => {
                p.push(self.cast, Some(s), "cast k v", op(&stage.part, self.local, (k, v), self.barrier));
            }
            Some(BetweenNodes { parts, stream, buffers }) => {
                let part = &parts[s];
                let far = key_buffers(p, ("k_far", "v_far"), s, part.inter_rows, self.spec);
                buffers.take(p, *stream, s, far);
                let cast = op(&part.inter, self.local, far, self.barrier);
                p.push(*stream, Some(s), "cast k v between nodes", cast);
                let crossed = p.mark(*stream, Some(s), "k v crossed");
                let cast = op(&part.near, self.local, (k, v), self.barrier);
                p.push(self.cast, Some(s), "cast k v inside the node", cast);
                p.after(self.cast, Some(s), "wait for k v of other nodes", crossed);
                p.push(self.cast, Some(s), "forward k v", op(&part.forward, far, (k, v), None));
                buffers.leave(p, self.cast, s);
            }
        }
        self.keys = StageKeys { k, v, arriving: None };
        self.arrived = Some(Arrived::All(p.mark(self.cast, Some(s), "k v arrived")));
    }

    /// Sends the rows of a stage that does all work and begins with the rank's own keys, where they are.
    fn deliver(&mut self, p: &mut ProgramBuilder, s: usize, stage: &StagePlan, parts: usize) {
        let (k, v) = key_buffers(p, ("k", "v"), s, stage.key_rows - stage.own_rows, self.spec);
        let delivery = Delivery { signal: p.signal(), parts };
        // Whatever the policy: the computation waits for these rows inside, and could keep their cast from starting.
        let (barrier, arrivals) = match self.barrier {
            Some(barrier) => (barrier, self.started),
            None => (p.start_barrier(), 1),
        };
        let part = GroupPart {
            owned: stage.part.owned.clone(),
            remote: stage.part.remote.iter().map(|split| split.without_first(stage.own_rows)).collect(),
        };
        let op = GroupCast {
            part: Arc::new(part),
            tensors: vec![(self.local.0, k), (self.local.1, v)],
            wire_dtype: self.spec.dtype,
            arrive: Some(barrier),
            delivery: Some(delivery),
        };
        p.push(self.cast, Some(s), "cast k v", Op::GroupCast(op));
        let arriving = Some(ArrivingKeys { k, v, delivery });
        self.keys = StageKeys { k: self.local.0, v: self.local.1, arriving };
        self.arrived = Some(Arrived::Start(barrier, arrivals));
    }
}

/// In how many parts rows come to a computation that is under way, where one stage does all work: those of the rank that receives
/// most, so that they are the same on all ranks.
pub(super) fn delivery_parts<'a>(
    stages: impl Iterator<Item = &'a [StagePlan]> + Clone,
    spec: &AttentionSpec,
) -> Option<usize> {
    let all_at_once = |stages: &[StagePlan]| stages.get(1).is_some_and(|stage| stage.own_rows > 0);
    if !stages.clone().any(all_at_once) {
        return None;
    }
    let received = stages.filter_map(|stages| stages.get(1)).map(|stage| stage.key_rows - stage.own_rows);
    Some(spec.delivery_parts(received.max().unwrap_or(0)))
}

/// The step between nodes.
struct BetweenNodes<'a> {
    /// By stage.
    parts: &'a [TwoLevelPart],
    stream: StreamId,
    buffers: Rotation,
}

/// Scratch for `rows` keys and values of stage `s`.
fn key_buffers(
    p: &mut ProgramBuilder,
    (k, v): (&str, &str),
    s: usize,
    rows: usize,
    spec: &AttentionSpec,
) -> (BufferId, BufferId) {
    let mut scratch = |name: &str, dim| {
        let shape = [rows, spec.heads_kv, dim];
        p.buffer(&format!("{name}_{s}"), spec.dtype, &shape, BufferRole::Scratch)
    };
    (scratch(k, spec.head_dim), scratch(v, spec.head_dim_v))
}
