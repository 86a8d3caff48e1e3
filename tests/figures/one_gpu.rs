//! Attention and GEMMs on one GPU compared with their peers, of `benches/results`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;

use serde_json::Value;

use crate::root;

/// Masks in the order of the tables.
const MASKS: [&str; 7] =
    ["full", "causal", "varlen_full", "varlen_causal", "sw_causal", "block_causal", "varlen_block_causal"];

/// Whether a name of the results is a peer's.
type IsVariant = fn(&str) -> bool;

/// Peers of attention, and their names in the results.
const PEERS: [(&str, IsVariant); 3] = [
    ("attention, cuDNN (full and causal masks)", |name| name == "cudnn"),
    ("attention, MagiAttention's FFA, its best variant of each row", |name| name == "ffa"),
    ("attention, cudnn.flex_attention", |name| name.starts_with("flex")),
];
const FROM_PYTHON: &str = "`flex_flash_attn_func` from Python, MagiAttention's own, tuned";

/// The blocks of README.md and of docs/performance.md.
pub(crate) fn blocks() -> [String; 2] {
    let h200 = Results::read("attention_peers_h200_2026-11-28.jsonl");
    let h100 = Results::read("attention_peers_2026-11-28.jsonl");
    let face = Results::read("magi_face_h200_2026-11-28.jsonl");
    let gemm = Results::read("gemm_cublaslt_2026-11-23.jsonl");
    let ratios = ratios([&h200, &h100], &face, &gemm);
    let page = format!("{ratios}\n{}\n{}", rows(&h200), rows(&h100));
    [summary(&h200, &face, &gemm), page]
}

/// What README.md shows: a line for each peer on one GPU.
fn summary(attention: &Results, face: &Results, gemm: &Results) -> String {
    let mut table =
        String::from("| speed of ours over | cases | forward | backward | run |\n|---|---|---|---|---|\n");
    let mut line = |what: &str, results: &Results, forward: &[f64], backward: &str| {
        let (cases, forward, file) = (forward.len(), cell(forward), results.name);
        writeln!(table, "| {what} | {cases} | {forward} | {backward} | `{file}` |").unwrap();
    };
    for (what, is_variant) in PEERS {
        let [forward, backward] =
            ["forward", "backward"].map(|pass| attention.ratios(Some(pass), is_variant));
        line(what, attention, &forward, &cell(&backward));
    }
    let [forward, both] =
        ["forward", "both"].map(|pass| face.ratios(Some(pass), |name| name.starts_with("magi")));
    line(FROM_PYTHON, face, &forward, &format!("{}, with its forward", cell(&both)));
    line("GEMM, cuBLASLt", gemm, &gemm.ratios(None, |name| name == "cublaslt"), "-");
    let dtype = attention.about["dtype"].as_str().unwrap();
    let (lengths, gpu) = (attention.lengths(), attention.gpu());
    assert!([face, gemm].iter().all(|results| results.gpu() == gpu), "README.md is about one GPU");
    writeln!(
        table,
        "\nOne {gpu}, {dtype}: the geometric mean of all cases, in brackets the worst. Attention: head_dim 128, {lengths}, 16:16 and \
         64:8 heads. Variants ran interleaved, and every result was checked."
    )
    .unwrap();
    table
}

/// A geometric mean, in brackets the worst case.
fn cell(ratios: &[f64]) -> String {
    let (mean, worst) = mean_and_worst(ratios);
    format!("{mean:.2} ({worst:.2})")
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

    /// Which GPU it was measured on.
    fn gpu(&self) -> &str {
        let machine = self.about["machine"].as_str().unwrap();
        ["H100", "H200"].into_iter().find(|gpu| machine.contains(gpu)).unwrap()
    }

    /// The lengths of its sequences.
    fn lengths(&self) -> String {
        let lengths: BTreeSet<u64> =
            self.rows.iter().map(|row| row["seqlen"].as_u64().unwrap() / 1024).collect();
        let lengths: Vec<String> = lengths.into_iter().map(|kilo| format!("{kilo}k")).collect();
        let (last, others) = lengths.split_last().unwrap();
        format!("{} and {last} tokens", others.join(", "))
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
fn ratios(attention: [&Results; 2], face: &Results, gemm: &Results) -> String {
    let of_attention = attention.into_iter().flat_map(|results| {
        let passes =
            PEERS.into_iter().flat_map(|peer| ["forward", "backward"].map(|pass| (peer, Some(pass))));
        passes.map(move |((what, is_variant), pass)| (what, results, pass, is_variant))
    });
    let others: [(&str, &Results, Option<&str>, IsVariant); 3] = [
        (FROM_PYTHON, face, Some("forward"), |name| name.starts_with("magi")),
        (FROM_PYTHON, face, Some("both"), |name| name.starts_with("magi")),
        ("GEMM, cuBLASLt", gemm, None, |name| name == "cublaslt"),
    ];
    let mut table = String::from(
        "| speed of ours over | on | pass | cases | geometric mean | worst | run |\n|---|---|---|---|---|---|---|\n",
    );
    for (what, results, pass, is_variant) in of_attention.chain(others) {
        let ratios = results.ratios(pass, is_variant);
        let (mean, worst) = mean_and_worst(&ratios);
        let (gpu, cases, file) = (results.gpu(), ratios.len(), results.name);
        let pass = match pass {
            Some("both") => "forward and backward together",
            pass => pass.unwrap_or("-"),
        };
        writeln!(table, "| {what} | {gpu} | {pass} | {cases} | {mean:.2} | {worst:.2} | `{file}` |").unwrap();
    }
    let dtype = attention[0].about["dtype"].as_str().unwrap();
    let [first, second] = attention.map(|results| format!("{} on {}", results.lengths(), results.gpu()));
    writeln!(
        table,
        "\nOne GPU; {dtype}. Attention: head_dim 128, {first}, {second}, 16:16 and 64:8 heads. Variants ran interleaved, and every result \
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
    let mut out = format!(
        "TFLOP/s by unmasked area on {}, in brackets the speed over cudnn.flex_attention:\n",
        results.gpu()
    );
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
