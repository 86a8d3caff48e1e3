//! `counterpoint bench tp`.

use crate::support::Folder;

#[test]
fn every_policy_is_compared_with_the_sequential_run() {
    let folder = Folder::new();
    let command = "bench tp --shapes 96:64:32,50:24:16 --iterations 3 --tp-size 3 --groups 1,3 --json \
                   --overlap concurrent,kernel-barrier,concurrent+sm-margin=2";
    let ran = folder.run(command).ok();
    let rows = ran.json_lines();
    // Two shapes, two kinds, two activations, two passes; sequential, and three policies in one group and in three.
    assert_eq!(rows.len(), 2 * 2 * 2 * 2 * 7);
    let figure =
        |row: &serde_json::Value, key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    let mut judged = 0;
    for rows in rows.chunks(7) {
        let plain = &rows[0];
        assert_eq!((&plain["policy"], figure(plain, "groups")), (&"sequential".into(), 1.0));
        for row in rows {
            for key in ["kind", "pass", "activations", "shape", "sequential_seconds", "ideal_seconds"] {
                assert_eq!(row[key], plain[key], "{key}");
            }
            assert!(figure(row, "of_bound") <= 1.0 && figure(row, "tflops") > 0.0, "{row}");
            assert_eq!(figure(row, "sequential_seconds"), figure(&plain["seconds"], "median"));
            let speedup = figure(row, "sequential_seconds") / figure(&row["seconds"], "median");
            assert!((figure(row, "speedup") - speedup).abs() < 1e-12, "{row}");
            for [share, noise] in [["efficiency", "efficiency_noise"], ["hidden", "hidden_noise"]] {
                let known = row[noise].as_f64().is_some_and(|noise| noise <= 0.2);
                assert_eq!(row[share].is_f64(), known, "{row}");
            }
            if let Some(hidden) = row["hidden"].as_f64() {
                let exposed = figure(row, "exposed_seconds") / figure(row, "communication_seconds");
                assert!((hidden - (1.0 - exposed)).abs() < 1e-12, "{row}");
            }
            if let Some(efficiency) = row["efficiency"].as_f64() {
                let seconds = figure(&row["seconds"], "median");
                let hidden = figure(row, "sequential_seconds") - seconds;
                let hideable = figure(row, "sequential_seconds") - figure(row, "ideal_seconds");
                assert!((efficiency * hideable - hidden).abs() < 1e-12, "{row}");
                judged += 1;
            }
        }
    }
    // All but what needs no communication, a column's forward and a row's backward with all tokens on all ranks, or hardly any; and what a
    // machine that does something else besides says nothing of.
    assert!(judged <= 2 * 6 * 6, "{judged}");
}

/// A fused pass is judged by the time it takes, for what its kernels send is no operation of its own.
#[test]
fn a_fused_pass_says_what_it_hides() {
    let folder = Folder::new();
    let command =
        "bench tp --shapes 96:64:32 --iterations 3 --kinds row --passes forward --overlap fused --json";
    for rows in folder.run(command).ok().json_lines().chunks(2) {
        let [plain, fused] = rows else { panic!("{rows:?}") };
        assert_eq!(fused["policy"], "concurrent+fused");
        let figure = |key: &str| fused[key].as_f64().unwrap_or_else(|| panic!("{key} in {fused}"));
        let communication = figure("communication_seconds");
        assert!(communication > 0.0 && figure("hidden_noise") >= 0.0, "{fused}");
        assert!((0.0..=communication).contains(&figure("exposed_seconds")), "{fused}");
        assert!(plain["hidden"] == 0.0, "{plain}");
    }
}

#[test]
fn a_norm_behind_a_layer_is_checked_and_timed() {
    let folder = Folder::new();
    let command = "bench tp --shapes 50:24:16 --iterations 3 --tp-size 3 --kinds row --rms-norm --overlap signals,fused";
    let rows = folder.run(&format!("{command} --json")).ok().json_lines();
    // Two activations, two passes, sequential and two policies.
    assert_eq!(rows.len(), 2 * 2 * 3);
    assert!(rows.iter().all(|row| row["behind"] == "rms-norm" && row["of_bound"].as_f64().unwrap() <= 1.0));
    let text = folder.run(command).ok().stdout;
    assert!(text.lines().any(|line| line.starts_with(" row+rms-norm ")), "{text}");
    folder.refuses("bench tp --rms-norm", &["--rms-norm", "--kinds row"]);
}

#[test]
fn a_table_has_a_line_for_each() {
    let folder = Folder::new();
    let ran =
        folder.run("bench tp --shapes 64:16:16 --iterations 3 --kinds row --passes forward --bias").ok();
    // Two activations, sequential and in the way that is predicted to be fastest.
    assert_eq!(ran.stdout.lines().filter(|line| line.starts_with(" row ")).count(), 2 * 2, "{}", ran.stdout);
}

/// Each number of hardware queues has a process and the same cases, and every case says how far they are apart.
#[test]
fn numbers_of_hardware_queues_are_measured_in_turn() {
    let folder = Folder::new();
    let command = "bench tp --shapes 64:16:16 --iterations 3 --kinds row --passes forward --activations replicated \
                   --overlap concurrent --connections 1,8";
    let rows = folder.run(&format!("{command} --json")).ok().json_lines();
    let queues: Vec<u64> = rows.iter().filter_map(|row| row["connections"].as_u64()).collect();
    assert_eq!(queues, [1, 1, 8, 8]);
    assert_eq!((&rows[0]["policy"], &rows[1]["policy"]), (&rows[2]["policy"], &rows[3]["policy"]));
    let text = folder.run(command).ok().stdout;
    let said = |line: &&str| line.starts_with(" row forward replicated 64:16:16 concurrent ");
    assert_eq!(text.lines().filter(said).count(), 2, "{text}");
}

