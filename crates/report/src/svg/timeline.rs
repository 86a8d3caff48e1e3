//! A timeline as a drawing.

use std::collections::BTreeSet;
use std::fmt::Write;

use counterpoint_schedule::{Span, SpanKind, Timeline};

use super::percent;
use crate::{
    escape::escape,
    palette::color_properties,
    quantity::{format_count, format_seconds},
    timelines::rank_seconds,
    trace::kind_name,
};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 176.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 44.0;
const LANE: f64 = 15.0;
const BETWEEN_RANKS: f64 = 7.0;
/// Ranks that are drawn; of more, the slowest and the fastest.
const RANKS: usize = 8;
/// Spans that together are narrower than this, in units of the drawing, are drawn as one bar, in the colour of the longest: a
/// lane stays small however many operations it has.
const APART: f64 = 2.0;

/// A timeline as a picture without scripts, for notebooks: a lane for every stream that a rank uses, time from left to right.
/// What lies under the pointer is named. Operations too near to distinguish are one bar, so a drawing has at most about 1 MB.
#[derive(Clone, Copy, Debug)]
pub struct TimelineDrawing<'a> {
    /// What to draw.
    pub timeline: &'a Timeline,
}

/// Neighbouring spans of one lane.
struct Bar<'a> {
    start: f64,
    end: f64,
    longest: &'a Span,
    count: usize,
}

impl TimelineDrawing<'_> {
    /// A complete SVG file. It follows the reader's light or dark theme.
    pub fn render(&self) -> String {
        let (timeline, scale) = (self.timeline, self.scale());
        let lanes = self.lanes();
        let mut bodies = String::new();
        let (mut y, mut last_rank) = (TOP, None);
        for (rank, stream, bars) in &lanes {
            if last_rank.is_some_and(|last| last != *rank) {
                y += BETWEEN_RANKS;
            }
            if last_rank != Some(*rank) {
                let baseline = y + 11.0;
                let _ = write!(
                    bodies,
                    "<text class=\"timeline-rank\" x=\"10\" y=\"{baseline}\">rank {rank}</text>"
                );
            }
            last_rank = Some(*rank);
            self.lane(&mut bodies, y, stream, bars, scale);
            y += LANE;
        }
        let height = y + 12.0;
        let title = escape(&timeline.name);
        let description = escape(&self.description()).into_owned();
        let style = format!("{}{}", color_properties("svg.timeline"), include_str!("timeline.css"));
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"timeline\" style=\"max-width:{WIDTH}px\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}. {description}\"><title>{title}</title>\
             <desc>{description}</desc><style>{style}</style>\
             <rect class=\"timeline-paper\" width=\"{WIDTH}\" height=\"{height}\"/>\
             <text class=\"timeline-rank\" x=\"10\" y=\"16\">{title}</text>\
             <text x=\"{LEFT}\" y=\"16\">{description}</text>"
        );
        legend(&mut out);
        self.ticks(&mut out, y, scale);
        out.push_str(&bodies);
        out.push_str("</svg>");
        out
    }

    /// Units of the drawing in a second.
    fn scale(&self) -> f64 {
        let seconds = self.timeline.makespan();
        if seconds > 0.0 { (WIDTH - LEFT - RIGHT) / seconds } else { 0.0 }
    }

    /// What the picture says, in a sentence.
    fn description(&self) -> String {
        let timeline = self.timeline;
        let mut out = format_seconds(timeline.makespan());
        if let Some(efficiency) = timeline.overlap().efficiency {
            let _ = write!(out, ", {} of hideable communication hidden", percent(efficiency));
        }
        if timeline.world_size > RANKS {
            let ranks = format_count(timeline.world_size as u64);
            let _ = write!(out, "; {RANKS} of {ranks} ranks, the slowest and the fastest");
        }
        out
    }

    /// Rank, stream and bars of each lane that has any.
    fn lanes(&self) -> Vec<(usize, &str, Vec<Bar<'_>>)> {
        let (ranks, apart) = (self.ranks(), APART / self.scale().max(f64::MIN_POSITIVE));
        let mut lanes: Vec<(usize, usize, Vec<Bar<'_>>)> = Vec::new();
        // By rank, then stream, then start.
        for span in self.timeline.spans.iter().filter(|span| ranks.contains(&span.rank)) {
            if lanes.last().is_none_or(|(rank, stream, _)| (*rank, *stream) != (span.rank, span.stream)) {
                lanes.push((span.rank, span.stream, Vec::new()));
            }
            let Some((_, _, bars)) = lanes.last_mut() else { continue };
            match bars.last_mut() {
                Some(bar) if span.end - bar.start < apart => {
                    bar.end = bar.end.max(span.end);
                    bar.count += 1;
                    if span.end - span.start > bar.longest.end - bar.longest.start {
                        bar.longest = span;
                    }
                }
                _ => bars.push(Bar { start: span.start, end: span.end, longest: span, count: 1 }),
            }
        }
        let named =
            |(rank, stream, bars)| (rank, self.timeline.streams.get(stream).map_or("", String::as_str), bars);
        lanes.into_iter().map(named).collect()
    }

    fn ranks(&self) -> BTreeSet<usize> {
        let seconds = rank_seconds(self.timeline);
        let mut by_time: Vec<usize> = (0..self.timeline.world_size).collect();
        if by_time.len() > RANKS {
            by_time.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]).then(a.cmp(&b)));
            by_time.drain(RANKS / 2..by_time.len() - RANKS / 2);
        }
        by_time.into_iter().collect()
    }

    fn lane(&self, out: &mut String, y: f64, stream: &str, bars: &[Bar<'_>], scale: f64) {
        let (width, baseline, height) = (WIDTH - LEFT - RIGHT, y + 11.0, LANE - 3.0);
        let _ = write!(
            out,
            "<text x=\"62\" y=\"{baseline}\">{}</text>\
             <rect class=\"timeline-lane\" x=\"{LEFT}\" y=\"{}\" width=\"{width}\" height=\"{height}\"/>",
            escape(stream),
            y + 1.0,
        );
        for Bar { start, end, longest, count } in bars {
            let kind = kind_name(longest.kind);
            let what = match count {
                1 => escape(&longest.label).into_owned(),
                _ => format!(
                    "{} operations, the longest {}",
                    format_count(*count as u64),
                    escape(&longest.label)
                ),
            };
            let is_wait = longest.kind == SpanKind::Wait;
            let (inset, bar_height) = if is_wait { (4.0, height - 6.0) } else { (1.0, height) };
            let _ = write!(
                out,
                "<rect class=\"{kind}\" x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"{bar_height}\">\
                 <title>{what}: {} from {}</title></rect>",
                LEFT + start * scale,
                y + inset,
                ((end - start) * scale).max(0.4),
                format_seconds(end - start),
                format_seconds(*start),
            );
        }
    }

    /// Round times above the lanes.
    fn ticks(&self, out: &mut String, bottom: f64, scale: f64) {
        let seconds = self.timeline.makespan();
        if seconds <= 0.0 {
            return;
        }
        let step = round_step(seconds / 8.0);
        let mut tick = 0;
        while f64::from(tick) * step <= seconds {
            let at = f64::from(tick) * step;
            let x = LEFT + at * scale;
            let _ = write!(
                out,
                "<path class=\"timeline-ticks\" d=\"M{x:.1} {}V{bottom}\"/><text class=\"timeline-time\" x=\"{x:.1}\" y=\"{}\">{}</text>",
                TOP - 4.0,
                TOP - 9.0,
                format_seconds(at),
            );
            tick += 1;
        }
    }
}

