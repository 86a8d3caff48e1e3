//! `counterpoint tune gemm` and `counterpoint bench bandwidth` on CPU ranks.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use crate::support::Folder;

const SHAPE: &str =
    "tune gemm --m 64 --n 32 --k 32 --tp-size 2 --iterations 1 --warmups 0 --plans plans.json --json";

/// Every search and collective; what is found is kept, one plan for a shape.
#[test]
fn what_is_found_is_kept() {
    let folder = Folder::new();
    for (collective, search, waves) in
        [("all-gather", "predictive", 8), ("reduce-scatter", "exhaustive", 3), ("all-reduce", "both", 3)]
    {
        let line = format!("{SHAPE} --collective {collective} --search {search} --waves {waves}");
        let document = folder.run(&line).ok().json();
        let searches = document["searches"].as_array().unwrap();
        // Under each of the two policies that CPU ranks run.
        assert_eq!(searches.len(), if search == "both" { 4 } else { 2 });
        for found in searches {
            // Of 64 rows of two ranks, or, under one kernel, of 32 columns.
            let columns = &found["groups"]["columns"];
            assert!(
                columns.is_null() || (found["policy"] == "signals" && collective != "all-gather"),
                "{found}"
            );
            let sizes = columns.as_array().or(found["groups"].as_array()).unwrap();
            assert_eq!(sizes.iter().map(|size| size.as_u64().unwrap()).sum::<u64>(), 32, "{found}");
            assert!(found["measured_seconds"].as_f64().unwrap() > 0.0);
        }
        assert_eq!(document["kept"]["collective"], collective);
        assert!(document["kept"]["seconds"].as_f64() <= document["sequential_seconds"].as_f64());
        folder.run(&line).ok();
    }
    let file: Value = serde_json::from_slice(&folder.read("plans.json")).unwrap();
    assert_eq!(file["version"], 2);
    // Each without overlap, and under two policies.
    assert_eq!(file["plans"].as_array().unwrap().len(), 3 * 3);
    assert_eq!(folder.names(), ["plans.json"]);
}

/// What was tuned is what `bench tp` runs by default from then on, forwards and backwards: the plan in the file is made slower or
/// faster than the others by hand, and the row says what ran.
#[test]
fn what_was_tuned_is_run() {
    let folder = Folder::new();
    let profiles = folder.path("profiles");
    let variables = [("COUNTERPOINT_PROFILE_DIR", profiles.to_str().unwrap())];
    for (pass, collective) in [("forward", "reduce-scatter"), ("backward", "all-reduce")] {
        let line = format!(
            "tune gemm --m 64 --n 32 --k 48 --tp-size 2 --iterations 1 --warmups 0 --json --waves 4 --pass {pass} \
             --collective {collective} --overlap concurrent,signals"
        );
        folder.run_with(&line, &variables).ok();
    }
    keep_signals(&folder, &vec![8, 20, 4].into());
    // Not while others could have written it, nor where they could have put another one in its place.
    let mine =
        |name: &str, mode: u32| set_permissions(folder.path(name), Permissions::from_mode(mode)).unwrap();
    let bench = "bench tp --kinds row --shapes 64:32:24 --tp-size 2 --json";
    for (name, others, own) in [("profiles/tuned-plans.json", 0o666, 0o644), ("profiles", 0o777, 0o700)] {
        mine(name, others);
        for line in [bench, "tune gemm --m 64 --n 32 --k 48 --tp-size 2 --collective reduce-scatter --json"] {
            let refused = folder.run_with(line, &variables);
            assert_eq!(refused.status, 2, "{line}: {}", refused.stderr);
            for word in ["tuned plans", name, "others may write to it", "chmod go-w"] {
                assert!(refused.stderr.contains(word), "{line}: no {word} in {}", refused.stderr);
            }
        }
        mine(name, own);
    }
    for (kind, pass, activations) in
        [("row", "forward", "sequence-parallel"), ("column", "backward", "replicated")]
    {
        // 32 columns and sums of 48 of a row's forward; of a column's backward the other way round.
        let line = format!(
            "bench tp --kinds {kind} --passes {pass} --activations {activations} --shapes 64:32:24 --tp-size 2 --iterations 3 --json"
        );
        for (groups, count) in [(json!([8, 20, 4]), 3), (json!({"columns": [24, 8]}), 2)] {
            keep_signals(&folder, &groups);
            let rows = folder.run_with(&line, &variables).ok().json_lines();
            assert_eq!(rows.len(), 2);
            let ran = ["policy", "groups", "in_columns"].map(|key| &rows[1][key]);
            assert_eq!(ran, [&json!("signals"), &json!(count), &json!(groups.is_object())], "{}", rows[1]);
        }
        // A layer of another shape is predicted.
        let other = line.replace("64:32:24", "64:32:26");
        let rows = folder.run_with(&other, &variables).ok().json_lines();
        assert!(rows.len() == 1 || rows[1]["groups"] != 3, "{rows:?}");
    }
}

