use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

/// What a span's time went into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// Computation.
    Compute,
    /// Communication.
    Communication,
    /// A stream waiting for an event, a barrier or a signal.
    Wait,
}

/// One operation's time on one stream of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// Index into [`Timeline::streams`].
    pub stream: usize,
    /// The operation's label.
    pub label: String,
    /// What the time went into.
    pub kind: SpanKind,
    /// The stage.
    pub stage: Option<usize>,
    /// Start in seconds since the run began.
    pub start: f64,
    /// End in seconds since the run began.
    pub end: f64,
}

/// When everything happened: predicted by the simulator or measured by the interpreter, one type for both.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Such as `attention forward`.
    pub name: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Names of the streams, the same on every rank.
    pub streams: Vec<String>,
    /// Spans, by rank, then stream, then start.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// End of the last span, in seconds.
    pub fn makespan(&self) -> f64 {
        self.spans.iter().map(|span| span.end).fold(0.0, f64::max)
    }
}

// Keeps the import until overlap accounting lands here.
#[allow(dead_code)]
type _Placeholder = Range;
