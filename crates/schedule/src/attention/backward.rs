//! The attention backward of a rank as a Program: delta, stages, gradients of remote keys on their way to their owners, the sum of dsink.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{
    AttentionSpec, DType, GroupPart, OwnedSplit, Plan, RemoteSplit, StagePlan, TwoLevelPart,
};

use super::gradient::Gradient;
use super::hosting::{HostedBackward, Hosting, hosts_do_all, is_hosted_in_part};
use super::keys::{KeyPrefetch, StageKeys, delivery_parts};
use super::reduce_to_owner::{ReduceToOwner, Route};
use super::rotation::Rotation;
use super::{GradientReduction, LocalTensors, sink_input};
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, AttentionBackward, AttentionDelta, BarrierId, BufferId, BufferRole, GroupCast, GroupReduce,
    Op, OverlapPolicy, Program, ReduceOp, StreamId, StreamKind,
};

/// Lowers one rank's backward. Inputs `q`, `k`, `v`, `out`, `lse`, `dout` (its local rows), and `sink` and `dlse`
/// if the spec has them; outputs `dq`, `dk`,
/// `dv`, and `dsink` summed over all ranks.
pub fn lower_attention_backward(
    plan: &Plan,
    rank: usize,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    reduction: GradientReduction,
) -> Program {
    let mut p = ProgramBuilder::new("attention backward", rank, plan.ranks.len(), policy);
    let streams = Streams::new(&mut p, plan.ranks.len());
    let Streams { compute, cast, reduce } = streams;
    let stages = &*plan.ranks[rank].backward;
    let rules = SumRules::of(plan, spec, reduction);
    let this = Backward::new(&mut p, (plan, rank), spec, streams, &rules);
    let (dk, dv) = (this.dk.written, this.dv.written);
    let (cast_barrier, reduce_barrier) = (p.barrier(), p.barrier());
    let arrive = reduce_barrier.filter(|_| reduction == GradientReduction::PerStage);
    let is_hosting = plan.ranks[rank].hosted.is_some();
    let two_level = plan.two_level.as_ref().filter(|_| stages.len() > 1 || is_hosting);
    let two_level = two_level.map(|exchange| exchange.backward[rank].as_slice());
    let network = two_level.map(|_| {
        let names = ["group-cast between nodes", "group-reduce between nodes"];
        let [cast, reduce] = names.map(|name| p.stream(name, StreamKind::Communication));
        (cast, reduce)
    });
    let hosting = Hosting::new(plan, rank, spec, (compute, cast, reduce), network);
    let arrivals = hosting.as_ref().map_or(0, Hosting::arrivals);
    let hosted = hosting.map(|hosting| {
        let (rows, statistics) = ((this.local.q, this.dout), (this.lse, this.delta));
        hosting.backward(&mut p, rows, statistics, cast_barrier, arrive)
    });
    let hosted = this.delta(&mut p, hosted);

    let between_nodes = two_level.zip(network).map(|(parts, (cast, _))| (parts, cast));
    let mut keys = KeyPrefetch::new(&this.local, stages, spec, compute, cast, cast_barrier, between_nodes);
    keys.deliver_in(rules.delivery_parts);
    if hosted.is_some() {
        keys.after_queries(arrivals);
    }
    let mut to_owners = ReduceToOwner::new(spec, rules.partial_dtype, reduce, (dk, dv), arrive);
    if let Some((_, stream)) = network {
        to_owners = to_owners.over_nodes(stream, stages.len());
    }
    let mut running = Running {
        keys,
        hosted,
        to_owners,
        partial_buffers: Rotation::new(stages.len()),
        partials: Vec::new(),
    };
    for s in 0..stages.len() {
        this.stage(&mut p, s, &mut running, (arrive, two_level));
    }
    let Running { hosted, mut to_owners, partials, .. } = running;
    if !partials.is_empty() {
        this.send_all(&mut p, partials, &mut to_owners);
    }
    let reduced = to_owners.arrived(&mut p);
    p.after(compute, None, "wait for the last reduce", reduced);
    if let Some(hosted) = hosted {
        hosted.finish(&mut p, &this.dq);
    }
    this.dk.round(&mut p, compute, "round dk");
    this.dv.round(&mut p, compute, "round dv");
    p.finish()
}

/// The streams of a rank; one rank by itself has a single one.
#[derive(Clone, Copy)]
struct Streams {
    compute: StreamId,
    cast: StreamId,
    reduce: StreamId,
}

impl Streams {
    fn new(p: &mut ProgramBuilder, world_size: usize) -> Self {
        let compute = p.stream("compute", StreamKind::Compute);
        if world_size == 1 {
            return Self { compute, cast: compute, reduce: compute };
        }
        let cast = p.stream("group-cast", StreamKind::Communication);
        Self { compute, cast, reduce: p.stream("group-reduce", StreamKind::Communication) }
    }
}

