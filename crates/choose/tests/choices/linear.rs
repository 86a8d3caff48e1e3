//! How a pass of a linear layer is run by default, compared with every way that its transport offers, in the groups that are chosen for that
//! way and in equal ones.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use counterpoint_choose::{LinearMachine, PassClock, SimulatedClock};
use counterpoint_cost::{CostModel, Link, WorkerSharing};
use counterpoint_plan::{
    Activations, DType, GemmCollective, LinearDirection, LinearKind, LinearPlan, LinearSpec, Topology,
    WaveGroups,
};
use counterpoint_schedule::{OverlapPolicy, PassOverlap, RankTransport};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::case::SEED;
use crate::ratios::Ratios;
use crate::record::record;

/// Equal groups that are offered besides the chosen ones.
const EQUAL: [usize; 6] = [1, 2, 3, 4, 8, 16];

/// By so much kernels that take multiprocessors count for more where a fused kernel or copy engines are to be had, as measured.
const WORKERS_COST: f64 = 1.1;

#[test]
fn none_that_its_transport_offers_is_predicted_faster() {
    check(60);
}

#[test]
#[ignore = "takes minutes"]
fn none_of_500_that_its_transport_offers_is_predicted_faster() {
    check(500);
}

/// A pass on a machine.
struct Case {
    name: String,
    machine: LinearMachine,
    spec: LinearSpec,
    direction: LinearDirection,
}

impl Case {
    fn random(index: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(SEED ^ index << 32);
        let rng = &mut rng;
        let transport = RankTransport::ALL[rng.random_range(0..RankTransport::ALL.len())];
        let tp_size = 1 << rng.random_range(1..=if transport == RankTransport::Cpu { 2 } else { 4 });
        let nodes = match transport {
            RankTransport::Hierarchical => 2,
            RankTransport::Nccl => rng.random_range(1..=2),
            _ => 1,
        };
        let topology = Topology { world_size: tp_size, ranks_per_node: (tp_size / nodes).max(1) };
        let is_cpu = transport == RankTransport::Cpu;
        let tokens = (1 << rng.random_range(if is_cpu { 7..=11 } else { 9..=15 }))
            + 8 * rng.random_range(0..2) * tp_size;
        let hidden = 512 * rng.random_range(if is_cpu { 1..=4 } else { 4..=24 });
        let local = 256 * rng.random_range(if is_cpu { 1..=4 } else { 2..=32 });
        let kind = [LinearKind::Column, LinearKind::Row][rng.random_range(0..2)];
        let (in_features, out_features) = match kind {
            LinearKind::Column => (hidden, local * tp_size),
            LinearKind::Row => (local * tp_size, hidden),
        };
        let activations = [Activations::Replicated, Activations::SequenceParallel][rng.random_range(0..2)];
        let direction = [
            LinearDirection::Forward,
            LinearDirection::Backward { weight_gradient: true },
            LinearDirection::Backward { weight_gradient: false },
        ][rng.random_range(0..3)];
        let cost = cost(transport, 2_f64.powf(rng.random_range(-1.5..1.5)));
        let workers = if is_cpu { 0 } else { WorkerSharing::H200.communication };
        let overlaps = transport.pass_overlaps(rng.random_range(0..4) > 0, workers);
        let (has_bias, dtype) = (false, DType::Bf16);
        let spec = LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
        let name = format!(
            "case {index}: {kind} {activations} {direction:?} of {tokens}, {in_features} to {out_features}, on {tp_size} ranks of \
             {nodes} nodes by {transport}"
        );
        Self { name, machine: LinearMachine::new(transport, overlaps, topology, cost), spec, direction }
    }

    fn gathers(&self) -> bool {
        GemmCollective::of_pass(&self.spec, self.direction) == Some(GemmCollective::AllGather)
    }

    /// What the pass takes in a way and in groups.
    fn seconds(&self, way: PassOverlap, plan: &LinearPlan) -> f64 {
        let LinearMachine { topology, ref cost, .. } = self.machine;
        let policy = OverlapPolicy::from(way);
        SimulatedClock { spec: self.spec, direction: self.direction, topology, cost, policy }
            .pass(plan)
            .unwrap()
    }

    /// The way that is chosen of these, and the layer in its groups.
    fn chosen(&self, overlaps: Vec<PassOverlap>) -> (PassOverlap, LinearPlan) {
        let machine = LinearMachine { overlaps, ..self.machine.clone() };
        machine.fastest(self.spec, self.direction, &machine.cost).unwrap()
    }
}

