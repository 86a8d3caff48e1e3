//! The table of ranks in the report's page.

use std::fmt::Write;

use super::HtmlReport;
use crate::{
    palette::color_of,
    quantity::{format_count, format_seconds},
    table::chunk_list,
    timelines::rank_seconds,
};

/// Runs of chunks that a row of the table names.
const CHUNK_RUNS: usize = 6;

impl HtmlReport<'_> {
    /// Every rank in words and numbers: what the charts show, for those who do not see them.
    pub(super) fn ranks_section(&self, out: &mut String) {
        let passes: Vec<(&str, Vec<f64>)> = self
            .passes()
            .flat_map(|(name, pair)| pair.sources().map(move |(source, t)| (name, source, t)))
            .map(|(name, source, timeline)| {
                let title = match (name, source.name()) {
                    ("forward", "measured") => "forward",
                    ("forward", _) => "forward, predicted",
                    (_, "measured") => "backward",
                    _ => "backward, predicted",
                };
                (title, rank_seconds(timeline))
            })
            .collect();
        let open = if self.plan.ranks.len() <= 16 { " open" } else { "" };
        let _ = write!(
            out,
            "<section class=\"panel\" id=\"ranks\"><details{open}><summary><h2>Every rank in numbers</h2></summary>\n\
             <div class=\"scroll tall\" tabindex=\"0\" role=\"region\" aria-label=\"Every rank in numbers\"><table class=\"figures\">\
             <thead><tr><th scope=\"col\">rank</th><th scope=\"col\">queries</th><th scope=\"col\">area</th>\
             <th scope=\"col\">/ mean</th><th scope=\"col\">key rows received</th><th scope=\"col\">sent</th>\
             <th scope=\"col\">stages</th>"
        );
        for (title, _) in &passes {
            let _ = write!(out, "<th scope=\"col\">{title}</th>");
        }
        out.push_str("<th scope=\"col\" class=\"text\">chunks</th></tr></thead><tbody>\n");
        let mean = self.mask.area() as f64 / self.plan.ranks.len().max(1) as f64;
        for (rank, part) in self.plan.ranks.iter().enumerate() {
            let _ = write!(
                out,
                "<tr><th scope=\"row\"><i style=\"background:var(--rank-{})\"></i>{rank}</th><td>{}</td><td>{}</td>\
                 <td>{:.3}</td><td>{}</td><td>{}</td><td>{}</td>",
                color_of(rank),
                format_count(part.q_rows as u64),
                format_count(part.area),
                if mean > 0.0 { part.area as f64 / mean } else { 1.0 },
                format_count(part.recv_rows()),
                format_count(part.send_rows()),
                part.forward.len(),
            );
            for (_, seconds) in &passes {
                let _ = write!(
                    out,
                    "<td>{}</td>",
                    seconds.get(rank).map_or(String::new(), |&s| format_seconds(s))
                );
            }
            let _ = writeln!(
                out,
                "<td class=\"text\">{}</td></tr>",
                chunk_list(self.plan.q_dispatch.chunks(rank), CHUNK_RUNS)
            );
        }
        out.push_str("</tbody></table></div></details></section>\n");
    }
}
