//! The Programs of attention, and what ranks compare of its plan.

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, PassPolicies, Program, lower_attention_backward,
    lower_attention_forward,
};

use crate::PlanIdentity;

/// A rank's forward.
pub(crate) fn forward_program(
    plan: &Plan,
    rank: usize,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    deterministic: bool,
) -> Program {
    let blocks = if deterministic { KeyBlocks::Aligned } else { KeyBlocks::Unaligned };
    lower_attention_forward(plan, rank, spec, policy, blocks)
}

/// A rank's backward.
pub(crate) fn backward_program(
    plan: &Plan,
    rank: usize,
    spec: &AttentionSpec,
    policy: OverlapPolicy,
    deterministic: bool,
) -> Program {
    let reduction =
        if deterministic { GradientReduction::Deterministic } else { GradientReduction::PerStage };
    lower_attention_backward(plan, rank, spec, policy, reduction)
}

/// What all ranks must have alike.
pub(crate) fn plan_identity(
    plan: &Plan,
    spec: &AttentionSpec,
    policies: PassPolicies,
    deterministic: bool,
) -> PlanIdentity {
    let AttentionSpec {
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v,
        dtype,
        scale,
        softcap,
        seqlen_sink,
        gradient_shares,
        max_logits,
        dlse,
    } = *spec;
    PlanIdentity::new([
        ("ranks", plan.ranks.len().to_string()),
        ("seqlen_q", plan.q_dispatch.seqlen().to_string()),
        ("seqlen_k", plan.k_dispatch.seqlen().to_string()),
        ("heads", format!("{heads_q}:{heads_kv}")),
        ("head_dim", format!("{head_dim}:{head_dim_v}")),
        ("dtype", dtype.to_string()),
        ("scale", scale.to_string()),
        ("softcap", softcap.to_string()),
        ("seqlen_sink", seqlen_sink.to_string()),
        ("gradient_shares", gradient_shares.to_string()),
        ("max_logits", max_logits.to_string()),
        ("dlse", dlse.to_string()),
        ("policy", policies.to_string()),
        ("deterministic", deterministic.to_string()),
        ("stages", plan.ranks.first().map_or(0, |rank| rank.forward.len()).to_string()),
        ("the plan's fingerprint (its mask or its dispatch)", plan.fingerprint().to_string()),
    ])
}
