//! Every dispatch of one problem: what it is predicted to take, what travels, and how level it is.

use std::fmt::Write;

use counterpoint_choose::{
    AttentionPrediction, DispatchAlgorithm, PlanConfig, PlanOverview, modelled_transports,
};
use counterpoint_console::{
    CliError,
    arguments::{DISPATCHES, DispatchAsked, dispatch_name},
    overlap::{AUTO, Overlap, Overlapped},
    prediction::predict,
    solution::Solution,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Plan, Planning, RankPlan};
use counterpoint_report::{Column, Style, format_bytes, format_count, format_seconds, table};
use counterpoint_schedule::GradientReduction;
use serde::Serialize;

/// Up to so many ranks all dispatches are planned and simulated; with more, the one that was asked for.
pub(super) const MOST_COMPARED_RANKS: usize = 256;

/// What counts as faster: predictions that differ by less say nothing.
const LEAST_GAIN: f64 = 0.005;

/// One dispatch, as `--json` has it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DispatchRow {
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// Predicted seconds of a forward.
    pub(super) forward_seconds: f64,
    /// Predicted seconds of a backward.
    pub(super) backward_seconds: f64,
    /// Key rows that all ranks receive in a forward.
    pub(super) recv_tokens: u64,
    /// Bytes that all ranks receive in a forward and a backward.
    pub(super) recv_bytes: u64,
    /// Largest area of a rank over the mean.
    pub(super) balance: f64,
    /// Whether the plan is made with it.
    pub(super) chosen: bool,
}

impl DispatchRow {
    /// The chosen one, of figures alone.
    pub(super) fn of_figures(
        dispatch: DispatchAlgorithm,
        overview: &PlanOverview,
        spec: &AttentionSpec,
    ) -> Self {
        let PlanOverview { summary, prediction, .. } = overview;
        Self {
            name: dispatch_name(dispatch),
            forward_seconds: prediction.forward_seconds(),
            backward_seconds: prediction.backward_seconds(),
            recv_tokens: summary.comm.recv_tokens,
            recv_bytes: received_bytes(summary.comm.recv_tokens, summary.comm.query_tokens, spec),
            balance: summary.balance,
            chosen: true,
        }
    }

    fn new(
        dispatch: DispatchAlgorithm,
        plan: &Plan,
        prediction: &AttentionPrediction,
        spec: &AttentionSpec,
        chosen: bool,
    ) -> Self {
        let recv_tokens = plan.ranks.iter().map(RankPlan::recv_rows).sum::<u64>();
        let queries = plan.ranks.iter().map(RankPlan::query_recv_rows).sum::<u64>();
        Self {
            name: dispatch_name(dispatch),
            forward_seconds: prediction.forward.makespan(),
            backward_seconds: prediction.backward.as_ref().map_or(0.0, |timeline| timeline.makespan()),
            recv_tokens,
            recv_bytes: received_bytes(recv_tokens, queries, spec),
            balance: plan.balance(),
            chosen,
        }
    }

    fn seconds(&self) -> f64 {
        self.forward_seconds + self.backward_seconds
    }
}

/// Bytes of a forward and a backward.
fn received_bytes(keys: u64, queries: u64, spec: &AttentionSpec) -> u64 {
    keys * spec.exchanged_key_bytes() + queries * spec.exchanged_query_bytes()
}

