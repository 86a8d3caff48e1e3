use counterpoint_plan::{DType, LinearPlan, LinearSpec, Topology};
use counterpoint_schedule::{
    OverlapPolicy, Program, Timeline, WeightGradient, lower_linear_backward, lower_linear_forward, simulate,
};

use super::{Predicted, Setting, pass_columns, pass_row};
use crate::arguments::{SimulateLinearArguments, dtype_name};
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
    let plan = LinearPlan::new(spec, tp_size, arguments.groups.clone(), &cost)
        .map_err(|source| CliError::of_layer(source, &FLAGS))?;
    let ranks_per_node = arguments.simulation.ranks_per_node.min(tp_size);
    let topology = Topology { world_size: tp_size, ranks_per_node };
    // All ranks do the same; the first has the most tokens.
    let alone = |program: Program| {
        simulate(&[program], &topology, &cost).map_err(|source| CliError::Predict { source })
    };
    let gradient = WeightGradient::Accumulated(DType::F32);
    let passes = |policy: OverlapPolicy| -> Result<[(&str, Timeline); 2], CliError> {
        Ok([
            ("forward", alone(lower_linear_forward(&plan, 0, policy))?),
            ("backward", alone(lower_linear_backward(&plan, 0, gradient, policy))?),
        ])
    };
    let mut predicted =
        Predicted::new(Schema::SimulateLinear, "Predicted linear layer", &setting.profile, pass_columns());
    predicted.set("kind", format!("{:?}", arguments.kind).to_lowercase());
    predicted.set("tokens", spec.tokens);
    predicted.set("features", format!("{} to {}", spec.in_features, spec.out_features));
    predicted.set("dtype", dtype_name(spec.dtype));
    predicted.set("ranks", tp_size);
    predicted.set("nodes", topology.nodes());
    let sizes: Vec<String> = plan.group_sizes().iter().map(ToString::to_string).collect();
    predicted.set("groups", sizes.join("+"));
    let mut first = [0.0; 2];
    for (index, &policy) in arguments.simulation.overlap.iter().enumerate() {
        for (pass, (name, timeline)) in passes(policy)?.into_iter().enumerate() {
            if index == 0 {
                first[pass] = timeline.makespan();
            }
            let (row, json) = pass_row(name, &policy.to_string(), &timeline, first[pass]);
            predicted.rows.push(row);
            predicted.json.push(json);
            predicted.timelines.push((format!("{name}, {policy}"), timeline));
        }
    }
    predicted.tell(&arguments.simulation, &setting)
}
