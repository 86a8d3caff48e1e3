//! A table whose rows are printed as they are measured.

use super::grid::{Draw, Header, Layout, Text, plain};
use super::{Column, Style, width_of};
use crate::printable;

/// A table whose rows come one by one. Its columns are as wide as they say and as their headers are.
#[derive(Debug)]
pub struct LiveTable {
    columns: Vec<Column>,
    layout: Layout,
    widths: Vec<usize>,
    style: Style,
}

impl LiveTable {
    /// A table without rows.
    pub fn new(columns: &[Column], style: &Style) -> Self {
        let widths: Vec<usize> =
            columns.iter().map(|column| column.width.max(width_of(column.header))).collect();
        let layout = Layout::of(columns, &widths, style.limit(), |_| false);
        Self { columns: columns.to_vec(), layout, widths, style: *style }
    }

    /// What stands above the rows, with the figures that there is no room for.
    pub fn header(&self) -> String {
        let limit = self.style.limit();
        let mut out = self.layout.note(&self.columns, limit);
        out.push_str(&self.layout.header(&self.columns, limit));
        out.push_str(&self.draw(&self.layout).lines(Header::Drawn, &[]));
        out
    }

    /// A row, with a cell for every column.
    pub fn row(&self, cells: impl IntoIterator<Item = String>) -> String {
        let row: Vec<Text> = cells.into_iter().map(|text| plain(printable(&text))).collect();
        debug_assert_eq!(row.len(), self.columns.len());
        let limit = self.style.limit();
        let cells: Vec<usize> = row.iter().map(|(text, _)| width_of(text)).collect();
        // A cell that is longer than was expected must not push the others beyond the edge.
        let layout = if self.layout.fits_in(&cells, &self.widths, limit) {
            self.layout.clone()
        } else {
            self.layout.names_above(&self.columns)
        };
        let mut out = layout.names(&self.columns, &row, limit);
        out.push_str(&self.draw(&layout).lines(Header::LeftOut, &[row]));
        out
    }

    fn draw<'a>(&'a self, layout: &'a Layout) -> Draw<'a> {
        Draw { columns: &self.columns, layout, widths: &self.widths, color: self.style.color }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 5] = [
        Column::name("transport").wide(12),
        Column::number_name("size\n(B)").wide(12),
        Column::number("time\n(us)", 0).wide(9),
        Column::number("busbw\n(GB/s)", 1).wide(9),
        Column::number("max\n(us)", 2).wide(9),
    ];

    fn drawn(width: Option<u16>) -> String {
        let table = LiveTable::new(&COLUMNS, &Style { color: false, width });
        let row = |cells: [&str; 5]| table.row(cells.map(str::to_owned));
        table.header()
            + &row(["nccl", "65536", "12.5", "41.0", "14.0"])
            + &row(["hierarchical", "1073741824", "3012.5", "371.0", "3050.9"])
    }

    #[test]
    fn rows_stand_under_their_headers() {
        let text = drawn(None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        let end = |line: &str, word: &str| line.find(word).map(|at| at + word.len());
        assert_eq!(end(lines[0], "time"), end(lines[3], "12.5"), "{text}");
        assert_eq!(end(lines[3], "12.5"), end(lines[4], "3012.5"), "{text}");
        assert_eq!(end(lines[1], "(B)"), end(lines[4], "1073741824"), "{text}");
    }

    #[test]
    fn figures_go_and_names_stay() {
        for limit in 24..80 {
            let text = drawn(Some(limit));
            assert!(text.lines().all(|line| width_of(line) <= usize::from(limit)), "{limit}\n{text}");
            for name in ["nccl", "hierarchical", "65536", "1073741824", "3012.5"] {
                assert!(text.contains(name), "{limit}: no {name} in\n{text}");
            }
        }
        let table = LiveTable::new(&COLUMNS, &Style { color: false, width: Some(60) });
        let long = "a transport whose name is longer than its column";
        let text = table.row([long, "1", "2.0", "3.0", "4.0"].map(str::to_owned));
        assert!(text.starts_with(&format!("{long}, size (B) 1\n")), "{text}");
        assert!(text.lines().all(|line| width_of(line) <= 60), "{text}");
        let narrow = drawn(Some(44));
        assert!(narrow.starts_with("(no room for: busbw (GB/s), max (us))\n"), "{narrow}");
        assert!(drawn(Some(24)).contains("hierarchical,\nsize (B) 1073741824\n"), "{}", drawn(Some(24)));
    }
}
