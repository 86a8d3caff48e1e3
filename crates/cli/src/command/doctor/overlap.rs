//! `counterpoint doctor --overlap`: which of a communication and the computation that should hide it starts first.

use std::fmt::Write;
use std::process::Command;

use counterpoint_bench::gpu::count_starts;
use counterpoint_console::{self as console, CliError, Progress, Schema};
use counterpoint_cuda::{CudaError, Device};
use counterpoint_report::{Column, table};
use serde::{Deserialize, Serialize};

use crate::arguments::DoctorArguments;

/// What was counted with so many hardware queues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Row {
    device: String,
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
        vec![count(arguments).map_err(|source| CliError::Cuda { source })?]
    } else {
        // What the machine lacks is said by this process.
        Device::open(0).map_err(|source| CliError::Cuda { source })?;
        let each = arguments.connections.iter().map(|&connections| {
            progress
                .step(format!("{} of the driver", console::count(connections as usize, "hardware queue")));
            in_child(arguments, connections)
        });
        each.collect::<Result<Vec<_>, _>>()?
    };
    drop(progress);
    if arguments.json {
        rows.iter().try_for_each(|row| console::print_json(Schema::DoctorOverlap, row))?;
    } else {
        console::print(&describe(&rows))?;
    }
    let late = rows.iter().filter(|row| row.kernel_barrier < row.rounds);
    let late: Vec<String> =
        late.map(|row| format!("{} of {} rounds", row.rounds - row.kernel_barrier, row.rounds)).collect();
    if late.is_empty() {
        return Ok(());
    }
    Err(CliError::CheckFailed {
        what: format!(
            "computation started before communication in spite of a kernel barrier: {}",
            late.join("; ")
        ),
    })
}

fn count(arguments: &DoctorArguments) -> Result<Row, CudaError> {
    let device = Device::open(0)?;
    Ok(Row {
        device: device.properties().name.clone(),
        connections: std::env::var(CONNECTIONS).ok().and_then(|text| text.parse().ok()),
        rounds: arguments.rounds,
        concurrent: count_starts(&device, arguments.rounds, false)?.communication_first,
        kernel_barrier: count_starts(&device, arguments.rounds, true)?.communication_first,
    })
}

/// The driver's own variable.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

fn in_child(arguments: &DoctorArguments, connections: u32) -> Result<Row, CliError> {
    let failed = |reason: String| CliError::CheckFailed {
        what: format!("the process with {connections} connections: {reason}"),
    };
    let program = counterpoint_console::program::file().map_err(|error| failed(error.to_string()))?;
    let mut child = Command::new(program);
    child.args(["doctor", "--overlap", "--here", "--json", "--rounds", &arguments.rounds.to_string()]);
    let output = child.env(CONNECTIONS, connections.to_string()).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    // A proof that failed has its row too.
    serde_json::from_slice(&output.stdout)
        .map_err(|_| failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

fn describe(rows: &[Row]) -> String {
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
        Column::number("by itself", 0),
        Column::number("with kernel-barrier", 0),
    ];
    let lines = rows.iter().map(|row| {
        let queues = row.connections.map_or("default".to_owned(), |connections| connections.to_string());
        vec![queues, row.concurrent.to_string(), row.kernel_barrier.to_string()]
    });
    text.push_str(&table(&columns, lines, &console::style()));
    text
}
