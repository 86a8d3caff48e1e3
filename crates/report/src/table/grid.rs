//! A table whose rows are all known, and how it is made to fit.

use comfy_table::{
    Attribute, Cell, Color, ColumnConstraint, ContentArrangement, ContentLineStyle, LineStyle, Table,
    TableStyle, Width,
};

use super::{Column, Keep, Style, width_of, wrapped};
use crate::printable;

/// Characters between two columns.
const GAP: usize = 2;
/// Between names that stand on a line of their own.
const SEPARATOR: &str = ", ";

/// A tone of a cell. Always with words, never instead of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Good,
    Bad,
    Soft,
}

/// A cell: its text and tone.
pub(super) type Text = (String, Tone);

pub(super) fn plain(text: impl Into<String>) -> Text {
    (text.into(), Tone::Plain)
}

/// Where the cells of rows go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Names that are the same in all rows, printed once above the table.
    pub(super) common: Vec<usize>,
    /// Names that have lines of their own above each row's figures.
    pub(super) above: Vec<usize>,
    /// What the table shows.
    pub(super) shown: Vec<usize>,
    /// Figures that there is no room for.
    pub(super) hidden: Vec<usize>,
}

impl Layout {
    /// A number that is broken over two lines is misread, so a narrow terminal loses whole columns of figures. What names rows is never
    /// lost: where it does not fit, names that all rows share (`is_common`) are printed once, and then names get lines of their own.
    pub(super) fn of(
        columns: &[Column],
        widths: &[usize],
        limit: usize,
        is_common: impl Fn(usize) -> bool,
    ) -> Self {
        let all = 0..columns.len();
        let fits = |shown: &[usize]| shown.iter().map(|&index| widths[index] + GAP).sum::<usize>() <= limit;
        let is_name = |index: &usize| columns[*index].keep == Keep::Name;
        let mut layout =
            Self { common: Vec::new(), above: Vec::new(), shown: all.collect(), hidden: Vec::new() };
        if fits(&layout.shown) {
            return layout;
        }
        // One name stays, so that every row begins with one.
        let first = layout.shown.iter().copied().find(is_name);
        let (common, shown) =
            layout.shown.into_iter().partition(|at| is_name(at) && Some(*at) != first && is_common(*at));
        (layout.common, layout.shown) = (common, shown);
        let stays = |index: &usize| matches!(columns[*index].keep, Keep::Name | Keep::Figure(0));
        let least: Vec<usize> = layout.shown.iter().copied().filter(stays).collect();
        if !fits(&least) {
            (layout.above, layout.shown) = layout.shown.into_iter().partition(is_name);
        }
        while !fits(&layout.shown) {
            let rank = |index: usize| match columns[index].keep {
                Keep::Name => 0,
                Keep::Figure(rank) => rank,
            };
            let last = layout.shown.iter().enumerate().max_by_key(|&(_, &index)| rank(index));
            let Some((at, _)) = last.filter(|&(_, &index)| rank(index) > 0) else { break };
            layout.hidden.push(layout.shown.remove(at));
        }
        layout.hidden.sort_unstable();
        layout
    }

    /// Whether cells of these widths fit, in columns that are at least so wide.
    pub(super) fn fits_in(&self, cells: &[usize], columns: &[usize], limit: usize) -> bool {
        self.shown.iter().map(|&index| cells[index].max(columns[index]) + GAP).sum::<usize>() <= limit
    }

    /// The same with all names above the figures.
    pub(super) fn names_above(&self, columns: &[Column]) -> Self {
        let (names, shown): (Vec<usize>, Vec<usize>) =
            self.shown.iter().partition(|&&index| columns[index].keep == Keep::Name);
        Self { above: self.above.iter().copied().chain(names).collect(), shown, ..self.clone() }
    }

    /// Which figures there is no room for, if any.
    pub(super) fn note(&self, columns: &[Column], limit: usize) -> String {
        if self.hidden.is_empty() {
            return String::new();
        }
        let mut names: Vec<String> = self.hidden.iter().map(|&index| columns[index].header()).collect();
        names[0].insert_str(0, "(no room for: ");
        if let Some(last) = names.last_mut() {
            last.push(')');
        }
        wrapped(&names, SEPARATOR, limit)
    }

