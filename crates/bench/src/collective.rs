//! `counterpoint bench group-cast` and `bench group-reduce`.

use std::sync::Arc;

use crate::gpu::collective::{BenchCollective, CollectiveCase, CollectiveTimes, bench_collective};
use counterpoint_console::{
    self as console, CliError, CommandLine, Progress, Schema,
    arguments::dtype_name,
    launched::{as_rank, ended, gather, gpu_of_rank, launch, refuse_other_sizes},
    profile,
};
use counterpoint_cost::MachineProfile;
use counterpoint_cuda::{CudaMachine, Device, Timing, TransportKind};
use counterpoint_exec::Rendezvous;
use counterpoint_plan::{DType, Topology};
use counterpoint_report::{Column, Statistics};
use serde::Serialize;

use crate::arguments::{BenchCollectiveArguments, CollectiveDType};
use crate::rows::{MeasuredRow, Rows};
use counterpoint_console::FlagFault;

/// A measured case, as JSON has it.
#[derive(Debug, Serialize)]
struct CollectiveRow {
    name: &'static str,
    transport: String,
    device: String,
    ranks: usize,
    /// Bytes that each rank sends.
    size: u64,
    /// Elements that each rank sends.
    count: u64,
    dtype: &'static str,
    redop: &'static str,
    num_sms: u32,
    iterations: u32,
    seconds: Statistics,
    /// In GB/s (1e9).
    algbw: f64,
    busbw: f64,
    /// NCCL's time at this size in this run over this one's.
    ratio: Option<f64>,
    wrong: u64,
}

/// `counterpoint bench group-cast` and `bench group-reduce`.
pub(crate) fn run(
    collective: BenchCollective,
    arguments: &BenchCollectiveArguments,
    line: &CommandLine,
) -> Result<(), CliError> {
    match launch()? {
        None => Ranks::threads(arguments)?.measure_all(collective, arguments),
        Some(launch) => {
            let ranks = arguments.gpus.map_or(launch.world_size, |gpus| gpus as usize);
            as_rank(&launch, line, arguments.limit, |rendezvous| {
                refuse_other_sizes(&launch, "--gpus", ranks)?;
                let (rendezvous, local_rank) = (rendezvous.clone(), launch.local_rank);
                Ranks::Process { rendezvous, local_rank }.measure_all(collective, arguments)
            })
        }
    }
}

/// Where the ranks are.
enum Ranks {
    /// Threads of this process, on so many ranks.
    Threads { machine: CudaMachine, profile: Option<Box<MachineProfile>>, ranks: usize },
    /// One of them is this process.
    Process { rendezvous: Arc<Rendezvous>, local_rank: Option<usize> },
}

/// One transport's times of a case, and what they were taken on.
struct Measured {
    transport: TransportKind,
    device: String,
    times: CollectiveTimes,
}

impl Ranks {
    fn threads(arguments: &BenchCollectiveArguments) -> Result<Self, CliError> {
        let failed = |source| CliError::Cuda { source };
        let gpus = Device::count().map_err(failed)?;
        let ranks = arguments.gpus.map_or(gpus, |gpus| gpus as usize);
        if ranks < 2 {
            return Err(CliError::flag("--gpus", ranks.to_string(), FlagFault::OneGpu));
        }
        let machine = CudaMachine::for_ranks(ranks, Timing::Off).map_err(failed)?;
        let profile = profile::of_machine(None, &machine.devices()[0].properties().name)?;
        Ok(Self::Threads {
            machine: machine.with_num_sms(arguments.num_sms),
            profile: profile.map(Box::new),
            ranks,
        })
    }

    fn count(&self) -> usize {
        match self {
            Self::Threads { ranks, .. } => *ranks,
            Self::Process { rendezvous, .. } => rendezvous.world_size(),
        }
    }

