//! Launchers: each has the stem of its kernel below `kernels/`, chooses what of it is compiled, and launches it.

mod attention;
mod attention_backward;
mod attention_delta;
mod attention_finish;
mod attention_forward;
mod attention_kernel;
mod attention_merge;
mod attention_tensors;
mod bit_check;
mod cast;
mod column_max;
mod column_sum;
mod count_up;
mod device_schedule;
mod dq_rounding;
mod examine;
mod fault;
mod foreign_barrier;
mod gemm;
mod head_resize;
mod layouts;
mod link_barrier;
mod link_cast;
mod link_copy;
mod link_litmus;
mod link_reduce;
mod link_rows;
mod operand_rows;
mod portable_backward;
mod portable_backward_query;
mod portable_forward;
mod portable_launcher;
mod portable_shape;
mod random_fill;
mod rms_norm;
mod rms_norm_backward;
mod row_check;
mod row_copy;
mod row_merge;
mod row_pieces;
mod row_reduce;
mod row_steps;
mod scalar;
mod signal_litmus;
mod signal_raise;
mod signal_wait;
mod specialisation;
mod staged_reduce;
mod start_hold;
mod start_litmus;
mod start_mark;
mod user_kernel;
mod wait_limit;

pub use attention::{AttentionProblem, ElementType};
pub use attention_backward::{AttentionBackward, HopperBackwardTables};
pub use attention_delta::AttentionDelta;
pub use attention_finish::AttentionFinish;
pub use attention_forward::{AttentionForward, HopperForwardTables};
pub use attention_kernel::{BackwardKernel, BackwardTables, ForwardKernel, ForwardTables};
pub use attention_tensors::{
    ArrivingTensors, BackwardMode, BackwardTensors, DeltaTensors, DqBegin, ForwardMode, ForwardModeEnd,
    ForwardTarget, ForwardTensors, GradientOwners, HeadRows, ResultTensors, StateTensors,
};
pub use bit_check::BitCheck;
pub use cast::Cast;
pub use column_max::ColumnMax;
pub use column_sum::{ColumnSum, ColumnSumSpec};
pub use count_up::CountUp;
pub use device_schedule::DeviceSchedule;
pub use dq_rounding::DqRounding;
pub use examine::{CompileReport, KernelFault, KernelReport, examine};
pub use fault::{AttentionFault, RowsFault};
pub use foreign_barrier::{ForeignBarrier, ForeignBarrierPhase};
pub use gemm::{
    GEMM_DESTINATIONS, GEMM_SOURCES, Gemm, GemmArrivalWords, GemmArriving, GemmEpilogue, GemmFault,
    GemmGather, GemmGatherSpec, GemmGatherTensors, GemmGrid, GemmLayout, GemmLibrary, GemmProblem,
    GemmReduce, GemmReduceSpec, GemmReduceTensors, GemmRows, GemmRunner, GemmShape, GemmSignals, GemmSpec,
    GemmTensors, GroupedGemm, GroupedGemmSpec, GroupedGemmTensors, LibraryGemm, ProblemFault, ProblemKBlock,
    ProblemRows, SumsGoTo, TileOrder, TilePair, TileUnit, Warpgroups,
};
pub use head_resize::HeadResize;
pub use layouts::shared_layouts;
pub use link_barrier::{
    LINK_BLOCKS, LINK_PARTS, LINK_RANKS, LINK_TENSORS, LinkArrivals, LinkCall, LinkEnd, LinkPeers,
    LinkShifts, LinkStep, MissedRank,
};
pub use link_cast::LinkCast;
pub use link_copy::{LinkCopy, LinkDelivery, LinkDirection, LinkPhase};
pub use link_litmus::{LinkLitmus, LitmusResult};
pub use link_reduce::{LinkOperands, LinkReduce, LinkReduceSpec};
pub use link_rows::{LinkMerge, LinkSum};
pub use portable_backward::{PortableBackward, PortableBackwardTables};
pub use portable_forward::PortableForward;
pub use random_fill::RandomFill;
pub use rms_norm::{RmsNorm, RmsNormSpec, RmsNormTensors};
pub use rms_norm_backward::{RmsNormBackward, RmsNormBackwardSpec, RmsNormBackwardTensors};
pub use row_check::{CheckedRows, RowCheck, RowContents, RowOrigin};
pub use row_copy::{RowCopy, RowCopyTensor};
pub use row_merge::{RowMerge, RowMergeSpec};
pub use row_reduce::{ReduceTypes, RowReduce, RowReduceSpec};
pub use row_steps::{RowGather, RowMove, RowStep, RowSteps, StepCount};
pub use scalar::Scalar;
pub use signal_litmus::{SignalLitmus, SignalLitmusResult, SignalLitmusRound};
pub use signal_raise::SignalRaise;
pub use signal_wait::{SignalWait, SignalWaits};
pub use specialisation::{MatrixUnit, Specialisation, specialisations, specialisations_for};
pub use staged_reduce::StagedReduce;
pub use start_hold::StartHold;
pub use start_litmus::StartLitmus;
pub use start_mark::StartMark;
pub use user_kernel::{UserKernel, UserKernelSource, UserTensor};
pub use wait_limit::{CtaWaits, MissedWait, WaitLimit, WaitRecord};

/// Blocks of a kernel that goes over memory: as many as its work is worth, and no more than fill the device (2048 threads a
/// multiprocessor, in blocks of 256).
fn blocks_of(work: u64, sm_count: u32) -> u32 {
    // Bounded by a u32, so that the cast keeps it.
    work.clamp(1, u64::from(sm_count.max(1)) * 8) as u32
}
