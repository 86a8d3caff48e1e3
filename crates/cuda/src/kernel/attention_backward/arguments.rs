//! What the kernels are given.

use std::ffi::c_void;

use super::shape::CLASSES;
use crate::kernel::{LinkArrivals, WaitLimit};
use crate::layout::{SharedLayout, shared_layout};
use crate::{KernelArguments, TensorMap};

/// What a kernel is given: what every kernel takes, and what its configuration has in addition.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackwardParams {
    pub(super) all: AttentionBackwardArguments,
    /// Where the kernel rounds dq itself.
    pub(super) rounding: Option<BackwardRounding>,
    pub(super) order: BackwardOrder,
}

/// In which order tiles are handed out and add to dq, with what depends on it.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "one value at a time, which is copied to a launch")]
pub(super) enum BackwardOrder {
    Fixed(BackwardDqOrder),
    Classes(BackwardClasses),
    /// Items are parts of a tile's query heads.
    Sums(BackwardClasses, BackwardSums),
    /// Some tiles' gradients may be results.
    Alone(BackwardClasses, BackwardAlone),
    /// Tiles may be split by half-heads, too.
    Halves(BackwardClasses, BackwardAlone, BackwardHalfHeads),
}

/// Two that lie behind each other in a kernel's parameter.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Then<A, B>(A, B);

impl KernelArguments for BackwardParams {
    fn with_pointers<R>(&self, run: impl FnOnce(&mut [*mut c_void], &[usize]) -> R) -> R {
        match self.order {
            BackwardOrder::Fixed(order) => self.with_order(order, run),
            BackwardOrder::Classes(classes) => self.with_order(classes, run),
            BackwardOrder::Sums(classes, sums) => self.with_order(Then(classes, sums), run),
            BackwardOrder::Alone(classes, alone) => self.with_order(Then(classes, alone), run),
            BackwardOrder::Halves(classes, alone, half_heads) => {
                self.with_order(Then(classes, Then(alone, half_heads)), run)
            }
        }
    }
}

impl BackwardParams {
    /// As [`KernelArguments::with_pointers`], of the one parameter that ends in `order`.
    fn with_order<O: Copy, R>(&self, order: O, run: impl FnOnce(&mut [*mut c_void], &[usize]) -> R) -> R {
        match self.rounding {
            Some(rounding) => (Then(self.all, Then(rounding, order)),).with_pointers(run),
            None => (Then(self.all, order),).with_pointers(run),
        }
    }
}

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
    pub(super) arrivals: LinkArrivals,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) owner_rows: u64,
    pub(super) tiles: u64,
    pub(super) runs: u64,
    pub(super) bounds: u64,
    pub(super) queue: u64,
    pub(super) wait: WaitLimit,
    pub(super) items: u32,
    pub(super) heads_kv: u32,
    pub(super) group: u32,
    pub(super) head_dim: u32,
    pub(super) head_dim_v: u32,
    pub(super) blocks_per_head: u32,
    pub(super) own_rows: i32,
    pub(super) owner_rows_from: i32,
    pub(super) scale: f32,
    pub(super) scale_log2: f32,
    pub(super) cap_log2: f32,
}

/// `BackwardDqOrder` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardDqOrder {
    pub(super) spans: u64,
    pub(super) begins: u64,
    pub(super) added: u64,
    pub(super) ordered_from: u32,
    pub(super) num_tiles: u32,
    pub(super) heads_at_a_time: u32,
}

/// `BackwardClasses` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardClasses {
    pub(super) cursors: u64,
    pub(super) ends: [u32; CLASSES],
}

/// `BackwardRounding` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardRounding {
    pub(super) dq: u64,
    pub(super) rounded_dq: u64,
    pub(super) coverage: u64,
    pub(super) summed_rows: u64,
    pub(super) summed: u64,
    pub(super) progress: u64,
    pub(super) slabs: u32,
    pub(super) overlapped: u32,
    pub(super) rows_q: u32,
    pub(super) zeroes_sums: u32,
}

/// `BackwardAlone` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardAlone {
    pub(super) tiles: u64,
    pub(super) dk: u64,
    pub(super) dv: u64,
}

/// `BackwardHalfHeads` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardHalfHeads {
    pub(super) words: u64,
    pub(super) classes: u32,
}

/// `BackwardSums` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardSums {
    pub(super) dk_map: TensorMap,
    pub(super) dv_map: TensorMap,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) words: u64,
    pub(super) parts: u32,
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
            "attention/backward_work.cuh",
            AttentionBackwardArguments {
                q,
                dout,
                k,
                v,
                arriving_k,
                arriving_v,
                dq,
                statistics,
                arrivals,
                dk,
                dv,
                owner_rows,
                tiles,
                runs,
                bounds,
                queue,
                wait,
                items,
                heads_kv,
                group,
                head_dim,
                head_dim_v,
                blocks_per_head,
                own_rows,
                owner_rows_from,
                scale,
                scale_log2,
                cap_log2
            }
        ),
        shared_layout!(
            "attention/backward_work.cuh",
            BackwardDqOrder { spans, begins, added, ordered_from, num_tiles, heads_at_a_time }
        ),
        shared_layout!("attention/backward_work.cuh", BackwardClasses { cursors, ends }),
        shared_layout!(
            "attention/backward_work.cuh",
            BackwardRounding {
                dq,
                rounded_dq,
                coverage,
                summed_rows,
                summed,
                progress,
                slabs,
                overlapped,
                rows_q,
                zeroes_sums
            }
        ),
        shared_layout!("attention/backward_work.cuh", BackwardAlone { tiles, dk, dv }),
        shared_layout!("attention/backward_work.cuh", BackwardHalfHeads { words, classes }),
        shared_layout!("attention/backward_work.cuh", BackwardSums { dk_map, dv_map, dk, dv, words, parts }),
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
