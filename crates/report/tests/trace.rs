//! Traces read back and held against the rules of the format.

mod fixture;

use std::collections::{BTreeMap, BTreeSet};

use counterpoint_report::{TimelinePair, TraceSection, chrome_trace};
use counterpoint_schedule::{Span, SpanKind, Timeline};
use fixture::{Run, documents};
use proptest::prelude::*;
use serde_json::Value;

/// What the trace says, after every rule of the format was checked.
struct Trace {
    /// (pid, tid) to track name.
    tracks: BTreeMap<(u64, u64), String>,
    /// pid to process name.
    processes: BTreeMap<u64, String>,
    slices: Vec<Value>,
}

fn read(text: &str) -> Trace {
    let trace: Value = serde_json::from_str(text).unwrap();
    let mut out = Trace { tracks: BTreeMap::new(), processes: BTreeMap::new(), slices: Vec::new() };
    for event in trace["traceEvents"].as_array().unwrap() {
        let (pid, tid) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let name = event["name"].as_str().unwrap();
        match event["ph"].as_str().unwrap() {
            "M" => {
                let old = match name {
                    "process_name" => {
                        out.processes.insert(pid, event["args"]["name"].as_str().unwrap().to_owned())
                    }
                    "thread_name" => {
                        out.tracks.insert((pid, tid), event["args"]["name"].as_str().unwrap().to_owned())
                    }
                    "process_sort_index" | "thread_sort_index" => {
                        event["args"]["sort_index"].as_u64().unwrap();
                        None
                    }
                    other => panic!("metadata {other}"),
                };
                assert_eq!(old, None, "named twice");
            }
            "X" => {
                assert!(!name.is_empty());
                assert!(event["ts"].as_f64().unwrap() >= 0.0 && event["dur"].as_f64().unwrap() >= 0.0);
                assert!(event["cat"].as_str().unwrap().split(',').count() == 3);
                out.slices.push(event.clone());
            }
            other => panic!("phase {other}"),
        }
    }
    // Every slice has a named track and process; slices of a track follow each other or nest, else viewers drop them.
    let mut by_track: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for slice in &out.slices {
        let track = (slice["pid"].as_u64().unwrap(), slice["tid"].as_u64().unwrap());
        assert!(out.tracks.contains_key(&track) && out.processes.contains_key(&track.0));
        let (ts, dur) = (slice["ts"].as_f64().unwrap(), slice["dur"].as_f64().unwrap());
        by_track.entry(track).or_default().push((ts, ts + dur));
    }
    for slices in by_track.values_mut() {
        slices.sort_by(|a, b| a.partial_cmp(b).unwrap());
        for pair in slices.windows(2) {
            // A picosecond for the rounding of the sum above.
            assert!(pair[1].0 >= pair[0].1 - 1e-6, "slices overlap: {pair:?}");
        }
    }
    out
}

#[test]
fn a_process_a_rank_and_a_track_a_stream() {
    let run = Run::new(documents([1500, 1096, 900, 600]), 4, 128);
    let sections = [("forward", 0), ("backward", 1)]
        .map(|(name, pass)| TraceSection { name, timelines: run.pair(pass) });
    let trace = read(&chrome_trace(&sections));

    assert_eq!(trace.processes.len(), 4);
    assert_eq!(trace.processes[&3], "rank 3");
    let streams: BTreeSet<&String> = run.measured.iter().flat_map(|timeline| &timeline.streams).collect();
    assert_eq!(trace.tracks.len(), 4 * 2 * streams.len());
    let spans: usize = run.measured.iter().chain(&run.predicted).map(|timeline| timeline.spans.len()).sum();
    assert_eq!(trace.slices.len(), spans);

    for slice in &trace.slices {
        let track = &trace.tracks[&(slice["pid"].as_u64().unwrap(), slice["tid"].as_u64().unwrap())];
        let args = &slice["args"];
        assert!(track.ends_with(&format!("({})", args["source"].as_str().unwrap())), "{track}: {slice}");
        assert!(slice["name"].as_str().unwrap().contains(args["kind"].as_str().unwrap()));
        if let Some(stage) = args["stage"].as_u64() {
            assert!(slice["name"].as_str().unwrap().starts_with(&format!("stage {stage} ")));
        }
        let categories: Vec<&str> = slice["cat"].as_str().unwrap().split(',').collect();
        assert_eq!(categories, ["section", "kind", "source"].map(|key| args[key].as_str().unwrap()));
    }
    // The backward begins where the longer forward ends.
    let first = |section: &str| {
        let of = trace.slices.iter().filter(|slice| slice["args"]["section"] == section);
        of.map(|slice| slice["ts"].as_f64().unwrap()).fold(f64::INFINITY, f64::min)
    };
    let forward = run.pair(0);
    let longest =
        [forward.measured, forward.predicted].map(|t| t.unwrap().makespan()).into_iter().fold(0.0, f64::max);
    assert!(first("forward") < 1.0);
    assert!(first("backward") >= longest * 1e6 - 0.001);
}

#[test]
fn nothing_to_trace() {
    let trace = read(&chrome_trace(&[TraceSection { name: "forward", timelines: TimelinePair::default() }]));
    assert!(trace.slices.is_empty() && trace.processes.is_empty());
}

proptest! {
    #[test]
    fn times_survive_to_the_nanosecond(
        durations in prop::collection::vec((0u64..5_000_000_000, 0u64..1000, 0usize..3), 1..40),
        label in "\\PC{0,12}",
    ) {
        let mut now = 0;
        let spans: Vec<Span> = durations.iter().map(|&(length, gap, kind)| {
            let start = now + gap;
            now = start + length;
            Span {
                rank: 1,
                stream: 0,
                label: label.clone(),
                kind: [SpanKind::Compute, SpanKind::Communication, SpanKind::Wait][kind],
                stage: None,
                start: start as f64 * 1e-9,
                end: now as f64 * 1e-9,
            }
        }).collect();
        let timeline = Timeline { name: "t".into(), world_size: 2, streams: vec!["s".into()], spans };
        let timelines = TimelinePair { measured: Some(&timeline), predicted: None };
        let trace = read(&chrome_trace(&[TraceSection { name: "forward", timelines }]));
        prop_assert_eq!(trace.slices.len(), durations.len());
        let mut now = 0;
        for (slice, &(length, gap, _)) in trace.slices.iter().zip(&durations) {
            prop_assert_eq!((slice["ts"].as_f64().unwrap() * 1e3).round() as u64, now + gap);
            prop_assert_eq!((slice["dur"].as_f64().unwrap() * 1e3).round() as u64, length);
            prop_assert_eq!(slice["args"]["label"].as_str().unwrap(), &label);
            now += gap + length;
        }
    }
}
