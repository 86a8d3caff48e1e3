//! `counterpoint simulate`: what it prints, where it writes, and what it refuses.

use serde_json::Value;

use crate::support::Folder;

const LINEAR: &str = "simulate linear --kind row --tokens 8k --in-features 28672 --out-features 8k";

fn rows(document: &Value) -> &Vec<Value> {
    document["rows"].as_array().unwrap()
}

#[test]
fn a_linear_layer_under_every_policy() {
    let folder = Folder::new();
    let line = format!("{LINEAR} --tp-size 8 --json --trace trace.json --report page.html");
    let document = folder.run(&line).ok().json();
    let seconds = |pass: &str, policy: &str| {
        let row = rows(&document).iter().find(|row| row["pass"] == pass && row["policy"] == policy);
        row.unwrap()["seconds"].as_f64().unwrap()
    };
    // A product holds all multiprocessors; copy engines take none.
    let sequential = seconds("forward", "sequential");
    assert!(seconds("forward", "concurrent") > seconds("forward", "kernel-barrier"));
    assert!(seconds("forward", "kernel-barrier") < sequential);
    assert!(seconds("forward", "concurrent+copy-engine") < 0.85 * sequential);
    let trace: Value = serde_json::from_slice(&folder.read("trace.json")).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 50);
    let page = String::from_utf8(folder.read("page.html")).unwrap();
    assert!(page.contains("kernel-barrier") && page.contains("id=\"timeline\"") && !page.contains("https:"));
    // Groups are printed, and may be given.
    let given = folder.run(&format!("{LINEAR} --tp-size 8 --json --groups 512+256+256")).ok().json();
    assert_eq!(given["setup"]["groups"], "512+256+256");
}

/// Thousands of ranks in no time, and communication that grows with the nodes.
#[test]
fn a_step_of_a_model_on_thousands_of_ranks() {
    let folder = Folder::new();
    let line = "simulate model --model llama3-70b --ranks 8,4096 --overlap sequential,copy-engine --json";
    let document = folder.run(line).ok().json();
    let step = |ranks: u64, policy: &str, field: &str| {
        let row = rows(&document).iter().find(|row| row["ranks"] == ranks && row["policy"] == policy);
        row.unwrap()["step"][field].as_f64().unwrap()
    };
    assert_eq!(step(8, "sequential", "replica_seconds"), 0.0);
    assert!(step(4096, "sequential", "replica_exposed_seconds") > 0.1);
    for ranks in [8, 4096] {
        let exposed = |policy| step(ranks, policy, "exposed_seconds");
        assert!(exposed("concurrent+copy-engine") < 0.4 * exposed("sequential"));
        let rate = step(ranks, "concurrent+copy-engine", "tflops_per_rank");
        assert!(rate > 300.0 && rate < 700.0, "{rate}");
    }
    let parts = rows(&document)[0]["layer"]["parts"].as_array().unwrap();
    let names: Vec<&str> = parts.iter().map(|part| part["part"].as_str().unwrap()).collect();
    assert_eq!(names, ["norm", "qkv", "attention", "attention output", "norm", "up", "down"]);
    folder.run("simulate model --model gpt3-175b --tokens 2k --ranks 512").ok();
}

#[test]
fn attention_on_two_levels() {
    let folder = Folder::new();
    let line =
        "simulate attention --mask causal:32k --cp-size 16 --heads-q 16 --heads-kv 4 --dtype bf16 --json";
    let near = folder.run(&format!("{line} --ranks-per-node 16")).ok().json();
    let far = folder.run(&format!("{line} --ranks-per-node 2")).ok().json();
    let communication = |document: &Value| rows(document)[0]["communication_seconds"].as_f64().unwrap();
    assert!(communication(&far) > communication(&near));
    let is_chosen = |row: &&Value| row["chosen"] == true;
    assert_eq!(rows(&near).iter().filter(is_chosen).count(), 2, "{near}");
    assert_eq!(rows(&near).len(), 12, "{near}");
}

