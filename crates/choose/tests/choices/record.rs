//! The result file of the whole sets of cases, `benches/results/choices.jsonl`: one line a set.
//!
//! `CHOICES=$(date +%F) cargo test -p counterpoint-choose --test choices -- --ignored --nocapture --test-threads 1` writes it.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::case::SEED;
use crate::ratios::Ratios;

/// Replaces the line of `set` where `CHOICES` has a date: `rows` are what is compared.
pub(crate) fn record(set: &str, cases: u64, rows: &[(&str, &Ratios)]) {
    let Ok(date) = std::env::var("CHOICES") else { return };
    let rows: Vec<Value> = rows
        .iter()
        .map(|(name, ratios)| {
            let mut row = json!({ "ratio": name });
            row.as_object_mut().unwrap().append(ratios.json().as_object_mut().unwrap());
            row
        })
        .collect();
    let line = json!({
        "schema": "choices/1", "date": date, "set": set, "seed": SEED, "cases": cases, "ratios": rows,
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/results/choices.jsonl");
    let text = fs::read_to_string(&path).unwrap_or_default();
    let is_other = |line: &&str| serde_json::from_str::<Value>(line).unwrap()["set"] != set;
    let mut lines: Vec<String> = text.lines().filter(is_other).map(str::to_owned).collect();
    lines.push(line.to_string());
    lines.sort();
    fs::write(path, lines.join("\n") + "\n").unwrap();
}
