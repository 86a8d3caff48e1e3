//! What hostile use found: each test failed once.

mod support;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::Folder;

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
