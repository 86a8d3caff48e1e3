//! The trait of devices that the selftest examines, and the CPU as one.

use std::sync::Arc;
use std::time::Duration;

use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, Backend, CpuMachine, ExecError, ExpertInputs, ExpertOptions,
    ExpertOutputs, HostTensor, LinearConfig, LinearInputs, LinearOutputs, Machine, Pass, Prepared, RunConfig,
    World, WorldConfig, run_attention, run_experts_on, run_linear,
};
use counterpoint_plan::{AttentionSpec, DType, LinearPlan, Plan, Routing};
use counterpoint_schedule::{BufferRole, Mover, Program, RankTransport};
use thiserror::Error;

/// Why a subject has no results.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SubjectError {
    /// The run ended early.
    #[error("{0}")]
    Run(#[from] ExecError),
    /// The run wrote where it must not.
    #[error("memory next to buffers was written: {0}")]
    Overwrite(String),
}

/// What a selftest examines: a device that runs distributed attention and linear layers.
pub trait Subject {
    /// Its name, such as a processor's.
    fn device(&self) -> String;

    /// Element types that it takes.
    fn dtypes(&self) -> &[DType];

    /// What policies may say that moves its rows.
    fn movers(&self) -> Vec<Mover> {
        RankTransport::Cpu.movers()
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

    /// Runs the Program of a single rank likewise: its inputs and outputs are in the order of its buffers.
    ///
    /// # Errors
    /// As [`Subject::run`].
    fn run_alone(&self, program: &Program, inputs: &[&HostTensor]) -> Result<Vec<HostTensor>, SubjectError>;
}

/// Runs the Program of a single rank on a machine: its inputs and outputs are in the order of its buffers, outputs NaN before the run.
///
/// # Errors
/// [`ExecError::Tensor`] for an input that does not fit; [`ExecError::OutOfMemory`]; whatever ends a run early.
pub fn run_alone<M: Machine>(
    machine: &M,
    program: &Program,
    inputs: &[&HostTensor],
) -> Result<Vec<HostTensor>, ExecError> {
    let config = WorldConfig { limit: Duration::from_secs(30), poison: true, ..WorldConfig::default() };
    let world = World::new(1, config);
    let ends = machine.connect(&world)?.into_iter();
    let mut ranks = ends
        .map(|(backend, transport)| Prepared::new(program.clone(), backend, transport))
        .collect::<Result<Vec<_>, _>>()?;
    let names = |role: BufferRole| {
        program.buffers.iter().filter(move |spec| spec.role == role).map(|spec| spec.name.as_str())
    };
    for rank in &mut ranks {
        for (name, tensor) in names(BufferRole::Input).zip(inputs) {
            let buffer = rank.backend().upload(name, (*tensor).clone())?;
            rank.bind(name, buffer)?;
        }
    }
    Prepared::run_ranks(&mut ranks)?;
    let outputs = names(BufferRole::Output).flat_map(|name| {
        ranks.iter().filter_map(move |rank| Some(rank.backend().download(rank.buffer(name)?)))
    });
    outputs.collect()
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
        let machine = CpuMachine::new(options.overlap.sm_margin(), None)?;
        Ok(run_experts_on(&machine, options, routing, inputs, config)?)
    }

    fn run_alone(&self, program: &Program, inputs: &[&HostTensor]) -> Result<Vec<HostTensor>, SubjectError> {
        Ok(run_alone(&CpuMachine::new(0, None)?, program, inputs)?)
    }
}
