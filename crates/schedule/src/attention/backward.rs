//! The attention backward of a rank as a Program: delta, stages, gradients of remote keys on their way home, the sum of dsink.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{AttentionSpec, GroupPart, OwnedSplit, Plan, RemoteSplit, StagePlan};

use super::gradient::Gradient;
use super::hosting::{Hosting, hosts_do_all};
use super::keys::{KeyPrefetch, StageKeys, delivery_parts};
use super::reduce_to_owner::{ReduceToOwner, Route};
use super::rotation::Rotation;
use super::{GradientReduction, LocalTensors, sink_input};
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, AttentionBackward, AttentionDelta, BufferId, BufferRole, GroupCast, GroupReduce, Op,
    OverlapPolicy, Program, ReduceOp, StreamKind,
};

/// Lowers one rank's backward. Inputs `q`, `k`, `v`, `out`, `lse`, `dout` (its local rows), and `sink` and `dlse`
/// if the spec has them; outputs `dq`, `dk`,
/// `dv`, and `dsink` summed over all ranks.
// Long: the order in which a rank does things, stage by stage, over the same buffers.
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
    let dlse = spec.dlse.then(|| p.buffer("dlse", acc_dtype, &row_shape, BufferRole::Input));
    let sink = sink_input(&mut p, spec);
    let delta = p.buffer("delta", acc_dtype, &row_shape, BufferRole::Scratch);
    let hosts_do_all = hosts_do_all(plan);
    // All stages but those whose keys a later one has gathered add to dq.
    let adding = (0..stages.len()).filter(|&s| !gathered_later(stages, s)).count();
    let declare = match (hosts_do_all, adding) {
        (true, _) => Gradient::whole,
        (false, 1) => Gradient::summed_at_once,
        (false, _) => Gradient::summed,
    };
    let dq = declare(&mut p, "dq", spec.dtype, &[rank_plan.q_rows, spec.heads_q, spec.head_dim]);
    let delivery_parts = delivery_parts(plan.ranks.iter().map(|rank| &*rank.backward), spec);
    // One stage that does all work has all shares of a sum together, so that one reduction makes the results of them. Its order is that
    // of ranks, in deterministic mode the own share is first.
    let at_once = delivery_parts.is_some()
        && reduction == GradientReduction::PerStage
        && plan.ranks.iter().all(|rank| rank.hosted.is_none());
    // What is copied into sums, or comes in one order whatever the stages are, is as exact as they are. All ranks send in one type.
    let apart = plan.ranks.iter().all(|rank| rank.backward.iter().all(|stage| stage.own_rows == 0));
    let rounds_shares = at_once || (apart && reduction == GradientReduction::PerStage);
    let share_dtype = if rounds_shares { spec.gradient_share_dtype() } else { acc_dtype };
    // Only shares of other rows than its own make a sum of dk and dv: without any they are results at once.
    let shared = (stages.len() > 1 && !at_once) || (rank_plan.hosted.is_some() && !hosts_do_all);
    let declare = if shared { Gradient::summed } else { Gradient::whole };
    let dk = declare(&mut p, "dk", spec.dtype, &[rank_plan.k_rows, spec.heads_kv, spec.head_dim]);
    let dv = declare(&mut p, "dv", spec.dtype, &[rank_plan.k_rows, spec.heads_kv, spec.head_dim_v]);
    let cast_barrier = p.barrier();
    let reduce_barrier = p.barrier();

    let arrive = reduce_barrier.filter(|_| reduction == GradientReduction::PerStage);
    let hosting = rank_plan.hosted.as_ref().map(|work| Hosting::new(work, spec, compute, cast, reduce));
    let mut hosted =
        hosting.map(|hosting| hosting.backward(&mut p, (local.q, dout), (lse, delta), cast_barrier, arrive));

    let dsink = sink.map(|sink| {
        let role = if world_size > 1 { BufferRole::Scratch } else { BufferRole::Output };
        let name = if world_size > 1 { "dsink_share" } else { "dsink" };
        (sink, p.buffer(name, acc_dtype, &[spec.seqlen_sink, spec.heads_q], role))
    });
    let op = AttentionDelta { out, dout, lse, dlse, delta, sink: dsink };
    p.push(compute, None, "delta", Op::AttentionDelta(op));
    if let Some(hosted) = &mut hosted {
        hosted.send_statistics(&mut p);
    }
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
        let op = GroupCast {
            part,
            tensors: vec![(sum, total)],
            wire_dtype: acc_dtype,
            arrive: None,
            delivery: None,
        };
        p.push(reduce, None, "cast dsink", Op::GroupCast(op));
    }

    let two_level = plan.two_level.as_ref().filter(|_| stages.len() > 1);
    let two_level = two_level.map(|exchange| exchange.backward[rank].as_slice());
    let between_nodes =
        two_level.map(|parts| (parts, p.stream("group-cast between nodes", StreamKind::Communication)));
    let mut keys = KeyPrefetch::new(&local, stages, spec, compute, cast, cast_barrier, between_nodes);
    keys.deliver_in(delivery_parts);
    if hosted.is_some() {
        keys.after_queries();
    }
    let mut shares: Vec<(BufferId, BufferId)> = Vec::new();
    let mut share_buffers = Rotation::new(stages.len());
    let mut to_owners = ReduceToOwner::new(spec, share_dtype, reduce, (dk.written, dv.written), arrive);
    if two_level.is_some() {
        let stream = p.stream("group-reduce between nodes", StreamKind::Communication);
        to_owners = to_owners.over_nodes(stream, stages.len());
    }
    for (s, stage) in stages.iter().enumerate() {
        let here = Some(s);
        let StageKeys { k, v, arriving } = keys.enter(&mut p, s);
        if s >= 1 {
            let started = s as u64 - 1 + u64::from(hosted.is_some());
            p.after_start(compute, here, "wait until the last reduce has started", arrive, started);
        }
        let (stage_dk, stage_dv) = if s == 0 {
            (dk.written, dv.written)
        } else {
            let shape_k = [stage.key_rows, spec.heads_kv, spec.head_dim];
            let shape_v = [stage.key_rows, spec.heads_kv, spec.head_dim_v];
            (
                p.buffer(&format!("dk_{s}"), share_dtype, &shape_k, BufferRole::Scratch),
                p.buffer(&format!("dv_{s}"), share_dtype, &shape_v, BufferRole::Scratch),
            )
        };
        if s > 0 && reduction == GradientReduction::PerStage {
            share_buffers.take(&mut p, compute, s, (stage_dk, stage_dv));
        }
        // A stage that does all work, and hosts that do, leave none to the local one.
        if gathered_later(stages, s) || hosts_do_all {
            keys.leave(&mut p, s);
            if let Some(hosted) = &mut hosted {
                let keys = keys.enter_hosted(&mut p);
                let results = hosts_do_all.then_some((dk.written, dv.written));
                hosted.compute(&mut p, keys, results, reduction);
            }
            continue;
        }
        let begins = s == 0 || stage.own_rows > 0;
        let op = AttentionBackward {
            q: local.q,
            k,
            v,
            arriving,
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
            accumulate_dq: if begins { Accumulate::Start } else { Accumulate::Continue },
            deterministic: reduction == GradientReduction::Deterministic,
        };
        if at_once && s > 0 {
            let reduce = GroupReduce {
                part: Arc::new(with_own(&stage.part, rank, stage.own_rows)),
                tensors: vec![(stage_dk, dk.written), (stage_dv, dv.written)],
                op: ReduceOp::Sum,
                accumulate: Accumulate::Start,
                wire_dtype: share_dtype,
                reduce_dtype: acc_dtype,
                arrive: None,
            };
            let fused = Op::Fused(vec![Op::AttentionBackward(op), Op::GroupReduce(reduce)]);
            p.push(compute, here, "attention backward", fused);
            keys.leave(&mut p, s);
            continue;
        }
        p.push(compute, here, "attention backward", Op::AttentionBackward(op));
        keys.leave(&mut p, s);
        if stage.own_rows > 0 {
            for (src, dst) in [(stage_dk, dk.written), (stage_dv, dv.written)] {
                let copy = Op::CopyRows { src, dst, rows: stage.own_rows };
                p.push(compute, here, "copy own dk dv", copy);
            }
        }
        if let Some(hosted) = &mut hosted {
            if s == 0 {
                let keys = keys.enter_hosted(&mut p);
                hosted.compute(&mut p, keys, None, reduction);
            }
            if begins {
                hosted.add_own(&mut p, rank, (dk.written, dv.written));
            }
        }
        if s > 0 {
            match reduction {
                GradientReduction::PerStage => {
                    let done = p.mark(compute, here, "dk dv done");
                    let route =
                        two_level.map_or(Route::Straight(&stage.part), |parts| Route::OverNodes(&parts[s]));
                    to_owners.send(&mut p, here, route, (stage_dk, stage_dv), done);
                    share_buffers.leave(&mut p, reduce, s);
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
        let done = p.mark(compute, None, "dk dv done");
        let straight;
        let route = match &plan.two_level {
            None => {
                let parts = stages[1..].iter().map(|stage| (&stage.part, stage.key_rows));
                straight = GroupPart::concat(parts);
                Route::Straight(&straight)
            }
            Some(exchange) => Route::OverNodes(&exchange.whole[rank]),
        };
        to_owners.send(&mut p, None, route, (all_dk, all_dv), done);
    }
    let home = to_owners.arrived(&mut p);
    p.after(compute, None, "wait for the last reduce", home);
    if let Some(hosted) = hosted {
        hosted.finish(&mut p, dq.rounded.unwrap_or(dq.written));
    }
    dk.round(&mut p, compute, "round dk");
    dv.round(&mut p, compute, "round dv");
    p.finish()
}

/// Whether the stage after stage `s` does its work too.
fn gathered_later(stages: &[StagePlan], s: usize) -> bool {
    stages.get(s + 1).is_some_and(|next| next.own_rows > 0)
}

/// A stage's pattern, and `rank`'s own `rows` rows, which its keys begin with, as shares of its own.
fn with_own(part: &GroupPart, rank: usize, rows: usize) -> GroupPart {
    let (rank, rows) = (rank as u32, Range::new(0, rows));
    let owned = std::iter::once(OwnedSplit { rows, ranks: vec![rank] });
    let remote = std::iter::once(RemoteSplit { rows, rank });
    GroupPart {
        owned: owned.chain(part.owned.iter().cloned()).collect(),
        remote: remote.chain(part.remote.iter().cloned()).collect(),
    }
}

/// The pattern in which rank 0 owns `rows` rows and every rank, itself included, holds a copy: reduced, then cast, it is
/// an all-reduce with a fixed order.
fn through_rank_0(rank: usize, world_size: usize, rows: usize) -> GroupPart {
    let rows = Range::new(0, rows);
    let ranks = (0..world_size as u32).collect();
    GroupPart {
        owned: if rank == 0 { vec![OwnedSplit { rows, ranks }] } else { Vec::new() },
        remote: vec![RemoteSplit { rows, rank: 0 }],
    }
}
