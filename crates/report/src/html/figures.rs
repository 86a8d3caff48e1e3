//! The sections of the report's page but the ranks': headline figures, traffic compared with ring and all-gather, errors, timelines.

use std::fmt::Write;

use counterpoint_plan::RankPlan;
use counterpoint_schedule::Timeline;

use super::{HtmlReport, escape};
use crate::{
    TimelinePair,
    limits::Limits,
    quantity::{
        format_bytes, format_count, format_counted, format_flops, format_ratio, format_seconds, three_digits,
    },
    svg::percent,
};

/// A headline figure: what, how much, and what it means.
fn card(out: &mut String, name: &str, value: &str, note: &str) {
    let _ = write!(
        out,
        "<div class=\"card\"><dt>{}</dt><dd>{}</dd><dd class=\"note\">{}</dd></div>",
        escape(name),
        escape(value),
        escape(note)
    );
}

/// What limits the passes, in a sentence.
pub(super) fn limits<'a>(out: &mut String, timelines: impl Iterator<Item = &'a Timeline>) {
    if let Some(sentence) = Limits::of_all(timelines).sentence() {
        let _ = writeln!(out, "<p class=\"limits\">{}</p>", escape(&sentence));
    }
}

/// Timelines that are drawn side by side, at most.
const MOST_BARS: usize = 64;

/// Where the time of each timeline goes, side by side with those of the same pass: what comes before the first comma of its name.
pub(super) fn side_by_side(out: &mut String, timelines: &[(String, &Timeline)]) {
    if !(2..=MOST_BARS).contains(&timelines.len()) {
        return;
    }
    out.push_str(
        "<section class=\"panel\" id=\"policies\"><h2>Side by side</h2>\n\
         <p>Where the time goes until the last rank is done; bars of one pass are on one scale.</p>\n\
         <ul class=\"legend\"><li><i class=\"compute\"></i>computation</li><li><i class=\"imbalance\"></i>imbalance</li>\
         <li><i class=\"communication\"></i>exposed communication</li><li><i class=\"wait\"></i>waiting</li></ul>\n\
         <table class=\"compare bars\"><tbody>",
    );
    let pass_of = |name: &str| name.split(", ").next().unwrap_or_default().to_owned();
    let mut passes: Vec<String> = Vec::new();
    for (name, _) in timelines {
        if !passes.contains(&pass_of(name)) {
            passes.push(pass_of(name));
        }
    }
    for pass in passes {
        let of_pass: Vec<(&str, Limits)> = timelines
            .iter()
            .filter(|(name, _)| pass_of(name) == pass)
            .map(|(name, timeline)| (name.as_str(), Limits::of(timeline)))
            .collect();
        let longest = of_pass.iter().map(|(_, limits)| limits.seconds()).fold(0.0, f64::max);
        for (name, limits) in of_pass {
            let _ = write!(out, "<tr><th scope=\"row\">{}</th><td class=\"track\">", escape(name));
            for (class, part, seconds) in limits.parts() {
                let width = if longest > 0.0 { 100.0 * seconds / longest } else { 0.0 };
                if width > 0.0 {
                    let title = format!("{part} {}", format_seconds(seconds));
                    let _ = write!(
                        out,
                        "<i class=\"{class}\" style=\"width:{width:.2}%\" title=\"{title}\"></i>"
                    );
                }
            }
            let _ = write!(out, "</td><td>{}</td></tr>", format_seconds(limits.seconds()));
        }
    }
    out.push_str("</tbody></table></section>\n");
}

/// Three digits and a word: `5.24 billion`.
fn large(value: u64) -> String {
    let units = [(1e15, "quadrillion"), (1e12, "trillion"), (1e9, "billion"), (1e6, "million")];
    match units.iter().find(|(factor, _)| value as f64 >= *factor) {
        Some((factor, name)) => format!("{} {name}", three_digits(value as f64 / factor)),
        None => format_count(value),
    }
}

