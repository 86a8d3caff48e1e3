//! The maps of the code in ARCHITECTURE.md and docs/ name only files and folders that exist, and stay short.

use std::fs;
use std::path::{Path, PathBuf};

/// Where a path in backticks may begin to count as one.
const ROOTS: [&str; 6] = ["crates/", "docs/", "tests/", "benches/", "examples/", "src/"];

#[test]
fn paths_in_the_maps_exist() {
    let mut missing = Vec::new();
    let mut seen = 0;
    for page in pages() {
        for path in paths(&fs::read_to_string(root().join(&page)).unwrap()) {
            seen += 1;
            if !root().join(&path).exists() {
                missing.push(format!("{}: `{path}`", page.display()));
            }
        }
    }
    assert!(seen > 60, "the pages name {seen} paths: is the search for them broken?");
    assert!(missing.is_empty(), "these do not exist:\n{}", missing.join("\n"));
}

#[test]
fn the_map_stays_a_map() {
    let lines = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap().lines().count();
    assert!(lines <= 150, "ARCHITECTURE.md has {lines} lines; move what explains a choice to docs/decisions");
}

/// The maps: the page of the house, where things are, and every decision.
fn pages() -> Vec<PathBuf> {
    let decisions = fs::read_dir(root().join("docs/decisions")).unwrap();
    let decisions = decisions.map(|entry| Path::new("docs/decisions").join(entry.unwrap().file_name()));
    ["ARCHITECTURE.md", "docs/where.md"].into_iter().map(PathBuf::from).chain(decisions).collect()
}

/// Every path in backticks.
fn paths(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted
        .filter(|word| {
            ROOTS.iter().any(|root| word.starts_with(root)) && !word.contains([' ', '*', '…', '<'])
        })
        .map(str::to_owned)
        .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
