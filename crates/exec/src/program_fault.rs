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

#[cfg(test)]
mod tests {
    use counterpoint_plan::{GroupPartError, LinearBound, LinearField, PlanError, SplitSide};
    use counterpoint_schedule::OperandFault;

    use super::*;
    use crate::{DeviceFault, ExecError, PolicyFault, RendezvousError, SeatFault, TensorFault};

    /// What a rank finds others learn by message, with its values and its sentence.
    #[test]
    fn errors_reach_other_ranks_as_they_are() {
        let operand = OperandFault::Heads { heads_q: 3, heads_kv: 2 };
        let invalid = ProgramError::Operand { op: 4, label: "attend".to_owned(), fault: operand };
        let (field, wanted) = (LinearField::Tokens, LinearBound::AtLeastOne);
        let program = |reason| ExecError::Program { program: "forward".to_owned(), rank: 1, reason };
        let errors = [
            (
                program(invalid.into()),
                "program `forward` of rank 1 cannot run: op 4 (attend): 3 query heads are not a multiple of 2 key heads",
            ),
            (
                ExecError::tensor("layer", PlanError::Linear { field, value: 0, wanted }),
                "tensor layer: tokens is 0; a tensor-parallel linear layer wants at least 1",
            ),
            (
                ExecError::tensor("dweight", TensorFault::Queue { limit: 2 }),
                "tensor dweight: a queue of 2 gradients needs a main_grad to add them to; each would replace the last",
            ),
            (
                ExecError::Policy {
                    rank: 0,
                    policy: "fused".to_owned(),
                    reason: PolicyFault::CpuRanks { reason: "CPU ranks have no fused kernels".into() },
                },
                "rank 0 cannot overlap by `fused`: CPU ranks have no fused kernels; use sequential, concurrent, kernel-barrier or \
                 signals, with sm-margin=N",
            ),
            (
                ExecError::BadCollective {
                    rank: 1,
                    collective: "`cast kv` (stage 2)".to_owned(),
                    reason: Box::new(
                        GroupPartError::UnknownRank {
                            side: SplitSide::Owned,
                            index: 3,
                            rank: 4,
                            world_size: 4,
                        }
                        .into(),
                    ),
                },
                "rank 1 cannot take part in `cast kv` (stage 2): owned split 3 names rank 4; there are ranks 0 to 3",
            ),
            (
                RendezvousError::AnotherJob {
                    rank: 1,
                    address: "node1:29600".to_owned(),
                    reason: SeatFault::StartedWith {
                        what: "--seed".to_owned(),
                        value: "0".to_owned(),
                        own: "5".to_owned(),
                    },
                }
                .into(),
                "rank 1 found another job at node1:29600: its --seed is 0, this process's 5; give each job a MASTER_PORT of its own",
            ),
            (
                ExecError::Device {
                    rank: 2,
                    place: "a capture".to_owned(),
                    reason: DeviceFault::call("no memory"),
                },
                "rank 2, a capture: no memory",
            ),
        ];
        for (error, sentence) in errors {
            assert_eq!(error.to_string(), sentence);
            let bytes = serde_json::to_vec(&error).unwrap();
            assert_eq!(serde_json::from_slice::<ExecError>(&bytes).unwrap(), error);
        }
    }
}
