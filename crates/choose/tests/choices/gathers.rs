//! Passes whose product takes rows of other ranks: one kernel that takes them as they arrive, compared with the fastest that their transport
//! offers besides.

use counterpoint_choose::{LinearMachine, Offered, PassClock, SimulatedClock};
use counterpoint_cost::{CostModel, Link, WorkerSharing};
use counterpoint_plan::{
    Activations, DType, LinearDirection, LinearKind, LinearPlan, LinearSpec, Topology, WaveGroups,
};
use counterpoint_schedule::{OverlapPolicy, PassOverlap, RankTransport, StartOrder};

use crate::ratios::Ratios;
use crate::record::record;

/// Equal groups that are tried.
const EQUAL: [usize; 6] = [1, 2, 3, 4, 8, 16];

/// Hidden sizes, and columns of a rank's product.
const HIDDEN: [usize; 5] = [2048, 4096, 8192, 12288, 16384];
const COLUMNS: [usize; 6] = [1024, 1792, 2560, 3584, 5120, 7168];
const TOKENS: [usize; 5] = [2048, 4096, 8192, 16384, 32768];

/// Ranks of a transport, and how many of them a node has.
struct Place {
    name: &'static str,
    transport: RankTransport,
    topology: Topology,
}

const fn place(
    name: &'static str,
    transport: RankTransport,
    world_size: usize,
    ranks_per_node: usize,
) -> Place {
    Place { name, transport, topology: Topology { world_size, ranks_per_node } }
}

const PLACES: [Place; 12] = [
    place("2 ranks, NCCL, one host", RankTransport::Nccl, 2, 2),
    place("4 ranks, NCCL, one host", RankTransport::Nccl, 4, 4),
    place("8 ranks, NCCL, one host", RankTransport::Nccl, 8, 8),
    place("2 hosts of 4, NCCL", RankTransport::Nccl, 8, 4),
    place("4 hosts, NCCL", RankTransport::Nccl, 4, 1),
    place("2 hosts of 4, hierarchical", RankTransport::Hierarchical, 8, 4),
    place("2 ranks, copy engines", RankTransport::CopyEngine, 2, 2),
    place("4 ranks, copy engines", RankTransport::CopyEngine, 4, 4),
    place("8 ranks, copy engines", RankTransport::CopyEngine, 8, 8),
    place("4 ranks, NVLink kernels", RankTransport::Nvlink, 4, 4),
    place("8 ranks, NVLink kernels", RankTransport::Nvlink, 8, 8),
    place("2 ranks, CPU", RankTransport::Cpu, 2, 2),
];

fn cost(transport: RankTransport) -> CostModel {
    let sharing = Some(WorkerSharing::H200);
    match transport {
        RankTransport::Cpu => {
            CostModel { link: Link { alpha_seconds: 1e-3, bytes_per_second: 100e6 }, ..CostModel::CPU }
        }
        RankTransport::Nccl => CostModel {
            link: Link { alpha_seconds: 40e-6, bytes_per_second: 270e9 },
            sharing,
            ..CostModel::H200
        },
        _ => CostModel { sharing, ..CostModel::H200 },
    }
}

/// A pass on the machine of a place.
struct Case {
    machine: LinearMachine,
    spec: LinearSpec,
    direction: LinearDirection,
}

impl Case {
    fn of(place: &Place, tokens: usize, hidden: usize, columns: usize, kind: LinearKind) -> Self {
        let ranks = place.topology.world_size;
        let (in_features, out_features, direction) = match kind {
            LinearKind::Column => (hidden, columns * ranks, LinearDirection::Forward),
            LinearKind::Row => {
                (columns * ranks, hidden, LinearDirection::Backward { weight_gradient: false })
            }
        };
        let (activations, dtype, has_bias) = (Activations::SequenceParallel, DType::Bf16, false);
        let spec = LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
        let workers = if place.transport == RankTransport::Cpu { 0 } else { 16 };
        let overlaps = place.transport.pass_overlaps(true, workers);
        let cost = cost(place.transport);
        Self { machine: LinearMachine::new(place.transport, overlaps, place.topology, cost), spec, direction }
    }

