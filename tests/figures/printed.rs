//! Reads the kept runs: tables as commands printed them, and lines of a label and a time.

use std::collections::BTreeMap;
use std::fs;

use crate::root;

/// A row of a printed table: its cells by the names of their columns.
pub(crate) type Row = BTreeMap<String, String>;

/// The text of a file of `benches/runs`.
pub(crate) fn run(file: &str) -> String {
    fs::read_to_string(root().join("benches/runs").join(file))
        .unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The rows of all tables of a run that have this column. Cells stand at least two spaces apart.
pub(crate) fn rows(file: &str, column: &str) -> Vec<Row> {
    let text = run(file);
    let (mut header, mut found) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let cells = cells(line);
        if cells.contains(&column) {
            header = cells;
        } else if line.trim().is_empty() {
            header.clear();
        } else if !header.is_empty() && cells.len() >= header.len() {
            let named =
                header.iter().zip(&cells).map(|(name, cell)| ((*name).to_owned(), (*cell).to_owned()));
            found.push(named.collect());
        }
    }
    assert!(!found.is_empty(), "{file} has no table with a column `{column}`");
    found
}

/// A first column without a name has an empty one.
fn cells(line: &str) -> Vec<&str> {
    let unnamed = line.starts_with("  ").then_some("");
    unnamed.into_iter().chain(line.split("  ").map(str::trim).filter(|cell| !cell.is_empty())).collect()
}

/// The figure of a cell: in brackets, where it has some; without its unit.
pub(crate) fn figure(cell: &str) -> Option<&str> {
    let inner = cell.split_once('(').map_or(cell, |(_, rest)| rest.trim_end_matches(')'));
    let first = inner.split_whitespace().next()?.trim_end_matches('x');
    first.parse::<f64>().ok().map(|_| first)
}

/// Figures with the place where each was found.
#[derive(Default)]
pub(crate) struct Figures(Vec<(f64, String, String)>);

impl Figures {
    /// Those of a column in the rows that `keep` keeps, of several files; `place` names a row.
    pub(crate) fn of(files: &[&str], column: &str, keep: impl Fn(&Row) -> bool, place: &[&str]) -> Self {
        let rows = files.iter().flat_map(|file| rows(file, column)).filter(keep);
        Self::from_rows(rows, column, place)
    }

    fn from_rows(rows: impl Iterator<Item = Row>, column: &str, place: &[&str]) -> Self {
        let figures = rows.filter_map(|row| {
            let text = figure(&row[column])?;
            let place: Vec<&str> = place.iter().map(|name| row[*name].as_str()).collect();
            Some((text.parse().ok()?, text.to_owned(), place.join(", ")))
        });
        Self(figures.collect())
    }

    /// Those that have been computed.
    pub(crate) fn computed(values: impl Iterator<Item = f64>) -> Self {
        Self(values.map(|value| (value, format!("{value:.2}"), String::new())).collect())
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Least and largest as they were printed. A least below 1 has its place in brackets, where places have names.
    pub(crate) fn range(&self) -> String {
        let (value, least, place) = self.extreme(f64::lt);
        let most = self.most();
        match place.is_empty() || *value >= 1.0 {
            true => format!("{least} to {most}"),
            false => format!("{least} ({place}) to {most}"),
        }
    }

    /// The largest as it was printed.
    pub(crate) fn most(&self) -> &str {
        &self.extreme(f64::gt).1
    }

    fn extreme(&self, better: impl Fn(&f64, &f64) -> bool) -> &(f64, String, String) {
        let best = self.0.iter().reduce(|best, next| if better(&next.0, &best.0) { next } else { best });
        best.expect("a figure")
    }

    /// The geometric mean.
    pub(crate) fn mean(&self) -> f64 {
        assert!(!self.0.is_empty(), "no figure");
        (self.0.iter().map(|(value, ..)| value.ln()).sum::<f64>() / self.len() as f64).exp()
    }
}

/// The time of the first line that begins with `label`, behind the line that begins with `behind` if that is not empty.
pub(crate) fn time<'a>(text: &'a str, behind: &str, label: &str) -> &'a str {
    let lines = text.lines().skip_while(|line| !line.trim_start().starts_with(behind));
    let rest = lines.filter_map(|line| line.trim_start().strip_prefix(label)).next();
    let rest = rest.unwrap_or_else(|| panic!("no line `{label}` behind `{behind}`"));
    rest.split_whitespace().next().unwrap_or_else(|| panic!("`{label}` has no time"))
}
