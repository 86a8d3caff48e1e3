//! Reduce-scatters and all-reduces of a layer's products: each group's sums travel while the next group is multiplied.

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
    /// What every group ends as, with when it is there.
    done: Vec<(BufferId, Mark)>,
    /// `[tokens, columns]` under replicated activations.
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

/// What has been computed of a group.
enum PartialSums {
    /// Partial sums of all ranks' sums.
    Apart(GroupReduce, Sums),
    /// The rank's sums: partial sums travelled while they were computed.
    Summed(Sums),
}

/// What becomes of a group's sums.
struct Sums {
    group: usize,
    spread: Option<GroupCast>,
    /// What they end as.
    result: BufferId,
}

impl PartialSums {
    fn group(&self) -> usize {
        match self {
            Self::Apart(_, sums) | Self::Summed(sums) => sums.group,
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
        let p = &mut lowering.p;
        let reduce = p.stream("reduce-scatter", StreamKind::Communication);
        let barrier = p.barrier();
        let (mut gather, mut replicated) = (None, None);
        if plan.spec.activations == Activations::Replicated {
            gather = Some(p.stream("all-gather", StreamKind::Communication));
            let shape = [plan.spec.tokens, columns];
            replicated = Some(p.buffer(name, plan.spec.dtype, &shape, role));
        }
        let (name, done, waiting) = (name.to_owned(), Vec::new(), None);
        let fused = p.policy().is_fused();
        let in_waves = p.policy().is_in_waves() && !fused && plan.groups() > 1;
        let waves = in_waves.then(|| Waves { signal: p.signal(), products: Vec::new(), sums: Vec::new() });
        Self {
            reduce,
            gather,
            barrier,
            started: 0,
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

    /// The buffer for this rank's partial sums of a group, of this type: `[rows of the group, columns]`.
    pub(super) fn partial(&self, lowering: &mut Lowering<'_>, group: usize, dtype: DType) -> BufferId {
        let plan = lowering.plan;
        let rows = plan.group_tokens(group).iter().map(Range::len).sum();
        let name = format!("{}_partial_{group}", self.name);
        lowering.p.buffer(&name, dtype, &[rows, self.columns], BufferRole::Scratch)
    }

    /// Computes a group's partial sums, under the label given, and sends them on their way; the products' result is
    /// [`ReducedTokens::partial`]: the first of them writes it, others add to it, and a kernel that sends rows as it makes them is for one. Where one kernel computes
    /// all groups, it does so once it has been given the last.
    ///
    /// Where computation leaves communication its workers, partial sums are enqueued behind the computation that hides them: on a
    /// single hardware queue a collective that waits for other ranks would else hold that one up, and where computation starts
    /// first its blocks find whole clusters of multiprocessors.
    pub(super) fn compute(
        &mut self,
        lowering: &mut Lowering<'_>,
        group: usize,
        label: &str,
        mut gemms: Vec<Gemm>,
    ) {
        let Some(partial) = gemms.first().map(|gemm| gemm.out) else { return };
        let (plan, rank, compute) = (lowering.plan, lowering.rank, lowering.compute);
        let p = &mut lowering.p;
        let (here, dtype) = (Some(group), plan.spec.dtype);
        let fused = p.policy().is_fused();
        let part = Arc::new(plan.packed_group_part(rank, group));
        let rows = plan.group_rows(rank, group).len();
        let role = match self.replicated {
            None if plan.groups() == 1 => self.role,
            _ => BufferRole::Scratch,
        };
        let name = match role {
            BufferRole::Scratch => format!("{}_sum_{group}", self.name),
            _ => self.name.clone(),
        };
        let sum = p.buffer(&name, dtype, &[rows, self.columns], role);
        let reduce = GroupReduce {
            part,
            tensors: vec![(partial, sum)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            wire_dtype: dtype,
            reduce_dtype: dtype.accumulator(),
            // What is computed while it travels needs no barrier to start after it.
            arrive: self.barrier.filter(|_| !fused),
        };
        let mut spread = self.replicated.map(|all| GroupCast {
            part: Arc::new(back_to_all(plan, rank, group)),
            tensors: vec![(sum, all)],
            wire_dtype: dtype,
            arrive: None,
            delivery: None,
        });
        let result = self.replicated.unwrap_or(sum);
        if let Some(waves) = &mut self.waves {
            waves.products.extend(gemms);
            let raised = waves.products.len() as u64;
            waves.sums.push((raised, reduce, Sums { group, spread, result }));
            if waves.sums.len() == plan.groups() {
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
                (Some(fused), PartialSums::Summed(Sums { group, spread, result }))
            }
            None => (None, PartialSums::Apart(reduce, Sums { group, spread, result })),
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
        let op = WaveGemm { groups: products, grouped: false, signal, rows: RowsOrigin::default() };
        lowering.p.push(lowering.compute, None, label, Op::WaveGemm(op));
        for (value, reduce, sums) in sums {
            let wait = Op::WaitSignal { signal, value };
            lowering.p.push(self.reduce, Some(sums.group), "wait for partials", wait);
            let summed = self.sum(lowering, sums.group, reduce);
            self.spread(lowering, sums, summed);
        }
    }

    /// Marks where the partial sums that wait to be sent are done: before anything else is computed. On a single hardware queue such a mark holds
    /// up all that is enqueued behind it until they are, so what may run concurrently with them comes before.
    pub(super) fn mark(&mut self, lowering: &mut Lowering<'_>) {
        if let Some((ready @ None, partials)) = &mut self.waiting {
            *ready = Some(lowering.p.mark(lowering.compute, Some(partials.group()), "partials done"));
        }
    }

    /// Sends what waits for it on its way, if anything does.
    pub(super) fn send(&mut self, lowering: &mut Lowering<'_>) {
        self.mark(lowering);
        match self.waiting.take() {
            Some((Some(ready), PartialSums::Apart(reduce, sums))) => {
                lowering.p.after(self.reduce, Some(sums.group), "wait for partials", ready);
                let summed = self.sum(lowering, sums.group, reduce);
                self.spread(lowering, sums, summed);
            }
            Some((Some(ready), PartialSums::Summed(sums))) => self.spread(lowering, sums, ready),
            _ => {}
        }
    }

    /// Sends a group's partial sums, for which `reduce` has waited, to who sums them.
    fn sum(&mut self, lowering: &mut Lowering<'_>, group: usize, reduce: GroupReduce) -> Mark {
        let (p, here) = (&mut lowering.p, Some(group));
        p.push(self.reduce, here, LayerPart::Reduce.label(), Op::GroupReduce(reduce));
        self.started += 1;
        p.mark(self.reduce, here, "sums done")
    }

    /// Sends a group's sums, which are there by the mark, to all who want them.
    fn spread(&mut self, lowering: &mut Lowering<'_>, sums: Sums, mut there: Mark) {
        let Sums { group, spread, result } = sums;
        let (p, here) = (&mut lowering.p, Some(group));
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
        let (plan, compute) = (lowering.plan, lowering.compute);
        let tokens = lowering.local_tokens();
        self.wait(lowering);
        let p = &mut lowering.p;
        if self.replicated.is_none() && plan.groups() > 1 {
            let dst = p.buffer(&self.name, plan.spec.dtype, &[tokens, self.columns], self.role);
            let srcs = self.done.iter().map(|(buffer, _)| *buffer).collect();
            p.push(compute, None, "put sums together", Op::Concat { srcs, dst });
        }
    }

    /// Has the computation wait for all groups; the rows of the sums in their order, wherever they are.
    pub(super) fn rows(mut self, lowering: &mut Lowering<'_>) -> Vec<RowBlock> {
        self.send(lowering);
        self.wait(lowering);
        let p = &lowering.p;
        let all = |buffer| block(buffer, Range::new(0, p.rows(buffer)));
        match self.replicated {
            Some(buffer) => all(buffer),
            None => self.done.iter().flat_map(|(buffer, _)| all(*buffer)).collect(),
        }
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
