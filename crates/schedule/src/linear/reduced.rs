//! Reduce-scatters and all-reduces of a layer's products: each group's sums travel while the next group is multiplied. Groups are of tokens,
//! each with all columns, or of columns, each of all tokens.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{Activations, DType, LinearPlan};

use super::LayerPart;
use super::exchange::{Lowering, block};
use crate::builder::Mark;
use crate::{
    Accumulate, BarrierId, BufferId, BufferRole, Gemm, GroupCast, GroupReduce, Op, ReduceOp, RowBlock,
    RowsOrigin, SignalId, StreamId, StreamKind, WaveGemm,
};

/// What one reduction of a pass sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SumPart {
    /// Its number in the pass.
    pub(super) number: usize,
    /// The group of tokens whose rows it has.
    pub(super) group: usize,
    /// Its columns, where these are not all.
    pub(super) columns: Option<Range>,
}

impl SumPart {
    /// Those of a pass, in their order: groups of columns where the plan has some, groups of tokens else. A kernel that sends its tiles as
    /// they are done has no use for groups of columns.
    pub(super) fn of(lowering: &Lowering<'_>) -> Vec<Self> {
        let plan = lowering.plan;
        if !plan.column_sizes().is_empty() && !lowering.p.policy().is_fused() {
            let part = |(number, columns)| Self { number, group: 0, columns: Some(columns) };
            return plan.column_groups().enumerate().map(part).collect();
        }
        (0..plan.groups()).map(|group| Self { number: group, group, columns: None }).collect()
    }
}

/// What hides the way of sums to all ranks, where the kernel that computes partial sums makes the sums too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpreadUnder {
    /// That kernel, for nothing comes behind it.
    Product,
    /// What is computed behind it.
    Following,
}

/// Partial sums on their way to the ranks that own the tokens, group by group, and, where all ranks want all of them, back.
pub(super) struct ReducedTokens {
    reduce: StreamId,
    /// Where sums travel back.
    gather: Option<StreamId>,
    barrier: Option<BarrierId>,
    started: u64,
    /// Its parts, in their order.
    parts: Vec<SumPart>,
    /// What every part ends as, with when it is there.
    done: Vec<(BufferId, Mark)>,
    /// Where all columns travel at once, `[tokens, columns]` under replicated activations.
    replicated: Option<BufferId>,
    /// Partial sums that are computed by the mark, where there is one yet, and not sent.
    waiting: Option<(Option<Mark>, PartialSums)>,
    name: String,
    columns: usize,
    /// Of the sums once they are together.
    role: BufferRole,
    spread_under: SpreadUnder,
    /// Products that one kernel computes, with what becomes of each.
    waves: Option<Waves>,
}

/// Groups whose sums travel while one kernel computes all of them.
struct Waves {
    signal: SignalId,
    products: Vec<Gemm>,
    /// Of each group, how many products are done with it.
    sums: Vec<(u64, GroupReduce, Sums)>,
}

/// What has been computed of a part.
enum PartialSums {
    /// Partial sums of all ranks' sums.
    Apart(GroupReduce, Sums),
    /// The rank's sums: partial sums travelled while they were computed.
    Summed(Sums),
}

/// What becomes of a part's sums.
struct Sums {
    /// The part's number.
    stage: usize,
    spread: Option<GroupCast>,
    /// What they end as.
    result: BufferId,
}

impl PartialSums {
    fn stage(&self) -> usize {
        match self {
            Self::Apart(_, sums) | Self::Summed(sums) => sums.stage,
        }
    }
}

