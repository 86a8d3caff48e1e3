//! Seconds of operations by the rates of a machine.

use std::ops::Range;

use counterpoint_cost::{AttentionWork, CostModel, Interruption, ProblemSize, ReadyWork, WorkerSharing};
use counterpoint_mask::Band;

use crate::{
    Accumulate, ArrivingKeys, AttentionBackward, AttentionState, BufferId, ForwardBegin, ForwardEnd, Gemm,
    GemmLayout, GroupedLaunch, GroupedResults, Op, Program, ProgramOp, RowBlocks, WaveGemm,
};

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
    let work = match op.op.computation() {
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
        Op::Gemm(gemm) => product_seconds(program, gemm, cost),
        Op::WaveGemm(waves) => waves_seconds(program, waves, 0..waves.groups.len(), cost),
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
        Op::PlaceRows { src, dst, .. } | Op::PlaceColumns { src, dst, .. } => {
            placed_bytes(program, *src, *dst) / cost.memory_bytes_per_second
        }
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
    let size = product_size(program, gemm);
    match gemm.columns {
        None => cost.matmul_seconds(size),
        // It splits its sums as the whole product does.
        Some(columns) => {
            let all = match gemm.layout {
                GemmLayout::Nt => gemm.b.count(),
                GemmLayout::Nn | GemmLayout::Tn => program.buffers[gemm.b.pieces()[0].buffer.0].shape[1],
            };
            cost.columns_done_seconds(ProblemSize { n: all, ..size }, columns.len())
        }
    }
}

/// Products of one operation, without the launch of the first. In tiles, those with the same second operand have one launch, and the waves
/// of all their rows together; those with others follow each other, unless they are the problems of a grouped GEMM.
fn waves_seconds(program: &Program, waves: &WaveGemm, groups: Range<usize>, cost: &CostModel) -> f64 {
    let groups = &waves.groups[groups];
    if let Some(sharing) = cost.sharing.filter(|_| waves.grouped) {
        return grouped_seconds(program, groups, &sharing, cost);
    }
    let of_launch = |groups: &[Gemm]| {
        let sizes: Vec<ProblemSize> = groups.iter().map(|gemm| product_size(program, gemm)).collect();
        let Some(first @ ProblemSize { n, k, .. }) = sizes.first().copied() else { return 0.0 };
        if let Some(all) = waves.columns() {
            let done = sizes.iter().map(|size| size.n).sum();
            return cost.columns_done_seconds(ProblemSize { n: all, ..first }, done);
        }
        if cost.sharing.is_none() {
            // One after the other.
            return sizes.into_iter().map(|size| cost.matmul_seconds(size)).sum();
        }
        cost.matmul_seconds(ProblemSize { m: sizes.iter().map(|size| size.m).sum(), n, k })
    };
    let launches = groups.chunk_by(|a, b| a.b == b.b && a.layout == b.layout);
    let seconds = launches.enumerate().map(|(at, groups)| {
        let launch = if at > 0 && cost.sharing.is_some() { cost.launch_seconds } else { 0.0 };
        let copies: f64 = groups.iter().map(|gemm| copied_seconds(program, gemm, cost)).sum();
        launch + of_launch(groups) + copies
    });
    seconds.sum()
}

/// Of a product in tiles, the copies of rows that it cannot take, or store, as they lie.
fn copied_seconds(program: &Program, gemm: &Gemm, cost: &CostModel) -> f64 {
    if cost.sharing.is_none() {
        return 0.0;
    }
    let copy = |ranges: usize, rows: usize, id: BufferId| {
        let (is_copied, buffer) = (Gemm::copies_rows(ranges, rows), &program.buffers[id.0]);
        // Read and written.
        let bytes = 2 * rows * buffer.row_elements() * buffer.dtype.size();
        if is_copied { cost.launch_seconds + bytes as f64 / cost.memory_bytes_per_second } else { 0.0 }
    };
    let read = [&gemm.a, &gemm.b].map(|blocks| match blocks.pieces().first() {
        Some(piece) => copy(blocks.iter().count(), blocks.count(), piece.buffer),
        None => 0.0,
    });
    let ways = if gemm.accumulate == Accumulate::Continue { 2.0 } else { 1.0 };
    read.iter().sum::<f64>() + ways * copy(gemm.out_rows.iter().count(), gemm.out_rows.count(), gemm.out)
}

/// What grouped GEMMs take in a pass that overlaps them with something, of what they take alone with the workers that are left: where rows
/// are only copied concurrently with them, and where partial sums are added up as well. They took 0.92 to 1.45 and 1.41 to 1.9 in sixteen
/// passes on two H200 (`docs/experiments/033-scattered-rows.md`); with these, what is chosen for them is what was measured to be fastest.
const GROUPED_OVERLAPPED: [f64; 2] = [1.2, 1.53];