    /// The headers of names that stand above figures.
    pub(super) fn header(&self, columns: &[Column], limit: usize) -> String {
        if self.above.is_empty() {
            return String::new();
        }
        let names: Vec<String> = self.above.iter().map(|&index| columns[index].header()).collect();
        wrapped(&names, SEPARATOR, limit)
    }

    /// The names of a row, above its figures.
    pub(super) fn names(&self, columns: &[Column], row: &[Text], limit: usize) -> String {
        if self.above.is_empty() {
            return String::new();
        }
        let names: Vec<String> =
            self.above.iter().map(|&index| columns[index].label(&row[index].0)).collect();
        wrapped(&names, SEPARATOR, limit)
    }
}

/// Columns and rows of text, drawn to fit.
pub(super) struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<Text>>,
}

impl Grid {
    pub(super) fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    pub(super) fn row(&mut self, cells: Vec<Text>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        // Names come from files and arguments; only this module's own colours may command the terminal.
        let cells = cells.into_iter().map(|(text, tone)| (printable(&text).into_owned(), tone));
        self.rows.push(cells.collect());
    }

    fn widths(&self) -> Vec<usize> {
        let width = |index: usize| {
            let cells = self.rows.iter().map(|row| width_of(&row[index].0));
            cells.chain([width_of(self.columns[index].header)]).max().unwrap_or(0)
        };
        (0..self.columns.len()).map(width).collect()
    }

    pub(super) fn render(&self, style: &Style) -> String {
        let widths = self.widths();
        let is_common = |index: usize| {
            self.rows.first().is_some_and(|first| self.rows.iter().all(|row| row[index].0 == first[index].0))
        };
        let limit = style.limit();
        let layout = Layout::of(&self.columns, &widths, limit, is_common);
        let mut out = String::new();
        if let (Some(first), false) = (self.rows.first(), layout.common.is_empty()) {
            let label = |&index: &usize| format!("{} {}", self.columns[index].header(), first[index].0);
            out.push_str(&wrapped(&layout.common.iter().map(label).collect::<Vec<_>>(), SEPARATOR, limit));
        }
        let draw = Draw { columns: &self.columns, layout: &layout, widths: &widths, color: style.color };
        if layout.above.is_empty() {
            out.push_str(&draw.lines(Header::Drawn, &self.rows));
        } else {
            out.push_str(&layout.header(&self.columns, limit));
            out.push_str(&draw.lines(Header::Drawn, &[]));
            for row in &self.rows {
                out.push_str(&layout.names(&self.columns, row, limit));
                out.push_str(&draw.lines(Header::LeftOut, std::slice::from_ref(row)));
            }
        }
        out.push_str(&layout.note(&self.columns, limit));
        out
    }
}

/// Whether headers stand above rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Header {
    Drawn,
    LeftOut,
}

/// What decides how the lines of a table look.
pub(super) struct Draw<'a> {
    pub(super) columns: &'a [Column],
    pub(super) layout: &'a Layout,
    /// Characters of each column at least.
    pub(super) widths: &'a [usize],
    pub(super) color: bool,
}

