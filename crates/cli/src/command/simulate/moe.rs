//! `counterpoint simulate moe`.

use std::sync::Arc;

use counterpoint_choose::{ExpertChoice, ExpertDirection, expert_pass, expert_programs};
use counterpoint_console::{
    CliError, Schema,
    arguments::{PassOverlaps, dtype_name},
    overlap::warning,
};
use counterpoint_plan::{DType, ExpertGroups, ExpertPlan, ExpertSpec, RandomRouting, Routing, Topology};
use counterpoint_schedule::{OverlapPolicy, RankTransport, WeightGradient, Workload, simulate};

use super::{PassRow, Predicted, Setting, Simulated, pass_columns, simulated};
use crate::arguments::SimulateMoeArguments;
use counterpoint_console::FlagFault;

/// Of the routing, which is one of many alike.
const SEED: u64 = 0;
/// Of more ranks the first stand for all: choices are drawn alike on all of them.
const MOST_RANKS: usize = 16;

pub(super) fn run(arguments: &SimulateMoeArguments) -> Result<(), CliError> {
    let setting = Setting::of(&arguments.simulation, arguments.profile.as_deref())?;
    let cost = setting.profile.cost;
    let &SimulateMoeArguments { experts, choices, tokens, skew, ep_size, dtype, .. } = arguments;
    if choices > experts {
        return Err(CliError::flag("--choices", choices.to_string(), FlagFault::Choices { experts }));
    }
    if !(0.0..=8.0).contains(&skew) {
        return Err(CliError::flag("--skew", skew.to_string(), FlagFault::Range { least: 0.0, most: 8.0 }));
    }
    let routing =
        match Routing::random(RandomRouting { experts, choices, ranks: ep_size, tokens, skew, seed: SEED }) {
            Ok(routing) => Arc::new(routing),
            Err(error) => return Err(CliError::flag("--experts", experts.to_string(), error)),
        };
    let (in_features, out_features) = (arguments.in_features, arguments.out_features);
    let spec = ExpertSpec { kind: arguments.kind.into(), in_features, out_features, dtype };
    let ranks_per_node = arguments.simulation.ranks_per_node.min(ep_size);
    let topology = Topology { world_size: ep_size, ranks_per_node };
    let gradient = WeightGradient::Accumulated(DType::F32);
    let directions = [ExpertDirection::Forward, ExpertDirection::Backward(gradient)];
    let choose = |direction| {
        expert_pass(spec, &routing, direction, RankTransport::of_gpus(&topology), &topology, &cost)
            .map_err(|source| CliError::Predict { source })
    };
    let choices_of = [choose(directions[0])?, choose(directions[1])?];
    let rows = routing.rows();
    let (most, all) = (rows.iter().max().copied().unwrap_or(0), rows.iter().sum::<usize>());
    let mut predicted =
        Predicted::new(Schema::SimulateMoe, "Predicted layer of experts", &setting.profile, pass_columns());
    predicted.set("kind", spec.kind);
    predicted.set("tokens of a rank", tokens);
    predicted.set("features", format!("{in_features} to {out_features}"));
    predicted.set("experts", format!("{experts}, {choices} of them a token"));
    predicted.set("rows", format!("{all}, {most} of them at the fullest expert"));
    predicted.set("dtype", dtype_name(dtype));
    predicted.set("ranks", ep_size);
    predicted.set("nodes", topology.nodes());
    let ranks: Vec<usize> = (0..ep_size.min(MOST_RANKS)).collect();
    let mut first = [0.0; 2];
    let mut rows = Vec::new();
    let asked = arguments.overlap.iter().map(|&one| PassOverlaps { forward: one, backward: one });
    let policies = simulated(asked, [0, 1].map(|at: usize| choices_of[at].chosen().policy));
    for (index, Simulated { asked, passes }) in policies.iter().enumerate() {
        for (at, (policy, pass)) in passes.iter().zip(["forward", "backward"]).enumerate() {
            let groups = groups_under(&choices_of[at], policy);
            let plan = ExpertPlan::new(spec, routing.clone(), groups);
            let programs = expert_programs(&plan, &ranks, directions[at], *policy);
            let timeline =
                simulate(&programs, &topology, &cost).map_err(|source| CliError::Predict { source })?;
            if index == 0 {
                first[at] = timeline.makespan();
            }
            rows.push(PassRow {
                pass,
                asked,
                policy: *policy,
                timeline,
                first: first[at],
                groups: Some(groups.count),
                runs: RankTransport::any_of_gpus(&topology, policy, Workload::Experts),
                chosen: *policy == choices_of[at].chosen().policy,
                warning: warning(policy, &cost),
            });
        }
    }
    predicted.add_passes(rows);
    predicted.print(&arguments.simulation, &setting)
}

/// The groups of a pass under a policy.
fn groups_under(choice: &ExpertChoice, policy: &OverlapPolicy) -> ExpertGroups {
    match choice.under(policy) {
        Some(best) => best.groups,
        None if policy.overlaps_by_groups() => ExpertGroups::even(4),
        None => ExpertGroups::default(),
    }
}
