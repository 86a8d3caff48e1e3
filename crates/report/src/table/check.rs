use super::{Column, Grid, Style, Tone, plain};
use crate::CheckFigures;

/// Errors against the reference, one row a tensor.
pub fn check_table(check: &CheckFigures, style: &Style) -> String {
    let mut grid = Grid::new(vec![
        Column::text("tensor", 0),
        Column::text("measure", 1),
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
