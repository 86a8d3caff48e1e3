//! `counterpoint selftest --device …`.

use std::time::Instant;

use counterpoint_exec::selftest::{CpuSubject, Extent, selftest_attention};

use super::ledger::Ledger;
use crate::arguments::{Device, SelftestArguments};
use crate::error::CliError;
use crate::{console, device};

/// Runs every check that the device has. The CPU is always examined, briefly where a GPU is what was asked for.
pub(super) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    let extent = if arguments.quick { Extent::Quick } else { Extent::Full };
    let began = Instant::now();
    let mut ledger = Ledger::new(arguments.json);
    let device = match arguments.device {
        Device::Cpu => {
            examine_cpu(extent, &mut ledger)?;
            device::cpu_name()
        }
        Device::Cuda => return Err(CliError::NoCuda),
    };
    let document = ledger.finish(device, began.elapsed());
    if arguments.json {
        console::print_json(&document)?;
    } else {
        console::print(&document.last_line())?;
    }
    document.verdict()
}

fn examine_cpu(extent: Extent, ledger: &mut Ledger) -> Result<(), CliError> {
    ledger.section("cpu");
    let checks = selftest_attention(&CpuSubject, extent, |check, cases| ledger.hear(check, cases));
    ledger.add(checks)
}
