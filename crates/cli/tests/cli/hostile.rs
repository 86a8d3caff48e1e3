//! What hostile use found, held for good.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use safetensors::Dtype;

use crate::support::{Folder, Tensor, qkv, safetensors, values_of};

const SMALL: &str = "attention --mask causal:8 --heads-q 1 --head-dim 4";

fn mkfifo(folder: &Folder, name: &str) {
    assert!(Command::new("mkfifo").arg(folder.path(name)).status().unwrap().success());
}

#[test]
fn outputs_are_written_together_or_not_at_all() {
    let folder = Folder::new();
    folder.write("old.st", "old");
    // A device that is full is found while writing: the files before it must not be there.
    let full = format!("{SMALL} --output old.st --trace new.json --report /dev/full");
    folder.refuses(&full, &["--report", "/dev/full", "no file was changed"]);
    // A name that is too long is found before anything is computed: the slow link would take a minute.
    let slow = "--cp-size 2 --chunk-size 1 --slow-link 60000000,1";
    let long = format!("{SMALL} {slow} --output new.st --report {}", "a".repeat(300));
    let begin = Instant::now();
    folder.refuses(&long, &["--report", "too long"]);
    assert!(begin.elapsed() < Duration::from_secs(30));
    folder
        .refuses(&format!("{SMALL} --output /proc/x.st"), &["--output", "/proc", "no files can be created"]);
    assert_eq!((folder.names(), folder.read("old.st")), (vec!["old.st".to_owned()], b"old".to_vec()));
}

#[test]
fn an_output_is_written_through_links() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("there")).unwrap();
    for (link, target) in [("link", "there/out.st"), ("lost", "gone/out.st"), ("circle", "circle")] {
        std::os::unix::fs::symlink(target, folder.path(link)).unwrap();
    }
    for _ in 0..2 {
        folder.run(&format!("{SMALL} --output link")).ok();
        assert!(folder.path("link").symlink_metadata().unwrap().is_symlink());
        assert!(folder.path("there/out.st").symlink_metadata().unwrap().is_file());
    }
    folder.refuses(&format!("{SMALL} --output lost"), &["--output", "gone", "does not exist"]);
    folder.refuses(&format!("{SMALL} --output circle"), &["--output", "circle"]);
    std::fs::remove_file(folder.path("there/out.st")).unwrap();
    folder.refuses(
        &format!("{SMALL} --output link --trace there/out.st"),
        &["--output", "--trace", "same file"],
    );
}

/// Nobody at the other end of a pipe: the program says what it waits for, and an interruption ends it.
#[test]
fn a_pipe_without_another_end_is_named() {
    let folder = Folder::new();
    mkfifo(&folder, "pipe.json");
    for line in [
        "mask pipe.json",
        "plan --mask pipe.json --cp-size 2",
        &format!("{SMALL} --output pipe.json --trace t"),
    ] {
        let stderr = std::fs::File::create(folder.path("stderr")).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_counterpoint"))
            .args(line.split_whitespace())
            .current_dir(folder.path("."))
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while !String::from_utf8(folder.read("stderr")).unwrap().contains("pipe.json is a pipe; waiting") {
            assert!(begin.elapsed() < Duration::from_secs(30), "{line}: nothing was said");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none(), "{line}: it waits");
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if begin.elapsed() > Duration::from_secs(30) {
                child.kill().unwrap();
                panic!("{line}: an interruption does not end it");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(130), "{line}");
        assert_eq!(folder.names(), ["pipe.json", "stderr"], "{line}");
    }
}

/// What a shell gives for `<(...)`.
#[test]
fn a_mask_from_a_pipe_without_a_name() {
    let folder = Folder::new();
    let line = format!(
        "'{}' mask <(echo '{{\"seqlen_q\":2,\"seqlen_k\":2,\"slices\":[]}}') --json",
        env!("CARGO_BIN_EXE_counterpoint")
    );
    let output = Command::new("bash").args(["-c", &line]).current_dir(folder.path(".")).output().unwrap();
    assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]), "{output:?}");
}

