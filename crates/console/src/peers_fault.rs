//! Why there is nothing to compare a measurement with.

use std::io;

use counterpoint_files::NoProgram;
use thiserror::Error;

/// Why there is nothing to compare a measurement with.
#[derive(Debug, Error)]
pub enum PeersFault {
    /// Masks that the peers have not.
    #[error("the peers have full and causal masks only; ask for one of them")]
    FullAndCausal,
    /// Masks of which the peers have none.
    #[error("the peers have none of these masks; ask for another")]
    NoMask,
    /// A pass that the peers have not.
    #[error("the peers have no deterministic backward; ask for another pass")]
    NoDeterministicBackward,
    /// Grouped products of an element type that the peers have not.
    #[error("the peers have grouped products of bf16 alone; leave --dtype out")]
    Bf16Alone,
    /// Ranks on the CPU.
    #[error("the peers are for GPUs; add --device cuda")]
    ForGpus,
    /// There is no Python.
    #[error(transparent)]
    NoPython(#[from] NoProgram),
    /// Python does not start.
    #[error("python3 cannot be started ({0})")]
    NoStart(io::Error),
    /// Python has no standard input and output.
    #[error("python3 has no pipes to talk through")]
    NoPipes,
    /// Python cannot be waited for.
    #[error("python3 cannot be waited for ({0})")]
    NoStatus(io::Error),
    /// PyTorch is missing, or sees no GPU.
    #[error("python3 has no PyTorch that sees a GPU")]
    NoGpu,
    /// PyTorch sees too few GPUs.
    #[error("python3 has no PyTorch that sees {gpus} GPUs")]
    FewGpus {
        /// How many are needed.
        gpus: usize,
    },
    /// The processes cannot find each other.
    #[error("no free port ({0})")]
    NoPort(io::Error),
    /// There is no place for the script.
    #[error("its script cannot be written to a temporary folder ({0}; TMPDIR says where)")]
    NoFolder(io::Error),
}
