//! `counterpoint simulate attention`.

use counterpoint_choose::{AttentionPrediction, PlanConfig, modelled_transports};
use counterpoint_console::{
    CliError, Progress, Schema,
    arguments::{dispatch_name, dtype_name},
    mask_argument,
    overlap::{AUTO, Overlapped, warning},
    prediction::predict,
    solution::Solution,
};
use counterpoint_plan::{Planning, Topology, TrafficBounds};
use counterpoint_schedule::{GradientReduction, PassPolicies, RankTransport, Workload};

use super::{PassRow, Predicted, Setting, Simulated, pass_columns, simulated};
use crate::arguments::SimulateAttentionArguments;
use crate::command::plan::attention_spec;

pub(super) fn run(arguments: &SimulateAttentionArguments) -> Result<(), CliError> {
    let setting = Setting::of(&arguments.simulation, arguments.planning.profile.as_deref())?;
    let spec = attention_spec(&arguments.shape, arguments.planning.gradient_shares, &setting.profile.cost)?;
    let mask = mask_argument::load(&arguments.mask)?;
    let cp_size = arguments.cp_size;
    let ranks_per_node = arguments.simulation.ranks_per_node.min(cp_size);
    let topology = Topology { world_size: cp_size, ranks_per_node };
    let config = PlanConfig {
        chunk_size: arguments.planning.chunk_size,
        dispatch: arguments.planning.dispatch.named(),
        stages: arguments.planning.stages,
        query_exchange: arguments.planning.query_exchange_of(cp_size, false),
        topology,
        cost: setting.profile.cost,
    };
    let progress = Progress::new();
    progress.step("planning");
    let asked = (arguments.planning.dispatch, setting.profile.machine.as_str());
    let solution = Solution::solve(&mask, &spec, &config, asked, &Planning::ALONE)?.over_nodes(&topology);
    let mut predicted =
        Predicted::new(Schema::SimulateAttention, "Predicted attention", &setting.profile, pass_columns());
    predicted.set("mask", &arguments.mask);
    predicted.set("heads", format!("{}:{} of {}", spec.heads_q, spec.heads_kv, spec.head_dim));
    predicted.set("dtype", dtype_name(spec.dtype));
    predicted.set("ranks", cp_size);
    predicted.set("nodes", topology.nodes());
    predicted.set("dispatch", dispatch_name(solution.dispatch));
    let rank = &solution.plan.ranks[0];
    predicted.set("stages", format!("{} and {}", rank.forward.len() - 1, rank.backward.len() - 1));
    for (name, share) in TrafficBounds::new(&solution.plan, &mask, &spec).of_ring().into_iter().flatten() {
        predicted.set(&format!("key rows of {name}"), format!("{share:.3}"));
    }
    // What `counterpoint attention` runs on such a machine.
    progress.step("choosing policies");
    let reduction = Some(GradientReduction::default());
    let (plan, config) = (&solution.plan, &config);
    let overlapped = Overlapped { plan, spec: &spec, backward: reduction, config };
    let transports = modelled_transports(&config.topology, &config.cost);
    let PassPolicies { forward, backward } = overlapped.by(AUTO, transports)?.policies;
    let default = [forward, backward];
    let mut first = [0.0; 2];
    let mut rows = Vec::new();
    let policies = simulated(arguments.overlap.0.iter().copied(), default);
    for (index, Simulated { asked, passes: of_passes }) in policies.iter().enumerate() {
        let [forward, backward] = *of_passes;
        let policies = PassPolicies { forward, backward };
        progress.step(format!("simulating {policies}"));
        let AttentionPrediction { forward, backward, .. } =
            predict(plan, &spec, policies, reduction, config)?;
        let passes = [Some(("forward", forward)), backward.map(|backward| ("backward", backward))];
        for (at, (pass, timeline)) in passes.into_iter().flatten().enumerate() {
            if index == 0 {
                first[at] = timeline.makespan();
            }
            let policy = of_passes[at];
            if rows.iter().any(|row: &PassRow<'_>| (row.pass, row.policy) == (pass, policy)) {
                // What is run by default was named too.
                continue;
            }
            rows.push(PassRow {
                pass,
                asked,
                policy,
                timeline,
                first: first[at],
                groups: None,
                runs: RankTransport::any_of(transports, &policy, Workload::Attention),
                chosen: policy == default[at],
                warning: warning(&policy, &config.cost),
            });
        }
    }
    predicted.add_passes(rows);
    drop(progress);
    predicted.print(&arguments.simulation, &setting)
}
