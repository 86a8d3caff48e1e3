//! The cost model of a machine: its rates of computation and memory, and its links.

use serde::{Deserialize, Serialize};

use crate::figure_limits::{COSTS, RATES, check_figure};
use crate::{CostError, ProblemSize, TileCosts, WorkerSharing};

/// A link: moving `b` bytes takes `alpha_seconds + b / bytes_per_second`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Cost of starting one collective, in seconds.
    pub alpha_seconds: f64,
    /// Bytes a second in one direction.
    pub bytes_per_second: f64,
}

impl Link {
    /// Seconds to move `bytes`; 0 when there is nothing to move.
    pub fn seconds(&self, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { self.alpha_seconds + bytes as f64 / self.bytes_per_second }
    }
}

/// What work costs on a machine, calibrated by measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// Attention forward, floating-point operations a second of one rank; with `tiles` what it does in long tiles of large
    /// blocks, for a few milliseconds.
    pub forward_flops_per_second: f64,
    /// Attention backward, likewise.
    pub backward_flops_per_second: f64,
    /// Matrix products, likewise.
    pub matmul_flops_per_second: f64,
    /// Bytes a second that a pass over memory reads and writes, of one rank.
    pub memory_bytes_per_second: f64,
    /// Cost of one more compute launch, in seconds.
    pub launch_seconds: f64,
    /// Between ranks of one node.
    pub link: Link,
    /// Between nodes.
    pub network: Link,
    /// Seconds in which a copy engine begins each of its copies, one for every range of rows and who receives it.
    #[serde(default = "copy_seconds")]
    pub copy_seconds: f64,
    /// Rows that copy engines bring to other ranks of a node, one copy to each rank: what it takes until the first copy has begun and
    /// the last is known to have ended, and the rate. Without it nobody measured them: [`CostModel::engine_link`].
    #[serde(default)]
    pub engine: Option<Link>,
    /// Bytes a second that one worker reads, adds and writes where a few sum concurrently with a product. Without it nobody measured them:
    /// [`CostModel::sum_rate`].
    #[serde(default)]
    pub sum_bytes_per_second: Option<f64>,
    /// Elements a second of its second operand that a product of few rows packs: it takes no less than that. Without it a product takes
    /// what its operations take.
    #[serde(default)]
    pub packed_elements_per_second: Option<f64>,
    /// What overlapping work takes from each other; without it, nothing.
    #[serde(default)]
    pub sharing: Option<WorkerSharing>,
    /// What attention kernels cost by the tiles that they compute; without it time is in proportion to unmasked pairs.
    #[serde(default)]
    pub tiles: Option<TileCosts>,
}

/// As measured on an H200: 256 KB a copy move at 81 GB/s, large ones at 390. Profiles of before say nothing of it.
const fn copy_seconds() -> f64 {
    2.5e-6
}

/// Copies to other ranks by the engines of H200s, whose link's kernels move [`CostModel::H200`]'s; what it takes until the first of a
/// collective has begun and the last is known to have ended is taken to be alike elsewhere (`docs/experiments/060-column-backward.md`).
const ENGINE_H200: Link = Link { alpha_seconds: 25e-6, bytes_per_second: 380e9 };

/// What one worker sums concurrently with a product over the memory's rate, on an H200 (likewise).
const SUM_SHARE: f64 = 50e9 / 4300e9;

impl CostModel {
    /// A Hopper GPU on NVLink, nodes joined by 400 Gb/s of network a GPU: what to plan with where nothing was measured.
    /// Our attention kernels and the link that kernels drive themselves, as measured on this GPU.
    pub const H200: CostModel = CostModel {
        forward_flops_per_second: 775e12,
        backward_flops_per_second: 768e12,
        matmul_flops_per_second: 700e12,
        memory_bytes_per_second: 4.3e12,
        launch_seconds: 5e-6,
        link: Link { alpha_seconds: 10e-6, bytes_per_second: 315e9 },
        network: Link { alpha_seconds: 60e-6, bytes_per_second: 45e9 },
        copy_seconds: copy_seconds(),
        engine: None,
        sum_bytes_per_second: Some(50e9),
        packed_elements_per_second: None,
        sharing: None,
        tiles: Some(TileCosts::H200),
    };

