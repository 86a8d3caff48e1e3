//! Predicts the timeline of Programs from a cost model, without running them.

mod clockwork;
mod rank;

use counterpoint_cost::CostModel;
use counterpoint_plan::{DType, GroupPart, Topology};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{BufferId, GroupReduce, Op, OpCost, Program, ProgramOp, Span, Timeline};

/// Why a timeline cannot be predicted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// Operations wait for each other in a circle, or for something that never happens.
    #[error("rank {rank} never gets past op {op} ({label}): what it waits for never happens")]
    Stuck {
        /// The rank.
        rank: usize,
        /// Index of the operation.
        op: usize,
        /// Its label.
        label: String,
    },
    /// Ranks queue different collectives.
    #[error("collective {collective} is `{label}` on rank {rank} and `{other_label}` on rank {other}")]
    Mismatch {
        /// Number of the collective in the Program.
        collective: usize,
        /// A rank.
        rank: usize,
        /// What it queues.
        label: String,
        /// Another rank.
        other: usize,
        /// What that one queues; empty when nothing.
        other_label: String,
    },
}

/// Runs ranks' Programs against the cost model.
///
/// Computation takes `launch + work / rate` (attention what [`CostModel::forward_seconds`] says, passes over memory
/// `launch + bytes / rate`); a collective begins on a rank when all ranks that it exchanges rows with have started it, and
/// takes that rank's link `alpha + bytes / beta`, with the
/// larger of the bytes sent and received, as links are full-duplex. Bytes that cross nodes take the network in the same
/// way; the slower of the two counts.
///
/// A product whose rows travel while it is computed takes the longer of both, and the link's start. A backward whose gradients do
/// ends when those that its rank owns have come from everyone, and are added. Attention that takes rows
/// as they arrive does what needs none of them ([`ReadyWork`](counterpoint_cost::ReadyWork)), and the rest once all are there.
///
/// Under [`CostModel::sharing`] the work of one rank gets in its own way, as the Program's policy allows: a computation
/// holds all workers but the policy's margin, so a collective that needs workers starts only where none runs, and
/// computation that runs concurrently with it has fewer; collectives that run at once follow each other on their link; and with a
/// single hardware queue an operation starts only after those queued before it. Without it, streams do not slow each other
/// down.
///
/// `programs` may be those of a few ranks of the world: a rank that is not given keeps nobody waiting. Where many ranks do
/// the same, one of them stands for all. Ranks of the timeline are indices into `programs`.
///
/// # Errors
/// Programs that would hang, or whose collectives do not match.
pub fn simulate(
    programs: &[Program],
    topology: &Topology,
    cost: &(impl OpCost + ?Sized),
) -> Result<Timeline, SimulateError> {
    check_collectives(programs)?;
    let mut spans = clockwork::run(programs, topology, cost)?;
    spans.sort_by(|a: &Span, b: &Span| {
        (a.rank, a.stream).cmp(&(b.rank, b.stream)).then(a.start.total_cmp(&b.start))
    });
    let first = programs.first();
    Ok(Timeline {
        name: first.map(|p| p.name.clone()).unwrap_or_default(),
        world_size: programs.len(),
        streams: first.map(|p| p.streams.iter().map(|s| s.name.clone()).collect()).unwrap_or_default(),
        spans,
    })
}

fn check_collectives(programs: &[Program]) -> Result<(), SimulateError> {
    let labels = |program: &'_ Program| -> Vec<String> {
        let collectives = program.ops.iter().filter(|op| collective_part(&op.op).is_some());
        collectives.map(|op| op.label.clone()).collect()
    };
    let Some(first) = programs.first().map(labels) else { return Ok(()) };
    for (other, program) in programs.iter().enumerate().skip(1) {
        let theirs = labels(program);
        for collective in 0..first.len().max(theirs.len()) {
            let (mine, theirs) = (first.get(collective), theirs.get(collective));
            if mine != theirs {
                return Err(SimulateError::Mismatch {
                    collective,
                    rank: 0,
                    label: mine.cloned().unwrap_or_default(),
                    other,
                    other_label: theirs.cloned().unwrap_or_default(),
                });
            }
        }
    }
    Ok(())
}

/// Who sends which rows to whom, of a fused operation in its first collective.
fn collective_part(op: &Op) -> Option<&GroupPart> {
    op.parts().iter().find_map(|part| match part {
        Op::GroupCast(op) => Some(&*op.part),
        Op::GroupReduce(op) => Some(&*op.part),
        _ => None,
    })
}

/// What a collective moves through each of a rank's ports: its node's links, and the network. A copy engine begins a copy for every
/// range of rows and who receives it, one after the other, at its own rate where that was measured.
struct Transfer {
    /// Seconds until bytes move.
    alpha: [f64; 2],
    /// Seconds in which they do.
    moving: [f64; 2],
}

