//! What the simulator says of work whose times are known by hand, and of work that gets in its own way.

use std::sync::Arc;
use std::time::Instant;

use counterpoint_cost::{CostModel, Link, WorkerSharing};
use counterpoint_mask::Range;
use counterpoint_plan::{
    Activations, DType, GroupPart, LinearKind, LinearPlan, LinearSpec, Topology, WaveGroups,
};
use counterpoint_schedule::{
    Accumulate, BufferId, BufferRole, Gemm, GemmLayout, GroupReduce, Op, OverlapPolicy, Program,
    ProgramBuilder, ReduceOp, RowBlock, StreamKind, WeightGradient, lower_linear_backward,
    lower_linear_forward, simulate,
};

/// A product of one row and a byte sent take a microsecond each.
fn microseconds() -> CostModel {
    let link = Link { alpha_seconds: 0.0, bytes_per_second: 1e6 };
    CostModel {
        matmul_flops_per_second: 2e6,
        launch_seconds: 0.0,
        link,
        network: link,
        sharing: None,
        ..CostModel::H200
    }
}

/// `layers` times: the gradient of the input (200 us), its sum over two ranks (400 us), the gradient of the weight (500 us); the
/// last two concurrently, unless `on_one_stream`.
fn backward(rank: usize, layers: usize, on_one_stream: bool) -> Program {
    let mut p = ProgramBuilder::new("backward", rank, 2, OverlapPolicy::default());
    let compute = p.stream("compute", StreamKind::Compute);
    let communication = p.stream("communication", StreamKind::Communication);
    let communication = if on_one_stream { compute } else { communication };
    let mut buffer = |name: &str, rows: usize, dtype| p.buffer(name, dtype, &[rows, 1], BufferRole::Scratch);
    let weight = buffer("weight", 1, DType::F32);
    let (dx, dweight) = (buffer("dx", 200, DType::F32), buffer("dweight", 500, DType::F32));
    let (partial, sum) = (buffer("partial", 200, DType::F16), buffer("sum", 200, DType::F16));
    let product = |rows: usize, out: BufferId| {
        let block = |buffer, rows: usize| vec![RowBlock { buffer, rows: Range::new(0, rows) }];
        Op::Gemm(Gemm {
            layout: GemmLayout::Nt,
            a: block(out, rows).into(),
            b: block(weight, 1).into(),
            out,
            out_rows: vec![Range::new(0, rows)].into(),
            pass_rows: rows,
            columns: None,
            bias: None,
            accumulate: Accumulate::Start,
        })
    };
    let other = [1 - rank as u32];
    // 200 rows of two bytes each way.
    let part = GroupPart::from_splits([(200, &other[..])], [(200, other[0])]);
    let sum = Op::GroupReduce(GroupReduce {
        part: Arc::new(part),
        tensors: vec![(partial, sum)],
        op: ReduceOp::Sum,
        accumulate: Accumulate::Start,
        wire_dtype: DType::F16,
        reduce_dtype: DType::F32,
        arrive: None,
    });
    for _ in 0..layers {
        p.push(compute, None, "dx", product(200, dx));
        let done = p.mark(compute, None, "dx done");
        p.after(communication, None, "wait for dx", done);
        p.push(communication, None, "all-reduce dx", sum.clone());
        let done = p.mark(communication, None, "sums done");
        p.push(compute, None, "dweight", product(500, dweight));
        p.after(compute, None, "wait for sums", done);
    }
    p.finish()
}

/// The usual example of what overlap is worth: 1,100 us a layer become 700, which is 38.4 ms of 96 layers.
#[test]
fn the_worked_example() {
    let seconds = |layers: usize, on_one_stream: bool| {
        let ranks = [0, 1].map(|rank| backward(rank, layers, on_one_stream));
        simulate(&ranks, &Topology::flat(2), &microseconds()).unwrap().makespan()
    };
    let is = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    is(seconds(1, true), 1100e-6);
    is(seconds(1, false), 700e-6);
    is(seconds(96, true) - seconds(96, false), 38.4e-3);
}

fn spec(kind: LinearKind, activations: Activations, tokens: usize) -> LinearSpec {
    let (in_features, out_features) = (8192, 8192);
    LinearSpec { kind, activations, tokens, in_features, out_features, has_bias: false, dtype: DType::Bf16 }
}

fn sharing_h200() -> CostModel {
    CostModel { sharing: Some(WorkerSharing::H200), ..CostModel::H200 }
}

