//! Tables on narrow terminals: what names a row is there, and nothing is wider than the terminal.

use crate::support::Folder;

/// Small commands with tables, and what names their rows.
const TABLES: [(&str, &[&str]); 12] = [
    ("plan --mask causal:4k --cp-size 4", &["rank", "this plan (affinity)", "ring attention"]),
    (
        "attention --mask causal:256 --cp-size 2 --backward --check",
        &["rank", "lse", "dv", "relative Frobenius"],
    ),
    ("bench plan --mask causal:4k --cp-size 2 --iterations 10", &["causal:4k", "affinity", "zigzag"]),
    (
        "simulate attention --mask causal:16k --cp-size 16 --overlap sequential,kernel-barrier+sm-margin=16",
        &["forward", "backward", "sequential", "kernel-barrier+sm-margin=16"],
    ),
    (
        "simulate linear --kind row --tokens 8k --in-features 28672 --out-features 8k --tp-size 8",
        &["forward", "backward", "sequential", "concurrent+copy-engine"],
    ),
    ("simulate model --ranks 8,64 --overlap sequential", &["64", "sequential"]),
    ("bench attention --quick", &["attention forward", "causal", "f32"]),
    (
        "bench cp --masks causal --tokens 128 --heads 2:1 --head-dim 32 --iterations 3 --forward-only",
        &["causal", "f32", "128"],
    ),
    (
        "bench tp --shapes 64:32:32 --kinds row --passes forward --iterations 3 --overlap sequential,concurrent",
        &["row", "forward", "replicated", "sequence-parallel", "64:32:32", "concurrent", "sequential"],
    ),
    (
        "bench gemm-collective --shapes 64:64:64 --iterations 2 --cycles 2",
        &["all-reduce", "reduce-scatter", "sequential", "64"],
    ),
    ("bench bandwidth -b 4K -e 4K --iterations 2", &["all-gather", "8.19 kB"]),
    ("bench fresh-masks --ranks 2 --tokens 64", &["adopt", "enqueue_backward", "64"]),
];

#[test]
fn names_of_rows_never_go() {
    let folder = Folder::new();
    for (line, names) in TABLES {
        for columns in ["60", "100"] {
            let ran = folder.run_with(line, &[("COLUMNS", columns)]).ok();
            let limit: usize = columns.parse().unwrap();
            let lines: Vec<&str> = ran.stdout.lines().collect();
            let separators = lines
                .iter()
                .enumerate()
                .filter(|(_, line)| !line.is_empty() && line.chars().all(|c| c == '─'));
            let mut tables = 0;
            for (at, separator) in separators {
                tables += 1;
                assert!(separator.chars().count() <= limit, "{line} at {columns}\n{}", ran.stdout);
                let below = lines[at + 1..].iter().take_while(|line| !line.is_empty());
                for cells in below.chain([&lines[at - 1]]) {
                    assert!(cells.chars().count() <= limit, "{line} at {columns}: {cells}\n{}", ran.stdout);
                }
            }
            assert!(tables > 0, "{line}\n{}", ran.stdout);
            for name in names {
                assert!(ran.stdout.contains(name), "{line} at {columns}: no {name} in\n{}", ran.stdout);
            }
        }
    }
}
