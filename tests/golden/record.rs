//! The record in `record.jsonl`, one line a case: reading, writing and comparing it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use similar::TextDiff;

use crate::case::{Case, digest};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/record.jsonl");

/// Lines of one difference that are printed.
const MOST_LINES: usize = 40;

/// What is recorded of a case.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    case: String,
    text: String,
    /// Digests of the plan and of each Program.
    parts: BTreeMap<String, String>,
    /// Digests of results, by machine.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    outputs: BTreeMap<String, String>,
}

impl Entry {
    pub(crate) fn of(case: &Case) -> Self {
        let digests = |texts: &[(String, String)]| {
            texts.iter().map(|(name, text)| (name.clone(), digest(text))).collect()
        };
        Self {
            case: case.name.clone(),
            text: case.text.clone(),
            parts: digests(&case.parts),
            outputs: digests(&case.outputs),
        }
    }
}

pub(crate) fn read() -> Vec<Entry> {
    let text = fs::read_to_string(PATH).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("a line of the record")).collect()
}

/// Writes the record. What other machines recorded of a case stays unless this machine's results have changed.
pub(crate) fn write(cases: &[Case]) {
    let mut old: BTreeMap<String, Entry> =
        read().into_iter().map(|entry| (entry.case.clone(), entry)).collect();
    let mut out = String::new();
    for case in cases {
        let mut entry = Entry::of(case);
        if let Some(before) = old.remove(&case.name)
            && entry.outputs.iter().all(|(machine, found)| before.outputs.get(machine) == Some(found))
        {
            entry.outputs.extend(before.outputs);
        }
        out.push_str(&serde_json::to_string(&entry).expect("plain data"));
        out.push('\n');
        keep(case);
    }
    fs::write(PATH, out).expect("the record can be written");
}

/// What differs between the record and a case, for people; empty where nothing does. Texts of cases that do not differ are kept below
/// `target`, so that a later difference can be shown line by line.
pub(crate) fn compare(entry: &Entry, case: &Case) -> String {
    let found = Entry::of(case);
    let mut out = String::new();
    if entry.text != found.text {
        let _ = writeln!(out, "the case is another one: {}\n  recorded: {}", found.text, entry.text);
    }
    let kept = fs::read_to_string(file(&case.name)).unwrap_or_default();
    for (name, text) in &case.parts {
        if entry.parts.get(name) != found.parts.get(name) {
            out.push_str(&difference(name, entry.parts.get(name), &kept, text));
        }
    }
    for name in entry.parts.keys().filter(|name| !found.parts.contains_key(*name)) {
        let _ = writeln!(out, "{name}: recorded, and no longer there");
    }
    for (machine, text) in &case.outputs {
        // Other machines than those of the record prove nothing here.
        if let Some(recorded) = entry.outputs.get(machine)
            && *recorded != found.outputs[machine]
        {
            out.push_str(&difference(&outputs_of(machine), Some(recorded), &kept, text));
        }
    }
    if out.is_empty() {
        keep(case);
    }
    out
}

/// Whether a record of outputs is there for this machine.
pub(crate) fn has_outputs_of(entries: &[Entry], machine: &str) -> bool {
    entries.iter().any(|entry| entry.outputs.contains_key(machine))
}

fn outputs_of(machine: &str) -> String {
    format!("outputs on {machine}")
}

/// A part that differs, line by line where the recorded text is still known.
fn difference(part: &str, recorded: Option<&String>, kept: &str, text: &str) -> String {
    let Some(recorded) = recorded else { return format!("{part}: not in the record\n") };
    let old = kept.split(SEPARATOR).find_map(|kept| kept.strip_prefix(&format!("{part}\n")));
    let Some(old) = old.filter(|old| digest(old) == *recorded) else {
        return format!(
            "{part}: digest {} instead of {recorded}. Run this test where it passes first to see line by line what differs.\n",
            digest(text)
        );
    };
    let diff = TextDiff::from_lines(old, text);
    let unified = diff.unified_diff().context_radius(0).to_string();
    let lines: Vec<&str> = unified.lines().collect();
    let shown: Vec<String> =
        lines.iter().take(MOST_LINES).map(|line| line.chars().take(400).collect()).collect();
    format!("{part}: {} lines of difference\n{}\n", lines.len(), shown.join("\n"))
}

const SEPARATOR: &str = "\n=== ";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("golden")
}

fn file(case: &str) -> PathBuf {
    folder().join(format!("{}.txt", case.replace(' ', "-")))
}

/// Keeps the texts of a case.
fn keep(case: &Case) {
    let mut text = case.text.clone();
    let outputs = case.outputs.iter().map(|(machine, output)| (outputs_of(machine), output));
    for (name, part) in case.parts.iter().map(|(name, part)| (name.clone(), part)).chain(outputs) {
        let _ = write!(text, "{SEPARATOR}{name}\n{part}");
    }
    // Only a convenience: where it cannot be kept, differences are shown without lines.
    let path = file(&case.name);
    if fs::read_to_string(&path).is_ok_and(|kept| kept == text) {
        return;
    }
    let _ = fs::create_dir_all(folder()).and_then(|()| fs::write(path, text));
}
