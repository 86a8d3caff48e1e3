//! What a layer's pass is made of, and the ideal time of it with all communication hidden that can be.

use counterpoint_plan::LinearKind;
use counterpoint_schedule::{LayerPart, Timeline};

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
    /// An RMSNorm behind a row-parallel layer, or its gradients: whole rows, under which nothing of the pass travels.
    pub(super) norm: f64,
    /// Inputs on their variant to all ranks.
    pub(super) gather: f64,
    /// Sums on their variant to their owners.
    pub(super) reduce: f64,
    /// From there to all ranks, where all want them.
    pub(super) spread: f64,
}

impl Parts {
    /// Of a rank in a measured pass.
    fn of(timeline: &Timeline, rank: usize) -> Self {
        let mut parts = Self::default();
        let mut reduces = false;
        for span in timeline.spans.iter().filter(|span| span.rank == rank) {
            let seconds = span.end - span.start;
            match LayerPart::of(span) {
                LayerPart::WeightGradient => parts.weight_gradient += seconds,
                LayerPart::BiasGradient => parts.bias_gradient += seconds,
                // Each has whole sums on one side, and products on the other.
                LayerPart::Norm | LayerPart::NormGradient => parts.norm += seconds,
                LayerPart::Product => parts.product += seconds,
                LayerPart::Reduce => {
                    reduces = true;
                    parts.reduce += seconds;
                }
                // What follows a reduction takes its sums to all ranks.
                LayerPart::Gather if reduces => parts.spread += seconds,
                LayerPart::Gather | LayerPart::GatherInputs => parts.gather += seconds,
                LayerPart::Wait => {}
            }
        }
        parts
    }

    /// Of each rank the middle one of its runs.
    pub(super) fn of_ranks(runs: &[Timeline]) -> Vec<Self> {
        let ranks = runs.first().map_or(0, |run| run.world_size);
        let of_rank = |rank| {
            let all: Vec<Self> = runs.iter().map(|run| Self::of(run, rank)).collect();
            Self::each(&all, |values| values.get(values.len() / 2).copied().unwrap_or(0.0))
        };
        (0..ranks).map(of_rank).collect()
    }

    /// What ranks take on average.
    pub(super) fn mean(ranks: &[Self]) -> Self {
        Self::each(ranks, |values| values.iter().sum::<f64>() / values.len().max(1) as f64)
    }

    /// One figure for each part, of all figures in ascending order.
    fn each(all: &[Self], one: impl Fn(&[f64]) -> f64) -> Self {
        let of = |part: fn(&Self) -> f64| {
            let mut values: Vec<f64> = all.iter().map(part).collect();
            values.sort_by(f64::total_cmp);
            one(&values)
        };
        Self {
            product: of(|parts| parts.product),
            weight_gradient: of(|parts| parts.weight_gradient),
            bias_gradient: of(|parts| parts.bias_gradient),
            norm: of(|parts| parts.norm),
            gather: of(|parts| parts.gather),
            reduce: of(|parts| parts.reduce),
            spread: of(|parts| parts.spread),
        }
    }

    /// [`Parts::ideal`] of the rank that is slowest: GPUs are not equally fast. What travels takes as long as on the rank that waits
    /// least for the others in it.
    pub(super) fn ideal_of_slowest(ranks: &[Self], kind: LinearKind, pass: BenchTpPass) -> f64 {
        let Self { gather, reduce, spread, .. } =
            Self::each(ranks, |values| values.first().copied().unwrap_or(0.0));
        let ideal = |rank: &Self| Self { gather, reduce, spread, ..*rank }.ideal(kind, pass);
        ranks.iter().map(ideal).fold(0.0, f64::max)
    }

    /// What travels in a pass, with as long as on the rank that waits least for the others in it.
    pub(super) fn least_communication(ranks: &[Self]) -> f64 {
        let Self { gather, reduce, spread, .. } =
            Self::each(ranks, |values| values.first().copied().unwrap_or(0.0));
        gather + reduce + spread
    }

    /// The least time of a pass whose communication is hidden wherever it can be. Of a column-parallel backward the sums of dx
    /// can be under the gradient of the weight only, unless they travel in groups, which may do better; inputs that are gathered
    /// again are under the product of dx.
    pub(super) fn ideal(&self, kind: LinearKind, pass: BenchTpPass) -> f64 {
        let Self { product, gather, .. } = *self;
        let reduce = self.reduce + self.spread;
        let weight_gradient = self.weight_gradient + self.bias_gradient;
        let alone = match (pass, kind) {
            (BenchTpPass::Forward, _) => product.max(gather + reduce),
            (BenchTpPass::Backward, LinearKind::Column) => product.max(gather) + weight_gradient.max(reduce),
            (BenchTpPass::Backward, LinearKind::Row) => (product + weight_gradient).max(gather),
        };
        alone + self.norm
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_schedule::{Span, SpanKind};

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
        let parts = Parts::mean(&Parts::of_ranks(&[timeline]));
        assert_eq!(
            parts,
            Parts {
                product: 200.0,
                weight_gradient: 490.0,
                bias_gradient: 10.0,
                norm: 0.0,
                gather: 0.0,
                reduce: 200.0,
                spread: 200.0
            }
        );
        assert_eq!(parts.ideal(LinearKind::Column, BenchTpPass::Backward), 700.0);
        let slower = Parts { product: 210.0, reduce: 190.0, ..parts };
        let slowest = Parts::ideal_of_slowest(&[parts, slower], LinearKind::Column, BenchTpPass::Backward);
        assert_eq!(slowest, 710.0);
        assert_eq!(
            Parts::least_communication(&[parts, slower]),
            parts.gather + parts.reduce.min(slower.reduce) + parts.spread
        );
        let gathers = Parts { gather: 800.0, reduce: 0.0, spread: 0.0, ..parts };
        assert_eq!(gathers.ideal(LinearKind::Row, BenchTpPass::Backward), 800.0);
        assert_eq!(gathers.ideal(LinearKind::Column, BenchTpPass::Forward), 800.0);
    }
}