/// In place of PyTorch's ranks: one way of each layer's forward, which takes as long as this.
fn rank_of_pytorch(seconds: &str) -> String {
    let known = r#"[{"by": "megatron", "pass": "forward", "connections": "unset", "error_over_bound": 0.5}]"#;
    format!(
        "#!/bin/sh\nwhile read line; do case \"$line\" in *case*) echo '{known}';; *) echo '[{seconds}, 0.0001]';; esac; done\n"
    )
}

const WITH_PEERS: &str = "bench tp --shapes 64:16:16 --iterations 3 --kinds row --passes forward --activations replicated --peers=8";

#[test]
fn ways_of_pytorch_are_compared_with_the_fastest_of_ours() {
    let folder = Folder::new();
    let path = folder.with_python(&rank_of_pytorch("0.5"));
    let variables = [("PATH", path.as_str())];
    for more in ["", " --connections 8"] {
        let rows = folder.run_with(&format!("{WITH_PEERS}{more} --json"), &variables).ok().json_lines();
        let (peers, ours): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["by"] == "megatron");
        assert_eq!((ours.len(), peers.len()), (2, 1));
        let figure = |row: &serde_json::Value, key: &str| row[key].as_f64().unwrap();
        let best = ours.iter().map(|row| figure(&row["seconds"], "median")).fold(f64::INFINITY, f64::min);
        assert_eq!((figure(peers[0], "ours_seconds"), figure(&peers[0]["seconds"], "median")), (best, 0.5));
        assert!((figure(peers[0], "ratio") * best - 0.5).abs() < 1e-9);
        let text = folder.run_with(&format!("{WITH_PEERS}{more}"), &variables).ok().stdout;
        assert!(
            text.lines().any(|line| line.starts_with(" megatron ") && line.contains(" 500000.0 ")),
            "{text}"
        );
    }
}

/// Whatever they lack, our rows are kept.
#[test]
fn ranks_of_pytorch_that_fail_spoil_no_row_of_ours() {
    let folder = Folder::new();
    let path = folder.with_python("#!/bin/sh\nexit 3\n");
    for more in ["", " --connections 8"] {
        let ran = folder.run_with(&format!("{WITH_PEERS}{more} --json"), &[("PATH", path.as_str())]);
        assert!(ran.status != 0 && ran.stderr.contains("no PyTorch that sees 2 GPUs"), "{}", ran.stderr);
        assert_eq!(ran.json_lines().len(), 2, "{}", ran.stdout);
    }
}

#[test]
fn bad_requests_are_refused() {
    let folder = Folder::new();
    folder.refuses("bench tp --kinds round", &["round", "column"]);
    folder.refuses("bench tp --shapes 8:8", &["8:8"]);
    folder.refuses("bench tp --tp-size 0", &["--tp-size"]);
    folder.refuses("bench tp --peers=0", &["--peers"]);
    folder.refuses("bench tp --plain-products cublaslt", &["--plain-products", "--device cuda"]);
    folder.refuses("bench tp --connections 33", &["--connections"]);
    folder.refuses("bench tp --transport nccl", &["--transport", "cuda"]);
    if !std::path::Path::new("/dev/nvidia0").exists() {
        folder.run("bench tp --device cuda").is_refusal(3, &["NVIDIA"]);
    }
}

/// Layers of one input compared with those that share nothing, each way checked, with uneven tokens, biases and gradients of every kind.
#[test]
fn layers_that_share_their_input_are_checked_and_timed() {
    let folder = Folder::new();
    for (gradient, bias) in [("f32", ""), ("written", "--bias"), ("own", "--bias"), ("frozen", "")] {
        let command = format!(
            "bench tp --shared-input 3 --shapes 50:24:16 --iterations 3 --tp-size 3 --overlap auto,signals --gradient {gradient} {bias} --json"
        );
        let rows = folder.run(&command).ok().json_lines();
        // Two activations, two passes; apart, sequential and two that were asked for.
        assert_eq!(rows.len(), 2 * 2 * 4);
        for row in &rows {
            assert_eq!(row["schema"], "counterpoint.bench-tp-shared-input/1");
            assert_eq!((&row["layers"], &row["ranks"]), (&3.into(), &3.into()));
            assert!(
                row["of_bound"].as_f64().unwrap() <= 1.0 && row["speedup"].as_f64().unwrap() > 0.0,
                "{row}"
            );
        }
        let asked: Vec<&str> = rows[..4].iter().map(|row| row["overlap"].as_str().unwrap()).collect();
        assert_eq!(asked, ["apart", "sequential", "auto", "signals"]);
    }
    let command = "bench tp --shared-input 2 --shapes 64:32:16 --iterations 3";
    let text = folder.run(command).ok().stdout;
    assert!(text.contains("2 column-parallel layers of one input") && text.contains("apart: "), "{text}");
    folder.refuses(&format!("{command} --overlap fused"), &["--overlap", "several"]);
    folder.refuses(&format!("{command} --kinds row"), &["--shared-input", "--kinds"]);
    folder.refuses("bench tp --shared-input 1", &["--shared-input", "2"]);
}
