//! PyTorch's ways in a benchmark of ours: made ready case by case, run when they are next, dropped when their group fails.

use std::collections::VecDeque;

use counterpoint_console::CliError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::InterleavedRanks;

/// A way of PyTorch's to run a case, and what is known of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PeerVariant<T> {
    group: usize,
    number: usize,
    pub(crate) known: T,
    /// Of the slowest rank, by run.
    pub(crate) seconds: Vec<f64>,
    /// In which the slowest host enqueued the last runs.
    enqueued: VecDeque<f64>,
}

impl<T> PeerVariant<T> {
    /// How long devices are held, on all ranks alike: half as long again as hosts took lately.
    fn hold(&self) -> f64 {
        let known = self.enqueued.iter().copied().fold(0.0, f64::max);
        if self.enqueued.is_empty() { FIRST_HOLD } else { (1.5 * known).min(LONGEST_HOLD) }
    }

    fn ran(&mut self, [seconds, enqueued]: [f64; 2], timed: bool) {
        self.seconds.extend(timed.then_some(seconds));
        if self.enqueued.len() == RUNS {
            self.enqueued.pop_front();
        }
        self.enqueued.push_back(enqueued);
    }
}

/// Seconds for which the first run is held, which makes more ready than others.
const FIRST_HOLD: f64 = 1e-3;
/// A host that took longer was held up by something else.
const LONGEST_HOLD: f64 = 5e-3;
/// That are remembered.
const RUNS: usize = 6;

/// Runs of a variant one after the other that do not count, as ours has, and those that do.
pub(crate) const WARM_UP: usize = 3;
pub(crate) const TIMED: usize = 2;

/// PyTorch's ways of a benchmark, by any number of groups of ranks, interleaved with ours. When a group fails, what all measured until
/// then stays, and ours go on.
pub(crate) struct Peers<T> {
    groups: Vec<InterleavedRanks>,
    variants: Vec<PeerVariant<T>>,
    failure: Option<CliError>,
}

impl<T> Peers<T> {
    /// Those of `groups`, none of which has a case yet.
    pub(crate) fn new(groups: Vec<InterleavedRanks>) -> Self {
        Self { groups, variants: Vec::new(), failure: None }
    }

    /// Has a case made ready instead of the one before.
    pub(crate) fn prepare(&mut self, case: &impl Serialize)
    where
        T: DeserializeOwned,
    {
        self.variants.clear();
        for group in 0..self.groups.len() {
            match self.groups[group].prepare(case) {
                Ok(known) => {
                    let variant = |(number, known)| {
                        let (seconds, enqueued) = (Vec::new(), VecDeque::new());
                        PeerVariant { group, number, known, seconds, enqueued }
                    };
                    self.variants.extend(known.into_iter().enumerate().map(variant));
                }
                Err(error) => return self.fail(error),
            }
        }
    }

    /// The ways of the case.
    pub(crate) fn variants(&self) -> &[PeerVariant<T>] {
        &self.variants
    }

    /// Which of them are as `wanted`.
    pub(crate) fn those(&self, wanted: impl Fn(&T) -> bool) -> Vec<usize> {
        (0..self.variants.len()).filter(|variant| wanted(&self.variants[*variant].known)).collect()
    }

    /// Runs one of them once, and keeps what it took where that is `timed`.
    pub(crate) fn run(&mut self, variant: usize, timed: bool) {
        let Some(variant) = self.variants.get_mut(variant) else { return };
        match self.groups[variant.group].run(variant.number, variant.hold()) {
            Ok(took) => variant.ran(took, timed),
            Err(error) => self.fail(error),
        }
    }

    /// Runs one of them [`WARM_UP`] times and then [`TIMED`] times, so that it finds the device as it left it.
    pub(crate) fn run_often(&mut self, variant: usize) {
        for run in 0..WARM_UP + TIMED {
            self.run(variant, run >= WARM_UP);
        }
    }

    fn fail(&mut self, error: CliError) {
        self.failure.get_or_insert(error);
        // Ranks that wait for one that has failed would hold on to their GPUs.
        self.groups.clear();
        self.variants.clear();
    }

    /// Ends them: why they ended before ours, where they did.
    pub(crate) fn end(self) -> Result<(), CliError> {
        self.groups.into_iter().for_each(InterleavedRanks::part);
        self.failure.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::super::interleaved_ranks::tests::ranks;
    use super::*;

    #[test]
    fn ways_of_all_groups_are_kept_until_one_fails() {
        let group = |variants: &str, seconds: &str| {
            ranks(
                &format!(
                    r#"while read line; do case "$line" in *case*) echo '{variants}';; *) echo [{seconds}, 0.001];; esac; done"#
                ),
                2,
            )
        };
        let failing = ranks("read line; echo '[\"c\"]'; read line; exit 4", 1);
        let mut peers: Peers<String> =
            Peers::new(vec![group(r#"["a", "b"]"#, "0.5"), group("[]", "1"), failing]);
        peers.prepare(&"a case");
        assert_eq!(peers.those(|known| known != "b"), [0, 2]);
        for timed in [false, true] {
            peers.run(1, timed);
        }
        assert_eq!(peers.variants()[1].seconds, [0.5]);
        assert_eq!([peers.variants()[0].hold(), peers.variants()[1].hold()], [1e-3, 1.5e-3]);
        peers.run(9, true);
        peers.run(2, true);
        assert!(peers.variants().is_empty());
        peers.prepare(&"another");
        assert!(peers.variants().is_empty());
        assert!(peers.end().unwrap_err().to_string().contains('4'));
        assert!(Peers::<String>::new(Vec::new()).end().is_ok());
    }
}