    /// Whether this process prints what was measured.
    fn prints(&self) -> bool {
        match self {
            Self::Threads { .. } => true,
            Self::Process { rendezvous, .. } => rendezvous.rank() == 0,
        }
    }

    fn measure(
        &self,
        transport: TransportKind,
        num_sms: u32,
        case: &CollectiveCase,
    ) -> Result<Measured, CliError> {
        match self {
            Self::Threads { machine, profile, .. } => {
                let machine = machine.clone().with_transport(transport);
                let machine = machine.map_err(|source| CliError::Cuda { source })?;
                let machine = match profile {
                    Some(profile) => machine.with_profile(profile),
                    None => machine,
                };
                let device = machine.devices()[0].properties().name.clone();
                let transport = shown(transport, machine.transport());
                Ok(Measured { transport, device, times: bench_collective(&machine, case).map_err(ended)? })
            }
            Self::Process { rendezvous, local_rank } => {
                let topology = Topology::flat(case.ranks);
                let machine = gpu_of_rank(rendezvous, *local_rank, Timing::Off, transport, topology)?;
                let machine = machine.with_num_sms(num_sms);
                let own = bench_collective(&machine, case).map_err(ended)?;
                let all: Vec<(Vec<f64>, u64)> =
                    gather(rendezvous, "times", &(own.seconds.clone(), own.wrong))?;
                let others = all.into_iter().enumerate().filter(|(rank, _)| *rank != rendezvous.rank());
                let others = others.map(|(_, (seconds, wrong))| CollectiveTimes { seconds, wrong });
                let times = others.fold(own, |all, rank| all.join(&rank));
                let device = machine.device().properties().name.clone();
                let transport = shown(transport, machine.transport());
                Ok(Measured { transport, device, times })
            }
        }
    }

    fn measure_all(
        &self,
        collective: BenchCollective,
        arguments: &BenchCollectiveArguments,
    ) -> Result<(), CliError> {
        let ranks = self.count();
        let mut transports = arguments.transports.clone();
        transports.sort_by_key(|transport| !matches!(transport, TransportKind::Nccl(_)));
        let schema = Schema::BenchGroupCollective;
        // Of several processes one prints; all hear of rows that are wrong.
        let mut shown = Rows::begin(self.prints(), || self.title(collective), schema, arguments.json)?;
        let mut size = arguments.min_bytes;
        while size <= arguments.max_bytes {
            let case = case(collective, arguments, ranks, size);
            let mut nccl = None;
            for &transport in &transports {
                let progress = Progress::new();
                progress.step(format!("{} bytes, {transport}", case.bytes()));
                let measured = self.measure(transport, arguments.num_sms, &case)?;
                drop(progress);
                let Some(row) = row(measured, arguments, &case, nccl) else { continue };
                if matches!(transport, TransportKind::Nccl(_)) {
                    nccl = Some(row.seconds.median);
                }
                shown.add(&row)?;
            }
            size = size.saturating_mul(arguments.step_factor);
        }
        shown.end("", "rows in the wrong place")
    }

    fn title(&self, collective: BenchCollective) -> Result<String, CliError> {
        let name = match collective {
            BenchCollective::GroupCast => "group-cast",
            BenchCollective::GroupReduce => "group-reduce",
        };
        let place = match self {
            Self::Threads { machine, .. } => {
                let device = &machine.devices()[0].properties().name;
                format!("{} ({device})", console::count(machine.devices().len(), "GPU"))
            }
            Self::Process { local_rank, .. } => {
                let device = Device::count().map(|gpus| local_rank.unwrap_or(0) % gpus);
                let device = device.and_then(Device::properties_of);
                format!("a process each ({})", device.map_err(|source| CliError::Cuda { source })?.name)
            }
        };
        let ranks = console::count(self.count(), "rank");
        Ok(format!("{name}, {ranks} on {place}"))
    }
}

