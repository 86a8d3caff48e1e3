use counterpoint_plan::{CostModel, Link, TileCosts};

use super::CudaMachine;

/// Multiprocessors of the GPU that [`CostModel::H200`] is of.
const H200_SM_COUNT: f64 = 132.0;

impl CudaMachine {
    /// What work costs when `ranks` ranks are dealt out to these GPUs: an estimate to plan with, from the figures of an H200
    /// and the number of multiprocessors. Ranks that share a GPU share its rates, and their link is its memory.
    pub fn estimated_cost(&self, ranks: usize) -> CostModel {
        let sharing = ranks.div_ceil(self.devices().len()).max(1);
        estimate(self.devices().iter().map(|device| device.sm_count()).min().unwrap_or(1), sharing)
    }
}

/// What work costs on a GPU of so many multiprocessors that `sharing` ranks share.
pub(super) fn estimate(sm_count: u32, sharing: usize) -> CostModel {
    let share = f64::from(sm_count) / H200_SM_COUNT / sharing as f64;
    let h200 = CostModel::H200;
    // A copy reads and writes each byte.
    let memory = Link { alpha_seconds: 20e-6, bytes_per_second: h200.memory_bytes_per_second / 2.0 * share };
    CostModel {
        forward_flops_per_second: h200.forward_flops_per_second * share,
        backward_flops_per_second: h200.backward_flops_per_second * share,
        matmul_flops_per_second: h200.matmul_flops_per_second * share,
        memory_bytes_per_second: h200.memory_bytes_per_second * share,
        launch_seconds: h200.launch_seconds,
        link: if sharing > 1 { memory } else { h200.link },
        network: h200.network,
        sharing: h200.sharing,
        tiles: h200.tiles.map(|tiles| TileCosts { workers: (sm_count as usize).div_ceil(sharing), ..tiles }),
    }
}
