//! Why a command ends without its result, and the exit status of that.

use std::io;
use std::path::PathBuf;

use counterpoint_choose::ChooseError;
use counterpoint_plan::{LinearField, PlanError};
use safetensors::SafeTensorError;
use thiserror::Error;

use crate::input_fault::{FileFault, InputFault};
use crate::{CheckFault, FlagFault, PeersFault, UsageFault};

/// Why the program ends without its result. The message is one sentence that says how to mend it;
/// [`CliError::exit_status`] is what scripts see.
#[derive(Debug, Error)]
pub enum CliError {
    /// The command line itself.
    #[error("{reason}")]
    Usage {
        /// What is wrong and what to give.
        reason: Box<UsageFault>,
    },
    /// Two flags, or a flag and the mask, disagree.
    #[error("{flag} {value} {reason}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What it disagrees with and what to do.
        reason: Box<FlagFault>,
    },
    /// A file cannot be read.
    #[error("{what} {} cannot be read: {source}", path.display())]
    Unreadable {
        /// What it was to be, such as `mask file`.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why.
        source: counterpoint_files::ReadError,
    },
    /// A file that nobody named, or its folder, is not trusted.
    #[error("{what} {} is not used: {source}; or name the file that is to be taken", path.display())]
    Distrusted {
        /// What it is, such as `file of tuned plans`.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why.
        source: counterpoint_files::DistrustError,
    },
    /// A file does not hold a profile that can be used.
    #[error("machine profile {}: {source}", path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<counterpoint_cost::ProfileError>,
    },
    /// A file does not hold a mask.
    #[error("{}: {source}", path.display())]
    MaskFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: counterpoint_mask::MaskError,
    },
    /// An expression is not one of a mask.
    #[error("mask {expression}: {source}")]
    MaskExpression {
        /// The expression.
        expression: String,
        /// What is wrong.
        source: counterpoint_mask::MaskError,
    },
    /// The mask argument has no characters.
    #[error("the mask is empty; give a JSON file or an expression such as causal:4k")]
    NoMask,
    /// A file that memory cannot hold.
    #[error("{} holds {} of tensors, but only {} of memory are available; use a machine with more, or shorter sequences",
        path.display(), counterpoint_report::format_bytes(*bytes), counterpoint_report::format_bytes(*available))]
    InputTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// What is there.
        available: u64,
    },
    /// A file that is not safetensors, or not whole.
    #[error("{} is not a whole safetensors file: {reason}; write it again", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: Box<FileFault>,
    },
    /// A tensor is not there.
    #[error("{} has no tensor `{name}`{why}; it has {found}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// Which.
        name: &'static str,
        /// Who asks for it, where that is a flag.
        why: &'static str,
        /// Names that are there.
        found: String,
    },
    /// A tensor that nobody reads.
    #[error("{} has a tensor `{name}` that attention does not take; remove it (it takes q, k, v, sink and dout)", path.display())]
    ExtraTensor {
        /// The file.
        path: PathBuf,
        /// Which.
        name: String,
    },
    /// A tensor is not of the shape or type that it must have.
    #[error("{}: tensor `{name}` {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Which.
        name: &'static str,
        /// What it is, what it must be.
        reason: Box<InputFault>,
    },
    /// Query heads are not a multiple of key heads.
    #[error(
        "{whence}: {heads_q} query heads do not divide among {heads_kv} key heads; the first must be a multiple of the second"
    )]
    Heads {
        /// The file or the flags that say so.
        whence: String,
        /// Query heads.
        heads_q: usize,
        /// Key and value heads.
        heads_kv: usize,
    },
    /// A NaN or an infinity.
    #[error(
        "{}: tensor `{name}` holds {value} at {index:?}, the first of its kind; mend the input, or pass --allow-non-finite",
        path.display()
    )]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// Which.
        name: &'static str,
        /// NaN, inf or -inf.
        value: f64,
        /// Where.
        index: Vec<usize>,
    },
    /// Memory for something cannot be had.
    #[error("{what} takes {}, but only {} of memory are available; {instead}",
        counterpoint_report::format_bytes(*needed), counterpoint_report::format_bytes(*available))]
    OutOfMemory {
        /// What.
        what: &'static str,
        /// Bytes.
        needed: u64,
        /// Bytes.
        available: u64,
        /// What to do.
        instead: &'static str,
    },
    /// The results cannot be put into a file's format.
    #[error(
        "--output: the results cannot be stored as safetensors ({source}); this is a bug in counterpoint, please report it"
    )]
    Unstorable {
        /// The library's words.
        source: Box<SafeTensorError>,
    },
    /// An output file cannot be written.
    #[error("{flag}: {source}")]
    Output {
        /// The flag.
        flag: &'static str,
        /// What is wrong.
        source: counterpoint_files::WriteError,
    },
    /// An output would take the place of a file that is read.
    #[error(
        "{flag} {} is the same file as the {what} {}, which this command reads; give another path",
        path.display(), input.display()
    )]
    InputReplaced {
        /// The output's flag.
        flag: &'static str,
        /// Its path.
        path: PathBuf,
        /// What is read, such as `mask file`.
        what: &'static str,
        /// By which path.
        input: PathBuf,
    },
    /// A variable names no absolute path.
    #[error("{source}")]
    RelativeFolder {
        /// Which, and its value.
        source: counterpoint_files::RelativeFolder,
    },
    /// Other processes keep the file from being changed.
    #[error("{flag}: {source}")]
    Locked {
        /// The flag that names the file.
        flag: &'static str,
        /// Who holds it.
        source: counterpoint_files::LockError,
    },
    /// Two outputs are one file.
    #[error("{first} and {second} name the same file {}; give each its own", path.display())]
    SameFile {
        /// A flag.
        first: &'static str,
        /// Another.
        second: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Standard output is gone.
    #[error("cannot write to standard output: {source}")]
    Stdout {
        /// The system's words.
        source: io::Error,
    },
    /// What a measurement is to be compared with is not here.
    #[error(
        "--peers: {reason}; leave --peers away, or give this machine a python3 with PyTorch (pip install torch)"
    )]
    NoPeers {
        /// What is missing.
        reason: Box<PeersFault>,
    },
    /// The machine lacks a GPU or what it takes to use one, or the GPU failed.
    #[error("{source}")]
    Cuda {
        /// Why.
        source: counterpoint_cuda::CudaError,
    },
    /// A file of tuned plans cannot be used.
    #[error("tuned plans {}: {source}", path.display())]
    Tuned {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<counterpoint_choose::TuningError>,
    },
    /// A plan cannot be made.
    #[error("{source}")]
    Plan {
        /// Why.
        source: ChooseError,
    },
    /// The Programs of a plan do not fit each other, which is a bug of ours.
    #[error("the plan cannot be simulated ({source}); this is a bug in counterpoint, please report it")]
    Predict {
        /// Why.
        source: counterpoint_schedule::SimulateError,
    },
    /// The system gives no threads.
    #[error("cannot start {threads} threads: {reason}; raise the limit on threads (ulimit -u)")]
    Threads {
        /// How many.
        threads: usize,
        /// The system's words.
        reason: String,
    },
    /// A run ended without a result.
    #[error("{source}")]
    Run {
        /// Why.
        source: counterpoint_exec::ExecError,
    },
    /// It ran, and what came out is wrong.
    #[error("{reason}")]
    CheckFailed {
        /// What is wrong.
        reason: Box<CheckFault>,
    },
}

