//! Draws the figures of README.md, docs/performance.md, docs/guide.md, docs/python.md and docs/decisions/008-dispatch.md from
//! `benches/results` and `benches/runs`, and checks that they are drawn.
//!
//! `FIGURES=record cargo test --test figures` writes them anew after a result has changed.

use std::fs;
use std::path::{Path, PathBuf};

mod choices;
mod guide;
mod one_gpu;
mod printed;
mod python;

const END: &str = "<!-- end of figures -->";

#[test]
fn figures_are_those_of_the_results() {
    let [readme, performance] = one_gpu::blocks();
    let [calls, ranks, host_time, host_time_on_a_gpu] = python::blocks();
    let blocks = [
        ("README.md", "one GPU", readme),
        ("docs/performance.md", "one GPU", performance),
        ("docs/guide.md", "GPUs", guide::block()),
        ("docs/python.md", "calls on a GPU", calls),
        ("docs/python.md", "ranks on GPUs", ranks),
        ("docs/python.md", "host time", host_time),
        ("docs/performance.md", "host time of calls from Python", host_time_on_a_gpu),
        ("docs/decisions/008-dispatch.md", "choices", choices::block()),
    ];
    for (page, name, wanted) in blocks {
        between(page, name, &wanted);
    }
}

/// Compares what stands between the marks of a block with `wanted`, or writes it there.
fn between(page: &str, name: &str, wanted: &str) {
    let path = root().join(page);
    let text = fs::read_to_string(&path).unwrap();
    let mark = format!("<!-- figures of {name}: drawn by tests/figures -->");
    let begin = text.find(&mark).unwrap_or_else(|| panic!("{page} has no line `{mark}`")) + mark.len();
    let end = text[begin..].find(END).unwrap_or_else(|| panic!("{page} has no line `{END}`")) + begin;
    let wanted = format!("\n{wanted}");
    if std::env::var_os("FIGURES").is_some_and(|value| value == "record") {
        fs::write(&path, format!("{}{wanted}{}", &text[..begin], &text[end..])).unwrap();
    } else {
        assert_eq!(
            &text[begin..end],
            wanted,
            "{page} shows other figures than benches; run `FIGURES=record cargo test --test figures`"
        );
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}
