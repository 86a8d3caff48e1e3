//! The table of docs/guide.md: what GPUs reached in kept runs, and the page of each.

use std::collections::BTreeMap;

use crate::printed::{Figures, Row, figure, rows};

pub(crate) fn block() -> String {
    let mut table = String::from(
        "| what | figure | page |\n|---|---|---|\n| attention and GEMM on one H200 compared with cuDNN, FFA, cudnn.flex_attention, cuBLASLt | tables | [performance.md](performance.md) |\n",
    );
    for (what, figure, page) in lines() {
        table.push_str(&format!("| {what} | {figure} | [{}](experiments/{page}.md) |\n", &page[..3]));
    }
    table
}

fn lines() -> Vec<(&'static str, String, &'static str)> {
    let night = |file: &str| format!("2026-11-22-h200-x2-night/{file}");
    let portable = Figures::of(&[&night("bench-attention-portable.txt")], "flash", |_| true, &[]);
    let of_one = |file: &str, ranks: &str, is_dense: bool| {
        let keep =
            |row: &Row| row["ranks"] == ranks && ["full", "causal"].contains(&&*row["mask"]) == is_dense;
        Figures::of(&[file], "vs baseline", keep, &[]).range()
    };
    let both = |file: &str, ranks: &str| {
        format!("dense masks {}, packed documents {}", of_one(file, ranks, true), of_one(file, ranks, false))
    };
    let ulysses =
        |row: &Row| row.get("by").is_some_and(|by| by == "ulysses") && row["tokens a rank"] == "8192";
    let ulysses = Figures::of(&["2026-11-23-h200-x2-peers/bench-cp-peers.txt"], "ratio", ulysses, &[]);
    let long = |row: &Row| row["m"].parse::<u32>().is_ok_and(|rows| rows >= 2048);
    let four = "2026-11-22-h200-x4-afternoon/bench-gemm-collective.txt";
    let fused = Figures::of(&[four], "ratio", long, &["collective"]);
    let over_operators = |collective: &str| {
        let keep = |row: &Row| {
            row.get("by").is_some_and(|by| by == "async-tp") && row["collective"] == collective && long(row)
        };
        let file = "2026-11-23-h200-x2-peers/bench-gemm-collective-peers.txt";
        Figures::of(&[file], "ratio", keep, &[]).mean()
    };
    let operators = [over_operators("reduce-scatter"), over_operators("all-gather")];
    let layers = [
        "2026-11-23-h200-x2-turns/bench-tp-connections.txt",
        "2026-11-23-h200-x2-peers/bench-tp-peers-agreed-holds.txt",
    ];
    let is_case =
        |row: &Row| row["shape"] == "8192:8192:7168" && row["kind"] == "column" && row["pass"] == "backward";
    let hidden = |row: &Row| is_case(row) && row["policy"].contains("copy-engine");
    let hidden = Figures::of(&layers, "efficiency", hidden, &[]);
    let megatron = |row: &Row| {
        row.get("by").is_some_and(|by| by == "megatron") && is_case(row) && row["connections"] == "unset"
    };
    let megatron = Figures::of(&layers, "ratio", megatron, &[]);
    vec![
        (
            "speed of the deterministic backward over the default one",
            deterministic().range(),
            "012-backward-deterministic",
        ),
        ("speed of portable kernels over PyTorch's flash backend", portable.range(), "021-portable-backward"),
        (
            "two H200s, 8k tokens each: speed of a GPU over the slower one alone (1: linear scaling)",
            both("2026-11-23-h200-x2-peers/bench-cp-8k.txt", "2"),
            "074-distributed-standing",
        ),
        (
            "two H200s, dense masks: speed over Ulysses with cuDNN",
            ulysses.range(),
            "074-distributed-standing",
        ),
        (
            "four H200s, 8k tokens each: speed of a GPU over one alone",
            both("2026-11-22-h200-x4-evening/bench-cp.txt", "4"),
            "072-four-gpu-forwards",
        ),
        (
            "fused GEMM + collective, four H200s, 2,048 rows and more: speed over cuBLASLt, then NCCL",
            fused.range(),
            "052-fused-limits",
        ),
        (
            "fused GEMM + collective, two H200s: speed over PyTorch's fused operators, geometric mean",
            format!("reduce-scatter {:.2}, all-gather {:.2}", operators[0], operators[1]),
            "052-fused-limits",
        ),
        (
            "column-parallel backward, 8192 tokens, two H200s",
            format!(
                "{} of what can be hidden is; Megatron-LM's schedule takes {} of the time",
                hidden.range(),
                megatron.range()
            ),
            "060-column-backward",
        ),
    ]
}

/// The rate of each deterministic backward over that of the other mode.
fn deterministic() -> Figures {
    let mut rates: BTreeMap<(String, String), BTreeMap<String, f64>> = BTreeMap::new();
    for row in rows("2026-11-22-h200-x2-night/bench-attention-deterministic.txt", "rate") {
        let rate = figure(&row["rate"]).and_then(|rate| rate.parse().ok()).expect("a rate");
        let case = (row["shape"].clone(), row["mask"].clone());
        rates.entry(case).or_default().insert(row["what"].clone(), rate);
    }
    let ratio = |modes: &BTreeMap<String, f64>| {
        modes["attention backward, deterministic"] / modes["attention backward"]
    };
    Figures::computed(rates.values().map(ratio))
}
