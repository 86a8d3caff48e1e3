use counterpoint_plan::{GroupSearch, LinearPlan, TunedGroups, TunedShape};
use counterpoint_report::{Column, format_ratio, format_seconds, table};
use serde_json::{Value, json};

use super::tuning::Tuning;
use crate::arguments::dtype_name;
use crate::console;
use crate::error::CliError;
use crate::output::shown;
use crate::schema::Schema;
use crate::tuned::TunedFile;

/// One search's answer.
pub(super) struct Answer {
    pub(super) search: GroupSearch,
    pub(super) plan: LinearPlan,
    /// Seconds that the search expects: predicted, or measured when it met the sequence.
    pub(super) expected: f64,
    /// Seconds measured afterwards, beside the others.
    pub(super) measured: f64,
    /// Seconds that the search itself took.
    pub(super) took: f64,
}

/// Answers, and the same without overlap.
pub(super) struct Found {
    pub(super) answers: Vec<Answer>,
    pub(super) whole: LinearPlan,
    pub(super) sequential: f64,
    /// Seconds that all of it took.
    pub(super) took: f64,
}

impl Found {
    pub(super) fn of(&self, search: GroupSearch) -> Option<&Answer> {
        self.answers.iter().find(|answer| answer.search == search)
    }

    /// What the predicted groups take over what the exhaustive search's do, where there are both.
    pub(super) fn predicted_over_best(&self) -> Option<f64> {
        let of = |search| self.of(search).map(|answer| answer.measured);
        Some(of(GroupSearch::Predictive)? / of(GroupSearch::Exhaustive)?)
    }

    fn best(&self) -> Option<&Answer> {
        self.answers.iter().min_by(|a, b| a.measured.total_cmp(&b.measured))
    }

    /// What is remembered: the fastest answer, or one group where that is no slower.
    pub(super) fn kept(&self, device: &str) -> Option<TunedGroups> {
        let best = self.best()?;
        let (plan, seconds) = match best.measured < self.sequential {
            true => (&best.plan, best.measured),
            false => (&self.whole, self.sequential),
        };
        TunedGroups::of(plan, device, [seconds, self.sequential], best.search)
    }

    pub(super) fn tell(&self, tuning: &Tuning<'_>, device: &str, file: &TunedFile) -> Result<(), CliError> {
        let arguments = tuning.arguments;
        let shape = TunedShape::of(&tuning.spec, tuning.tp_size, device);
        let kept = self.kept(device);
        if arguments.ranks.json {
            let answers: Vec<Value> = self.answers.iter().map(|answer| self.json(answer)).collect();
            return console::print_json(
                Schema::TuneGemm,
                &json!({
                    "shape": shape,
                    "overlap": tuning.policy.to_string(),
                    "wave_rows": tuning.searcher.wave,
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
            Column::name("search"),
            Column::text("rows of groups", 1),
            Column::number("expected", 2),
            Column::number("measured", 0),
            Column::number("vs sequential", 0),
            Column::number("search took", 2),
        ];
        let rows = self.answers.iter().map(|answer| {
            vec![
                name(answer.search).to_owned(),
                sizes(answer.plan.group_sizes()),
                format_seconds(answer.expected),
                format_seconds(answer.measured),
                format_ratio(self.sequential / answer.measured),
                format_seconds(answer.took),
            ]
        });
        let mut text = format!(
            "{} x {} x {} {}, {} over {} ranks, {device}, {}; sequential {}\n\n",
            tuning.spec.tokens,
            tuning.spec.out_features,
            tuning.spec.in_features,
            dtype_name(tuning.spec.dtype),
            shape.as_ref().map_or("", |shape| shape.collective.name()),
            tuning.tp_size,
            tuning.policy,
            format_seconds(self.sequential),
        );
        text.push_str(&table(&columns, rows, &console::style()));
        if let Some(kept) = kept {
            let what = match kept.groups.len() {
                1 => "one group is kept: overlap gained nothing".to_owned(),
                _ => format!("groups of {} rows are kept", sizes(&kept.groups)),
            };
            text.push_str(&format!("\n{what}, in {}\n\n", shown(file.path())));
        }
        console::print(&text)
    }

    fn json(&self, answer: &Answer) -> Value {
        json!({
            "search": name(answer.search),
            "groups": answer.plan.group_sizes(),
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
