//! Ratios of seconds, collected over cases and printed in one line.

use serde_json::{Value, json};

/// Seconds of one choice over those of another, by case.
#[derive(Default)]
pub(crate) struct Ratios(Vec<(f64, String)>);

impl Ratios {
    pub(crate) fn add(&mut self, ratio: f64, case: &str) {
        self.0.push((ratio, case.to_owned()));
    }

    /// The largest, and whose it is.
    pub(crate) fn worst(&self) -> (f64, &str) {
        let worst = self.0.iter().max_by(|a, b| a.0.total_cmp(&b.0));
        worst.map_or((1.0, "no case"), |(ratio, case)| (*ratio, case))
    }

    /// What a result file keeps of them.
    pub(crate) fn json(&self) -> Value {
        let above: Vec<f64> = self.0.iter().map(|(ratio, _)| *ratio).filter(|ratio| *ratio > 1.01).collect();
        let mean = above.iter().sum::<f64>() / above.len().max(1) as f64;
        let (worst, case) = self.worst();
        json!({
            "compared": self.0.len(),
            "above_1_percent": above.len(),
            "mean_of_these": if above.is_empty() { Value::Null } else { json!(rounded(mean)) },
            "worst": rounded(worst),
            "worst_case": case,
        })
    }

    /// How many are above 1 by more than a hundredth, by how much in the mean, and the worst.
    pub(crate) fn text(&self) -> String {
        let above: Vec<f64> = self.0.iter().map(|(ratio, _)| *ratio).filter(|ratio| *ratio > 1.01).collect();
        let mean = above.iter().sum::<f64>() / above.len().max(1) as f64;
        let (worst, case) = self.worst();
        let by = if above.is_empty() { String::new() } else { format!(", {mean:.3} in the mean of these") };
        format!("{} of {} above 1.01{by}; worst {worst:.3} ({case})", above.len(), self.0.len())
    }
}

fn rounded(ratio: f64) -> f64 {
    (ratio * 1e4).round() / 1e4
}
