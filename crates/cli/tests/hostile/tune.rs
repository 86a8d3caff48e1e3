//! Many processes that keep plans in one file.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::Folder;

/// Ten processes at once, a plan of another shape each: all ten are kept, and nothing else is left.
#[test]
fn plans_of_ten_processes_are_all_kept() {
    let folder = Folder::new();
    let sizes: Vec<usize> = (1..=10).map(|number| 32 * number).collect();
    let processes: Vec<_> = sizes
        .iter()
        .map(|m| {
            let line = format!(
                "tune gemm --m {m} --n 32 --k 32 --tp-size 2 --iterations 1 --warmups 0 --waves 2 \
                 --collective all-gather --plans plans.json --json"
            );
            Command::new(env!("CARGO_BIN_EXE_counterpoint"))
                .args(line.split_whitespace())
                .current_dir(folder.path("."))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let file: Value = serde_json::from_slice(&folder.read("plans.json")).unwrap();
    let mut kept: Vec<usize> =
        file["plans"].as_array().unwrap().iter().map(|plan| plan["m"].as_u64().unwrap() as usize).collect();
    kept.sort_unstable();
    // Each process keeps a plan for each policy that runs here, the same number.
    let policies = kept.len() / sizes.len();
    assert!(policies > 0, "{file}");
    let each = sizes.iter().flat_map(|size| std::iter::repeat_n(*size, policies));
    assert_eq!(kept, each.collect::<Vec<_>>());
    assert_eq!(folder.names(), ["plans.json"]);
}
