//! How measured rows are shown: lines of a table as they come, or objects of JSON; those that are wrong are named at the end.

use std::marker::PhantomData;

use counterpoint_console::{self as console, CheckFault, CliError, Schema};
use counterpoint_report::{Column, LiveTable};
use serde::Serialize;

/// A measured case: an object of JSON, and a line of its command's table.
pub(crate) trait MeasuredRow<const COLUMNS: usize>: Serialize {
    /// Columns of the table.
    const TABLE: [Column; COLUMNS];
    /// Whether a row whose result is wrong is shown nevertheless; it is named at the end in any case.
    const SHOWN_IF_WRONG: bool = false;

    /// Its cells in the table.
    fn cells(&self) -> [String; COLUMNS];

    /// Where its result is wrong, its name and how.
    fn fault(&self) -> Option<String>;
}

/// Rows on their way to standard output.
pub(crate) struct Rows<R> {
    form: Form,
    schema: Schema,
    wrong: Vec<String>,
    of: PhantomData<fn(&R)>,
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

impl<R> Rows<R> {
    /// Prints what stands above the rows, unless another process prints them (`prints`).
    pub(crate) fn begin<const COLUMNS: usize>(
        prints: bool,
        title: impl FnOnce() -> Result<String, CliError>,
        schema: Schema,
        json: bool,
    ) -> Result<Self, CliError>
    where
        R: MeasuredRow<COLUMNS>,
    {
        let form = match (prints, json) {
            (false, _) => Form::Nothing,
            (true, true) => Form::Json,
            (true, false) => Form::Table(LiveTable::new(&R::TABLE, &console::style())),
        };
        if prints {
            console::note_development_build();
        }
        if let Form::Table(table) = &form {
            console::print(&format!("{}\n{}", title()?, table.header()))?;
        }
        Ok(Self { form, schema, wrong: Vec::new(), of: PhantomData })
    }

    /// Whether they are text.
    pub(crate) fn are_text(&self) -> bool {
        matches!(self.form, Form::Table(_))
    }

    /// Prints a row.
    pub(crate) fn show<const COLUMNS: usize>(&self, row: &R) -> Result<(), CliError>
    where
        R: MeasuredRow<COLUMNS>,
    {
        match &self.form {
            Form::Table(table) => console::print(&table.row(row.cells())),
            Form::Json => console::print_json(self.schema, row),
            Form::Nothing => Ok(()),
        }
    }

    /// Prints a row whose result is right, and keeps the name of one whose is not.
    pub(crate) fn add<const COLUMNS: usize>(&mut self, row: &R) -> Result<(), CliError>
    where
        R: MeasuredRow<COLUMNS>,
    {
        if self.is_right(row) || R::SHOWN_IF_WRONG { self.show(row) } else { Ok(()) }
    }

    /// Whether a row's result is right; if not, its name is kept.
    pub(crate) fn is_right<const COLUMNS: usize>(&mut self, row: &R) -> bool
    where
        R: MeasuredRow<COLUMNS>,
    {
        let fault = row.fault();
        let is_right = fault.is_none();
        self.wrong.extend(fault);
        is_right
    }

    /// The end, with what to read from the rows where they are text.
    ///
    /// # Errors
    /// Where rows were wrong, with `what` they are.
    pub(crate) fn end(self, finding: &str, what: &'static str) -> Result<(), CliError> {
        if self.are_text() {
            console::print(finding)?;
        }
        all_right(what, &self.wrong)
    }
}

/// # Errors
/// Where something was wrong: `what` that is, and their names.
pub(crate) fn all_right(what: &'static str, wrong: &[String]) -> Result<(), CliError> {
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(CliError::check(CheckFault::Rows { what, rows: wrong.to_vec() })),
    }
}
