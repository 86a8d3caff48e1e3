//! The report of a prediction, a page for a browser.

use std::fmt::Write;

use counterpoint_schedule::Timeline;
use serde_json::json;

use super::{Origin, close_page, data, escape, figures, open_page};
use crate::TimelinePair;

/// A report of what was predicted without a mask or a plan to show: a table and timelines, in a single HTML file.
#[derive(Clone, Debug)]
pub struct SimulationReport<'a> {
    /// Heading and window title.
    pub title: &'a str,
    /// What was simulated, as (name, value).
    pub setup: Vec<(String, String)>,
    /// Names of the table's columns; the first names the row.
    pub columns: Vec<String>,
    /// Its rows, each with a cell for every column.
    pub rows: Vec<Vec<String>>,
    /// Timelines by name: the pass, a comma, and what distinguishes it from others of the pass.
    pub timelines: Vec<(String, &'a Timeline)>,
    /// What made the report.
    pub origin: Option<&'a Origin>,
}

impl SimulationReport<'_> {
    /// The page.
    pub fn render(&self) -> String {
        let mut out = open_page(self.title, &self.setup, self.origin);
        out.push_str("<section class=\"panel\"><h2>Predicted</h2>\n<div class=\"scroll\"><table class=\"figures\"><thead><tr>");
        let classes: Vec<&str> = (0..self.columns.len()).map(|column| self.class(column)).collect();
        for (name, class) in self.columns.iter().zip(&classes) {
            let _ = write!(out, "<th scope=\"col\"{class}>{}</th>", escape(name));
        }
        out.push_str("</tr></thead><tbody>");
        for row in &self.rows {
            out.push_str("<tr>");
            for (index, (cell, class)) in row.iter().zip(&classes).enumerate() {
                let tag = if index == 0 { "th" } else { "td" };
                let _ = write!(out, "<{tag}{class}>{}</{tag}>", escape(cell));
            }
            out.push_str("</tr>");
        }
        out.push_str("</tbody></table></div></section>\n");
        figures::side_by_side(&mut out, &self.timelines);
        let pair = |timeline| TimelinePair { predicted: Some(timeline), measured: None };
        let names = self.timelines.iter().map(|(name, timeline)| (name.as_str(), pair(*timeline)));
        let passes: Vec<_> = names.collect();
        figures::timeline_section(&mut out, &passes);
        let drawn: Vec<_> = passes.iter().map(|(name, pair)| data::pass(name, pair)).collect();
        close_page(&mut out, &json!({"passes": drawn}), &[include_str!("timeline.js")]);
        out
    }

    /// Words begin where a column begins, figures end where it ends.
    fn class(&self, column: usize) -> &'static str {
        let words =
            |row: &Vec<String>| row.get(column).is_some_and(|cell| cell.starts_with(char::is_alphabetic));
        if self.rows.iter().all(words) { " class=\"text\"" } else { "" }
    }
}
