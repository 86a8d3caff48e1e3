//! What kernels of matrix products do not take.

use counterpoint_tiles::gemm::{GemmLayout, GemmShape, OrderError};
use thiserror::Error;

use crate::Capability;

/// What a kernel of a matrix product does not take of its spec, its tensors or the GPU.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GemmFault {
    /// A size of the product.
    #[error("{name} is {size}; it takes 1 to {most}")]
    Size {
        /// `m`, `n` or `k`.
        name: &'static str,
        /// The size.
        size: usize,
        /// The largest.
        most: usize,
    },
    /// A product that is larger than the pass that it is a part of.
    #[error("{rows} rows of a pass of {pass}")]
    RowsOfPass {
        /// Rows of D.
        rows: usize,
        /// Those of the pass.
        pass: usize,
    },
    /// Likewise in columns.
    #[error("{columns} columns of a pass of {pass}")]
    ColumnsOfPass {
        /// Columns of D.
        columns: usize,
        /// Those of the pass.
        pass: usize,
    },
    /// The result's element type.
    #[error("a result in {output} of operands in {element}; it takes f32 or {element}")]
    Output {
        /// Of the result.
        output: &'static str,
        /// Of the operands.
        element: &'static str,
    },
    /// Rows that overlap.
    #[error("rows of {name} are {stride} elements apart, but have {columns}")]
    Overlap {
        /// `A`, `B` or `D`.
        name: &'static str,
        /// Elements from a row to the next.
        stride: usize,
        /// Elements of a row.
        columns: usize,
    },
    /// Rows that do not begin at multiples of 16 bytes.
    #[error(
        "rows of {name} are {stride} elements of {bytes} bytes apart, which is not a multiple of 16 bytes; pad them"
    )]
    Stride {
        /// `A`, `B` or `D`.
        name: &'static str,
        /// Elements from a row to the next.
        stride: usize,
        /// Bytes of an element.
        bytes: u64,
    },
    /// Pieces of A that are not all of it.
    #[error("A has {rows} rows, its sources have {counts:?}")]
    Sources {
        /// Rows of A.
        rows: usize,
        /// Those of each source.
        counts: Vec<usize>,
    },
    /// More tensors of A than a kernel is given.
    #[error("A's source {tensor} of at most {most}")]
    SourceCount {
        /// The tensor of a source, counted from 0.
        tensor: usize,
        /// How many there may be.
        most: usize,
    },
    /// Receivers of rows that are not all of D.
    #[error("D has {rows} rows, its receivers have {receivers:?}")]
    Receivers {
        /// Rows of D.
        rows: usize,
        /// Those of each receiver.
        receivers: Vec<usize>,
    },
    /// More ranges of rows than a kernel is given.
    #[error("{count} segments of rows; it takes {most}")]
    SegmentCount {
        /// Segments.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// Pieces of K that end inside a block.
    #[error("pieces of k of {counts:?} rows; all but the end of a tensor have multiples of {block} rows")]
    PiecesOfK {
        /// Rows of each piece.
        counts: Vec<usize>,
        /// Rows of a block.
        block: usize,
    },
    /// Receivers of a gradient of weights that begin inside 16 bytes.
    #[error("receivers of {receivers:?} rows; A's columns take multiples of 16 bytes")]
    ReceiversOfColumnsOfA {
        /// Rows of each.
        receivers: Vec<usize>,
    },
    /// Receivers of columns that are not all of D.
    #[error("D has {columns} columns, its receivers have {receivers:?}")]
    ColumnReceivers {
        /// Columns of D.
        columns: usize,
        /// Those of each receiver.
        receivers: Vec<usize>,
    },
    /// More receivers of columns than a kernel is given.
    #[error("{count} receivers of columns; it takes {most}")]
    ColumnReceiverCount {
        /// Receivers.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// Receivers of rows and of columns.
    #[error("receivers of columns, and of rows {receivers:?}; it takes one of both")]
    BothReceivers {
        /// Rows of each receiver of rows.
        receivers: Vec<usize>,
    },
    /// Receivers of columns that begin inside 16 bytes.
    #[error("receivers of {receivers:?} columns; it takes multiples of 16 bytes")]
    ColumnReceiverBytes {
        /// Columns of each.
        receivers: Vec<usize>,
    },
    /// Receivers of columns that no tiles fit.
    #[error("no tiles fit the columns of its receivers")]
    NoTiles,
    /// Receivers of columns of different sizes, of a kernel that takes one stride.
    #[error("receivers of {first} and {second} columns; it takes equal ones")]
    UnequalReceivers {
        /// Columns of one.
        first: usize,
        /// Those of the next.
        second: usize,
    },
    /// The order of its units, or their groups.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// A shape of tiles that is none of the product's.
    #[error("{0:?} is not a shape of this product")]
    Shape(Box<GemmShape>),
    /// A GPU before Ampere.
    #[error("it is for compute capability 8.0 and newer, the GPU has {0}")]
    BeforeAmpere(Capability),
    /// A GPU that is not Hopper.
    #[error("it is for compute capability 9.0, the GPU has {0}")]
    NotHopper(Capability),
    /// Another number of receivers than the spec's.
    #[error("{given} addresses of D, it has {receivers} receivers")]
    AddressesOfD {
        /// Addresses given.
        given: usize,
        /// Receivers.
        receivers: usize,
    },
    /// Another number of tensors than the spec's.
    #[error("{given} addresses of A, it has {tensors} tensors")]
    AddressesOfA {
        /// Addresses given.
        given: usize,
        /// Tensors of A.
        tensors: usize,
    },
    /// Another number of counters than the spec's, or some that are null.
    #[error("counters at {given:x?}; it needs {wanted} addresses")]
    Counters {
        /// Addresses given.
        given: Vec<u64>,
        /// How many it needs.
        wanted: usize,
    },
    /// A bias without memory.
    #[error("a bias is to be added, but has no address")]
    NoBias,
    /// A tensor that begins inside 16 bytes.
    #[error("a tensor is at {address:#x}, which is no multiple of 16 bytes")]
    Address {
        /// Where.
        address: u64,
    },
    /// Columns of D that would begin before there is memory.
    #[error("no tensor of {begin} columns and more is at {address:#x}")]
    BeforeMemory {
        /// Columns before the first.
        begin: u64,
        /// Where the first is.
        address: u64,
    },
    /// A launch without operand or result.
    #[error("it has no destination or no source")]
    NoTensor,
    /// More ranks than a fused product has, or fewer.
    #[error("rank {rank} of {ranks}; it takes 2 to {most} ranks")]
    Ranks {
        /// The rank.
        rank: usize,
        /// Ranks.
        ranks: usize,
        /// How many there may be.
        most: usize,
    },
    /// Rows of a sum over ranks that are not whole tiles.
    #[error("{rows} rows of {ranks} ranks; each must have a multiple of {tile}, or one of {slices:?}")]
    RowsOfSum {
        /// Rows of D.
        rows: usize,
        /// Ranks.
        ranks: usize,
        /// Rows of a tile.
        tile: usize,
        /// Other numbers of rows that a rank may have.
        slices: Vec<usize>,
    },
    /// Rows of an all-gather that are not whole tiles.
    #[error("{rows} rows of {ranks} ranks; each must have a multiple of {tile}, or at most {bytes} bytes")]
    RowsOfGather {
        /// Rows of A.
        rows: usize,
        /// Ranks.
        ranks: usize,
        /// Rows of a tile.
        tile: usize,
        /// Bytes of a rank's rows that may be something else.
        bytes: usize,
    },
    /// Columns of a sum over ranks that do not fill 16 bytes.
    #[error("{columns} columns, which are not a multiple of 8")]
    ColumnsOfSum {
        /// Columns of D.
        columns: usize,
    },
    /// Rows of A that travel, and are not dense.
    #[error("rows of A are {stride} elements apart, they travel as {columns}")]
    RowsApart {
        /// Elements from a row to the next.
        stride: usize,
        /// Elements of a row.
        columns: usize,
    },
    /// A sum over ranks that is added to what there is, or in another type.
    #[error("sums over ranks are written, in the type of the operands")]
    SumIsWritten,
    /// Likewise a product of gathered rows.
    #[error("its result is written, in the type of the operands")]
    ResultIsWritten,
    /// A gradient of weights whose result would be summed over ranks.
    #[error("gradients of weights are summed over no ranks")]
    GradientIsSummed,
    /// A gradient of weights whose rows would be gathered.
    #[error("rows of A are its K")]
    RowsAreK,
    /// A product of rows as they arrive that signals its tiles, or takes them in an order of its own.
    #[error("its tiles are in the order in which A's tensors arrive")]
    ArrivingOrder,
    /// Another number of words that say what has arrived than the tensors of A.
    #[error("{words} words of {tensors} tensors")]
    ArrivalWords {
        /// Words given.
        words: usize,
        /// Tensors of A.
        tensors: usize,
    },
    /// A signal that was made without words for what has arrived.
    #[error("its signal has no words")]
    NoArrivalWords,
    /// Other ranks than a fused product was made for.
    #[error("{copies} {what} and {exchanges} exchanges of {ranks} ranks")]
    RanksOfLaunch {
        /// What `copies` counts.
        what: &'static str,
        /// Addresses of these.
        copies: usize,
        /// Addresses of exchanges.
        exchanges: usize,
        /// Ranks.
        ranks: usize,
    },
    /// Rows of products of a group that kernels cannot read 16 bytes at a time.
    #[error("rows are {strides:?} elements apart, with a K of {k}; pad them")]
    GroupedStrides {
        /// Of A, B and D.
        strides: [usize; 3],
        /// K.
        k: usize,
    },
    /// Rows of products of a group that overlap.
    #[error("rows are {strides:?} elements apart, but have {columns:?}")]
    GroupedOverlap {
        /// Of A, B and D.
        strides: [usize; 3],
        /// Elements of a row of each.
        columns: [usize; 3],
    },
    /// Tensors of products of a group.
    #[error("{a} tensors of A, {b} of B")]
    GroupedTensors {
        /// Of A.
        a: usize,
        /// Of B.
        b: usize,
    },
    /// A group of no products.
    #[error("no problems")]
    NoProblems,
    /// A product of a group.
    #[error("problem {index}: {fault}")]
    Problem {
        /// Its place in the group, from 0.
        index: usize,
        /// What is wrong.
        fault: ProblemFault,
    },
    /// Addresses of products of a group.
    #[error("addresses of {a} tensors of A and {b} of B")]
    GroupedAddresses {
        /// Of A.
        a: usize,
        /// Of B.
        b: usize,
    },
    /// What cuBLASLt does not have.
    #[error("cuBLASLt knows no pieces, no several receivers and no signals")]
    LibraryPieces,
    /// A product that cuBLASLt has no algorithm for.
    #[error("cuBLASLt has no algorithm for {m} x {n} x {k} ({layout:?})")]
    LibraryAlgorithm {
        /// Rows of D.
        m: usize,
        /// Columns of D.
        n: usize,
        /// K.
        k: usize,
        /// Which operands are transposed.
        layout: GemmLayout,
    },
}

/// What is wrong with a product of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProblemFault {
    /// Rows beyond a tensor's end.
    #[error("rows that are not there")]
    Rows,
    /// Columns of A that begin inside 16 bytes.
    #[error("columns that do not begin at 16 bytes")]
    Columns,
    /// No rows, or no K.
    #[error("nothing")]
    Nothing,
    /// Rows of A that lie apart.
    #[error("rows of A that do not follow each other")]
    Apart,
    /// Rows of B beyond its end.
    #[error("rows of B that are not there")]
    RowsOfB,
    /// Blocks of K beyond a tensor's end.
    #[error("rows of K that are not there")]
    RowsOfK,
}
