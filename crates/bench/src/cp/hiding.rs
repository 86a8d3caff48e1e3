//! How much of the communication that could hide was hidden, judged by paired runs, with how well that is known.

use counterpoint_report::{Statistics, format_seconds};
use counterpoint_schedule::Timeline;

use crate::interleaved::{LARGEST_NOISE, LEAST_HIDEABLE, figure, noise, saved};

/// What can be hidden of a pass, and what is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Hiding {
    /// Seconds of the pass with nothing side by side.
    pub(super) sequential: f64,
    /// Seconds of communication in it, as far as there is computation; of a rank, on average.
    pub(super) hideable: f64,
    /// Seconds by which runs are shorter than the sequential ones interleaved with them, the median.
    saved: f64,
    /// Seconds to which that is known: twice its standard error.
    pub(super) noise: f64,
}

impl Hiding {
    /// Of runs of a pass by their `seconds`, compared with those with nothing side by side, of which one was `measured`. `None` where there
    /// is too little to hide.
    pub(super) fn of(sequential: &[f64], measured: &Timeline, seconds: &[f64]) -> Option<Self> {
        let overlap = measured.overlap();
        // Whoever is done first waits for the slowest rank whatever is hidden.
        let communication = overlap.communication_seconds - overlap.imbalance_seconds;
        let hideable = communication.min(overlap.compute_seconds);
        let saved = saved(sequential, seconds);
        let noise = noise(&saved);
        let (sequential, saved) = (Statistics::of(sequential)?.median, Statistics::of(&saved)?.median);
        (hideable > LEAST_HIDEABLE * sequential).then_some(Self { sequential, hideable, saved, noise })
    }

    /// The part of what can be hidden that is, where it is known well enough to be a figure.
    pub(super) fn efficiency(&self) -> Option<f64> {
        figure(Some(self.saved / self.hideable), Some(self.noise / self.hideable))
    }

    /// In words. A share is one where it is known to less than the whole, and where it can be one.
    pub(super) fn text(&self) -> String {
        let Self { sequential, hideable, saved, noise } = *self;
        let [sequential, of, by, noise_text] = [sequential, hideable, saved.abs(), noise].map(format_seconds);
        let found = if noise > hideable {
            format!(
                "how much of {of} of communication is hidden cannot be distinguished from noise, {noise_text}"
            )
        } else if saved < -hideable {
            format!("of {of} of communication nothing hidden, and {by} more")
        } else if saved > 2.0 * hideable {
            format!("{by} less, more than {of} of communication explain")
        } else if noise > LARGEST_NOISE * hideable {
            format!("how much of {of} of communication is hidden is known to {noise_text} only")
        } else {
            let [share, to] = [saved, noise].map(|seconds| 100.0 * seconds / hideable);
            format!("of {of} of communication {share:.0} % hidden, to {to:.0} %")
        };
        format!("{sequential} one after the other, {found}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDING: Hiding = Hiding { sequential: 250e-6, hideable: 20e-6, saved: 15e-6, noise: 2e-6 };

    #[test]
    fn a_share_that_noise_makes_is_not_printed() {
        let text = |saved, noise| Hiding { saved, noise, ..HIDING }.text();
        assert!(HIDING.text().ends_with("of 20.0 us of communication 75 % hidden, to 10 %"));
        assert!(text(-20e-6, 2e-6).contains("-100 % hidden"));
        // -3064 %, by ranks that start at unlike times.
        let printed = text(-613e-6, 400e-6);
        assert!(
            !printed.contains('%') && printed.ends_with("cannot be distinguished from noise, 400 us"),
            "{printed}"
        );
        assert!(text(15e-6, 5e-6).ends_with("is known to 5.00 us only"), "{}", text(15e-6, 5e-6));
        let efficiency = |noise| Hiding { noise, ..HIDING }.efficiency();
        assert_eq!((efficiency(2e-6), efficiency(5e-6)), (Some(0.75), None));
        // What is no noise is printed as it is.
        assert!(text(-60e-6, 5e-6).ends_with("nothing hidden, and 60.0 us more"));
        assert!(text(60e-6, 5e-6).ends_with("60.0 us less, more than 20.0 us of communication explain"));
    }
}