fn transfer(program: &Program, op: &ProgramOp, topology: &Topology, cost: &CostModel) -> Transfer {
    if !op.op.is_left_to_engines(program.policy.mover) {
        return bytes_moved(program, op, topology, cost);
    }
    let by_engines = CostModel { link: cost.engine.unwrap_or(cost.link), ..*cost };
    let mut moved = bytes_moved(program, op, topology, &by_engines);
    if let Op::GroupCast(cast) = &op.op {
        let copies = cast.part.owned.iter().map(|split| split.ranks.len()).sum::<usize>();
        moved.moving[0] += copies as f64 * cost.copy_seconds;
    }
    moved
}

fn bytes_moved(program: &Program, op: &ProgramOp, topology: &Topology, cost: &CostModel) -> Transfer {
    let is_backward = op.op.backward().is_some();
    let parts = op.op.parts().iter().filter_map(|part| match part {
        Op::GroupReduce(op) if is_backward => Some(to_owners(program, op, topology, cost)),
        Op::GroupCast(op) => {
            Some(rows_moved(program, (&op.part, &op.tensors, op.wire_dtype), topology, cost))
        }
        Op::GroupReduce(op) => Some(rows_reduced(program, op, topology, cost)),
        _ => None,
    });
    // Collectives of one kernel start together.
    let together = |first: Transfer, next: Transfer| Transfer {
        alpha: first.alpha,
        moving: [0, 1].map(|port| first.moving[port] + next.moving[port]),
    };
    parts.reduce(together).unwrap_or(Transfer { alpha: [0.0; 2], moving: [0.0; 2] })
}

/// Kernels on GPUs fetch what is summed from where it lies, and round it to the type on the wire behind that; others send that type.
fn rows_reduced(program: &Program, reduce: &GroupReduce, topology: &Topology, cost: &CostModel) -> Transfer {
    let one_type = |dtype: DType| rows_moved(program, (&reduce.part, &reduce.tensors, dtype), topology, cost);
    let mut moved = one_type(reduce.wire_dtype);
    let widest = reduce.tensors.iter().map(|(partial, _)| program.buffers[partial.0].dtype);
    if let Some(fetched) = widest.max_by_key(|dtype| dtype.size()).filter(|_| cost.sharing.is_some()) {
        moved.moving[0] = one_type(fetched).moving[0];
    }
    moved
}

/// What is left of a reduction whose rows leave while their computation goes on: the owner adds what has come. Only kernels on GPUs send
/// so; elsewhere rows travel after it.
fn to_owners(program: &Program, reduce: &GroupReduce, topology: &Topology, cost: &CostModel) -> Transfer {
    let mut moved = rows_moved(program, (&reduce.part, &reduce.tensors, reduce.wire_dtype), topology, cost);
    if cost.sharing.is_some() && program.policy.moves_by_transport() {
        let row =
            |id: BufferId| (program.buffers[id.0].row_elements() * program.buffers[id.0].dtype.size()) as f64;
        let owned =
            reduce.part.owned.iter().map(|split| (split.rows.len() * split.ranks.len()) as f64).sum::<f64>();
        let bytes = reduce
            .tensors
            .iter()
            .map(|&(partial, sum)| owned * row(partial) + program.buffers[sum.0].bytes() as f64);
        moved.moving = [bytes.sum::<f64>() / cost.memory_bytes_per_second, 0.0];
    }
    moved
}

/// Operations that compute first, as any computation does, and in how many parts, and then wait for other ranks.
fn parts_before_collective(op: &Op) -> usize {
    match (op, op.backward()) {
        (Op::Fused(_), Some(backward)) => 1 + usize::from(backward.arriving.is_some()),
        _ => 0,
    }
}

/// Part, tensors and type on the wire of what travels.
type Moved<'a> = (&'a GroupPart, &'a [(BufferId, BufferId)], DType);

fn rows_moved(
    program: &Program,
    (part, tensors, wire): Moved<'_>,
    topology: &Topology,
    cost: &CostModel,
) -> Transfer {
    let elements: usize = tensors.iter().map(|(input, _)| program.buffers[input.0].row_elements()).sum();
    let row_bytes = (elements * wire.size()) as u64;
    let me = program.rank;
    let node = topology.node(me);
    // Rows through this rank's port on each side, within the node and across.
    let (mut near, mut far) = ([0u64; 2], [0u64; 2]);
    let mut count = |side: usize, rank: u32, rows: usize| {
        let peer = rank as usize;
        if topology.node(peer) != node {
            far[side] += rows as u64;
        } else if peer != me {
            near[side] += rows as u64;
        }
    };
    for split in &part.owned {
        split.ranks.iter().for_each(|&rank| count(0, rank, split.rows.len()));
    }
    for split in &part.remote {
        count(1, split.rank, split.rows.len());
    }
    let (mut alpha, mut moving) = ([0.0; 2], [0.0; 2]);
    for (port, (link, rows)) in [(&cost.link, near), (&cost.network, far)].into_iter().enumerate() {
        let bytes = rows[0].max(rows[1]) * row_bytes;
        if bytes > 0 {
            alpha[port] = link.alpha_seconds;
            moving[port] = bytes as f64 / link.bytes_per_second;
        }
    }
    Transfer { alpha, moving }
}