impl ReducedTokens {
    /// The sums are `[local tokens, columns]`, called `name` where they are together: an output, or scratch of an operation behind them.
    /// Where kernels send rows as they compute, no other reduction may run concurrently with the products.
    pub(super) fn new(
        lowering: &mut Lowering<'_>,
        name: &str,
        columns: usize,
        role: BufferRole,
        spread_under: SpreadUnder,
    ) -> Self {
        let plan = lowering.plan;
        let parts = SumPart::of(lowering);
        let p = &mut lowering.p;
        let reduce = p.stream("reduce-scatter", StreamKind::Communication);
        let barrier = p.barrier();
        let (mut gather, mut replicated) = (None, None);
        if plan.spec.activations == Activations::Replicated {
            gather = Some(p.stream("all-gather", StreamKind::Communication));
            let shape = [plan.spec.tokens, columns];
            let whole = parts.iter().all(|part| part.columns.is_none());
            replicated = whole.then(|| p.buffer(name, plan.spec.dtype, &shape, role));
        }
        let (name, done, waiting) = (name.to_owned(), Vec::new(), None);
        let fused = p.policy().is_fused();
        let in_waves = p.policy().is_in_waves() && !fused && parts.len() > 1;
        let waves = in_waves.then(|| Waves { signal: p.signal(), products: Vec::new(), sums: Vec::new() });
        Self {
            reduce,
            gather,
            barrier,
            started: 0,
            parts,
            done,
            replicated,
            waiting,
            name,
            columns,
            role,
            spread_under,
            waves,
        }
    }

    /// Its parts, in their order.
    pub(super) fn parts(&self) -> Vec<SumPart> {
        self.parts.clone()
    }

    /// Columns of a part.
    fn columns_of(&self, part: &SumPart) -> usize {
        part.columns.map_or(self.columns, |columns| columns.len())
    }

    /// The buffer for this rank's partial sums of a part, of this type: `[rows, columns]`.
    pub(super) fn partial(&self, lowering: &mut Lowering<'_>, part: &SumPart, dtype: DType) -> BufferId {
        let plan = lowering.plan;
        let rows = plan.group_tokens(part.group).iter().map(Range::len).sum();
        let name = format!("{}_partial_{}", self.name, part.number);
        lowering.p.buffer(&name, dtype, &[rows, self.columns_of(part)], BufferRole::Scratch)
    }

