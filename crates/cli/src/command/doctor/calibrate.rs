//! `counterpoint doctor --calibrate`.

use std::fmt::Write;
use std::path::PathBuf;

use counterpoint_console::{
    self as console, CliError, Progress, Schema, UsageFault,
    arguments::Device,
    device,
    output::{Outputs, shown},
    profile,
};
use counterpoint_cost::{MachineProfile, PROFILE_VERSION};
use counterpoint_cuda::{CudaMachine, Timing};
use counterpoint_measure::calibrate;
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_report::{format_bytes, format_flops, format_gbps, format_seconds};

use crate::arguments::DoctorArguments;

/// Measures, keeps and prints.
pub(super) fn run(arguments: &DoctorArguments) -> Result<(), CliError> {
    let gpus = match arguments.device {
        Device::Cpu => None,
        Device::Cuda => {
            let opened = CudaMachine::for_ranks(usize::MAX, Timing::Spans);
            Some(opened.map_err(|source| CliError::Cuda { source })?)
        }
    };
    let machine = match &gpus {
        None => device::cpu_name(),
        Some(gpus) => gpus.devices()[0].properties().name.clone(),
    };
    // Known to be writable before minutes of measuring.
    let path = destination(arguments, &machine)?;
    let outputs = Outputs::check(&[("--output", Some(&path))])?;
    let outputs = if arguments.output.is_none() { outputs.for_owner() } else { outputs };
    let progress = Progress::new();
    let measured = match &gpus {
        None => of_cpu(&progress, machine),
        Some(gpus) => {
            let mut report = |what: &str| progress.step(format!("measuring {what}"));
            counterpoint_bench::gpu::calibrate(gpus, &mut report)
                .map_err(|source| CliError::Run { source })?
        }
    };
    drop(progress);
    outputs.write(|_| Ok(measured.to_json().into_bytes()))?;
    if arguments.json {
        return console::print_json(Schema::DoctorProfile, &measured);
    }
    console::print(&format!("{}\nkept in {}\n", describe(&measured), shown(&path)))
}

/// The CPU's rates depend on shapes more than a GPU's, so that commands measure their own; this is what others plan with.
fn of_cpu(progress: &Progress, machine: String) -> MachineProfile {
    progress.step("measuring the CPU");
    let spec = AttentionSpec::new(8, 8, 128, DType::F32);
    MachineProfile {
        version: PROFILE_VERSION,
        machine,
        devices: 1,
        source: format!("measured by counterpoint {}: f32, 8 heads of 128", env!("CARGO_PKG_VERSION")),
        cost: calibrate(&spec, 1),
        transports: Vec::new(),
        policies: Vec::new(),
    }
}

/// The file that was asked for, or this machine's among those kept, whose folder is made.
fn destination(arguments: &DoctorArguments, machine: &str) -> Result<PathBuf, CliError> {
    if let Some(path) = &arguments.output {
        return Ok(path.clone());
    }
    let folder = profile::folder()?.ok_or_else(|| CliError::usage(UsageFault::NoProfileFolder))?;
    profile::make(&folder)?;
    Ok(profile::file_in(&folder, machine))
}

fn describe(profile: &MachineProfile) -> String {
    let MachineProfile { machine, devices, cost, transports, policies, .. } = profile;
    let mut text = format!("{machine}, {}\n", console::count(*devices, "device"));
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:24}  {value}");
    };
    line("attention forward", format_flops(cost.forward_flops_per_second));
    line("attention backward", format_flops(cost.backward_flops_per_second));
    line("matrix products", format_flops(cost.matmul_flops_per_second));
    line("memory, read and written", format_gbps(cost.memory_bytes_per_second));
    line("a launch", format_seconds(cost.launch_seconds));
    let link = format!(
        "{} and {}",
        format_seconds(cost.link.alpha_seconds),
        format_gbps(cost.link.bytes_per_second)
    );
    line("link", link);
    if let Some(sharing) = cost.sharing {
        let value = format!("{} of {} workers", sharing.communication, sharing.workers);
        line("a collective takes", value);
    }
    for transport in transports {
        for (what, points) in [("group-cast", &transport.cast), ("group-reduce", &transport.reduce)] {
            let each = points
                .iter()
                .map(|point| format!("{} in {}", format_bytes(point.bytes), format_seconds(point.seconds)));
            line(&format!("{} {what}", transport.transport), each.collect::<Vec<_>>().join(", "));
        }
    }
    for policy in policies {
        let value = format!("{}, {:.0} % hidden", format_seconds(policy.seconds), 100.0 * policy.efficiency);
        line(&policy.policy, value);
    }
    text
}
