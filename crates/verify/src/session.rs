//! The whole of a selftest, whose parts are processes.

use std::time::Instant;

use counterpoint_console::{
    self as console, CheckFault, CliError, FlagFault, Schema, TemporaryFolder, arguments::Device as Examinee,
    device,
};
use counterpoint_cuda::{Arch, CudaError, Device, compiler_version};
use counterpoint_reference::selftest::{Extent, SelfCheck, Share};

use super::crew;
use super::ledger::{Detail, GroupChecks, Ledger};
use super::part::{Machine, Part, hostile_parts, keep, parts, stress_parts};
use crate::arguments::SelftestArguments;
use crate::group::Group;

/// Bytes of a GPU's memory that may be less after all processes: what the driver itself keeps.
const KEPT: usize = 64 << 20;

/// Runs the checks that the device has.
pub(super) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    let extent = if arguments.quick { Extent::Quick } else { Extent::Full };
    let began = Instant::now();
    let failed = |source| CliError::Cuda { source };
    let (machine, name) = match arguments.device {
        Examinee::Cpu => (Machine::new(0, false), device::cpu_name()),
        // First, so that a machine without a GPU or a compiler says so at once.
        Examinee::Cuda => gpus().map_err(failed)?,
    };
    let parts = chosen(arguments, machine, extent)?;
    let memory = Memory::before(&parts, machine.gpus).map_err(failed)?;
    let folder =
        TemporaryFolder::new().map_err(|source| CliError::check(CheckFault::NoTemporaryFolder { source }))?;
    let mut ledger = Ledger::new(Detail::of(arguments));
    crew::examine(parts, machine.gpus, arguments, folder.path(), began, &mut ledger)?;
    if let Some(memory) = memory {
        let at = began.elapsed();
        let checks = memory.after().map_err(failed)?;
        let group = GroupChecks::of(Group::ProcessBitsAfter, at, began.elapsed() - at, checks);
        console::print(&ledger.add(Share::ALL, vec![group]))?;
    }
    let document = ledger.finish(name, began.elapsed());
    if arguments.json {
        console::print_json(Schema::Selftest, &document)?;
    } else {
        console::print(&document.table())?;
        console::print(&document.last_line())?;
    }
    document.verdict()
}

/// What is examined, which is something.
fn chosen(arguments: &SelftestArguments, machine: Machine, extent: Extent) -> Result<Vec<Part>, CliError> {
    let all = match (arguments.stress, arguments.device) {
        (true, Examinee::Cuda) => stress_parts(machine),
        (true, Examinee::Cpu) => {
            return Err(CliError::flag("--stress", "with --device cpu", FlagFault::NothingToCall));
        }
        (false, _) if arguments.hostile => hostile_parts(),
        (false, device) => parts(device, machine, extent),
    };
    let Some(only) = &arguments.only else { return Ok(all) };
    let mut groups: Vec<Group> = all.iter().flat_map(|part| part.groups.iter().copied()).collect();
    let parts = keep(all, |group| group.name().contains(only.as_str()));
    if parts.is_empty() {
        groups.sort();
        groups.dedup();
        let groups: Vec<&str> = groups.into_iter().map(Group::name).collect();
        return Err(CliError::flag("--only", only.clone(), FlagFault::NoGroup { groups }));
    }
    Ok(parts)
}

/// The GPUs, without a context on any, and the name of the first.
fn gpus() -> Result<(Machine, String), CudaError> {
    let count = Device::count()?;
    compiler_version()?;
    let first = Device::properties_of(0)?;
    Ok((Machine::new(count, Arch::of(first.capability).is_hopper()), first.name))
}

/// What GPUs had before processes came and, some of them, were killed.
struct Memory(Vec<(Device, usize)>);

impl Memory {
    /// `None` where no process will be.
    fn before(parts: &[Part], gpus: usize) -> Result<Option<Self>, CudaError> {
        if !parts.iter().any(|part| part.groups.contains(&Group::ProcessBitsAfter)) {
            return Ok(None);
        }
        let free = |gpu| {
            let device = Device::open(gpu)?;
            let free = device.memory()?.free;
            Ok((device, free))
        };
        Ok(Some(Self((0..gpus).map(free).collect::<Result<_, CudaError>>()?)))
    }

    fn after(&self) -> Result<Vec<SelfCheck>, CudaError> {
        let check = |(device, before): &(Device, usize)| {
            let name = format!("bytes of GPU {} that are gone after all that", device.ordinal());
            let gone = before.saturating_sub(device.memory()?.free);
            Ok(SelfCheck::of(name, 0, gone as f64, KEPT as f64))
        };
        self.0.iter().map(check).collect()
    }
}