/// On a GPU two streams alone overlap nothing: the product holds all multiprocessors. What starts communication first, or takes
/// none, does.
#[test]
fn policies_do_what_they_do_on_a_gpu() {
    let cost = sharing_h200();
    let spec = spec(LinearKind::Column, Activations::Replicated, 8192);
    let plan = LinearPlan::new(spec, 4, WaveGroups::Fixed(1)).unwrap();
    let overlap = |policy: &str| {
        let policy: OverlapPolicy = policy.parse().unwrap();
        let lower = |rank| lower_linear_backward(&plan, rank, WeightGradient::Written, policy);
        let ranks: Vec<Program> = (0..4).map(lower).collect();
        simulate(&ranks, &Topology::flat(4), &cost).unwrap()
    };
    let sequential = overlap("sequential").makespan();
    assert!(overlap("concurrent").makespan() > 0.99 * sequential);
    assert!(overlap("priority").makespan() > 0.99 * sequential);
    let ideal = overlap("copy-engine").makespan();
    for policy in
        ["kernel-barrier", "single-connection", "sm-margin=16", "kernel-barrier+sm-margin=16", "partition=16"]
    {
        let seconds = overlap(policy).makespan();
        assert!(
            seconds < 0.95 * sequential && seconds > ideal,
            "{policy}: {seconds} of {sequential}, {ideal}"
        );
    }
    // Products slow down by the workers that communication holds, and by no more.
    let products = |policy: &str| overlap(policy).overlap().compute_seconds;
    let (alone, overlapped) = (products("sequential"), products("kernel-barrier"));
    assert!(overlapped > alone && overlapped < alone * 132.0 / 116.0, "{alone} {overlapped}");
    let margin = products("kernel-barrier+sm-margin=16");
    assert!((margin / alone - 132.0 / 116.0).abs() < 0.01, "{alone} {margin}");
}

/// Collectives that run at once share their link: an all-reduce in groups takes no less than its bytes.
#[test]
fn collectives_follow_each_other_on_a_link() {
    let link = Link { alpha_seconds: 1e-6, ..CostModel::H200.link };
    let cost = CostModel { matmul_flops_per_second: 1e18, link, ..sharing_h200() };
    let spec = spec(LinearKind::Row, Activations::Replicated, 8192);
    let seconds = |groups: usize, cost: &CostModel| {
        let plan = LinearPlan::new(spec, 4, WaveGroups::Fixed(groups)).unwrap();
        let policy = "copy-engine".parse().unwrap();
        let ranks: Vec<Program> = (0..4).map(|rank| lower_linear_forward(&plan, rank, policy)).collect();
        simulate(&ranks, &Topology::flat(4), cost).unwrap().makespan()
    };
    let bytes = 2.0 * 0.75 * (8192 * 8192 * 2) as f64;
    let moving = bytes / cost.link.bytes_per_second;
    for groups in [1, 2, 8] {
        let seconds = seconds(groups, &cost);
        assert!(seconds >= moving && seconds < 1.4 * moving, "{groups}: {seconds} {moving}");
    }
    // Copy engines take what they were measured to take, and the link's kernels what those do.
    let slow = Link { bytes_per_second: cost.link.bytes_per_second / 2.0, ..cost.link };
    let measured = CostModel { engine: Some(slow), ..cost };
    assert!(seconds(2, &measured) >= 2.0 * moving, "{} {moving}", seconds(2, &measured));
    let by_kernels = |cost: &CostModel| {
        let plan = LinearPlan::new(spec, 4, WaveGroups::Fixed(2)).unwrap();
        let lower = |rank| lower_linear_forward(&plan, rank, "sequential".parse().unwrap());
        simulate(&(0..4).map(lower).collect::<Vec<_>>(), &Topology::flat(4), cost).unwrap().makespan()
    };
    assert_eq!(by_kernels(&measured), by_kernels(&cost));
    // Where nothing gets in each other's way, the way there and the way back do not either.
    assert!(seconds(8, &CostModel { sharing: None, ..cost }) < 0.8 * moving);
}

