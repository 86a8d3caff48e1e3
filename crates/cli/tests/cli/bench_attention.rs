//! `counterpoint bench attention`.

use crate::support::Folder;

#[test]
fn every_row_is_checked_and_overlap_is_shown() {
    let folder = Folder::new();
    let ran = folder.run("bench attention --quick --json").ok();
    let rows = ran.json_lines();
    for row in &rows {
        for key in
            ["name", "shape", "dtype", "mask", "device", "ranks", "seconds", "rate", "ratio", "verified"]
        {
            assert!(!row[key].is_null(), "{key} in {row}");
        }
        let verified = |key: &str| row["verified"][key].as_f64().unwrap();
        assert!(verified("error") <= verified("bound") && verified("bound") > 0.0, "{row}");
        let seconds = |key: &str| row["seconds"][key].as_f64().unwrap();
        assert!(
            0.0 < seconds("min")
                && seconds("min") <= seconds("median")
                && seconds("median") <= seconds("max")
        );
        assert!(row["rate"]["tflops"].as_f64().unwrap() > 0.0);
    }
    let named = |name: &str| rows.iter().filter(|row| row["name"].as_str().unwrap().contains(name)).count();
    assert_eq!((named("attention forward"), named("attention backward")), (3, 3));
    assert_eq!((named("sequential"), named("concurrent"), named("kernel-barrier")), (2, 2, 2));
    assert!(rows.iter().filter(|row| row["baseline"]["tflops"].as_f64().is_some()).count() == 6);

    // The staged forward waits for its link under every policy, and without overlap for its computation too.
    let total = |name: &str| {
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        (
            row["seconds"]["median"].as_f64().unwrap(),
            row["sequential_communication_seconds"].as_f64().unwrap(),
        )
    };
    for policy in ["sequential", "concurrent", "kernel-barrier"] {
        let (total, communication) = total(&format!("forward, {policy}"));
        assert!(communication >= 0.015 && total >= communication * 0.9, "{policy}: {total} {communication}");
    }
}

#[test]
fn what_only_a_gpu_is_asked_needs_a_gpu() {
    let folder = Folder::new();
    folder.refuses("bench attention --masks causal", &["--masks", "--device cuda"]);
    folder.refuses("bench attention --device cuda --masks circle", &["circle", "varlen_causal"]);
    folder.refuses("bench attention --device cuda --heads 6:4", &["6:4", "multiple"]);
    folder.refuses("bench attention --device cuda --iterations 1", &["--iterations"]);
    folder.refuses("bench attention --device cuda --peers=cudnn,flsh", &["flsh", "flash"]);
    // Without a GPU: what is missing, and status 3.
    if !std::path::Path::new("/dev/nvidia0").exists() {
        for line in ["bench attention --device cuda --quick", "bench attention --device cuda --peers"] {
            folder.run(line).is_refusal(3, &["NVIDIA"]);
        }
    }
}