#[test]
fn factors_that_numbers_cannot_hold() {
    let folder = Folder::new();
    for value in ["1e300", "-1e300", "1e38", "1000001", "-1e7"] {
        folder.refuses(&format!("{SMALL} --output o --backward --scale {value}"), &["--scale", value, "1e6"]);
        folder
            .refuses(&format!("{SMALL} --output o --dtype f64 --scale {value}"), &["--scale", value, "1e6"]);
    }
    for dtype in ["f32", "bf16", "f16"] {
        let words = ["--scale", "e-45", "f32", "1.1754943508222875e-38", "1e6"];
        folder.refuses(&format!("{SMALL} --output o --dtype {dtype} --scale 1e-45"), &words);
        folder.refuses(&format!("{SMALL} --output o --dtype {dtype} --scale -1e-45"), &words);
    }
    folder.refuses(
        &format!("{SMALL} --output o --dtype f64 --scale 1e-310"),
        &["--scale", "f64", "2.2250738585072014e-308"],
    );
    folder.write("in.st", safetensors(&qkv(Dtype::F32, 8, 1, 1, 4)));
    let from_file = "attention --mask causal:8 --input in.st --output o";
    folder.refuses(&format!("{from_file} --scale 1e-45"), &["--scale", "1.1754943508222875e-38"]);
    for value in ["1e-300", "1e300", "9e-7", "1000001", "-1"] {
        folder.refuses(&format!("{SMALL} --output o --softcap {value}"), &["--softcap", value]);
    }
    // The ends of what is allowed give right and finite numbers.
    for flags in [
        "--scale 0",
        "--scale 1e6",
        "--scale -1e6",
        "--scale 1.1754943508222875e-38",
        "--softcap 1e-6",
        "--softcap 1e6",
    ] {
        for dtype in ["f32", "f64"] {
            let line = format!("{SMALL} --output o --backward --check --cp-size 2 --dtype {dtype} {flags}");
            folder.run(&line).ok();
            let file = folder.read("o");
            let file = safetensors::SafeTensors::deserialize(&file).unwrap();
            for name in ["out", "lse", "dq", "dk", "dv"] {
                let tensor = file.tensor(name).unwrap();
                let values = values_of(tensor.dtype(), tensor.data());
                assert!(values.iter().all(|value| value.is_finite()), "{line}: {name}");
            }
        }
    }
}

#[test]
fn negative_numbers_are_refused_by_their_flag() {
    let folder = Folder::new();
    for (flag, words) in [
        ("--cp-size -1", "between 1 and 4096"),
        ("--limit -1", "seconds above 0"),
        ("--stages -1", "auto or a number"),
        ("--slow-link -1,1", "ALPHA_US,GB_PER_S"),
        ("--seed -1", "from 0 to 18446744073709551615"),
        ("--seed 18446744073709551616", "from 0 to 18446744073709551615"),
        ("--chunk-size -1", "at least 1"),
        ("--seqlen -8", "at least 1"),
        ("--heads-q -1", "at least 1"),
        ("--heads-kv -1", "at least 1"),
        ("--head-dim -1", "at least 1"),
        ("--softcap -1", "at least 0"),
        ("--softcap -1e-3", "at least 0"),
        ("--scale -inf", "finite"),
        ("--chunk-size -4k", "at least 1"),
        ("--cp-size --json", "between 1 and 4096"),
    ] {
        let (name, value) = flag.split_once(' ').unwrap();
        folder.refuses(&format!("attention --mask causal:8 {flag}"), &[name, value, words]);
    }
    for (flag, words) in [("--nodes -1", "at least 1"), ("--cp-size -2", "between 1 and 4096")] {
        let (name, value) = flag.split_once(' ').unwrap();
        let cp_size = if name == "--cp-size" { "" } else { "--cp-size 2" };
        folder.refuses(&format!("plan --mask causal:8 {cp_size} {flag}"), &[name, value, words]);
    }
    folder.refuses("bench plan --iterations -1", &["--iterations", "-1", "10"]);
    folder.refuses("bench plan --chunk-size -1", &["--chunk-size", "-1"]);
}

