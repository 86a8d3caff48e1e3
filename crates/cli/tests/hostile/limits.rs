//! A system that gives no more: limits on files, full devices, private files.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::support::Folder;

const BINARY: &str = env!("CARGO_BIN_EXE_counterpoint");

/// Runs a command line in a shell that sets limits first: exit status and what it said on stderr.
fn limited(folder: &Folder, limits: &str, line: &str) -> (Option<i32>, String) {
    let script = format!("{limits}; exec {BINARY} {line}");
    let output = Command::new("sh").args(["-c", &script]).current_dir(folder.path(".")).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// A limit on the size of files is an error like a full disk: nothing half written stays, nothing old is lost.
#[test]
fn a_limit_on_files_leaves_no_temporary() {
    let folder = Folder::new();
    folder.write("old", "old");
    let calibrated = "doctor --calibrate --output old";
    let tuned = "tune gemm --m 64 --n 32 --k 32 --tp-size 2 --iterations 1 --warmups 0 --collective all-gather --plans new.json";
    for line in [
        "attention --mask causal:4k --heads-q 1 --head-dim 64 --output old",
        "attention --mask causal:4k --heads-q 1 --head-dim 64 --output new --report old",
        "plan --mask causal:4k --cp-size 8 --report old",
        "mask causal:4k --svg old",
    ] {
        let (status, stderr) = limited(&folder, "ulimit -f 1", line);
        assert_eq!(status, Some(2), "{line}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains("ulimit -f"), "{line}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{line}: {stderr}");
        assert_eq!((folder.names(), folder.read("old")), (vec!["old".to_owned()], b"old".to_vec()), "{line}");
    }
    for line in [calibrated, tuned] {
        let (status, stderr) = limited(&folder, "ulimit -f 0", line);
        assert_eq!(status, Some(2), "{line}: {stderr}");
        assert!(stderr.contains("ulimit -f") || stderr.contains("File too large"), "{line}: {stderr}");
        assert_eq!((folder.names(), folder.read("old")), (vec!["old".to_owned()], b"old".to_vec()), "{line}");
    }
}

/// While a private file is replaced, nothing next to it is open to others at any moment.
#[test]
fn a_private_file_is_replaced_in_private() {
    let folder = Folder::new();
    // Long enough to write that a look at it meanwhile cannot fail, quick to compute: many short documents.
    folder.write("lengths", "8\n".repeat(2048));
    let line = "attention --mask varlen-full:lengths=@lengths --heads-q 8 --head-dim 128 --output out";
    fs::set_permissions(folder.path("lengths"), fs::Permissions::from_mode(0o600)).unwrap();
    folder.write("out", "old");
    fs::set_permissions(folder.path("out"), fs::Permissions::from_mode(0o600)).unwrap();
    let watched = folder.path(".");
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let watch = thread::spawn(move || {
        let (mut seen, mut open) = (0, Vec::new());
        while matches!(stopped.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
            for entry in fs::read_dir(&watched).unwrap().flatten() {
                let Ok(metadata) = entry.path().metadata() else { continue };
                if metadata.is_file() {
                    seen += 1;
                    if metadata.mode() & 0o077 != 0 {
                        open.push((entry.file_name(), metadata.mode()));
                    }
                }
            }
            thread::sleep(Duration::from_micros(200));
        }
        (seen, open)
    });
    folder.run(line).ok();
    drop(stop);
    let (seen, open) = watch.join().unwrap();
    assert!(seen > 10 && open.is_empty(), "{seen} looks: {open:?}");
    assert_eq!(folder.path("out").metadata().unwrap().mode() & 0o777, 0o600);
    assert!(folder.path("out").metadata().unwrap().len() > 64 << 20);
}
