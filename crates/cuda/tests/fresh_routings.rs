//! What a fresh routing of a layer of experts asks of the host and of the driver, with a driver that has no GPU.

#![allow(unsafe_code)]

use std::sync::Arc;

use counterpoint_cuda::{CudaMachine, DriverCalls, Timing, TransportKind};
use counterpoint_exec::{
    Backend, ExpertLayer, ExpertOptions, ExpertOverlap, ExpertPass, ExpertPasses, Group, LayerCall, Machine,
    Ticket,
};
use counterpoint_plan::{
    DType, ExpertCapacity, ExpertGroups, ExpertKind, ExpertSpec, RandomRouting, Routing,
};
use counterpoint_schedule::{BufferRole, BufferSpec, OverlapPolicy, StartOrder, WeightGradient};

mod hollow_driver;
mod support;

use hollow_driver::processes::{config, on_processes};

const EXPERTS: usize = 64;
const CHOICES: usize = 8;
const TOKENS: usize = 4096;
const HIDDEN: usize = 2048;
const INNER: usize = 1024;

/// The passes of a step, in their order.
const PASSES: [(ExpertKind, LayerCall); 4] = [
    (ExpertKind::Dispatch, LayerCall::Forward),
    (ExpertKind::Combine, LayerCall::Forward),
    (ExpertKind::Combine, LayerCall::Backward),
    (ExpertKind::Dispatch, LayerCall::Backward),
];

unsafe extern "C" {
    fn clock_gettime(clock: i32, to: *mut [i64; 2]) -> i32;
    fn getrusage(who: i32, to: *mut [i64; 18]) -> i32;
}

/// Milliseconds that this thread has run, whatever else the machine does.
fn now() -> f64 {
    const THREAD: i32 = 3;
    let mut time = [0; 2];
    // SAFETY: as the C library has it on 64 bits: seconds and nanoseconds, of a local.
    unsafe { clock_gettime(THREAD, &mut time) };
    time[0] as f64 * 1e3 + time[1] as f64 / 1e6
}

/// Pages that this thread has touched which the kernel had to give it first: what memory costs that was given back in between.
fn faults() -> i64 {
    const THREAD: i32 = 1;
    const FAULTS: usize = 8;
    let mut usage = [0; 18];
    // SAFETY: as the C library has it on 64 bits: two times of two words, then 14 words, of a local.
    unsafe { getrusage(THREAD, &mut usage) };
    usage[FAULTS]
}

fn routing(ranks: usize, seed: u64) -> Arc<Routing> {
    let (experts, choices, tokens) = (EXPERTS, CHOICES, TOKENS);
    Arc::new(Routing::random(RandomRouting { experts, choices, ranks, tokens, skew: 0.0, seed }).unwrap())
}

fn options(kind: ExpertKind, start: StartOrder, groups: usize) -> ExpertOptions {
    let (in_features, out_features) = match kind {
        ExpertKind::Dispatch => (HIDDEN, INNER),
        ExpertKind::Combine => (INNER, HIDDEN),
    };
    let pass = ExpertPass { policy: OverlapPolicy::new(start), groups: ExpertGroups::even(groups) };
    ExpertOptions {
        spec: ExpertSpec { kind, in_features, out_features, dtype: DType::Bf16 },
        experts: EXPERTS,
        gradient: WeightGradient::Written,
        capacity: ExpertCapacity::default(),
        overlap: ExpertOverlap::Passes(ExpertPasses { forward: pass, backward: pass }),
    }
}

