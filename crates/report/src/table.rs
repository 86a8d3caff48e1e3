use comfy_table::{
    Attribute, Cell, CellAlignment, Color, ContentArrangement, ContentLineStyle, LineStyle, Table, TableStyle,
};

mod bench;
mod check;
mod plan;

pub use bench::{BenchRow, Rate, Verified, bench_table};
pub use check::check_table;
pub(crate) use plan::chunk_list;
pub use plan::{ComparisonRow, comparison_table, plan_table};

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
}

/// A tone of a cell. Always besides words, never instead of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tone {
    Plain,
    Good,
    Bad,
    Soft,
}

/// A column, and how soon it goes when the terminal is narrow: the highest `rank` first, 0 never.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    header: &'static str,
    alignment: CellAlignment,
    rank: u8,
}

impl Column {
    /// What stands above it.
    pub const fn header(&self) -> &'static str {
        self.header
    }

    /// A column of words.
    pub const fn text(header: &'static str, rank: u8) -> Self {
        Self { header, alignment: CellAlignment::Left, rank }
    }

    /// A column of numbers.
    pub const fn number(header: &'static str, rank: u8) -> Self {
        Self { header, alignment: CellAlignment::Right, rank }
    }
}

/// Rows of words and numbers, each with a cell for every column.
pub fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>, style: &Style) -> String {
    let mut grid = Grid::new(columns.to_vec());
    rows.into_iter().for_each(|row| grid.row(row.into_iter().map(plain).collect()));
    grid.render(style)
}

/// Columns and rows of text, drawn to fit. A number that is broken over two lines is misread, so a narrow terminal
/// loses whole columns, and a line below says which.
struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<(String, Tone)>>,
}

impl Grid {
    fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    fn row(&mut self, cells: Vec<(String, Tone)>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// Characters of column `index` with the gap to the next.
    fn column_width(&self, index: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[index].0.chars().count());
        cells.chain([self.columns[index].header.chars().count()]).max().unwrap_or(0) + 2
    }

    fn render(&self, style: &Style) -> String {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let mut hidden: Vec<usize> = Vec::new();
        if let Some(limit) = style.width {
            let widths: Vec<usize> = (0..self.columns.len()).map(|index| self.column_width(index)).collect();
            while shown.iter().map(|&index| widths[index]).sum::<usize>() > usize::from(limit) {
                let last = shown.iter().enumerate().rev().max_by_key(|&(_, &index)| self.columns[index].rank);
                let Some((at, _)) = last.filter(|&(_, &index)| self.columns[index].rank > 0) else { break };
                hidden.push(shown.remove(at));
            }
        }
        let mut out = self.draw(&shown, style);
        if !hidden.is_empty() {
            hidden.sort_unstable();
            let names: Vec<&str> = hidden.iter().map(|&index| self.columns[index].header).collect();
            out.push_str(&format!("(no room for: {})\n", names.join(", ")));
        }
        out
    }

    fn draw(&self, shown: &[usize], style: &Style) -> String {
        let mut table = Table::new();
        table
            .load_style(
                TableStyle::new()
                    .header_lines(ContentLineStyle::none())
                    .header_separator(LineStyle::none().fill('─'))
                    .content_lines(ContentLineStyle::none()),
            )
            .set_content_arrangement(ContentArrangement::Disabled);
        // The library looks at the terminal and the environment unless told not to; the caller has decided.
        table.force_no_tty();
        if style.color {
            table.enforce_styling();
        }
        table.set_header(shown.iter().map(|&index| {
            let column = &self.columns[index];
            Cell::new(column.header).set_alignment(column.alignment).add_attribute(Attribute::Bold)
        }));
        for row in &self.rows {
            table.add_row(shown.iter().map(|&index| {
                let (text, tone) = &row[index];
                let cell = Cell::new(text).set_alignment(self.columns[index].alignment);
                match tone {
                    Tone::Plain => cell,
                    Tone::Good => cell.fg(Color::Green),
                    Tone::Bad => cell.fg(Color::Red),
                    Tone::Soft => cell.add_attribute(Attribute::Dim),
                }
            }));
        }
        let mut out: String =
            table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect();
        if !style.color {
            debug_assert!(!out.contains('\u{1b}'));
        }
        out.shrink_to_fit();
        out
    }
}

fn plain(text: impl Into<String>) -> (String, Tone) {
    (text.into(), Tone::Plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        let mut grid = Grid::new(vec![
            Column::number("rank", 0),
            Column::number("tokens", 2),
            Column::text("chunks", 3),
            Column::number("area", 1),
        ]);
        for rank in 0..3 {
            grid.row(vec![
                plain(rank.to_string()),
                plain("262,144"),
                plain("0–3, 12"),
                ("1,234,567".into(), if rank == 1 { Tone::Bad } else { Tone::Plain }),
            ]);
        }
        grid
    }

    #[test]
    fn a_narrow_terminal_loses_whole_columns_and_says_so() {
        let wide = grid().render(&Style::PLAIN);
        assert!(wide.contains("chunks") && wide.contains("262,144") && !wide.contains("no room"), "{wide}");
        for limit in 12..60 {
            let text = grid().render(&Style { color: false, width: Some(limit) });
            let table: Vec<&str> = text.lines().filter(|line| !line.starts_with("(no room")).collect();
            assert_eq!(table.len(), 5, "{text}");
            for line in &table {
                assert!(line.chars().count() <= usize::from(limit.max(17)), "{limit}: {line:?}");
            }
            assert!(text.contains("rank"));
        }
        let narrow = grid().render(&Style { color: false, width: Some(20) });
        assert!(narrow.contains("(no room for: tokens, chunks)"), "{narrow}");
        assert!(narrow.contains("1,234,567"));
    }

    #[test]
    fn color_only_when_asked() {
        assert!(!grid().render(&Style::PLAIN).contains('\u{1b}'));
        assert!(grid().render(&Style { color: true, width: None }).contains('\u{1b}'));
    }
}
