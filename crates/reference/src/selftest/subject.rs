//! The trait of devices that the selftest examines, and the CPU as one.

use std::sync::Arc;

use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, CpuMachine, ExecError, ExpertInputs, ExpertOptions, ExpertOutputs,
    LinearConfig, LinearInputs, LinearOutputs, Pass, RunConfig, WorldConfig, run_attention, run_experts_on,
    run_linear,
};
use counterpoint_plan::{AttentionSpec, DType, LinearPlan, Plan, Routing};
use counterpoint_schedule::Mover;
use thiserror::Error;

/// Why a subject has no results.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SubjectError {
    /// The run ended early.
    #[error("{0}")]
    Run(#[from] ExecError),
    /// The run wrote where it must not.
    #[error("memory beside buffers was written: {0}")]
    Overwrite(String),
}

/// What a selftest examines: a device that runs distributed attention and linear layers.
pub trait Subject {
    /// Its name, such as a processor's.
    fn device(&self) -> String;

    /// Element types that it takes.
    fn dtypes(&self) -> &[DType];

    /// What policies may say that moves its rows.
    fn movers(&self) -> &'static [Mover] {
        &[Mover::Transport, Mover::Fused]
    }

    /// Which tensors of a deterministic run have the same bits for any number of stages.
    fn same_in_any_stages(&self) -> Pass;

    /// Runs attention as `config` says, with guard bytes behind every buffer that are looked at after, where the device can
    /// write beyond one.
    ///
    /// # Errors
    /// Whatever ends the run, a guard that was written over included.
    fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionOutputs, SubjectError>;

    /// Runs a linear layer likewise.
    ///
    /// # Errors
    /// As [`Subject::run`].
    fn run_linear(
        &self,
        plan: &LinearPlan,
        inputs: &LinearInputs,
        config: &LinearConfig,
    ) -> Result<LinearOutputs, SubjectError>;

    /// Runs a layer of experts likewise.
    ///
    /// # Errors
    /// As [`Subject::run`].
    fn run_experts(
        &self,
        options: ExpertOptions,
        routing: &Arc<Routing>,
        inputs: &ExpertInputs,
        config: WorldConfig,
    ) -> Result<ExpertOutputs, SubjectError>;
}

/// Ranks that are threads of this process.
#[derive(Clone, Copy, Debug)]
pub struct CpuSubject;

impl Subject for CpuSubject {
    fn device(&self) -> String {
        "cpu".to_owned()
    }

    fn dtypes(&self) -> &[DType] {
        &[DType::F32, DType::F64, DType::Bf16, DType::F16]
    }

    fn same_in_any_stages(&self) -> Pass {
        Pass::ForwardBackward
    }

    fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionOutputs, SubjectError> {
        Ok(run_attention(plan, spec, inputs, config)?.outputs)
    }

    fn run_linear(
        &self,
        plan: &LinearPlan,
        inputs: &LinearInputs,
        config: &LinearConfig,
    ) -> Result<LinearOutputs, SubjectError> {
        Ok(run_linear(plan, inputs, config)?.outputs)
    }

    fn run_experts(
        &self,
        options: ExpertOptions,
        routing: &Arc<Routing>,
        inputs: &ExpertInputs,
        config: WorldConfig,
    ) -> Result<ExpertOutputs, SubjectError> {
        let machine = CpuMachine::new(options.passes.backward.policy.sm_margin(), None)?;
        Ok(run_experts_on(&machine, options, routing, inputs, config)?)
    }
}
