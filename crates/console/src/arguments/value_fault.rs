//! What is wrong with the value of an argument, and what to give instead.

use counterpoint_choose::ConfigError;
use counterpoint_schedule::PolicyError;
use thiserror::Error;

/// What is wrong with the value of an argument, and what to give instead.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ValueFault {
    /// No size.
    #[error("`{text}` is not a size; give a whole number of at least 1, such as 512, 4k or 1M")]
    Size {
        /// What was given.
        text: String,
    },
    /// A size that nothing has.
    #[error("{text} is too large; sizes stay below 2^32")]
    SizeTooLarge {
        /// What was given.
        text: String,
    },
    /// A size of nothing.
    #[error("it is 0; it must be at least 1")]
    Zero,
    /// No number of bytes.
    #[error("`{text}` is not a number of bytes; give one such as 65536, 64K, 8M or 1G")]
    Bytes {
        /// What was given.
        text: String,
    },
    /// A number of bytes that nothing has.
    #[error("{text} is not between 1 byte and 1024G")]
    BytesOutOfRange {
        /// What was given.
        text: String,
    },
    /// No heads.
    #[error(
        "`{text}` is not a pair of heads; give query and key heads, the first a multiple of the second, such as 64:8"
    )]
    Heads {
        /// What was given.
        text: String,
    },
    /// No sizes of a product.
    #[error("`{text}` is not a product; give m, n and k, such as 8192:8192:3584 or 4k:4k:4k")]
    Product {
        /// What was given.
        text: String,
    },
    /// No number of threads.
    #[error("`{text}` is not a number of threads; it must be between 1 and {most}")]
    Threads {
        /// What was given.
        text: String,
        /// The most threads.
        most: usize,
    },
    /// No number of ranks of a context-parallel group.
    #[error("`{text}` is not a number of ranks; it must be between 1 and {most}")]
    CpSize {
        /// What was given.
        text: String,
        /// The most ranks.
        most: usize,
    },
    /// Too few or too many of them.
    #[error("cp_size is {cp_size}; it must be between 1 and {most}")]
    CpSizeOutOfRange {
        /// How many.
        cp_size: usize,
        /// The most ranks.
        most: usize,
    },
    /// No number of ranks.
    #[error("`{text}` is not a number of ranks; give one from 1 to {most}")]
    Ranks {
        /// What was given.
        text: String,
        /// The most ranks.
        most: usize,
    },
    /// No groups of a layer.
    #[error(
        "`{text}` does not name groups; give auto, a number such as 4, or the rows of each, such as 256+512+256; or groups of \
         columns, such as columns=4 or columns=2048+1024"
    )]
    Groups {
        /// What was given.
        text: String,
    },
    /// No stages.
    #[error(transparent)]
    Stages(#[from] ConfigError),
    /// No seed.
    #[error("`{text}` is not a seed; give a whole number from 0 to {}", u64::MAX)]
    Seed {
        /// What was given.
        text: String,
    },
    /// A factor on scores that leaves the range of `f32`.
    #[error("its magnitude is above {most:e}; give one of at most that, such as 0.125")]
    Factor {
        /// The largest magnitude.
        most: f64,
    },
    /// A cap on scores that leaves the range of `f32`.
    #[error("it is {number:e}; give 0, or a number from {:e} to {most:e}", 1.0 / most)]
    Softcap {
        /// What was given.
        number: f64,
        /// The largest cap.
        most: f64,
    },
    /// No number, or none that is finite.
    #[error("`{text}` is not a finite number; give one such as 0.125")]
    Finite {
        /// What was given.
        text: String,
    },
    /// A number below 0.
    #[error("it is {number}; it must be at least 0")]
    Negative {
        /// What was given.
        number: f64,
    },
    /// A number out of its range.
    #[error("give a number from {least} to {most}")]
    Range {
        /// The least.
        least: f64,
        /// The most.
        most: f64,
    },
    /// No time.
    #[error("`{text}` is not a time; give seconds above 0, such as 30 or 0.5")]
    Seconds {
        /// What was given.
        text: String,
    },
    /// No link.
    #[error(
        "`{text}` is not a link; give ALPHA_US,GB_PER_S, such as 200,0.5 for 200 microseconds a collective and 0.5 GB/s"
    )]
    Link {
        /// What was given.
        text: String,
    },
    /// None of a few names.
    #[error("`{text}` is not one of the names")]
    Name {
        /// What was given.
        text: String,
    },
    /// No overlap policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Several policies where one is run.
    #[error(
        "`{text}` names {policies} policies; give one, or one for each pass: forward=POLICY,backward=POLICY"
    )]
    OnePolicy {
        /// What was given.
        text: String,
        /// How many it names.
        policies: usize,
    },
    /// A policy that no transport runs for attention.
    #[error("{reason}; leave it out, or use another policy")]
    RefusedPolicy {
        /// Why.
        reason: &'static str,
    },
}