/// How a transport is named in a row: `auto` is more than one where ranks reach each other's memory.
fn shown(asked: TransportKind, used: TransportKind) -> TransportKind {
    match (asked, used) {
        (TransportKind::Auto, TransportKind::Nvlink) => asked,
        _ => used,
    }
}

fn case(
    collective: BenchCollective,
    arguments: &BenchCollectiveArguments,
    ranks: usize,
    size: u64,
) -> CollectiveCase {
    let dtype = match (arguments.dtype, collective) {
        (Some(CollectiveDType::F32), _) | (None, BenchCollective::GroupReduce) => DType::F32,
        (Some(CollectiveDType::Bf16), _) | (None, BenchCollective::GroupCast) => DType::Bf16,
        (Some(CollectiveDType::F16), _) => DType::F16,
    };
    let mut case = CollectiveCase {
        collective,
        ranks,
        dtype,
        row_elements: arguments.row_elements,
        rows: 1,
        split_rows: arguments.split_rows,
        warmups: arguments.warmups as usize,
        iterations: arguments.iterations as usize,
        samples: arguments.cycles as usize,
        limit: arguments.limit,
    };
    // As many whole rows as come nearest from below, one at least.
    case.rows = (size / case.bytes()).max(1) as usize;
    case
}

fn row(
    measured: Measured,
    arguments: &BenchCollectiveArguments,
    case: &CollectiveCase,
    nccl: Option<f64>,
) -> Option<CollectiveRow> {
    let Measured { transport, device, times } = measured;
    let seconds = Statistics::of(&times.seconds)?;
    // Everything that a rank sends leaves its GPU, so that the links carry what the operation moves.
    let rate = case.bytes() as f64 / seconds.median / 1e9;
    let (name, redop) = match case.collective {
        BenchCollective::GroupCast => ("group-cast", "none"),
        BenchCollective::GroupReduce => ("group-reduce", "sum"),
    };
    Some(CollectiveRow {
        name,
        transport: transport.to_string(),
        device,
        ranks: case.ranks,
        size: case.bytes(),
        count: case.elements(),
        dtype: dtype_name(case.dtype),
        redop,
        num_sms: arguments.num_sms,
        iterations: arguments.iterations,
        ratio: nccl.map(|nccl| nccl / seconds.median),
        seconds,
        algbw: rate,
        busbw: rate,
        wrong: times.wrong,
    })
}

impl MeasuredRow<12> for CollectiveRow {
    /// As nccl-tests names them.
    const TABLE: [Column; 12] = [
        Column::number_name("size\n(B)").wide(10),
        Column::number("count\n(elements)", 6).wide(10),
        Column::name("type").wide(4),
        Column::name("redop").wide(5),
        Column::name("transport").wide(12),
        Column::number("time\n(us)", 0).wide(9),
        Column::number("min\n(us)", 4).wide(9),
        Column::number("max\n(us)", 5).wide(9),
        Column::number("algbw\n(GB/s)", 3).wide(7),
        Column::number("busbw\n(GB/s)", 1).wide(7),
        Column::number("#wrong", 7).wide(6),
        Column::number("vs nccl", 2).wide(7),
    ];
    const SHOWN_IF_WRONG: bool = true;

    fn cells(&self) -> [String; 12] {
        let Self { size, count, dtype, redop, transport, seconds, algbw, busbw, wrong, ratio, .. } = self;
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        [
            size.to_string(),
            count.to_string(),
            (*dtype).to_owned(),
            (*redop).to_owned(),
            transport.clone(),
            us(seconds.median),
            us(seconds.min),
            us(seconds.max),
            format!("{algbw:.1}"),
            format!("{busbw:.1}"),
            wrong.to_string(),
            ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}x")),
        ]
    }

    fn fault(&self) -> Option<String> {
        let Self { wrong, transport, size, .. } = self;
        (*wrong > 0).then(|| format!("{wrong} elements of {transport} at {size} bytes"))
    }
}
