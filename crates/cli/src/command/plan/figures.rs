//! Plans of many ranks, in figures: nobody needs all ranks' pieces, which would take gigabytes.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Instant;

use counterpoint_choose::{PlanConfig, PlanOverview, RankPrediction};
use counterpoint_console::{self as console, CliError, Progress, Schema, arguments::dispatch_name};
use counterpoint_cost::MachineProfile;
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Planning};
use counterpoint_report::{comparison_table, format_count, format_seconds, summary_table};

use super::dispatches::{self, DispatchRow};
use super::imbalance::{Imbalance, Level, most_over_mean};
use super::{Document, Inputs, headline, machine_of};
use crate::arguments::PlanArguments;
use crate::command::comparison::traffic_rows;

/// `counterpoint plan` of more ranks than are compared. Times are the planner's own prediction, rank by rank.
pub(super) fn run(
    arguments: &PlanArguments,
    mask: &Mask,
    spec: &AttentionSpec,
    profile: &MachineProfile,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<(), CliError> {
    let progress = Progress::new();
    progress.step(format!("planning for {}", console::count(arguments.cp_size, "rank")));
    let begin = Instant::now();
    let overview = PlanOverview::new(mask, spec, config, planning);
    let mut overview = overview.map_err(CliError::of_choice)?;
    overview.summary.solve_seconds = begin.elapsed().as_secs_f64();
    let rows = [DispatchRow::of_figures(config.dispatch, &overview, spec)];
    let summary = &overview.summary;
    let level = Level {
        balance: summary.balance,
        compute_balance: compute_balance(&overview),
        chunk_size: summary.chunk_size,
        num_chunks: summary.num_chunks,
        hosts: summary.ranks.iter().any(|rank| rank.hosted_area > 0),
    };
    let imbalance = Imbalance::of(mask, spec, config, &level, (arguments.planning.dispatch, &rows));
    drop(progress);
    if let Some(unweighed) = &overview.unweighed {
        console::note(&format!("note: {unweighed}"));
    }
    if arguments.json {
        let inputs = Inputs::new(&arguments.mask, mask, spec, config, profile);
        let summary = overview.summary;
        let document =
            Document { inputs, summary, overlap: BTreeMap::new(), dispatches: &rows, imbalance: &imbalance };
        return console::print_json(Schema::Plan, &document);
    }
    console::print(&text(mask, profile, config, &overview, &rows, imbalance.as_ref()))
}

fn text(
    mask: &Mask,
    profile: &MachineProfile,
    config: &PlanConfig,
    overview: &PlanOverview,
    rows: &[DispatchRow],
    imbalance: Option<&Imbalance>,
) -> String {
    let style = console::style();
    let (summary, dispatch) = (&overview.summary, dispatch_name(config.dispatch));
    let mut out = headline(mask, config, dispatch, summary.num_chunks, summary.chunk_size);
    let seconds: Vec<f64> = overview.prediction.forward.iter().map(|rank| rank.seconds).collect();
    out.push_str(&summary_table(summary, Some(&seconds), &style));
    if let Some(imbalance) = imbalance {
        out.push_str(&imbalance.text(summary.balance));
    }
    let traffic = traffic_rows(dispatch, &overview.bounds, summary.balance, summary.solve_seconds);
    let _ = writeln!(out, "\nkey rows that a rank receives, mean, and as a multiple of this plan's:");
    out.push_str(&comparison_table(summary.cp_size, &traffic, &style));
    if config.topology.nodes() > 1 {
        let rows = format_count(overview.inter_node_rows);
        let _ = writeln!(out, "\nbetween nodes: {rows} key rows in all where every rank fetches for itself");
    }
    let machine = machine_of(profile);
    let _ = writeln!(out);
    for (name, ranks) in
        [("forward", &overview.prediction.forward), ("backward", &overview.prediction.backward)]
    {
        let seconds = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
        let stages = ranks.first().map_or(0, |rank| rank.stages.len());
        let _ = writeln!(
            out,
            "{name} on {machine}, predicted rank by rank: {}, {}",
            format_seconds(seconds),
            console::stages(stages)
        );
    }
    let _ = writeln!(out);
    out.push_str(&dispatches::text(rows, summary.cp_size, &machine, &style));
    out
}

/// Largest over mean of what ranks compute in a forward and a backward.
fn compute_balance(overview: &PlanOverview) -> f64 {
    let computed = |rank: &RankPrediction| {
        rank.stages.iter().chain(&rank.hosted).map(|stage| stage.compute_seconds).sum::<f64>()
    };
    let passes = overview.prediction.forward.iter().zip(&overview.prediction.backward);
    most_over_mean(
        &passes.map(|(forward, backward)| computed(forward) + computed(backward)).collect::<Vec<_>>(),
    )
}
