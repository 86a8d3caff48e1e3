//! Layers of a mixture of experts as Programs: tokens travel to experts by group-casts, what these give travels back by group-reduces,
//! and the products of every expert run in between, group of tokens by group of tokens.
//!
//! A dispatch multiplies what arrives, a combine sends what it has multiplied; the gradient of one's input goes the other's way. Rows
//! are summed over ranks in the order of ranks, and on a rank in the order of its experts, so that results have the same bits for any
//! number of groups and any policy.

mod from_experts;
mod layer;
mod to_experts;

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{ExpertPlan, ExpertRows};

pub use self::layer::{lower_expert_backward, lower_expert_forward};
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, BufferId, BufferRole, ExpertRowsOf, Gemm, GemmLayout, Op, OverlapPolicy, RowBlock, RowBlocks,
    RowRanges, RowsOrigin, StreamId, StreamKind, WaveGemm,
};

/// Label of rows on their way to experts.
pub const DISPATCH: &str = "dispatch";
/// Label of rows on their way back.
pub const COMBINE: &str = "combine";

/// One rank's Program of a layer of experts in the making.
struct Lowering<'a> {
    p: ProgramBuilder,
    plan: &'a ExpertPlan,
    rank: usize,
    compute: StreamId,
    rows: Arc<ExpertRows>,
}

impl<'a> Lowering<'a> {
    fn new(name: &str, plan: &'a ExpertPlan, rank: usize, policy: OverlapPolicy) -> Self {
        let mut p = ProgramBuilder::new(name, rank, plan.ranks(), policy);
        let compute = p.stream("compute", StreamKind::Compute);
        Self { p, plan, rank, compute, rows: plan.rows_of(rank) }
    }

    fn input(&mut self, name: &str, rows: usize, columns: usize) -> BufferId {
        self.p.buffer(name, self.plan.spec.dtype, &[rows, columns], BufferRole::Input)
    }

    /// The weights of the rank's experts.
    fn weight(&mut self) -> BufferId {
        let spec = self.plan.spec;
        self.input("weight", self.experts() * spec.out_features, spec.in_features)
    }

    /// Experts on this rank.
    fn experts(&self) -> usize {
        self.rows.experts.len()
    }

    /// Rows of all experts on this rank.
    fn expert_rows(&self) -> usize {
        self.rows.count()
    }

    /// Has the computation multiply all of these, whose rows are such, as the problems of one grouped GEMM, where there are any.
    fn multiply(&mut self, stage: Option<usize>, label: &str, products: Vec<Gemm>, rows: ExpertRowsOf) {
        if !products.is_empty() {
            let (signal, rows) = (self.p.signal(), RowsOrigin::of(&self.rows, rows));
            let op = WaveGemm { groups: products, grouped: true, signal: Some(signal), arrivals: None, rows };
            self.p.push(self.compute, stage, label, Op::WaveGemm(op));
        }
    }

    /// The product of some rows and an expert's weight, or with [`GemmLayout::Nn`] its transpose.
    fn product(
        &self,
        layout: GemmLayout,
        a: RowBlocks,
        (expert, weight): (usize, BufferId),
        (out, out_rows): (BufferId, RowRanges),
        accumulate: Accumulate,
    ) -> Gemm {
        let features = self.plan.spec.out_features;
        let b =
            vec![RowBlock { buffer: weight, rows: Range::new(expert * features, (expert + 1) * features) }]
                .into();
        let pass_rows = self.rows.experts[expert].len();
        Gemm { layout, a, b, out, out_rows, pass_rows, columns: None, bias: None, accumulate }
    }
}
