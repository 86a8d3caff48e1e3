//! Programs of a single part of a linear layer's pass, to be timed by itself: a collective, a product, a join.

use std::sync::Arc;

use counterpoint_cost::ProblemSize;
use counterpoint_plan::{DType, GemmCollective, GroupPart};

use counterpoint_mask::Range;

use super::LayerPart;
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, BufferRole, Gemm, GemmLayout, GroupCast, GroupReduce, Op, OverlapPolicy, Program, ReduceOp,
    RowBlock, StreamKind,
};

/// Which of how many ranks a part is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankOf {
    /// The rank.
    pub rank: usize,
    /// All of them.
    pub ranks: usize,
}

/// The shape of a tensor of two axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Its rows.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
}

/// One rank's part of a collective of tokens and nothing else, to be measured: `rows` rows of each of `ranks` ranks, `columns`
/// wide. Input `from` and output `to`; of an all-gather the rank's rows and all ranks', of a reduce-scatter partial sums of all
/// ranks' rows and the sums of its own, of an all-reduce partial sums and sums of all.
pub fn lower_collective(
    collective: GemmCollective,
    RankOf { rank, ranks }: RankOf,
    MatrixShape { rows, columns }: MatrixShape,
    dtype: DType,
) -> Program {
    let mut p = ProgramBuilder::new(collective.name(), rank, ranks, OverlapPolicy::default());
    let stream = p.stream("communication", StreamKind::Communication);
    let part = Arc::new(GroupPart::all_gather_v(rank, &vec![rows; ranks]));
    let [own, all] = [[rows, columns], [rows * ranks, columns]];
    let is_gather = collective == GemmCollective::AllGather;
    let from = p.buffer("from", dtype, if is_gather { &own } else { &all }, BufferRole::Input);
    let is_scatter = collective == GemmCollective::ReduceScatter;
    let to = p.buffer("to", dtype, if is_scatter { &own } else { &all }, BufferRole::Output);
    let sums = match collective {
        GemmCollective::AllGather => from,
        GemmCollective::ReduceScatter => to,
        GemmCollective::AllReduce => p.buffer("sums", dtype, &own, BufferRole::Scratch),
    };
    if !is_gather {
        let op = GroupReduce {
            part: part.clone(),
            tensors: vec![(from, sums)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            wire_dtype: dtype,
            reduce_dtype: dtype.accumulator(),
            arrive: None,
        };
        p.push(stream, None, LayerPart::Reduce.label(), Op::GroupReduce(op));
    }
    if !is_scatter {
        let op =
            GroupCast { part, tensors: vec![(sums, to)], wire_dtype: dtype, arrive: None, delivery: None };
        p.push(stream, None, LayerPart::Gather.label(), Op::GroupCast(op));
    }
    p.finish()
}

/// One rank's product and nothing else, as one of a pass of `pass_rows` rows, to be measured under the policy's share of
/// workers. Inputs `a` `[m, k]` and `b` `[n, k]`; output `to`.
pub fn lower_product(
    RankOf { rank, ranks }: RankOf,
    size: ProblemSize,
    pass_rows: usize,
    dtype: DType,
    policy: OverlapPolicy,
) -> Program {
    let ProblemSize { m, n, k } = size;
    let mut p = ProgramBuilder::new("product", rank, ranks, policy);
    let stream = p.stream("compute", StreamKind::Compute);
    let a = p.buffer("a", dtype, &[m, k], BufferRole::Input);
    let b = p.buffer("b", dtype, &[n, k], BufferRole::Input);
    let out = p.buffer("to", dtype, &[m, n], BufferRole::Output);
    let rows = |buffer, rows: usize| vec![RowBlock { buffer, rows: Range::new(0, rows) }].into();
    let op = Gemm {
        layout: GemmLayout::Nt,
        a: rows(a, m),
        b: rows(b, n),
        out,
        out_rows: vec![Range::new(0, m)].into(),
        pass_rows,
        columns: None,
        bias: None,
        accumulate: Accumulate::Start,
    };
    p.push(stream, None, "product", Op::Gemm(op));
    p.finish()
}

/// One rank's putting together of sums and nothing else, to be measured: `from` copied to `to`, `[rows, columns]`.
pub fn lower_join(RankOf { rank, ranks }: RankOf, shape: MatrixShape, dtype: DType) -> Program {
    let shape = [shape.rows, shape.columns];
    let mut p = ProgramBuilder::new("join", rank, ranks, OverlapPolicy::default());
    let stream = p.stream("compute", StreamKind::Compute);
    let from = p.buffer("from", dtype, &shape, BufferRole::Input);
    let dst = p.buffer("to", dtype, &shape, BufferRole::Output);
    p.push(stream, None, "put sums together", Op::Concat { srcs: vec![from], dst });
    p.finish()
}

/// One rank's `passes` passes over rows `[rows, columns]`, of each a read and a write, and nothing else: what norms and residual sums cost.
/// `name` is the Program's, `label` that of each pass.
pub fn lower_row_passes(
    name: &str,
    label: &str,
    passes: usize,
    shape: MatrixShape,
    dtype: DType,
    policy: OverlapPolicy,
) -> Program {
    let shape = [shape.rows, shape.columns];
    let mut p = ProgramBuilder::new(name, 0, 1, policy);
    let stream = p.stream("compute", StreamKind::Compute);
    for pass in 0..passes {
        let mut buffer = |side: &str| p.buffer(&format!("{side}_{pass}"), dtype, &shape, BufferRole::Scratch);
        let (src, dst) = (buffer("from"), buffer("to"));
        p.push(stream, None, label, Op::Cast { src, dst });
    }
    p.finish()
}
