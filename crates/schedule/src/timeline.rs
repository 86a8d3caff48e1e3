//! Timelines of runs, and how much of their communication ran under computation.

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

/// How much of the communication ran under computation, in seconds of a rank, averaged over the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overlap {
    /// Time in which any communication was under way.
    pub communication_seconds: f64,
    /// Time in which any computation was under way.
    pub compute_seconds: f64,
    /// Communication with no concurrent computation of the same rank.
    pub exposed_seconds: f64,
    /// Of that, what comes behind the last computation of the rank while that of the slowest rank still lasts: no overlap hides that others
    /// have less to do or are faster.
    pub imbalance_seconds: f64,
    /// Hidden over hideable: `(communication - exposed) / min(communication, compute)`, over all ranks. `None` without
    /// communication.
    pub efficiency: Option<f64>,
}

impl Timeline {
    /// End of the last span, in seconds.
    pub fn makespan(&self) -> f64 {
        self.spans.iter().map(|span| span.end).fold(0.0, f64::max)
    }

    /// Seconds from the start of the first operation, waits apart, to the end of the last.
    pub fn duration(&self) -> f64 {
        let work = self.spans.iter().filter(|span| span.kind != SpanKind::Wait);
        let (start, end) = work
            .fold((f64::INFINITY, 0.0f64), |(start, end), span| (start.min(span.start), end.max(span.end)));
        (end - start).max(0.0)
    }

    /// Goes on with what the first rank of `next` does: from the end of this one, on streams of the same names. For a rank that
    /// stands for all.
    pub fn append(&mut self, next: &Timeline) {
        let offset = self.makespan();
        let stream_of = |stream: usize| {
            let name = &next.streams[stream];
            self.streams.iter().position(|known| known == name).unwrap_or_else(|| {
                self.streams.push(name.clone());
                self.streams.len() - 1
            })
        };
        let streams: Vec<usize> = (0..next.streams.len()).map(stream_of).collect();
        self.world_size = self.world_size.max(1);
        self.spans.extend(next.spans.iter().filter(|span| span.rank == 0).map(|span| Span {
            stream: streams[span.stream],
            start: span.start + offset,
            end: span.end + offset,
            ..span.clone()
        }));
    }

    /// How much of the communication ran under computation.
    pub fn overlap(&self) -> Overlap {
        let mut by_rank = vec![(Vec::new(), Vec::new()); self.world_size];
        for span in &self.spans {
            let (communication, compute) = &mut by_rank[span.rank];
            match span.kind {
                SpanKind::Communication => communication.push((span.start, span.end)),
                SpanKind::Compute => compute.push((span.start, span.end)),
                SpanKind::Wait => {}
            }
        }
        let by_rank: Vec<_> = by_rank
            .into_iter()
            .map(|(moving, computing)| (merged_intervals(moving), merged_intervals(computing)))
            .collect();
        let end_of = |computing: &[Interval]| computing.last().map_or(0.0, |last| last.1);
        let last_end = by_rank.iter().map(|(_, computing)| end_of(computing)).fold(0.0, f64::max);
        let (mut communication, mut compute, mut exposed, mut hideable) = (0.0, 0.0, 0.0, 0.0);
        let mut imbalance = 0.0;
        for (moving, computing) in by_rank {
            let (moved, computed) = (interval_length(&moving), interval_length(&computing));
            let hidden = common_length(&moving, &computing);
            communication += moved;
            compute += computed;
            exposed += moved - hidden;
            imbalance += common_length(&moving, &[(end_of(&computing), last_end)]);
            hideable += moved.min(computed);
        }
        let ranks = self.world_size.max(1) as f64;
        Overlap {
            communication_seconds: communication / ranks,
            compute_seconds: compute / ranks,
            exposed_seconds: exposed / ranks,
            imbalance_seconds: imbalance / ranks,
            efficiency: (hideable > 0.0).then(|| (communication - exposed) / hideable),
        }
    }
}

/// A time span: begin and end, in seconds.
pub type Interval = (f64, f64);

/// Disjoint ascending intervals with the same points.
pub fn merged_intervals(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out: Vec<Interval> = Vec::new();
    for (start, end) in intervals {
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

/// Seconds of disjoint intervals.
pub fn interval_length(intervals: &[Interval]) -> f64 {
    intervals.iter().map(|(start, end)| end - start).sum()
}

/// Length of the intersection of two lists of disjoint ascending intervals.
fn common_length(a: &[Interval], b: &[Interval]) -> f64 {
    let (mut i, mut j, mut total) = (0, 0, 0.0);
    while i < a.len() && j < b.len() {
        total += (a[i].1.min(b[j].1) - a[i].0.max(b[j].0)).max(0.0);
        if a[i].1 <= b[j].1 {
            i += 1;
        } else {
            j += 1;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(rank: usize, kind: SpanKind, start: f64, end: f64) -> Span {
        Span { rank, stream: 0, label: String::new(), kind, stage: None, start, end }
    }

    fn timeline(world_size: usize, spans: Vec<Span>) -> Timeline {
        Timeline { name: "test".into(), world_size, streams: vec!["compute".into()], spans }
    }

    #[test]
    fn hidden_and_exposed() {
        use SpanKind::{Communication, Compute, Wait};
        let t = timeline(
            2,
            vec![
                span(0, Compute, 0.0, 4.0),
                span(0, Communication, 1.0, 3.0),
                span(0, Communication, 2.0, 6.0), // two streams at once count once
                span(0, Wait, 4.0, 6.0),
                span(1, Compute, 0.0, 1.0),
                span(1, Communication, 1.0, 2.0),
            ],
        );
        let o = t.overlap();
        assert_eq!(t.makespan(), 6.0);
        assert_eq!(o.communication_seconds, 3.0); // (5 + 1) / 2
        assert_eq!(o.compute_seconds, 2.5); // (4 + 1) / 2
        assert_eq!(o.exposed_seconds, 1.5); // (2 + 1) / 2
        assert_eq!(o.imbalance_seconds, 0.5); // (0 + 1) / 2: rank 0 computes until 4
        assert_eq!(o.efficiency, Some(3.0 / 5.0)); // hidden 3 + 0, hideable 4 + 1
    }

    #[test]
    fn timelines_one_after_the_other() {
        let mut both = timeline(1, vec![span(0, SpanKind::Compute, 0.0, 2.0)]);
        let next = Timeline {
            streams: vec!["link".into(), "compute".into()],
            ..timeline(1, vec![span(0, SpanKind::Communication, 1.0, 2.0)])
        };
        both.append(&next);
        assert_eq!(both.streams, ["compute", "link"]);
        assert_eq!((both.spans[1].stream, both.spans[1].start, both.makespan()), (1, 3.0, 4.0));
    }

    #[test]
    fn nothing_to_hide() {
        let t = timeline(1, vec![span(0, SpanKind::Compute, 0.0, 1.0)]);
        assert_eq!(t.overlap().efficiency, None);
        assert_eq!(Timeline::default().makespan(), 0.0);
    }
}
