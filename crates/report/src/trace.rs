use counterpoint_schedule::SpanKind;
use serde_json::{Value, json};

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

    let mut events: Vec<Value> = Vec::new();
    let metadata = |name: &str, rank: usize, tid: usize, args: Value| json!({"ph": "M", "name": name, "pid": rank, "tid": tid, "ts": 0, "args": args});
    for rank in 0..world_size {
        events.push(metadata("process_name", rank, 0, json!({"name": format!("rank {rank}")})));
        events.push(metadata("process_sort_index", rank, 0, json!({"sort_index": rank})));
        for (index, stream) in streams.iter().enumerate() {
            for source in Source::ALL {
                if used[source as usize] {
                    let tid = track(index, source);
                    let name = format!("{stream} ({})", source.name());
                    events.push(metadata("thread_name", rank, tid, json!({"name": name})));
                    events.push(metadata("thread_sort_index", rank, tid, json!({"sort_index": tid})));
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
                events.push(json!({
                    "ph": "X",
                    "name": name,
                    "cat": format!("{},{kind},{}", section.name, source.name()),
                    "pid": span.rank,
                    "tid": track(stream, source),
                    "ts": (offset + start) as f64 / 1e3,
                    "dur": (end - start) as f64 / 1e3,
                    "args": {
                        "section": section.name,
                        "label": span.label,
                        "kind": kind,
                        "stage": span.stage,
                        "source": source.name(),
                    },
                }));
            }
        }
        offset += length;
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string()
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