/// How a plan's passes are run by default on the configured machine, and what is predicted of them.
pub(super) fn by_default(
    plan: &Plan,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> Result<(Overlap, AttentionPrediction), CliError> {
    let backward = Some(GradientReduction::default());
    let overlapped = Overlapped { plan, spec, backward, config };
    let overlap = overlapped.by(AUTO, modelled_transports(&config.topology, &config.cost))?;
    let prediction = predict(plan, spec, overlap.policies, backward, config)?;
    Ok((overlap, prediction))
}

/// All dispatches; or the chosen one alone, where there are too many ranks.
pub(super) fn compare(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    (plan, prediction): (&Plan, &AttentionPrediction),
    planning: &Planning<'_>,
) -> Result<Vec<DispatchRow>, CliError> {
    let mut rows = Vec::with_capacity(DISPATCHES.len());
    for (_, dispatch) in DISPATCHES {
        if dispatch == config.dispatch {
            rows.push(DispatchRow::new(dispatch, plan, prediction, spec, true));
        } else if plan.cp_size() <= MOST_COMPARED_RANKS {
            let config = PlanConfig { dispatch, ..*config };
            let other = Solution::solve(mask, spec, &config, (DispatchAsked::Named(dispatch), ""), planning)?
                .over_nodes(&config.topology);
            let (_, predicted) = by_default(&other.plan, spec, &config)?;
            rows.push(DispatchRow::new(dispatch, &other.plan, &predicted, spec, false));
        }
    }
    Ok(rows)
}

/// A table of the rows, and what follows from it.
pub(super) fn text(rows: &[DispatchRow], ranks: usize, machine: &str, style: &Style) -> String {
    let columns = [
        Column::text("dispatch", 0),
        Column::number("forward", 0),
        Column::number("backward", 0),
        Column::number("recv rows / rank", 1),
        Column::number("recv bytes / rank", 2),
        Column::number("balance", 1),
    ];
    let mean = |total: u64| (total as f64 / ranks.max(1) as f64).round() as u64;
    let cells = rows.iter().map(|row| {
        vec![
            format!("{}{}", row.name, if row.chosen { " (chosen)" } else { "" }),
            format_seconds(row.forward_seconds),
            format_seconds(row.backward_seconds),
            format_count(mean(row.recv_tokens)),
            format_bytes(mean(row.recv_bytes)),
            format!("{:.3}", row.balance),
        ]
    });
    let mut out = format!("dispatches, predicted on {machine}; bytes of a forward and a backward:\n");
    out.push_str(&table(&columns, cells, style));
    if ranks > MOST_COMPARED_RANKS {
        let _ =
            writeln!(out, "others are compared up to {MOST_COMPARED_RANKS} ranks; name one with --dispatch");
    }
    if let Some(sentence) = faster(rows) {
        let _ = writeln!(out, "{sentence}");
    }
    out
}

/// Says which dispatch is predicted to be faster than the chosen one, where one is.
fn faster(rows: &[DispatchRow]) -> Option<String> {
    let chosen = rows.iter().find(|row| row.chosen)?;
    let fastest = rows.iter().min_by(|a, b| a.seconds().total_cmp(&b.seconds()))?;
    let gain = 1.0 - fastest.seconds() / chosen.seconds();
    (gain > LEAST_GAIN).then(|| {
        format!(
            "{} is predicted to be faster than {}: {} instead of {} for a forward and a backward, {:.1} % less; \
             `--dispatch {}` takes it",
            fastest.name,
            chosen.name,
            format_seconds(fastest.seconds()),
            format_seconds(chosen.seconds()),
            100.0 * gain,
            fastest.name,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, forward_seconds: f64, chosen: bool) -> DispatchRow {
        let (recv_tokens, recv_bytes, balance) = (800, 1600, 1.0);
        DispatchRow {
            name,
            forward_seconds,
            backward_seconds: 1e-3,
            recv_tokens,
            recv_bytes,
            balance,
            chosen,
        }
    }

    #[test]
    fn a_faster_dispatch_is_named_and_an_equal_one_is_not() {
        let rows = [row("affinity", 2e-3, true), row("zigzag", 1.4e-3, false), row("min-heap", 1e-3, false)];
        let sentence = faster(&rows).unwrap();
        assert!(sentence.starts_with("min-heap is predicted to be faster than affinity"), "{sentence}");
        assert!(sentence.contains("33.3 % less") && sentence.contains("`--dispatch min-heap`"), "{sentence}");
        assert_eq!(faster(&[row("affinity", 2e-3, true), row("zigzag", 1.999e-3, false)]), None);
        assert_eq!(faster(&[row("affinity", 2e-3, true), row("zigzag", 3e-3, false)]), None);
        let text = text(&rows, 8, "X", &Style::PLAIN);
        assert!(text.contains("affinity (chosen)") && text.contains(&sentence), "{text}");
    }
}
