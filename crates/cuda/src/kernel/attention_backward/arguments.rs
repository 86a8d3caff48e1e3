//! What the kernels are given.

use super::shape::CLASSES;
use crate::TensorMap;
use crate::kernel::LinkArrivals;
use crate::kernel::layout::{SharedLayout, shared_layout};

/// `AttentionBackwardArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AttentionBackwardArguments {
    pub(super) q: TensorMap,
    pub(super) dout: TensorMap,
    pub(super) k: TensorMap,
    pub(super) v: TensorMap,
    pub(super) arriving_k: TensorMap,
    pub(super) arriving_v: TensorMap,
    pub(super) dq: TensorMap,
    pub(super) statistics: TensorMap,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) tiles: u64,
    pub(super) runs: u64,
    pub(super) bounds: u64,
    pub(super) dq_rows: u64,
    pub(super) rounded_dq: u64,
    pub(super) coverage: u64,
    pub(super) summed_rows: u64,
    pub(super) summed: u64,
    pub(super) rounding: u64,
    pub(super) cursors: u64,
    pub(super) queue: u64,
    pub(super) turn_spans: u64,
    pub(super) turn_begins: u64,
    pub(super) turns: u64,
    pub(super) missed_turn: u64,
    pub(super) ordered_from: u32,
    pub(super) zeroes_sums: u32,
    pub(super) heads_at_a_time: u32,
    pub(super) num_tiles: u32,
    pub(super) rounds: u32,
    pub(super) rounds_beside: u32,
    pub(super) rows_q: u32,
    pub(super) heads_kv: u32,
    pub(super) group: u32,
    pub(super) head_dim: u32,
    pub(super) head_dim_v: u32,
    pub(super) stretch: u32,
    pub(super) arrivals: LinkArrivals,
    pub(super) own_rows: i32,
    pub(super) homed_from: i32,
    pub(super) homes: u64,
    pub(super) classes: u32,
    pub(super) class_end: [u32; CLASSES],
    pub(super) scale: f32,
    pub(super) scale_log2: f32,
    pub(super) cap_log2: f32,
}

/// `AttentionBackwardRowsArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AttentionBackwardRowsArguments {
    pub(super) lse: u64,
    pub(super) delta: u64,
    pub(super) statistics: u64,
    pub(super) words: u64,
    pub(super) coverage: u64,
    pub(super) dq: u64,
    pub(super) rounded: u64,
    pub(super) word_count: u64,
    pub(super) slab_rows: u32,
    pub(super) clears: u32,
    pub(super) rows: u32,
    pub(super) heads: u32,
    pub(super) head_dim: u32,
    pub(super) pitch: u32,
}

/// What host and kernels share.
pub(in crate::kernel) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!(
            "attention/attention_backward.cuh",
            AttentionBackwardArguments {
                q,
                dout,
                k,
                v,
                arriving_k,
                arriving_v,
                dq,
                statistics,
                dk,
                dv,
                tiles,
                runs,
                bounds,
                dq_rows,
                rounded_dq,
                coverage,
                summed_rows,
                summed,
                rounding,
                cursors,
                queue,
                turn_spans,
                turn_begins,
                turns,
                missed_turn,
                ordered_from,
                zeroes_sums,
                heads_at_a_time,
                num_tiles,
                rounds,
                rounds_beside,
                rows_q,
                heads_kv,
                group,
                head_dim,
                head_dim_v,
                stretch,
                arrivals,
                own_rows,
                homed_from,
                homes,
                classes,
                class_end,
                scale,
                scale_log2,
                cap_log2
            }
        ),
        shared_layout!(
            "attention/attention_backward_rows.cuh",
            AttentionBackwardRowsArguments {
                lse,
                delta,
                statistics,
                words,
                coverage,
                dq,
                rounded,
                word_count,
                slab_rows,
                clears,
                rows,
                heads,
                head_dim,
                pitch
            }
        ),
    ]
}