impl CliError {
    /// What a flag's value disagrees with.
    pub fn flag(flag: &'static str, value: impl Into<String>, fault: impl Into<FlagFault>) -> Self {
        Self::Flag { flag, value: value.into(), reason: Box::new(fault.into()) }
    }

    /// What is wrong with the command line.
    pub fn usage(fault: impl Into<UsageFault>) -> Self {
        Self::Usage { reason: Box::new(fault.into()) }
    }

    /// What came out wrong.
    pub fn check(fault: impl Into<CheckFault>) -> Self {
        Self::CheckFailed { reason: Box::new(fault.into()) }
    }

    /// Why a measurement cannot be compared with its peers.
    pub fn no_peers(fault: impl Into<PeersFault>) -> Self {
        Self::NoPeers { reason: Box::new(fault.into()) }
    }

    /// Why nothing could be chosen, or planned.
    pub fn of_choice(error: impl Into<ChooseError>) -> Self {
        match error.into() {
            ChooseError::Simulate(source) => Self::Predict { source },
            source => Self::Plan { source },
        }
    }

    /// Why a linear layer cannot be planned; its sizes came from these flags.
    pub fn of_layer(source: PlanError, flags: &[(LinearField, &'static str)]) -> Self {
        let PlanError::Linear { field, value, wanted } = source else {
            return Self::of_choice(source);
        };
        match flags.iter().find(|(of, _)| *of == field) {
            Some(&(_, flag)) => Self::flag(flag, value.to_string(), FlagFault::Layer(wanted)),
            None => Self::of_choice(source),
        }
    }

    /// 1: it ran and a check or the run failed; 2: bad usage or input; 3: the machine lacks what was asked for.
    pub fn exit_status(&self) -> u8 {
        use counterpoint_exec::{ExecError, RendezvousError};
        match self {
            Self::CheckFailed { .. }
            | Self::Predict { .. }
            | Self::Unstorable { .. }
            | Self::Stdout { .. } => 1,
            Self::Run {
                source:
                    ExecError::Tensor { .. }
                    | ExecError::OutOfMemory { .. }
                    | ExecError::Policy { .. }
                    | ExecError::Rendezvous(
                        RendezvousError::Variable { .. }
                        | RendezvousError::OtherVersion { .. }
                        | RendezvousError::AnotherJob { .. }
                        | RendezvousError::Disagreement { .. },
                    ),
            } => 2,
            Self::Cuda { source } if source.is_missing() => 3,
            Self::Cuda { .. } => 1,
            Self::NoPeers { .. }
            | Self::Threads { .. }
            | Self::Run {
                source: ExecError::Thread { .. } | ExecError::Rendezvous(RendezvousError::Descriptors { .. }),
            } => 3,
            Self::Run { .. } => 1,
            _ => 2,
        }
    }
}
