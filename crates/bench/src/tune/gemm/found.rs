//! What `tune gemm` found for a product: the groups of every search and policy, printed and kept.

use counterpoint_choose::{GroupSearch, TunedGroups, TunedPass, TunedSizes};
use counterpoint_console::{
    self as console, CliError, Schema, arguments::dtype_name, output::shown, tuned::TunedFile,
};
use counterpoint_plan::LinearPlan;
use counterpoint_report::{Column, format_ratio, format_seconds, table};
use counterpoint_schedule::OverlapPolicy;
use serde_json::{Value, json};

use super::tuning::Tuning;

/// One search's answer.
pub(super) struct Answer {
    pub(super) policy: OverlapPolicy,
    pub(super) search: GroupSearch,
    pub(super) plan: LinearPlan,
    /// Seconds that the search expects: predicted, or measured when it met the sequence.
    pub(super) expected: f64,
    /// Seconds measured afterwards, interleaved with the others.
    pub(super) measured: f64,
    /// Seconds that the search itself took.
    pub(super) took: f64,
}

/// Answers, and the same without overlap.
pub(super) struct SearchResult {
    pub(super) answers: Vec<Answer>,
    pub(super) whole: LinearPlan,
    pub(super) sequential: f64,
    /// Seconds that all of it took.
    pub(super) took: f64,
}

impl SearchResult {
    /// The fastest answer of a search.
    fn of(&self, search: GroupSearch) -> Option<&Answer> {
        let found = self.answers.iter().filter(|answer| answer.search == search);
        found.min_by(|a, b| a.measured.total_cmp(&b.measured))
    }

    /// Seconds that a search took under all policies; `None` where it was not asked for.
    pub(super) fn search_took(&self, search: GroupSearch) -> Option<f64> {
        self.of(search)?;
        Some(self.answers.iter().filter(|answer| answer.search == search).map(|answer| answer.took).sum())
    }

    /// What the predicted groups take over what the exhaustive search's do, where there are both.
    pub(super) fn predicted_over_best(&self) -> Option<f64> {
        let of = |search| self.of(search).map(|answer| answer.measured);
        Some(of(GroupSearch::Predictive)? / of(GroupSearch::Exhaustive)?)
    }

    /// What is remembered: the fastest groups under every policy, and the whole without overlap.
    pub(super) fn kept(&self, tuning: &Tuning<'_>) -> Vec<TunedGroups> {
        let plan = |policy: OverlapPolicy, plan: &LinearPlan, seconds: f64, search| TunedGroups {
            shape: tuning.shape.clone(),
            policy: policy.to_string(),
            groups: TunedSizes::of(plan),
            seconds,
            sequential_seconds: self.sequential,
            search,
        };
        let alone = OverlapPolicy::SEQUENTIAL;
        let mut kept = vec![plan(alone, &self.whole, self.sequential, GroupSearch::Exhaustive)];
        for variant in &tuning.variants {
            let answers = self.answers.iter().filter(|answer| answer.policy == variant.policy);
            let fastest = answers.min_by(|a, b| a.measured.total_cmp(&b.measured));
            kept.extend(fastest.map(|found| plan(found.policy, &found.plan, found.measured, found.search)));
        }
        kept
    }

    pub(super) fn print(&self, tuning: &Tuning<'_>, file: &TunedFile) -> Result<(), CliError> {
        let arguments = tuning.arguments;
        let shape = &tuning.shape;
        let kept = self.kept(tuning).into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        if arguments.ranks.json {
            let answers: Vec<Value> = self.answers.iter().map(|answer| self.json(answer)).collect();
            return console::print_json(
                Schema::TuneGemm,
                &json!({
                    "shape": shape,
                    "wave_rows": tuning.variants.first().map(|variant| variant.searcher.wave),
                    "sequential_seconds": self.sequential,
                    "searches": answers,
                    "predicted_over_best": self.predicted_over_best(),
                    "seconds": self.took,
                    "kept": kept,
                    "plans": file.path(),
                }),
            );
        }
        let columns = [
            Column::name("policy"),
            Column::name("search"),
            Column::text("groups", 1),
            Column::number("expected", 2),
            Column::number("measured", 0),
            Column::number("vs sequential", 0),
            Column::number("search took", 2),
        ];
        let rows = self.answers.iter().map(|answer| {
            vec![
                answer.policy.to_string(),
                name(answer.search).to_owned(),
                answer.plan.wave_groups().to_string(),
                format_seconds(answer.expected),
                format_seconds(answer.measured),
                format_ratio(self.sequential / answer.measured),
                format_seconds(answer.took),
            ]
        });
        let pass = if tuning.pass == TunedPass::Forward { "forward" } else { "backward" };
        let mut text = format!(
            "{} {}, {pass}, {} over {} ranks, {}, {}; sequential {}\n\n",
            shape.product,
            dtype_name(shape.dtype),
            shape.collective.name(),
            shape.ranks,
            shape.device,
            shape.transport,
            format_seconds(self.sequential),
        );
        text.push_str(&table(&columns, rows, &console::style()));
        if let Some(kept) = kept {
            let overlaps = kept.policy != OverlapPolicy::SEQUENTIAL.to_string();
            let what = match &kept.groups {
                _ if !overlaps => "fastest without overlap: it gained nothing".to_owned(),
                TunedSizes::Rows(rows) if rows.len() == 1 => {
                    format!("fastest under {} in one group", kept.policy)
                }
                TunedSizes::Rows(rows) => {
                    format!("fastest under {} in groups of {} rows", kept.policy, sizes(rows))
                }
                TunedSizes::Columns { columns } => {
                    format!("fastest under {} in groups of {} columns", kept.policy, sizes(columns))
                }
            };
            text.push_str(&format!("\n{what}; kept in {}\n\n", shown(file.path())));
        }
        console::print(&text)
    }

    fn json(&self, answer: &Answer) -> Value {
        json!({
            "policy": answer.policy.to_string(),
            "search": name(answer.search),
            "groups": TunedSizes::of(&answer.plan),
            "expected_seconds": answer.expected,
            "measured_seconds": answer.measured,
            "ratio": self.sequential / answer.measured,
            "search_seconds": answer.took,
        })
    }
}

fn name(search: GroupSearch) -> &'static str {
    match search {
        GroupSearch::Exhaustive => "exhaustive",
        GroupSearch::Predictive => "predictive",
    }
}

fn sizes(groups: &[usize]) -> String {
    groups.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}
