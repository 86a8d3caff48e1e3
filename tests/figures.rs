//! Draws the tables of figures in README.md and docs/performance.md from `benches/results`, and checks that they are drawn.
//!
//! `FIGURES=record cargo test --test figures` writes them anew after a result file has changed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Masks in the order of the tables.
const MASKS: [&str; 7] =
    ["full", "causal", "varlen_full", "varlen_causal", "sw_causal", "block_causal", "varlen_block_causal"];
const BEGIN: &str = "<!-- figures: drawn by tests/figures.rs -->";
const END: &str = "<!-- end of figures -->";

#[test]
fn figures_are_those_of_the_results() {
    let attention_flex = Results::read("attention_cudnn_flex_2026-11-23.jsonl");
    let attention_ffa = Results::read("attention_ffa_2026-11-23.jsonl");
    let gemm = Results::read("gemm_cublaslt_2026-11-23.jsonl");
    let ratios = ratios(&attention_flex, &attention_ffa, &gemm);
    between("README.md", &ratios);
    let mut page = ratios;
    write!(page, "\n{}", rows(&attention_flex)).unwrap();
    between("docs/performance.md", &page);
}

/// The guide sums up experiments: each figure of its table stands on the page that the row names.
#[test]
fn figures_of_the_guide_are_those_of_experiments() {
    let guide = fs::read_to_string(root().join("docs/guide.md")).unwrap();
    let mut seen = 0;
    for row in guide.lines().filter(|line| line.starts_with("| ") && line.contains("](experiments/")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let (figures, page) = (cells[1], cells[2]);
        let page = page.split_once("](").and_then(|(_, link)| link.split_once(')')).unwrap().0;
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        let numbers = |text: &str| -> Vec<String> {
            let numbers = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
            numbers
                .map(|number| number.trim_matches('.').to_owned())
                .filter(|number| number.contains('.'))
                .collect()
        };
        let known = numbers(&text);
        for figure in numbers(figures) {
            seen += 1;
            assert!(known.contains(&figure), "docs/guide.md: {figure} does not stand in {page}: {row}");
        }
    }
    assert!(seen >= 18, "{seen} figures: is the search for them broken?");
}

/// One file of results: what it is, then a line for each case.
struct Results {
    name: &'static str,
    about: Value,
    rows: Vec<Value>,
}

impl Results {
    fn read(name: &'static str) -> Self {
        let text = fs::read_to_string(root().join("benches/results").join(name)).unwrap();
        let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let about = lines.next().unwrap();
        Self { name, about, rows: lines.collect() }
    }

    /// Of every case of this direction that has one of `variants`, the time of the fastest of them over ours.
    fn ratios(&self, direction: Option<&str>, is_variant: impl Fn(&str) -> bool) -> Vec<f64> {
        let rows = self.rows.iter().filter(|row| direction.is_none_or(|is| row["direction"] == is));
        rows.filter_map(|row| least(row, &is_variant)).collect()
    }
}

fn least(row: &Value, is_variant: impl Fn(&str) -> bool) -> Option<f64> {
    let times = row["time_over_ours"].as_object().unwrap().iter();
    times.filter(|(name, _)| is_variant(name)).map(|(_, time)| time.as_f64().unwrap()).reduce(f64::min)
}