/// How gradients of remote keys are summed, the same on all ranks.
struct SumRules {
    reduction: GradientReduction,
    /// Keys arrive in so many parts during one launch.
    delivery_parts: Option<usize>,
    /// One reduction makes the results of all partial sums.
    at_once: bool,
    /// Of partial sums on their way.
    partial_dtype: DType,
    hosts_do_all: bool,
    /// Hosts and stages compute dq of the same rows.
    hosted_in_part: bool,
}

impl SumRules {
    fn of(plan: &Plan, spec: &AttentionSpec, reduction: GradientReduction) -> Self {
        let delivery_parts = delivery_parts(plan.ranks.iter().map(|rank| &*rank.backward), spec);
        // One stage that does all work has all partial sums together, so that one reduction makes the results of them. Its order is
        // that of ranks, in deterministic mode the own partial sum is first.
        let at_once = delivery_parts.is_some()
            && reduction == GradientReduction::PerStage
            && plan.ranks.iter().all(|rank| rank.hosted.is_none());
        // What is copied into sums, or comes in one order whatever the stages are, is as exact as they are. All ranks send in one type.
        let apart = plan.ranks.iter().all(|rank| rank.backward.iter().all(|stage| stage.own_rows == 0));
        let rounds_partials = at_once || (apart && reduction == GradientReduction::PerStage);
        let partial_dtype =
            if rounds_partials { spec.gradient_share_dtype() } else { spec.dtype.accumulator() };
        Self {
            reduction,
            delivery_parts,
            at_once,
            partial_dtype,
            hosts_do_all: hosts_do_all(plan),
            hosted_in_part: is_hosted_in_part(plan),
        }
    }
}

/// One rank's backward: what all of its stages read and write.
struct Backward<'a> {
    plan: &'a Plan,
    rank: usize,
    spec: &'a AttentionSpec,
    stages: &'a [StagePlan],
    rules: &'a SumRules,
    streams: Streams,
    local: LocalTensors,
    out: BufferId,
    lse: BufferId,
    dout: BufferId,
    dlse: Option<BufferId>,
    sink: Option<BufferId>,
    delta: BufferId,
    dq: Gradient,
    dk: Gradient,
    dv: Gradient,
}

/// What goes on from stage to stage.
struct Running<'a> {
    keys: KeyPrefetch<'a>,
    hosted: Option<HostedBackward<'a>>,
    to_owners: ReduceToOwner<'a>,
    partial_buffers: Rotation,
    /// Those of all stages, where one reduction is for all.
    partials: Vec<(BufferId, BufferId)>,
}

impl<'a> Backward<'a> {
    fn new(
        p: &mut ProgramBuilder,
        (plan, rank): (&'a Plan, usize),
        spec: &'a AttentionSpec,
        streams: Streams,
        rules: &'a SumRules,
    ) -> Self {
        let rank_plan = &plan.ranks[rank];
        let stages = &*rank_plan.backward;
        let acc_dtype = spec.dtype.accumulator();
        let local = LocalTensors::declare(p, rank_plan, spec);
        let row_shape = [rank_plan.q_rows, spec.heads_q];
        let out_shape = [rank_plan.q_rows, spec.heads_q, spec.head_dim_v];
        let out = p.buffer("out", spec.dtype, &out_shape, BufferRole::Input);
        let lse = p.buffer("lse", acc_dtype, &row_shape, BufferRole::Input);
        let dout = p.buffer("dout", spec.dtype, &out_shape, BufferRole::Input);
        let dlse = spec.dlse.then(|| p.buffer("dlse", acc_dtype, &row_shape, BufferRole::Input));
        let sink = sink_input(p, spec);
        let delta = p.buffer("delta", acc_dtype, &row_shape, BufferRole::Scratch);
        // All stages but those whose keys a later one has gathered add to dq.
        let adding = (0..stages.len()).filter(|&s| !gathered_later(stages, s)).count();
        let declare = match (rules.hosts_do_all, adding) {
            (true, _) => Gradient::whole,
            (false, 1) if !rules.hosted_in_part => Gradient::summed_at_once,
            (false, _) => Gradient::summed,
        };
        let dq = declare(p, "dq", spec.dtype, &[rank_plan.q_rows, spec.heads_q, spec.head_dim]);
        // Only partial sums of other rows than its own make a sum of dk and dv: without any they are results at once.
        let shared =
            (stages.len() > 1 && !rules.at_once) || (rank_plan.hosted.is_some() && !rules.hosts_do_all);
        let declare = if shared { Gradient::summed } else { Gradient::whole };
        let dk = declare(p, "dk", spec.dtype, &[rank_plan.k_rows, spec.heads_kv, spec.head_dim]);
        let dv = declare(p, "dv", spec.dtype, &[rank_plan.k_rows, spec.heads_kv, spec.head_dim_v]);
        Self {
            plan,
            rank,
            spec,
            stages,
            rules,
            streams,
            local,
            out,
            lse,
            dout,
            dlse,
            sink,
            delta,
            dq,
            dk,
            dv,
        }
    }

    /// Delta of every local row, which hosts get, and the sum of dsink over all ranks.
    fn delta(
        &self,
        p: &mut ProgramBuilder,
        mut hosted: Option<HostedBackward<'a>>,
    ) -> Option<HostedBackward<'a>> {
        let (acc_dtype, world_size) = (self.spec.dtype.accumulator(), self.plan.ranks.len());
        let shape = [self.spec.seqlen_sink, self.spec.heads_q];
        let sink = self.sink.map(|sink| {
            let role = if world_size > 1 { BufferRole::Scratch } else { BufferRole::Output };
            let name = if world_size > 1 { "dsink_partial" } else { "dsink" };
            (sink, p.buffer(name, acc_dtype, &shape, role))
        });
        let Self { out, dout, lse, dlse, delta, .. } = *self;
        let Streams { compute, .. } = self.streams;
        let op = AttentionDelta { out, dout, lse, dlse, delta, sink };
        p.push(compute, None, "delta", Op::AttentionDelta(op));
        if let Some(hosted) = &mut hosted {
            hosted.send_statistics(p);
        }
        if let Some((_, partial)) = sink
            && world_size > 1
        {
            self.sum_dsink(p, partial);
        }
        hosted
    }

