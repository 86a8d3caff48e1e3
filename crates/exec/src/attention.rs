use std::time::Duration;

use counterpoint_plan::{AttentionSpec, Plan};
use counterpoint_schedule::{OverlapPolicy, Timeline};

use crate::{ExecError, HostTensor};

/// Tensors in global token order, shapes as in [`AttentionSpec`].
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionInputs {
    /// `[seqlen_q, heads_q, head_dim]`
    pub q: HostTensor,
    /// `[seqlen_k, heads_kv, head_dim]`
    pub k: HostTensor,
    /// `[seqlen_k, heads_kv, head_dim_v]`
    pub v: HostTensor,
    /// `[seqlen_sink, heads_q]`, accumulator type.
    pub sink: Option<HostTensor>,
    /// `[seqlen_q, heads_q, head_dim_v]`; its presence asks for the backward.
    pub dout: Option<HostTensor>,
}

/// Results in global token order.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutputs {
    /// `[seqlen_q, heads_q, head_dim_v]`
    pub out: HostTensor,
    /// `[seqlen_q, heads_q]`, accumulator type, natural logarithm.
    pub lse: HostTensor,
    /// As `q`, when the backward ran; likewise the rest.
    pub dq: Option<HostTensor>,
    /// As `k`.
    pub dk: Option<HostTensor>,
    /// As `v`.
    pub dv: Option<HostTensor>,
    /// As `sink`, when there is one.
    pub dsink: Option<HostTensor>,
}

/// A link that the local transport is told to imitate: a group collective in which a rank exchanges rows with others takes
/// at least `alpha + bytes / bytes_per_second` on that rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowLink {
    /// Added to every collective.
    pub alpha: Duration,
    /// Bytes a second of a rank, the larger of what it sends and what it receives.
    pub bytes_per_second: f64,
}

/// How to run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
    /// Same bits for any policy and number of stages.
    pub deterministic: bool,
    /// Limit of every wait.
    pub limit: Duration,
    /// Imitate a slow link.
    pub slow_link: Option<SlowLink>,
}

/// What a run gave.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionRun {
    /// Results in global token order.
    pub outputs: AttentionOutputs,
    /// Measured forward.
    pub forward: Timeline,
    /// Measured backward.
    pub backward: Option<Timeline>,
}

/// placeholder
pub fn run_attention(
    _plan: &Plan,
    _spec: &AttentionSpec,
    _inputs: &AttentionInputs,
    _config: &RunConfig,
) -> Result<AttentionRun, ExecError> {
    unreachable!()
}
