//! Distributed attention as Programs.
//!
//! Forward: while stage `s` computes, the keys and values of stage `s + 1` arrive. Backward: likewise, and the gradients
//! of the keys of stage `s - 1` travel home on a stream of their own, so that neither direction waits for the other's
//! dependencies. Stage 0 is the local work.

use std::sync::Arc;

use counterpoint_plan::{
    AttentionSpec, DType, GroupPart, OwnedSplit, Plan, RankPlan, RemoteSplit, StagePlan,
};

use crate::builder::{Mark, ProgramBuilder};
use crate::{
    Accumulate, AttentionBackward, AttentionDelta, AttentionForward, AttentionState, BarrierId, BufferId,
    BufferRole, ForwardBegin, ForwardEnd, GroupCast, GroupReduce, Op, OverlapPolicy, Program, ReduceOp,
    StreamId, StreamKind,
};

/// Whether the gradients of remote keys travel as soon as a stage has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradientReduction {
    /// One group-reduce a stage, under the next stage's computation. The order in which an owner adds the shares of its
    /// rows follows the stages.
    #[default]
    PerStage,
    /// One group-reduce after the last stage: shares are added in the order of ranks, so the result has the same bits for
    /// any number of stages.
    Deterministic,
}

/// Lowers one rank's forward. Inputs `q`, `k`, `v` (its local rows) and `sink` if the spec has one; outputs `out`, `lse`.
///
/// The last stage with work writes the results; a state lives between stages only, so a forward whose work is all in one
/// stage has none.
pub fn lower_attention_forward(
    plan: &Plan,
    rank: usize,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
) -> Program {
    let rank_plan = &plan.ranks[rank];
    let stages = &rank_plan.forward;
    let mut p = ProgramBuilder::new("attention forward", rank, plan.ranks.len(), policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let cast = if stages.len() > 1 { p.stream("group-cast", StreamKind::Communication) } else { compute };

    let acc_dtype = spec.dtype.accumulator();
    let local = LocalTensors::declare(&mut p, rank_plan, spec);
    let row_shape = [rank_plan.q_rows, spec.heads_q];
    let out_shape = [rank_plan.q_rows, spec.heads_q, spec.head_dim_v];
    let sink = sink_input(&mut p, spec);
    // Without any work the first stage writes the results of rows that see nothing.
    let has_work = |s: &usize| !stages[*s].bands.is_empty();
    let first = (0..stages.len()).find(has_work).unwrap_or(0);
    let last = (0..stages.len()).rfind(has_work).unwrap_or(0);
    let mut scratch = |name, shape: &[usize]| p.buffer(name, acc_dtype, shape, BufferRole::Scratch);
    let state = (first < last).then(|| AttentionState {
        acc: scratch("acc", &out_shape),
        row_max: scratch("row_max", &row_shape),
        row_sum: scratch("row_sum", &row_shape),
    });
    let out = p.buffer("out", spec.dtype, &out_shape, BufferRole::Output);
    let lse = p.buffer("lse", acc_dtype, &row_shape, BufferRole::Output);
    let barrier = p.barrier();
    let mut keys = KeyPrefetch::new(&local, stages, spec, compute, cast, barrier);
    for (s, stage) in stages.iter().enumerate() {
        let (k, v) = keys.enter(&mut p, s);
        if s != first && !has_work(&s) {
            continue;
        }
        let op = AttentionForward {
            q: local.q,
            k,
            v,
            begin: state.filter(|_| s > first).map_or(ForwardBegin::Start, ForwardBegin::Continue),
            end: state.filter(|_| s < last).map_or(ForwardEnd::Result { sink, out, lse }, ForwardEnd::State),
            bands: stage.bands.clone(),
            scale: spec.scale,
            softcap: spec.softcap,
        };
        p.push(compute, Some(s), "attention forward", Op::AttentionForward(op));
    }
    p.finish()
}

/// Lowers one rank's backward. Inputs `q`, `k`, `v`, `out`, `lse`, `dout` (its local rows) and `sink`; outputs `dq`, `dk`,
/// `dv`, and `dsink` summed over all ranks.
pub fn lower_attention_backward(
    plan: &Plan,
    rank: usize,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    reduction: GradientReduction,
) -> Program {
    let rank_plan = &plan.ranks[rank];
    let world_size = plan.ranks.len();
    let stages = &rank_plan.backward;
    let mut p = ProgramBuilder::new("attention backward", rank, world_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let (cast, reduce) = if world_size > 1 {
        (
            p.stream("group-cast", StreamKind::Communication),
            p.stream("group-reduce", StreamKind::Communication),
        )
    } else {
        (compute, compute)
    };

    let acc_dtype = spec.dtype.accumulator();
    let local = LocalTensors::declare(&mut p, rank_plan, spec);
    let row_shape = [rank_plan.q_rows, spec.heads_q];
    let out_shape = [rank_plan.q_rows, spec.heads_q, spec.head_dim_v];
    let out = p.buffer("out", spec.dtype, &out_shape, BufferRole::Input);
    let lse = p.buffer("lse", acc_dtype, &row_shape, BufferRole::Input);
    let dout = p.buffer("dout", spec.dtype, &out_shape, BufferRole::Input);
    let sink = sink_input(&mut p, spec);
    let delta = p.buffer("delta", acc_dtype, &row_shape, BufferRole::Scratch);
    let dq = Gradient::summed(&mut p, "dq", spec.dtype, &[rank_plan.q_rows, spec.heads_q, spec.head_dim]);
    // Only shares of other ranks make a sum of dk and dv: without a remote stage they are results at once.
    let declare = if stages.len() > 1 { Gradient::summed } else { Gradient::whole };
    let dk = declare(&mut p, "dk", spec.dtype, &[rank_plan.k_rows, spec.heads_kv, spec.head_dim]);
    let dv = declare(&mut p, "dv", spec.dtype, &[rank_plan.k_rows, spec.heads_kv, spec.head_dim_v]);
    let cast_barrier = p.barrier();
    let reduce_barrier = p.barrier();

    let dsink = sink.map(|sink| {
        let role = if world_size > 1 { BufferRole::Scratch } else { BufferRole::Output };
        let name = if world_size > 1 { "dsink_share" } else { "dsink" };
        (sink, p.buffer(name, acc_dtype, &[spec.seqlen_sink, spec.heads_q], role))
    });
    let op = AttentionDelta { out, dout, lse, delta, sink: dsink };
    p.push(compute, None, "delta", Op::AttentionDelta(op));
    if let Some((_, share)) = dsink
        && world_size > 1
    {
        let mark = p.mark(compute, None, "dsink share done");
        p.after(reduce, None, "wait for dsink share", mark);
        let shape = [spec.seqlen_sink, spec.heads_q];
        let sum = p.buffer("dsink_sum", acc_dtype, &shape, BufferRole::Scratch);
        let total = p.buffer("dsink", acc_dtype, &shape, BufferRole::Output);
        let part = Arc::new(through_rank_0(rank, world_size, spec.seqlen_sink));
        let op = GroupReduce {
            part: part.clone(),
            tensors: vec![(share, sum)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            wire_dtype: acc_dtype,
            reduce_dtype: acc_dtype,
            arrive: None,
        };
        p.push(reduce, None, "reduce dsink", Op::GroupReduce(op));
        let op = GroupCast { part, tensors: vec![(sum, total)], wire_dtype: acc_dtype, arrive: None };
        p.push(reduce, None, "cast dsink", Op::GroupCast(op));
    }

    let mut keys = KeyPrefetch::new(&local, stages, spec, compute, cast, cast_barrier);
    let mut shares: Vec<(BufferId, BufferId)> = Vec::new();
    for (s, stage) in stages.iter().enumerate() {
        let here = Some(s);
        let (k, v) = keys.enter(&mut p, s);
        if s >= 2 && reduction == GradientReduction::PerStage {
            p.after_start(
                compute,
                here,
                "wait until the last reduce has started",
                reduce_barrier,
                s as u64 - 1,
            );
        }
        let (stage_dk, stage_dv) = if s == 0 {
            (dk.written, dv.written)
        } else {
            let shape_k = [stage.key_rows, spec.heads_kv, spec.head_dim];
            let shape_v = [stage.key_rows, spec.heads_kv, spec.head_dim_v];
            (
                p.buffer(&format!("dk_{s}"), acc_dtype, &shape_k, BufferRole::Scratch),
                p.buffer(&format!("dv_{s}"), acc_dtype, &shape_v, BufferRole::Scratch),
            )
        };
        let op = AttentionBackward {
            q: local.q,
            k,
            v,
            dout,
            lse,
            delta,
            dq: dq.written,
            rounded_dq: dq.rounded.filter(|_| s + 1 == stages.len()),
            dk: stage_dk,
            dv: stage_dv,
            bands: stage.bands.clone(),
            scale: spec.scale,
            softcap: spec.softcap,
            accumulate_dq: if s == 0 { Accumulate::Start } else { Accumulate::Continue },
            deterministic: reduction == GradientReduction::Deterministic,
        };
        p.push(compute, here, "attention backward", Op::AttentionBackward(op));
        if s > 0 {
            match reduction {
                GradientReduction::PerStage => {
                    let mark = p.mark(compute, here, "dk dv done");
                    p.after(reduce, here, "wait for dk dv", mark);
                    let tensors = vec![(stage_dk, dk.written), (stage_dv, dv.written)];
                    let op = sum_home(Arc::new(stage.part.clone()), tensors, acc_dtype, reduce_barrier);
                    p.push(reduce, here, "reduce dk dv", Op::GroupReduce(op));
                }
                GradientReduction::Deterministic => shares.push((stage_dk, stage_dv)),
            }
        }
    }
    if !shares.is_empty() {
        let rows = stages[1..].iter().map(|stage| stage.key_rows).sum();
        let all_dk =
            p.buffer("dk_remote", acc_dtype, &[rows, spec.heads_kv, spec.head_dim], BufferRole::Scratch);
        let all_dv =
            p.buffer("dv_remote", acc_dtype, &[rows, spec.heads_kv, spec.head_dim_v], BufferRole::Scratch);
        let (dks, dvs) = shares.into_iter().unzip();
        p.push(compute, None, "gather dk", Op::Concat { srcs: dks, dst: all_dk });
        p.push(compute, None, "gather dv", Op::Concat { srcs: dvs, dst: all_dv });
        let mark = p.mark(compute, None, "dk dv done");
        p.after(reduce, None, "wait for dk dv", mark);
        let part = GroupPart::concat(stages[1..].iter().map(|stage| (&stage.part, stage.key_rows)));
        let tensors = vec![(all_dk, dk.written), (all_dv, dv.written)];
        p.push(
            reduce,
            None,
            "reduce dk dv",
            Op::GroupReduce(sum_home(Arc::new(part), tensors, acc_dtype, None)),
        );
    }
    let home = p.mark(reduce, None, "dk dv home");
    p.after(compute, None, "wait for the last reduce", home);
    dk.round(&mut p, compute, "round dk");
    dv.round(&mut p, compute, "round dv");
    p.finish()
}

/// The rank's own rows, which every Program of attention reads.
struct LocalTensors {
    q: BufferId,
    k: BufferId,
    v: BufferId,
}

impl LocalTensors {
    fn declare(p: &mut ProgramBuilder, plan: &RankPlan, spec: &AttentionSpec) -> Self {
        let mut input = |name, shape: &[usize]| p.buffer(name, spec.dtype, shape, BufferRole::Input);
        Self {
            q: input("q", &[plan.q_rows, spec.heads_q, spec.head_dim]),
            k: input("k", &[plan.k_rows, spec.heads_kv, spec.head_dim]),
            v: input("v", &[plan.k_rows, spec.heads_kv, spec.head_dim_v]),
        }
    }
}

/// Gives each stage its keys and values while those of the next are on their way.
struct KeyPrefetch<'a> {
    stages: &'a [StagePlan],
    spec: &'a AttentionSpec,
    local: (BufferId, BufferId),
    compute: StreamId,
    cast: StreamId,
    barrier: Option<BarrierId>,
    /// Of the stage to be entered next, and when they are there.
    keys: (BufferId, BufferId),
    arrived: Option<Mark>,
}

impl<'a> KeyPrefetch<'a> {
    fn new(
        local: &LocalTensors,
        stages: &'a [StagePlan],
        spec: &'a AttentionSpec,
        compute: StreamId,
        cast: StreamId,
        barrier: Option<BarrierId>,
    ) -> Self {
        let local = (local.k, local.v);
        Self { stages, spec, local, compute, cast, barrier, keys: local, arrived: None }
    }

    /// Sends the keys of stage `s + 1` on their way, has the computation wait for those of stage `s`, and returns them.
    fn enter(&mut self, p: &mut ProgramBuilder, s: usize) -> (BufferId, BufferId) {
        let (keys, arrived) = (self.keys, self.arrived.take());
        let next = self.stages.get(s + 1);
        if let Some(next) = next {
            let stage = Some(s + 1);
            let (k, v) = stage_keys(p, s + 1, next, self.spec);
            let op = GroupCast {
                part: Arc::new(next.part.clone()),
                tensors: vec![(self.local.0, k), (self.local.1, v)],
                wire_dtype: self.spec.dtype,
                arrive: self.barrier,
            };
            p.push(self.cast, stage, "cast k v", Op::GroupCast(op));
            self.keys = (k, v);
            self.arrived = Some(p.mark(self.cast, stage, "k v arrived"));
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
}

/// A gradient: the buffer that kernels write and reductions add to, and the result that it is rounded to once at the end,
/// where that is another buffer.
struct Gradient {
    written: BufferId,
    rounded: Option<BufferId>,
}

impl Gradient {
    /// One whose first write is the result.
    fn whole(p: &mut ProgramBuilder, name: &str, dtype: DType, shape: &[usize]) -> Self {
        Self { written: p.buffer(name, dtype, shape, BufferRole::Output), rounded: None }
    }

    /// One that is summed, in the accumulator type.
    fn summed(p: &mut ProgramBuilder, name: &str, dtype: DType, shape: &[usize]) -> Self {
        let acc_dtype = dtype.accumulator();
        if acc_dtype == dtype {
            return Self::whole(p, name, dtype, shape);
        }
        let written = p.buffer(&format!("{name}_acc"), acc_dtype, shape, BufferRole::Scratch);
        Self { written, rounded: Some(p.buffer(name, dtype, shape, BufferRole::Output)) }
    }

    fn round(&self, p: &mut ProgramBuilder, stream: StreamId, label: &str) {
        if let Some(dst) = self.rounded {
            p.push(stream, None, label, Op::Cast { src: self.written, dst });
        }
    }
}

fn sink_input(p: &mut ProgramBuilder, spec: &AttentionSpec) -> Option<BufferId> {
    let shape = [spec.seqlen_sink, spec.heads_q];
    (spec.seqlen_sink > 0).then(|| p.buffer("sink", spec.dtype.accumulator(), &shape, BufferRole::Input))
}

fn stage_keys(
    p: &mut ProgramBuilder,
    s: usize,
    stage: &StagePlan,
    spec: &AttentionSpec,
) -> (BufferId, BufferId) {
    let mut scratch = |name: &str, dim| {
        let shape = [stage.key_rows, spec.heads_kv, dim];
        p.buffer(&format!("{name}_{s}"), spec.dtype, &shape, BufferRole::Scratch)
    };
    (scratch("k", spec.head_dim), scratch("v", spec.head_dim_v))
}

/// Sums shares of gradients into their owners' rows, on the wire in the accumulator type.
fn sum_home(
    part: Arc<GroupPart>,
    tensors: Vec<(BufferId, BufferId)>,
    acc_dtype: DType,
    arrive: Option<BarrierId>,
) -> GroupReduce {
    GroupReduce {
        part,
        tensors,
        op: ReduceOp::Sum,
        accumulate: Accumulate::Continue,
        wire_dtype: acc_dtype,
        reduce_dtype: acc_dtype,
        arrive,
    }
}

/// The pattern in which rank 0 owns `rows` rows and every rank, itself included, holds a copy: reduced, then cast, it is
/// an all-reduce with a fixed order.
fn through_rank_0(rank: usize, world_size: usize, rows: usize) -> GroupPart {
    let rows = counterpoint_mask::Range::new(0, rows);
    let ranks = (0..world_size as u32).collect();
    GroupPart {
        owned: if rank == 0 { vec![OwnedSplit { rows, ranks }] } else { Vec::new() },
        remote: vec![RemoteSplit { rows, rank: 0 }],
    }
}