/// The speed of ours over every peer's: geometric mean and worst case.
fn ratios(flex: &Results, ffa: &Results, gemm: &Results) -> String {
    type IsVariant = fn(&str) -> bool;
    let cudnn: IsVariant = |name| name == "cudnn";
    // What only launches kernels leaves out what a call needs around them.
    let best_ffa: IsVariant = |name| name.starts_with("ffa") && !name.ends_with("kernel");
    let any_flex: IsVariant = |name| name.starts_with("flex");
    let peers: [(&str, &Results, &[&str], IsVariant); 4] = [
        ("attention, cuDNN (full and causal masks)", ffa, &["forward", "backward"], cudnn),
        (
            "attention, MagiAttention's FFA, its best variant of each row",
            ffa,
            &["forward", "backward"],
            best_ffa,
        ),
        ("attention, cudnn.flex_attention", flex, &["forward", "backward"], any_flex),
        ("GEMM, cuBLASLt", gemm, &[], |name| name == "cublaslt"),
    ];
    let mut table = String::from(
        "| speed of ours over | pass | cases | geometric mean | worst | run |\n|---|---|---|---|---|---|\n",
    );
    for (what, results, directions, is_variant) in peers {
        let passes: Vec<Option<&str>> = match directions {
            [] => vec![None],
            _ => directions.iter().copied().map(Some).collect(),
        };
        for pass in passes {
            let ratios = results.ratios(pass, is_variant);
            let (mean, worst) = mean_and_worst(&ratios);
            let (cases, file, pass) = (ratios.len(), results.name, pass.unwrap_or("-"));
            writeln!(table, "| {what} | {pass} | {cases} | {mean:.2} | {worst:.2} | `{file}` |").unwrap();
        }
    }
    let about = &flex.about;
    let (machine, dtype) = (about["machine"].as_str().unwrap(), about["dtype"].as_str().unwrap());
    writeln!(
        table,
        "\nOn {machine}; {dtype}. Attention: head_dim 128, 8k and 16k tokens, 16:16 and 64:8 heads. Variants ran interleaved, and every result \
         was checked."
    )
    .unwrap();
    table
}

fn mean_and_worst(ratios: &[f64]) -> (f64, f64) {
    assert!(!ratios.is_empty(), "no case has this peer");
    let logarithms: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    ((logarithms / ratios.len() as f64).exp(), worst)
}

/// TFLOP/s of every mask, and the speed over cudnn.flex_attention.
fn rows(results: &Results) -> String {
    let mut cases: BTreeMap<(&str, u64, &str), BTreeMap<&str, String>> = BTreeMap::new();
    for row in &results.rows {
        let text = |key: &str| row[key].as_str().unwrap();
        let tflops = row["tflops"]["counterpoint"].as_f64().unwrap();
        let ratio = least(row, |name| name.starts_with("flex")).unwrap();
        let case = (text("direction"), row["seqlen"].as_u64().unwrap(), text("heads"));
        cases.entry(case).or_default().insert(text("mask"), format!("{tflops:.0} ({ratio:.2})"));
    }
    let mut out =
        String::from("TFLOP/s by unmasked area, in brackets the speed over cudnn.flex_attention:\n");
    for direction in ["forward", "backward"] {
        let of_direction: Vec<_> = cases.iter().filter(|(case, _)| case.0 == direction).collect();
        write!(out, "\n| {direction} |").unwrap();
        of_direction.iter().for_each(|((_, seqlen, heads), _)| {
            write!(out, " {}k {heads} |", seqlen / 1024).unwrap();
        });
        writeln!(out, "\n|---|{}", "---|".repeat(of_direction.len())).unwrap();
        for mask in MASKS {
            let figures: Vec<&str> = of_direction.iter().map(|(_, masks)| masks[mask].as_str()).collect();
            writeln!(out, "| {mask} | {} |", figures.join(" | ")).unwrap();
        }
    }
    out
}

/// Compares what stands between the marks of a page with `wanted`, or writes it there.
fn between(page: &str, wanted: &str) {
    let path = root().join(page);
    let text = fs::read_to_string(&path).unwrap();
    let begin = text.find(BEGIN).unwrap_or_else(|| panic!("{page} has no line `{BEGIN}`")) + BEGIN.len();
    let end = text.find(END).unwrap_or_else(|| panic!("{page} has no line `{END}`"));
    let wanted = format!("\n{wanted}");
    if std::env::var_os("FIGURES").is_some_and(|value| value == "record") {
        fs::write(&path, format!("{}{wanted}{}", &text[..begin], &text[end..])).unwrap();
    } else {
        assert_eq!(
            &text[begin..end],
            wanted,
            "{page} shows other figures than benches/results; run `FIGURES=record cargo test --test figures`"
        );
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_path_buf()
}
