//! What a machine of GPUs does, measured: the rates of kernels, its links by transport and size, its overlap policies.

mod kernels;
mod links;
mod policies;
mod sharing;
mod starts;
mod transport_starts;

pub use starts::{StartCount, count_starts};
pub use transport_starts::{count_transport_starts, counted_transports};

use counterpoint_cost::{CostModel, MachineProfile, PROFILE_VERSION};
use counterpoint_exec::ExecError;

use counterpoint_cuda::CudaMachine;
use counterpoint_cuda::exec_error;
use thiserror::Error;

/// Why a measurement of the machine is none.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CalibrationFault {
    /// A collective whose results are wrong.
    #[error("{wrong} elements of {bytes} bytes by {transport} are wrong")]
    Wrong {
        /// Elements that are.
        wrong: u64,
        /// Bytes of the message.
        bytes: u64,
        /// Who moved it.
        transport: String,
    },
    /// An operation without its time.
    #[error("its time was not taken")]
    NoTime,
}

/// Measures `machine`: some seconds a GPU, and as many again for links and policies where there are several. `report` is called with what
/// is measured next.
///
/// What attention kernels cost by tiles is theirs, not the machine's (`TileCosts`): rates alone are measured, such that
/// predictions of a few masks are right in the mean.
///
/// # Errors
/// Whatever ends a run.
pub fn calibrate(machine: &CudaMachine, report: &mut dyn FnMut(&str)) -> Result<MachineProfile, ExecError> {
    let device = &machine.devices()[0];
    let one = CudaMachine::new(vec![device.clone()], counterpoint_cuda::Timing::Off)
        .map_err(|error| exec_error(0, "one GPU of the machine", error))?;
    let mut cost: CostModel = one.cost(None, 1);
    report("copies and launches");
    cost.memory_bytes_per_second = kernels::memory_bytes_per_second(device)?;
    cost.launch_seconds = kernels::launch_seconds(device)?;
    report("sums");
    cost.sum_bytes_per_second = kernels::sum_bytes_per_second(device)?;
    report("matrix products");
    cost.matmul_flops_per_second = kernels::matmul_flops_per_second(device)?;
    report("attention");
    kernels::attention_rates(&one, &mut cost)?;
    let mut profile = MachineProfile {
        version: PROFILE_VERSION,
        machine: device.properties().name.clone(),
        devices: machine.devices().len(),
        source: format!("measured by counterpoint {}", env!("CARGO_PKG_VERSION")),
        cost,
        transports: Vec::new(),
        policies: Vec::new(),
    };
    if machine.devices().len() > 1 {
        // The events that take spans would take part of what a small collective does.
        let untimed = CudaMachine::new(machine.devices().to_vec(), counterpoint_cuda::Timing::Off)
            .map_err(|error| exec_error(0, "all GPUs of the machine", error))?;
        profile.transports = links::transports(&untimed, report)?;
        let used = profile.transports.iter().find(|one| one.transport == machine.transport().to_string());
        if let Some(link) = used.and_then(links::link) {
            profile.cost.link = link;
        }
        if let Some((engine, copy_seconds)) = links::engines(&untimed, &profile.transports, report)? {
            (profile.cost.engine, profile.cost.copy_seconds) = (Some(engine), copy_seconds);
        }
        if let Some(assumed) = profile.cost.sharing {
            report("products under collectives");
            profile.cost.sharing = Some(sharing::measure(machine, assumed)?);
        }
        profile.policies = policies::measure(machine, &profile.cost, report)?;
    }
    Ok(profile)
}
