use std::sync::Arc;

use counterpoint_plan::{AttentionSpec, StagePlan};

use super::LocalTensors;
use super::rotation::Rotation;
use crate::builder::{Mark, ProgramBuilder};
use crate::{BarrierId, BufferId, BufferRole, GroupCast, Op, StreamId};

/// Gives each stage its keys and values while those of the next are on their way.
pub(super) struct KeyPrefetch<'a> {
    stages: &'a [StagePlan],
    spec: &'a AttentionSpec,
    local: (BufferId, BufferId),
    compute: StreamId,
    cast: StreamId,
    barrier: Option<BarrierId>,
    buffers: Rotation,
    /// Of the stage to be entered next, and when they are there.
    keys: (BufferId, BufferId),
    arrived: Option<Mark>,
}

impl<'a> KeyPrefetch<'a> {
    pub(super) fn new(
        local: &LocalTensors,
        stages: &'a [StagePlan],
        spec: &'a AttentionSpec,
        compute: StreamId,
        cast: StreamId,
        barrier: Option<BarrierId>,
    ) -> Self {
        let (local, buffers) = ((local.k, local.v), Rotation::new(stages.len()));
        Self { stages, spec, local, compute, cast, barrier, buffers, keys: local, arrived: None }
    }

    /// Sends the keys of stage `s + 1` on their way, has the computation wait for those of stage `s`, and returns them.
    pub(super) fn enter(&mut self, p: &mut ProgramBuilder, s: usize) -> (BufferId, BufferId) {
        let (keys, arrived) = (self.keys, self.arrived.take());
        let next = self.stages.get(s + 1);
        if let Some(next) = next {
            self.cast(p, s + 1, next);
        }
        if let Some(mark) = arrived {
            p.after(self.compute, Some(s), "wait for k v", mark);
        }
        if next.is_some() {
            p.after_start(
                self.compute,
                Some(s),
                "wait until the next cast has started",
                self.barrier,
                s as u64 + 1,
            );
        }
        keys
    }

    /// Stage `s` has been computed.
    pub(super) fn leave(&mut self, p: &mut ProgramBuilder, s: usize) {
        self.buffers.leave(p, self.compute, s);
    }

    fn cast(&mut self, p: &mut ProgramBuilder, s: usize, stage: &StagePlan) {
        let (k, v) = key_buffers(p, ("k", "v"), s, stage.key_rows, self.spec);
        self.buffers.take(p, self.cast, s, (k, v));
        let op = GroupCast {
            part: Arc::new(stage.part.clone()),
            tensors: vec![(self.local.0, k), (self.local.1, v)],
            wire_dtype: self.spec.dtype,
            arrive: self.barrier,
        };
        p.push(self.cast, Some(s), "cast k v", Op::GroupCast(op));
        self.keys = (k, v);
        self.arrived = Some(p.mark(self.cast, Some(s), "k v arrived"));
    }
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
