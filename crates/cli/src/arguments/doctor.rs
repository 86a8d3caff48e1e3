//! What `counterpoint doctor` accepts.

use std::path::PathBuf;

use clap::Args;
use counterpoint_console::arguments::Device;

/// Say what this machine can do, what it lacks and what that costs
#[derive(Debug, Args)]
#[command(after_help = "\
Looks for GPUs, their driver, the compiler of kernels (NVRTC), NCCL and the cache
of compiled kernels, and says where each was found or how to get it. Under `Job` is
what variables of CUDA, NCCL and the launcher do to overlap in this job, and what to
do about them. What is missing is no error: the exit status is 0.

Examples:
  counterpoint doctor
  counterpoint doctor --json > machine.json
  counterpoint doctor --calibrate --device cuda
  counterpoint doctor --calibrate --output this-machine.json
  counterpoint doctor --overlap --connections 1,8,32

--calibrate measures rates, links and overlap policies, and keeps them as this
machine's profile in COUNTERPOINT_PROFILE_DIR (or the user's configuration folder),
where commands on GPUs find it; --output names another file.")]
pub(crate) struct DoctorArguments {
    /// Measure what this machine does, and keep it for planning
    #[arg(long)]
    pub(crate) calibrate: bool,

    /// Prove by measurement whether communication starts before the computation that should hide it
    #[arg(long, conflicts_with = "calibrate")]
    pub(crate) overlap: bool,

    /// Hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) to prove it with, each in a process of its own
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,8,32", requires = "overlap", value_parser = clap::value_parser!(u32).range(1..=32))]
    pub(crate) connections: Vec<u32>,

    /// Rounds of each
    #[arg(long, value_name = "N", default_value = "1000", requires = "overlap", value_parser = clap::value_parser!(u32).range(1..=1_000_000), allow_hyphen_values = true)]
    pub(crate) rounds: u32,

    /// Prove it in this process, with the connections that it has
    #[arg(long, hide = true, requires = "overlap")]
    pub(crate) here: bool,

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
