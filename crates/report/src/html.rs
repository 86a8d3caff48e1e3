//! The report of a run, a page for a browser.

use std::fmt::Write;

use counterpoint_mask::Mask;
use counterpoint_plan::{CommSummary, Plan};

use crate::escape::{escape, script_json};
use crate::{CheckFigures, MaskDrawing, TimelinePair, matrix::CommMatrix, palette::color_properties};

mod data;
mod figures;
mod ranks;
mod simulation;

pub use simulation::SimulationReport;

/// The opening of a chart's element. It takes the focus, so that the arrow keys can move over its marks.
fn chart(id: &str, name: &str) -> String {
    format!(
        "<div class=\"chart\" id=\"{id}\" tabindex=\"0\" role=\"group\" aria-roledescription=\"chart\" \
         aria-label=\"{name}. Arrow keys show details.\">"
    )
}

const MASK_TOOLS: &str = "<div class=\"tools\" id=\"mask-tools\"><div role=\"group\" aria-label=\"Zoom of the mask\">\
    <button type=\"button\" data-mask=\"out\" aria-label=\"Zoom out\">−</button>\
    <button type=\"button\" data-mask=\"in\" aria-label=\"Zoom in\">+</button>\
    <button type=\"button\" data-mask=\"all\">all</button></div><output>all tokens</output></div>\n";

/// Figures that neither mask, plan nor timeline holds. What is `None` is left out of the report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// What was run, as (name, value): device, dtype, heads, dispatch, overlap policy.
    pub setup: Vec<(String, String)>,
    /// Seconds that planning took.
    pub plan_seconds: Option<f64>,
    /// Key rows received.
    pub comm: Option<CommSummary>,
    /// Bytes of a key row and a value row together; the matrix then shows bytes too.
    pub kv_row_bytes: Option<u64>,
    /// Floating-point operations of the forward, all ranks together.
    pub forward_flops: Option<f64>,
    /// Floating-point operations of the backward, all ranks together.
    pub backward_flops: Option<f64>,
}

/// Where a report came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The command line, as a shell takes it.
    pub command: String,
    /// The program's version.
    pub version: String,
    /// When, in universal time.
    pub date: String,
    /// The machine's name.
    pub host: String,
}

/// A report of one run: a single HTML file with everything in it, no network.
#[derive(Clone, Debug)]
pub struct HtmlReport<'a> {
    /// Heading and window title.
    pub title: &'a str,
    /// The mask.
    pub mask: &'a Mask,
    /// Its plan.
    pub plan: &'a Plan,
    /// Everything else.
    pub figures: Figures,
    /// The forward, predicted and measured.
    pub forward: Option<TimelinePair<'a>>,
    /// The backward, likewise.
    pub backward: Option<TimelinePair<'a>>,
    /// Errors against the reference, where they were checked.
    pub check: Option<&'a CheckFigures>,
    /// What made the report.
    pub origin: Option<&'a Origin>,
}

/// A page with its heading, up to its first section.
fn open_page(title: &str, setup: &[(String, String)], origin: Option<&Origin>) -> String {
    let title = escape(title);
    let mut out = String::with_capacity(1 << 19);
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>\n{}\n{}{}</style>\n</head>\n<body>\n<script>\n{}</script>\n<header>\n<h1>{title}</h1>\n",
        color_properties(":root"),
        include_str!("svg/mask.css"),
        include_str!("html/page.css"),
        include_str!("html/errors.js"),
    );
    if !setup.is_empty() {
        out.push_str("<dl class=\"setup\">");
        for (name, value) in setup {
            let _ = write!(out, "<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
        }
        out.push_str("</dl>\n");
    }
    if let Some(Origin { command, version, date, host }) = origin {
        let [command, version, date, host] = [command, version, date, host].map(|text| escape(text));
        let _ = writeln!(
            out,
            "<p class=\"origin\"><code>{command}</code> <span>counterpoint {version}, on {host}, {date}</span></p>"
        );
    }
    out.push_str("</header>\n<main>\n");
    out
}

/// The end of a page, with what its charts draw and the scripts of these charts.
fn close_page(out: &mut String, data: &serde_json::Value, scripts: &[&str]) {
    out.push_str("</main>\n<footer>Written by counterpoint. Counts are rows (tokens); TFLOP/s, GB and MB are decimal; token axes count in 1,024s.</footer>\n");
    out.push_str("<div id=\"tip\" role=\"status\" aria-live=\"polite\" hidden></div>\n");
    let _ = write!(
        out,
        "<script type=\"application/json\" id=\"data\">{}</script>\n<script>\n\"use strict\";\n(() => {{\n{}{}}})();\n</script>\n</body>\n</html>\n",
        script_json(data),
        include_str!("html/chart.js"),
        scripts.concat(),
    );
}

