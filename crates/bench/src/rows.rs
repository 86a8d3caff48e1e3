//! How measured rows are shown: lines of a table as they come, or objects of JSON; those that are wrong are named at the end.

use counterpoint_console::{self as console, CliError, Schema};
use counterpoint_report::{Column, LiveTable};
use serde::Serialize;

/// Rows on their way to standard output.
pub(crate) struct Rows {
    form: Form,
    schema: Schema,
    wrong: Vec<String>,
}

/// What becomes of rows.
enum Form {
    /// Lines of it.
    Table(LiveTable),
    /// Objects of JSON.
    Json,
    /// Nothing: another process prints them.
    Nothing,
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
        let form = match json {
            true => Form::Json,
            false => Form::Table(LiveTable::new(columns, &console::style())),
        };
        if let Form::Table(table) = &form {
            console::print(&format!("{title}\n{}", table.header()))?;
        }
        Ok(Self { form, schema, wrong: Vec::new() })
    }

    /// In a process that prints none of them.
    pub(crate) fn quiet(schema: Schema) -> Self {
        Self { form: Form::Nothing, schema, wrong: Vec::new() }
    }

    /// Whether they are text.
    pub(crate) fn are_text(&self) -> bool {
        matches!(self.form, Form::Table(_))
    }

    /// Prints a row, which as text has these cells.
    pub(crate) fn show(
        &self,
        row: &impl Serialize,
        cells: impl IntoIterator<Item = String>,
    ) -> Result<(), CliError> {
        match &self.form {
            Form::Table(table) => console::print(&table.row(cells)),
            Form::Json => console::print_json(self.schema, row),
            Form::Nothing => Ok(()),
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
        if self.are_text() {
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
