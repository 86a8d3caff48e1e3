//! Timelines for Perfetto and `chrome://tracing`.

use counterpoint_schedule::SpanKind;
use serde::Serialize;

use crate::timelines::{Source, TimelinePair};

/// A named part of a trace.
#[derive(Clone, Copy, Debug)]
pub struct TraceSection<'a> {
    /// Such as `forward`; slices carry it as a category.
    pub name: &'a str,
    /// What happened in it.
    pub timelines: TimelinePair<'a>,
}

/// A trace in Chrome's JSON format ("Trace Event Format", 2016), which Perfetto and `chrome://tracing` open.
///
/// One process a rank. A stream has one track for what was measured and below it one for what was predicted. Sections
/// follow each other: each starts where the longer timeline of the one before ends. Times are in microseconds, rounded
/// to nanoseconds.
pub fn chrome_trace(sections: &[TraceSection<'_>]) -> String {
    let timelines = || sections.iter().flat_map(|section| section.timelines.sources());

    let mut streams: Vec<&str> = Vec::new();
    let mut used = [false; 2];
    let mut world_size = 0;
    for (source, timeline) in timelines() {
        world_size = world_size.max(timeline.world_size);
        used[source as usize] = true;
        for stream in &timeline.streams {
            if !streams.contains(&stream.as_str()) {
                streams.push(stream);
            }
        }
    }

    let mut events: Vec<Event<'_>> = Vec::new();
    let mut metadata = |rank: usize, tid: usize, of: &str, name: String, sort_index: usize| {
        let event = |suffix: &str, args| {
            Event::Metadata(Metadata { ph: "M", name: format!("{of}_{suffix}"), pid: rank, tid, ts: 0, args })
        };
        events.push(event("name", MetadataArgs::Name { name }));
        events.push(event("sort_index", MetadataArgs::SortIndex { sort_index }));
    };
    for rank in 0..world_size {
        metadata(rank, 0, "process", format!("rank {rank}"), rank);
        for (index, stream) in streams.iter().enumerate() {
            for source in Source::ALL {
                if used[source as usize] {
                    let tid = track(index, source);
                    metadata(rank, tid, "thread", format!("{stream} ({})", source.name()), tid);
                }
            }
        }
    }

    let mut offset = 0;
    for section in sections {
        let mut length = 0;
        for (source, timeline) in section.timelines.sources() {
            for span in &timeline.spans {
                let (start, end) =
                    (nanoseconds(span.start), nanoseconds(span.end).max(nanoseconds(span.start)));
                length = length.max(end);
                let stream =
                    streams.iter().position(|name| *name == timeline.streams[span.stream]).unwrap_or(0);
                let kind = kind_name(span.kind);
                let name = match span.stage {
                    Some(stage) => format!("stage {stage} · {kind} · {}", span.label),
                    None => format!("{kind} · {}", span.label),
                };
                events.push(Event::Slice(Slice {
                    ph: "X",
                    name,
                    cat: format!("{},{kind},{}", section.name, source.name()),
                    pid: span.rank,
                    tid: track(stream, source),
                    ts: (offset + start) as f64 / 1e3,
                    dur: (end - start) as f64 / 1e3,
                    args: SliceArgs {
                        section: section.name,
                        label: &span.label,
                        kind,
                        stage: span.stage,
                        source: source.name(),
                    },
                }));
            }
        }
        offset += length;
    }
    let trace = Trace { display_time_unit: "ms", trace_events: events };
    serde_json::to_string(&trace).expect("strings and numbers always serialise")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    display_time_unit: &'static str,
    trace_events: Vec<Event<'a>>,
}

/// One event, with the field names of the format.
#[derive(Serialize)]
#[serde(untagged)]
enum Event<'a> {
    Metadata(Metadata),
    Slice(Slice<'a>),
}

#[derive(Serialize)]
struct Metadata {
    ph: &'static str,
    name: String,
    pid: usize,
    tid: usize,
    ts: u64,
    args: MetadataArgs,
}

#[derive(Serialize)]
#[serde(untagged)]
enum MetadataArgs {
    Name { name: String },
    SortIndex { sort_index: usize },
}

#[derive(Serialize)]
struct Slice<'a> {
    ph: &'static str,
    name: String,
    cat: String,
    pid: usize,
    tid: usize,
    ts: f64,
    dur: f64,
    args: SliceArgs<'a>,
}

#[derive(Serialize)]
struct SliceArgs<'a> {
    section: &'a str,
    label: &'a str,
    kind: &'static str,
    stage: Option<usize>,
    source: &'static str,
}

/// Track of a stream. From 1: 0 is taken for the idle thread by some viewers.
const fn track(stream: usize, source: Source) -> usize {
    1 + 2 * stream + source as usize
}

// Whole nanoseconds, so that rounding a start and an end apart cannot make neighbouring slices overlap.
fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

pub(crate) const fn kind_name(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Compute => "compute",
        SpanKind::Communication => "communication",
        SpanKind::Wait => "wait",
    }
}