impl HtmlReport<'_> {
    /// The page. A plan for 1M tokens and 64 ranks with both passes makes well under 2 MB. Of more than 64 ranks the
    /// timeline keeps a selection (the slowest, the fastest, an even sample) and says so; everything else has them all.
    pub fn render(&self) -> String {
        let matrix = CommMatrix::forward(self.plan);
        let mut out = open_page(self.title, &self.figures.setup, self.origin);
        figures::limits(&mut out, self.passes().filter_map(|(_, pair)| pair.best()));
        self.cards(&mut out);
        out.push_str("<div class=\"two\">\n");
        self.mask_section(&mut out);
        out.push_str("<div class=\"stack\">\n");
        self.comparison_section(&mut out);
        self.matrix_section(&mut out, &matrix);
        out.push_str("</div>\n</div>\n");
        self.bars_section(&mut out);
        let passes: Vec<_> = self.passes().collect();
        figures::timeline_section(&mut out, &passes);
        self.check_section(&mut out);
        self.ranks_section(&mut out);
        let scripts = [
            include_str!("html/bars.js"),
            include_str!("html/matrix.js"),
            include_str!("html/mask.js"),
            include_str!("html/timeline.js"),
        ];
        close_page(&mut out, &self.data(&matrix), &scripts);
        out
    }

    /// The passes that are there, by name.
    fn passes(&self) -> impl Iterator<Item = (&'static str, TimelinePair<'_>)> {
        [("forward", self.forward), ("backward", self.backward)]
            .into_iter()
            .filter_map(|(name, pair)| pair.filter(|pair| pair.best().is_some()).map(|pair| (name, pair)))
    }

    fn mask_section(&self, out: &mut String) {
        let drawing = MaskDrawing { title: "Attention mask", mask: self.mask, plan: Some(self.plan) };
        let tools = if self.mask.slices().len() <= data::SLICES { MASK_TOOLS } else { "" };
        let _ = write!(
            out,
            "<section class=\"panel\" id=\"mask\"><h2>Mask, chunks coloured by rank</h2>\n\
             <p>A row takes the colour of the rank that owns its queries; the strips name the owners of queries (right) and \
             of keys (top). Point at a pair for its owners.</p>\n\
             {tools}{}{}</div></section>\n",
            chart("mask-chart", "Mask"),
            drawing.render_inline()
        );
    }

    fn matrix_section(&self, out: &mut String, matrix: &CommMatrix) {
        out.push_str("<section class=\"panel\" id=\"matrix\"><h2>Who sends to whom</h2>\n");
        if matrix.entries().is_empty() {
            out.push_str("<p class=\"empty\">Nothing is exchanged: every rank owns all keys that it needs.</p></section>\n");
            return;
        }
        out.push_str(
            "<p>Key rows of the forward, from the owner (row) to the receiver (column). The backward fetches the same rows \
             and returns as many partial gradients.</p>\n",
        );
        if self.figures.kv_row_bytes.is_some() {
            out.push_str(
                "<div class=\"tools\" role=\"group\" aria-label=\"Unit of the matrix\">\
                 <button type=\"button\" id=\"matrix-rows\" aria-pressed=\"true\">rows</button>\
                 <button type=\"button\" id=\"matrix-bytes\" aria-pressed=\"false\">bytes</button></div>\n",
            );
        }
        let _ = writeln!(out, "{}</div></section>", chart("matrix-chart", "Communication matrix"));
    }

    fn bars_section(&self, out: &mut String) {
        for (id, name, note) in [
            ("area", "Area of each rank", "Unmasked pairs that a rank computes; the line is the mean."),
            (
                "recv",
                "Key rows received by each rank",
                "In the forward, over all stages; the line is the mean.",
            ),
        ] {
            let open = if id == "area" { "<div class=\"two even\">\n" } else { "" };
            let close = if id == "recv" { "</div>\n" } else { "" };
            let _ = write!(
                out,
                "{open}<section class=\"panel\"><h2>{name}</h2><p>{note}</p>\
                 {}</div></section>\n{close}",
                chart(&format!("{id}-chart"), name),
            );
        }
    }
}
