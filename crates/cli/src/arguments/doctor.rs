use clap::Args;

/// Say what this machine can do, what it lacks and what that costs
#[derive(Debug, Args)]
#[command(after_help = "\
Looks for GPUs, their driver, the compiler of kernels (NVRTC), NCCL and the cache
of compiled kernels, and says where each was found or how to get it. What is
missing is no error: the exit status is 0.

Examples:
  counterpoint doctor
  counterpoint doctor --json > machine.json")]
pub(crate) struct DoctorArguments {
    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