impl Draw<'_> {
    /// The lines of rows, of the columns that are shown.
    pub(super) fn lines(&self, header: Header, rows: &[Vec<Text>]) -> String {
        let mut table = Table::new();
        table
            .load_style(
                TableStyle::new()
                    .header_lines(ContentLineStyle::none())
                    .header_separator(LineStyle::none().fill('─'))
                    .content_lines(ContentLineStyle::none()),
            )
            .set_content_arrangement(ContentArrangement::Disabled);
        // The library looks at the terminal and the environment unless it must not; the caller has decided.
        table.force_no_tty();
        if self.color {
            table.enforce_styling();
        }
        let shown = &self.layout.shown;
        if header == Header::Drawn {
            table.set_header(shown.iter().map(|&index| {
                let column = &self.columns[index];
                Cell::new(column.header).set_alignment(column.alignment).add_attribute(Attribute::Bold)
            }));
        }
        for row in rows {
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
        table.set_constraints(shown.iter().map(|&index| {
            let width = u16::try_from(self.widths[index] + GAP).unwrap_or(u16::MAX);
            ColumnConstraint::LowerBoundary(Width::Fixed(width))
        }));
        let mut out: String =
            table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect();
        debug_assert!(self.color || !out.contains('\u{1b}'));
        out.shrink_to_fit();
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::printable_lines;

    fn grid() -> Grid {
        let mut grid = Grid::new(vec![
            Column::number_name("rank"),
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

    fn at(limit: u16) -> Style {
        Style { color: false, width: Some(limit) }
    }

    #[test]
    fn a_narrow_terminal_loses_whole_columns_of_figures_and_says_so() {
        let wide = grid().render(&Style::PLAIN);
        assert!(wide.contains("chunks") && wide.contains("262,144") && !wide.contains("no room"), "{wide}");
        for limit in 24..60 {
            let text = grid().render(&at(limit));
            assert!(text.lines().all(|line| width_of(line) <= usize::from(limit)), "{limit}\n{text}");
            assert!(text.contains("rank"));
        }
        let narrow = grid().render(&at(20));
        assert!(narrow.contains("(no room for: tokens,\nchunks)"), "{narrow}");
        assert!(narrow.contains("1,234,567"));
    }

    /// Names of every row are there at every width, and no line is longer than the longest name or figure makes it.
    #[test]
    fn names_never_go() {
        let columns = vec![
            Column::name("kind"),
            Column::name("policy"),
            Column::name("device"),
            Column::number_name("ranks"),
            Column::number("time", 0),
            Column::number("rate", 1),
            Column::number("error", 2),
        ];
        let mut grid = Grid::new(columns);
        for (kind, policy) in [("row", "concurrent+sm-margin=16"), ("column", "kernel-barrier+copy-engine")] {
            grid.row([kind, policy, "CPU", "4", "11.0 ms", "0.31", "3e-7"].map(plain).to_vec());
        }
        for limit in 30..130 {
            let text = grid.render(&at(limit));
            assert!(text.lines().all(|line| width_of(line) <= usize::from(limit)), "{limit}\n{text}");
            for name in
                ["row", "column", "concurrent+sm-margin=16", "kernel-barrier+copy-engine", "CPU", "11.0 ms"]
            {
                assert!(text.contains(name), "{limit}: no {name} in\n{text}");
            }
        }
        // Names that all rows share are printed once before a figure goes.
        let folded = grid.render(&at(66));
        assert!(folded.starts_with("device CPU, ranks 4\n") && folded.contains("error"), "{folded}");
        // Where even the others leave no room, each row's have a line of their own.
        let stacked = grid.render(&at(40));
        assert!(stacked.contains("\nrow, concurrent+sm-margin=16\n"), "{stacked}");
    }

    #[test]
    fn color_only_when_asked() {
        assert!(!grid().render(&Style::PLAIN).contains('\u{1b}'));
        let style = Style { color: true, width: None };
        assert!(grid().render(&style).contains('\u{1b}'));
        assert_eq!(printable_lines(&grid().render(&style), true), grid().render(&style));
    }

    #[test]
    fn cells_command_nothing() {
        let mut grid = Grid::new(vec![Column::name("name"), Column::number("area", 1)]);
        grid.row(vec![plain("a\u{1b}[31m\nb"), plain("1")]);
        let text = grid.render(&Style { color: true, width: None });
        assert!(text.contains("a\\x1b[31m\\nb") && text.lines().count() == 3, "{text}");
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let mut grid = Grid::new(vec![Column::name("mask"), Column::number("area", 1)]);
        grid.row(vec![plain("文書.json"), plain("123,456")]);
        for limit in 20..40 {
            let text = grid.render(&at(limit));
            assert!(text.lines().all(|line| width_of(line) <= usize::from(limit)), "{limit}\n{text}");
        }
    }
}