    /// A CPU rank that shares a machine with a few others: what to plan with where nothing was measured. The same everywhere, so that
    /// ranks on different machines plan alike.
    pub const CPU: CostModel = CostModel {
        forward_flops_per_second: 20e9,
        backward_flops_per_second: 20e9,
        matmul_flops_per_second: 40e9,
        memory_bytes_per_second: 8e9,
        launch_seconds: 20e-6,
        copy_seconds: 0.0,
        engine: None,
        sum_bytes_per_second: None,
        packed_elements_per_second: Some(250e6),
        link: Link { alpha_seconds: 50e-6, bytes_per_second: 2e9 },
        network: Link { alpha_seconds: 100e-6, bytes_per_second: 1e9 },
        sharing: None,
        tiles: None,
    };

    /// What copy engines take between ranks of a node: as measured; as on H200s where the link is theirs; or else at the rate of the
    /// link's kernels, for over PCIe or a slower NVLink neither is known to be faster.
    pub fn engine_link(&self) -> Link {
        let alike = || match self.link == Self::H200.link {
            true => ENGINE_H200,
            false => Link { bytes_per_second: self.link.bytes_per_second, ..ENGINE_H200 },
        };
        self.engine.unwrap_or_else(alike)
    }

    /// Bytes a second that one worker sums concurrently with a product: as measured, or else as much of the memory's rate as on an H200.
    pub fn sum_rate(&self) -> f64 {
        self.sum_bytes_per_second.unwrap_or(SUM_SHARE * self.memory_bytes_per_second)
    }

    /// Seconds of a product, without its launch.
    pub fn matmul_seconds(&self, size: ProblemSize) -> f64 {
        match self.sharing {
            Some(sharing) => sharing.matmul_seconds(size, self.matmul_flops_per_second),
            None => f64::max(size.flops() / self.matmul_flops_per_second, self.packing_seconds(size)),
        }
    }

    fn packing_seconds(&self, ProblemSize { n, k, .. }: ProblemSize) -> f64 {
        self.packed_elements_per_second.map_or(0.0, |rate| (n * k) as f64 / rate)
    }

    /// Seconds until the first columns of a product are done that is computed column by column.
    pub fn columns_done_seconds(&self, size: ProblemSize, columns: usize) -> f64 {
        match self.sharing {
            Some(sharing) => sharing.columns_done_seconds(size, columns, self.matmul_flops_per_second),
            None => self.matmul_seconds(ProblemSize { n: columns, ..size }),
        }
    }

    /// Whether times can be predicted with it.
    ///
    /// # Errors
    /// A figure that no machine could have: predicted times would overflow.
    pub fn validate(&self) -> Result<(), CostError> {
        let rates = [
            ("forward_flops_per_second", self.forward_flops_per_second),
            ("backward_flops_per_second", self.backward_flops_per_second),
            ("matmul_flops_per_second", self.matmul_flops_per_second),
            ("memory_bytes_per_second", self.memory_bytes_per_second),
            ("link.bytes_per_second", self.link.bytes_per_second),
            ("network.bytes_per_second", self.network.bytes_per_second),
        ];
        let costs = [
            ("launch_seconds", self.launch_seconds),
            ("copy_seconds", self.copy_seconds),
            ("link.alpha_seconds", self.link.alpha_seconds),
            ("network.alpha_seconds", self.network.alpha_seconds),
        ];
        rates.into_iter().try_for_each(|(field, rate)| check_figure(field, rate, RATES))?;
        costs.into_iter().try_for_each(|(field, seconds)| check_figure(field, seconds, COSTS))?;
        if let Some(engine) = self.engine {
            check_figure("engine.bytes_per_second", engine.bytes_per_second, RATES)?;
            check_figure("engine.alpha_seconds", engine.alpha_seconds, COSTS)?;
        }
        for (field, rate) in [
            ("sum_bytes_per_second", self.sum_bytes_per_second),
            ("packed_elements_per_second", self.packed_elements_per_second),
        ] {
            rate.map_or(Ok(()), |rate| check_figure(field, rate, RATES))?;
        }
        self.sharing.map_or(Ok(()), |sharing| sharing.validate())?;
        self.tiles.map_or(Ok(()), |tiles| tiles.validate())
    }
}
