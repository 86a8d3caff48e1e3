//! What linear layers run by default, on every transport: predicted to end first, and by the simulator nearly all hidden.

use counterpoint_choose::LinearMachine;
use counterpoint_cost::{CostModel, Link, WorkerSharing};
use counterpoint_plan::{
    Activations, DType, LinearDirection, LinearKind, LinearPlan, LinearSpec, Topology, WaveGroups,
};
use counterpoint_schedule::{
    OverlapPolicy, PassOverlap, RankTransport, Timeline, WeightGradient, lower_linear_backward,
    lower_linear_forward, simulate,
};

const BACKWARD: LinearDirection = LinearDirection::Backward { weight_gradient: true };
/// Between GPUs of a node by NCCL's sends and receives, as measured on H200s.
const NCCL: Link = Link { alpha_seconds: 40e-6, bytes_per_second: 270e9 };

fn machine(transport: RankTransport, has_barriers: bool, topology: Topology) -> LinearMachine {
    let (cost, workers) = match transport {
        RankTransport::Cpu => {
            (CostModel { link: Link { alpha_seconds: 1e-3, bytes_per_second: 100e6 }, ..CostModel::CPU }, 0)
        }
        RankTransport::Nccl => {
            let sharing = Some(WorkerSharing::H200);
            (CostModel { link: NCCL, sharing, ..CostModel::H200 }, WorkerSharing::H200.communication)
        }
        _ => {
            let sharing = Some(WorkerSharing::H200);
            (CostModel { sharing, ..CostModel::H200 }, WorkerSharing::H200.communication)
        }
    };
    LinearMachine::new(transport, transport.pass_overlaps(has_barriers, workers), topology, cost)
}

fn layers([tokens, hidden, local]: [usize; 3], tp_size: usize) -> impl Iterator<Item = LinearSpec> {
    let kinds = [LinearKind::Column, LinearKind::Row];
    let all = kinds.into_iter().flat_map(|kind| {
        [Activations::Replicated, Activations::SequenceParallel].map(|activations| (kind, activations))
    });
    all.map(move |(kind, activations)| {
        let (in_features, out_features) = match kind {
            LinearKind::Column => (hidden, local * tp_size),
            LinearKind::Row => (local * tp_size, hidden),
        };
        let (has_bias, dtype) = (false, DType::Bf16);
        LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype }
    })
}

fn played(
    machine: &LinearMachine,
    plan: &LinearPlan,
    direction: LinearDirection,
    policy: OverlapPolicy,
) -> Timeline {
    let program = match direction {
        LinearDirection::Forward => lower_linear_forward(plan, 0, policy),
        LinearDirection::Backward { .. } => {
            lower_linear_backward(plan, 0, WeightGradient::Accumulated(DType::F32), policy)
        }
    };
    simulate(&[program], &machine.topology, &machine.cost).unwrap()
}

/// A pass by default compared with the same one after the other.
struct Case {
    name: String,
    way: PassOverlap,
    groups: WaveGroups,
    default: Timeline,
    sequential: Timeline,
}

impl Case {
    fn of(machine: &LinearMachine, spec: LinearSpec, direction: LinearDirection) -> Self {
        let (way, plan) = machine.fastest(spec, direction, &machine.cost).unwrap();
        let ranks = machine.topology.world_size;
        let whole = LinearPlan::new(spec, ranks, WaveGroups::Fixed(1)).unwrap();
        let sequential = OverlapPolicy::from(PassOverlap::SEQUENTIAL);
        let LinearSpec { kind, activations, tokens, in_features, out_features, .. } = spec;
        Self {
            name: format!("{kind} {activations} {direction:?} {tokens} {in_features} {out_features}"),
            way,
            groups: plan.wave_groups(),
            default: played(machine, &plan, direction, way.into()),
            sequential: played(machine, &whole, direction, sequential),
        }
    }

    /// What could be hidden, of the whole.
    fn hideable(&self) -> f64 {
        let overlap = self.sequential.overlap();
        overlap.communication_seconds.min(overlap.compute_seconds) / self.sequential.makespan()
    }
}

/// Where a twentieth of a pass could be hidden, no transport runs it one after the other.
fn hides(transport: RankTransport, has_barriers: bool, topology: Topology) {
    let machine = machine(transport, has_barriers, topology);
    let shapes = match transport {
        RankTransport::Cpu => vec![[512, 1024, 1024], [2048, 2048, 512]],
        _ => vec![[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 3584]],
    };
    let mut hid = 0;
    for shape in shapes {
        for spec in layers(shape, topology.world_size) {
            for direction in [LinearDirection::Forward, BACKWARD] {
                let case = Case::of(&machine, spec, direction);
                let (default, sequential) = (case.default.makespan(), case.sequential.makespan());
                if case.hideable() < 0.05 {
                    continue;
                }
                let case_text = format!(
                    "{transport} {}: {:?} {:?} takes {default}, sequential {sequential}",
                    case.name, case.way, case.groups
                );
                assert_ne!(case.way, PassOverlap::SEQUENTIAL, "{case_text}");
                assert!(default < sequential, "{case_text}");
                hid += 1;
            }
        }
    }
    assert!(hid >= 8, "{hid} passes had something to hide");
}

#[test]
fn nothing_is_sequential_by_nccl() {
    hides(RankTransport::Nccl, false, Topology::flat(8));
}

