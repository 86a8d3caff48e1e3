//! What experts give on its way back, group by group, while other groups are multiplied.

use counterpoint_mask::Range;

use super::{COMBINE, Lowering};
use crate::builder::Mark;
use crate::{
    Accumulate, BarrierId, BufferId, BufferRole, ExpertRowsOf, Gemm, GemmLayout, GroupReduce, Op, ReduceOp,
    RowBlocks, RowList, RowRanges, RowsOrigin, SignalId, StreamId, StreamKind, WaveGemm,
};

/// Sums of what the experts of all ranks give of this rank's tokens, on their way.
pub(super) struct LeavingTokens {
    stream: StreamId,
    barrier: Option<BarrierId>,
    name: String,
    columns: usize,
    /// `[tokens, columns]`: zeros, to which every group's reduction adds its tokens' rows.
    sums: BufferId,
    started: u64,
    /// When the last group that was sent is there.
    done: Option<Mark>,
    /// A group that is computed, by the mark where there is one yet, and not sent.
    waiting: Option<(Option<Mark>, usize, GroupReduce)>,
}

impl LeavingTokens {
    /// Sums of `columns` columns, the output `name`.
    pub(super) fn new(lowering: &mut Lowering<'_>, name: &str, columns: usize) -> Self {
        let stream = lowering.p.stream(COMBINE, StreamKind::Communication);
        let barrier = lowering.p.barrier();
        let tokens = lowering.plan.tokens_of(lowering.rank);
        let dtype = lowering.plan.spec.dtype;
        let sums = lowering.p.buffer(name, dtype, &[tokens, columns], BufferRole::Output);
        // Tokens without experts have no other value.
        if tokens > 0 {
            let zero = Op::ZeroRows { dst: sums, rows: Range::new(0, tokens) };
            lowering.p.push(stream, None, "zeros", zero);
        }
        let name = name.to_owned();
        Self { stream, barrier, name, columns, sums, started: 0, done: None, waiting: None }
    }

    /// Computes what the experts give, of rows of `rows`, and sends it on its way.
    pub(super) fn multiply(
        &mut self,
        lowering: &mut Lowering<'_>,
        (layout, label): (GemmLayout, &str),
        weight: BufferId,
        rows: BufferId,
    ) {
        let groups = lowering.plan.groups();
        if lowering.p.policy().is_in_waves() && groups > 1 {
            return self.multiply_in_waves(lowering, (layout, label), weight, rows);
        }
        for group in 0..groups {
            let given = given(lowering, rows, group);
            if group > 0 {
                self.after_start(lowering, group);
            }
            let (gemms, reduce) = self.group(lowering, group, (layout, weight), given);
            self.mark(lowering);
            lowering.multiply(Some(group), label, gemms, ExpertRowsOf::Leaving(group));
            self.send(lowering);
            self.waiting = Some((None, group, reduce));
            if !lowering.p.policy().leaves_workers() {
                self.send(lowering);
            }
        }
    }

    /// The same in one operation that says of each group when it is done.
    fn multiply_in_waves(
        &mut self,
        lowering: &mut Lowering<'_>,
        (layout, label): (GemmLayout, &str),
        weight: BufferId,
        rows: BufferId,
    ) {
        let (mut products, mut reduces) = (Vec::new(), Vec::new());
        for group in 0..lowering.plan.groups() {
            let given = given(lowering, rows, group);
            let (gemms, reduce) = self.group(lowering, group, (layout, weight), given);
            products.extend(gemms);
            reduces.push((products.len() as u64, reduce));
        }
        let signal: Option<SignalId> = (!products.is_empty()).then(|| lowering.p.signal());
        if let Some(signal) = signal {
            // Queued before whoever waits for its signal.
            let rows = RowsOrigin::of(&lowering.rows, ExpertRowsOf::AllLeaving);
            let op = Op::WaveGemm(WaveGemm {
                groups: products,
                grouped: true,
                signal: Some(signal),
                arrivals: None,
                rows,
            });
            lowering.p.push(lowering.compute, None, label, op);
        }
        for (group, (value, reduce)) in reduces.into_iter().enumerate() {
            if let Some(signal) = signal.filter(|_| value > 0) {
                let wait = Op::WaitSignal { signal, value };
                lowering.p.push(self.stream, Some(group), "wait for rows", wait);
            }
            self.reduce(lowering, group, reduce);
        }
    }

