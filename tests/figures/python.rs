//! The tables of docs/python.md: calls on one GPU, ranks on several, host time on CPU ranks.

use std::fmt::Write;
use std::fs;

use serde_json::Value;

use crate::printed::{Figures, Row, figure, rows, run, time};
use crate::root;

/// What calls on one GPU were measured in.
const CALLS: &str = "2026-11-28-h200-peers/python.txt";

/// Blocks of calls on a GPU, of ranks on GPUs, of host time on CPU ranks, and of all that was measured of it on a GPU.
pub(crate) fn blocks() -> [String; 4] {
    [calls(), ranks(), host_time(), host_time_on_a_gpu()]
}

/// Every row of the host's microseconds, in the order of the run.
fn host_time_on_a_gpu() -> String {
    let text = run(CALLS);
    let mut table = String::from("| call on 256 tokens | us | |\n|---|---|---|\n");
    for line in text.lines().filter(|line| !line.starts_with("a new mask each step")) {
        let mut cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        let (Some(label), Some(Some(figure))) =
            (cells.next(), cells.next().map(|cell| cell.strip_suffix(" us")))
        else {
            continue;
        };
        writeln!(table, "| {label} | {figure} | {} |", cells.next().unwrap_or_default()).unwrap();
    }
    table
}

/// Calls on one H200, compared with PyTorch's own attention.
fn calls() -> String {
    const BESIDE: &str = "beside: scaled_dot_product_attention";
    let text = run(CALLS);
    let first = |label: &str| time(&text, "", label);
    let behind = |behind: &str, label: &str| time(&text, behind, label).to_owned();
    let pair = |labels: [&str; 2]| labels.map(first).join(", ");
    let gradients = [format!("{BESIDE}, no gradients"), format!("{BESIDE}, with gradients")];
    let of_twenty = "backward of a layer, of 20 in one backward";
    let [eager, compiled] =
        ["eager", "torch.compile(fullgraph=True)"].map(|how| format!("forward and backward, {how}"));
    let lines = [
        (
            "forward, without and with gradients asked for",
            pair(["attention(q, k, v, plan), forward, no gradients", "with gradients asked for"]),
            pair([&gradients[0], &gradients[1]]),
        ),
        (
            "backward of one layer",
            first("backward of one layer by torch.autograd.grad").to_owned(),
            behind("backward of one layer", BESIDE),
        ),
        (of_twenty, first(of_twenty).to_owned(), behind(of_twenty, BESIDE)),
        (
            "forward and backward of one layer, eager",
            first(&eager).to_owned(),
            behind(&compiled, &format!("{BESIDE}, eager")),
        ),
        (
            "the same under `torch.compile(fullgraph=True)`",
            first(&compiled).to_owned(),
            behind(&compiled, &format!("{BESIDE}, torch.compile")),
        ),
        (
            "forward replayed as a CUDA graph",
            first("a forward replayed as a CUDA graph").to_owned(),
            String::new(),
        ),
        (
            "a function of autograd that does nothing, backward",
            behind("backward of one layer", "beside: an autograd.Function that does nothing"),
            String::new(),
        ),
    ];
    let mut table = String::from(
        "Microseconds of the host for calls on 256 tokens:\n\n| call | ours | PyTorch's `scaled_dot_product_attention` |\n|---|---|---|\n",
    );
    for (call, ours, theirs) in lines {
        writeln!(table, "| {call} | {ours} | {theirs} |").unwrap();
    }
    let masks =
        ["8k", "16k", "32k"].map(|tokens| first(&format!("a new mask each step, {tokens} tokens, 4 layers")));
    let rates =
        text.lines().filter_map(|line| line.split_once(" TFLOP/s  ")?.1.split_once(" of bench attention"));
    let rates = Figures::computed(rates.map(|(rate, _)| rate.parse().unwrap()));
    writeln!(table, "\n| what | figure |\n|---|---|").unwrap();
    writeln!(
        table,
        "| TFLOP/s over those of `counterpoint bench attention`, 8k to 32k tokens | {} |",
        rates.range()
    )
    .unwrap();
    writeln!(
        table,
        "| what a new mask each step, prefetched, adds to a step of four layers, at 8k, 16k and 32k tokens | {} us |",
        masks.join(", ")
    )
    .unwrap();
    table
}