impl HtmlReport<'_> {
    pub(super) fn cards(&self, out: &mut String) {
        out.push_str("<dl class=\"cards\">");
        self.mask_cards(out);
        self.traffic_card(out);
        self.run_cards(out);
        out.push_str("</dl>\n");
    }

    /// What is computed, by how many ranks, and how evenly.
    fn mask_cards(&self, out: &mut String) {
        let (mask, plan, figures) = (self.mask, self.plan, &self.figures);
        let (sq, sk, area) = (mask.seqlen_q() as u64, mask.seqlen_k() as u64, mask.area());
        let slices = format_counted(mask.slices().len(), "slice");
        if plan.q_dispatch == plan.k_dispatch {
            card(out, "Tokens", &format_count(sq), &slices);
        } else {
            card(out, "Queries × keys", &format!("{} × {}", format_count(sq), format_count(sk)), &slices);
        }
        let density = percent(area as f64 / (sq as f64 * sk as f64).max(1.0));
        card(out, "Area", &large(area), &format!("unmasked pairs, {density} of all"));
        let chunks = format!(
            "{} of {}",
            format_counted(plan.q_dispatch.num_chunks(), "chunk"),
            format_count(plan.q_dispatch.chunk_size() as u64)
        );
        let planned =
            figures.plan_seconds.map_or(String::new(), |s| format!(", planned in {}", format_seconds(s)));
        card(out, "Ranks", &format_count(plan.ranks.len() as u64), &format!("{chunks}{planned}"));

        card(out, "Balance", &format!("{:.3}", plan.balance()), "largest area over mean; 1 is perfect");
    }

    fn traffic_card(&self, out: &mut String) {
        let (plan, figures) = (self.plan, &self.figures);
        let ranks = plan.ranks.len().max(1) as f64;
        let rows = plan.ranks.iter().map(RankPlan::recv_rows).sum::<u64>() as f64 / ranks;
        let bytes = figures
            .kv_row_bytes
            .map_or(String::new(), |b| format!(", {}", format_bytes((rows * b as f64) as u64)));
        let against = match figures.comm {
            Some(comm) if comm.recv_tokens > 0 && comm.all_gather_tokens > 0 => {
                format!(
                    "; all-gather: {}",
                    format_ratio(comm.all_gather_tokens as f64 / comm.recv_tokens as f64)
                )
            }
            _ => String::new(),
        };
        card(
            out,
            "Key rows received",
            &format_count(rows.round() as u64),
            &format!("mean of a rank{bytes}{against}"),
        );
    }

    /// How long the passes take, what is hidden, and whether the results are right.
    fn run_cards(&self, out: &mut String) {
        let (figures, ranks) = (&self.figures, self.plan.ranks.len().max(1) as f64);
        for (name, pair) in self.passes() {
            let title = if name == "forward" { "Forward" } else { "Backward" };
            let flops = if name == "forward" { figures.forward_flops } else { figures.backward_flops };
            match (pair.measured.map(Timeline::makespan), pair.predicted.map(Timeline::makespan)) {
                (Some(measured), predicted) => {
                    let rate = flops.filter(|_| measured > 0.0).map(|f| format_flops(f / measured / ranks));
                    let predicted = predicted.map(|seconds| format!("predicted {}", format_seconds(seconds)));
                    let notes: Vec<String> =
                        predicted.into_iter().chain(rate.map(|r| format!("{r} a rank"))).collect();
                    card(out, title, &format_seconds(measured), &notes.join("; "));
                }
                (None, Some(predicted)) => card(out, title, &format_seconds(predicted), "predicted, not run"),
                (None, None) => {}
            }
        }
        let efficiencies: Vec<(&str, f64)> = self
            .passes()
            .filter_map(|(name, pair)| pair.best().and_then(|t| t.overlap().efficiency).map(|e| (name, e)))
            .collect();
        if let Some(&(_, first)) = efficiencies.first() {
            let value = |e: f64| format!("{:.0} %", e * 100.0);
            let note = match efficiencies.get(1) {
                Some(&(name, second)) => {
                    format!("of the forward's hideable communication; {name} {}", value(second))
                }
                None => "of the hideable communication ran under computation".to_owned(),
            };
            card(out, "Overlap", &value(first), &note);
        }
        if let Some(check) = self.check {
            let class = if check.passed() { "good" } else { "bad" };
            let (verdict, note) = if check.passed() {
                ("✓ passed", "every tensor is within its bound")
            } else {
                ("✗ failed", "errors above their bounds, see below")
            };
            let _ = write!(
                out,
                "<div class=\"card {class}\"><dt>Check</dt><dd>{verdict}</dd><dd class=\"note\">{note}</dd></div>"
            );
        }
    }

    /// Rows received against bound, ring and all-gather, as bars on one scale.
    pub(super) fn comparison_section(&self, out: &mut String) {
        let Some(comm) = self.figures.comm else { return };
        let total = self.plan.ranks.iter().map(RankPlan::recv_rows).sum::<u64>();
        let rows = [
            ("lower bound", comm.lower_bound_tokens),
            ("this plan", comm.recv_tokens),
            ("ring", comm.ring_tokens),
            ("all-gather", comm.all_gather_tokens),
        ];
        let longest = rows.iter().map(|row| row.1).max().unwrap_or(0) as f64;
        if longest == 0.0 {
            // One rank: there is nothing to compare.
            return;
        }
        let ranks = self.plan.ranks.len().max(1) as f64;
        out.push_str(
            "<section class=\"panel\"><h2>Key rows received, compared</h2><table class=\"compare\">\
             <thead><tr><th scope=\"col\">mean of a rank</th><td></td><th scope=\"col\">rows</th>\
             <th scope=\"col\">to this plan</th></tr></thead><tbody>",
        );
        for (name, rows) in rows {
            let ratio = if comm.recv_tokens > 0 { rows as f64 / comm.recv_tokens as f64 } else { f64::NAN };
            let class = if name == "this plan" { " class=\"own\"" } else { "" };
            let _ = write!(
                out,
                "<tr{class}><th scope=\"row\">{name}</th><td class=\"track\"><i style=\"width:{:.2}%\"></i></td>\
                 <td>{}</td><td>{}</td></tr>",
                rows as f64 / longest * 100.0,
                format_count((rows as f64 / ranks).round() as u64),
                format_ratio(ratio),
            );
        }
        out.push_str("</tbody></table>");
        // Two sources for one number must not drift apart unseen.
        if total != comm.recv_tokens {
            let _ = write!(
                out,
                "<p class=\"note\">The exchange moves {} rows in all, {} were stated.</p>",
                format_count(total),
                format_count(comm.recv_tokens)
            );
        }
        out.push_str("</section>\n");
    }

    pub(super) fn check_section(&self, out: &mut String) {
        let Some(check) = self.check else { return };
        out.push_str(
            "<section class=\"panel\" id=\"check\"><h2>Check against the dense f64 reference</h2>\n\
             <div class=\"scroll\"><table class=\"figures\"><thead><tr><th scope=\"col\">tensor</th>\
             <th scope=\"col\">measure</th><th scope=\"col\">error</th><th scope=\"col\">bound</th><th scope=\"col\"></th>\
             </tr></thead><tbody>",
        );
        for row in &check.rows {
            let (class, verdict) =
                if row.verified.passed() { ("good", "✓ within") } else { ("bad", "✗ above") };
            let _ = write!(
                out,
                "<tr><th scope=\"row\">{}</th><td>{}</td><td>{:.2e}</td><td>{:.2e}</td><td class=\"{class}\">{verdict}</td></tr>",
                escape(&row.tensor),
                escape(&row.measure),
                row.verified.error,
                row.verified.bound,
            );
        }
        out.push_str("</tbody></table></div></section>\n");
    }
}

