use counterpoint_cuda::{CudaMachine, Timing, TransportKind};
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
    /// All GPUs, or as many as `cp_size` asks for.
    pub(super) fn open(
        device: Device,
        cp_size: Option<usize>,
        transport: TransportKind,
    ) -> Result<Self, CliError> {
        match (device, transport) {
            (Device::Cpu, TransportKind::Auto) => Ok(Self::Cpu(device::cpu_name())),
            (Device::Cpu, named) => {
                let reason = "is for GPUs; add --device cuda".to_owned();
                Err(CliError::Flag { flag: "--transport", value: named.to_string(), reason })
            }
            (Device::Cuda, transport) => {
                let machine = CudaMachine::for_ranks(cp_size.unwrap_or(usize::MAX), Timing::Spans)
                    .and_then(|machine| machine.with_transport(transport));
                machine.map(Self::Cuda).map_err(|source| CliError::Cuda { source })
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
