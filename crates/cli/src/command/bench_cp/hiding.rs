use counterpoint_report::{Statistics, format_seconds};
use counterpoint_schedule::Timeline;

use crate::command::turns::LEAST_HIDEABLE;

/// What can be hidden of a pass, and what is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Hiding {
    /// Seconds of the pass with nothing side by side.
    pub(super) sequential: f64,
    /// Seconds of communication in it, as far as there is computation; of a rank, on average.
    pub(super) hideable: f64,
    /// Seconds by which runs are shorter than those beside them, the median.
    saved: f64,
    /// Seconds to which that is known: twice its standard error.
    pub(super) noise: f64,
}

impl Hiding {
    /// Of runs of a pass by their `seconds`, beside those with nothing side by side, of which one was `measured`. `None` where there is
    /// too little to hide.
    pub(super) fn of(sequential: &[f64], measured: &Timeline, seconds: &[f64]) -> Option<Self> {
        let overlap = measured.overlap();
        // Whoever is done first waits for the slowest rank whatever is hidden.
        let communication = overlap.communication_seconds - overlap.imbalance_seconds;
        let hideable = communication.min(overlap.compute_seconds);
        let saved: Vec<f64> = sequential.iter().zip(seconds).map(|(plain, own)| plain - own).collect();
        let noise = noise(&saved);
        let (sequential, saved) = (Statistics::of(sequential)?.median, Statistics::of(&saved)?.median);
        (hideable > LEAST_HIDEABLE * sequential).then_some(Self { sequential, hideable, saved, noise })
    }

    /// The part of what can be hidden that is.
    pub(super) fn efficiency(&self) -> f64 {
        self.saved / self.hideable
    }

    /// In words. A share is one where it is known to less than the whole, and where it can be one.
    pub(super) fn text(&self) -> String {
        let Self { sequential, hideable, saved, noise } = *self;
        let [sequential, of, by, noise_text] = [sequential, hideable, saved.abs(), noise].map(format_seconds);
        let found = if noise > hideable {
            format!("how much of {of} of communication is hidden cannot be told from noise, {noise_text}")
        } else if self.efficiency() < -1.0 {
            format!("of {of} of communication nothing hidden, and {by} more")
        } else if self.efficiency() > 2.0 {
            format!("{by} less, more than {of} of communication explain")
        } else {
            let [share, to] = [saved, noise].map(|seconds| 100.0 * seconds / hideable);
            format!("of {of} of communication {share:.0} % hidden, to {to:.0} %")
        };
        format!("{sequential} one after the other, {found}")
    }
}

/// To how much the median of these is known: twice its standard error, by the middle half of them, which single runs that something else
/// held up do not widen. It is 1.25 times that of a mean, and the middle half of normal values is 1.35 of their deviations wide.
fn noise(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    let quartiles = sorted.get(count / 4).zip(sorted.get(3 * count / 4));
    quartiles.map_or(0.0, |(low, high)| 2.0 * 1.25 / 1.35 * (high - low) / (count as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIDING: Hiding = Hiding { sequential: 250e-6, hideable: 20e-6, saved: 15e-6, noise: 2e-6 };

    #[test]
    fn a_share_that_noise_makes_is_not_told() {
        let text = |saved, noise| Hiding { saved, noise, ..HIDING }.text();
        assert!(HIDING.text().ends_with("of 20.0 us of communication 75 % hidden, to 10 %"));
        assert!(text(-20e-6, 2e-6).contains("-100 % hidden"));
        // -3064 %, by ranks that start at unlike times.
        let told = text(-613e-6, 400e-6);
        assert!(!told.contains('%') && told.ends_with("cannot be told from noise, 400 us"), "{told}");
        // What is no noise is told as what it is.
        assert!(text(-60e-6, 5e-6).ends_with("nothing hidden, and 60.0 us more"));
        assert!(text(60e-6, 5e-6).ends_with("60.0 us less, more than 20.0 us of communication explain"));
    }

    #[test]
    fn noise_is_that_of_the_median() {
        assert_eq!([noise(&[]), noise(&[3.0]), noise(&[2.0; 9])], [0.0; 3]);
        let normal: Vec<f64> = (0..100).map(|i| f64::from(i * 37 % 100)).collect();
        assert!((noise(&normal) - 2.0 * 1.25 / 1.35 * 50.0 / 10.0).abs() < 1e-9);
        // A few runs that were held up change little, and they are not many.
        let mut some: Vec<f64> = normal.iter().map(|value| value / 100.0).collect();
        let before = noise(&some);
        some[3] = 1e6;
        assert!(noise(&some) < 1.1 * before);
        let unlike: Vec<f64> = (0..16).map(|run| if run % 2 == 0 { -1e-3 } else { 1e-3 }).collect();
        assert!(noise(&unlike) > 0.5e-3);
    }
}