    /// Computes a part's partial sums, under the label given, and sends them on their way; the products' result is
    /// [`ReducedTokens::partial`]: the first of them writes it, others add to it, and a kernel that sends rows as it makes them is for one. Where one kernel computes
    /// all groups, it does so once it has been given the last.
    ///
    /// Where computation leaves communication its workers, partial sums are enqueued behind the computation that hides them: on a
    /// single hardware queue a collective that waits for other ranks would else hold that one up, and where computation starts
    /// first its blocks find whole clusters of multiprocessors.
    pub(super) fn compute(
        &mut self,
        lowering: &mut Lowering<'_>,
        part: &SumPart,
        label: &str,
        mut gemms: Vec<Gemm>,
    ) {
        let Some(partial) = gemms.first().map(|gemm| gemm.out) else { return };
        let (plan, rank, compute) = (lowering.plan, lowering.rank, lowering.compute);
        let columns = self.columns_of(part);
        let &SumPart { number: stage, group, .. } = part;
        let p = &mut lowering.p;
        let (here, dtype) = (Some(stage), plan.spec.dtype);
        let fused = p.policy().is_fused();
        let rows = plan.group_rows(rank, group).len();
        let role = match self.gather {
            None if self.parts.len() == 1 => self.role,
            _ => BufferRole::Scratch,
        };
        let name = match role {
            BufferRole::Scratch => format!("{}_sum_{stage}", self.name),
            _ => self.name.clone(),
        };
        let sum = p.buffer(&name, dtype, &[rows, columns], role);
        let reduce = GroupReduce {
            part: Arc::new(plan.packed_group_part(rank, group)),
            tensors: vec![(partial, sum)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            wire_dtype: dtype,
            reduce_dtype: dtype.accumulator(),
            // What is computed while it travels needs no barrier to start after it.
            arrive: self.barrier.filter(|_| !fused),
        };
        let everywhere = self.gather.map(|_| {
            let packed = || {
                let shape = [plan.spec.tokens, columns];
                p.buffer(&format!("{}_all_{stage}", self.name), dtype, &shape, BufferRole::Scratch)
            };
            self.replicated.unwrap_or_else(packed)
        });
        let mut spread = everywhere.map(|all| GroupCast {
            part: Arc::new(back_to_all(plan, rank, group)),
            tensors: vec![(sum, all)],
            wire_dtype: dtype,
            arrive: None,
            delivery: None,
        });
        let result = everywhere.unwrap_or(sum);
        if let Some(waves) = &mut self.waves {
            waves.products.extend(gemms);
            let raised = waves.products.len() as u64;
            waves.sums.push((raised, reduce, Sums { stage, spread, result }));
            if waves.sums.len() == self.parts.len() {
                self.compute_waves(lowering, label);
            }
            return;
        }
        let last = if fused { gemms.pop() } else { None };
        let (op, partials) = match last {
            Some(gemm) => {
                let with_product = spread.take_if(|_| self.spread_under == SpreadUnder::Product);
                let parts = [Op::Gemm(gemm), Op::GroupReduce(reduce)].into_iter();
                let fused = Op::Fused(parts.chain(with_product.map(Op::GroupCast)).collect());
                (Some(fused), PartialSums::Summed(Sums { stage, spread, result }))
            }
            None => (None, PartialSums::Apart(reduce, Sums { stage, spread, result })),
        };
        self.mark(lowering);
        for op in gemms.into_iter().map(Op::Gemm).chain(op) {
            lowering.p.push(compute, here, label, op);
        }
        self.send(lowering);
        self.waiting = Some((None, partials));
        if !lowering.p.policy().leaves_workers() {
            self.send(lowering);
        }
    }

    /// Computes all groups in one kernel, and sends each once that says that it is there.
    fn compute_waves(&mut self, lowering: &mut Lowering<'_>, label: &str) {
        let Some(Waves { signal, products, sums }) = self.waves.take() else { return };
        // The kernel is queued before whoever waits for its signal.
        let op = WaveGemm {
            groups: products,
            grouped: false,
            signal: Some(signal),
            arrivals: None,
            rows: RowsOrigin::default(),
        };
        lowering.p.push(lowering.compute, None, label, Op::WaveGemm(op));
        for (value, reduce, sums) in sums {
            let wait = Op::WaitSignal { signal, value };
            lowering.p.push(self.reduce, Some(sums.stage), "wait for partials", wait);
            let summed = self.sum(lowering, sums.stage, reduce);
            self.spread(lowering, sums, summed);
        }
    }

    /// Marks where the partial sums that wait to be sent are done: before anything else is computed. On a single hardware queue such a mark holds
    /// up all that is enqueued behind it until they are, so what may run concurrently with them comes before.
    pub(super) fn mark(&mut self, lowering: &mut Lowering<'_>) {
        if let Some((ready @ None, partials)) = &mut self.waiting {
            *ready = Some(lowering.p.mark(lowering.compute, Some(partials.stage()), "partials done"));
        }
    }

    /// Sends what waits for it on its way, if anything does.
    pub(super) fn send(&mut self, lowering: &mut Lowering<'_>) {
        self.mark(lowering);
        match self.waiting.take() {
            Some((Some(ready), PartialSums::Apart(reduce, sums))) => {
                lowering.p.after(self.reduce, Some(sums.stage), "wait for partials", ready);
                let summed = self.sum(lowering, sums.stage, reduce);
                self.spread(lowering, sums, summed);
            }
            Some((Some(ready), PartialSums::Summed(sums))) => self.spread(lowering, sums, ready),
            _ => {}
        }
    }

    /// Sends a part's partial sums, for which `reduce` has waited, to who sums them.
    fn sum(&mut self, lowering: &mut Lowering<'_>, stage: usize, reduce: GroupReduce) -> Mark {
        let (p, here) = (&mut lowering.p, Some(stage));
        p.push(self.reduce, here, LayerPart::Reduce.label(), Op::GroupReduce(reduce));
        self.started += 1;
        p.mark(self.reduce, here, "sums done")
    }

    /// Sends a part's sums, which are there by the mark, to all who want them.
    fn spread(&mut self, lowering: &mut Lowering<'_>, sums: Sums, mut there: Mark) {
        let Sums { stage, spread, result } = sums;
        let (p, here) = (&mut lowering.p, Some(stage));
        if let (Some(gather), Some(cast)) = (self.gather, spread) {
            p.after(gather, here, "wait for sums", there);
            p.push(gather, here, LayerPart::Gather.label(), Op::GroupCast(cast));
            there = p.mark(gather, here, "sums everywhere");
        }
        self.done.push((result, there));
    }

    /// What the computation is given from now on starts once all groups so far are on their way.
    pub(super) fn after_start(&self, lowering: &mut Lowering<'_>, stage: usize) {
        lowering.p.after_start(
            lowering.compute,
            Some(stage),
            "wait until the reduction has started",
            self.barrier,
            self.started,
        );
    }

    /// Has the computation wait for all groups, and puts them together where they are apart.
    pub(super) fn finish(mut self, lowering: &mut Lowering<'_>) {
        self.send(lowering);
        if self.is_in_columns() {
            self.place_columns(lowering);
            return;
        }
        let (plan, compute) = (lowering.plan, lowering.compute);
        let tokens = lowering.local_tokens();
        self.wait(lowering);
        let p = &mut lowering.p;
        if self.replicated.is_none() && self.parts.len() > 1 {
            let dst = p.buffer(&self.name, plan.spec.dtype, &[tokens, self.columns], self.role);
            let srcs = self.done.iter().map(|(buffer, _)| *buffer).collect();
            p.push(compute, None, "put sums together", Op::Concat { srcs, dst });
        }
    }

    /// Has the computation wait for all groups; the rows of the sums in their order, wherever they are.
    pub(super) fn rows(mut self, lowering: &mut Lowering<'_>) -> Vec<RowBlock> {
        self.send(lowering);
        if self.is_in_columns() {
            let whole = self.place_columns(lowering);
            return block(whole, Range::new(0, lowering.p.rows(whole)));
        }
        self.wait(lowering);
        let p = &lowering.p;
        let all = |buffer| block(buffer, Range::new(0, p.rows(buffer)));
        match self.replicated {
            Some(buffer) => all(buffer),
            None => self.done.iter().flat_map(|(buffer, _)| all(*buffer)).collect(),
        }
    }

    fn is_in_columns(&self) -> bool {
        self.parts.iter().any(|part| part.columns.is_some())
    }

    /// Has the computation put each group of columns where it belongs as it is there, so that only the last group's copy is waited for.
    fn place_columns(&self, lowering: &mut Lowering<'_>) -> BufferId {
        let shape = [lowering.local_tokens(), self.columns];
        let (p, compute) = (&mut lowering.p, lowering.compute);
        let dtype = lowering.plan.spec.dtype;
        let dst = p.buffer(&self.name, dtype, &shape, self.role);
        for (part, &(src, there)) in self.parts.iter().zip(&self.done) {
            let here = Some(part.number);
            p.after(compute, here, "wait for sums", there);
            if let Some(columns) = part.columns {
                p.push(compute, here, "put columns in place", Op::PlaceColumns { src, dst, columns });
            }
        }
        dst
    }

    fn wait(&self, lowering: &mut Lowering<'_>) {
        // Within one stream the last is the end of all.
        if let Some((_, last)) = self.done.last() {
            lowering.p.after(lowering.compute, None, "wait for the last sums", *last);
        }
    }
}

/// The way back of a group's sums to the tokens of all ranks: this rank owns the packed rows of its sums, and receives all
/// owners' at their places among all tokens.
fn back_to_all(plan: &LinearPlan, rank: usize, group: usize) -> counterpoint_plan::GroupPart {
    let mut part = plan.packed_group_part(rank, group);
    for split in &mut part.remote {
        split.rows = plan.group_tokens(group)[split.rank as usize];
    }
    part
}
