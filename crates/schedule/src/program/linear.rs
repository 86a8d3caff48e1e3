//! The operations of linear layers, and kernels of the user's own.

use std::fmt;
use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::ExpertRows;
use serde::{Deserialize, Serialize};

use super::{Accumulate, BufferId, RowBlock, RowBlocks, RowRanges, SignalId};

/// How the operands of a [`Gemm`] lie, each row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmLayout {
    /// `a` is `[m, k]`, `b` is `[n, k]`: activations times a weight, the forward of a linear layer.
    Nt,
    /// `a` is `[m, k]`, `b` is `[k, n]`: gradients times a weight, the gradient of the input.
    Nn,
    /// `a` is `[k, m]`, `b` is `[k, n]`: gradients times activations, the gradient of the weight.
    Tn,
}

/// `out = a b`, summed in the accumulator type and rounded once. An operand is the rows of its blocks one after the other. An
/// element is summed over `k` in one order, whatever rows of a pass are computed together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// How the operands lie.
    pub layout: GemmLayout,
    /// The first operand.
    pub a: RowBlocks,
    /// The second operand.
    pub b: RowBlocks,
    /// `[rows, n]`.
    pub out: BufferId,
    /// Where the `m` rows of the result go: ascending, disjoint.
    pub out_rows: RowRanges,
    /// Rows of all products of the pass that it is one of, at least `m`: whatever a device chooses that bits depend on, such as parts
    /// of `k`, it chooses by these, so that groups of a pass have the bits of the whole.
    pub pass_rows: usize,
    /// The columns of the product that it computes, where these are not all: `out` has as many. Whatever a device chooses that bits depend
    /// on, it chooses by all, so that groups of columns have the bits of the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Range>,
    /// `[n]`, of all columns, added to every row.
    pub bias: Option<BufferId>,
    /// Whether the product is written or added to what is there.
    pub accumulate: Accumulate,
}

impl Gemm {
    /// Ranges of rows that one launch of a product takes as they lie.
    pub const RANGES: usize = 8;
    /// Rows of a range on average, at least, where they come in more: a range of fewer is a part of a tile.
    const LEAST_ROWS: usize = 128;

    /// Whether a device copies rows in so many ranges to where they lie together first: tokens of an expert, say, come one by one.
    pub fn copies_rows(ranges: usize, rows: usize) -> bool {
        ranges > Self::RANGES && rows < ranges * Self::LEAST_ROWS
    }
}

/// The products of a pass, group by group, or a grouped GEMM, whose problems are several experts' products: they follow each other, and with
/// the end of the n-th, counted from 1, `signal` is n. Each begins once the rows are there that it waits for. A backend with a kernel for it
/// computes all of them in one launch: groups while others use what it has finished or bring what it waits for, the problems of a grouped
/// GEMM with one result together. In any case the results have the bits of the products one after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaveGemm {
    /// The products, which differ in their rows of the first operand, or in their columns, and in where these go.
    pub groups: Vec<Gemm>,
    /// Whether they are the problems of a grouped GEMM ([`GroupedLaunch`](super::GroupedLaunch)): each with a second operand of its own.
    pub grouped: bool,
    /// Raised by nothing else; `None` where no operation waits for a group.
    pub signal: Option<SignalId>,
    /// What says that the rows of a group have arrived; `None` where all are there when it starts. Not of a grouped GEMM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<RowArrivals>,
    /// What its rows were read from.
    #[serde(skip)]
    pub rows: RowsOrigin,
}

impl WaveGemm {
    /// All columns of its products, where these are groups of columns of one product: their operands are the same.
    pub fn columns(&self) -> Option<usize> {
        let first = self.groups.first()?;
        let alike = |gemm: &Gemm| gemm.layout == first.layout && gemm.a == first.a && gemm.b == first.b;
        let columns = |gemm: &Gemm| gemm.columns.filter(|_| alike(gemm)).map(|columns| columns.len());
        self.groups.iter().map(columns).sum()
    }
}

/// When the rows of a [`WaveGemm`]'s products are there: what brings them raises a signal, group after group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowArrivals {
    /// Raised by streams alone, each time before the products are enqueued: their kernel may hold most of a device while it waits.
    pub signal: SignalId,
    /// For each product what the signal is at least from when on its rows are there; 0 for one that waits for nothing.
    pub values: Vec<u64>,
}

