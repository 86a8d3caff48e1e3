//! What is wrong with a command line, and what to give instead.

use counterpoint_choose::StepError;
use counterpoint_measure::MeasureError;
use thiserror::Error;

/// What is wrong with a command line, and what to give instead.
#[derive(Debug, Error)]
pub enum UsageFault {
    /// The parser of arguments refuses it.
    #[error("{text}; see --help for examples")]
    Parser {
        /// The parser's own words, on one line.
        text: String,
    },
    /// A flag that the CPU has not.
    #[error("{flag} is for GPUs; add --device cuda")]
    ForGpus {
        /// The flag.
        flag: &'static str,
    },
    /// Kernels that the CPU has not.
    #[error("bench gemm times the kernels of GPUs; add --device cuda")]
    KernelsOfGpus,
    /// Grouped products of kernels that have none.
    #[error("--kernels portable has no grouped products; leave it or --experts out")]
    NoPortableExperts,
    /// A number of experts that is not known.
    #[error("--experts needs a number with --shapes, such as --experts=8")]
    ExpertsWithoutNumber,
    /// Experts, and no rows to divide.
    #[error("--experts with numbers divides the rows of --shapes; name some, or leave the numbers out")]
    ExpertsWithoutShapes,
    /// Fewer rows than experts need.
    #[error("{rows} rows are too few for {experts} experts; give each at least two")]
    FewRows {
        /// Rows of all experts.
        rows: usize,
        /// Experts.
        experts: usize,
    },
    /// No folder for a machine profile.
    #[error("there is no home folder to keep the profile in; name a file with --output")]
    NoProfileFolder,
    /// No folder for tuned plans.
    #[error("there is no folder to keep tuned plans in (no HOME); name a file by --plans")]
    NoPlansFolder,
    /// Processes, where ranks of one process are timed.
    #[error("ranks that are processes are not timed by this command; start it without a launcher")]
    OnlyThreads,
    /// Processes that nobody started.
    #[error("ranks that are processes are started by a launcher, each for itself")]
    NoLauncher,
    /// A pass that has nothing to overlap.
    #[error("nothing travels in this pass")]
    NothingTravels,
    /// A command of a command that has none.
    #[error("{command} has no commands, and `{word}` was given")]
    NoCommands {
        /// The command.
        command: String,
        /// What was given.
        word: String,
    },
    /// No command.
    #[error("`{word}` is not a command of {command}; it has {}", known.join(", "))]
    NoCommand {
        /// What was given.
        word: String,
        /// The command that was to have it.
        command: String,
        /// Those that it has.
        known: Vec<String>,
    },
    /// Ranks that make no step of training.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A time that cannot be measured.
    #[error(transparent)]
    Measure(#[from] MeasureError),
}
