//! Predicts the timeline of Programs from a cost model, without running them.

mod clockwork;
mod rank;

use counterpoint_mask::Band;
use counterpoint_plan::{AttentionWork, CostModel, DType, GroupPart, ReadyWork, Topology};
use thiserror::Error;

use crate::{
    Accumulate, ArrivingKeys, AttentionBackward, AttentionState, BufferId, ForwardBegin, ForwardEnd, Gemm,
    GemmLayout, GroupReduce, Mover, Op, OpCost, Program, ProgramOp, RowBlock, Span, Timeline,
};

/// Why a timeline cannot be predicted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
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
/// as they arrive does what needs none of them ([`ReadyWork`]), and the rest once all are there.
///
/// Under [`CostModel::sharing`] the work of one rank gets in its own way, as the Program's policy allows: a computation
/// holds all workers but the policy's margin, so a collective that needs workers starts only where none runs, and
/// computation that runs beside it has fewer; collectives that run at once follow each other on their link; and with a
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

fn collective_part(op: &Op) -> Option<&GroupPart> {
    match op {
        Op::GroupCast(op) => Some(&op.part),
        Op::GroupReduce(op) => Some(&op.part),
        Op::BackwardReduce(op) => Some(&op.reduce.part),
        Op::GemmReduce(op) => Some(&op.reduce.part),
        Op::CastGemm(op) => Some(&op.cast.part),
        _ => None,
    }
}

fn arrives_at(op: &Op) -> Option<usize> {
    match op {
        Op::GroupCast(op) => op.arrive.map(|barrier| barrier.0),
        Op::GroupReduce(op) => op.arrive.map(|barrier| barrier.0),
        Op::BackwardReduce(op) => op.reduce.arrive.map(|barrier| barrier.0),
        Op::GemmReduce(op) => op.reduce.arrive.map(|barrier| barrier.0),
        Op::CastGemm(op) => op.cast.arrive.map(|barrier| barrier.0),
        _ => None,
    }
}

/// What a collective moves through each of a rank's ports: its node's links, and the network. A copy engine begins a copy for every
/// range of rows and who receives it, one after the other.
struct Transfer {
    /// Seconds until bytes move.
    alpha: [f64; 2],
    /// Seconds in which they do.
    moving: [f64; 2],
}

fn transfer(program: &Program, op: &ProgramOp, topology: &Topology, cost: &CostModel) -> Transfer {
    let mut moved = bytes_moved(program, op, topology, cost);
    if program.policy.mover.leaves_to_engines(&op.op)
        && let Op::GroupCast(cast) = &op.op
    {
        let copies = cast.part.owned.iter().map(|split| split.ranks.len()).sum::<usize>();
        moved.moving[0] += copies as f64 * cost.copy_seconds;
    }
    moved
}

fn bytes_moved(program: &Program, op: &ProgramOp, topology: &Topology, cost: &CostModel) -> Transfer {
    match &op.op {
        Op::GroupCast(op) => rows_moved(program, (&op.part, &op.tensors, op.wire_dtype), topology, cost),
        Op::GroupReduce(op) => rows_moved(program, (&op.part, &op.tensors, op.wire_dtype), topology, cost),
        Op::BackwardReduce(op) => homeward(program, &op.reduce, topology, cost),
        Op::GemmReduce(op) => {
            let reduce = &op.reduce;
            let mut moved =
                rows_moved(program, (&reduce.part, &reduce.tensors, reduce.wire_dtype), topology, cost);
            if let Some(cast) = &op.spread {
                let spread =
                    rows_moved(program, (&cast.part, &cast.tensors, cast.wire_dtype), topology, cost);
                (0..2).for_each(|port| moved.moving[port] += spread.moving[port]);
            }
            moved
        }
        Op::CastGemm(op) => {
            let cast = &op.cast;
            rows_moved(program, (&cast.part, &cast.tensors, cast.wire_dtype), topology, cost)
        }
        _ => Transfer { alpha: [0.0; 2], moving: [0.0; 2] },
    }
}

