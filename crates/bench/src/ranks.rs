//! The ranks that layers are measured on: threads here, or this process as one of several, on GPUs or on CPUs.

use std::sync::Arc;

use counterpoint_choose::TunedPlace;
use counterpoint_console::{CliError, device::cpu_name, launched::agree, rank_machine::RankMachine, tuned};
use counterpoint_exec::{Rendezvous, SlowLink, TcpMachine};
use counterpoint_measure::Processes;

/// The ranks that layers are measured on.
pub(crate) enum BenchRanks {
    /// Threads of this process, or this process as one of several that have a GPU each.
    Machine(RankMachine),
    /// CPU ranks that are processes, of which this is one.
    CpuProcess(Arc<Rendezvous>, TcpMachine),
}

impl BenchRanks {
    /// Whether this process has the results and the file of tuned plans, and prints.
    pub(crate) fn prints(&self) -> bool {
        match self {
            Self::Machine(machine) => machine.prints(),
            Self::CpuProcess(rendezvous, _) => rendezvous.rank() == 0,
        }
    }

    /// As many as were asked for, as there are GPUs, or two; as there are processes.
    pub(crate) fn count(&self, asked: Option<usize>) -> usize {
        match self {
            Self::Machine(machine) => asked.unwrap_or(machine.gpus().max(2)),
            Self::CpuProcess(rendezvous, _) => rendezvous.world_size(),
        }
    }

    /// The name of the device, of the first of several.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Machine(machine) => machine.name().to_owned(),
            Self::CpuProcess(..) => cpu_name(),
        }
    }

    /// Where plans of their layers are tuned and used.
    pub(crate) fn tuned_place(&self, slow_link: Option<SlowLink>) -> TunedPlace {
        match self {
            Self::Machine(machine) => machine.tuned_place(slow_link),
            Self::CpuProcess(..) => tuned::place_of_processes(slow_link),
        }
    }

    /// Compares a text that decides what is computed, where ranks are processes.
    pub(crate) fn agree(&self, what: &str, text: &str) -> Result<(), CliError> {
        match self {
            Self::Machine(machine) => machine.agree(what, text),
            Self::CpuProcess(rendezvous, _) => agree(rendezvous, what, text),
        }
    }

    /// Where they are.
    pub(crate) fn processes(&self) -> Processes<'_> {
        match self {
            Self::Machine(RankMachine::Cpu(_) | RankMachine::Cuda(_)) => Processes::One,
            Self::Machine(RankMachine::Process(process)) => Processes::Each(process.rendezvous()),
            Self::CpuProcess(rendezvous, _) => Processes::Each(rendezvous),
        }
    }
}
