//! Predicts the timeline of Programs from a cost model, without running them.

use counterpoint_mask::Band;
use counterpoint_plan::{CostModel, GroupPart, Topology};
use thiserror::Error;

use crate::{
    BufferId, GemmLayout, GroupCast, GroupReduce, Op, Program, ProgramOp, RowBlock, Span, SpanKind, Timeline,
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

/// Runs all ranks' Programs against the cost model.
///
/// Computation takes `launch + flops / rate` (passes over memory: `launch + bytes / rate`); a collective begins on a rank
/// when all ranks that it exchanges rows with have reached it, and takes that rank's link `alpha + bytes / beta`, with the
/// larger of the bytes sent and received, as links are full-duplex. Bytes that cross nodes take the network in the same
/// way; the slower of the two counts. Streams of one rank do not slow each other down.
///
/// # Errors
/// Programs that would hang, or whose collectives do not match.
pub fn simulate(
    programs: &[Program],
    topology: &Topology,
    cost: &CostModel,
) -> Result<Timeline, SimulateError> {
    let mut ranks: Vec<RankState<'_>> = programs.iter().map(RankState::new).collect();
    check_collectives(programs)?;
    let collectives = ranks.first().map_or(0, |rank| rank.collectives);
    let mut reached =
        vec![Meeting { reached: vec![0.0; programs.len()], missing: programs.len() }; collectives];
    let mut spans = Vec::new();
    loop {
        let mut advanced = false;
        for rank in 0..programs.len() {
            for stream in 0..ranks[rank].queues.len() {
                while ranks[rank].step(rank, stream, topology, cost, &mut reached, &mut spans) {
                    advanced = true;
                }
            }
        }
        if !advanced {
            break;
        }
    }
    for (rank, state) in ranks.iter().enumerate() {
        if let Some(op) = state.first_unfinished() {
            return Err(SimulateError::Stuck { rank, op, label: programs[rank].ops[op].label.clone() });
        }
    }
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

/// When each rank reached a collective.
#[derive(Clone)]
struct Meeting {
    /// Of every rank, once `missing` is 0.
    reached: Vec<f64>,
    /// Ranks that have not reached it yet.
    missing: usize,
}

impl Meeting {
    /// When the collective begins on a rank: once it and everyone it exchanges rows with have reached it. Known when all
    /// ranks have: what a rank does before a collective never depends on a later one, so nobody is held up by asking late.
    fn begins(&self, rank: usize, part: &GroupPart) -> Option<f64> {
        if self.missing > 0 {
            return None;
        }
        let mut peers = vec![false; self.reached.len()];
        peers[rank] = true;
        part.owned.iter().flat_map(|split| &split.ranks).for_each(|&peer| peers[peer as usize] = true);
        part.remote.iter().for_each(|split| peers[split.rank as usize] = true);
        let times = self.reached.iter().zip(peers).filter(|&(_, peer)| peer).map(|(&at, _)| at);
        Some(times.fold(0.0, f64::max))
    }
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
        _ => None,
    }
}

/// How far one rank's simulated run has got.
struct RankState<'a> {
    program: &'a Program,
    /// For every stream its operations, and the number of the collective where it is one.
    queues: Vec<Vec<(usize, Option<usize>)>>,
    collectives: usize,
    next: Vec<usize>,
    /// Whether the head of each stream is a collective that the rank has reached and not begun.
    waiting: Vec<bool>,
    clock: Vec<f64>,
    events: Vec<Option<f64>>,
    arrivals: Vec<Vec<f64>>,
    signals: Vec<Vec<(u64, f64)>>,
}

impl<'a> RankState<'a> {
    fn new(program: &'a Program) -> Self {
        let mut queues = vec![Vec::new(); program.streams.len()];
        let mut collectives = 0;
        for (index, op) in program.ops.iter().enumerate() {
            let number = collective_part(&op.op).map(|_| {
                collectives += 1;
                collectives - 1
            });
            queues[op.stream.0].push((index, number));
        }
        Self {
            program,
            collectives,
            next: vec![0; queues.len()],
            waiting: vec![false; queues.len()],
            clock: vec![0.0; queues.len()],
            queues,
            events: vec![None; program.num_events],
            arrivals: vec![Vec::new(); program.num_barriers],
            signals: vec![Vec::new(); program.num_signals],
        }
    }

    fn first_unfinished(&self) -> Option<usize> {
        let heads = self.queues.iter().zip(&self.next).filter_map(|(queue, &next)| queue.get(next));
        heads.map(|&(op, _)| op).min()
    }