    /// The products of a group, and what becomes of them.
    fn group(
        &self,
        lowering: &mut Lowering<'_>,
        group: usize,
        (layout, weight): (GemmLayout, BufferId),
        given: Vec<Given>,
    ) -> (Vec<Gemm>, GroupReduce) {
        let plan = lowering.plan;
        let (dtype, partial) = (plan.spec.dtype, plan.partial_dtype());
        let (leaving, part) = {
            let of_group = &lowering.plan.leaving(&lowering.rows).groups[group];
            (of_group.rows, of_group.reduce.clone())
        };
        let name = format!("{}_partial_{group}", self.name);
        let out = lowering.p.buffer(&name, partial, &[leaving, self.columns], BufferRole::Scratch);
        let product = |(number, (a, to)): (usize, Given)| {
            let accumulate = if number % 2 == 0 { Accumulate::Start } else { Accumulate::Continue };
            let weight = (number / 2, weight);
            (!a.is_empty()).then(|| lowering.product(layout, a, weight, (out, to), accumulate))
        };
        let gemms = given.into_iter().enumerate().filter_map(product).collect();
        let reduce = GroupReduce {
            part,
            tensors: vec![(out, self.sums)],
            op: ReduceOp::Sum,
            accumulate: Accumulate::Continue,
            wire_dtype: dtype,
            reduce_dtype: dtype.accumulator(),
            arrive: self.barrier,
        };
        (gemms, reduce)
    }

    /// Marks where the group that waits to be sent is done, before anything else is computed.
    pub(super) fn mark(&mut self, lowering: &mut Lowering<'_>) {
        if let Some((ready @ None, group, _)) = &mut self.waiting {
            *ready = Some(lowering.p.mark(lowering.compute, Some(*group), "rows done"));
        }
    }

    /// Sends the group that waits for it, if one does.
    fn send(&mut self, lowering: &mut Lowering<'_>) {
        self.mark(lowering);
        if let Some((Some(ready), group, reduce)) = self.waiting.take() {
            lowering.p.after(self.stream, Some(group), "wait for rows", ready);
            self.reduce(lowering, group, reduce);
        }
    }

    fn reduce(&mut self, lowering: &mut Lowering<'_>, group: usize, reduce: GroupReduce) {
        lowering.p.push(self.stream, Some(group), COMBINE, Op::GroupReduce(reduce));
        self.started += 1;
        self.done = Some(lowering.p.mark(self.stream, Some(group), "sums done"));
    }

    /// What the computation is given from now on starts once all groups so far are on their way.
    pub(super) fn after_start(&self, lowering: &mut Lowering<'_>, stage: usize) {
        let label = "wait until the combine has started";
        lowering.p.after_start(lowering.compute, Some(stage), label, self.barrier, self.started);
    }

    /// Has the computation wait for all groups.
    pub(super) fn finish(mut self, lowering: &mut Lowering<'_>) {
        self.send(lowering);
        if let Some(last) = self.done {
            lowering.p.after(lowering.compute, None, "wait for the last sums", last);
        }
    }
}

/// Rows of an expert, and the rows of the tokens that they give to.
type Given = (RowBlocks, RowRanges);

/// What each expert, whose rows are those of a buffer, gives of a group: first to tokens of which no expert before it has, then to others.
fn given(lowering: &Lowering<'_>, buffer: BufferId, group: usize) -> Vec<Given> {
    let (leaving, experts) = (lowering.plan.leaving(&lowering.rows), lowering.experts());
    let of_expert = |expert: usize| leaving.given(group, (expert, experts));
    let given = |part: Range| {
        let (mut rows, mut to) = Given::default();
        rows.push_list(buffer, RowList::new(&leaving.rows, part));
        to.push_list(RowList::new(&leaving.to, part));
        (rows, to)
    };
    (0..experts).flat_map(of_expert).map(given).collect()
}