    /// An all-reduce of a rank's partial sum of dsink, in a fixed order.
    fn sum_dsink(&self, p: &mut ProgramBuilder, partial: BufferId) {
        let (Streams { compute, reduce, .. }, acc_dtype) = (self.streams, self.spec.dtype.accumulator());
        let mark = p.mark(compute, None, "dsink partial done");
        p.after(reduce, None, "wait for dsink partial", mark);
        let shape = [self.spec.seqlen_sink, self.spec.heads_q];
        let sum = p.buffer("dsink_sum", acc_dtype, &shape, BufferRole::Scratch);
        let total = p.buffer("dsink", acc_dtype, &shape, BufferRole::Output);
        let part = Arc::new(through_rank_0(self.rank, self.plan.ranks.len(), self.spec.seqlen_sink));
        let op = GroupReduce {
            part: part.clone(),
            tensors: vec![(partial, sum)],
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

    /// Stage `s`: its keys, its gradients, and the way of those of remote keys to their owners.
    fn stage(
        &self,
        p: &mut ProgramBuilder,
        s: usize,
        running: &mut Running<'a>,
        (arrive, two_level): (Option<BarrierId>, Option<&'a [TwoLevelPart]>),
    ) {
        let (here, stage, rules) = (Some(s), &self.stages[s], self.rules);
        let Streams { compute, reduce, .. } = self.streams;
        let Running { keys, hosted, to_owners, partial_buffers, partials } = running;
        let stage_keys = keys.enter(p, s);
        if s >= 1 {
            let started = s as u64 - 1 + u64::from(hosted.is_some());
            p.after_start(compute, here, "wait until the last reduce has started", arrive, started);
        }
        let gradients = self.key_gradients(p, s);
        if s > 0 && rules.reduction == GradientReduction::PerStage {
            partial_buffers.take(p, compute, s, gradients);
        }
        let sums = (self.dk.written, self.dv.written);
        // A stage that does all work, and hosts that do, leave none to the local one.
        if gathered_later(self.stages, s) || rules.hosts_do_all {
            keys.leave(p, s);
            if let Some(hosted) = hosted {
                let keys = keys.enter_hosted(p);
                hosted.compute(p, keys, rules.hosts_do_all.then_some(sums), rules.reduction);
            }
            return;
        }
        let begins = s == 0 || stage.own_rows > 0;
        let op = self.compute(s, stage_keys, gradients, begins);
        if rules.at_once && s > 0 {
            let fused = Op::Fused(vec![op, self.reduce_at_once(stage, gradients)]);
            p.push(compute, here, "attention backward", fused);
            keys.leave(p, s);
            return;
        }
        p.push(compute, here, "attention backward", op);
        keys.leave(p, s);
        if stage.own_rows > 0 {
            for (src, dst) in [(gradients.0, sums.0), (gradients.1, sums.1)] {
                p.push(compute, here, "copy own dk dv", Op::CopyRows { src, dst, rows: stage.own_rows });
            }
        }
        if let Some(hosted) = hosted {
            if s == 0 {
                let keys = keys.enter_hosted(p);
                hosted.compute(p, keys, None, rules.reduction);
            }
            if begins {
                hosted.add_own(p, self.rank, sums);
            }
        }
        match rules.reduction {
            _ if s == 0 => {}
            GradientReduction::PerStage => {
                let done = p.mark(compute, here, "dk dv done");
                let route =
                    two_level.map_or(Route::Straight(&stage.part), |parts| Route::OverNodes(&parts[s]));
                to_owners.send(p, here, route, gradients, done);
                partial_buffers.leave(p, reduce, s);
            }
            GradientReduction::Deterministic => partials.push(gradients),
        }
    }

    /// Where stage `s` writes dk and dv: the local one into the sums.
    fn key_gradients(&self, p: &mut ProgramBuilder, s: usize) -> (BufferId, BufferId) {
        if s == 0 {
            return (self.dk.written, self.dv.written);
        }
        let (spec, rows) = (self.spec, self.stages[s].key_rows);
        let mut partial = |name: &str, head_dim: usize| {
            let shape = [rows, spec.heads_kv, head_dim];
            p.buffer(&format!("{name}_{s}"), self.rules.partial_dtype, &shape, BufferRole::Scratch)
        };
        (partial("dk", spec.head_dim), partial("dv", spec.head_dim_v))
    }

    /// The computation of stage `s`; `begins` where it is the first that adds to dq.
    fn compute(
        &self,
        s: usize,
        StageKeys { k, v, arriving }: StageKeys,
        (dk, dv): (BufferId, BufferId),
        begins: bool,
    ) -> Op {
        Op::AttentionBackward(AttentionBackward {
            q: self.local.q,
            k,
            v,
            arriving,
            dout: self.dout,
            lse: self.lse,
            delta: self.delta,
            dq: self.dq.written,
            rounded_dq: self.dq.rounded.filter(|_| s + 1 == self.stages.len() && !self.rules.hosted_in_part),
            dk,
            dv,
            bands: self.stages[s].bands.clone(),
            scale: self.spec.scale,
            softcap: self.spec.softcap,
            accumulate_dq: if begins { Accumulate::Start } else { Accumulate::Continue },
            deterministic: self.rules.reduction == GradientReduction::Deterministic,
        })
    }

    /// The one reduction of all partial sums of dk and dv, the own rows among them.
    fn reduce_at_once(&self, stage: &StagePlan, (dk, dv): (BufferId, BufferId)) -> Op {
        Op::GroupReduce(GroupReduce {
            part: Arc::new(with_own(&stage.part, self.rank, stage.own_rows)),
            tensors: vec![(dk, self.dk.written), (dv, self.dv.written)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            wire_dtype: self.rules.partial_dtype,
            reduce_dtype: self.spec.dtype.accumulator(),
            arrive: None,
        })
    }

    /// The partial sums of all stages in one reduction, in the order of ranks.
    fn send_all(
        &self,
        p: &mut ProgramBuilder,
        partials: Vec<(BufferId, BufferId)>,
        to_owners: &mut ReduceToOwner<'_>,
    ) {
        let (spec, acc_dtype, compute) = (self.spec, self.spec.dtype.accumulator(), self.streams.compute);
        let remote = &self.stages[1..];
        let rows = remote.iter().map(|stage| stage.key_rows).sum();
        let mut all = |name: &str, head_dim| {
            p.buffer(name, acc_dtype, &[rows, spec.heads_kv, head_dim], BufferRole::Scratch)
        };
        let (all_dk, all_dv) = (all("dk_remote", spec.head_dim), all("dv_remote", spec.head_dim_v));
        let (dks, dvs) = partials.into_iter().unzip();
        p.push(compute, None, "gather dk", Op::Concat { srcs: dks, dst: all_dk });
        p.push(compute, None, "gather dv", Op::Concat { srcs: dvs, dst: all_dv });
        let done = p.mark(compute, None, "dk dv done");
        let straight;
        let route = match &self.plan.two_level {
            None => {
                straight = GroupPart::concat(remote.iter().map(|stage| (&stage.part, stage.key_rows)));
                Route::Straight(&straight)
            }
            Some(exchange) => Route::OverNodes(&exchange.whole[self.rank]),
        };
        to_owners.send(p, None, route, (all_dk, all_dv), done);
    }
}

/// Whether the stage after stage `s` does its work too.
fn gathered_later(stages: &[StagePlan], s: usize) -> bool {
    stages.get(s + 1).is_some_and(|next| next.own_rows > 0)
}

/// A stage's pattern, and `rank`'s own `rows` rows, which its keys begin with, as partial sums of its own.
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
