//! Counterpoint: distributed attention and tensor-parallel layers whose communication runs under their computation.
//!
//! This crate gathers the others under one name; read them in the order in which data flows:
//! [`mask`] (what), [`plan`] (who), [`schedule`] (when), [`choose`] (which), [`exec`] (done; on GPUs [`cuda`]), [`mod@reference`] (right),
//! [`measure`] (fast), [`report`] (shown). [`tiles`] and [`cost`] say what kernels compute and what that takes.
//!
//! ```
//! use counterpoint::choose::{PlanConfig, plan_mask};
//! use counterpoint::exec::{Pass, RunConfig, random_inputs, run_attention};
//! use counterpoint::mask::Mask;
//! use counterpoint::plan::{AttentionSpec, DType};
//! use counterpoint::reference::check_attention;
//!
//! // Three packed documents, causal inside each, on 2 ranks.
//! let mask: Mask = "varlen-causal:lengths=100,60,96".parse()?;
//! let spec = AttentionSpec::new(4, 2, 64, DType::F32);
//! let plan = plan_mask(&mask, &spec, &PlanConfig::new(2))?;
//!
//! // Tensors of the whole sequence, in its order: q [256, 4, 64], k and v [256, 2, 64], and a dout for the backward.
//! let inputs = random_inputs(&mask, &spec, 0, Pass::ForwardBackward);
//! let run = run_attention(&plan, &spec, &inputs, &RunConfig::default())?;
//! assert_eq!(run.outputs.out.shape(), [256, 4, 64]);
//! assert!(check_attention(&mask, &spec, &inputs, &run.outputs).passed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where to begin:
//!
//! | for | take |
//! |---|---|
//! | attention from tensors to tensors | [`exec::run_attention`], [`exec::run_attention_on`] a [`cuda::CudaMachine`] |
//! | linear layers, layers of experts | [`exec::ColumnParallelLinear`], [`exec::RowParallelLinear`], [`exec::ExpertLayer`] |
//! | rows to the ranks that need them, and sums back | [`exec::Communicator::group_cast`], [`exec::Communicator::group_reduce`] |
//! | who computes what, without running it | [`plan::Plan`], [`plan::PlanSummary`] |
//! | a timeline of a machine that is not here | [`schedule::simulate()`] with [`cost::MachineProfile`] |
//! | whether results are right | [`reference::check_attention`], [`reference::check_linear`] |
//! | how fast this machine is | [`measure::calibrate`], [`measure::bench_attention()`] |
//! | a Program of your own | [`schedule::Program`], [`exec::Prepared`] |
//!
//! The examples in the repository read as a course of seven lessons.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

pub use counterpoint_choose as choose;
pub use counterpoint_cost as cost;
pub use counterpoint_cuda as cuda;
pub use counterpoint_exec as exec;
pub use counterpoint_mask as mask;
pub use counterpoint_measure as measure;
pub use counterpoint_plan as plan;
pub use counterpoint_reference as reference;
pub use counterpoint_report as report;
pub use counterpoint_schedule as schedule;
pub use counterpoint_tiles as tiles;
