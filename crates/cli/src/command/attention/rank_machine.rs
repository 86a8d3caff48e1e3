use counterpoint_cuda::{CudaMachine, Timing, TransportKind};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, ExecError, RunConfig, calibrate, run_attention, run_attention_on,
};
use counterpoint_plan::{AttentionSpec, CostModel, DType, Plan};

use crate::arguments::{AttentionArguments, Device, dtype_name};
use crate::error::CliError;

/// What `--device` names.
pub(super) enum RankMachine {
    /// Ranks are threads.
    Cpu,
    /// Ranks are on GPUs.
    Cuda(CudaMachine),
}

impl RankMachine {
    /// Opens it, once the arguments that suit the CPU only are refused.
    pub(super) fn open(arguments: &AttentionArguments, dtype: DType) -> Result<Self, CliError> {
        let refuse = |flag, value: String, reason: &str| {
            Err(CliError::Flag { flag, value, reason: reason.to_owned() })
        };
        let transport = arguments.run.transport;
        if arguments.run.device == Device::Cpu {
            return match transport {
                TransportKind::Auto => Ok(Self::Cpu),
                named => refuse("--transport", named.to_string(), "is for GPUs; add --device cuda"),
            };
        }
        if !matches!(dtype, DType::Bf16 | DType::F16) {
            let reason = format!(
                "takes bf16 and f16 tensors, not {}; use one of them, or --device cpu",
                dtype_name(dtype)
            );
            return refuse("--device", "cuda".to_owned(), &reason);
        }
        if arguments.run.slow_link.is_some() {
            return refuse(
                "--device",
                "cuda".to_owned(),
                "does not imitate links; leave --slow-link out, or use --device cpu",
            );
        }
        let machine = CudaMachine::for_ranks(arguments.cp_size, Timing::Spans)
            .and_then(|machine| machine.with_transport(transport));
        machine.map(Self::Cuda).map_err(|source| CliError::Cuda { source })
    }

    /// What work costs on it: measured on CPUs, estimated on GPUs.
    pub(super) fn cost(&self, spec: &AttentionSpec, arguments: &AttentionArguments) -> CostModel {
        match self {
            Self::Cpu => calibrate(spec, arguments.cp_size),
            Self::Cuda(machine) => machine.estimated_cost(arguments.cp_size),
        }
    }

    pub(super) fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionRun, ExecError> {
        match self {
            Self::Cpu => run_attention(plan, spec, inputs, config),
            Self::Cuda(machine) => run_attention_on(machine, plan, spec, inputs, config),
        }
    }
}
