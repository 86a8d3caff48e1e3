//! `counterpoint simulate linear`.

use counterpoint_choose::{LayerGroups, LinearMachine};
use counterpoint_console::{
    CliError, Schema,
    arguments::{PassOverlaps, dtype_name},
    overlap::warning,
};
use counterpoint_cost::WorkerSharing;
use counterpoint_plan::{
    DType, LinearDirection, LinearField, LinearKind, LinearPlan, LinearSpec, Topology, WaveGroups,
};
use counterpoint_schedule::{
    NormSpec, OverlapPolicy, Program, RankTransport, WeightGradient, Workload, lower_linear_backward,
    lower_linear_forward, lower_normalised_backward, lower_normalised_forward, simulate,
};

use super::{PassRow, Predicted, Setting, Simulated, pass_columns, simulated};
use crate::arguments::SimulateLinearArguments;
use counterpoint_console::FlagFault;

/// Flags of the sizes of a layer.
const FLAGS: [(LinearField, &str); 2] =
    [(LinearField::InFeatures, "--in-features"), (LinearField::OutFeatures, "--out-features")];

const DIRECTIONS: [LinearDirection; 2] =
    [LinearDirection::Forward, LinearDirection::Backward { weight_gradient: true }];

pub(super) fn run(arguments: &SimulateLinearArguments) -> Result<(), CliError> {
    let setting = Setting::of(&arguments.simulation, arguments.profile.as_deref())?;
    let cost = setting.profile.cost;
    let (spec, norm) = layer(arguments)?;
    let tp_size = arguments.tp_size;
    // As layers do: what does not overlap by groups has one.
    let plan_of = |policy: &OverlapPolicy, chosen: Option<WaveGroups>| {
        let groups = match (&arguments.groups, chosen) {
            (LayerGroups::Auto, Some(groups)) => groups.into(),
            (LayerGroups::Auto, None) if !policy.overlaps_by_groups() => WaveGroups::Fixed(1).into(),
            (groups, _) => groups.clone(),
        };
        groups.plan(spec, tp_size, &cost).map_err(|source| CliError::of_layer(source, &FLAGS))
    };
    let plan = plan_of(&OverlapPolicy::default(), None)?;
    let ranks_per_node = arguments.simulation.ranks_per_node.min(tp_size);
    let topology = Topology { world_size: tp_size, ranks_per_node };
    // The way that layers take by themselves on the nodes' first transport, and its groups.
    let workers = cost.sharing.map_or(WorkerSharing::H200.communication, |sharing| sharing.communication);
    let transport = RankTransport::of_gpus(&topology)[0];
    let machine = LinearMachine::new(transport, transport.pass_overlaps(true, workers), topology, cost);
    let chosen = [chosen(&machine, spec, DIRECTIONS[0])?, chosen(&machine, spec, DIRECTIONS[1])?];
    let mut predicted =
        Predicted::new(Schema::SimulateLinear, "Predicted linear layer", &setting.profile, pass_columns());
    describe(&mut predicted, &plan, norm, topology);
    let mut first = [0.0; 2];
    let mut rows = Vec::new();
    let asked = arguments.overlap.iter().map(|&one| PassOverlaps { forward: one, backward: one });
    let policies = simulated(asked, [0, 1].map(|at: usize| chosen[at].0));
    for (index, Simulated { asked, passes }) in policies.iter().enumerate() {
        for (at, (&policy, pass)) in passes.iter().zip(["forward", "backward"]).enumerate() {
            let is_chosen = policy == chosen[at].0;
            let plan = plan_of(&policy, is_chosen.then(|| chosen[at].1.clone()))?;
            // All ranks do the same; the first has the most tokens.
            let program = lowered(&plan, DIRECTIONS[at], norm, policy);
            let timeline =
                simulate(&[program], &topology, &cost).map_err(|source| CliError::Predict { source })?;
            if index == 0 {
                first[at] = timeline.makespan();
            }
            rows.push(PassRow {
                pass,
                asked,
                policy,
                timeline,
                first: first[at],
                groups: Some(plan.sum_groups()),
                runs: RankTransport::any_of_gpus(&topology, &policy, Workload::Linear),
                chosen: is_chosen,
                warning: warning(&policy, &cost),
            });
        }
    }
    predicted.add_passes(rows);
    predicted.print(&arguments.simulation, &setting)
}

/// The layer, and the RMSNorm behind it where there is one.
fn layer(arguments: &SimulateLinearArguments) -> Result<(LinearSpec, Option<NormSpec>), CliError> {
    let spec = LinearSpec {
        kind: arguments.kind.into(),
        activations: arguments.activations.into(),
        tokens: arguments.tokens,
        in_features: arguments.in_features,
        out_features: arguments.out_features,
        has_bias: false,
        dtype: arguments.dtype,
    };
    let norm = arguments.rms_norm.then(|| NormSpec::new(1e-5));
    if norm.is_some() && spec.kind != LinearKind::Row {
        let fault = FlagFault::WholeRows { kind: spec.kind, flag: "--kind" };
        return Err(CliError::flag("--rms-norm", "", fault));
    }
    Ok((spec, norm))
}

/// What the first rank does in a pass.
fn lowered(
    plan: &LinearPlan,
    direction: LinearDirection,
    norm: Option<NormSpec>,
    policy: OverlapPolicy,
) -> Program {
    let gradient = WeightGradient::Accumulated(DType::F32);
    match (direction, norm) {
        (LinearDirection::Forward, None) => lower_linear_forward(plan, 0, policy),
        (LinearDirection::Forward, Some(norm)) => lower_normalised_forward(plan, 0, norm, policy),
        (LinearDirection::Backward { .. }, None) => lower_linear_backward(plan, 0, gradient, policy),
        (LinearDirection::Backward { .. }, Some(norm)) => {
            lower_normalised_backward(plan, 0, norm, gradient, policy)
        }
    }
}

/// What is predicted, above the table.
fn describe(predicted: &mut Predicted, plan: &LinearPlan, norm: Option<NormSpec>, topology: Topology) {
    let spec = plan.spec;
    predicted.set("kind", spec.kind);
    predicted.set("tokens", spec.tokens);
    predicted.set("features", format!("{} to {}", spec.in_features, spec.out_features));
    if norm.is_some() {
        predicted.set("behind", "residual and RMSNorm");
    }
    predicted.set("dtype", dtype_name(spec.dtype));
    predicted.set("ranks", topology.world_size);
    predicted.set("nodes", topology.nodes());
    predicted.set("groups", plan.wave_groups());
}

/// What layers take for a pass on GPUs of such nodes, and the layer in its groups.
fn chosen(
    machine: &LinearMachine,
    spec: LinearSpec,
    direction: LinearDirection,
) -> Result<(OverlapPolicy, WaveGroups), CliError> {
    let fastest = machine.fastest(spec, direction, &machine.cost);
    let (way, plan) = fastest.map_err(|source| CliError::of_layer(source, &FLAGS))?;
    Ok((way.into(), plan.wave_groups()))
}
