use std::path::PathBuf;

use clap::Args;

use super::Device;

/// Say what this machine can do, what it lacks and what that costs
#[derive(Debug, Args)]
#[command(after_help = "\
Looks for GPUs, their driver, the compiler of kernels (NVRTC), NCCL and the cache
of compiled kernels, and says where each was found or how to get it. What is
missing is no error: the exit status is 0.

Examples:
  counterpoint doctor
  counterpoint doctor --json > machine.json
  counterpoint doctor --calibrate --device cuda
  counterpoint doctor --calibrate --output this-machine.json

--calibrate measures rates, links and overlap policies, and keeps them as this
machine's profile in COUNTERPOINT_PROFILE_DIR (or the user's configuration folder),
where plan, attention and bench cp find it; --output names another file.")]
pub(crate) struct DoctorArguments {
    /// Measure what this machine does, and keep it for planning
    #[arg(long)]
    pub(crate) calibrate: bool,

    /// What to measure
    #[arg(long, value_enum, default_value_t = Device::Cpu, requires = "calibrate")]
    pub(crate) device: Device,

    /// Where to write the profile
    #[arg(long, value_name = "FILE", requires = "calibrate")]
    pub(crate) output: Option<PathBuf>,

    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