/// A tensor and its name.
type Named<M> = (&'static str, <<M as Machine>::Backend as Backend>::Buffer);

/// The tensors of a pass on the ranks of a group, contents arbitrary.
fn tensors<M: Machine>(
    group: &Group<M>,
    routing: &Routing,
    options: &ExpertOptions,
    call: LayerCall,
) -> Vec<Vec<Named<M>>> {
    let spec = options.spec;
    let of_rank = |rank: &counterpoint_exec::RankOf<M>| {
        let here = routing.experts_of(rank.rank());
        let rows = routing.rows()[here.start..here.end].iter().sum();
        let tokens = routing.tokens(rank.rank());
        let (of_x, of_y) = match spec.kind {
            ExpertKind::Dispatch => (tokens, rows),
            ExpertKind::Combine => (rows, tokens),
        };
        let (x, y) = ([of_x, spec.in_features], [of_y, spec.out_features]);
        let weight = [here.len() * spec.out_features, spec.in_features];
        let wanted = match call {
            LayerCall::Forward => vec![("x", x), ("weight", weight), ("y", y)],
            _ => vec![("dy", y), ("weight", weight), ("dx", x), ("x", x), ("dweight", weight)],
        };
        let allocate = |(name, shape): (&'static str, [usize; 2])| {
            let (name_of, shape, role) = (name.to_owned(), shape.to_vec(), BufferRole::Output);
            let spec = BufferSpec { name: name_of, dtype: DType::Bf16, shape, role };
            (name, rank.backend().allocate(&spec).unwrap())
        };
        wanted.into_iter().map(allocate).collect()
    };
    group.ranks().iter().map(of_rank).collect()
}

/// What the passes of a routing took, in milliseconds of a processor: made ready, and called; pages that were given; and what each asked of the
/// driver.
type Taken = Vec<([f64; 3], DriverCalls)>;

fn step<M: Machine>(group: &Group<M>, routing: &Arc<Routing>, start: StartOrder, groups: usize) -> Taken {
    let mut kept = Vec::new();
    let taken = PASSES.map(|(kind, call)| {
        let options = options(kind, start, groups);
        let tensors = tensors(group, routing, &options, call);
        let (before, began) = (faults(), now());
        let mut layer = ExpertLayer::new(group, options).unwrap();
        let mut ready = 0.0;
        let (tickets, asked) = DriverCalls::of(|| {
            layer.route_for(routing.clone(), call, None).unwrap();
            ready = now() - began;
            layer.enqueue(call, &tensors, None).unwrap()
        })
        .unwrap();
        let (all, faults) = (now() - began, faults() - before);
        tickets.iter().for_each(|ticket: &Ticket<M::Backend>| ticket.wait().unwrap());
        kept.push((layer, tensors));
        ([ready, all - ready, faults as f64], asked)
    });
    taken.into()
}

fn print(what: &str, steps: &[Taken]) {
    for (at, (kind, call)) in PASSES.into_iter().enumerate() {
        let median = |part: usize| {
            let mut all: Vec<f64> = steps.iter().map(|taken| taken[at].0[part]).collect();
            all.sort_by(f64::total_cmp);
            (all[all.len() / 2], all[0])
        };
        let (ready, called, faults) = (median(0), median(1), median(2));
        let asked = &steps[steps.len() - 1][at].1;
        println!(
            "{what}, {kind} {call:?}: ready {:.2} ({:.2}), called {:.2} ({:.2}) ms; {:.0} ({:.0}) pages; {} calls, {} uploads, {} \
             allocations",
            ready.0,
            ready.1,
            called.0,
            called.1,
            faults.0,
            faults.1,
            asked.total(),
            asked.uploads(),
            asked.allocations()
        );
    }
}

/// On ranks of one process the tables of a pass are one copy for each rank, and what each collective learns of the others' rows is another one, or with
/// its mailbox two; sums that a rank by itself makes of its own rows are ready with their first call. Nothing allocates once there were a few
/// routings.
#[test]
fn a_fresh_routing_is_a_few_copies_and_no_memory() {
    if support::no_compiler() || !hollow_driver::is_loaded("a_fresh_routing_is_a_few_copies_and_no_memory") {
        return;
    }
    let repetitions: u64 = std::env::var("REPETITIONS").map_or(6, |text| text.parse().unwrap());
    // For a profiler, which follows one process: its ranks alone; or so many processes.
    let of = |name: &str| -> Option<usize> { std::env::var(name).ok().map(|text| text.parse().unwrap()) };
    let (only, processes) = (of("RANKS"), of("PROCESSES"));
    for (start, groups) in [(StartOrder::Sequential, 1), (StartOrder::Concurrent, 1)] {
        for (ranks, uploads) in [(1, [1, 2, 1, 2]), (2, [6, 6, 6, 10])] {
            if processes.is_some() || only.is_some_and(|only| only != ranks) {
                continue;
            }
            let machine = CudaMachine::for_ranks(ranks, Timing::Off).unwrap();
            let group = Group::connect(&machine, ranks, config()).unwrap();
            let steps: Vec<Taken> =
                (0..repetitions).map(|seed| step(&group, &routing(ranks, seed), start, groups)).collect();
            print(&format!("{ranks} ranks in a process, {start:?}"), &steps);
            for ((_, asked), uploads) in steps[steps.len() - 1].iter().zip(uploads) {
                assert_eq!((asked.uploads(), asked.allocations()), (uploads, 0), "{ranks} ranks: {asked}");
            }
            group.close().unwrap();
        }
        let wanted = |ranks: &usize| only.is_none() && processes.is_none_or(|processes| processes == *ranks);
        for ranks in [2, 4].into_iter().filter(wanted) {
            let steps = on_processes(ranks, TransportKind::Auto, |_, group| -> Vec<Taken> {
                (0..repetitions).map(|seed| step(group, &routing(ranks, seed), start, groups)).collect()
            });
            print(&format!("{ranks} processes, {start:?}"), &steps[0]);
        }
    }
}
