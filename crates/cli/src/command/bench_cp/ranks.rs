use counterpoint_cuda::{CudaMachine, Timing};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, RunConfig, calibrate, run_attention, run_attention_on,
};
use counterpoint_plan::{AttentionSpec, CostModel, DType, Plan};

use crate::arguments::Device;
use crate::device;
use crate::error::CliError;

/// Where the ranks of a benchmark are.
pub(super) enum Ranks {
    /// Threads, on the CPU of this name.
    Cpu(String),
    /// On the GPUs.
    Cuda(CudaMachine),
}

impl Ranks {
    pub(super) fn open(device: Device) -> Result<Self, CliError> {
        match device {
            Device::Cpu => Ok(Self::Cpu(device::cpu_name())),
            Device::Cuda => {
                CudaMachine::open(Timing::Spans).map(Self::Cuda).map_err(|source| CliError::Cuda { source })
            }
        }
    }

    pub(super) fn gpus(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Cuda(machine) => machine.devices().len(),
        }
    }

    /// The name of the device, of the first of several.
    pub(super) fn device(&self) -> &str {
        match self {
            Self::Cpu(name) => name,
            Self::Cuda(machine) => &machine.devices()[0].properties().name,
        }
    }

    /// The type that is measured.
    pub(super) fn dtype(&self) -> DType {
        match self {
            Self::Cpu(_) => DType::F32,
            Self::Cuda(_) => DType::Bf16,
        }
    }

    /// What work costs on so many of the ranks.
    pub(super) fn cost(&self, spec: &AttentionSpec, cp_size: usize) -> CostModel {
        match self {
            Self::Cpu(_) => calibrate(spec, cp_size),
            Self::Cuda(machine) => machine.estimated_cost(cp_size),
        }
    }

    pub(super) fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionRun, CliError> {
        match self {
            Self::Cpu(_) => run_attention(plan, spec, inputs, config),
            Self::Cuda(machine) => run_attention_on(machine, plan, spec, inputs, config),
        }
        .map_err(|source| CliError::Run { source })
    }
}
