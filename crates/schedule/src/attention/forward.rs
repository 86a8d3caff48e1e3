//! The attention forward of a rank as a Program: stages that go on from each other's state while the next keys travel.

use counterpoint_plan::{AttentionSpec, Plan};

use super::head_maxima::HeadMaxima;
use super::hosting::{HostedForward, Hosting, hosts_do_all};
use super::keys::{KeyPrefetch, StageKeys, delivery_parts};
use super::{LocalTensors, sink_input};
use crate::builder::ProgramBuilder;
use crate::{
    AttentionForward, AttentionState, BufferRole, ForwardBegin, ForwardEnd, KeyBlocks, Op, OverlapPolicy,
    Program, StreamKind,
};

/// Lowers one rank's forward. Inputs `q`, `k`, `v` (its local rows) and `sink` if the spec has one; outputs `out`, `lse`, and
/// `max_logits` over all ranks if the spec asks for it.
///
/// The last stage with work writes the results; a state lives between stages only, so a forward whose work is all in one
/// stage has none. Blocks are `blocks`; those of a rank whose keys are all its own suit the mask in any case, since it has one stage
/// whatever the plan's others have.
// Long: the order in which a rank does things, stage by stage, over the same buffers.
pub fn lower_attention_forward(
    plan: &Plan,
    rank: usize,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    blocks: KeyBlocks,
) -> Program {
    let rank_plan = &plan.ranks[rank];
    let stages = &rank_plan.forward;
    let blocks = if rank_plan.recv_rows() == 0 { KeyBlocks::Unaligned } else { blocks };
    let mut p = ProgramBuilder::new("attention forward", rank, plan.ranks.len(), policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let everywhere = spec.max_logits && plan.ranks.len() > 1;
    let travels = stages.len() > 1 || rank_plan.hosted.is_some() || everywhere;
    let cast = if travels { p.stream("group-cast", StreamKind::Communication) } else { compute };

    let acc_dtype = spec.dtype.accumulator();
    let local = LocalTensors::declare(&mut p, rank_plan, spec);
    let row_shape = [rank_plan.q_rows, spec.heads_q];
    let out_shape = [rank_plan.q_rows, spec.heads_q, spec.head_dim_v];
    let sink = sink_input(&mut p, spec);
    let hosts_do_all = hosts_do_all(plan);
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
    let mut max_logits = spec.max_logits.then(|| HeadMaxima::declare(&mut p, spec, plan.ranks.len()));
    let barrier = p.barrier();
    let two_level = plan.two_level.as_ref().filter(|_| stages.len() > 1 || rank_plan.hosted.is_some());
    let between_nodes = two_level.map(|exchange| {
        let network = p.stream("group-cast between nodes", StreamKind::Communication);
        (exchange.forward[rank].as_slice(), network)
    });
    let mut keys = KeyPrefetch::new(&local, stages, spec, compute, cast, barrier, between_nodes);
    keys.deliver_in(delivery_parts(plan.ranks.iter().map(|rank| &*rank.forward), spec));
    let hosting = rank_plan.hosted.as_ref().and_then(|_| {
        let reduce = p.stream("group-reduce", StreamKind::Communication);
        let between_nodes = between_nodes
            .map(|(_, network)| (network, p.stream("group-reduce between nodes", StreamKind::Communication)));
        Hosting::new(plan, rank, spec, (compute, cast, reduce), between_nodes)
    });
    let arrivals = hosting.as_ref().map_or(0, Hosting::arrivals);
    let reduce_barrier = hosting.as_ref().and_then(|_| p.barrier());
    let mut hosted = hosting.map(|hosting| hosting.forward(&mut p, local.q, barrier, reduce_barrier));
    if hosted.is_some() {
        keys.after_queries(arrivals);
    }
    let staged = hosted.as_ref().and_then(HostedForward::staged);
    let result = match staged {
        Some((out, lse)) => ForwardEnd::Result { sink: None, out, lse },
        None => ForwardEnd::Result { sink, out, lse },
    };
    for (s, stage) in stages.iter().enumerate() {
        let StageKeys { k, v, arriving } = keys.enter(&mut p, s);
        if s == 1 && hosted.is_some() {
            p.after_start(compute, Some(s), "wait until the reduce has started", reduce_barrier, 1);
        }
        if (s == first && !hosts_do_all) || has_work(&s) {
            let op = AttentionForward {
                q: local.q,
                k,
                v,
                arriving,
                blocks,
                begin: state.filter(|_| s > first).map_or(ForwardBegin::Start, ForwardBegin::Continue),
                end: state.filter(|_| s < last).map_or(result, ForwardEnd::State),
                max_logits: max_logits.as_mut().map(HeadMaxima::take),
                bands: stage.bands.clone(),
                scale: spec.scale,
                softcap: spec.softcap,
            };
            p.push(compute, Some(s), "attention forward", Op::AttentionForward(op));
        }
        keys.leave(&mut p, s);
        if let (0, Some(hosted)) = (s, &mut hosted) {
            let keys = keys.enter_hosted(&mut p);
            hosted.compute(&mut p, keys, max_logits.as_mut().map(HeadMaxima::take));
        }
    }
    if let Some(hosted) = hosted {
        hosted.finish(&mut p, sink, (out, lse));
    }
    if let Some(max_logits) = max_logits {
        max_logits.finish(&mut p, compute, cast);
    }
    p.finish()
}
