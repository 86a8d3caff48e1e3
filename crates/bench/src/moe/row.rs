//! Rows of `bench moe`.

use counterpoint_choose::TunedExpertShape;
use counterpoint_plan::ExpertGroups;
use counterpoint_report::{Column, Statistics, median};
use counterpoint_schedule::{SpanKind, Timeline};
use serde::Serialize;

use crate::arguments::BenchTpPass;
use crate::interleaved::efficiency_text;
use crate::rows::MeasuredRow;

/// One pass of one layer in one variant.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ExpertsRow {
    pub(super) kind: String,
    pub(crate) pass: BenchTpPass,
    pub(super) ranks: usize,
    pub(super) experts: usize,
    /// Of all experts.
    pub(super) rows: usize,
    pub(super) in_features: usize,
    pub(super) out_features: usize,
    pub(super) dtype: String,
    pub(super) device: String,
    /// What was asked for: a policy, or `auto`.
    pub(super) overlap: String,
    /// What the pass ran under, and in which groups.
    pub(crate) policy: String,
    pub(super) groups: String,
    #[serde(skip)]
    pub(crate) cut: ExpertGroups,
    /// What it would be kept for; `None` on one rank.
    #[serde(skip)]
    pub(crate) shape: Option<TunedExpertShape>,
    /// From the start of the first operation to the end of the last.
    pub(crate) seconds: Statistics,
    /// Of a rank, on average.
    pub(super) tflops: f64,
    pub(crate) sequential_seconds: f64,
    /// Of the sequential run: all operations of the slowest rank, and what travels on the rank that waits least in it.
    pub(super) computation_seconds: f64,
    pub(super) communication_seconds: f64,
    /// The pass over the longer of both.
    pub(super) of_longer: f64,
    /// The share of the communication that ran under computation: `1 - exposed / communication`; `None` where there is none, or where it is
    /// not known well enough.
    pub(super) hidden: Option<f64>,
    /// To how much that is known: twice its standard error.
    pub(super) hidden_noise: Option<f64>,
    #[serde(skip)]
    pub(super) wrong: Option<String>,
}

impl ExpertsRow {
    pub(super) fn name(&self) -> String {
        format!("{} {} {}", self.kind, self.pass, self.policy)
    }
}

impl MeasuredRow<10> for ExpertsRow {
    const TABLE: [Column; 10] = [
        Column::name("kind").wide(8),
        Column::name("pass").wide(8),
        Column::name("policy").wide(30),
        Column::name("groups").wide(10),
        Column::number("us", 0).wide(9),
        Column::number("sequential", 2).wide(9),
        Column::number("computed", 4).wide(9),
        Column::number("sent", 4).wide(9),
        Column::number("of longer", 1),
        Column::number("hidden", 1).wide(9),
    ];

    fn cells(&self) -> [String; 10] {
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        [
            self.kind.clone(),
            self.pass.to_string(),
            self.policy.clone(),
            self.groups.clone(),
            us(self.seconds.median),
            us(self.sequential_seconds),
            us(self.computation_seconds),
            us(self.communication_seconds),
            format!("{:.2}", self.of_longer),
            efficiency_text(self.hidden, self.hidden_noise),
        ]
    }

    fn fault(&self) -> Option<String> {
        self.wrong.as_ref().map(|reason| format!("{}: {reason}", self.name()))
    }
}

/// What a pass consists of, measured where nothing runs side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Parts {
    /// Of the slowest rank.
    pub(super) computation: f64,
    /// Of the rank that waits least for the others in it.
    pub(super) communication: f64,
}

impl Parts {
    /// Of each rank the middle one of its runs.
    pub(super) fn of(runs: &[Timeline]) -> Self {
        let ranks = runs.first().map_or(0, |run| run.world_size);
        let middle = |rank: usize, kind: SpanKind| {
            let of_run = |run: &Timeline| -> f64 {
                let spans = run.spans.iter().filter(|span| span.rank == rank && span.kind == kind);
                spans.map(|span| span.end - span.start).sum()
            };
            median(&runs.iter().map(of_run).collect::<Vec<_>>())
        };
        let communication = (0..ranks).map(|rank| middle(rank, SpanKind::Communication));
        let communication = communication.fold(f64::INFINITY, f64::min);
        Self {
            computation: (0..ranks).map(|rank| middle(rank, SpanKind::Compute)).fold(0.0, f64::max),
            communication: if communication.is_finite() { communication } else { 0.0 },
        }
    }

    pub(super) fn longer(&self) -> f64 {
        f64::max(self.computation, self.communication)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_schedule::Span;

    use super::*;

    #[test]
    fn parts_are_of_the_slowest_and_of_who_waits_least() {
        let span = |rank, kind, start: f64, end: f64| Span {
            rank,
            stream: 0,
            label: "y".to_owned(),
            kind,
            stage: None,
            start,
            end,
        };
        let timeline = Timeline {
            name: "expert combine forward".to_owned(),
            world_size: 2,
            streams: vec!["compute".to_owned()],
            spans: vec![
                span(0, SpanKind::Compute, 0.0, 200.0),
                span(0, SpanKind::Communication, 200.0, 350.0),
                span(1, SpanKind::Compute, 0.0, 250.0),
                span(1, SpanKind::Communication, 250.0, 350.0),
            ],
        };
        let parts = Parts::of(&[timeline]);
        assert_eq!(parts, Parts { computation: 250.0, communication: 100.0 });
        assert_eq!(parts.longer(), 250.0);
        assert_eq!(Parts::of(&[]), Parts::default());
    }
}
