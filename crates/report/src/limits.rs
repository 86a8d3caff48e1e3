//! What limits a run: where the time of its slowest rank goes.

use counterpoint_schedule::{SpanKind, Timeline, interval_length, merged_intervals};

use crate::quantity::format_seconds;

/// Seconds from the start of passes until the last rank is done, in parts that add up to all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Limits {
    /// Computation of a rank, mean of all.
    pub(crate) computation: f64,
    /// What the rank that ends last computes beyond the mean.
    pub(crate) imbalance: f64,
    /// Its communication with no concurrent computation.
    pub(crate) exposed: f64,
    /// What is left: it waits, for other ranks or for launches.
    pub(crate) waiting: f64,
}

impl Limits {
    /// Of a pass; nothing of one without work.
    pub(crate) fn of(timeline: &Timeline) -> Self {
        let makespan = timeline.makespan();
        let of_kind = |rank: usize, kind: SpanKind| {
            let spans = timeline.spans.iter().filter(|span| span.rank == rank && span.kind == kind);
            merged_intervals(spans.map(|span| (span.start, span.end)).collect())
        };
        let computed: Vec<f64> =
            (0..timeline.world_size).map(|rank| interval_length(&of_kind(rank, SpanKind::Compute))).collect();
        let work = timeline.spans.iter().filter(|span| span.kind != SpanKind::Wait);
        let Some(last) = work.max_by(|a, b| a.end.total_cmp(&b.end)) else { return Self::default() };
        let own = computed[last.rank];
        let mean = computed.iter().sum::<f64>() / computed.len() as f64;
        let compute = of_kind(last.rank, SpanKind::Compute);
        let mut busy = compute.clone();
        busy.extend(of_kind(last.rank, SpanKind::Communication));
        let exposed = interval_length(&merged_intervals(busy)) - interval_length(&compute);
        let computation = mean.min(own);
        Self {
            computation,
            imbalance: own - computation,
            exposed,
            waiting: (makespan - own - exposed).max(0.0),
        }
    }

    /// Of passes one after the other.
    pub(crate) fn of_all<'a>(timelines: impl IntoIterator<Item = &'a Timeline>) -> Self {
        timelines.into_iter().map(Self::of).fold(Self::default(), |all, pass| Self {
            computation: all.computation + pass.computation,
            imbalance: all.imbalance + pass.imbalance,
            exposed: all.exposed + pass.exposed,
            waiting: all.waiting + pass.waiting,
        })
    }

    /// All of it.
    pub(crate) fn seconds(&self) -> f64 {
        self.computation + self.imbalance + self.exposed + self.waiting
    }

    /// The parts by name, as classes of the page and in words.
    pub(crate) fn parts(&self) -> [(&'static str, &'static str, f64); 4] {
        [
            ("compute", "computation", self.computation),
            ("imbalance", "imbalance", self.imbalance),
            ("communication", "exposed communication", self.exposed),
            ("wait", "waiting", self.waiting),
        ]
    }

    /// What limits it and by how much, in a sentence; `None` where nothing takes time.
    pub(crate) fn sentence(&self) -> Option<String> {
        let all = self.seconds();
        let share = |seconds: f64| format!("{:.0} %", 100.0 * seconds / all);
        let mut parts = self.parts();
        parts.sort_by(|a, b| b.2.total_cmp(&a.2));
        let [(_, name, most), rest @ ..] = parts;
        let name = match name {
            "computation" => "computation, which all ranks share evenly",
            "imbalance" => "imbalance: one rank computes more than the others",
            "exposed communication" => "communication that no computation hides",
            _ => "waiting, for other ranks or for work to be launched",
        };
        let rest = rest.map(|(_, name, seconds)| format!("{name} {}", share(seconds)));
        (all > 0.0).then(|| {
            format!(
                "What limits this run is {name}: {} of the {} until the last rank is done ({}).",
                share(most),
                format_seconds(all),
                rest.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_schedule::Span;

    use super::*;

    fn timeline(spans: &[(usize, SpanKind, f64, f64)]) -> Timeline {
        let span = |&(rank, kind, start, end): &(usize, SpanKind, f64, f64)| Span {
            rank,
            stream: usize::from(kind == SpanKind::Communication),
            label: "x".to_owned(),
            kind,
            stage: None,
            start,
            end,
        };
        Timeline {
            name: "forward".to_owned(),
            world_size: 2,
            streams: vec!["compute".to_owned(), "communication".to_owned()],
            spans: spans.iter().map(span).collect(),
        }
    }

    #[test]
    fn parts_add_up_and_the_longest_is_named() {
        use SpanKind::{Communication, Compute, Wait};
        // Rank 1 ends last: 6 of computation, where the mean is 5, 3 of communication of which 1 is hidden, 1 idle.
        let mixed = timeline(&[
            (0, Compute, 0.0, 4.0),
            (1, Compute, 0.0, 6.0),
            (1, Communication, 5.0, 8.0),
            (1, Wait, 0.0, 5.0),
            (1, Communication, 9.0, 9.0),
        ]);
        let limits = Limits::of(&mixed);
        assert_eq!(limits, Limits { computation: 5.0, imbalance: 1.0, exposed: 2.0, waiting: 1.0 });
        assert_eq!(limits.seconds(), mixed.makespan());
        let sentence = limits.sentence().unwrap();
        assert!(
            sentence.starts_with("What limits this run is computation") && sentence.contains("56 %"),
            "{sentence}"
        );
        for (spans, word) in [
            (vec![(0, Compute, 0.0, 1.0), (1, Compute, 0.0, 9.0)], "computation"),
            (
                vec![(0, Compute, 0.0, 0.5), (1, Compute, 0.0, 9.5), (1, Communication, 9.5, 10.0)],
                "computation",
            ),
            (
                vec![(0, Compute, 0.0, 1.0), (1, Compute, 0.0, 1.0), (1, Communication, 1.0, 9.0)],
                "communication that",
            ),
            (vec![(0, Compute, 0.0, 1.0), (1, Compute, 8.0, 9.0)], "waiting"),
        ] {
            let sentence = Limits::of(&timeline(&spans)).sentence().unwrap();
            assert!(sentence.contains(&format!("run is {word}")), "{word}: {sentence}");
        }
        // Of three passes one after the other, and of nothing.
        assert_eq!(Limits::of_all([&mixed, &mixed, &mixed]).seconds(), 27.0);
        assert_eq!(Limits::of(&timeline(&[])).sentence(), None);
    }

    #[test]
    fn imbalance_is_named_where_it_is_most() {
        use SpanKind::Compute;
        let mut lopsided = timeline(&[(0, Compute, 0.0, 9.0)]);
        lopsided.world_size = 4;
        let sentence = Limits::of(&lopsided).sentence().unwrap();
        assert!(sentence.contains("run is imbalance") && sentence.contains("75 %"), "{sentence}");
    }
}
