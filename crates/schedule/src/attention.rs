use counterpoint_plan::{AttentionSpec, Plan};

use crate::{OverlapPolicy, Program};

/// placeholder
pub fn lower_attention_forward(_plan: &Plan, _rank: usize, _spec: &AttentionSpec, _policy: OverlapPolicy) -> Program {
    unreachable!()
}

/// placeholder
pub fn lower_attention_backward(
    _plan: &Plan,
    _rank: usize,
    _spec: &AttentionSpec,
    _policy: OverlapPolicy,
    _deterministic: bool,
) -> Program {
    unreachable!()
}
