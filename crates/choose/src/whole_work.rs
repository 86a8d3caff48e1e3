//! All work of a rank as one operation, as cost models see it.

use counterpoint_cost::AttentionWork;
use counterpoint_mask::Band;
use counterpoint_plan::{AttentionSpec, Planning};

/// All work of a rank at once, before which nothing was computed, as long as its plan is wanted.
pub(crate) fn whole_work<'a>(
    spec: &AttentionSpec,
    bands: &'a [Band],
    [q_rows, k_rows]: [usize; 2],
    planning: &Planning<'a>,
) -> AttentionWork<'a> {
    AttentionWork {
        bands,
        q_rows,
        k_rows,
        heads_q: spec.heads_q,
        heads_kv: spec.heads_kv,
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        staged: false,
        passed_bytes: 0,
        computed_seconds: 0.0,
        interruption: planning.interruption(),
    }
}
