use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{Activations, LinearPlan};

use super::{GATHER, REDUCE};
use crate::builder::{Mark, ProgramBuilder};
use crate::{
    Accumulate, BarrierId, BufferId, BufferRole, Gemm, GemmReduce, GroupCast, GroupReduce, Mover, Op,
    OverlapPolicy, ReduceOp, RowBlock, SignalId, StartOrder, StreamId, StreamKind, WaveGemm, WorkerShare,
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
    /// Of each group that has been sent, its rows of all ranks, own ones included.
    groups: Vec<(BufferId, Mark)>,
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
        Self { own, columns, name: name.to_owned(), role, stream, groups: Vec::new(), barrier }
    }

    /// Sends the next group.
    fn send(&mut self, lowering: &mut Lowering<'_>) {
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
        p.push(self.stream, Some(group + 1), GATHER, Op::GroupCast(op));
        self.groups.push((buffer, p.mark(self.stream, Some(group + 1), "tokens arrived")));
    }

    /// The rows of stage 0, which the rank has itself, and those of stage `group + 1`, which come from the others: for each
    /// piece where it lies and which tokens it is. Has the computation wait for it. The group that the stage's product hides is sent
    /// before; those after it are not, for a product should not wait until all of them are enqueued.
    pub(super) fn enter(&mut self, lowering: &mut Lowering<'_>, stage: usize) -> (Vec<RowBlock>, Vec<Range>) {
        let (plan, rank, compute) = (lowering.plan, lowering.rank, lowering.compute);
        if stage < plan.groups() {
            self.send(lowering);
        }
        let p = &mut lowering.p;
        let here = Some(stage);
        let result = match stage.checked_sub(1) {
            None => {
                let tokens = plan.tokens_of(rank);
                (block(self.own, Range::new(0, tokens.len())), nonempty(tokens))
            }
            Some(group) => {
                let (buffer, arrived) = self.groups[group];
                p.after(compute, here, "wait for tokens", arrived);
                let pieces = plan.group_tokens(group);
                let mut end = 0;
                let (mut blocks, mut tokens) = (Vec::new(), Vec::new());
                for (owner, piece) in pieces.into_iter().enumerate() {
                    end += piece.len();
                    if owner != rank && !piece.is_empty() {
                        blocks.push(RowBlock { buffer, rows: Range::new(end - piece.len(), end) });
                        tokens.push(piece);
                    }
                }
                (blocks, tokens)
            }
        };
        if stage < plan.groups() {
            p.after_start(
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
        }
        if let Some(&(_, arrived)) = self.groups.last() {
            lowering.p.after(lowering.compute, Some(0), "wait for tokens", arrived);
        }
        self.all(lowering.plan)
    }

    /// All tokens in their order, once all have arrived.
    pub(super) fn all(&self, plan: &LinearPlan) -> Vec<RowBlock> {
        let buffers: Vec<BufferId> = self.groups.iter().map(|(buffer, _)| *buffer).collect();
        all_tokens(plan, &buffers)
    }
}

/// All tokens in their order for a product of `own`, `[local tokens, columns]`, and of the others' rows, which come while it is
/// computed, into a buffer of this name; and what brings them.
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

/// All tokens in their order, from one buffer for every group.
pub(super) fn all_tokens(plan: &LinearPlan, groups: &[BufferId]) -> Vec<RowBlock> {
    let mut blocks = Vec::new();
    for owner in 0..plan.tp_size {
        for (group, buffer) in groups.iter().enumerate() {
            let before: usize = (0..owner).map(|rank| plan.group_rows(rank, group).len()).sum();
            let rows = plan.group_rows(owner, group).len();
            blocks.extend(block(*buffer, Range::new(before, before + rows)));
        }
    }
    blocks
}

/// Shares of sums on their way to the ranks that own the tokens, group by group, and, where all ranks want all of them, back.
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
    /// Shares that are computed by the mark, where there is one yet, and not sent.
    waiting: Option<(Option<Mark>, Travel)>,
    name: String,
    columns: usize,
    /// Of the sums once they are together.
    role: BufferRole,
    mover: Mover,
    /// Products that one kernel computes, with what becomes of each.
    waves: Option<Waves>,
}

/// Groups whose sums travel while one kernel computes all of them.
struct Waves {
    signal: SignalId,
    products: Vec<Gemm>,
    travels: Vec<Travel>,
}

/// What becomes of a group's shares.
struct Travel {
    group: usize,
    reduce: GroupReduce,
    spread: Option<GroupCast>,
    /// What it ends as.
    result: BufferId,
}

