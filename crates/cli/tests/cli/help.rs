//! Help and usage.

use crate::support::Folder;

const LEVELS: [&str; 26] = [
    "",
    "attention",
    "plan",
    "mask",
    "bench",
    "bench plan",
    "bench attention",
    "bench fresh-masks",
    "bench cp",
    "bench gemm",
    "bench gemm-collective",
    "bench bandwidth",
    "bench tp",
    "bench group-cast",
    "bench group-reduce",
    "simulate",
    "simulate attention",
    "simulate linear",
    "simulate model",
    "tune",
    "tune gemm",
    "tune moe",
    "selftest",
    "doctor",
    "completions",
    "man",
];

#[test]
fn every_level_has_examples() {
    let folder = Folder::new();
    for level in LEVELS {
        let ran = folder.run(&format!("{level} --help")).ok();
        let (_, examples) = ran.stdout.split_once("Examples:\n").unwrap_or_else(|| panic!("{}", ran.stdout));
        let examples: Vec<&str> = examples.lines().take_while(|line| line.starts_with("  ")).collect();
        assert!(examples.first().is_some_and(|line| line.starts_with("  counterpoint ")), "{examples:?}");
        // What is too long for a line, and wrapped, cannot be copied.
        let is_whole = |line: &&str| line.starts_with("      ") || line.contains("counterpoint ");
        assert!(examples.iter().all(is_whole), "{level}\n{examples:#?}");
        assert!(ran.stdout.contains("Usage: counterpoint"), "{level}");
        assert!(!ran.stdout.contains('\u{1b}'), "no colour in a pipe");
        assert_eq!(ran.stderr, "");
    }
    assert!(folder.run("--version").ok().stdout.starts_with("counterpoint "));
}

/// What can be pasted is the same at every width, and so is what stands around it.
#[test]
fn examples_are_never_wrapped() {
    let folder = Folder::new();
    for level in LEVELS {
        let examples = |columns: &str| {
            let help = folder.run_with(&format!("{level} --help"), &[("COLUMNS", columns)]).ok().stdout;
            let (options, examples) = help.split_once("Examples:\n").unwrap();
            let limit: usize = columns.parse().unwrap();
            let options: Vec<&str> = options.lines().take_while(|line| !line.starts_with("Usage:")).collect();
            assert!(options.iter().all(|line| line.chars().count() <= limit), "{level} at {columns}");
            examples.to_owned()
        };
        let wide = examples("110");
        assert!(examples("60") == wide && examples("80") == wide, "{level}\n{wide}\n{}", examples("60"));
    }
}

#[test]
fn shells_get_completions_and_man_gets_pages() {
    let folder = Folder::new();
    for (shell, words) in [
        ("bash", ["complete -F", "--cp-size"]),
        ("zsh", ["#compdef counterpoint", "--cp-size"]),
        ("fish", ["complete -c counterpoint", "cp-size"]),
    ] {
        let script = folder.run(&format!("completions {shell}")).ok().stdout;
        assert!(words.iter().all(|word| script.contains(word)), "{shell}");
    }
    folder.refuses("completions csh-of-old", &["csh-of-old", "bash"]);
    let page = folder.run("man").ok().stdout;
    assert!(page.contains(".TH counterpoint 1") && page.contains("Exit status: 0 done"), "{page}");
    let page = folder.run("man bench tp").ok().stdout;
    assert!(page.contains(".TH counterpoint-bench-tp 1") && page.contains("\\-\\-activations"), "{page}");
    folder.refuses("man bench pt", &["`pt`", "counterpoint-bench", "tp"]);
    folder.refuses("man plan tp", &["counterpoint-plan", "`tp`"]);
}

/// Every example of the mask, the plan and small attention runs as it stands.
#[test]
fn examples_work() {
    let folder = Folder::new();
    folder.write("documents.txt", "100\n2000\n300\n");
    folder.write(
        "mask.json",
        r#"{"seqlen_q": 64, "seqlen_k": 64, "slices": [{"q": [0, 64], "k": [0, 64], "type": "causal"}]}"#,
    );
    for level in ["mask", "plan", "simulate"] {
        let help = folder.run(&format!("{level} --help")).ok().stdout;
        let (_, examples) = help.split_once("Examples:").unwrap();
        let mut count = 0;
        let examples = examples.replace("\\\n", "");
        for line in examples.lines().filter_map(|line| line.trim().strip_prefix("counterpoint ")) {
            let (line, _) = line.split_once(" > ").unwrap_or((line, ""));
            folder.run(line).ok();
            count += 1;
        }
        assert!(count >= 3, "{level}: {count}");
    }
}

#[test]
fn flags_of_the_interface_exist() {
    let folder = Folder::new();
    for (command, flags) in [
        (
            "attention",
            &[
                "--mask",
                "--input",
                "--output",
                "--cp-size",
                "--chunk-size",
                "--device",
                "--backward",
                "--check",
                "--stages",
                "--dispatch",
                "--scale",
                "--softcap",
                "--deterministic",
                "--report",
                "--trace",
                "--json",
                "--seqlen",
                "--heads-q",
                "--heads-kv",
                "--head-dim",
                "--dtype",
                "--seed",
                "--allow-non-finite",
                "--overlap",
                "--limit",
                "--slow-link",
                "--slow-network",
                "--nodes",
                "--exchange",
            ][..],
        ),
        (
            "plan",
            &[
                "--mask",
                "--cp-size",
                "--chunk-size",
                "--dispatch",
                "--nodes",
                "--heads-q",
                "--json",
                "--report",
            ],
        ),
        ("mask", &["--svg", "--json"]),
        ("bench plan", &["--json"]),
        ("bench attention", &["--json"]),
    ] {
        let help = folder.run(&format!("{command} --help")).ok().stdout;
        for flag in flags {
            assert!(help.contains(flag), "{command}: {flag}");
        }
    }
}