/// Has both plans under `signals` say these groups, and that they are faster than all others.
fn keep_signals(folder: &Folder, groups: &Value) {
    let mut file: Value = serde_json::from_slice(&folder.read("profiles/tuned-plans.json")).unwrap();
    let plans = file["plans"].as_array_mut().unwrap();
    let changed = plans.iter_mut().filter(|plan| plan["policy"] == "signals").map(|plan| {
        plan["groups"] = groups.clone();
        plan["seconds"] = 1e-9.into();
    });
    assert_eq!(changed.count(), 2);
    folder.write("profiles/tuned-plans.json", file.to_string());
}

/// Several products of several collectives in one command: a row each, a plan each, and what came of all of them.
#[test]
fn several_products_end_with_a_summary() {
    let folder = Folder::new();
    let line = "tune gemm --shapes 64:32:32,96:64:32 --collective all-gather,reduce-scatter,all-reduce --tp-size 2 \
                --iterations 1 --warmups 0 --waves 3 --search both --plans plans.json";
    let ran = folder.run(&format!("{line} --json")).ok();
    let mut rows: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let summary = rows.pop().unwrap()["summary"].clone();
    assert_eq!(rows.len(), 6);
    let ratios = rows.iter().map(|row| row["predicted_over_best"].as_f64().unwrap());
    let compared = &summary["predicted_over_best"];
    assert_eq!((&summary["cases"], &compared["cases"]), (&6.into(), &6.into()));
    assert_eq!(compared["near"], ratios.clone().filter(|ratio| *ratio <= 1.03).count());
    assert_eq!(compared["worst"]["ratio"], ratios.fold(0.0, f64::max));
    // Under all policies together.
    let took = |row: &Value| -> f64 {
        let searches = row["searches"].as_array().unwrap().iter();
        let predictive = searches.filter(|found| found["search"] == "predictive");
        predictive.map(|found| found["search_seconds"].as_f64().unwrap()).sum()
    };
    let slowest = rows.iter().map(took).fold(0.0, f64::max);
    assert!((summary["predictive_search_seconds"]["max"].as_f64().unwrap() - slowest).abs() < 1e-9);
    assert!(
        summary["seconds"].as_f64()
            >= rows
                .iter()
                .map(|row| row["seconds"].as_f64())
                .max_by(|a, b| a.partial_cmp(b).unwrap())
                .unwrap()
    );
    let file: Value = serde_json::from_slice(&folder.read("plans.json")).unwrap();
    assert_eq!(file["plans"].as_array().unwrap().len(), 6 * 3);
    let table = folder.run(line).ok().stdout;
    assert!(
        table.contains("6 products in")
            && table.contains("best of all sequences on")
            && table.contains("of 6"),
        "{table}"
    );
}

/// Over an imitated link that is slower than the product, groups that overlap are found, and are faster than none: in one of a
/// few attempts, as other programs may take the processor meanwhile.
#[test]
fn an_imitated_link_is_hidden() {
    let folder = Folder::new();
    let line = "tune gemm --m 1k --n 512 --k 1k --tp-size 2 --collective reduce-scatter --slow-link 500,0.01 \
                --iterations 3 --warmups 1 --plans plans.json --json --waves 8 --overlap concurrent";
    let mut attempts = (0..4).map(|_| folder.run(line).ok().json());
    let hidden = |document: &Value| {
        let found = &document["searches"][0];
        println!("{found}");
        found["groups"].as_array().unwrap().len() > 1 && found["ratio"].as_f64().unwrap() > 1.05
    };
    assert!(attempts.any(|document| hidden(&document)));
}

