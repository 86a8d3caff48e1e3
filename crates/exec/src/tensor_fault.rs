//! What is wrong with a tensor that a run was given, or is asked for.

use std::ops::Range;

use counterpoint_plan::{DType, PlanError, RoutingError};
use counterpoint_schedule::SimulateError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What is wrong with a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum TensorFault {
    /// It is not there.
    #[error("is missing")]
    Missing,
    /// It is not there, and somebody's options say that it must be.
    #[error("is missing, and {wanted}")]
    MissingFor {
        /// Who wants it: `this layer needs it`.
        wanted: String,
    },
    /// A pass of experts before any routing.
    #[error("is missing; say which tokens go to which experts before the first pass")]
    Unrouted,
    /// A call did not give it.
    #[error("is needed by `{program}` and was not given")]
    NotGiven {
        /// The Program that reads or writes it.
        program: String,
    },
    /// An input of a run over buffers that are bound.
    #[error("is an input and was never bound")]
    NeverBound,
    /// It is there, and nobody reads it.
    #[error("is given, and {unused}")]
    Unused {
        /// Who does not: `this layer has no use for it`.
        unused: String,
    },
    /// A Program has none of its name.
    #[error("program `{program}` has no input or output of this name")]
    Unknown {
        /// The Program.
        program: String,
    },
    /// Attention has no input of its name.
    #[error("is not an input of this attention")]
    NotAnInput,
    /// A Program has no output of its name.
    #[error("is not an output of the Program")]
    NotAnOutput,
    /// It belongs to a backward, of a problem that has none.
    #[error("was not prepared: the problem is a forward alone")]
    ForwardAlone,
    /// It belongs to a backward, of calls that have none.
    #[error("there is no backward: the forward alone was prepared")]
    NoBackward,
    /// It belongs to a backward, of a layer that has none.
    #[error("this layer was made for the forward only")]
    ForwardLayer,
    /// It belongs to a pass for which layers were not made.
    #[error("{layers} not made for {pass}")]
    NotMadeFor {
        /// `this layer was`, or several.
        layers: String,
        /// The pass.
        pass: String,
    },
    /// It has another shape.
    #[error("must be {wanted:?}, not {found:?}")]
    Shape {
        /// The shape that it must have.
        wanted: Vec<usize>,
        /// The shape that it has.
        found: Vec<usize>,
    },
    /// It has another shape or element type.
    #[error("must be {dtype} {shape:?}, not {found_dtype} {found_shape:?}")]
    Layout {
        /// The element type that it must have.
        dtype: DType,
        /// The shape that it must have.
        shape: Vec<usize>,
        /// The element type that it has.
        found_dtype: DType,
        /// The shape that it has.
        found_shape: Vec<usize>,
    },
    /// A buffer is to hold what has another shape or element type.
    #[error("it holds {dtype} {shape:?} and cannot take {given_dtype} {given_shape:?}")]
    CannotTake {
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// The element type of what it is given.
        given_dtype: DType,
        /// The shape of what it is given.
        given_shape: Vec<usize>,
    },
    /// Ranks' parts of one tensor differ in row shape or element type.
    #[error("is {dtype} {shape:?} and rank 0's is {first_dtype} {first_shape:?}")]
    UnlikeFirst {
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// The element type of the first rank's.
        first_dtype: DType,
        /// The shape of the first rank's.
        first_shape: Vec<usize>,
    },
    /// Rows are asked for that it does not have.
    #[error("rows {start}..{end} are asked for and it has {rows}")]
    RowsBeyond {
        /// The first row asked for.
        start: usize,
        /// The row behind the last.
        end: usize,
        /// Its rows.
        rows: usize,
    },
    /// It has another number of rows than its rank owns.
    #[error("has {rows} rows and the rank owns {owned}")]
    OwnedRows {
        /// Its rows.
        rows: usize,
        /// Those that the rank owns.
        owned: usize,
    },
    /// It has another number of rows than somebody says.
    #[error("has {rows} rows; {wanted}")]
    Rows {
        /// Its rows.
        rows: usize,
        /// How many there must be: `it must have 8`.
        wanted: String,
    },
    /// An element is not what it must be.
    #[error("is {value} in row {row}, column {column}; it must be {wanted}")]
    Wrong {
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
        /// What it is.
        value: f64,
        /// What it must be.
        wanted: f64,
    },
    /// An element is not what it must be after a run.
    #[error("is {value} in row {row}, column {column} after `{program}` on rank {rank}; it must be {wanted}")]
    WrongAfter {
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
        /// What it is.
        value: f64,
        /// The Program that wrote it.
        program: String,
        /// The rank.
        rank: usize,
        /// What it must be.
        wanted: f64,
    },
    /// There is not one tensor for each rank.
    #[error("is one of {given} tensors for {ranks} ranks")]
    NotOneForEach {
        /// Tensors given.
        given: usize,
        /// Ranks.
        ranks: usize,
    },
    /// There are tensors of other ranks than are in this process.
    #[error("{} given for {given} ranks, of which {here} are here", if *.several { "are" } else { "is" })]
    GivenFor {
        /// Whether its name is that of several tensors.
        several: bool,
        /// Ranks that it is given for.
        given: usize,
        /// Ranks of this process.
        here: usize,
    },
    /// There is another number of tensors than of what needs one each.
    #[error("{given} for {needed}")]
    Count {
        /// What is given: `3 buffers`.
        given: String,
        /// What needs one each: `the 2 ranks here`.
        needed: String,
    },
    /// Not all parts of a whole tensor are in this process.
    #[error("{here} of its {parts} parts are in this process")]
    PartsElsewhere {
        /// Parts that are.
        here: usize,
        /// Parts that there are.
        parts: usize,
    },
    /// A description of memory that has not a stride for each axis.
    #[error("{strides} strides for a tensor of shape {shape:?}")]
    StrideCount {
        /// Strides given.
        strides: usize,
        /// The shape.
        shape: Vec<usize>,
    },
    /// Its memory is nowhere.
    #[error("its address is null")]
    Null,
    /// Its memory begins between elements.
    #[error("its address {address:#x} is not a multiple of an element's {size} bytes")]
    Misaligned {
        /// The address.
        address: usize,
        /// Bytes of an element.
        size: usize,
    },
    /// Elements of a row lie apart.
    #[error("elements of its last axis are {stride} apart and must be next to each other")]
    LastAxisApart {
        /// Elements from one to the next.
        stride: usize,
    },
    /// It reaches beyond what has addresses.
    #[error("shape {shape:?} with strides {strides:?} does not fit the address space")]
    BeyondAddresses {
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides.
        strides: Vec<usize>,
    },
    /// Two indices of a tensor that is written are one element.
    #[error("strides {strides:?} of shape {shape:?} name some element twice, and it is to be written")]
    NamedTwice {
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides.
        strides: Vec<usize>,
    },
    /// Its rows or heads lie apart where an operation reads them in place.
    #[error("has rows or heads that lie apart; give it to a call, which copies it")]
    Apart,
    /// It is written, and was lent for reading.
    #[error("is written, and its memory was borrowed for reading")]
    ReadOnly,
    /// It is written, and has memory in common with another tensor of the call.
    #[error("is written, and shares memory with {with}; give each memory of its own")]
    Aliased {
        /// The other tensor.
        with: String,
    },
    /// It is on another device than its rank.
    #[error("is on {on}, and rank {rank} is on {own}")]
    Device {
        /// Where it is.
        on: String,
        /// The rank.
        rank: usize,
        /// The rank's device.
        own: String,
    },
    /// A device takes no such memory.
    #[error("{words}")]
    Memory {
        /// The driver's words.
        words: String,
    },
    /// It is not dense, and cannot be read in place.
    #[error("of shape {shape:?} has strides {strides:?}, and must be contiguous")]
    NotContiguous {
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides.
        strides: Vec<usize>,
    },
    /// Rows are asked for that a view of it does not have.
    #[error("{shape:?} with strides {strides:?} has no rows {rows:?}")]
    NoSuchRows {
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides.
        strides: Vec<usize>,
        /// The rows.
        rows: Range<usize>,
    },
    /// It is a result of what has not run.
    #[error("was not computed")]
    NotComputed,
    /// The layer, whose sizes do not split so.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The layer, of which a pass cannot be predicted.
    #[error(transparent)]
    Prediction(#[from] SimulateError),
    /// The layer, which is split over other ranks than there are.
    #[error("is split over {ranks} ranks, and the group has {group}")]
    SplitOver {
        /// Ranks of the layer.
        ranks: usize,
        /// Ranks of the group.
        group: usize,
    },
    /// The layer, which is one rank's own.
    #[error("is a process's own, and this process has {ranks} ranks")]
    OfOneRank {
        /// Ranks of the process.
        ranks: usize,
    },
    /// There is no rank that has one.
    #[error("there is no rank")]
    NoRank,
    /// It is given for other ranks than x is.
    #[error("is there for {ranks} ranks, x for {x}")]
    ForRanks {
        /// Ranks that it is given for.
        ranks: usize,
        /// Ranks that x is given for.
        x: usize,
    },
    /// A queue of gradients without a tensor that they are added to.
    #[error(
        "a queue {} needs a main_grad to add them to; each would replace the last",
        if *.limit == 0 { "without a limit".to_owned() } else { format!("of {limit} gradients") }
    )]
    Queue {
        /// Gradients that it holds at most, 0 for no limit.
        limit: usize,
    },
    /// The gradient of a weight whose layer has an RMSNorm behind it.
    #[error(
        "is not deferred behind an RMSNorm, whose next backward writes over what it needs; use another gradient"
    )]
    DeferredBehindNorm,
    /// The layer, behind which an RMSNorm would have columns alone.
    #[error("must be row-parallel: RMSNorm takes whole rows, of which the others give columns")]
    NotRowParallel,
    /// An epsilon that makes no sense.
    #[error("must be 0 or more, not {value}")]
    Negative {
        /// Its value.
        value: f64,
    },
    /// The layer, whose ranks have no rows of the input in common.
    #[error(
        "leaves partial sums of the input's gradient, but under sequence parallelism ranks have their own tokens' alone"
    )]
    PartialInputGradient,
    /// The layer, whose experts do not divide over the ranks.
    #[error("has {experts} experts for {ranks} ranks; each rank needs the same number, and at least one")]
    Experts {
        /// Experts.
        experts: usize,
        /// Ranks.
        ranks: usize,
    },
    /// The layer, which has no features.
    #[error("has no features; give in_features and out_features of at least 1")]
    NoFeatures,
    /// The layer of experts, whose gradients are to be deferred.
    #[error("cannot defer the gradients of experts; have them written or added")]
    DeferredExperts,
    /// The layer of experts, whose gradients are to replace those before.
    #[error("cannot replace a main_grad of experts; have gradients written or added")]
    ReplacedExperts,
    /// The layer, of which a pass is asked for that is not deferred.
    #[error("has no deferred gradients of the weight")]
    NothingDeferred,
    /// The routing, which makes no sense or does not fit.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The routing, which is another layer's.
    #[error("is for {experts} experts on {ranks} ranks, and the layer has {own_experts} on {own_ranks}")]
    OtherRouting {
        /// Experts of the routing.
        experts: usize,
        /// Its ranks.
        ranks: usize,
        /// Experts of the layer.
        own_experts: usize,
        /// Its ranks.
        own_ranks: usize,
    },
    /// The routing, which is of other ranks.
    #[error("is of {ranks} ranks, and the group has {group}")]
    RoutingOfOthers {
        /// Its ranks.
        ranks: usize,
        /// Ranks of the group.
        group: usize,
    },
    /// It has another number of rows than a routing says.
    #[error("has {rows} rows; the routing has {wanted} for the ranks here")]
    RoutedRows {
        /// Its rows.
        rows: usize,
        /// Rows that the routing has.
        wanted: usize,
    },
}

impl TensorFault {
    /// Of a tensor that must have this shape and element type, and has that; none where they are the same.
    pub(crate) fn of_layout(
        (dtype, shape): (DType, &[usize]),
        (found_dtype, found_shape): (DType, &[usize]),
    ) -> Option<Self> {
        ((dtype, shape) != (found_dtype, found_shape)).then(|| Self::Layout {
            dtype,
            shape: shape.to_vec(),
            found_dtype,
            found_shape: found_shape.to_vec(),
        })
    }

    /// Of a tensor that must have this shape and has that; none where they are the same.
    pub(crate) fn of_shape(wanted: &[usize], found: &[usize]) -> Option<Self> {
        (wanted != found).then(|| Self::Shape { wanted: wanted.to_vec(), found: found.to_vec() })
    }
}
