//! The largest score of each query head (`max_logits`): of this rank while it computes, then of all ranks.

use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{AttentionSpec, DType, GroupPart, OwnedSplit, RemoteSplit};

use crate::builder::ProgramBuilder;
use crate::{Accumulate, BufferId, BufferRole, ColumnMax, GroupCast, MaxLogits, Op, StreamId};

/// Where they are gathered. Every operation of the forward adds its own on the one stream that computes.
pub(super) struct HeadMaxima {
    own: BufferId,
    /// Of several ranks: a row of each, and the result.
    all: Option<(BufferId, BufferId)>,
    dtype: DType,
    ranks: usize,
    begun: bool,
}

impl HeadMaxima {
    pub(super) fn declare(p: &mut ProgramBuilder, spec: &AttentionSpec, ranks: usize) -> Self {
        let (dtype, heads) = (spec.dtype.accumulator(), spec.heads_q);
        let mut declare = |name, shape: &[usize], role| p.buffer(name, dtype, shape, role);
        if ranks == 1 {
            let own = declare("max_logits", &[heads], BufferRole::Output);
            return Self { own, all: None, dtype, ranks, begun: false };
        }
        // Rows that travel are whole pieces of 16 bytes.
        let row = heads.next_multiple_of(16 / dtype.size());
        let own = declare("max_logits_partial", &[1, row], BufferRole::Scratch);
        let gathered = declare("max_logits_partials", &[ranks, row], BufferRole::Scratch);
        let result = declare("max_logits", &[heads], BufferRole::Output);
        Self { own, all: Some((gathered, result)), dtype, ranks, begun: false }
    }

    /// What the next operation is given.
    pub(super) fn take(&mut self) -> MaxLogits {
        let accumulate = if self.begun { Accumulate::Continue } else { Accumulate::Start };
        self.begun = true;
        MaxLogits { buffer: self.own, accumulate }
    }

    /// Once everything is computed: every rank gets the others' rows and takes the largest.
    pub(super) fn finish(self, p: &mut ProgramBuilder, compute: StreamId, cast: StreamId) {
        let Some((gathered, result)) = self.all else { return };
        let known = p.mark(compute, None, "max logits done");
        p.after(cast, None, "wait for max logits", known);
        let op = GroupCast {
            part: Arc::new(self.all_gather()),
            tensors: vec![(self.own, gathered)],
            wire_dtype: self.dtype,
            arrive: None,
            delivery: None,
        };
        p.push(cast, None, "cast max logits", Op::GroupCast(op));
        let arrived = p.mark(cast, None, "max logits arrived");
        p.after(compute, None, "wait for all max logits", arrived);
        let op = ColumnMax { src: gathered, dst: result };
        p.push(compute, None, "largest max logits", Op::ColumnMax(op));
    }

    /// The pattern in which every rank has one row, and all ranks, itself included, get it.
    fn all_gather(&self) -> GroupPart {
        let ranks = 0..self.ranks as u32;
        GroupPart {
            owned: vec![OwnedSplit { rows: Range::new(0, 1), ranks: ranks.clone().collect() }],
            remote: ranks
                .map(|rank| RemoteSplit { rows: Range::new(rank as usize, rank as usize + 1), rank })
                .collect(),
        }
    }
}