#[test]
fn bad_usage_is_one_sentence() {
    let folder = Folder::new();
    folder.refuses("", &["requires a subcommand", "--help"]);
    for (line, words) in [
        ("atention", &["atention"][..]),
        ("bench", &["subcommand"]),
        ("bench everything", &["everything"]),
        ("plan --cp-size 4", &["--mask"]),
        ("plan --mask causal:8", &["--cp-size"]),
        ("plan --mask causal:8 --cp-size", &["--cp-size"]),
        ("plan --mask causal:8 --cp-size 0", &["--cp-size", "cp_size is 0", "between 1 and 4096"]),
        ("plan --mask causal:8 --cp-size 4097", &["4097", "between 1 and 4096"]),
        ("plan --mask causal:8 --cp-size -3", &["-3"]),
        ("plan --mask causal:8 --cp-size 2.5", &["2.5", "between 1 and 4096"]),
        ("plan --mask causal:8 --cp-size 2 --chunk-size 0", &["--chunk-size", "at least 1"]),
        ("plan --mask causal:8 --cp-size 2 --chunk-size x", &["--chunk-size", "`x`"]),
        ("plan --mask causal:8 --cp-size 2 --nodes 3", &["--nodes", "3", "2"]),
        ("plan --mask causal:8 --cp-size 2 --nodes 0", &["--nodes"]),
        (
            "plan --mask causal:8 --cp-size 2 --dispatch best",
            &["best", "affinity", "min-heap", "sequential", "zigzag"],
        ),
        ("plan --mask causal:8 --cp-size 2 --heads-q 6 --heads-kv 4", &["6", "4", "divide"]),
        ("plan --mask causal:8 --cp-size 2 --head-dim 0", &["--head-dim"]),
        ("plan --mask causal:8 --cp-size 2 --stages 65", &["--stages"]),
        ("plan --mask causal:8 --cp-size 2 --speed 3", &["--speed"]),
        ("attention --mask causal:8 --cp-size 0", &["--cp-size", "between 1 and 4096"]),
        ("attention --mask causal:8 --cp-size 5000", &["5000"]),
        ("attention --mask causal:8 --chunk-size 0", &["--chunk-size"]),
        ("attention --mask causal:8 --stages some", &["--stages", "auto"]),
        ("attention --mask causal:8 --dtype f8", &["f8", "bf16"]),
        ("attention --mask causal:8 --seqlen 9", &["--seqlen 9", "8"]),
        ("attention --mask causal:8 --seqlen 0", &["--seqlen"]),
        ("attention --mask causal:8 --heads-q 6 --heads-kv 4", &["6", "4", "divide"]),
        ("attention --mask causal:8 --head-dim 0", &["--head-dim"]),
        ("attention --mask causal:8 --scale nan", &["--scale"]),
        ("attention --mask causal:8 --softcap -1", &["--softcap", "at least 0"]),
        ("attention --mask causal:8 --limit 0", &["--limit"]),
        ("attention --mask causal:8 --overlap magic", &["magic", "kernel-barrier"]),
        ("attention --mask causal:8 --cp-size 3 --nodes 2", &["--nodes", "3", "2"]),
        ("attention --mask causal:8 --cp-size 2 --slow-network 1,1", &["--slow-network", "--nodes 2"]),
        ("attention --mask causal:8 --overlap sequential,concurrent", &["2 policies", "forward=POLICY"]),
        ("attention --mask causal:8 --overlap backward=fast", &["fast", "kernel-barrier"]),
        ("attention --mask causal:8 --overlap sequential+priority", &["sequential", "`priority`"]),
        ("attention --mask causal:8 --overlap copy-engine", &["copy-engine", "CPU ranks"]),
        ("attention --mask causal:8 --slow-link 3", &["--slow-link", "ALPHA_US,GB_PER_S"]),
        ("attention --mask causal:8 --input qkv.safetensors", &["--output"]),
        ("attention --mask causal:8 --input a --output b --seed 3", &["--seed", "--input"]),
        ("attention --mask causal:8 --output missing/out.safetensors", &["--output", "missing"]),
        ("attention --mask causal:8 --report missing/report.html", &["--report", "missing"]),
        ("attention --mask causal:8 --trace missing/trace.json", &["--trace", "missing"]),
        ("attention --mask causal:8 --report same --trace same", &["--report", "--trace", "same"]),
        ("bench plan --iterations 3", &["--iterations"]),
    ] {
        folder.refuses(line, words);
    }
}

#[test]
fn cuda_says_what_it_takes_and_what_is_missing() {
    let folder = Folder::new();
    let line = "attention --mask causal:8 --device cuda";
    folder.refuses(&format!("{line} --dtype f32"), &["--device cuda", "bf16"]);
    folder.refuses(&format!("{line} --slow-link 1,1"), &["--device cuda", "--slow-link"]);
    let ran = folder.run(&format!("{line} --output out.safetensors"));
    if ran.status == 0 {
        assert_eq!(folder.names(), ["out.safetensors"]);
        return;
    }
    // No GPU, or no compiler for it.
    ran.is_refusal(3, &["NV"]);
    assert!(folder.names().is_empty());
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let folder = Folder::new();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_counterpoint"))
        .args(["mask", "varlen-causal:lengths=3,4,5"])
        .current_dir(folder.path("."))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]));
}
