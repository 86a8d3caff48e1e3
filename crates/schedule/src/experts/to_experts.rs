//! Tokens on their way to a rank's experts, group by group, and the products of those that are there.

use super::{DISPATCH, Lowering};
use crate::builder::Mark;
use crate::{
    Accumulate, BarrierId, BufferId, BufferRole, ExpertRowsOf, GemmLayout, GroupCast, Op, RowBlocks, RowList,
    RowRanges, StreamId, StreamKind,
};

/// Tokens of all ranks on their way to this one's experts; its own are there.
pub(super) struct ArrivingTokens {
    own: BufferId,
    columns: usize,
    name: String,
    stream: StreamId,
    barrier: Option<BarrierId>,
    /// Of each group that has been sent, where its tokens come to, and when they are there.
    groups: Vec<(BufferId, Mark)>,
}

impl ArrivingTokens {
    /// The way of `own`, `[tokens, columns]`; groups come into buffers called `name` and a number.
    pub(super) fn new(lowering: &mut Lowering<'_>, own: BufferId, columns: usize, name: &str) -> Self {
        let stream = lowering.p.stream(DISPATCH, StreamKind::Communication);
        let barrier = lowering.p.barrier();
        Self { own, columns, name: name.to_owned(), stream, barrier, groups: Vec::new() }
    }

    /// Sends the next group.
    fn send(&mut self, lowering: &mut Lowering<'_>) {
        let (group, dtype) = (self.groups.len(), lowering.plan.spec.dtype);
        let (arriving, part) = {
            let of_group = &lowering.plan.arriving(&lowering.rows).groups[group];
            (of_group.rows, of_group.cast.clone())
        };
        let (name, p) = (format!("{}_{group}", self.name), &mut lowering.p);
        let buffer = p.buffer(&name, dtype, &[arriving, self.columns], BufferRole::Scratch);
        let op = GroupCast {
            part,
            tensors: vec![(self.own, buffer)],
            wire_dtype: dtype,
            arrive: self.barrier,
            delivery: None,
        };
        p.push(self.stream, Some(group + 1), DISPATCH, Op::GroupCast(op));
        self.groups.push((buffer, p.mark(self.stream, Some(group + 1), "tokens arrived")));
    }

    /// Sends all groups.
    pub(super) fn send_all(&mut self, lowering: &mut Lowering<'_>) {
        while self.groups.len() < lowering.plan.groups() {
            self.send(lowering);
        }
    }

    /// Has the computation wait for all groups that were sent.
    pub(super) fn wait_for_all(&self, lowering: &mut Lowering<'_>) {
        if let Some(&(_, arrived)) = self.groups.last() {
            lowering.p.after(lowering.compute, None, "wait for tokens", arrived);
        }
    }

    /// The products of all experts into rows of `out`: of the rank's own tokens while the first group comes, and of each group while the
    /// next does. Where nothing overlaps, one product of each expert.
    pub(super) fn multiply(
        &mut self,
        lowering: &mut Lowering<'_>,
        (layout, label): (GemmLayout, &str),
        weight: BufferId,
        out: BufferId,
    ) {
        let groups = lowering.plan.groups();
        let product = |lowering: &Lowering<'_>, expert, a: RowBlocks, rows: RowRanges| {
            let to = (out, rows);
            (!a.is_empty()).then(|| lowering.product(layout, a, (expert, weight), to, Accumulate::Start))
        };
        if !lowering.p.policy().overlaps() {
            self.send_all(lowering);
            let of_expert = |expert: usize| {
                let rows = lowering.rows.experts[expert];
                product(lowering, expert, self.blocks(lowering, expert), vec![rows].into())
            };
            let products = (0..lowering.experts()).filter_map(of_expert).collect();
            return lowering.multiply(Some(0), label, products, ExpertRowsOf::Tokens);
        }
        // Of every stage and expert what is multiplied; buffers of groups come with their stages.
        let mut stages: Vec<Vec<Wanted>> = (0..=groups).map(|_| Self::of_experts(lowering)).collect();
        let arriving = lowering.plan.arriving(&lowering.rows);
        for expert in 0..lowering.experts() {
            for run in arriving.runs_of(expert) {
                let (tokens, places) = &mut stages[run.group.map_or(0, |group| group + 1)][expert];
                tokens.extend(RowList::new(&arriving.tokens, run.rows));
                places.push(run.rows);
            }
        }
        for (stage, of_stage) in stages.into_iter().enumerate() {
            if stage < groups {
                self.send(lowering);
            }
            if let Some(group) = stage.checked_sub(1) {
                let arrived = self.groups[group].1;
                lowering.p.after(lowering.compute, Some(stage), "wait for tokens", arrived);
            }
            if stage < groups {
                lowering.p.after_start(
                    lowering.compute,
                    Some(stage),
                    "wait until the next dispatch has started",
                    self.barrier,
                    stage as u64 + 1,
                );
            }
            let buffer = stage.checked_sub(1).map_or(self.own, |group| self.groups[group].0);
            let of_expert = |(expert, (tokens, places)): (usize, Wanted)| {
                let mut rows = RowBlocks::default();
                tokens.into_iter().for_each(|tokens| rows.push_list(buffer, Some(tokens)));
                product(lowering, expert, rows, places)
            };
            let products = of_stage.into_iter().enumerate().filter_map(of_expert).collect();
            lowering.multiply(Some(stage), label, products, ExpertRowsOf::Arriving(stage));
        }
    }

    /// For every expert no rows yet.
    fn of_experts(lowering: &Lowering<'_>) -> Vec<Wanted> {
        vec![Wanted::default(); lowering.experts()]
    }

    /// The tokens of an expert in the order of its rows, wherever they are.
    pub(super) fn blocks(&self, lowering: &Lowering<'_>, expert: usize) -> RowBlocks {
        let arriving = lowering.plan.arriving(&lowering.rows);
        let mut blocks = RowBlocks::default();
        for run in arriving.runs_of(expert) {
            let buffer = run.group.map_or(self.own, |group| self.groups[group].0);
            blocks.push_list(buffer, RowList::new(&arriving.tokens, run.rows));
        }
        blocks
    }
}

/// Rows of tokens in a buffer of them, and the rows of the expert that they become.
type Wanted = (Vec<RowList>, RowRanges);
