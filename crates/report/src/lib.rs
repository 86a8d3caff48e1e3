//! What a run shows: tables for a terminal, Chrome traces, SVG and HTML.
//!
//! Everything here turns values of the crates below it into text. Nothing touches the machine.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod escape;
mod html;
mod limits;
mod matrix;
mod ownership;
mod palette;
mod printable;
mod quantity;
mod statistics;
mod svg;
mod table;
mod timelines;
mod trace;

pub use html::{Figures, HtmlReport, Origin, SimulationReport};
pub use printable::{printable, printable_json, printable_lines};
pub use quantity::{
    format_bytes, format_count, format_counted, format_flops, format_gbps, format_ratio, format_seconds,
    format_tokens,
};
pub use statistics::{Statistics, geometric_mean, median};
pub use svg::{MaskDrawing, TimelineDrawing};
pub use table::{
    BenchRow, CheckFigures, CheckRow, Column, ComparisonRow, LiveTable, Rate, Style, Verified, bench_table,
    check_table, comparison_table, fold, plan_table, summary_table, table,
};
pub use timelines::TimelinePair;
pub use trace::{TraceSection, chrome_trace};

#[cfg(test)]
mod tests {
    /// Every script and style is in the file itself, so a source must not smuggle in an address.
    #[test]
    fn page_sources_name_no_address() {
        let sources = [
            include_str!("html/page.css"),
            include_str!("svg/mask.css"),
            include_str!("html/errors.js"),
            include_str!("html/chart.js"),
            include_str!("html/bars.js"),
            include_str!("html/matrix.js"),
            include_str!("html/mask.js"),
            include_str!("html/timeline.js"),
        ];
        for source in sources {
            for address in ["https:", "http:", "@import", "fetch(", "XMLHttpRequest", "import("] {
                assert!(!source.replace("http://www.w3.org/2000/svg", "").contains(address), "{address}");
            }
            assert!(!source.contains("</script") && !source.contains("</style"));
        }
    }
}