    fn seconds(&self, policy: OverlapPolicy, plan: &LinearPlan) -> f64 {
        let LinearMachine { topology, ref cost, .. } = self.machine;
        SimulatedClock { spec: self.spec, direction: self.direction, topology, cost, policy }
            .pass(plan)
            .unwrap()
    }

    /// The least that equal groups take.
    fn least(&self, policy: OverlapPolicy) -> f64 {
        let plans = EQUAL.map(|groups| {
            LinearPlan::new(self.spec, self.machine.topology.world_size, WaveGroups::Fixed(groups)).unwrap()
        });
        plans.iter().map(|plan| self.seconds(policy, plan)).fold(f64::INFINITY, f64::min)
    }

    /// What the default takes where one kernel that takes rows as they arrive is offered so, and its way.
    fn default(&self, offered: Offered) -> (PassOverlap, f64) {
        let machine = self.machine.clone().with_arriving_rows(offered);
        let (way, plan) = machine.fastest(self.spec, self.direction, &machine.cost).unwrap();
        (way, self.seconds(way.into(), &plan))
    }
}

/// Of all tokens, hidden sizes and columns one in `step`.
fn check(step: usize) {
    let [mut defaults, mut apart] = [(); 2].map(|()| Ratios::default());
    let mut cases = 0;
    for place in &PLACES {
        let scale = if place.transport == RankTransport::Cpu { 8 } else { 1 };
        let (mut taken, mut all) = (Vec::new(), Vec::new());
        let shapes = TOKENS.iter().flat_map(|tokens| {
            HIDDEN.iter().flat_map(move |hidden| COLUMNS.iter().map(move |columns| (tokens, hidden, columns)))
        });
        for (&tokens, &hidden, &columns) in shapes.step_by(step) {
            for kind in [LinearKind::Column, LinearKind::Row] {
                let case = Case::of(place, tokens / scale, hidden / scale, columns / scale, kind);
                let name = format!("{}: {kind} of {tokens}, {hidden} and {columns}", place.name);
                let (_, before) = case.default(Offered::Never);
                let (way, now) = case.default(Offered::Predicted);
                assert!(now <= before * (1.0 + 1e-9), "{name}: {now} and {before}");
                if way.is_one_kernel() {
                    taken.push(before / now);
                }
                defaults.add(before / now, &name);
                let one = case.machine.overlaps.iter().find(|way| way.is_one_kernel()).unwrap().policy();
                let launches = OverlapPolicy { start: StartOrder::Concurrent, ..one };
                let ratio = case.least(launches) / case.least(one);
                apart.add(ratio, &name);
                all.push(ratio);
                cases += 1;
            }
        }
        taken.sort_by(f64::total_cmp);
        all.sort_by(f64::total_cmp);
        let of = |list: &[f64], share: usize| {
            list.get((list.len() * share / 100).min(list.len().max(1) - 1)).copied()
        };
        let show = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{:.3}", value));
        println!(
            "{}: taken by {} of {}, gain {} to {}, median {}; over a product a group {} to {}, median {}",
            place.name,
            taken.len(),
            all.len(),
            show(taken.first().copied()),
            show(taken.last().copied()),
            show(of(&taken, 50)),
            show(all.first().copied()),
            show(all.last().copied()),
            show(of(&all, 50)),
        );
    }
    println!("a default without it over the default: {}", defaults.text());
    println!("a product a group over it: {}", apart.text());
    if step == 1 {
        let rows =
            [("a default without it over the default", &defaults), ("a product a group over it", &apart)];
        record("gathers", cases as u64, &rows);
    }
}

#[test]
fn products_that_wait_for_rows_are_taken_where_they_end_sooner() {
    check(37);
}

#[test]
#[ignore = "takes minutes"]
fn all_products_that_wait_for_rows() {
    check(1);
}