#[test]
fn nothing_is_sequential_by_nccl_on_two_nodes() {
    hides(RankTransport::Nccl, false, Topology { world_size: 16, ranks_per_node: 8 });
}

#[test]
fn nothing_is_sequential_between_nodes() {
    hides(RankTransport::Hierarchical, false, Topology { world_size: 16, ranks_per_node: 8 });
}

#[test]
fn nothing_is_sequential_where_ranks_share_a_gpu() {
    hides(RankTransport::Nvlink, false, Topology::flat(8));
}

#[test]
fn nothing_is_sequential_by_nvlink() {
    hides(RankTransport::Nvlink, true, Topology::flat(8));
}

/// Where other libraries' collectives run, no kernel waits for other ranks on all multiprocessors, and most is hidden all the same.
#[test]
fn nothing_is_fused_where_it_must_not_be() {
    let machine = machine(RankTransport::Nvlink, true, Topology::flat(8));
    let unfused = machine.clone().without_waiting_products();
    let mut fused = 0;
    for spec in [[2048, 12288, 12288], [8192, 8192, 7168]].into_iter().flat_map(|shape| layers(shape, 8)) {
        for direction in [LinearDirection::Forward, BACKWARD] {
            fused += usize::from(Case::of(&machine, spec, direction).way.is_fused());
            let case = Case::of(&unfused, spec, direction);
            assert!(!case.way.is_fused(), "{}", case.name);
            assert!(case.default.makespan() <= case.sequential.makespan(), "{}", case.name);
        }
    }
    assert!(fused > 0, "nothing was fused before");
}

#[test]
fn nothing_is_sequential_by_copy_engines() {
    hides(RankTransport::CopyEngine, false, Topology::flat(8));
}

#[test]
fn nothing_is_sequential_on_cpus() {
    hides(RankTransport::Cpu, false, Topology::flat(2));
}

/// Eight ranks of one node by NCCL, and of two nodes. Of sums under the gradient of the weight nine tenths are hidden where every product
/// is longer than what travels, but for the start of one way back. Where what travels has one product and no other to hide under, and that is half as long again, it is nine
/// tenths but for the starts of the first and last collectives, which nothing can hide. Less only where hiding more would take longer.
#[test]
fn what_products_can_hide_is_hidden() {
    for topology in [Topology::flat(8), Topology { world_size: 8, ranks_per_node: 4 }] {
        let machine = machine(RankTransport::Nccl, false, topology);
        // Of sums under the gradient of the weight, and of one product and its rows.
        let (mut counts, mut least, mut exceptions) = ([0; 2], [1.0f64; 2], 0);
        for hidden in [4096, 8192, 12288] {
            for (local, tokens) in
                [hidden / 2, hidden, 4 * hidden].into_iter().flat_map(|l| [4096, 8192, 16384].map(|t| (l, t)))
            {
                for spec in layers([tokens, hidden, local], 8) {
                    for direction in [LinearDirection::Forward, BACKWARD] {
                        let is_alone = direction == LinearDirection::Forward || spec.kind == LinearKind::Row;
                        let case = Case::of(&machine, spec, direction);
                        let overlap = case.sequential.overlap();
                        let communicating = overlap.communication_seconds;
                        // The least of the products that can hide it.
                        let products = if direction == LinearDirection::Forward { 1.0 } else { 2.0 };
                        let product = overlap.compute_seconds / products;
                        let longer = if is_alone { 1.5 } else { 1.0 };
                        if communicating == 0.0 || product < longer * communicating {
                            continue;
                        }
                        let efficiency = case.default.overlap().efficiency.unwrap_or(0.0);
                        let start = match topology.nodes() {
                            1 => machine.cost.link.alpha_seconds,
                            _ => machine.cost.network.alpha_seconds,
                        };
                        let phases = if spec.activations == Activations::Replicated { 2.0 } else { 1.0 };
                        let starts =
                            if is_alone { 2.0 * phases } else { phases - 1.0 } * start / communicating;
                        let case_text = format!(
                            "{} {:?} {:?}: {efficiency:.3}, {:.0} of {:.0} us, computing {:.0}, communicating {:.0}",
                            case.name,
                            case.way,
                            case.groups,
                            1e6 * case.default.makespan(),
                            1e6 * case.sequential.makespan(),
                            1e6 * overlap.compute_seconds,
                            1e6 * communicating,
                        );
                        let hides_enough = efficiency >= 0.9 - starts;
                        if !hides_enough {
                            // Workers that products leave free all the time hide more, and cost more than that.
                            let others = machine.overlaps.iter().map(|&way| {
                                let one = LinearMachine { overlaps: vec![way], ..machine.clone() };
                                Case::of(&one, spec, direction).default.makespan()
                            });
                            let soonest = others.fold(f64::INFINITY, f64::min);
                            assert!(case.default.makespan() <= 1.03 * soonest, "{soonest}: {case_text}");
                            exceptions += 1;
                        }
                        assert!(case.default.makespan() < case.sequential.makespan(), "{case_text}");
                        let kind = usize::from(is_alone);
                        counts[kind] += 1;
                        least[kind] = least[kind].min(efficiency);
                    }
                }
            }
        }
        println!(
            "{topology:?}: at least {least:.2?} hidden in {counts:?} passes, {exceptions} end first with less than 0.9"
        );
        assert!(exceptions * 5 <= counts[0] + counts[1], "{exceptions} of {counts:?}");
        assert!(counts[0] >= 8 && counts[1] >= 20, "{counts:?}");
    }
}