/// What is left of a reduction whose rows leave while their computation goes on: the owner adds what has come. Only kernels on GPUs send
/// so; elsewhere rows travel after it.
fn homeward(program: &Program, reduce: &GroupReduce, topology: &Topology, cost: &CostModel) -> Transfer {
    let mut moved = rows_moved(program, (&reduce.part, &reduce.tensors, reduce.wire_dtype), topology, cost);
    if cost.sharing.is_some() && program.policy.mover == Mover::Transport {
        let row =
            |id: BufferId| (program.buffers[id.0].row_elements() * program.buffers[id.0].dtype.size()) as f64;
        let owned =
            reduce.part.owned.iter().map(|split| (split.rows.len() * split.ranks.len()) as f64).sum::<f64>();
        let bytes = reduce
            .tensors
            .iter()
            .map(|&(share, sum)| owned * row(share) + program.buffers[sum.0].bytes() as f64);
        moved.moving = [bytes.sum::<f64>() / cost.memory_bytes_per_second, 0.0];
    }
    moved
}

/// Operations that compute first, as any computation does, and in how many parts, and then meet other ranks.
fn parts_before_meeting(op: &Op) -> usize {
    match op {
        Op::BackwardReduce(both) if both.backward.arriving.is_some() => 2,
        Op::BackwardReduce(_) => 1,
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

/// Of a computation, the part that needs no rows that arrive while it runs.
fn ready_part(program: &Program, op: &ProgramOp, cost: &CostModel) -> f64 {
    let Some(arriving) = op.op.arriving() else { return 1.0 };
    let (q, k, bands) = match &op.op {
        Op::AttentionForward(a) => (a.q, a.k, &a.bands),
        other => match other.backward() {
            Some(a) => (a.q, a.k, &a.bands),
            None => return 1.0,
        },
    };
    let (q, own_rows) = (&program.buffers[q.0], program.buffers[k.0].rows());
    ReadyWork::of(bands, own_rows).part(q.shape[1], arriving.delivery.parts, cost)
}

/// Seconds of an operation, of a rank that has computed for so many before.
pub(crate) fn compute_seconds(
    program: &Program,
    op: &ProgramOp,
    computed_seconds: f64,
    cost: &CostModel,
) -> f64 {
    let bytes = |id: BufferId| program.buffers[id.0].bytes();
    let work = match &op.op {
        Op::AttentionForward(a) => {
            let state = |state: &AttentionState| state.buffers().into_iter().map(bytes).sum::<u64>();
            let begun = if let ForwardBegin::Continue(begin) = &a.begin { state(begin) } else { 0 };
            let left = if let ForwardEnd::State(end) = &a.end { state(end) } else { 0 };
            let work = attention_work(program, &a.bands, [a.q, a.k, a.v], a.arriving.as_ref());
            return cost.forward_seconds(&AttentionWork {
                staged: begun + left > 0,
                // A tile waits for its state before it can end, so it is read at half the rate.
                passed_bytes: 2 * begun + left,
                computed_seconds,
                ..work
            });
        }
        Op::AttentionBackward(a) => return backward_seconds(program, a, computed_seconds, cost),
        Op::BackwardReduce(both) => return backward_seconds(program, &both.backward, computed_seconds, cost),
        Op::Gemm(gemm) => product_seconds(program, gemm, cost),
        Op::WaveGemm(waves) => waves_seconds(program, &waves.groups, cost),
        Op::GemmReduce(both) => product_seconds(program, &both.gemm, cost),
        Op::CastGemm(both) => product_seconds(program, &both.gemm, cost),
        Op::CopyRows { src, rows, .. } => {
            let src = &program.buffers[src.0];
            // Read and written.
            2.0 * (rows * src.row_elements() * src.dtype.size()) as f64 / cost.memory_bytes_per_second
        }
        Op::ZeroRows { dst, rows } => {
            let dst = &program.buffers[dst.0];
            (rows.len() * dst.row_elements() * dst.dtype.size()) as f64 / cost.memory_bytes_per_second
        }
        Op::AttentionFinish(op) => {
            placed_bytes(program, op.merged_out, op.out) / cost.memory_bytes_per_second
        }
        Op::PlaceRows { src, dst, .. } => placed_bytes(program, *src, *dst) / cost.memory_bytes_per_second,
        other => {
            let touched = other.reads().into_iter().chain(other.writes());
            touched.map(bytes).sum::<u64>() as f64 / cost.memory_bytes_per_second
        }
    };
    cost.launch_seconds + work
}

fn backward_seconds(
    program: &Program,
    op: &AttentionBackward,
    computed_seconds: f64,
    cost: &CostModel,
) -> f64 {
    let bytes = |id: BufferId| program.buffers[id.0].bytes();
    let dq = bytes(op.dq);
    let cleared = if op.accumulate_dq == Accumulate::Start { dq } else { 2 * dq };
    let rounded = op.rounded_dq.map_or(0, |rounded| dq + bytes(rounded));
    let work = attention_work(program, &op.bands, [op.q, op.k, op.v], op.arriving.as_ref());
    let passed_bytes = cleared + rounded;
    cost.backward_seconds(&AttentionWork { passed_bytes, computed_seconds, ..work })
}

/// Bytes read and written where all rows of `src` become rows of `dst`.
fn placed_bytes(program: &Program, src: BufferId, dst: BufferId) -> f64 {
    let (src, dst) = (&program.buffers[src.0], &program.buffers[dst.0]);
    let elements = src.rows() * src.row_elements();
    (elements * (src.dtype.size() + dst.dtype.size())) as f64
}

fn product_seconds(program: &Program, gemm: &Gemm, cost: &CostModel) -> f64 {
    cost.matmul_seconds(product_size(program, gemm))
}

/// Products of one launch, which has the waves of all their rows together.
fn waves_seconds(program: &Program, groups: &[Gemm], cost: &CostModel) -> f64 {
    let sizes: Vec<[usize; 3]> = groups.iter().map(|gemm| product_size(program, gemm)).collect();
    let Some([_, n, _]) = sizes.first() else { return 0.0 };
    let rows: usize = sizes.iter().map(|[m, ..]| m).sum();
    // Experts' gradients sum over rows of their own: a mean, by the rows of their results.
    let terms: usize = sizes.iter().map(|[m, _, k]| m * k).sum();
    cost.matmul_seconds([rows, *n, terms / rows.max(1)])
}

/// Seconds from the start of an operation, or from the end of its part before, to the end of part `part`; `None` when it has
/// fewer parts. The rank has computed for `computed_seconds` before.
pub(crate) fn part_seconds(
    program: &Program,
    op: &ProgramOp,
    part: usize,
    computed_seconds: f64,
    cost: &CostModel,
) -> Option<f64> {
    match &op.op {
        Op::WaveGemm(waves) => {
            let until = |groups| waves_seconds(program, &waves.groups[..groups], cost);
            let launch = if part == 0 { cost.launch_seconds } else { 0.0 };
            (part < waves.groups.len()).then(|| launch + until(part + 1) - until(part))
        }
        Op::UserKernel(user) => {
            let bytes = |id: &BufferId| program.buffers[id.0].bytes();
            let launch = if part == 0 { cost.launch_seconds } else { 0.0 };
            let of = user.parts.get(part)?;
            let touched: u64 = of.reads.iter().chain(&of.writes).map(bytes).sum();
            Some(launch + touched as f64 / cost.memory_bytes_per_second)
        }
        arriving if arriving.arriving().is_some() => {
            let ready = ready_part(program, op, cost);
            let share = *[ready, 1.0 - ready].get(part)?;
            Some(share * compute_seconds(program, op, computed_seconds, cost))
        }
        _ => (part == 0).then(|| compute_seconds(program, op, computed_seconds, cost)),
    }
}

fn product_size(program: &Program, gemm: &Gemm) -> [usize; 3] {
    let shape = |id: BufferId| &program.buffers[id.0].shape;
    let rows = |blocks: &[RowBlock]| blocks.iter().map(|block| block.rows.len()).sum::<usize>();
    let columns = |blocks: &[RowBlock]| blocks.first().map_or(0, |block| shape(block.buffer)[1]);
    let (m, k) = match gemm.layout {
        GemmLayout::Nt | GemmLayout::Nn => (rows(&gemm.a), columns(&gemm.a)),
        GemmLayout::Tn => (columns(&gemm.a), rows(&gemm.a)),
    };
    [m, shape(gemm.out)[1], k]
}

/// A whole attention on `[q, k, v]`.
fn attention_work<'a>(
    program: &Program,
    bands: &'a [Band],
    [q, k, v]: [BufferId; 3],
    arriving: Option<&ArrivingKeys>,
) -> AttentionWork<'a> {
    let [q, k, v] = [q, k, v].map(|id| &program.buffers[id.0]);
    AttentionWork {
        bands,
        q_rows: q.rows(),
        k_rows: k.rows() + arriving.map_or(0, |keys| program.buffers[keys.k.0].rows()),
        heads_q: q.shape[1],
        heads_kv: k.shape[1],
        head_dim: q.shape[2],
        head_dim_v: v.shape[2],
        staged: false,
        passed_bytes: 0,
        computed_seconds: 0.0,
    }
}