/// Which of them holds in a Program.
fn grouped_slowdown(program: &Program) -> f64 {
    if !program.policy.overlaps() {
        return 1.0;
    }
    let adds_up =
        program.ops.iter().any(|op| op.op.parts().iter().any(|part| matches!(part, Op::GroupReduce(_))));
    GROUPED_OVERLAPPED[usize::from(adds_up)]
}

/// Problems of a grouped GEMM: as many launches as results, and of each the copies of rows that it cannot take, or store, as they lie.
fn grouped_seconds(program: &Program, products: &[Gemm], sharing: &WorkerSharing, cost: &CostModel) -> f64 {
    let copied = |rows: usize, id: BufferId, ways: f64| {
        let buffer = &program.buffers[id.0];
        let bytes = rows * buffer.row_elements() * buffer.dtype.size();
        cost.launch_seconds + ways * bytes as f64 / cost.memory_bytes_per_second
    };
    let half_tiles = |rows: usize| rows.div_ceil(GroupedLaunch::HALF_ROWS);
    let slowdown = grouped_slowdown(program);
    let of_launch = |(at, launch): (usize, GroupedLaunch)| {
        let products = &products[launch.products.clone()];
        let mut seconds = if at > 0 { cost.launch_seconds } else { 0.0 };
        let n = program.buffers[products[0].out.0].row_elements();
        let problems: Vec<(usize, usize)> = match products[0].layout {
            GemmLayout::Tn => {
                let sizes: Vec<ProblemSize> =
                    products.iter().map(|gemm| product_size(program, gemm)).collect();
                let k: usize = sizes.iter().map(|size| size.k).sum();
                for blocks in [&products[0].a, &products[0].b] {
                    // Of one operand the ends of problems alone.
                    let rows = if blocks.iter().nth(1).is_some() {
                        k
                    } else {
                        products.len() * GroupedLaunch::HALF_ROWS / 2
                    };
                    seconds += blocks.pieces().first().map_or(0.0, |piece| copied(rows, piece.buffer, 2.0));
                }
                sizes.iter().map(|size| (half_tiles(size.m), size.k)).collect()
            }
            GemmLayout::Nt | GemmLayout::Nn => {
                let source = products[0].a.pieces().first().map(|piece| piece.buffer);
                if launch.gathers {
                    seconds += source.map_or(0.0, |source| copied(launch.rows(), source, 2.0));
                }
                if launch.results != GroupedResults::InPlace {
                    seconds += copied(launch.rows(), products[0].out, 2.0);
                }
                vec![(launch.half_tiles(), product_size(program, &products[0]).k)]
            }
        };
        seconds + slowdown * sharing.grouped_seconds(&problems, n, cost.matmul_flops_per_second)
    };
    GroupedLaunch::of(products).into_iter().enumerate().map(of_launch).sum()
}

/// Seconds from the start of an operation, or from the end of its part before, to the end of the last of `parts`, which follow each other
/// without a pause; `None` when it has fewer parts. The rank has computed for `computed_seconds` before.
pub(crate) fn part_seconds(
    program: &Program,
    op: &ProgramOp,
    parts: Range<usize>,
    computed_seconds: f64,
    cost: &CostModel,
) -> Option<f64> {
    let part = parts.end - 1;
    match &op.op {
        // Problems end with their launch.
        Op::WaveGemm(waves) if waves.grouped && cost.sharing.is_some() => {
            let (before, rest) = waves.groups.split_at_checked(part + 1)?;
            let last = before.last()?;
            if rest.first().is_some_and(|next| GroupedLaunch::joins(last, next)) {
                return Some(0.0);
            }
            let of_launch = before.chunk_by(GroupedLaunch::joins).next_back().unwrap_or_default();
            let sharing = cost.sharing?;
            Some(cost.launch_seconds + grouped_seconds(program, of_launch, &sharing, cost))
        }
        Op::WaveGemm(waves) => {
            let until = |end| waves_seconds(program, waves, parts.start..end, cost);
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

fn product_size(program: &Program, gemm: &Gemm) -> ProblemSize {
    let shape = |id: BufferId| &program.buffers[id.0].shape;
    let columns = |rows: &RowBlocks| rows.pieces().first().map_or(0, |piece| shape(piece.buffer)[1]);
    let (m, k) = match gemm.layout {
        GemmLayout::Nt | GemmLayout::Nn => (gemm.a.count(), columns(&gemm.a)),
        GemmLayout::Tn => (columns(&gemm.a), gemm.a.count()),
    };
    ProblemSize { m, n: shape(gemm.out)[1], k }
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
        interruption: Interruption::default(),
    }
}
