//! Errors against the reference.

use serde::Serialize;

use super::bench::Verified;
use super::{Column, Grid, Style, Tone, plain};

/// One error against the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckRow {
    /// The tensor, such as `dk`.
    pub tensor: String,
    /// The measure, such as `relative Frobenius`.
    pub measure: String,
    /// Error and bound.
    #[serde(flatten)]
    pub verified: Verified,
}

/// Comparison with the dense reference.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CheckFigures {
    /// One row a tensor and measure.
    pub rows: Vec<CheckRow>,
}

impl CheckFigures {
    /// Whether every error is within its bound.
    pub fn passed(&self) -> bool {
        self.rows.iter().all(|row| row.verified.passed())
    }
}

/// Errors against the reference, one row a tensor.
pub fn check_table(check: &CheckFigures, style: &Style) -> String {
    let mut grid = Grid::new(vec![
        Column::name("tensor"),
        Column::name("measure"),
        Column::number("error", 0),
        Column::number("bound", 2),
        Column::text("", 0),
    ]);
    for row in &check.rows {
        let verdict = if row.verified.passed() {
            ("ok".to_owned(), Tone::Good)
        } else {
            ("FAILED".to_owned(), Tone::Bad)
        };
        grid.row(vec![
            plain(&*row.tensor),
            plain(&*row.measure),
            plain(format!("{:.2e}", row.verified.error)),
            plain(format!("{:.2e}", row.verified.bound)),
            verdict,
        ]);
    }
    grid.render(style)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CheckRow, Verified};

    #[test]
    fn every_error_stands_next_to_its_bound() {
        let row = |tensor: &str, error| CheckRow {
            tensor: tensor.into(),
            measure: "relative Frobenius".into(),
            verified: Verified { error, bound: 1e-5 },
        };
        let right = CheckFigures { rows: vec![row("out", 3.1e-7), row("dq", 1e-5)] };
        assert!(right.passed());
        let text = check_table(&right, &Style::PLAIN);
        assert!(text.contains("3.10e-7") && text.contains("1.00e-5") && !text.contains("FAILED"), "{text}");
        let wrong = CheckFigures { rows: vec![row("out", 3.1e-7), row("dv", f64::NAN)] };
        assert!(!wrong.passed());
        let text = check_table(&wrong, &Style::PLAIN);
        assert_eq!(text.matches("FAILED").count(), 1, "{text}");
        assert!(
            text.lines().last().is_some_and(|line| line.contains("dv") && line.contains("FAILED")),
            "{text}"
        );
    }
}
