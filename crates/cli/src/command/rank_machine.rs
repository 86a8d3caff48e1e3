use std::path::Path;

use counterpoint_cuda::{CudaMachine, Timing, TransportKind};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, ExecError, RunConfig, calibrate, run_attention, run_attention_on,
};
use counterpoint_plan::{AttentionSpec, CostModel, MachineProfile, Plan};

use crate::arguments::Device;
use crate::error::CliError;
use crate::{device, profile};

/// What `--device` names.
pub(crate) enum RankMachine {
    /// Ranks are threads, on the CPU of this name.
    Cpu(String),
    /// Ranks are on GPUs.
    Cuda(CudaMachine),
}

impl RankMachine {
    /// The CPU, or as many GPUs as there are ranks, all of them for `None`.
    pub(crate) fn open(
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

    /// Number of GPUs; 0 on the CPU.
    pub(crate) fn gpus(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Cuda(machine) => machine.devices().len(),
        }
    }

    /// The name of the device, of the first of several.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Cpu(name) => name,
            Self::Cuda(machine) => &machine.devices()[0].properties().name,
        }
    }

    /// What it was measured to do: as the file says that was named, or on GPUs the one that was kept. The CPU's rates depend on
    /// shapes so much that a command rather measures its own.
    pub(crate) fn profile(&self, named: Option<&Path>) -> Result<Option<MachineProfile>, CliError> {
        match self {
            Self::Cpu(name) => profile::named(named, name),
            Self::Cuda(_) => profile::of_machine(named, self.name()),
        }
    }

    /// What work costs on so many ranks of it: as the profile says. Without one it is measured on CPUs, for these very shapes,
    /// and estimated on GPUs.
    pub(crate) fn cost(
        &self,
        spec: &AttentionSpec,
        cp_size: usize,
        profile: Option<&MachineProfile>,
    ) -> CostModel {
        let measured = profile.map(|profile| &profile.cost);
        match self {
            Self::Cpu(_) => measured.copied().unwrap_or_else(|| calibrate(spec, cp_size)),
            Self::Cuda(machine) => machine.cost(measured, cp_size),
        }
    }

    pub(crate) fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionRun, ExecError> {
        match self {
            Self::Cpu(_) => run_attention(plan, spec, inputs, config),
            Self::Cuda(machine) => run_attention_on(machine, plan, spec, inputs, config),
        }
    }
}
