//! The one printer of tables for terminals: columns that name a row always stay, figures go when there is no room for them.

mod bench;
mod check;
mod grid;
mod live;
mod plan;

use comfy_table::CellAlignment;
use unicode_width::UnicodeWidthStr;

pub use bench::{BenchRow, Rate, Verified, bench_table};
pub use check::{CheckFigures, CheckRow, check_table};
use grid::{Grid, Tone, plain};
pub use live::LiveTable;
pub(crate) use plan::chunk_list;
pub use plan::{ComparisonRow, comparison_table, plan_table, summary_table};

/// How a table is drawn. The caller finds out what the terminal is and whether `NO_COLOR` is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Whether to colour with ANSI sequences.
    pub color: bool,
    /// Columns of the terminal; `None` where the table may be as wide as it needs (a file, a pipe).
    pub width: Option<u16>,
}

impl Style {
    /// No colour, any width: for files and pipes.
    pub const PLAIN: Style = Style { color: false, width: None };

    /// Columns that a line may take.
    fn limit(&self) -> usize {
        self.width.map_or(usize::MAX, usize::from)
    }
}

/// Whether a narrow terminal may lose a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    /// Never: it says what the row is of.
    Name,
    /// The highest rank goes first, 0 never.
    Figure(u8),
}

/// A column of a table. What names a row always stays; of figures the highest `rank` goes first where the terminal is narrow, 0 never.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    header: &'static str,
    alignment: CellAlignment,
    keep: Keep,
    /// Characters that a [`LiveTable`] leaves for its cells.
    width: usize,
}

impl Column {
    /// What stands above it, in one line.
    pub fn header(&self) -> String {
        self.header.replace('\n', " ")
    }

    /// A column of words that say what a row is of.
    pub const fn name(header: &'static str) -> Self {
        Self { header, alignment: CellAlignment::Left, keep: Keep::Name, width: 0 }
    }

    /// A column of numbers that say what a row is of, such as ranks or sizes.
    pub const fn number_name(header: &'static str) -> Self {
        Self { header, alignment: CellAlignment::Right, keep: Keep::Name, width: 0 }
    }

    /// A column of words that say something of the row.
    pub const fn text(header: &'static str, rank: u8) -> Self {
        Self { header, alignment: CellAlignment::Left, keep: Keep::Figure(rank), width: 0 }
    }

    /// A column of numbers that say something of the row.
    pub const fn number(header: &'static str, rank: u8) -> Self {
        Self { header, alignment: CellAlignment::Right, keep: Keep::Figure(rank), width: 0 }
    }

    /// With room for cells of so many characters in a [`LiveTable`], whose rows are not known when it begins.
    pub const fn wide(self, width: usize) -> Self {
        Self { width, ..self }
    }

    /// A cell as it stands among names on a line of their own: a number with what it counts.
    fn label(&self, cell: &str) -> String {
        match self.alignment {
            CellAlignment::Right => format!("{} {cell}", self.header()),
            _ => cell.to_owned(),
        }
    }
}

/// Rows of words and numbers, each with a cell for every column.
pub fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>, style: &Style) -> String {
    let mut grid = Grid::new(columns.to_vec());
    rows.into_iter().for_each(|row| grid.row(row.into_iter().map(plain).collect()));
    grid.render(style)
}

/// `text` with lines that are no longer than the terminal is wide, broken between words; what a line goes on with is indented.
pub fn fold(text: &str, style: &Style) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        let indent = &line[..line.len() - line.trim_start().len()];
        out.push_str(indent);
        let mut used = 0;
        for word in line[indent.len()..].split(' ') {
            let width = width_of(word);
            if used > 0 && indent.len() + used + 1 + width > style.limit() {
                out.push('\n');
                out.push_str(indent);
                out.push_str("  ");
                used = 2;
            } else if used > 0 {
                out.push(' ');
                used += 1;
            }
            out.push_str(word);
            used += width;
        }
        out.push_str(end);
    }
    out
}

/// Columns of a terminal that the longest line of `text` takes.
fn width_of(text: &str) -> usize {
    text.split('\n').map(UnicodeWidthStr::width).max().unwrap_or(0)
}

/// `parts`, joined, on as many lines as it takes; a part that is longer than a line has one of its own.
fn wrapped(parts: &[String], separator: &str, limit: usize) -> String {
    let mut out = String::new();
    let mut used = 0;
    for (at, part) in parts.iter().enumerate() {
        let separator = if at + 1 < parts.len() { separator } else { "" };
        let width = width_of(part) + width_of(separator.trim_end());
        if used > 0 && used + width > limit {
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
            used = 0;
        }
        out.push_str(part);
        out.push_str(separator);
        used += width_of(part) + width_of(separator);
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let style = |width| Style { color: false, width };
        let text = "one two three\n  four five six\n\nseven\n";
        assert_eq!(fold(text, &style(None)), text);
        assert_eq!(fold(text, &style(Some(80))), text);
        assert_eq!(fold(text, &style(Some(9))), "one two\n  three\n  four\n    five\n    six\n\nseven\n");
    }
}
