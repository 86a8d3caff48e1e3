//! The table of what defaults are predicted to take compared with what they might have been, from `benches/results/choices.jsonl`.

use std::fs;

use serde_json::Value;

use super::root;

const SETS: [(&str, &str); 3] = [
    ("dispatch", "attention: dispatch"),
    ("policy", "attention: policy of a pass"),
    ("linear", "linear layers: policy and groups of a pass"),
];

/// A row for each ratio of each set.
pub(super) fn block() -> String {
    let text = fs::read_to_string(root().join("benches/results/choices.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut table = "| choice, of random cases | seconds of … over those of … | compared | more than 1 % slower | mean of these | worst | run |\n\
                     |---|---|---|---|---|---|---|\n"
        .to_owned();
    for (set, name) in SETS {
        let line =
            lines.iter().find(|line| line["set"] == set).unwrap_or_else(|| panic!("no line of `{set}`"));
        for row in line["ratios"].as_array().unwrap() {
            let slower = |ratio: &Value| {
                ratio.as_f64().map_or_else(String::new, |ratio| format!("{:.1} %", 100.0 * (ratio - 1.0)))
            };
            table += &format!(
                "| {name}, {} | {} | {} | {} | {} | {} | {} |\n",
                line["cases"],
                row["ratio"].as_str().unwrap(),
                row["compared"],
                row["above_1_percent"],
                slower(&row["mean_of_these"]),
                slower(&row["worst"]),
                line["date"].as_str().unwrap(),
            );
        }
    }
    table
}
