//! The share of a pass's communication that ran under its computation, over several runs, with how well that is known.

use counterpoint_report::Statistics;
use counterpoint_schedule::Timeline;

use crate::interleaved::{noise, saved};

/// What was hidden of the communication.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Hidden {
    /// Of a rank, on average.
    pub(crate) communication_seconds: f64,
    /// Of that, the time in which no computation of the same rank ran.
    pub(crate) exposed_seconds: f64,
    /// To how much of the communication the exposed part is known: twice its standard error. 0 without communication.
    pub(crate) noise: f64,
}

impl Hidden {
    /// Of runs with the times of all operations: of the one that hides the middle share.
    pub(crate) fn of(runs: &[Timeline]) -> Option<Self> {
        let mut of_runs: Vec<Self> = runs.iter().map(Self::of_run).collect();
        let shares: Vec<f64> = of_runs.iter().filter_map(Self::share).collect();
        of_runs.sort_by(|a, b| f64::total_cmp(&a.share().unwrap_or(0.0), &b.share().unwrap_or(0.0)));
        let middle = of_runs.get(of_runs.len() / 2)?;
        Some(Self { noise: noise(&shares), ..*middle })
    }

    fn of_run(run: &Timeline) -> Self {
        let overlap = run.overlap();
        Self {
            communication_seconds: overlap.communication_seconds,
            exposed_seconds: overlap.exposed_seconds,
            noise: 0.0,
        }
    }

    /// Of a pass whose kernels send rows as they make them, so that sending them is no operation of its own: what is left of the
    /// `communication` of the `sequential` runs of the same pass is what those are longer by less than that. By the seconds of the runs, each
    /// compared with the sequential one of its round.
    pub(crate) fn of_fused(communication: f64, sequential: &[f64], seconds: &[f64]) -> Option<Self> {
        let saved = saved(sequential, seconds);
        let exposed = communication - Statistics::of(&saved)?.median;
        Some(Self {
            communication_seconds: communication,
            exposed_seconds: exposed.clamp(0.0, communication),
            noise: if communication > 0.0 { noise(&saved) / communication } else { 0.0 },
        })
    }

    /// `1 - exposed / communication`, whether it is known well or not; `None` where nothing travels.
    pub(crate) fn share(&self) -> Option<f64> {
        let Self { communication_seconds, exposed_seconds, .. } = *self;
        (communication_seconds > 0.0).then(|| 1.0 - exposed_seconds / communication_seconds)
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_schedule::{Span, SpanKind};

    use super::*;

    fn run(computed: f64) -> Timeline {
        let span = |kind, start: f64, end: f64| Span {
            rank: 0,
            stream: 0,
            label: String::new(),
            kind,
            stage: None,
            start,
            end,
        };
        Timeline {
            name: "test".to_owned(),
            world_size: 1,
            streams: vec!["compute".to_owned()],
            spans: vec![span(SpanKind::Compute, 0.0, computed), span(SpanKind::Communication, 0.0, 4.0)],
        }
    }

    #[test]
    fn the_middle_run_is_printed_with_how_far_they_are_apart() {
        let hidden = Hidden::of(&[run(3.0), run(0.0), run(4.0)]).unwrap();
        assert_eq!((hidden.share(), hidden.exposed_seconds), (Some(0.75), 1.0));
        assert!(hidden.noise > 0.2);
        assert_eq!(
            Hidden::of(&vec![run(2.0); 9]).map(|hidden| (hidden.share(), hidden.noise)),
            Some((Some(0.5), 0.0))
        );
        assert_eq!(Hidden::of(&[]), None);
        assert_eq!(Hidden::default().share(), None);
    }

    #[test]
    fn a_fused_pass_hides_what_it_is_shorter_by() {
        let of = |seconds| Hidden::of_fused(4.0, &[10.0; 5], &[seconds; 5]).unwrap();
        assert_eq!([10.0, 9.0, 6.0].map(|seconds| of(seconds).share()), [Some(0.0), Some(0.25), Some(1.0)]);
        // Kernels that are slower, or faster, than those of the sequential pass hide no less than nothing and no more than all.
        assert_eq!([12.0, 5.0].map(|seconds| of(seconds).share()), [Some(0.0), Some(1.0)]);
        let apart = Hidden::of_fused(4.0, &[10.0, 12.0, 10.0], &[8.0, 8.0, 9.0]).unwrap();
        assert!(apart.noise > 0.2, "{apart:?}");
        assert_eq!(Hidden::of_fused(0.0, &[1.0], &[1.0]).unwrap().share(), None);
    }
}
