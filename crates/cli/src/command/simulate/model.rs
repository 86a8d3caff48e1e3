//! `counterpoint simulate model`: a transformer's training step on more and more ranks.

use counterpoint_choose::{LayerPrediction, Parallelism, StepError, StepPrediction, StepSpec};
use counterpoint_console::{CliError, Progress, Schema};
use counterpoint_mask::Mask;
use counterpoint_plan::{Activations, DType, Topology};
use counterpoint_report::{Column, format_count, format_flops, format_seconds};
use serde_json::{Value, json};

use super::{Predicted, Setting};
use crate::arguments::SimulateModelArguments;

pub(super) fn run(arguments: &SimulateModelArguments) -> Result<(), CliError> {
    let setting = Setting::of(&arguments.simulation, arguments.profile.as_deref())?;
    let cost = setting.profile.cost;
    let model = arguments.sizes()?;
    let expression = format!("causal:{}", arguments.tokens);
    let mask = Mask::parse(&expression, &|_| Err(String::new()))
        .map_err(|source| CliError::MaskExpression { expression, source })?;
    let columns = vec![
        Column::number_name("ranks"),
        Column::number("replicas", 5),
        Column::name("policy"),
        Column::number("layer forward", 4),
        Column::number("layer backward", 4),
        Column::number("communication", 3),
        Column::number("exposed a layer", 1),
        Column::number("exposed a step", 1),
        Column::number("replicas add", 2),
        Column::number("step", 0),
        Column::number("a rank", 2),
    ];
    let mut predicted =
        Predicted::new(Schema::SimulateModel, "Predicted training step", &setting.profile, columns);
    predicted.set("model", model.name);
    predicted.set("layers", model.layers);
    predicted.set("hidden", model.hidden);
    predicted.set("activations", Activations::from(arguments.activations));
    predicted.set("tokens", format_count(arguments.tokens as u64));
    predicted.set("microbatches", arguments.microbatches);
    predicted.set("tp", arguments.tp_size);
    predicted.set("cp", arguments.cp_size);
    predicted.set("ranks of a node", arguments.simulation.ranks_per_node);
    let progress = Progress::new();
    for &ranks in &arguments.ranks {
        let ranks_per_node = arguments.simulation.ranks_per_node.min(ranks);
        let parallel = Parallelism {
            topology: Topology { world_size: ranks, ranks_per_node },
            tp_size: arguments.tp_size,
            cp_size: arguments.cp_size,
        };
        for &policy in &arguments.overlap {
            progress.step(format!("{ranks} ranks, {policy}"));
            let spec = StepSpec {
                model,
                mask: mask.clone(),
                microbatches: arguments.microbatches,
                dtype: DType::Bf16,
                activations: arguments.activations.into(),
                gradient: arguments.gradient.into(),
                groups: arguments.groups.clone(),
                policy,
            };
            let layer = spec.layer(&parallel, &cost).map_err(refusal)?;
            let step = spec.step(&layer, &parallel, &cost);
            let replicas = ranks / (arguments.tp_size * arguments.cp_size);
            let (row, json) = row(ranks, replicas, &policy.to_string(), &layer, &step);
            predicted.rows.push(row);
            predicted.json.push(json);
            for timeline in layer.timelines() {
                predicted
                    .timelines
                    .push((format!("{} of a layer, {ranks} ranks, {policy}", timeline.name), timeline));
            }
        }
    }
    drop(progress);
    predicted.print(&arguments.simulation, &setting)
}

fn refusal(error: StepError) -> CliError {
    match error {
        StepError::Simulate(source) => CliError::of_choice(source),
        StepError::Plan(source) => CliError::of_choice(source),
        StepError::Config(source) => CliError::of_choice(source),
        other => CliError::usage(other),
    }
}

fn row(
    ranks: usize,
    replicas: usize,
    policy: &str,
    layer: &LayerPrediction,
    step: &StepPrediction,
) -> (Vec<String>, Value) {
    let overlap = layer.overlap();
    let rate = step.flops / step.seconds;
    let text = vec![
        ranks.to_string(),
        replicas.to_string(),
        policy.to_owned(),
        format_seconds(layer.forward_seconds()),
        format_seconds(layer.backward_seconds()),
        format_seconds(overlap.communication_seconds),
        format_seconds(overlap.exposed_seconds),
        format_seconds(step.exposed_seconds),
        format_seconds(step.replica_exposed_seconds),
        format_seconds(step.seconds),
        format_flops(rate),
    ];
    let parts: Vec<Value> = layer
        .parts
        .iter()
        .map(|part| {
            let exposed = part.forward.overlap().exposed_seconds + part.backward.overlap().exposed_seconds;
            json!({
                "part": part.name,
                "forward_seconds": part.forward.makespan(),
                "backward_seconds": part.backward.makespan(),
                "exposed_seconds": exposed,
            })
        })
        .collect();
    let json = json!({
        "ranks": ranks,
        "replicas": replicas,
        "policy": policy,
        "layer": {
            "forward_seconds": layer.forward_seconds(),
            "backward_seconds": layer.backward_seconds(),
            "communication_seconds": overlap.communication_seconds,
            "exposed_seconds": overlap.exposed_seconds,
            "overlap_efficiency": overlap.efficiency,
            "parts": parts,
        },
        "step": {
            "seconds": step.seconds,
            "exposed_seconds": step.exposed_seconds,
            "replica_seconds": step.replica_seconds,
            "replica_exposed_seconds": step.replica_exposed_seconds,
            "tflops_per_rank": rate / 1e12,
        },
    });
    (text, json)
}