/// Which tables the rows of a [`WaveGemm`]'s products were read from, and which of their rows these are. Where origins are the same, the one operand
/// of each product that is put together from rows has the same rows of the same buffers in the same order, and so has the result; whatever these
/// buffers are called and whatever is multiplied with them. So a device may keep what it makes of the rows for other passes of the routing. It adds
/// nothing to what the operation is.
#[derive(Clone, Default)]
pub struct RowsOrigin(Option<(Arc<ExpertRows>, ExpertRowsOf)>);

/// Which rows of a rank's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertRowsOf {
    /// All, as tokens of the rank and of every group.
    Tokens,
    /// Those of one part of the tokens: the rank's own, or a group that has arrived, counted from 1.
    Arriving(usize),
    /// Those that give to a group's tokens.
    Leaving(usize),
    /// Those that give to tokens, group by group.
    AllLeaving,
}

impl RowsOrigin {
    /// These rows of these tables.
    pub fn of(tables: &Arc<ExpertRows>, rows: ExpertRowsOf) -> Self {
        Self(Some((tables.clone(), rows)))
    }

    /// The tables, and which of their rows; `None` where nothing is known.
    pub fn tables(&self) -> Option<(&Arc<ExpertRows>, ExpertRowsOf)> {
        self.0.as_ref().map(|(tables, rows)| (tables, *rows))
    }
}

impl fmt::Debug for RowsOrigin {
    /// Not the tables, which have thousands of rows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tables().map(|(_, rows)| rows).fmt(f)
    }
}

impl PartialEq for RowsOrigin {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// A kernel of the user's own, part by part: a part reads its buffers and writes others, parts follow each other, and with the end of the
/// n-th, counted from 1, `signal` is n. So what the kernel has made can travel while it goes on, as with [`WaveGemm`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserKernel {
    /// The name under which backends were given it.
    pub kernel: String,
    /// The parts.
    pub parts: Vec<UserPart>,
    /// Raised by nothing else.
    pub signal: Option<SignalId>,
}

/// What one part of a [`UserKernel`] is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserPart {
    /// Buffers that it reads.
    pub reads: Vec<BufferId>,
    /// Buffers that it writes, each element of them.
    pub writes: Vec<BufferId>,
}

/// RMSNorm of the rows of `src`, which are those of its blocks one after the other, with a residual in front of it: `h` is the rows, or
/// their sum with the residual, rounded, and `out = h / sqrt(mean of h's squares + epsilon) weight`, row by row; without a weight it is 1. So rows that have
/// travelled in groups come into their order in the pass that is there anyway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// `[rows, columns]`.
    pub src: Vec<RowBlock>,
    /// `[rows, columns]`.
    pub residual: Option<BufferId>,
    /// Where `h` goes, `[rows, columns]`.
    pub sum: BufferId,
    /// `[columns]`.
    pub weight: Option<BufferId>,
    /// What is added to the mean.
    pub epsilon: f64,
    /// `[rows, columns]`.
    pub out: BufferId,
}

/// The gradients of an [`RmsNorm`]: with `s = 1 / sqrt(mean of h's squares + epsilon)` and `g = dout weight`, row by row
/// `dh = s (g - h s^2 mean(g h)) + dsum`, and that of the weight is the sum over the rows of `dout h s`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormBackward {
    /// `[rows, columns]`.
    pub dout: BufferId,
    /// `h`, `[rows, columns]`.
    pub sum: BufferId,
    /// `[columns]`, and where its gradient goes, in the type of sums.
    pub weight: Option<(BufferId, BufferId)>,
    /// What else goes into the gradient of `h`, `[rows, columns]`.
    pub dsum: Option<BufferId>,
    /// What was added to the mean.
    pub epsilon: f64,
    /// The gradient of `h`, `[rows, columns]`.
    pub dh: BufferId,
}

/// The sum over the rows of `src`, which are those of its blocks one after the other: the gradient of a bias.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ColumnSum {
    /// `[rows, columns]`.
    pub src: Vec<RowBlock>,
    /// `[columns]`.
    pub dst: BufferId,
    /// Whether the sum is written or added to what is there.
    pub accumulate: Accumulate,
}