/// What a transport costs, its links `faster` than those that were measured.
fn cost(transport: RankTransport, faster: f64) -> CostModel {
    let base = match transport {
        RankTransport::Cpu => {
            CostModel { link: Link { alpha_seconds: 1e-3, bytes_per_second: 100e6 }, ..CostModel::CPU }
        }
        RankTransport::Nccl => CostModel {
            link: Link { alpha_seconds: 40e-6, bytes_per_second: 270e9 },
            sharing: Some(WorkerSharing::H200),
            ..CostModel::H200
        },
        _ => CostModel { sharing: Some(WorkerSharing::H200), ..CostModel::H200 },
    };
    let faster = |link: Link| Link { bytes_per_second: link.bytes_per_second * faster, ..link };
    CostModel { link: faster(base.link), network: faster(base.network), ..base }
}

fn check(cases: u64) {
    println!("seed {SEED}");
    let mut choosing = Duration::ZERO;
    let [mut best, mut all, mut sequential] = [(); 3].map(|()| Ratios::default());
    let mut by_way: BTreeMap<String, Ratios> = BTreeMap::new();
    for index in 0..cases {
        let case = Case::random(index);
        let began = Instant::now();
        let (way, plan) = case.chosen(case.machine.overlaps.clone());
        choosing += began.elapsed();
        // Which of these is taken was measured, and the simulator does not know it.
        let sparing = case.machine.overlaps.iter().copied().filter(|way| way.spares_workers()).collect();
        let sparing = Some(case.chosen(sparing).0).filter(|way| way.spares_workers());
        let rate =
            |way: PassOverlap| if sparing.is_some() && way.takes_workers() { WORKERS_COST } else { 1.0 };
        let taken = case.seconds(way, &plan);
        let ranks = case.machine.topology.world_size;
        let equal: Vec<LinearPlan> = EQUAL
            .iter()
            .map(|&groups| LinearPlan::new(case.spec, ranks, WaveGroups::Fixed(groups)).unwrap())
            // Kernels compute whole tiles of each piece of rows, of which sums are made, and the simulator does not count these.
            .filter(|plan| case.machine.cost.sharing.is_none() || case.gathers() || !plan.cuts_tiles())
            .collect();
        let (mut least, mut least_of_all) = ((f64::INFINITY, String::new()), f64::INFINITY);
        for &other in &case.machine.overlaps {
            let (run, own) = case.chosen(vec![other]);
            if run != other || (other.is_one_kernel() && case.gathers()) {
                // There is no kernel for it, or the kernel takes rows as they arrive. That one is chosen where it is predicted 3 % faster.
                continue;
            }
            let equal =
                if OverlapPolicy::from(other).overlaps_by_groups() { &equal[..] } else { &equal[..1] };
            for plan in equal.iter().chain([&own]) {
                if !plan.column_sizes().is_empty() {
                    // Who takes them has them predicted to take 3 % less at least.
                    continue;
                }
                let seconds = case.seconds(other, plan);
                least_of_all = least_of_all.min(seconds);
                let is_left_out = other.spares_workers() && Some(other) != sparing;
                if !is_left_out && rate(other) * seconds < least.0 {
                    least = (rate(other) * seconds, format!("{other:?} {:?}", plan.group_sizes()));
                }
                if other.is_sequential() {
                    sequential.add(taken / seconds, &case.name);
                }
            }
        }
        let ratio = rate(way) * taken / least.0;
        let name = format!("{}: {way:?} {:?} and not {}", case.name, plan.group_sizes(), least.1);
        best.add(ratio, &name);
        all.add(taken / least_of_all, &name);
        by_way.entry(way.policy().to_string()).or_default().add(ratio, &name);
        if ratio > 1.01 {
            println!("{ratio:.3} {name}");
        }
    }
    println!("choosing {:.2?} a pass", choosing / cases as u32);
    println!("chosen over sequential: {}", sequential.text());
    println!("chosen over the least of all that is offered: {}", all.text());
    println!("the same by what was measured of kernels that take multiprocessors: {}", best.text());
    for (way, ratios) in &by_way {
        println!("  {way}: {}", ratios.text());
    }
    if cases >= 500 {
        let rows = [
            ("chosen over sequential", &sequential),
            ("chosen over the least of all that is offered", &all),
            ("the same, as SMs were measured to count", &best),
        ];
        record("linear", cases, &rows);
    }
    assert!(best.worst().0 <= 1.01, "{:?}", best.worst());
}
