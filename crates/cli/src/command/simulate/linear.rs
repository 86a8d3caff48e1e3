//! `counterpoint simulate linear`.

use counterpoint_plan::{
    CostModel, DType, LinearDirection, LinearPass, LinearPlan, LinearSpec, PassOverlap, Topology, WaveGroups,
};
use counterpoint_schedule::{
    OverlapPolicy, Program, RankTransport, WeightGradient, Workload, lower_linear_backward,
    lower_linear_forward, simulate,
};

use super::{PassRow, Predicted, Setting, Simulated, pass_columns, simulated};
use crate::arguments::{PassOverlaps, SimulateLinearArguments, dtype_name};
use crate::command::overlap::warning;
use crate::error::CliError;
use crate::schema::Schema;

/// Flags of the sizes of a layer.
const FLAGS: [(&str, &str); 2] = [("in_features", "--in-features"), ("out_features", "--out-features")];

pub(super) fn run(arguments: &SimulateLinearArguments) -> Result<(), CliError> {
    let setting = Setting::of(&arguments.simulation, arguments.profile.as_deref())?;
    let cost = setting.profile.cost;
    let spec = LinearSpec {
        kind: arguments.kind.into(),
        activations: arguments.activations.into(),
        tokens: arguments.tokens,
        in_features: arguments.in_features,
        out_features: arguments.out_features,
        has_bias: false,
        dtype: arguments.dtype,
    };
    let tp_size = arguments.tp_size;
    // As layers do: what does not overlap by groups has one.
    let plan_of = |policy: &OverlapPolicy, chosen: Option<usize>| {
        let groups = match (&arguments.groups, chosen) {
            (WaveGroups::Auto, Some(groups)) => WaveGroups::Fixed(groups),
            (WaveGroups::Auto, None) if !policy.overlaps_by_groups() => WaveGroups::Fixed(1),
            (groups, _) => groups.clone(),
        };
        LinearPlan::new(spec, tp_size, groups, &cost).map_err(|source| CliError::of_layer(source, &FLAGS))
    };
    let plan = plan_of(&OverlapPolicy::default(), None)?;
    let ranks_per_node = arguments.simulation.ranks_per_node.min(tp_size);
    let topology = Topology { world_size: tp_size, ranks_per_node };
    // All ranks do the same; the first has the most tokens.
    let alone = |program: Program| {
        simulate(&[program], &topology, &cost).map_err(|source| CliError::Predict { source })
    };
    let gradient = WeightGradient::Accumulated(DType::F32);
    let directions = [LinearDirection::Forward, LinearDirection::Backward { weight_gradient: true }];
    // The way that layers take by themselves, and its groups.
    let chosen =
        directions.map(|direction| chosen(LinearPass { spec, tp_size, direction }, &topology, &cost));
    let mut predicted =
        Predicted::new(Schema::SimulateLinear, "Predicted linear layer", &setting.profile, pass_columns());
    predicted.set("kind", spec.kind);
    predicted.set("tokens", spec.tokens);
    predicted.set("features", format!("{} to {}", spec.in_features, spec.out_features));
    predicted.set("dtype", dtype_name(spec.dtype));
    predicted.set("ranks", tp_size);
    predicted.set("nodes", topology.nodes());
    let sizes: Vec<String> = plan.group_sizes().iter().map(ToString::to_string).collect();
    predicted.set("groups", sizes.join("+"));
    let mut first = [0.0; 2];
    let mut rows = Vec::new();
    let asked = arguments.overlap.iter().map(|&one| PassOverlaps { forward: one, backward: one });
    let policies = simulated(asked, chosen.map(|(policy, _)| policy));
    for (index, Simulated { asked, passes }) in policies.iter().enumerate() {
        for (at, (policy, pass)) in passes.iter().zip(["forward", "backward"]).enumerate() {
            let is_chosen = *policy == chosen[at].0;
            let plan = plan_of(policy, is_chosen.then_some(chosen[at].1))?;
            let timeline = alone(match directions[at] {
                LinearDirection::Forward => lower_linear_forward(&plan, 0, *policy),
                LinearDirection::Backward { .. } => lower_linear_backward(&plan, 0, gradient, *policy),
            })?;
            if index == 0 {
                first[at] = timeline.makespan();
            }
            let runs = RankTransport::any_of_gpus(&topology, policy, Workload::Linear);
            let groups = Some(plan.groups());
            let (policy, first) = (*policy, first[at]);
            let warning = warning(&policy, &cost);
            rows.push(PassRow {
                pass,
                asked,
                policy,
                timeline,
                first,
                groups,
                runs,
                chosen: is_chosen,
                warning,
            });
        }
    }
    predicted.add_passes(rows);
    predicted.tell(&arguments.simulation, &setting)
}

/// What layers take for a pass on GPUs of such nodes, and in how many groups.
fn chosen(pass: LinearPass, topology: &Topology, cost: &CostModel) -> (OverlapPolicy, usize) {
    let all = [PassOverlap::Sequential, PassOverlap::Fused, PassOverlap::Beside];
    let runs = |way: &PassOverlap| {
        RankTransport::any_of_gpus(topology, &OverlapPolicy::from(*way), Workload::Linear).is_ok()
    };
    let ways: Vec<PassOverlap> = all.into_iter().filter(runs).collect();
    let way = pass.fastest(&ways, cost);
    let groups = if way == PassOverlap::Beside { pass.groups_beside(cost) } else { 1 };
    (way.into(), groups)
}
