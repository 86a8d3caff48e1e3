//! All types that host and kernels share.

use counterpoint_tiles::{DqOrderSpan, Tile, TileBound, TileMerge, TileRun};

use crate::TensorMap;
use crate::layout::{SharedLayout, shared_layout};

/// All types that host and kernels share. A test compiles their assertions.
pub fn shared_layouts() -> Vec<SharedLayout> {
    let schedule = [
        shared_layout!(
            "attention/tile_schedule.cuh",
            Tile { start, end, run_begin, run_end, partial, blocks, number, reserved }
        ),
        shared_layout!("attention/tile_schedule.cuh", TileRun { start, end, bound_begin, bound_end }),
        shared_layout!(
            "attention/tile_schedule.cuh",
            TileBound { q_start, q_end, k_start, k_end, diag_min, diag_max, reserved }
        ),
        shared_layout!("attention/tile_schedule.cuh", TileMerge { start, end, slot_begin, slot_end }),
        shared_layout!("attention/tile_schedule.cuh", DqOrderSpan { first, end, order, counter }),
    ];
    // Each launcher's module adds its own arguments here.
    let kernels = [
        super::foreign_barrier::layouts(),
        super::signal_litmus::layouts(),
        super::attention_backward::layouts(),
        super::attention_delta::layouts(),
        super::attention_finish::layouts(),
        super::attention_forward::layouts(),
        super::attention_merge::layouts(),
        super::column_sum::layouts(),
        super::gemm::layouts(),
        super::link_copy::layouts(),
        super::link_barrier::layouts(),
        super::link_reduce::layouts(),
        super::link_rows::layouts(),
        super::staged_reduce::layouts(),
        super::portable_backward::layouts(),
        super::portable_backward_query::layouts(),
        super::portable_forward::layouts(),
        super::rms_norm::layouts(),
        super::rms_norm_backward::layouts(),
        super::row_pieces::layouts(),
        super::row_check::layouts(),
        super::row_copy::layouts(),
        super::row_merge::layouts(),
        super::row_reduce::layouts(),
        super::user_kernel::layouts(),
        super::wait_limit::layouts(),
    ];
    schedule.into_iter().chain([tensor_map()]).chain(kernels.into_iter().flatten()).collect()
}

/// Only the driver knows what it says.
fn tensor_map() -> SharedLayout {
    let (bytes, alignment) = (size_of::<TensorMap>(), align_of::<TensorMap>());
    SharedLayout {
        header: "ptx/tma.cuh",
        name: "TensorMap",
        bytes,
        alignment,
        fields: vec![("opaque", 0, bytes)],
    }
}