#[test]
fn input_errors_name_the_file_and_the_tensor() {
    let folder = Folder::new();
    let line = "attention --mask causal:8 --input in.st --output o --backward";
    let all = qkv(Dtype::F32, 8, 2, 2, 4);
    let with = |tensor: Tensor| -> Vec<Tensor> {
        let same = |other: &&Tensor| other.name != tensor.name;
        all.iter().filter(same).cloned().chain([tensor.clone()]).collect()
    };
    for (tensor, words) in [
        (Tensor::new("q", Dtype::F32, &[7, 2, 4]), "seqlen_q 7"),
        (Tensor::new("q", Dtype::F32, &[8, 3, 4]), "3 query heads do not divide"),
        (Tensor::new("k", Dtype::F32, &[8, 2]), "2 dimensions"),
        (Tensor::new("k", Dtype::F32, &[8, 2, 4]).with(9, f64::NAN), "NaN"),
        (Tensor::new("v", Dtype::I8, &[8, 2, 4]), "I8"),
        (Tensor::new("sink", Dtype::BF16, &[1, 2]), "BF16"),
    ] {
        folder.write("in.st", safetensors(&with(tensor)));
        folder.refuses(line, &["error: in.st: ", words]);
    }
    folder.refuses("plan --mask causal:8 --cp-size 2 --heads-q 6 --heads-kv 4", &["--heads-q", "--heads-kv"]);

    let whole = safetensors(&all);
    let header_bytes = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (header, data) = whole[8..].split_at(header_bytes);
    let header = String::from_utf8(header.to_vec()).unwrap();
    for (from, to, words) in [
        (r#""q":{"dtype":"F32""#, r#""q":{"dtype":"f32""#, &["`q`", "`f32`", "written `F32`"][..]),
        (r#""q":{"dtype":"F32""#, r#""q":{"dtype":"I8""#, &["`q`", "256 bytes", "I8", "64"]),
        (r#""q":"#, r#""k":"#, &["two tensors `k`"]),
    ] {
        let broken = header.replacen(from, to, 1);
        assert_ne!(broken, header);
        folder.write("in.st", [&(broken.len() as u64).to_le_bytes(), broken.as_bytes(), data].concat());
        folder.refuses(line, &[&["in.st"], words].concat());
        assert!(!folder.run(line).stderr.contains("expected one of"));
    }
    folder.write("in.st", b"\x02\0\0\0\0\0\0\0[]");
    folder.refuses(line, &["in.st", "not a JSON object of tensors by name"]);
}

#[test]
fn a_margin_of_more_than_the_machine_is_noted() {
    let folder = Folder::new();
    let ran = folder.run(&format!("{SMALL} --overlap concurrent+sm-margin=999999999 --json")).ok();
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("sm-margin=999999999 leaves none"), "{}", ran.stderr);
    assert_eq!(folder.run(&format!("{SMALL} --json")).ok().stderr, "");
}

#[test]
fn one_of_a_thing_has_no_plural() {
    let folder = Folder::new();
    let line = "--mask full:64 --cp-size 1 --chunk-size 64 --report report.html";
    for command in ["plan", "attention --heads-q 1 --head-dim 4"] {
        let ran = folder.run(&format!("{command} {line}")).ok();
        let report = String::from_utf8(folder.read("report.html")).unwrap();
        for text in [&ran.stdout, &report] {
            assert!(text.contains("1 chunk of 64"), "{command}");
            for wrong in ["1 chunks", "1 ranks", "1 slices", "1 nodes"] {
                assert!(
                    !text.contains(&format!(" {wrong}")) && !text.contains(&format!(">{wrong}")),
                    "{command}: {wrong}"
                );
            }
        }
    }
}

/// What a device refuses is an error. (A reader that has gone is no error.)
#[test]
fn a_document_that_cannot_be_delivered_is_an_error() {
    let folder = Folder::new();
    for line in [
        &format!("{SMALL} --json"),
        "plan --mask causal:8 --cp-size 2 --chunk-size 4 --json",
        "mask causal:8 --json",
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_counterpoint"))
            .args(line.split_whitespace())
            .current_dir(folder.path("."))
            .stdout(full)
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert!(
            stderr.starts_with("error: cannot write to standard output") && stderr.lines().count() == 1,
            "{stderr}"
        );
    }
}
