//! What `selftest` accepts.

use clap::Args;

use counterpoint_console::arguments::Device;
use counterpoint_reference::selftest::Share;

use crate::group::Group;

/// Prove this installation: the CPU always, every CUDA kernel with --device cuda
#[derive(Debug, Args)]
#[command(after_help = "\
Random masks, shapes and options are run forward and backward and compared with
the f64 reference. Checks that fail are printed with their seeds, then a table of
the groups of checks and one row of figures; with --verbose every check is. How
far it is stands on standard error. Exit status 1 when any check failed, 3 without
the device.

Examples:
  counterpoint selftest
  counterpoint selftest --device cuda
  counterpoint selftest --device cuda --quick --json > selftest.json
  counterpoint selftest --device cuda --only gemm
  counterpoint selftest --device cuda --stress
  counterpoint selftest --hostile
  counterpoint selftest --compile-only
  counterpoint selftest --compile-only --only attention_forward --verbose")]
pub struct SelftestArguments {
    /// What to examine
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,

    /// Compile every CUDA kernel and look at what came out, no GPU needed
    #[arg(long, conflicts_with_all = ["device", "quick"])]
    pub(crate) compile_only: bool,

    /// Only the groups of checks, or with --compile-only the kernels, whose names contain this
    #[arg(long, value_name = "PART")]
    pub(crate) only: Option<String>,

    /// A small set of checks, fit to be run under compute-sanitizer
    #[arg(long)]
    pub(crate) quick: bool,

    /// Examine just these groups, in this process: what a process of a selftest is started with
    #[arg(long = "group", value_name = "NAME", value_parser = Group::named, hide = true, conflicts_with_all = ["compile_only", "only"])]
    pub(crate) groups: Vec<Group>,

    /// Of each group every N-th case, beginning with the K-th
    #[arg(long, value_name = "K/N", default_value_t = Share::ALL, hide = true, requires = "groups")]
    pub(crate) share: Share,

    /// Nothing but barriers and flags between GPUs, a million times with random delays; takes minutes
    #[arg(long, conflicts_with_all = ["compile_only", "quick"])]
    pub(crate) stress: bool,

    /// Nothing but ranks that are processes among hostile others: strangers and other jobs at their port, ranks that are killed,
    /// stopped or started with something else; on any machine
    #[arg(long, conflicts_with_all = ["compile_only", "quick", "stress", "device"])]
    pub(crate) hostile: bool,

    /// Let jobs of several processes take N times as long: for tools that slow them down
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100), conflicts_with = "compile_only")]
    pub(crate) patience: u32,

    /// Print a line for every check, or with --compile-only for every kernel
    #[arg(long, conflicts_with = "json")]
    pub(crate) verbose: bool,

    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}
