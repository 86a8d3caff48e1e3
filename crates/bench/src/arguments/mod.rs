//! What `bench` and `tune` accept.

mod collective;
mod cp;
mod gemm;
mod gemm_collective;
mod kernels;
mod layer_shape;
mod moe;
mod tp;
mod tune;

pub(crate) use collective::{BenchCollectiveArguments, CollectiveDType};
pub(crate) use cp::BenchCpArguments;
pub(crate) use gemm::{BenchGemmArguments, BenchGemmLayout};
pub(crate) use gemm_collective::BenchGemmCollectiveArguments;
pub use kernels::BenchCommand;
pub(crate) use kernels::{
    BenchAttentionArguments, BenchClock, BenchDType, BenchFreshMasksArguments, BenchKernels, BenchPass,
    BenchPlanArguments, CudaBenchArguments,
};
pub(crate) use layer_shape::LayerShape;
pub(crate) use moe::{BenchMoeArguments, MoeLayersArguments, TuneMoeArguments};
pub(crate) use tp::{BenchTpArguments, BenchTpKind, BenchTpPass, GradientArgument};
pub use tune::TuneCommand;
pub(crate) use tune::{BenchBandwidthArguments, RanksArguments, SearchArgument, TuneGemmArguments};
