//! The JSON inside the report's page that its scripts draw: slices, owners, traffic, spans; bounded for thousands of ranks.

use std::collections::{BTreeMap, BTreeSet};

use counterpoint_mask::Band;
use counterpoint_plan::RankPlan;
use counterpoint_schedule::Timeline;
use serde_json::{Value, json};

use super::HtmlReport;
use crate::{
    matrix::CommMatrix,
    ownership::chunk_owners,
    timelines::{Source, TimelinePair, rank_seconds},
    trace::kind_name,
};

/// Slices that the page holds, to draw a part of the mask closer up; of more there is only the whole picture.
pub(super) const SLICES: usize = 20_000;
/// Cells along an axis of the communication matrix; of more ranks, neighbours share a cell.
const MATRIX_CELLS: usize = 64;
/// Ranks whose spans the page holds; of more, a selection.
const TIMELINE_RANKS: usize = 64;
/// The slowest and the fastest ranks that a selection is sure to hold, of each.
const EXTREME_RANKS: usize = 16;

impl HtmlReport<'_> {
    /// What the page's scripts draw.
    pub(super) fn data(&self, matrix: &CommMatrix) -> Value {
        let plan = self.plan;
        let group = plan.ranks.len().div_ceil(MATRIX_CELLS).max(1);
        let owners = |dispatch: &counterpoint_plan::Dispatch| json!({"rows": dispatch.seqlen(), "chunk": dispatch.chunk_size(), "owner": chunk_owners(dispatch)});
        json!({
            "q": owners(&plan.q_dispatch),
            "k": owners(&plan.k_dispatch),
            "slices": self.slices(),
            "area": plan.ranks.iter().map(|rank| rank.area).collect::<Vec<_>>(),
            "recv": plan.ranks.iter().map(RankPlan::recv_rows).collect::<Vec<_>>(),
            "rowBytes": self.figures.kv_row_bytes,
            "matrix": {"group": group, "entries": matrix.grouped(group).entries()},
            "passes": self.passes().map(|(name, pair)| pass(name, &pair)).collect::<Vec<_>>(),
        })
    }
}

impl HtmlReport<'_> {
    /// `[first query, end, first key, end, least diagonal, largest diagonal]` of each slice, `null` without a bound.
    fn slices(&self) -> Option<Vec<Value>> {
        let bound = |diagonal: i64, none: i64| (diagonal != none).then_some(diagonal);
        let slice = |band: Band| {
            let (q, k) = (band.q_range, band.k_range);
            let (low, high) = (bound(band.diag_min, Band::NO_MIN), bound(band.diag_max, Band::NO_MAX));
            json!([q.start, q.end, k.start, k.end, low, high])
        };
        (self.mask.slices().len() <= SLICES).then(|| self.mask.bands().map(slice).collect())
    }
}

/// A pass of the timeline.
pub(super) fn pass(name: &str, pair: &TimelinePair<'_>) -> Value {
    let ranks = selected_ranks(pair);
    let sources: BTreeMap<&str, Value> =
        pair.sources().map(|(source, timeline)| (source.name(), spans(timeline, &ranks))).collect();
    let mut streams: Vec<&str> = Vec::new();
    for stream in pair.sources().flat_map(|(_, timeline)| &timeline.streams) {
        if !streams.contains(&stream.as_str()) {
            streams.push(stream);
        }
    }
    let world_size = pair.best().map_or(0, |timeline| timeline.world_size);
    json!({
        "name": name,
        "streams": streams,
        "worldSize": world_size,
        "ranks": ranks,
        "sources": sources,
        "order": Source::ALL.map(Source::name),
    })
}

/// Times in whole nanoseconds, labels once each: `[rank, stream, label, kind, stage or -1, start, duration]`.
fn spans(timeline: &Timeline, ranks: &BTreeSet<usize>) -> Value {
    let seconds = rank_seconds(timeline);
    let mut labels: Vec<&str> = Vec::new();
    let mut index = BTreeMap::new();
    let mut rows = Vec::new();
    for span in timeline.spans.iter().filter(|span| ranks.contains(&span.rank)) {
        let label = *index.entry(span.label.as_str()).or_insert_with(|| {
            labels.push(&span.label);
            labels.len() - 1
        });
        let (start, end) = ((span.start * 1e9).round() as i64, (span.end * 1e9).round() as i64);
        rows.push(json!([
            span.rank,
            span.stream,
            label,
            kind_name(span.kind),
            span.stage.map_or(-1, |stage| stage as i64),
            start,
            end - start,
        ]));
    }
    json!({
        "streams": timeline.streams,
        "labels": labels,
        "spans": rows,
        "seconds": timeline.makespan(),
        "rankSeconds": ranks.iter().map(|&rank| (rank, seconds.get(rank))).collect::<BTreeMap<_, _>>(),
    })
}

/// All ranks, or of many the slowest, the fastest and an even sample.
fn selected_ranks(pair: &TimelinePair<'_>) -> BTreeSet<usize> {
    let Some(timeline) = pair.best() else { return BTreeSet::new() };
    let world_size = timeline.world_size;
    if world_size <= TIMELINE_RANKS {
        return (0..world_size).collect();
    }
    let seconds = rank_seconds(timeline);
    let mut by_time: Vec<usize> = (0..world_size).collect();
    by_time.sort_by(|&a, &b| seconds[b].total_cmp(&seconds[a]).then(a.cmp(&b)));
    let mut out: BTreeSet<usize> = by_time[..EXTREME_RANKS].iter().copied().collect();
    out.extend(&by_time[world_size - EXTREME_RANKS..]);
    let sample = TIMELINE_RANKS - 2 * EXTREME_RANKS;
    out.extend((0..sample).map(|index| index * world_size / sample));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use counterpoint_schedule::{Span, SpanKind};

    #[test]
    fn a_selection_holds_the_slowest_and_the_fastest() {
        let world_size = 4096;
        let span = |rank: usize| Span {
            rank,
            stream: 0,
            label: "attention".into(),
            kind: SpanKind::Compute,
            stage: Some(0),
            start: 0.0,
            end: ((rank * 2741) % world_size + 1) as f64,
        };
        let timeline = Timeline {
            name: "forward".into(),
            world_size,
            streams: vec!["compute".into()],
            spans: (0..world_size).map(span).collect(),
        };
        let pair = TimelinePair { predicted: Some(&timeline), measured: None };
        let ranks = selected_ranks(&pair);
        assert!(ranks.len() <= TIMELINE_RANKS && ranks.len() > 2 * EXTREME_RANKS);
        for extreme in [1.0, 2.0, 16.0, 4081.0, 4096.0] {
            let rank = timeline.spans.iter().find(|span| span.end == extreme).unwrap().rank;
            assert!(ranks.contains(&rank), "the rank that takes {extreme} s is missing");
        }
        let kept = spans(&timeline, &ranks);
        assert_eq!(kept["spans"].as_array().unwrap().len(), ranks.len());
        assert_eq!(kept["seconds"], 4096.0);
    }
}
