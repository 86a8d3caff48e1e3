//! What kernels of attention, and those that move and combine rows, do not take.

use counterpoint_tiles::TileScheduleError;
use thiserror::Error;

/// What a kernel of attention does not take of a problem or of its tensors.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum AttentionFault {
    /// A size of a head.
    #[error("{field} is {dim}; kernels take multiples of 8 from 8 to {largest}")]
    HeadDim {
        /// `head_dim` or `head_dim_v`.
        field: &'static str,
        /// Its elements.
        dim: usize,
        /// The most.
        largest: u32,
    },
    /// Sizes of heads, of a backward.
    #[error("heads of {head_dim} and {head_dim_v} elements; it takes multiples of 8 up to 256")]
    HeadDims {
        /// Of queries and keys.
        head_dim: usize,
        /// Of values.
        head_dim_v: usize,
    },
    /// Heads that do not divide.
    #[error("{heads_q} query heads over {heads_kv} key heads; heads_q is a multiple of heads_kv")]
    Heads {
        /// Query heads.
        heads_q: usize,
        /// Key and value heads.
        heads_kv: usize,
    },
    /// A scale that is not finite.
    #[error("scale is {scale}; give a finite one")]
    Scale {
        /// The scale.
        scale: f32,
    },
    /// A softcap that caps nothing.
    #[error("softcap is {softcap}; give a positive one, or none")]
    Softcap {
        /// The softcap.
        softcap: f32,
    },
    /// More rows of heads than can be numbered.
    #[error("{rows} rows of {heads} heads; at most {most} in all")]
    Rows {
        /// Query rows.
        rows: usize,
        /// Query heads.
        heads: usize,
        /// The most.
        most: u32,
    },
    /// A mask without a tile schedule.
    #[error(transparent)]
    Schedule(#[from] TileScheduleError),
    /// Partial results of a kernel that makes none.
    #[error("it makes no partial results; they are made of a state")]
    NoPartials,
    /// Keys of other ranks without memory.
    #[error("{rows} rows of keys arrive, and the launch has no memory for them")]
    NoArrivals {
        /// Rows that arrive.
        rows: usize,
    },
    /// A tensor that lies apart, for a kernel that reads dense ones.
    #[error("a tensor whose rows or heads lie apart; it takes dense ones")]
    NotDense,
    /// Max logits that are wanted and not given, or the other way.
    #[error("it was made with max_logits {wanted}, and is given {given:?}")]
    MaxLogits {
        /// Whether it was made with them.
        wanted: bool,
        /// Their address.
        given: Option<u64>,
    },
    /// Tensors of another mode.
    #[error("it was made for {mode}, the tensors are {tensors}")]
    OtherMode {
        /// The mode.
        mode: String,
        /// The tensors.
        tensors: String,
    },
}

/// What a kernel that moves, compares, merges or sums rows does not take, and what a link between ranks does not carry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RowsFault {
    /// No tensor to move.
    #[error("there is no tensor")]
    NoTensor,
    /// More tensors than a launch takes.
    #[error("there are too many tensors; it takes {most}")]
    TooManyTensors {
        /// The most.
        most: usize,
    },
    /// Sums of different types in one launch.
    #[error("tensors that are summed in one launch have the same types")]
    OtherTypes,
    /// Rounding to different types in one launch.
    #[error("tensors that travel in one launch are rounded to one type")]
    OtherWires,
    /// Buffers of different sizes, or of no whole words.
    #[error("buffers of {a} and {b} bytes are not compared by words")]
    Words {
        /// Bytes of one.
        a: usize,
        /// Bytes of the other.
        b: usize,
    },
    /// Rows of more ranks than a kernel combines.
    #[error("{ranks} ranks are combined; at most {most} can")]
    Sources {
        /// Ranks.
        ranks: usize,
        /// The most.
        most: usize,
    },
    /// No rows or columns, or more than are numbered.
    #[error("{rows} rows of {columns} columns")]
    Shape {
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// Rows of more tensors than a kernel reads.
    #[error("rows of {tensors} tensors, it takes those of {most}")]
    RowTensors {
        /// Tensors.
        tensors: usize,
        /// The most.
        most: usize,
    },
    /// Another number of tensors than it was made for.
    #[error("{given} addresses, it has {tensors} tensors")]
    Addresses {
        /// Addresses given.
        given: usize,
        /// Its tensors.
        tensors: usize,
    },
    /// More ranks or tensors than a link has.
    #[error(
        "{ranks} ranks take part with {announced} and {own} tensors; at most {most_ranks} can, with {most_tensors} each"
    )]
    Link {
        /// Ranks.
        ranks: usize,
        /// Tensors that are announced to others.
        announced: usize,
        /// Tensors of the rank.
        own: usize,
        /// The most ranks.
        most_ranks: usize,
        /// The most tensors.
        most_tensors: usize,
    },
    /// A tensor that others cannot reach.
    #[error("a tensor at {address:#x}; others reach multiples of {alignment} bytes")]
    LinkAddress {
        /// Where it is.
        address: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
    /// More parts than a call notifies of.
    #[error("rows in {parts} parts; at most {most}")]
    LinkParts {
        /// Parts.
        parts: usize,
        /// The most.
        most: usize,
    },
    /// A user's kernel that is launched with no threads, or more than a block has.
    #[error("{blocks} blocks of {threads} threads")]
    UserGrid {
        /// Blocks.
        blocks: u32,
        /// Threads of a block.
        threads: u32,
    },
    /// More parts or tensors than a user's kernel is given.
    #[error("{parts} parts of {tensors} tensors; a user's kernel takes {most_parts} parts of {most_tensors}")]
    UserParts {
        /// Parts.
        parts: usize,
        /// Tensors of a part.
        tensors: usize,
        /// The most parts.
        most_parts: usize,
        /// The most tensors of a part.
        most_tensors: usize,
    },
}