#[test]
fn plans_that_cannot_be_trusted_are_left_alone() {
    let folder = Folder::new();
    let line = format!("{SHAPE} --collective all-gather");
    folder.write("plans.json", "{");
    folder.refuses(&line, &["plans.json", "tune again"]);
    folder.write("plans.json", r#"{"version": 7, "plans": []}"#);
    folder.refuses(&line, &["plans.json", "version 7", "tune again"]);
    let plan = r#"{"device": "X", "transport": "threads", "ranks": 2, "ranks_per_node": 2, "pass": "forward",
        "policy": "concurrent", "bias": false, "m": 64, "n": 8, "k": 8, "dtype": "f32", "collective": "all-gather",
        "groups": [16], "seconds": 1.0, "sequential_seconds": 2.0, "search": "predictive"}"#;
    folder.write("plans.json", format!(r#"{{"version": 2, "plans": [{plan}]}}"#));
    folder.refuses(&line, &["plans.json", "plan 0", "16", "32"]);
    // Another machine's plans stay next to this one's.
    folder
        .write("plans.json", format!(r#"{{"version": 2, "plans": [{}]}}"#, plan.replace("[16]", "[16, 16]")));
    folder.run(&line).ok();
    let file: Value = serde_json::from_slice(&folder.read("plans.json")).unwrap();
    assert_eq!(file["plans"].as_array().unwrap().len(), 1 + 3);
}

#[test]
fn bad_requests_are_refused() {
    let folder = Folder::new();
    let odd = "tune gemm --m 64 --n 33 --k 32 --tp-size 2 --collective all-gather --plans plans.json";
    folder.refuses(odd, &["--n 33", "2 ranks"]);
    folder.refuses(&format!("{SHAPE} --collective all-to-all"), &["all-to-all", "reduce-scatter"]);
    folder.refuses(
        "tune gemm --m 8 --n 8 --k 8 --collective all-reduce --tp-size 1",
        &["--tp-size", "at least 2"],
    );
    let several = "tune gemm --tp-size 2 --collective all-gather --plans plans.json";
    folder.refuses(&format!("{several} --shapes 64:64:32,64:33:32"), &["--shapes 33", "2 ranks"]);
    folder.refuses(&format!("{several} --shapes 64:64:32 --m 64"), &["--shapes", "--m"]);
    folder.refuses(&format!("{several} --m 64"), &["--n", "--k"]);
    let many = format!("{SHAPE} --collective all-gather --search exhaustive --waves 20");
    folder.refuses(&many, &["--waves", "at most 12"]);
    folder.refuses("bench bandwidth -b 4M -e 1M", &["--min-bytes", "--max-bytes"]);
    folder.refuses("bench bandwidth --collectives all", &["all-gather"]);
    folder.refuses("bench bandwidth --transport nccl", &["--transport", "--device cuda"]);
    assert!(folder.names().is_empty());
}

#[test]
fn bandwidth_over_sizes() {
    let folder = Folder::new();
    let ran =
        folder.run("bench bandwidth -b 16K -e 1M -f 8 --tp-size 4 --iterations 2 --warmups 0 --json").ok();
    let rows: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 9);
    for row in &rows {
        let (alg, bus) = (row["algbw"].as_f64().unwrap(), row["busbw"].as_f64().unwrap());
        let factor = if row["name"] == "all-reduce" { 1.5 } else { 0.75 };
        assert!(alg > 0.0 && (bus / alg - factor).abs() < 1e-9, "{row}");
    }
    // An imitated link of 0.1 GB/s carries no more.
    let ran =
        folder.run("bench bandwidth -b 1M -e 1M --tp-size 2 --slow-link 0,0.1 --iterations 2 --json").ok();
    for line in ran.stdout.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let bus = row["busbw"].as_f64().unwrap();
        assert!(bus <= 0.101 && bus > 0.02, "{row}");
    }
    assert!(folder.run("bench bandwidth -b 64K -e 64K").ok().stdout.contains("busbw"));
}
