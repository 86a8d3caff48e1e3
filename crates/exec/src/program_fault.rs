//! Why a Program cannot run.

use counterpoint_plan::DType;
use counterpoint_schedule::ProgramError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a Program cannot run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum ProgramFault {
    /// It is not well formed.
    #[error(transparent)]
    Invalid(Box<ProgramError>),
    /// It is another rank's.
    #[error("it is for rank {rank} of {ranks}, and this is rank {own_rank} of {own_ranks}")]
    OtherRank {
        /// Its rank.
        rank: usize,
        /// Ranks that it is for.
        ranks: usize,
        /// The rank that was to run it.
        own_rank: usize,
        /// Ranks of that one's group.
        own_ranks: usize,
    },
    /// The plan that it is lowered from is for other ranks.
    #[error("the plan is for {plan} ranks, and the group has {group}")]
    OtherWorldSize {
        /// Ranks of the plan.
        plan: usize,
        /// Ranks of the group.
        group: usize,
    },
    /// The device has no kernel for an operation.
    #[error("op {op} ({label}): {fault}")]
    Operation {
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
        /// What there is no kernel for.
        fault: OperationFault,
    },
    /// There is none, as there is no plan.
    #[error("{reason}")]
    NotPlanned {
        /// The sentence of the mask, or of the choice, that was refused.
        reason: String,
    },
    /// A pass is asked for that was not prepared.
    #[error("the {pass} was not prepared")]
    NotPrepared {
        /// The pass.
        pass: String,
    },
    /// A machine without ranks.
    #[error("the machine gave no rank")]
    NoRank,
    /// A graph of passes that not all ranks of a group are in.
    #[error(
        "a graph holds passes of all {ranks} ranks with a stream each, not of {} of them",
        .held.iter().map(usize::to_string).collect::<Vec<_>>().join(" and ")
    )]
    GraphOfFewer {
        /// Ranks of the group.
        ranks: usize,
        /// Ranks that each pass has.
        held: Vec<usize>,
    },
}

impl From<ProgramError> for ProgramFault {
    fn from(error: ProgramError) -> Self {
        Self::Invalid(Box::new(error))
    }
}

/// What a device has no kernel for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum OperationFault {
    /// A user's kernel that the machine was not given.
    #[error("this machine was given no kernel `{kernel}`")]
    UserKernel {
        /// Its name.
        kernel: String,
    },
    /// The operation as such.
    #[error("no CUDA kernel computes it")]
    NoCudaKernel,
    /// A product of these rows or types.
    #[error("no kernel computes it")]
    NoKernel,
    /// A product with a bias that adds to what there is.
    #[error("no CUDA kernel adds a bias to what it accumulates")]
    BiasOfAccumulated,
    /// Columns that begin where kernels cannot begin to read.
    #[error(
        "it computes columns from {first} on; on CUDA groups of columns begin at multiples of 16 bytes, so give other sizes of groups"
    )]
    ColumnsBegin {
        /// The first of them.
        first: usize,
    },
    /// Rows for experts of which there are no blocks.
    #[error("its rows have no blocks")]
    NoBlocks,
    /// An element type that kernels do not have.
    #[error("buffer `{name}` is {dtype}; CUDA has bf16, f16 and f32")]
    DType {
        /// Name of the buffer.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// An element type that the matrix units do not take.
    #[error("`{name}` is {dtype}; products on CUDA take bf16 and f16, run this type on the CPU")]
    ProductDType {
        /// Name of the buffer.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// Rows of another type than those that are placed.
    #[error("buffer `{name}` is {dtype}; on CUDA rows that are placed are f32")]
    PlacedDType {
        /// Name of the buffer.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// Largest elements of another type.
    #[error("largest elements of columns are of f32")]
    LargestDType,
}
