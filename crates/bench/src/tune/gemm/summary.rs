//! How near the predictive search of `tune gemm` comes to the exhaustive one over all products, and what both took.

use std::time::Duration;

use counterpoint_choose::{GroupSearch, TunedShape};
use counterpoint_console::{self as console, CliError, Schema};
use counterpoint_cost::ProblemSize;
use counterpoint_report::{Statistics, format_ratio, format_seconds};
use serde_json::{Value, json};

use super::found::SearchResult;
use super::tuning::Tuning;

/// A predicted sequence counts as the best one up to this much more than what the exhaustive search's takes.
const NEAR: f64 = 1.03;

/// What came of all products of a command.
#[derive(Default)]
pub(super) struct Summary {
    cases: Vec<Case>,
}

/// Of one product.
struct Case {
    name: String,
    /// See [`SearchResult::predicted_over_best`].
    ratio: Option<f64>,
    /// Seconds of the predictive and of the exhaustive search.
    took: [Option<f64>; 2],
}

impl Summary {
    pub(super) fn add(&mut self, tuning: &Tuning<'_>, found: &SearchResult) {
        let TunedShape { collective, product: ProblemSize { m, n, k }, .. } = &tuning.shape;
        let name = format!("{} {m}:{n}:{k}", collective.name());
        let took = [GroupSearch::Predictive, GroupSearch::Exhaustive].map(|search| found.search_took(search));
        self.cases.push(Case { name, ratio: found.predicted_over_best(), took });
    }

    fn ratios(&self) -> impl Iterator<Item = (&str, f64)> {
        self.cases.iter().filter_map(|case| Some((case.name.as_str(), case.ratio?)))
    }

    fn near(&self) -> usize {
        self.ratios().filter(|(_, ratio)| *ratio <= NEAR).count()
    }

    fn worst(&self) -> Option<(&str, f64)> {
        self.ratios().max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Seconds that a search took for a product, the predictive one at 0 and the exhaustive one at 1; `None` where it was not asked for.
    fn took(&self, search: usize) -> Option<Statistics> {
        Statistics::of(&self.cases.iter().filter_map(|case| case.took[search]).collect::<Vec<_>>())
    }

    pub(super) fn print(&self, all: Duration, as_json: bool) -> Result<(), CliError> {
        let (near, compared) = (self.near(), self.ratios().count());
        if as_json {
            let took =
                |search| self.took(search).map(|took| json!({ "median": took.median, "max": took.max }));
            let compared: Option<Value> = self.worst().map(|(shape, ratio)| {
                json!({ "cases": compared, "near": near, "bound": NEAR, "worst": { "shape": shape, "ratio": ratio } })
            });
            return console::print_json(
                Schema::TuneGemmSummary,
                &json!({
                    "summary": {
                        "cases": self.cases.len(),
                        "predicted_over_best": compared,
                        "predictive_search_seconds": took(0),
                        "exhaustive_search_seconds": took(1),
                        "seconds": all.as_secs_f64(),
                    }
                }),
            );
        }
        let mut text = format!(
            "{} in {}",
            console::count(self.cases.len(), "product"),
            format_seconds(all.as_secs_f64())
        );
        for (name, search) in [("predictive", 0), ("exhaustive", 1)] {
            if let Some(took) = self.took(search) {
                let (median, max) = (format_seconds(took.median), format_seconds(took.max));
                text.push_str(&format!("; the {name} search took {median}, {max} at most"));
            }
        }
        text.push('\n');
        if let Some((shape, ratio)) = self.worst() {
            text.push_str(&format!(
                "what was predicted takes at most {:.0} % more than the best of all sequences on {near} of {compared}; the worst: \
                 {} on {shape}\n",
                (NEAR - 1.0) * 100.0,
                format_ratio(ratio),
            ));
        }
        console::print(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_and_the_near_are_printed() {
        let case = |name: &str, ratio, took| Case { name: name.to_owned(), ratio, took: [Some(took), None] };
        let cases = vec![case("a", Some(1.0), 0.5), case("b", Some(1.2), 0.25), case("c", Some(1.03), 0.75)];
        let summary = Summary { cases };
        assert_eq!((summary.near(), summary.worst()), (2, Some(("b", 1.2))));
        assert_eq!(summary.took(0).map(|took| (took.median, took.max)), Some((0.5, 0.75)));
        assert!(summary.took(1).is_none());
        let predicted_only = Summary { cases: vec![case("a", None, 0.5)] };
        assert_eq!((predicted_only.near(), predicted_only.worst()), (0, None));
    }
}
