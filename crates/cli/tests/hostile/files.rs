//! Files that are destroyed by being written while they are read, and files without an end.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::{Duration, Instant};

use safetensors::Dtype;

use crate::support::{Folder, qkv, safetensors};

/// A run that would take minutes: what is refused is refused before anything is computed.
const SLOW: &str = "--cp-size 2 --chunk-size 1 --slow-link 60000000,1";
const ATTENTION: &str = "attention --heads-q 1 --head-dim 4";

fn refuses_soon(folder: &Folder, line: &str, words: &[&str]) {
    let began = Instant::now();
    folder.refuses(line, words);
    assert!(began.elapsed() < Duration::from_secs(20), "{line}: {:?}", began.elapsed());
}

/// A folder with one of every file that a command reads.
fn inputs() -> Folder {
    let folder = Folder::new();
    folder.write("mask.json", r#"{"seqlen_q": 8, "seqlen_k": 8, "slices": []}"#);
    folder.write("lengths.txt", "3\n5\n");
    folder.write("in.st", safetensors(&qkv(Dtype::F32, 8, 2, 2, 4)));
    folder.run("doctor --calibrate --output profile.json").ok();
    folder
}

/// Every output of every command, against every file that it reads, by the same name and by links.
#[test]
fn no_output_replaces_a_file_that_is_read() {
    let folder = inputs();
    let reads = [
        (
            format!("{ATTENTION} {SLOW} --mask mask.json"),
            "mask.json",
            &["--output", "--report", "--trace"][..],
        ),
        (
            format!("{ATTENTION} {SLOW} --mask varlen-causal:lengths=@lengths.txt"),
            "lengths.txt",
            &["--output", "--report", "--trace"],
        ),
        (
            format!("attention {SLOW} --mask causal:8 --input in.st --output o"),
            "in.st",
            &["--report", "--trace"],
        ),
        (
            format!("{ATTENTION} {SLOW} --mask causal:8 --profile profile.json"),
            "profile.json",
            &["--output", "--report", "--trace"],
        ),
        ("plan --cp-size 2 --mask mask.json".to_owned(), "mask.json", &["--report"]),
        ("plan --cp-size 2 --mask varlen-full:lengths=@lengths.txt".to_owned(), "lengths.txt", &["--report"]),
        ("plan --cp-size 2 --mask causal:8 --profile profile.json".to_owned(), "profile.json", &["--report"]),
        ("mask mask.json".to_owned(), "mask.json", &["--svg"]),
        ("mask varlen-full:lengths=@lengths.txt".to_owned(), "lengths.txt", &["--svg"]),
        ("simulate attention --mask mask.json --cp-size 2".to_owned(), "mask.json", &["--report", "--trace"]),
        (
            "simulate attention --mask causal:8 --cp-size 2 --profile profile.json".to_owned(),
            "profile.json",
            &["--report", "--trace"],
        ),
    ];
    for (line, input, outputs) in reads {
        let [soft, hard] = ["soft", "hard"].map(|name| folder.path(name));
        symlink(folder.path(input), &soft).unwrap();
        fs::hard_link(folder.path(input), &hard).unwrap();
        for flag in outputs {
            for name in [input.to_owned(), format!("./{input}"), "soft".to_owned(), "hard".to_owned()] {
                refuses_soon(&folder, &format!("{line} {flag} {name}"), &[flag, input, "same file"]);
            }
        }
        // The other way round: read through a link, written by its name.
        let line = line.replace(input, "soft");
        refuses_soon(&folder, &format!("{line} {} {input}", outputs[0]), &[outputs[0], input, "same file"]);
        fs::remove_file(soft).unwrap();
        fs::remove_file(hard).unwrap();
    }
}

#[test]
fn no_two_outputs_are_one_file() {
    let folder = Folder::new();
    folder.write("old", "old");
    fs::hard_link(folder.path("old"), folder.path("hard")).unwrap();
    symlink("old", folder.path("soft")).unwrap();
    symlink("new", folder.path("lost")).unwrap();
    let mkfifo = Command::new("mkfifo").args([folder.path("pipe")]).status().unwrap();
    assert!(mkfifo.success());
    for (one, other) in [
        ("old", "hard"),
        ("old", "soft"),
        ("soft", "hard"),
        ("new", "./new"),
        ("lost", "new"),
        ("pipe", "./pipe"),
    ] {
        let line = format!("{ATTENTION} {SLOW} --mask causal:8 --output {one} --trace {other}");
        refuses_soon(&folder, &line, &["--output", "--trace", "same file"]);
    }
    folder.run(&format!("{ATTENTION} --mask causal:8 --output /dev/null --trace /dev/null")).ok();
}

/// Whatever reads a file refuses what has no end, and says so at once.
#[test]
fn files_without_an_end_are_refused() {
    let folder = inputs();
    fs::create_dir(folder.path("folder")).unwrap();
    let sparse = fs::File::create(folder.path("long")).unwrap();
    sparse.set_len(3 << 30).unwrap();
    for line in [
        "mask FILE",
        "mask varlen-full:lengths=@FILE",
        "plan --cp-size 2 --mask FILE",
        "plan --cp-size 2 --mask causal:8 --profile FILE",
        "simulate linear --kind row --tokens 8k --in-features 64 --out-features 64 --tp-size 2 --profile FILE",
        "simulate attention --mask causal:8 --cp-size 2 --profile FILE",
        "attention --mask causal:8 --heads-q 1 --head-dim 4 --profile FILE",
        "attention --mask causal:8 --input FILE --output o",
        "tune gemm --m 64 --n 32 --k 32 --tp-size 2 --iterations 1 --warmups 0 --collective all-gather --plans FILE",
    ] {
        for (file, words) in [
            ("/dev/zero", &["/dev/zero"][..]),
            ("folder/", &["folder"]),
            ("./long", &["long", if line.contains("--input") { "safetensors" } else { "longer than" }]),
        ] {
            if line.starts_with("mask FILE") && file == "folder/" {
                continue;
            }
            refuses_soon(&folder, &line.replace("FILE", file), words);
        }
    }
}

/// A pipe is read to its end, by every command: what a shell's `<(...)` gives.
#[test]
fn pipes_give_what_files_give() {
    let folder = inputs();
    let profile = folder.read("profile.json");
    let expected = folder.run("plan --cp-size 2 --mask causal:64 --profile profile.json --json").ok();
    assert!(Command::new("mkfifo").arg(folder.path("pipe")).status().unwrap().success());
    let path = folder.path("pipe");
    let writer = std::thread::spawn(move || {
        fs::OpenOptions::new().write(true).open(path).unwrap().write_all(&profile).unwrap();
    });
    let ran = folder.run("plan --cp-size 2 --mask causal:64 --profile pipe --json").ok();
    writer.join().unwrap();
    assert!(ran.stderr.contains("pipe is a pipe; waiting"), "{}", ran.stderr);
    assert_eq!(ran.json()["ranks"], expected.json()["ranks"]);
}
