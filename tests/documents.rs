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

/// Every relative link of a page leads to a file, and every page of docs/ is linked from its index.
#[test]
fn links_lead_somewhere_and_nothing_is_linked_from_nowhere() {
    let docs: Vec<PathBuf> =
        fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let pages = docs.iter().filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let others = ["README.md", "ARCHITECTURE.md"].map(|name| root().join(name));
    let mut broken = Vec::new();
    for page in pages.cloned().chain(others) {
        let text = fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            if !page.parent().unwrap().join(link).exists() {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "these links lead nowhere:\n{}", broken.join("\n"));
    let index = fs::read_to_string(root().join("docs/README.md")).unwrap();
    let linked: Vec<&str> = links(&index).collect();
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let unlinked = docs.iter().map(name).filter(|name| {
        name != "README.md"
            && name != "report.png"
            && !linked.iter().any(|link| link.trim_end_matches('/') == name)
    });
    assert_eq!(unlinked.collect::<Vec<_>>(), Vec::<String>::new(), "link them in docs/README.md");
}

/// The targets of relative links, without their anchors.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    targets
        .filter(|target| !target.contains("://") && !target.starts_with('#'))
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty())
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