/// What runs depends on the nodes, and what is marked is what runs.
#[test]
fn rows_say_what_can_run_and_what_is_run() {
    let folder = Folder::new();
    let linear = |ranks: usize, more: &str| {
        let line = format!("{LINEAR} --tp-size {ranks} --ranks-per-node 8 {more}");
        folder.run(&format!("{line} --json")).ok().json()
    };
    let of = |document: &Value, pass: &str, policy: &str| -> Value {
        let row = rows(document).iter().find(|row| row["pass"] == pass && row["policy"] == policy);
        row.unwrap_or_else(|| panic!("no {policy} in {document}")).clone()
    };
    let one = linear(8, "");
    for pass in ["forward", "backward"] {
        let of_pass = || rows(&one).iter().filter(|row| row["pass"] == pass);
        assert_eq!(of_pass().filter(|row| row["chosen"] == true).count(), 1, "{one}");
        assert!(of_pass().all(|row| row["can_run"].is_boolean()), "{one}");
        // The kernels that send what they compute: known, and the fastest of all.
        let fused = of(&one, pass, "concurrent+fused");
        assert_eq!((&fused["can_run"], &fused["transport"]), (&true.into(), &"nvlink".into()));
    }
    assert_eq!(of(&one, "forward", "concurrent+fused")["chosen"], true);
    let two = linear(16, "");
    for policy in ["concurrent+fused", "concurrent+copy-engine"] {
        let row = of(&two, "forward", policy);
        assert_eq!((&row["can_run"], &row["chosen"]), (&false.into(), &false.into()));
        assert!(row["reason"].is_string() && row["transport"].is_null(), "{row}");
    }
    for pass in ["forward", "backward"] {
        let chosen: Vec<&Value> =
            rows(&two).iter().filter(|row| row["pass"] == pass && row["chosen"] == true).collect();
        assert!(chosen.len() == 1 && chosen[0]["policy"] != "sequential", "{two}");
        assert_eq!(chosen[0]["can_run"], true);
    }
    let auto = linear(8, "--overlap auto");
    assert_eq!(rows(&auto).len(), 2);
    assert!(rows(&auto).iter().all(|row| row["asked"] == "auto" && row["chosen"] == true), "{auto}");
    let text = folder.run(&format!("{LINEAR} --tp-size 16")).ok().stdout;
    assert_eq!(text.matches("predicted fastest").count(), 2, "{text}");
    assert_eq!(text.matches("default").count(), 2, "{text}");
    let marked = |line: &&str| line.contains("predicted fastest");
    assert!(text.lines().filter(marked).all(|line| !line.contains("cannot run")), "{text}");

    let attention =
        "simulate attention --mask causal:32k --cp-size 16 --heads-q 16 --heads-kv 4 --dtype bf16";
    let document = folder.run(&format!("{attention} --ranks-per-node 2 --json")).ok().json();
    assert_eq!(of(&document, "forward", "concurrent+copy-engine")["can_run"], false);
    for pass in ["forward", "backward"] {
        let of_pass = || rows(&document).iter().filter(|row| row["pass"] == pass && row["can_run"] == true);
        let seconds = |row: &Value| row["seconds"].as_f64().unwrap();
        let chosen = of_pass().find(|row| row["chosen"] == true).unwrap();
        // Its variable is not for this program to set.
        let others = of_pass().filter(|row| row["policy"] != "concurrent+single-connection");
        assert!(others.map(seconds).all(|other| seconds(chosen) <= 1.004 * other), "{document}");
    }
    let margins =
        folder.run(&format!("{attention} --overlap forward=sm-margin=8,backward=auto --json")).ok().json();
    assert!(
        of(&margins, "forward", "concurrent+sm-margin=8")["warning"].as_str().unwrap().contains("16 workers")
    );
    let near = folder.run(&format!("{attention} --ranks-per-node 16 --json")).ok().json();
    assert_eq!(of(&near, "forward", "concurrent+copy-engine")["can_run"], true);
}

/// The masks of the benchmarks by name, and what of keys moves compared with other ways.
#[test]
fn presets_say_what_moves() {
    let folder = Folder::new();
    let line =
        "simulate attention --cp-size 8 --heads-q 64 --heads-kv 8 --dtype bf16 --overlap auto --json --mask";
    for preset in ["block_causal_last_global", "shared_question", "sw_global", "block_sparse"] {
        let document = folder.run(&format!("{line} preset:{preset},64k")).ok().json();
        let of = |name: &str| -> f64 {
            document["setup"][format!("key_rows_of_{name}")].as_str().unwrap().parse().unwrap()
        };
        assert_eq!((of("ring"), of("all_gather")), (1.0, 1.0));
        // 64 query heads and 8 key heads, of which 7 of 8 rows leave, there and back.
        assert!((of("ulysses") - 9.0 / 8.0).abs() < 0.002, "{document}");
        assert!(of("lower_bound") <= of("this_plan") && of("this_plan") < 1.0, "{document}");
        if preset == "block_causal_last_global" {
            // What no plan as level goes below: within 15 %.
            assert!(of("lower_bound") > 0.7 && of("this_plan") <= 1.15 * of("lower_bound"), "{document}");
        }
    }
    folder.refuses(&format!("{line} preset:sw_locale,64k"), &["sw_locale", "sw_global"]);
}

