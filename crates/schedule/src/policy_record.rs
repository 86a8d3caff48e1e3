use serde::{Deserialize, Serialize};

use crate::{OverlapPolicy, StartOrder};

/// What overlap policies came to on one machine: what `auto` picks by. Measured once, kept as JSON, and of no use for another
/// machine or another number of ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyRecord {
    /// Version of this format.
    pub version: u32,
    /// The machine in words: device, driver, what else decides.
    pub machine: String,
    /// Ranks that ran together.
    pub world_size: usize,
    /// What was measured, in any order.
    pub measurements: Vec<PolicyMeasurement>,
}

/// One policy on one problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyMeasurement {
    /// The policy.
    pub policy: OverlapPolicy,
    /// The problem in words; those of one text are compared.
    pub problem: String,
    /// Seconds of the slowest rank, median of the repetitions.
    pub seconds: f64,
}

impl PolicyRecord {
    /// The format written now.
    pub const VERSION: u32 = 1;

    /// The policy to take on `machine` with `world_size` ranks: the one whose times over those of `sequential`, on average
    /// over the problems (geometric mean), are the smallest; `sequential` itself where nothing gains. Only policies that were
    /// measured on every problem count. `None` when the record is of another machine, version or number of ranks, or has no
    /// problem measured with `sequential`.
    pub fn best(&self, machine: &str, world_size: usize) -> Option<OverlapPolicy> {
        if (self.version, self.machine.as_str(), self.world_size) != (Self::VERSION, machine, world_size) {
            return None;
        }
        let sequential = OverlapPolicy::new(StartOrder::Sequential);
        let of = |policy: OverlapPolicy| self.measurements.iter().filter(move |row| row.policy == policy);
        let references: Vec<&PolicyMeasurement> = of(sequential).collect();
        // The mean logarithm of the ratios to `sequential`.
        let ratio = |policy: OverlapPolicy| {
            let seconds = |reference: &&PolicyMeasurement| {
                let same = of(policy).find(|row| row.problem == reference.problem)?;
                Some((same.seconds / reference.seconds).ln())
            };
            let ratios: Option<Vec<f64>> = references.iter().map(seconds).collect();
            let ratios = ratios?;
            let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
            mean.is_finite().then_some(mean)
        };
        let mut best = (sequential, ratio(sequential)?);
        for row in &self.measurements {
            if let Some(mean) = ratio(row.policy).filter(|mean| *mean < best.1) {
                best = (row.policy, mean);
            }
        }
        Some(best.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rows: &[(&str, &str, f64)]) -> PolicyRecord {
        let measurement = |&(policy, problem, seconds): &(&str, &str, f64)| PolicyMeasurement {
            policy: policy.parse().unwrap(),
            problem: problem.to_owned(),
            seconds,
        };
        PolicyRecord {
            version: PolicyRecord::VERSION,
            machine: "m".to_owned(),
            world_size: 4,
            measurements: rows.iter().map(measurement).collect(),
        }
    }

    #[test]
    fn the_best_on_average() {
        let rows = [
            ("sequential", "a", 2.0),
            ("sequential", "b", 1.0),
            ("concurrent", "a", 1.0),
            ("concurrent", "b", 1.5),
            ("kernel-barrier", "a", 1.2),
            ("kernel-barrier", "b", 0.9),
            ("priority", "a", 0.1),
        ];
        let full = record(&rows);
        // 0.6 * 0.9 against 0.5 * 1.5; the one measured on one problem only does not count.
        assert_eq!(full.best("m", 4).unwrap().to_string(), "kernel-barrier");
        assert_eq!(full.best("other", 4), None);
        assert_eq!(full.best("m", 8), None);
        assert_eq!(PolicyRecord { version: 0, ..full.clone() }.best("m", 4), None);
        let text = serde_json::to_string(&full).unwrap();
        assert_eq!(serde_json::from_str::<PolicyRecord>(&text).unwrap(), full);
    }

    #[test]
    fn never_slower_than_sequential() {
        let slow = record(&[("sequential", "a", 1.0), ("concurrent", "a", 1.1)]);
        assert_eq!(slow.best("m", 4).unwrap().start, StartOrder::Sequential);
        assert_eq!(record(&[("concurrent", "a", 1.1)]).best("m", 4), None);
    }
}