/// Ranks under torchrun: attention, layers and training compared with other ways.
fn ranks() -> String {
    const H100: [&str; 3] = [
        "2026-11-27-h100-x2-python/context-parallel.txt",
        "2026-11-27-h100-x2-python/context-parallel-32k.txt",
        "2026-11-27-h100-x4-python/context-parallel-8k.txt",
    ];
    const H200: [&str; 3] = [
        "2026-11-27-h200-x4/context-parallel-16k.txt",
        "2026-11-27-h200-x4/context-parallel-32k.txt",
        "2026-11-27-h200-x4/context-parallel-32k-causal.txt",
    ];
    const CASE: &str = "tokens of a rank, heads";
    let attention = |files: &[&str], column: &str, mask: &str| {
        Figures::of(files, column, |row| row[CASE].starts_with(mask), &[CASE, "pass"]).range()
    };
    let peers = |files: &[&str]| {
        ["PyTorch all-gather", "PyTorch ring"].map(|column| attention(files, column, "causal")).join("; ")
    };
    let over_ulysses = |files: &[&str]| {
        [attention(files, "Ulysses", "causal"), attention(files, "Ulysses", "packed")].join("; ")
    };
    let two = run(H100[0]);
    let host = ["forward, no gradients", "forward, gradients asked for", "backward of one layer"]
        .map(|label| time(&two, "", label));
    let waits =
        H100.map(|file| time(&run(file), "", "waits in 10 prepared steps that the profiler sees").to_owned());
    let layers = |column: &str| {
        let case = "layer, tokens:features:features of a rank";
        let layers = Figures::of(
            &["2026-11-27-h100-x2-python/tensor-parallel.txt"],
            column,
            |_| true,
            &[case, "pass"],
        );
        (layers.len(), layers.range())
    };
    let (megatron, async_tp) = (layers("Megatron's way"), layers("async-TP"));
    let update = &json_lines("graph_update_2026-11-27.jsonl")[1];
    let lines = [
        (
            "attention from Python over `counterpoint bench cp`, causal and packed, 64:8 and 16:16 heads; two H100, 8k, 16k and 32k tokens a rank; four, 8k".to_owned(),
            attention(&H100, "of bench cp (0.98)", ""),
        ),
        ("the same on four H200, 16k and 32k tokens a rank".to_owned(), attention(&H200, "of bench cp (0.98)", "")),
        ("its speed over Ulysses with cuDNN: causal; packed documents".to_owned(), over_ulysses(&H100)),
        ("over PyTorch's `context_parallel`, causal: all-gather; ring".to_owned(), peers(&H100)),
        ("on four H200 over Ulysses: causal; packed documents".to_owned(), over_ulysses(&H200)),
        ("over `context_parallel`: all-gather; ring".to_owned(), peers(&H200)),
        ("waits of the host in ten prepared steps, as the profiler sees them, in three runs".to_owned(), waits.join(", ")),
        (
            "host time on two ranks: forward without and with gradients asked for, backward of one layer".to_owned(),
            format!("{} us", host.join(", ")),
        ),
        (
            format!("tensor-parallel layers over torch.mm and NCCL as Megatron-LM orders them, {} passes", megatron.0),
            megatron.1,
        ),
        (format!("over PyTorch's async-TP, sequence-parallel, {} passes", async_tp.0), async_tp.1),
        (
            "50 steps of a small Llama on two ranks (H200): cp 2, dp 2, with FSDP2, checkpointing and `torch.compile`".to_owned(),
            training("2026-11-27-h200-x2/training.txt"),
        ),
        ("the same on four (H100): cp 4, dp 2 x cp 2".to_owned(), training("2026-11-27-h100-x4-python/training.txt")),
        (
            format!("host time of an update of a graph with {} calls, of {} masks", update["calls"], update["masks"]),
            format!("median {} us, at most {} us", update["microseconds"]["median"], update["microseconds"]["most"]),
        ),
    ];
    let mut table = String::from("| what | figure |\n|---|---|\n");
    for (what, figure) in lines {
        writeln!(table, "| {what} | {figure} |").unwrap();
    }
    table
}

/// How far losses and gradients were from f32's, with this package and without.
fn training(file: &str) -> String {
    const LOSS: &str = "loss off f32 by";
    const GRADIENTS: &str = "gradients off f32 by";
    let is_ours = |row: &Row| !row[""].contains("without us");
    let of = |column: &str, ours: bool| Figures::of(&[file], column, |row| is_ours(row) == ours, &[]);
    let without = |column: &str| of(column, false).range();
    let references =
        rows(file, LOSS).iter().filter(|row| !is_ours(row) && figure(&row[LOSS]).is_some()).count();
    format!(
        "losses at most {} from f32, {references} bf16 references without us {}; gradients of the first step at most {}, references {}",
        of(LOSS, true).most(),
        without(LOSS),
        of(GRADIENTS, true).most(),
        without(GRADIENTS)
    )
}

/// What calls on CPU ranks cost besides computing.
fn host_time() -> String {
    let lines = json_lines("host_time_2026-11-24.jsonl");
    let about = &lines[0];
    let columns: Vec<&str> =
        about["columns"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let mut table = format!("| call | {} |\n|---|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    for line in &lines[1..] {
        let times: Vec<String> = columns.iter().map(|name| line["microseconds"][*name].to_string()).collect();
        writeln!(table, "| {} | {} |", line["call"].as_str().unwrap(), times.join(" | ")).unwrap();
    }
    table
}

/// A file of `benches/results`: what it is, then its rows.
fn json_lines(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(root().join("benches/results").join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
