//! The collective end of a group: a Program in which every rank hears of every other.

use std::sync::Arc;

use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{
    BufferId, BufferRole, BufferSpec, GroupCast, Op, OverlapPolicy, Program, ProgramOp, StreamId, StreamKind,
    StreamSpec,
};

use crate::{Backend, ExecError, Prepared, Transport};

/// An all-gather of one element.
pub(super) fn program(rank: usize, world_size: usize) -> Program {
    let buffer = |name: &str, rows, role| BufferSpec {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: vec![rows, 1],
        role,
    };
    let gather = GroupCast {
        part: Arc::new(GroupPart::all_gather_v(rank, &vec![1; world_size])),
        tensors: vec![(BufferId(0), BufferId(1))],
        wire_dtype: DType::F32,
        arrive: None,
        delivery: None,
    };
    Program {
        name: "the end of the group".to_owned(),
        rank,
        world_size,
        streams: vec![StreamSpec { name: "communication".to_owned(), kind: StreamKind::Communication }],
        buffers: vec![buffer("own", 1, BufferRole::Input), buffer("all", world_size, BufferRole::Output)],
        slots: Vec::new(),
        num_events: 0,
        num_barriers: 0,
        num_signals: 0,
        policy: OverlapPolicy::default(),
        ops: vec![ProgramOp {
            stream: StreamId(0),
            stage: None,
            label: "close".to_owned(),
            op: Op::GroupCast(gather),
        }],
    }
}

/// Its tensors on one rank, by name.
pub(super) fn tensors<B: Backend, T: Transport<B>>(
    rank: &Prepared<B, T>,
) -> Result<Vec<(&'static str, B::Buffer)>, ExecError> {
    let named = ["own", "all"].into_iter().zip(&rank.program().buffers);
    named.map(|(name, spec)| Ok((name, rank.backend().allocate(spec)?))).collect()
}
