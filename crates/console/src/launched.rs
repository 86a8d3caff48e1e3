//! A command in a process that a launcher started as one of several ranks.

use std::sync::Arc;
use std::time::Duration;

use counterpoint_cuda::{CudaError, CudaProcess, Device, Timing, TransportKind, compiler_version};
use counterpoint_exec::{ExecError, Facet, Launch, Rendezvous, RendezvousError};
use counterpoint_plan::Topology;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::FlagFault;
use crate::command_line::CommandLine;
use crate::digest::digest;
use crate::error::CliError;
use crate::given;

/// What started this process, if it is one of several.
pub fn launch() -> Result<Option<Launch>, CliError> {
    Launch::from_environment().map_err(|error| ended(error.into()))
}

/// Joins the other processes, which must have been started with the same command line, for `work`. Whatever ends it ends the others
/// too.
pub fn as_rank(
    launch: &Launch,
    line: &CommandLine,
    limit: Duration,
    work: impl FnOnce(&Arc<Rendezvous>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let rendezvous = Rendezvous::join_launched(launch, &given::facets(line), limit).map_err(ended)?;
    let _leaving = rendezvous.leaving_at_the_end();
    let result = work(&rendezvous);
    match &result {
        // A check that fails is a result: the others have done their part.
        Ok(()) | Err(CliError::CheckFailed { .. } | CliError::Run { .. }) => {}
        Err(error) => {
            let error = error.to_string();
            rendezvous.fail(RendezvousError::RankFailed { rank: launch.rank, error }.into());
        }
    }
    result
}

/// Refuses a number of ranks that is not that of the processes.
pub fn refuse_other_sizes(launch: &Launch, flag: &'static str, ranks: usize) -> Result<(), CliError> {
    let processes = launch.world_size;
    if ranks == processes {
        return Ok(());
    }
    let fault = FlagFault::Processes { launcher: launch.launcher.to_string(), processes };
    Err(CliError::flag(flag, ranks.to_string(), fault))
}

/// The error of a command that times GPUs of one process alone.
pub fn gpus_as_threads() -> CliError {
    CliError::flag("--device", "cuda", FlagFault::ThreadsAlone)
}

/// An error of a run.
pub fn ended(source: ExecError) -> CliError {
    CliError::Run { source }
}

/// The GPU of this process's rank. Where it fails all ranks are notified; a machine that has none says what it lacks.
pub fn gpu_of_rank(
    rendezvous: &Arc<Rendezvous>,
    local_rank: Option<usize>,
    timing: Timing,
    transport: TransportKind,
    topology: Topology,
) -> Result<CudaProcess, CliError> {
    let lacks = || compiler_version().and_then(|_| Device::count()).err().filter(CudaError::is_missing);
    CudaProcess::new(rendezvous, local_rank, timing, transport, topology)
        .map_err(|error| lacks().map_or_else(|| ended(error), |source| CliError::Cuda { source }))
}

/// Every rank's value, in the order of ranks.
pub fn gather<T: Serialize + DeserializeOwned>(
    rendezvous: &Rendezvous,
    place: &str,
    own: &T,
) -> Result<Vec<T>, CliError> {
    rendezvous.gather(place, own).map_err(ended)
}

/// Compares a text that decides what is computed.
pub fn agree(rendezvous: &Rendezvous, what: &str, text: &str) -> Result<(), CliError> {
    rendezvous.agree(what, &[Facet::new(what, digest(text.as_bytes()))]).map_err(ended)
}
