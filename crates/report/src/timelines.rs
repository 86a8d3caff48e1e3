//! Predicted and measured timelines side by side, as reports show them.

use counterpoint_schedule::Timeline;

/// One pass (forward or backward) as it was predicted and as it was measured, as far as each is there.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimelinePair<'a> {
    /// What the simulator predicted.
    pub predicted: Option<&'a Timeline>,
    /// What the interpreter measured.
    pub measured: Option<&'a Timeline>,
}

impl<'a> TimelinePair<'a> {
    /// Those that are there, measured first.
    pub(crate) fn sources(&self) -> impl Iterator<Item = (Source, &'a Timeline)> + use<'a> {
        let measured = self.measured.map(|timeline| (Source::Measured, timeline));
        measured.into_iter().chain(self.predicted.map(|timeline| (Source::Predicted, timeline)))
    }

    /// What to trust: measured, else predicted.
    pub(crate) fn best(&self) -> Option<&'a Timeline> {
        self.measured.or(self.predicted)
    }
}

/// Where a timeline comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Measured,
    Predicted,
}

impl Source {
    pub(crate) const ALL: [Source; 2] = [Source::Measured, Source::Predicted];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Source::Measured => "measured",
            Source::Predicted => "predicted",
        }
    }
}

/// Seconds after which each rank has nothing left to do.
pub(crate) fn rank_seconds(timeline: &Timeline) -> Vec<f64> {
    let mut out = vec![0.0; timeline.world_size];
    for span in &timeline.spans {
        out[span.rank] = f64::max(out[span.rank], span.end);
    }
    out
}
