//! Timing GPUs: attention kernels, matrix products, collectives, steps; and what a machine's profile is measured by.

// Kernels take addresses.
#![allow(unsafe_code)]

mod attention;
mod calibrate;
pub mod collective;
mod gemm;
mod gemm_collective;
mod grouped_gemm;
mod step;

pub use attention::{AttentionBench, BenchCase, BenchClock, BenchPass, CALLS};
pub use calibrate::{
    CalibrationFault, StartCount, calibrate, count_starts, count_transport_starts, counted_transports,
};
pub use gemm::{GemmBench, GemmError, element_bound};
pub use gemm_collective::{GemmCollectiveBench, GemmCollectiveRuns, GemmCollectiveTimes};
pub use grouped_gemm::{ExpertProducts, GroupedGemmBench, GroupedRunner};
pub use step::StepBench;
