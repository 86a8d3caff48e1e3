//! Attention of one CPU rank that a launcher started: through MPI where that was built in and started it, else through TCP.

use std::sync::Arc;

use super::{AttentionInputs, RankProblem, RanksRun, RunConfig, run_attention_ranks};
#[cfg(feature = "mpi")]
use crate::MpiMachine;
use crate::{ExecError, Launcher, Rendezvous, TcpMachine};

/// As [`run_attention_ranks`], of this process's one rank on a CPU. The policy's SM margin leaves that many of its cores free.
///
/// # Errors
/// As [`run_attention_ranks`]; [`ExecError::Thread`] when the system gives no threads; [`ExecError::Device`] when MPI does not start.
pub fn run_attention_process(
    launcher: Launcher,
    rendezvous: Arc<Rendezvous>,
    problem: &RankProblem<'_>,
    config: &RunConfig,
    inputs: AttentionInputs,
) -> Result<RanksRun, ExecError> {
    let (margin, link) = (config.policy.sm_margin(), config.slow_link);
    match launcher {
        #[cfg(feature = "mpi")]
        Launcher::OpenMpi | Launcher::Pmi => {
            let machine = MpiMachine::new(rendezvous, margin, link)?;
            run_attention_ranks(&machine, problem, config, vec![inputs])
        }
        _ => {
            let machine = TcpMachine::new(rendezvous, margin, link)?;
            run_attention_ranks(&machine, problem, config, vec![inputs])
        }
    }
}
