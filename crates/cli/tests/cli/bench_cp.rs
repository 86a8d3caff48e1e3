//! `counterpoint bench cp`.

use crate::support::Folder;

#[test]
fn rows_come_in_pairs_and_scaling_is_their_ratio() {
    let folder = Folder::new();
    let ran =
        folder.run("bench cp --tokens 256 --iterations 3 --masks causal,varlen_full --json --cp-size 3").ok();
    let rows = ran.json_lines();
    assert_eq!(rows.len(), 8, "two masks, two passes, on three ranks and on one");
    let figure =
        |row: &serde_json::Value, key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    for pair in rows.chunks(2) {
        let (together, alone) = (&pair[0], &pair[1]);
        assert_eq!((figure(together, "ranks"), figure(alone, "ranks")), (3.0, 1.0));
        for key in ["name", "shape", "mask", "pass", "area", "tokens_per_rank"] {
            assert_eq!(together[key], alone[key], "{key}");
        }
        let tflops = |row: &serde_json::Value| figure(&row["rate"], "tflops");
        let scaling = tflops(together) / tflops(alone);
        assert!((figure(together, "ratio") / scaling - 1.0).abs() < 1e-9, "{together}");
        assert!(alone["ratio"].is_null() && alone["overlap_efficiency"].is_null(), "{alone}");
        for row in pair {
            assert!(figure(&row["verified"], "error") <= figure(&row["verified"], "bound"), "{row}");
            let seconds = |key: &str| figure(&row["seconds"], key);
            assert!(
                0.0 < seconds("min")
                    && seconds("min") <= seconds("median")
                    && seconds("median") <= seconds("max")
            );
            assert!(figure(row, "predicted_seconds") > 0.0, "{row}");
        }
        assert!(figure(together, "communication_seconds") > 0.0, "{together}");
        // Two policies of the same pass: what is hidden is said of the one that may hide, with what there is.
        if !together["overlap_efficiency"].is_null() {
            let hideable = figure(together, "hideable_seconds");
            assert!(
                hideable >= 0.01 * figure(together, "sequential_seconds") && hideable > 0.0,
                "{together}"
            );
            assert!(figure(together, "overlap_efficiency").is_finite(), "{together}");
        }
    }
}

#[test]
fn policies_are_judged_by_one_sequential_way() {
    let folder = Folder::new();
    let command = "bench cp --tokens 512 --iterations 3 --masks causal --cp-size 2";
    let rows = |overlap: &str| folder.run(&format!("{command} --json --overlap {overlap}")).ok().json_lines();
    let policies = |rows: &[serde_json::Value]| -> Vec<String> {
        let together = rows.iter().filter(|row| row["ranks"] == 2 && row["pass"] == "forward");
        together.map(|row| row["overlap"].as_str().unwrap().to_owned()).collect()
    };
    let two = rows("concurrent,kernel-barrier,concurrent");
    assert_eq!(policies(&two), ["concurrent", "kernel-barrier"]);
    let judged: Vec<_> = two.iter().filter(|row| row["sequential_seconds"].is_number()).collect();
    assert!(judged.iter().all(|row| row["ranks"] == 2), "{judged:?}");
    for pair in judged.iter().filter(|row| row["pass"] == "backward").collect::<Vec<_>>().windows(2) {
        assert_eq!(pair[0]["sequential_seconds"], pair[1]["sequential_seconds"]);
    }
    // One that is asked for is a row like others.
    assert_eq!(policies(&rows("kernel-barrier,sequential")), ["kernel-barrier", "sequential"]);
    let text = folder.run(&format!("{command} --overlap concurrent,kernel-barrier")).ok().stdout;
    for name in ["attention forward, concurrent ", "attention backward, kernel-barrier "] {
        assert!(text.contains(name), "{text}");
    }
}

#[test]
fn ways_of_pytorch_are_compared_with_ours() {
    let folder = Folder::new();
    let known = |pass: &str| {
        format!(
            r#"{{"by": "ulysses", "pass": "{pass}", "heads_q": 4, "heads_kv": 2, "error_over_bound": 0.1}}"#
        )
    };
    let (forward, backward) = (known("forward"), known("backward"));
    // A case of this mask has two ways, another none.
    let path = folder.with_python(&format!(
        "#!/bin/sh\nwhile read line; do case \"$line\" in *'\"full\"'*) echo '[{forward}, {backward}]';; \
         *case*) echo '[]';; *) echo '[0.25, 0.0001]';; esac; done\n"
    ));
    let command = "bench cp --tokens 256 --iterations 3 --masks full,varlen_full --peers=ulysses";
    let variables = [("PATH", path.as_str())];
    let rows = folder.run_with(&format!("{command} --json"), &variables).ok().json_lines();
    let (peers, ours): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["by"] == "ulysses");
    assert_eq!((ours.len(), peers.len()), (8, 2));
    for (peer, pass) in peers.iter().zip(["forward", "backward"]) {
        let same = |row: &&&serde_json::Value| {
            (&row["pass"], &row["mask"]) == (&pass.into(), &"full".into()) && row["ranks"] == 2
        };
        let own = ours.iter().find(same).unwrap();
        assert_eq!((&peer["pass"], &peer["ours_seconds"]), (&pass.into(), &own["seconds"]["median"]));
        let ratio = 0.25 / peer["ours_seconds"].as_f64().unwrap();
        assert!((peer["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-9, "{peer}");
    }
    let text = folder.run_with(command, &variables).ok().stdout;
    assert_eq!(text.lines().filter(|line| line.starts_with(" ulysses ")).count(), 2, "{text}");
}

/// Nothing side by side hides nothing, and there is nothing to compare it with.
#[test]
fn what_is_hidden_is_not_said_of_the_sequential_policy() {
    let folder = Folder::new();
    let command =
        "bench cp --tokens 256 --iterations 3 --masks causal --json --cp-size 2 --overlap sequential";
    let rows = folder.run(command).ok().json_lines();
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert_eq!(row["overlap"], "sequential");
        for key in ["overlap_efficiency", "sequential_seconds", "hideable_seconds"] {
            assert!(row[key].is_null(), "{key} in {row}");
        }
    }
}

#[test]
fn bad_requests_are_refused() {
    let folder = Folder::new();
    folder.refuses("bench cp --masks circle", &["circle", "varlen_causal"]);
    folder.refuses("bench cp --cp-size 0", &["--cp-size"]);
    folder.refuses("bench cp --iterations 1", &["--iterations"]);
    folder.refuses("bench cp --heads 6:4", &["6:4", "multiple"]);
    folder.refuses("bench cp --overlap never", &["never", "concurrent"]);
    if !std::path::Path::new("/dev/nvidia0").exists() {
        folder.run("bench cp --device cuda").is_refusal(3, &["NVIDIA"]);
    }
}