/// Passes are chosen by buttons up to so many. From more of them one is picked, and the table shows its figures alone.
const MOST_BUTTONS: usize = 4;

pub(super) fn timeline_section(out: &mut String, passes: &[(&str, TimelinePair<'_>)]) {
    if passes.is_empty() {
        return;
    }
    out.push_str("<section class=\"panel\" id=\"timeline\"><h2>Timeline</h2>\n<div class=\"tools\">");
    let group = |out: &mut String, label: &str, key: &str, names: &[&str]| {
        let _ = write!(out, "<div role=\"group\" aria-label=\"{label}\">");
        for (index, name) in names.iter().enumerate() {
            let name = escape(name);
            let _ = write!(
                out,
                "<button type=\"button\" data-{key}=\"{name}\" aria-pressed=\"{}\">{name}</button>",
                index == 0
            );
        }
        out.push_str("</div>");
    };
    if passes.len() <= MOST_BUTTONS {
        group(out, "Pass", "pass", &passes.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    } else {
        out.push_str("<select aria-label=\"Pass\">");
        passes.iter().for_each(|(name, _)| {
            let _ = write!(out, "<option>{}</option>", escape(name));
        });
        out.push_str("</select>");
    }
    if passes.iter().any(|(_, pair)| pair.measured.is_some() && pair.predicted.is_some()) {
        group(out, "Source", "source", &["both", "measured", "predicted"]);
    }
    group(out, "Order of ranks", "order", &["by rank", "slowest first"]);
    out.push_str(
            "<div role=\"group\" aria-label=\"Ranks shown\" id=\"timeline-pages\">\
             <button type=\"button\" data-page=\"-1\" aria-label=\"Ranks before\">‹</button><output></output>\
             <button type=\"button\" data-page=\"1\" aria-label=\"Ranks after\">›</button></div>\
             <div role=\"group\" aria-label=\"Zoom\"><button type=\"button\" data-zoom=\"out\" aria-label=\"Zoom out\">−</button>\
             <button type=\"button\" data-zoom=\"in\" aria-label=\"Zoom in\">+</button>\
             <button type=\"button\" data-zoom=\"all\">all</button></div></div>\n\
             <ul class=\"legend\"><li><i class=\"compute\"></i>computation</li>\
             <li><i class=\"communication\"></i>communication</li><li><i class=\"wait\"></i>waiting</li>",
        );
    if passes.iter().any(|(_, pair)| pair.measured.is_some() && pair.predicted.is_some()) {
        out.push_str("<li><i class=\"compute predicted\"></i>predicted (outlined)</li>");
    }
    out.push_str(
            "<li class=\"hint\">Drag to move; Ctrl and wheel to zoom; with the keyboard: arrows, +, −, 0.</li></ul>\n\
",
        );
    let _ = writeln!(out, "{}</div>", super::chart("timeline-chart", "Timeline"));
    pass_table(out, passes);
    out.push_str("</section>\n");
}

fn pass_table(out: &mut String, passes: &[(&str, TimelinePair<'_>)]) {
    out.push_str(
            "<div class=\"scroll\"><table class=\"figures\"><thead><tr><th scope=\"col\">pass</th><th scope=\"col\">total</th>\
             <th scope=\"col\">computation</th><th scope=\"col\">communication</th><th scope=\"col\">exposed</th>\
             <th scope=\"col\">overlap efficiency</th></tr></thead><tbody>",
        );
    for (name, pair) in passes {
        let name = escape(name);
        let of = if passes.len() > MOST_BUTTONS { format!(" data-of=\"{name}\"") } else { String::new() };
        for (source, timeline) in pair.sources() {
            let overlap = timeline.overlap();
            let _ = write!(
                out,
                "<tr{of}><th scope=\"row\">{name}, {}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                source.name(),
                format_seconds(timeline.makespan()),
                format_seconds(overlap.compute_seconds),
                format_seconds(overlap.communication_seconds),
                format_seconds(overlap.exposed_seconds),
                overlap.efficiency.map_or_else(|| "–".to_owned(), |e| format!("{e:.3}")),
            );
        }
    }
    out.push_str(
            "</tbody></table></div>\n<p class=\"note\">Total: until the last rank is done. The rest: seconds of a rank, mean of \
             all ranks. Exposed: communication with no concurrent computation.</p>\n",
        );
}
