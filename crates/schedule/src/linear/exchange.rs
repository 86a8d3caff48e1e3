//! All-gathers of tokens for the products of linear layers, group by group or fused into the kernel.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{Activations, LinearPlan};

use super::LayerPart;
use crate::builder::{Mark, ProgramBuilder};
use crate::{
    BarrierId, BufferId, BufferRole, Gemm, GroupCast, HardwareQueues, Op, RowArrivals, RowBlock, RowsOrigin,
    StreamId, StreamKind, WaveGemm,
};

/// One rank's Program of a layer in the making.
pub(super) struct Lowering<'a> {
    pub(super) p: ProgramBuilder,
    pub(super) plan: &'a LinearPlan,
    pub(super) rank: usize,
    pub(super) compute: StreamId,
}

impl Lowering<'_> {
    pub(super) fn input(&mut self, name: &str, shape: &[usize]) -> BufferId {
        self.p.buffer(name, self.plan.spec.dtype, shape, BufferRole::Input)
    }

    /// Rows of the activations that are not split by features, on this rank.
    pub(super) fn local_tokens(&self) -> usize {
        match self.plan.spec.activations {
            Activations::Replicated => self.plan.spec.tokens,
            Activations::SequenceParallel => self.plan.tokens_of(self.rank).len(),
        }
    }

    /// Whether rows of the other ranks must come.
    pub(super) fn gathers(&self) -> bool {
        self.plan.spec.activations == Activations::SequenceParallel && self.plan.tp_size > 1
    }

    /// All tokens in their order: the rank's from its `own` buffer, the others' from one for every group.
    pub(super) fn all_tokens(&self, own: BufferId, groups: &[BufferId]) -> Vec<RowBlock> {
        let plan = self.plan;
        let of_owner = |owner: usize| -> Vec<RowBlock> {
            if owner == self.rank {
                return block(own, Range::new(0, plan.tokens_of(owner).len()));
            }
            let of_group = |(group, &buffer): (usize, &BufferId)| {
                let before: usize = (0..owner).map(|rank| plan.group_rows(rank, group).len()).sum();
                block(buffer, Range::new(before, before + plan.group_rows(owner, group).len()))
            };
            groups.iter().enumerate().flat_map(of_group).collect()
        };
        (0..plan.tp_size).flat_map(of_owner).collect()
    }

    /// All rows of a buffer.
    pub(super) fn whole(&self, buffer: BufferId, rows: usize) -> Vec<RowBlock> {
        vec![RowBlock { buffer, rows: Range::new(0, rows) }]
    }
}

/// Rows of all ranks' tokens on their way to this one, group by group; those of its own are there.
pub(super) struct GatheredTokens {
    /// The rank's own rows.
    own: BufferId,
    columns: usize,
    name: String,
    role: BufferRole,
    stream: StreamId,
    /// Of each group that has been sent, its rows of all ranks but this one, with room for these.
    groups: Vec<BufferId>,
    /// When they are here, where an event says so.
    arrived: Vec<Mark>,
    barrier: Option<BarrierId>,
}

impl GatheredTokens {
    /// The exchange of `own` (`columns` wide) on a stream of its own. Groups are buffers called `name` and a number, of this role.
    pub(super) fn new(
        lowering: &mut Lowering<'_>,
        own: BufferId,
        columns: usize,
        name: &str,
        role: BufferRole,
    ) -> Self {
        let p = &mut lowering.p;
        let stream = p.stream("all-gather", StreamKind::Communication);
        let barrier = p.barrier();
        let (name, groups, arrived) = (name.to_owned(), Vec::new(), Vec::new());
        Self { own, columns, name, role, stream, groups, arrived, barrier }
    }

    /// Sends nothing before this mark.
    pub(super) fn after(&self, lowering: &mut Lowering<'_>, mark: Mark) {
        lowering.p.after(self.stream, None, "wait for tokens of this rank", mark);
    }

    /// Sends the next group. Its number.
    fn send(&mut self, lowering: &mut Lowering<'_>) -> usize {
        let (plan, rank) = (lowering.plan, lowering.rank);
        let (group, p) = (self.groups.len(), &mut lowering.p);
        let rows = plan.group_tokens(group).iter().map(Range::len).sum();
        let name = format!("{}_{group}", self.name);
        let buffer = p.buffer(&name, plan.spec.dtype, &[rows, self.columns], self.role);
        let op = GroupCast {
            part: Arc::new(plan.group_part(rank, group)),
            tensors: vec![(self.own, buffer)],
            wire_dtype: plan.spec.dtype,
            arrive: self.barrier,
            delivery: None,
        };
        p.push(self.stream, Some(group + 1), LayerPart::Gather.label(), Op::GroupCast(op));
        self.groups.push(buffer);
        group
    }

    /// Marks that the last group that was sent is here.
    fn arrived(&mut self, lowering: &mut Lowering<'_>) {
        let mark = lowering.p.mark(self.stream, Some(self.groups.len()), "tokens arrived");
        self.arrived.push(mark);
    }

