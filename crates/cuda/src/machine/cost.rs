//! Cost models of GPUs that were not calibrated, scaled from an H200 by SMs, and of ranks that share a GPU.

use counterpoint_cost::{CostModel, Link, TileCosts, WorkerSharing};

use super::CudaMachine;

/// Multiprocessors of the GPU that [`CostModel::H200`] is of.
const H200_SM_COUNT: f64 = 132.0;

impl CudaMachine {
    /// What work costs when `ranks` ranks are dealt out to these GPUs: as `measured` of one of them, or else an estimate to plan
    /// with, from the figures of an H200 and the number of multiprocessors.
    pub fn cost(&self, measured: Option<&CostModel>, ranks: usize) -> CostModel {
        let sm_count = self.devices().iter().map(|device| device.sm_count()).min().unwrap_or(1);
        shared(measured.copied().unwrap_or_else(|| estimate(sm_count)), ranks.div_ceil(self.devices().len()))
    }
}

/// What work costs on a GPU of so many multiprocessors.
pub(super) fn estimate(sm_count: u32) -> CostModel {
    let share = f64::from(sm_count) / H200_SM_COUNT;
    let h200 = CostModel::H200;
    CostModel {
        forward_flops_per_second: h200.forward_flops_per_second * share,
        backward_flops_per_second: h200.backward_flops_per_second * share,
        matmul_flops_per_second: h200.matmul_flops_per_second * share,
        memory_bytes_per_second: h200.memory_bytes_per_second * share,
        sharing: Some(WorkerSharing { workers: sm_count as usize, ..WorkerSharing::H200 }),
        tiles: h200.tiles.map(|tiles| TileCosts { workers: sm_count as usize, ..tiles }),
        ..h200
    }
}

/// What work costs each of `ranks` ranks on one GPU: they share its rates, and their link is its memory.
pub(super) fn shared(one: CostModel, ranks: usize) -> CostModel {
    if ranks < 2 {
        return one;
    }
    let share = 1.0 / ranks as f64;
    let memory_bytes_per_second = one.memory_bytes_per_second * share;
    CostModel {
        forward_flops_per_second: one.forward_flops_per_second * share,
        backward_flops_per_second: one.backward_flops_per_second * share,
        matmul_flops_per_second: one.matmul_flops_per_second * share,
        memory_bytes_per_second,
        // A copy reads and writes each byte.
        link: Link { alpha_seconds: 20e-6, bytes_per_second: memory_bytes_per_second / 2.0 },
        engine: None,
        sum_bytes_per_second: Some(one.sum_rate() * share),
        // Kernels of several ranks find room among each other in ways that this does not know.
        sharing: None,
        tiles: one.tiles.map(|tiles| TileCosts { workers: tiles.workers.div_ceil(ranks), ..tiles }),
        ..one
    }
}
