use counterpoint_plan::LinearKind;
use counterpoint_schedule::{SpanKind, Timeline};

use crate::arguments::BenchTpPass;

/// What a pass consists of, in seconds of a rank: measured where nothing runs side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Parts {
    /// The product of `y` or of `dx`.
    pub(super) product: f64,
    /// The gradient of the weight.
    pub(super) weight_gradient: f64,
    /// That of the bias.
    pub(super) bias_gradient: f64,
    /// Inputs on their way to all ranks.
    pub(super) gather: f64,
    /// Sums on their way to their owners.
    pub(super) reduce: f64,
    /// From there to all ranks, where all want them.
    pub(super) spread: f64,
}

impl Parts {
    /// Of a measured pass, averaged over its ranks.
    pub(super) fn of(timeline: &Timeline) -> Self {
        let mut parts = Self::default();
        let mut reduces = false;
        for span in &timeline.spans {
            let seconds = (span.end - span.start) / timeline.world_size.max(1) as f64;
            match (span.kind, span.label.as_str()) {
                (SpanKind::Compute, "dweight") => parts.weight_gradient += seconds,
                (SpanKind::Compute, "dbias") => parts.bias_gradient += seconds,
                (SpanKind::Compute, _) => parts.product += seconds,
                (SpanKind::Communication, "reduce-scatter") => {
                    reduces = true;
                    parts.reduce += seconds;
                }
                // What follows a reduction takes its sums to all ranks.
                (SpanKind::Communication, "all-gather") if reduces => parts.spread += seconds,
                (SpanKind::Communication, _) => parts.gather += seconds,
                (SpanKind::Wait, _) => {}
            }
        }
        parts
    }

    /// The middle one of each.
    pub(super) fn median(all: Vec<Self>) -> Self {
        let middle = |of: fn(&Self) -> f64| {
            let mut values: Vec<f64> = all.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(0.0)
        };
        Self {
            product: middle(|parts| parts.product),
            weight_gradient: middle(|parts| parts.weight_gradient),
            bias_gradient: middle(|parts| parts.bias_gradient),
            gather: middle(|parts| parts.gather),
            reduce: middle(|parts| parts.reduce),
            spread: middle(|parts| parts.spread),
        }
    }

    /// The least time of a pass whose communication is hidden wherever it can be. Of a column-parallel backward the sums of dx
    /// can be under the gradient of the weight only, unless they travel in groups, which may do better; inputs that are gathered
    /// again are under the product of dx.
    pub(super) fn ideal(&self, kind: LinearKind, pass: BenchTpPass) -> f64 {
        let Self { product, gather, .. } = *self;
        let reduce = self.reduce + self.spread;
        let weight_gradient = self.weight_gradient + self.bias_gradient;
        match (pass, kind) {
            (BenchTpPass::Forward, _) => product.max(gather + reduce),
            (BenchTpPass::Backward, LinearKind::Column) => product.max(gather) + weight_gradient.max(reduce),
            (BenchTpPass::Backward, LinearKind::Row) => (product + weight_gradient).max(gather),
        }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_schedule::Span;

    use super::*;

    /// The worked example of the design: 200, 400 and 500 us are 1,100 in sequence and 700 at best.
    #[test]
    fn a_backward_of_known_parts() {
        let span = |label: &str, kind, start: f64, end: f64| Span {
            rank: 0,
            stream: 0,
            label: label.to_owned(),
            kind,
            stage: None,
            start,
            end,
        };
        let timeline = Timeline {
            name: "linear backward".to_owned(),
            world_size: 1,
            streams: vec!["compute".to_owned()],
            spans: vec![
                span("dx", SpanKind::Compute, 0.0, 200.0),
                span("reduce-scatter", SpanKind::Communication, 200.0, 400.0),
                span("all-gather", SpanKind::Communication, 400.0, 600.0),
                span("dweight", SpanKind::Compute, 600.0, 1090.0),
                span("dbias", SpanKind::Compute, 1090.0, 1100.0),
            ],
        };
        let parts = Parts::of(&timeline);
        assert_eq!(
            parts,
            Parts {
                product: 200.0,
                weight_gradient: 490.0,
                bias_gradient: 10.0,
                gather: 0.0,
                reduce: 200.0,
                spread: 200.0
            }
        );
        assert_eq!(parts.ideal(LinearKind::Column, BenchTpPass::Backward), 700.0);
        let gathers = Parts { gather: 800.0, reduce: 0.0, spread: 0.0, ..parts };
        assert_eq!(gathers.ideal(LinearKind::Row, BenchTpPass::Backward), 800.0);
        assert_eq!(gathers.ideal(LinearKind::Column, BenchTpPass::Forward), 800.0);
    }
}