    /// Runs the operation at the head of `stream` if everything it waits for is known; whether it did.
    fn step(
        &mut self,
        rank: usize,
        stream: usize,
        topology: &Topology,
        cost: &CostModel,
        meetings: &mut [Meeting],
        spans: &mut Vec<Span>,
    ) -> bool {
        let Some(&(index, collective)) = self.queues[stream].get(self.next[stream]) else { return false };
        let program = self.program;
        let op = &program.ops[index];
        let now = self.clock[stream];
        let mut span = |kind, start: f64, end: f64| {
            if end > start {
                spans.push(Span { rank, stream, label: op.label.clone(), kind, stage: op.stage, start, end });
            }
        };
        let until = match &op.op {
            Op::Record(event) => {
                self.events[event.0] = Some(now);
                now
            }
            Op::Signal { signal, value } => {
                self.signals[signal.0].push((*value, now));
                now
            }
            Op::Wait(_) | Op::Await { .. } | Op::WaitSignal { .. } => {
                let Some(at) = self.released(&op.op) else { return false };
                span(SpanKind::Wait, now, at.max(now));
                at.max(now)
            }
            Op::GroupCast(GroupCast { part, .. }) | Op::GroupReduce(GroupReduce { part, .. }) => {
                let meeting = &mut meetings[collective.unwrap_or_default()];
                if !self.waiting[stream] {
                    self.waiting[stream] = true;
                    meeting.reached[rank] = now;
                    meeting.missing -= 1;
                    if let Some(barrier) = arrives_at(&op.op) {
                        self.arrivals[barrier].push(now);
                    }
                }
                let Some(begin) = meeting.begins(rank, part) else { return false };
                self.waiting[stream] = false;
                let end = begin + collective_seconds(program, op, topology, cost);
                span(SpanKind::Communication, now, end);
                end
            }
            _ => {
                let end = now + compute_seconds(program, op, cost);
                span(SpanKind::Compute, now, end);
                end
            }
        };
        self.clock[stream] = until;
        self.next[stream] += 1;
        true
    }

    /// When a wait ends, once that is known.
    fn released(&self, op: &Op) -> Option<f64> {
        match op {
            Op::Wait(event) => self.events[event.0],
            Op::Await { barrier, arrivals } => {
                let mut times = self.arrivals[barrier.0].clone();
                times.sort_by(f64::total_cmp);
                (*arrivals as usize).checked_sub(1).map_or(Some(0.0), |last| times.get(last).copied())
            }
            Op::WaitSignal { signal, value } => {
                let enough = self.signals[signal.0].iter().filter(|(raised, _)| raised >= value);
                enough.map(|&(_, at)| at).min_by(f64::total_cmp)
            }
            _ => None,
        }
    }
}

fn arrives_at(op: &Op) -> Option<usize> {
    match op {
        Op::GroupCast(op) => op.arrive.map(|barrier| barrier.0),
        Op::GroupReduce(op) => op.arrive.map(|barrier| barrier.0),
        _ => None,
    }
}

fn collective_seconds(program: &Program, op: &ProgramOp, topology: &Topology, cost: &CostModel) -> f64 {
    let (part, tensors, wire) = match &op.op {
        Op::GroupCast(op) => (&op.part, &op.tensors, op.wire_dtype),
        Op::GroupReduce(op) => (&op.part, &op.tensors, op.wire_dtype),
        _ => return 0.0,
    };
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
    let seconds =
        |link: &counterpoint_plan::Link, rows: [u64; 2]| link.seconds(rows[0].max(rows[1]) * row_bytes);
    seconds(&cost.link, near).max(seconds(&cost.network, far))
}

fn compute_seconds(program: &Program, op: &ProgramOp, cost: &CostModel) -> f64 {
    let shape = |id: BufferId| &program.buffers[id.0].shape;
    let flops = |bands: &[Band], q: BufferId, v: BufferId| {
        let area: u64 = bands.iter().map(Band::area).sum();
        2.0 * area as f64 * shape(q)[1] as f64 * (shape(q)[2] + shape(v)[2]) as f64
    };
    let work = match &op.op {
        Op::AttentionForward(a) => flops(&a.bands, a.q, a.v) / cost.forward_flops_per_second,
        Op::AttentionBackward(a) => 2.5 * flops(&a.bands, a.q, a.v) / cost.backward_flops_per_second,
        Op::Gemm(gemm) => {
            let rows = |blocks: &[RowBlock]| blocks.iter().map(|block| block.rows.len()).sum::<usize>();
            let columns = |blocks: &[RowBlock]| blocks.first().map_or(0, |block| shape(block.buffer)[1]);
            let (m, k) = match gemm.layout {
                GemmLayout::Nt | GemmLayout::Nn => (rows(&gemm.a), columns(&gemm.a)),
                GemmLayout::Tn => (columns(&gemm.a), rows(&gemm.a)),
            };
            2.0 * m as f64 * k as f64 * shape(gemm.out)[1] as f64 / cost.matmul_flops_per_second
        }
        Op::AttentionFinish(op) => {
            placed_bytes(program, op.merged_out, op.out) / cost.memory_bytes_per_second
        }
        Op::PlaceRows { src, dst, .. } => placed_bytes(program, *src, *dst) / cost.memory_bytes_per_second,
        other => {
            let touched = other.reads().into_iter().chain(other.writes());
            let bytes: u64 = touched.map(|id| program.buffers[id.0].bytes()).sum();
            bytes as f64 / cost.memory_bytes_per_second
        }
    };
    cost.launch_seconds + work
}

/// Bytes read and written where all rows of `src` become rows of `dst`.
fn placed_bytes(program: &Program, src: BufferId, dst: BufferId) -> f64 {
    let (src, dst) = (&program.buffers[src.0], &program.buffers[dst.0]);
    let elements = src.rows() * src.row_elements();
    (elements * (src.dtype.size() + dst.dtype.size())) as f64
}
