//! On several nodes: whether queries that travel cross between nodes once for each node, or go to each host by itself.

use counterpoint_cost::CostModel;
use counterpoint_plan::{AttentionSpec, HostedRowBytes, HostedWork, Plan, TwoLevelPart};

use crate::closed_form::{LinkRows, busier_rows};
use crate::config::PlanConfig;

/// `plan` on the nodes of `config`, queries that travel in the way that takes the slowest rank less time on links by the costs of `config`: a
/// forward and a backward together, were they all that ranks do.
pub(crate) fn over_nodes(plan: Plan, spec: &AttentionSpec, config: &PlanConfig) -> Plan {
    let mut plan = Plan { queries_go_straight: false, ..plan }.over_nodes(&config.topology);
    let levels = plan.two_level.iter().flat_map(|exchange| &exchange.hosted);
    let ranks = plan.ranks.iter().filter_map(|rank| Some((rank.rank, rank.hosted.as_ref()?)));
    let seconds = ranks.zip(levels).map(|((rank, work), levels)| seconds(rank, work, levels, spec, config));
    let most = |a: [f64; 2], b: [f64; 2]| [a[0].max(b[0]), a[1].max(b[1])];
    let [straight, in_steps] = seconds.fold([0.0; 2], most);
    if let Some(exchange) = plan.two_level.as_mut().filter(|_| straight < in_steps) {
        exchange.hosted.clear();
        plan.queries_go_straight = true;
    }
    plan
}

/// That a rank's links take where queries go straight, and in two steps.
fn seconds(
    rank: usize,
    work: &HostedWork,
    levels: &TwoLevelPart,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> [f64; 2] {
    let PlanConfig { topology, cost, .. } = config;
    let rows = |part| busier_rows(part, rank, topology);
    let all = rows(&work.part);
    let [inter, near, forward] = [&levels.inter, &levels.near, &levels.forward].map(rows);
    let both = |of: &dyn Fn(usize, bool) -> f64| -> f64 {
        let of_pass = |bytes: HostedRowBytes| {
            let HostedRowBytes { tensors, statistics, results } = bytes;
            of(tensors, false) + of(statistics, false) + of(results, true)
        };
        of_pass(spec.hosted_forward_bytes()) + of_pass(spec.hosted_backward_bytes())
    };
    let on = |rows: LinkRows, bytes: usize, cost: &CostModel| rows.seconds(bytes, cost);
    let straight = both(&|bytes, _| on(all, bytes, cost));
    let in_steps = both(&|bytes, is_back| {
        let [inter, near, forward] = [inter, near, forward].map(|rows| on(rows, bytes, cost));
        // Rows of the node travel at the same time as those that cross; what comes back crosses behind the node's own.
        forward + if is_back { near + inter } else { near.max(inter) }
    });
    [straight, in_steps]
}
