//! A plan lowered to one [`Program`] per rank: a small set of operations on named streams.
//!
//! Pure: no device, clock, environment or file. The interpreter of `counterpoint-exec` runs a Program, [`simulate`]
//! predicts it, and both speak of it as a [`Timeline`].

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod attention;
mod builder;
mod experts;
mod inter_node;
mod linear;
mod op_cost;
mod op_seconds;
mod pass_policies;
mod policy;
mod program;
mod simulate;
mod timeline;
mod transport;
mod validate;

pub use attention::{GradientReduction, STAGE_SLOTS, lower_attention_backward, lower_attention_forward};
pub use builder::{Mark, ProgramBuilder};
pub use experts::{
    COMBINE as COMBINE_LABEL, DISPATCH as DISPATCH_LABEL, lower_expert_backward, lower_expert_forward,
};
pub use linear::{
    InputGradient, LayerPart, MatrixShape, NormSpec, RankOf, SharedInput, WeightGradient, lower_collective,
    lower_join, lower_linear_backward, lower_linear_forward, lower_linear_weight_gradient,
    lower_normalised_backward, lower_normalised_forward, lower_product, lower_row_passes,
    lower_shared_input_backward, lower_shared_input_forward, lower_shared_input_weight_gradient,
    travel_seconds,
};
pub use op_cost::OpCost;
pub use pass_policies::PassPolicies;
pub use policy::{
    CommunicationPriority, EngineCollectives, GroupTiming, HardwareQueues, Mover, MoverRules, OrderRules,
    OverlapPolicy, PassOverlap, PassTiming, PolicyError, PolicySupport, ProductStart, RankTransport,
    SUMMING_WORKERS, StartOrder, WorkerShare, Workload,
};
pub use program::{
    Accumulate, ArrivingKeys, AttentionBackward, AttentionDelta, AttentionFinish, AttentionForward,
    AttentionState, BarrierId, BufferId, BufferRole, BufferSpec, ColumnMax, ColumnSum, Delivery, EventId,
    ExpertRowsOf, ForwardBegin, ForwardEnd, Gemm, GemmLayout, GroupCast, GroupReduce, GroupedLaunch,
    GroupedProblem, GroupedResults, GroupedRows, KeyBlocks, MaxLogits, Op, Program, ProgramOp, ReduceOp,
    RmsNorm, RmsNormBackward, RowArrivals, RowBlock, RowBlocks, RowList, RowNumbers, RowPiece, RowRanges,
    RowsOrigin, SignalId, StreamId, StreamKind, StreamSpec, UserKernel, UserPart, WaveGemm,
};
pub use simulate::{SimulateError, simulate};
pub use timeline::{Interval, Overlap, Span, SpanKind, Timeline, interval_length, merged_intervals};
pub use validate::{OperandFault, ProgramError, ProgramThing, SlotFault};
