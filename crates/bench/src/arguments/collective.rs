//! What `bench group-cast` and `bench group-reduce` accept.

use std::time::Duration;

use clap::{Args, ValueEnum};
use counterpoint_console::arguments::value;
use counterpoint_cuda::TransportKind;

/// Time rows that go to the ranks that need them (group-cast) or back to be added up (group-reduce), each transport compared with NCCL
#[derive(Debug, Args)]
#[command(after_help = "\
Flags and columns are those of nccl-tests; size is what each rank sends (and
receives), so busbw is algbw. A group-cast sends two tensors, as keys and values are,
in splits with gaps as long as the splits between them. A group-reduce sends such rows
back, and adds them to what their owner has. #wrong counts wrong elements, before and
after the timed runs: a row with any is no result, and the exit status is 1.
`vs nccl` is the speed over NCCL's at this size, in this run: an all-to-all with the
copies before and after it.

Examples:
  counterpoint bench group-cast -b 1M -e 1G -f 4
  counterpoint bench group-cast -g 2 --transports nvlink,nccl --num-sms 8
  counterpoint bench group-reduce -b 64M -e 64M -d bf16 --json")]
pub struct BenchCollectiveArguments {
    /// Smallest size
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "1M", value_parser = value::bytes, allow_hyphen_values = true)]
    pub(crate) min_bytes: u64,

    /// Largest size
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "256M", value_parser = value::bytes, allow_hyphen_values = true)]
    pub(crate) max_bytes: u64,

    /// Each size is N times the one before
    #[arg(short = 'f', long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u64).range(2..=1024), allow_hyphen_values = true)]
    pub(crate) step_factor: u64,

    /// Ranks, each on a GPU of its own where there are as many [default: all GPUs]
    #[arg(short = 'g', long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=16), allow_hyphen_values = true)]
    pub(crate) gpus: Option<u32>,

    /// Runs of one time
    #[arg(short = 'n', long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=100_000), allow_hyphen_values = true)]
    pub(crate) iterations: u32,

    /// Runs before those that count
    #[arg(short = 'w', long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(0..=100_000), allow_hyphen_values = true)]
    pub(crate) warmups: u32,

    /// Times of each row
    #[arg(short = 'c', long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000), allow_hyphen_values = true)]
    pub(crate) cycles: u32,

    /// Element type [default: bf16 for group-cast, f32 for group-reduce]
    #[arg(short = 'd', long, value_name = "TYPE", value_enum)]
    pub(crate) dtype: Option<CollectiveDType>,

    /// Transports, in this order; NCCL is measured first if it is among them
    #[arg(long, value_name = "NAMES", default_value = "nccl,nvlink,copy-engine", value_parser = value::transport(), value_delimiter = ',')]
    pub(crate) transports: Vec<TransportKind>,

    /// Elements of a row
    #[arg(long, value_name = "N", default_value = "1k", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) row_elements: usize,

    /// Rows of a split
    #[arg(long, value_name = "N", default_value = "128", value_parser = value::size, allow_hyphen_values = true)]
    pub(crate) split_rows: usize,

    /// Multiprocessors that a kernel of the nvlink transport takes
    #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..=132), allow_hyphen_values = true)]
    pub(crate) num_sms: u32,

    /// Limit of every wait
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = value::seconds, allow_hyphen_values = true)]
    pub(crate) limit: Duration,

    /// Print one JSON object a row and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// An element type that collectives convert and sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CollectiveDType {
    F32,
    Bf16,
    F16,
}