/// A product whose rows travel while it is computed takes the longer of the two; one after the other takes the sum.
#[test]
fn fused_products_take_the_longer_of_two() {
    let cost = sharing_h200();
    for (kind, activations) in [
        (LinearKind::Row, Activations::SequenceParallel),
        (LinearKind::Row, Activations::Replicated),
        (LinearKind::Column, Activations::SequenceParallel),
    ] {
        let plan = LinearPlan::new(spec(kind, activations, 8192), 4, WaveGroups::Fixed(1)).unwrap();
        let run = |policy: &str| {
            let lower = |rank| lower_linear_forward(&plan, rank, policy.parse().unwrap());
            let ranks: Vec<Program> = (0..4).map(lower).collect();
            ranks.iter().for_each(|rank| rank.validate().unwrap());
            simulate(&ranks, &Topology::flat(4), &cost).unwrap()
        };
        let (apart, fused) = (run("sequential"), run("fused"));
        let overlap = apart.overlap();
        let longer = overlap.communication_seconds.max(overlap.compute_seconds);
        let seconds = fused.makespan();
        assert!(seconds >= 0.99 * longer - 2e-5 && seconds < longer + 2e-5, "{kind:?}: {seconds} {longer}");
        assert!(seconds < 0.9 * apart.makespan());
        assert_eq!(fused.overlap().communication_seconds, 0.0, "nothing is exposed");
    }
}

/// Of a column-parallel backward one kernel sums dx, and what else travels does so concurrently with it or under the gradient of the
/// weight, without a worker: what is left are the products.
#[test]
fn a_fused_backward_exposes_nothing() {
    let cost = sharing_h200();
    for activations in [Activations::Replicated, Activations::SequenceParallel] {
        let spec = LinearSpec { out_features: 4 * 7168, ..spec(LinearKind::Column, activations, 8192) };
        let plan = LinearPlan::new(spec, 4, WaveGroups::Fixed(1)).unwrap();
        let run = |policy: &str, gradient| {
            let lower = |rank| lower_linear_backward(&plan, rank, gradient, policy.parse().unwrap());
            let ranks: Vec<Program> = (0..4).map(lower).collect();
            ranks.iter().for_each(|rank| rank.validate().unwrap());
            simulate(&ranks, &Topology::flat(4), &cost).unwrap()
        };
        for queues in ["fused", "fused+single-connection"] {
            let [apart, fused] = ["sequential", queues].map(|policy| run(policy, WeightGradient::Written));
            let (products, seconds) = (apart.overlap().compute_seconds, fused.makespan());
            assert!(seconds < products + 4e-5, "{activations:?} {queues}: {seconds} {products}");
            assert!(seconds < 0.9 * apart.makespan(), "{activations:?} {queues}");
        }
        // Without the gradient nothing hides the way of sums to everyone but the kernel that makes them.
        let frozen = run("fused", WeightGradient::Frozen);
        assert_eq!(frozen.overlap().communication_seconds, 0.0, "{activations:?}");
    }
}

/// One rank stands for all that do the same, on one node and on several.
#[test]
fn one_rank_stands_for_all() {
    let cost = sharing_h200();
    for (tp_size, ranks_per_node) in [(8, 8), (16, 8)] {
        for kind in [LinearKind::Column, LinearKind::Row] {
            let spec = spec(kind, Activations::SequenceParallel, 4096);
            let plan = LinearPlan::new(spec, tp_size, WaveGroups::Fixed(3)).unwrap();
            for policy in ["sequential", "kernel-barrier", "copy-engine"] {
                let lower = |rank| lower_linear_forward(&plan, rank, policy.parse().unwrap());
                let all: Vec<Program> = (0..tp_size).map(lower).collect();
                let topology = Topology { world_size: tp_size, ranks_per_node };
                let whole = simulate(&all, &topology, &cost).unwrap();
                let one = simulate(&all[..1], &topology, &cost).unwrap();
                assert!((whole.makespan() / one.makespan() - 1.0).abs() < 1e-9, "{kind:?} {policy}");
                assert_eq!(whole.spans.len(), tp_size * one.spans.len());
            }
        }
    }
}

#[test]
fn thousands_of_ranks_take_seconds() {
    let cost = sharing_h200();
    let begin = Instant::now();
    let spec = spec(LinearKind::Row, Activations::SequenceParallel, 1 << 20);
    let plan = LinearPlan::new(spec, 4096, WaveGroups::Fixed(4)).unwrap_or_else(|error| panic!("{error}"));
    let topology = Topology { world_size: 4096, ranks_per_node: 8 };
    let one = lower_linear_forward(&plan, 0, OverlapPolicy::default());
    let seconds = simulate(&[one], &topology, &cost).unwrap().makespan();
    assert!(seconds > 0.0 && begin.elapsed().as_secs_f64() < 30.0, "{:?}", begin.elapsed());
}