    /// The rows of a stage, for each piece where it lies and which tokens it is: of stage 0 those that the rank has itself, of stage
    /// `group + 1` those that come from the others.
    fn of_stage(&self, lowering: &Lowering<'_>, stage: usize) -> (Vec<RowBlock>, Vec<Range>) {
        let (plan, rank) = (lowering.plan, lowering.rank);
        let Some(group) = stage.checked_sub(1) else {
            let tokens = plan.tokens_of(rank);
            return (block(self.own, Range::new(0, tokens.len())), nonempty(tokens));
        };
        let buffer = self.groups[group];
        let mut end = 0;
        let (mut blocks, mut tokens) = (Vec::new(), Vec::new());
        for (owner, piece) in plan.group_tokens(group).into_iter().enumerate() {
            end += piece.len();
            if owner != rank && !piece.is_empty() {
                blocks.push(RowBlock { buffer, rows: Range::new(end - piece.len(), end) });
                tokens.push(piece);
            }
        }
        (blocks, tokens)
    }

    /// Whether the products of all stages are one kernel, whose tiles wait for the group that they read. What it waits for is enqueued
    /// before it, so on a single hardware queue it would start with the last group; there each group has a product.
    pub(super) fn is_one_kernel(lowering: &Lowering<'_>) -> bool {
        let policy = lowering.p.policy();
        policy.is_in_waves() && !policy.is_fused() && policy.queues == HardwareQueues::Many
    }

    /// Sends every group and has a signal say that it is here: the products of all stages that have rows, as `product` makes them, in one
    /// kernel that takes them as they arrive.
    pub(super) fn multiply_as_they_arrive(
        &mut self,
        lowering: &mut Lowering<'_>,
        label: &str,
        product: impl Fn(&Lowering<'_>, (Vec<RowBlock>, Vec<Range>)) -> Gemm,
    ) {
        let signal = lowering.p.signal();
        for _ in 0..lowering.plan.groups() {
            let value = self.send(lowering) as u64 + 1;
            lowering.p.push(
                self.stream,
                Some(self.groups.len()),
                "tokens arrived",
                Op::Signal { signal, value },
            );
        }
        let (mut groups, mut values) = (Vec::new(), Vec::new());
        for stage in 0..=lowering.plan.groups() {
            let rows = self.of_stage(lowering, stage);
            if !rows.0.is_empty() {
                groups.push(product(lowering, rows));
                values.push(stage as u64);
            }
        }
        let arrivals = Some(RowArrivals { signal, values });
        let op = WaveGemm { groups, grouped: false, signal: None, arrivals, rows: RowsOrigin::default() };
        lowering.p.push(lowering.compute, None, label, Op::WaveGemm(op));
    }

    /// The rows of stage 0, which the rank has itself, and those of stage `group + 1`, which come from the others: for each
    /// piece where it lies and which tokens it is. Has the computation wait for it. The group that the stage's product hides is sent
    /// before; those after it are not, for a product should not wait until all of them are enqueued.
    pub(super) fn enter(&mut self, lowering: &mut Lowering<'_>, stage: usize) -> (Vec<RowBlock>, Vec<Range>) {
        let compute = lowering.compute;
        if stage < lowering.plan.groups() {
            self.send(lowering);
            self.arrived(lowering);
        }
        let here = Some(stage);
        if let Some(group) = stage.checked_sub(1) {
            lowering.p.after(compute, here, "wait for tokens", self.arrived[group]);
        }
        let result = self.of_stage(lowering, stage);
        if stage < lowering.plan.groups() {
            lowering.p.after_start(
                compute,
                here,
                "wait until the next all-gather has started",
                self.barrier,
                stage as u64 + 1,
            );
        }
        result
    }

    /// Sends every group and has the computation wait for all: for one product of all tokens, where nothing is to hide.
    pub(super) fn enter_all(&mut self, lowering: &mut Lowering<'_>) -> Vec<RowBlock> {
        for _ in 0..lowering.plan.groups() {
            self.send(lowering);
            self.arrived(lowering);
        }
        if let Some(&arrived) = self.arrived.last() {
            lowering.p.after(lowering.compute, Some(0), "wait for tokens", arrived);
        }
        self.all(lowering)
    }

    /// All tokens in their order, once all have arrived.
    pub(super) fn all(&self, lowering: &Lowering<'_>) -> Vec<RowBlock> {
        lowering.all_tokens(self.own, &self.groups)
    }
}

/// All tokens in their order for a product of `own`, `[local tokens, columns]`, and of the others' rows, which come into a buffer of this
/// name; and what brings them.
pub(super) fn rows_on_their_way(
    lowering: &mut Lowering<'_>,
    own: BufferId,
    columns: usize,
    name: &str,
) -> (Vec<RowBlock>, GroupCast) {
    let (plan, rank) = (lowering.plan, lowering.rank);
    let (tokens, dtype) = (plan.spec.tokens, plan.spec.dtype);
    let all = lowering.p.buffer(name, dtype, &[tokens, columns], BufferRole::Scratch);
    let cast = GroupCast {
        part: Arc::new(plan.other_tokens_part(rank)),
        tensors: vec![(own, all)],
        wire_dtype: dtype,
        arrive: None,
        delivery: None,
    };
    let rows = plan.tokens_of(rank);
    let mut blocks = block(all, Range::new(0, rows.start));
    blocks.extend(block(own, Range::new(0, rows.len())));
    blocks.extend(block(all, Range::new(rows.end, tokens)));
    (blocks, cast)
}

pub(super) fn block(buffer: BufferId, rows: Range) -> Vec<RowBlock> {
    if rows.is_empty() { Vec::new() } else { vec![RowBlock { buffer, rows }] }
}

fn nonempty(rows: Range) -> Vec<Range> {
    if rows.is_empty() { Vec::new() } else { vec![rows] }
}