/// What the colours mean.
fn legend(out: &mut String) {
    let places = [(SpanKind::Compute, 260.0), (SpanKind::Communication, 178.0), (SpanKind::Wait, 62.0)];
    for (kind, from_right) in places {
        let (kind, x) = (kind_name(kind), WIDTH - RIGHT - from_right);
        let _ = write!(
            out,
            "<rect class=\"{kind}\" x=\"{x}\" y=\"8\" width=\"9\" height=\"9\"/><text x=\"{}\" y=\"16\">{kind}</text>",
            x + 13.0
        );
    }
}

/// 1, 2 or 5 times a power of ten, not below `least`.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].map(|digit| digit * power).into_iter().find(|&step| step >= least).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(ranks: usize, spans: usize) -> Timeline {
        let span = |rank: usize, index: usize| Span {
            rank,
            stream: index % 2,
            label: format!("part <{index}>"),
            kind: [SpanKind::Compute, SpanKind::Communication, SpanKind::Wait][index % 3],
            stage: None,
            start: (index / 2) as f64,
            end: (index / 2) as f64 + 0.5 + rank as f64 * 1e-3,
        };
        let mut all: Vec<Span> =
            (0..ranks).flat_map(|rank| (0..spans).map(move |index| span(rank, index))).collect();
        all.sort_by_key(|span| (span.rank, span.stream));
        let streams = vec!["compute".to_owned(), "in & out".to_owned()];
        Timeline { name: "a <pass>".to_owned(), world_size: ranks, streams, spans: all }
    }

    #[test]
    fn every_operation_is_drawn_named_and_inside() {
        let timeline = timeline(2, 6);
        let drawing = TimelineDrawing { timeline: &timeline }.render();
        for rank in 0..2 {
            assert!(drawing.contains(&format!(">rank {rank}</text>")), "{drawing}");
        }
        assert_eq!(drawing.matches("<rect class=\"compute\"").count(), 4 + 1);
        assert_eq!(drawing.matches("<rect class=\"wait\"").count(), 4 + 1);
        assert!(drawing.contains("part &lt;5&gt;: 500 ms from 2.00 s") || drawing.contains("part &lt;5&gt;"));
        assert!(drawing.contains("in &amp; out") && drawing.contains("<title>a &lt;pass&gt;</title>"));
        for part in drawing.split("<rect class=\"").skip(2) {
            let number = |name: &str| -> f64 {
                let from = part.split(&format!(" {name}=\"")).nth(1).unwrap();
                from.split('"').next().unwrap().parse().unwrap()
            };
            if part.starts_with("timeline") {
                continue;
            }
            assert!(number("x") >= LEFT && number("x") + number("width") <= WIDTH - RIGHT + 0.5, "{part}");
        }
    }

    #[test]
    fn long_timelines_and_many_ranks_stay_small() {
        let timeline = timeline(64, 40_000);
        let drawing = TimelineDrawing { timeline: &timeline }.render();
        assert!(drawing.len() < 1_200_000, "{} bytes", drawing.len());
        assert!(drawing.contains("8 of 64 ranks, the slowest and the fastest"));
        for rank in [0, 3, 60, 63] {
            assert!(drawing.contains(&format!(">rank {rank}</text>")), "rank {rank}");
        }
        assert!(!drawing.contains(">rank 30</text>"));
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        let empty = Timeline { name: "nothing".to_owned(), world_size: 2, streams: vec![], spans: vec![] };
        let drawing = TimelineDrawing { timeline: &empty }.render();
        assert!(drawing.contains("0 s") && !drawing.contains("NaN"), "{drawing}");
    }

    #[test]
    fn steps_are_round() {
        for (least, step) in [(0.03, 0.05), (1.0, 1.0), (7e-6, 1e-5), (0.2, 0.2)] {
            assert!((round_step(least) / step - 1.0).abs() < 1e-9, "{least}: {}", round_step(least));
        }
    }
}