/// A policy that means nothing to attention is refused wherever attention is.
#[test]
fn attention_refuses_what_only_layers_have() {
    let folder = Folder::new();
    for line in [
        "attention --mask causal:64 --cp-size 2",
        "bench cp",
        "simulate attention --mask causal:64 --cp-size 2",
    ] {
        folder.refuses(&format!("{line} --overlap fused"), &["fused", "linear layers", "--stages 0"]);
    }
}

#[test]
fn a_profile_decides_and_a_wrong_one_is_refused() {
    let folder = Folder::new();
    let cost = r#"{"forward_flops_per_second": 1e14, "backward_flops_per_second": 1e14, "matmul_flops_per_second": 1e14,
        "memory_bytes_per_second": 1e12, "launch_seconds": 1e-6,
        "link": {"alpha_seconds": 1e-6, "bytes_per_second": 1e11}, "network": {"alpha_seconds": 1e-6, "bytes_per_second": 1e10}}"#;
    folder
        .write("slow.json", format!(r#"{{"version": 1, "machine": "Slow", "devices": 2, "cost": {cost}}}"#));
    let document = folder.run(&format!("{LINEAR} --tp-size 8 --profile slow.json --json")).ok().json();
    assert_eq!(document["setup"]["machine"], "Slow");
    // 2 x 8192 x 28672 x 8192 / 8 operations at 1e14 a second.
    let compute = rows(&document)[0]["compute_seconds"].as_f64().unwrap();
    assert!(compute > 4.8e-3 && compute < 5.2e-3, "{compute}");

    let line = format!("{LINEAR} --tp-size 8 --profile");
    folder.refuses(&format!("{line} none.json"), &["none.json", "machine profile"]);
    folder.write("other.json", r#"{"version": 9}"#).write("torn.json", r#"{"version": 1, "mach"#);
    folder.refuses(&format!("{line} other.json"), &["other.json", "version 9", "doctor --calibrate"]);
    folder.refuses(&format!("{line} torn.json"), &["torn.json", "doctor --calibrate"]);
}

#[test]
fn what_does_not_divide_is_refused() {
    let folder = Folder::new();
    folder.refuses(&format!("{LINEAR} --tp-size 9"), &["--in-features 28672", "9 ranks"]);
    folder.refuses(&format!("{LINEAR} --tp-size 0"), &["--tp-size", "4096"]);
    folder.refuses(&format!("{LINEAR} --tp-size 8 --groups 3+x"), &["--groups", "3+x"]);
    folder.refuses(&format!("{LINEAR} --tp-size 8 --groups 512+256"), &["768", "1024"]);
    folder.refuses(&format!("{LINEAR} --tp-size 8 --overlap fast"), &["fast", "kernel-barrier"]);
    let own = "simulate model --hidden 4k --heads-q 32 --heads-kv 8 --feed-forward 14k --layers 32 --ranks 8 \
               --overlap concurrent --json";
    let seconds = |more: &str| {
        let document = folder.run(&format!("{own} {more}")).ok().json();
        assert_eq!(
            (&document["setup"]["model"], &document["setup"]["layers"]),
            (&"of these sizes".into(), &"32".into())
        );
        document["rows"][0]["step"]["seconds"].as_f64().unwrap()
    };
    // Replicated activations send as much and normalise every token on every rank; half the layers take half the time.
    assert!(seconds("--activations replicated") > 1.02 * seconds(""));
    assert!(seconds("--gradient written") > 0.5 * seconds(""));
    folder.refuses("simulate model --heads-kv 7", &["--heads-kv", "64 query heads"]);
    folder.refuses("simulate model --ranks 12", &["12", "tp_size 8"]);
    folder.refuses("simulate model --ranks 24 --tp-size 24", &["24", "64 query heads"]);
    folder.refuses("simulate model --model gpt5", &["gpt5", "llama3-70b"]);
    folder.refuses(&format!("{LINEAR} --tp-size 8 --trace same --report same"), &["--trace", "--report"]);
}

#[test]
fn a_norm_behind_a_layer_is_predicted_with_it() {
    let folder = Folder::new();
    let command = format!("{LINEAR} --tp-size 8 --overlap sequential,concurrent,signals --json");
    let seconds = |more: &str| -> Vec<f64> {
        let ran = folder.run(&format!("{command}{more}")).ok();
        let document: Value = serde_json::from_str(&ran.stdout).unwrap();
        document["rows"].as_array().unwrap().iter().map(|row| row["seconds"].as_f64().unwrap()).collect()
    };
    let (plain, normalised) = (seconds(""), seconds(" --rms-norm"));
    assert_eq!(plain.len(), normalised.len());
    assert!(plain.iter().zip(&normalised).all(|(plain, both)| both > plain), "{plain:?} {normalised:?}");
    let column = LINEAR.replace("--kind row", "--kind column");
    folder.refuses(&format!("{column} --tp-size 8 --rms-norm"), &["--rms-norm", "--kind row"]);
}
