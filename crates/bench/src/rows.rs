//! How measured rows are shown: lines of a table as they come, or objects of JSON; those that are wrong are named at the end.

use counterpoint_console::{self as console, CliError, Schema};
use counterpoint_report::{Column, LiveTable};
use serde::Serialize;

/// Rows on their way to standard output.
pub(crate) struct Rows {
    /// `None`: objects of JSON.
    table: Option<LiveTable>,
    schema: Schema,
    wrong: Vec<String>,
}

impl Rows {
    /// Prints what stands above the rows.
    pub(crate) fn begin(
        title: &str,
        columns: &[Column],
        schema: Schema,
        json: bool,
    ) -> Result<Self, CliError> {
        console::note_development_build();
        let table = (!json).then(|| LiveTable::new(columns, &console::style()));
        table.iter().try_for_each(|table| console::print(&format!("{title}\n{}", table.header())))?;
        Ok(Self { table, schema, wrong: Vec::new() })
    }

    /// Prints a row, which as text has these cells.
    pub(crate) fn show(
        &self,
        row: &impl Serialize,
        cells: impl IntoIterator<Item = String>,
    ) -> Result<(), CliError> {
        match &self.table {
            Some(table) => console::print(&table.row(cells)),
            None => console::print_json(self.schema, row),
        }
    }

    /// Keeps the name of a row that is wrong.
    pub(crate) fn add_wrong(&mut self, name: String) {
        self.wrong.push(name);
    }

    /// The end, with what to read from the rows where they are text.
    ///
    /// # Errors
    /// Where rows were wrong, with `what` they are.
    pub(crate) fn end(self, finding: &str, what: &str) -> Result<(), CliError> {
        if self.table.is_some() {
            console::print(finding)?;
        }
        all_right(what, &self.wrong)
    }
}

/// # Errors
/// Where something was wrong: `what` that is, and their names.
pub(crate) fn all_right(what: &str, wrong: &[String]) -> Result<(), CliError> {
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(CliError::CheckFailed { what: format!("{what}: {}", wrong.join("; ")) }),
    }
}