impl ReducedTokens {
    /// The sums are `[local tokens, columns]`, called `name` where they are together: an output, or scratch of an operation behind them.
    /// Under [`Mover::Fused`] no other collective may run beside the products.
    pub(super) fn new(
        lowering: &mut Lowering<'_>,
        name: &str,
        columns: usize,
        role: BufferRole,
        mover: Mover,
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
        let in_waves = p.policy().start == StartOrder::Signals && mover != Mover::Fused && plan.groups() > 1;
        let waves = in_waves.then(|| Waves { signal: p.signal(), products: Vec::new(), travels: Vec::new() });
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
            mover,
            waves,
        }
    }

    /// The buffer for this rank's shares of a group: `[rows of the group, columns]`.
    pub(super) fn share(&self, lowering: &mut Lowering<'_>, group: usize) -> BufferId {
        let plan = lowering.plan;
        let rows = plan.group_tokens(group).iter().map(Range::len).sum();
        let name = format!("{}_share_{group}", self.name);
        lowering.p.buffer(&name, plan.spec.dtype, &[rows, self.columns], BufferRole::Scratch)
    }

    /// Computes a group's shares, under the label given, and sends them on their way; the product's result is
    /// [`ReducedTokens::share`]. Where one kernel computes all groups, it does so once it has been given the last.
    ///
    /// Where computation leaves communication its workers, shares are enqueued behind the computation that hides them: on a
    /// single hardware queue a collective that waits for other ranks would else hold that one up, and where computation starts
    /// first its blocks find whole clusters of multiprocessors.
    pub(super) fn compute(&mut self, lowering: &mut Lowering<'_>, group: usize, label: &str, gemm: Gemm) {
        let (plan, rank, compute) = (lowering.plan, lowering.rank, lowering.compute);
        let p = &mut lowering.p;
        let (here, dtype, share) = (Some(group), plan.spec.dtype, gemm.out);
        let fused = self.mover == Mover::Fused;
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
            tensors: vec![(share, sum)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            wire_dtype: dtype,
            reduce_dtype: dtype.accumulator(),
            // What is computed while it travels needs no barrier to start after it.
            arrive: self.barrier.filter(|_| !fused),
        };
        let spread = self.replicated.map(|all| GroupCast {
            part: Arc::new(back_to_all(plan, rank, group)),
            tensors: vec![(sum, all)],
            wire_dtype: dtype,
            arrive: None,
            delivery: None,
        });
        let result = self.replicated.unwrap_or(sum);
        if fused {
            p.push(compute, here, label, Op::GemmReduce(Box::new(GemmReduce { gemm, reduce, spread })));
            return self.done.push((result, p.mark(compute, here, "sums done")));
        }
        let travel = Travel { group, reduce, spread, result };
        let Some(waves) = &mut self.waves else {
            self.mark(lowering);
            lowering.p.push(compute, here, label, Op::Gemm(gemm));
            self.send(lowering);
            self.waiting = Some((None, travel));
            if !leaves_workers(lowering.p.policy()) {
                self.send(lowering);
            }
            return;
        };
        waves.products.push(gemm);
        waves.travels.push(travel);
        if waves.products.len() < plan.groups() {
            return;
        }
        // The kernel is queued before whoever waits for its signal.
        let (signal, groups) = (waves.signal, std::mem::take(&mut waves.products));
        let travels = std::mem::take(&mut waves.travels);
        p.push(compute, None, label, Op::WaveGemm(WaveGemm { groups, signal }));
        for (wave, travel) in travels.into_iter().enumerate() {
            let value = wave as u64 + 1;
            let wait = Op::WaitSignal { signal, value };
            lowering.p.push(self.reduce, Some(travel.group), "wait for shares", wait);
            self.depart(lowering, travel);
        }
    }

    /// Marks where the shares that wait to be sent are done: before anything else is computed. On a single hardware queue such a mark holds
    /// up all that is enqueued behind it until they are, so what may run beside them comes before.
    pub(super) fn mark(&mut self, lowering: &mut Lowering<'_>) {
        if let Some((ready @ None, travel)) = &mut self.waiting {
            *ready = Some(lowering.p.mark(lowering.compute, Some(travel.group), "shares done"));
        }
    }

    /// Sends the shares that wait for it on their way, if there are any.
    pub(super) fn send(&mut self, lowering: &mut Lowering<'_>) {
        self.mark(lowering);
        let Some((Some(ready), travel)) = self.waiting.take() else { return };
        lowering.p.after(self.reduce, Some(travel.group), "wait for shares", ready);
        self.depart(lowering, travel);
    }

    /// Sends a group's shares on their way, for which `reduce` has waited.
    fn depart(&mut self, lowering: &mut Lowering<'_>, travel: Travel) {
        let Travel { group, reduce, spread, result } = travel;
        let (p, here) = (&mut lowering.p, Some(group));
        p.push(self.reduce, here, REDUCE, Op::GroupReduce(reduce));
        self.started += 1;
        let mut end = p.mark(self.reduce, here, "sums done");
        if let (Some(gather), Some(cast)) = (self.gather, spread) {
            p.after(gather, here, "wait for sums", end);
            p.push(gather, here, GATHER, Op::GroupCast(cast));
            end = p.mark(gather, here, "sums everywhere");
        }
        self.done.push((result, end));
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

/// Whether communication can start however much computation has started before it.
pub(super) fn leaves_workers(policy: &OverlapPolicy) -> bool {
    let apart = policy.workers != WorkerShare::Common || policy.mover == Mover::CopyEngine;
    policy.start == StartOrder::Concurrent && apart
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

fn block(buffer: BufferId, rows: Range) -> Vec<RowBlock> {
    if rows.is_empty() { Vec::new() } else { vec![RowBlock { buffer, rows }] }
}

fn nonempty(rows: Range) -> Vec<Range> {
    if rows.is_empty() { Vec::new() } else { vec![rows] }
}
