//! `counterpoint doctor --overlap`: which of a communication and the computation that should hide it starts first.

use std::fmt::Write;
use std::process::Command;

use counterpoint_bench::gpu::{count_starts, count_transport_starts, counted_transports};
use counterpoint_console::{
    self as console, CheckFault, ChildFault, CliError, EarlyStarts, Progress, Schema,
};
use counterpoint_cuda::{CudaMachine, Device, Timing, TransportKind, nccl_version};
use counterpoint_report::{Column, table};
use serde::{Deserialize, Serialize};

use crate::arguments::DoctorArguments;

/// What was counted with so many hardware queues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StartsRow {
    device: String,
    /// What moves the rows; `None` where kernels imitate a transport's.
    transport: Option<String>,
    /// `None` where the driver was left to its default.
    connections: Option<u32>,
    rounds: u32,
    /// Rounds in which communication started first, with nothing to make it.
    concurrent: u32,
    /// Likewise with a kernel barrier.
    kernel_barrier: u32,
}

/// Proves it for each number of queues, which the driver reads when a process starts, and so in processes of their own.
pub(super) fn run(arguments: &DoctorArguments) -> Result<(), CliError> {
    let progress = Progress::new();
    let rows = if arguments.here {
        count(arguments)?
    } else {
        // What the machine lacks is said by this process.
        Device::open(0).map_err(|source| CliError::Cuda { source })?;
        let each = arguments.connections.iter().map(|&connections| {
            progress
                .step(format!("{} of the driver", console::count(connections as usize, "hardware queue")));
            in_child(arguments, connections)
        });
        each.collect::<Result<Vec<_>, _>>()?.concat()
    };
    drop(progress);
    if arguments.json {
        rows.iter().try_for_each(|row| console::print_json(Schema::DoctorOverlap, row))?;
    } else {
        console::print(&describe(&rows))?;
    }
    let early = rows.iter().filter(|row| row.kernel_barrier < row.rounds);
    let starts: Vec<EarlyStarts> = early
        .map(|row| EarlyStarts {
            early: row.rounds - row.kernel_barrier,
            rounds: row.rounds,
            transport: row.transport().to_owned(),
            queues: row.queues(),
        })
        .collect();
    match starts.is_empty() {
        true => Ok(()),
        false => Err(CliError::check(CheckFault::EarlyStarts { starts })),
    }
}

/// Kernels that imitate a transport's on the first GPU, and every transport between all GPUs.
fn count(arguments: &DoctorArguments) -> Result<Vec<StartsRow>, CliError> {
    let rounds = arguments.rounds;
    let cuda = |source| CliError::Cuda { source };
    let device = Device::open(0).map_err(cuda)?;
    let imitated = |barrier| count_starts(&device, rounds, barrier).map_err(cuda);
    let row = |transport: Option<String>, [concurrent, kernel_barrier]: [u32; 2]| StartsRow {
        device: device.properties().name.clone(),
        transport,
        connections: std::env::var(CONNECTIONS).ok().and_then(|text| text.parse().ok()),
        rounds,
        concurrent,
        kernel_barrier,
    };
    let first = [imitated(false)?.communication_first, imitated(true)?.communication_first];
    let mut rows = vec![row(None, first)];
    let gpus = Device::count().map_err(cuda)?;
    let machine = CudaMachine::for_ranks(gpus, Timing::Spans).map_err(cuda)?;
    for &kind in counted_transports(gpus) {
        // A transport that there is not is no error: it is not counted.
        let Ok(machine) = machine.clone().with_transport(kind) else { continue };
        if kind == TransportKind::NCCL && nccl_version().is_err() {
            continue;
        }
        let counted = |barrier| -> Result<u32, CliError> {
            let count = count_transport_starts(&machine, rounds, barrier);
            count.map(|count| count.communication_first).map_err(|source| CliError::Run { source })
        };
        rows.push(row(Some(kind.name().to_owned()), [counted(false)?, counted(true)?]));
    }
    Ok(rows)
}

impl StartsRow {
    fn transport(&self) -> &str {
        self.transport.as_deref().unwrap_or("imitated")
    }

    fn queues(&self) -> String {
        self.connections.map_or("default".to_owned(), |connections| connections.to_string())
    }
}

/// The driver's own variable.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

fn in_child(arguments: &DoctorArguments, connections: u32) -> Result<Vec<StartsRow>, CliError> {
    let failed = |reason: ChildFault| CliError::check(CheckFault::Child { connections, reason });
    let program = counterpoint_console::program::file().map_err(|error| failed(error.into()))?;
    let mut child = Command::new(program);
    child.args(["doctor", "--overlap", "--here", "--json", "--rounds", &arguments.rounds.to_string()]);
    let output = child.env(CONNECTIONS, connections.to_string()).output();
    let output = output.map_err(|error| failed(error.into()))?;
    // A proof that failed has its rows too.
    let rows: Result<Vec<StartsRow>, _> =
        serde_json::Deserializer::from_slice(&output.stdout).into_iter().collect();
    rows.ok().filter(|rows| !rows.is_empty()).ok_or_else(|| {
        failed(ChildFault::Said { text: String::from_utf8_lossy(&output.stderr).trim().to_owned() })
    })
}

fn describe(rows: &[StartsRow]) -> String {
    let mut text = String::new();
    if let Some(row) = rows.first() {
        let _ = writeln!(
            text,
            "{}: rounds of {} in which communication started before the computation that should hide it",
            row.device, row.rounds
        );
    }
    let columns = [
        Column::number_name("connections"),
        Column::name("transport"),
        Column::number("by itself", 0),
        Column::number("with kernel-barrier", 0),
    ];
    let lines = rows.iter().map(|row| {
        vec![
            row.queues(),
            row.transport().to_owned(),
            row.concurrent.to_string(),
            row.kernel_barrier.to_string(),
        ]
    });
    text.push_str(&table(&columns, lines, &console::style()));
    text
}
