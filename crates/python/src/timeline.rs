//! `counterpoint` timelines, predicted or measured.

use counterpoint_report::{TimelineDrawing, TimelinePair, TraceSection, chrome_trace};
use counterpoint_schedule::{SpanKind, Timeline as Native};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::engine;

/// When everything happened in one pass, in seconds since it began.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Timeline {
    pub(crate) native: Native,
}

/// Rank, stream, label, kind, stage, start, end.
type Span = (usize, String, String, &'static str, Option<usize>, f64, f64);

#[pymethods]
impl Timeline {
    /// Such as "attention forward".
    #[getter]
    fn name(&self) -> &str {
        &self.native.name
    }

    /// Number of ranks.
    #[getter]
    fn ranks(&self) -> usize {
        self.native.world_size
    }

    /// From the start of the first operation to the end of the last.
    #[getter]
    fn seconds(&self) -> f64 {
        self.native.duration()
    }

    /// Operations as (rank, stream, label, kind, stage, start, end); kinds are "compute", "communication" and "wait".
    #[getter]
    fn spans(&self) -> Vec<Span> {
        let kind = |kind| match kind {
            SpanKind::Compute => "compute",
            SpanKind::Communication => "communication",
            SpanKind::Wait => "wait",
        };
        let stream = |index: usize| self.native.streams.get(index).cloned().unwrap_or_default();
        let spans = self.native.spans.iter();
        spans
            .map(|s| (s.rank, stream(s.stream), s.label.clone(), kind(s.kind), s.stage, s.start, s.end))
            .collect()
    }

    /// How much of the communication ran under computation: seconds of a rank, and hidden over hideable as "efficiency".
    #[getter]
    fn overlap<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let overlap = self.native.overlap();
        let figures = PyDict::new(py);
        figures.set_item("communication_seconds", overlap.communication_seconds)?;
        figures.set_item("compute_seconds", overlap.compute_seconds)?;
        figures.set_item("exposed_seconds", overlap.exposed_seconds)?;
        figures.set_item("imbalance_seconds", overlap.imbalance_seconds)?;
        figures.set_item("efficiency", overlap.efficiency)?;
        Ok(figures)
    }

    /// All of it as JSON.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        engine(py, || serde_json::to_string(&self.native))
    }

    /// A trace that Perfetto opens.
    fn chrome_trace(&self) -> String {
        let timelines = TimelinePair { predicted: None, measured: Some(&self.native) };
        chrome_trace(&[TraceSection { name: &self.native.name, timelines }])
    }

    /// A drawing as SVG text: a lane for every stream of a rank.
    fn svg(&self) -> String {
        TimelineDrawing { timeline: &self.native }.render()
    }

    fn _repr_html_(&self) -> String {
        self.svg()
    }

    fn __repr__(&self) -> String {
        let Native { name, world_size, spans, .. } = &self.native;
        format!(
            "Timeline({name}, ranks={world_size}, spans={}, seconds={:.3e})",
            spans.len(),
            self.native.duration()
        )
    }
}
