//! Distributed attention as Programs.
//!
//! Forward: while stage `s` computes, the keys and values of stage `s + 1` arrive. Backward: likewise, and the gradients
//! of the keys of stage `s - 1` travel to their owners on a stream of their own, so that neither direction waits for the other's
//! dependencies. Stage 0 is the local work.
//!
//! On several nodes every cast is two, between nodes and inside each, and every reduce likewise backwards: where the plan
//! holds a two-level exchange. So are those of queries that travel.
//!
//! Where rows are offloaded ([`HostedWork`](counterpoint_plan::HostedWork)), their queries travel to hosts while stage 0 computes; hosted
//! work is next, and while it computes the keys of stage 1 arrive; its results travel to their owners under the stages that follow. Rows
//! that are offloaded have no other work, so their results are merged once, and put in their places at the end.
//!
//! Buffers of remote stages reuse [`STAGE_SLOTS`] slots, so that memory does not grow with the number of stages.

mod backward;
mod forward;
mod gradient;
mod head_maxima;
mod hosting;
mod keys;
mod query_exchange;
mod reduce_to_owner;
mod rotation;

use counterpoint_plan::{AttentionSpec, RankPlan};

pub use backward::lower_attention_backward;
pub use forward::lower_attention_forward;

use crate::builder::ProgramBuilder;
use crate::{BufferId, BufferRole};

/// Buffers of a kind that are alive at a time: one is computed with while the next arrives; the third lets that one be
/// early.
pub const STAGE_SLOTS: usize = 3;

/// Whether the gradients of remote keys travel as soon as a stage has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GradientReduction {
    /// One group-reduce a stage, under the next stage's computation. The order in which an owner adds the partial sums of its
    /// rows follows the stages.
    #[default]
    PerStage,
    /// One group-reduce after the last stage: partial sums are added in the order of ranks, so the result has the same bits for
    /// any number of stages.
    Deterministic,
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

fn sink_input(p: &mut ProgramBuilder, spec: &AttentionSpec) -> Option<BufferId> {
    let shape = [spec.seqlen_sink, spec.heads_q];
    (spec.seqlen_sink > 0).then(|| p.buffer("sink", spec.dtype.accumulator(), &shape, BufferRole::Input))
}
