//! Runs tests of what the host does with a driver that has no GPU: four GPUs that it calls H200, on which no kernel runs. With it comes an NCCL
//! that connects ranks when NCCL does.

pub(crate) mod processes;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

const INSIDE: &str = "COUNTERPOINT_TEST_INSIDE";

/// Whether the test runs with that driver. If not, it is run once more, by itself in a process that finds the driver first, and what that
/// comes to is what this does.
pub(crate) fn is_loaded(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = libraries();
    let mut path = vec![folder.clone()];
    path.extend(std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    let ran = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("LD_LIBRARY_PATH", std::env::join_paths(path).unwrap())
        .env("COUNTERPOINT_NCCL_DIR", folder)
        .env(INSIDE, "1")
        .status();
    assert!(ran.unwrap().success(), "see above");
    false
}

/// The folder with both libraries: compiled by the first test that needs them, found by all others until a source or the compiler changes.
fn libraries() -> PathBuf {
    const SOURCES: [(&str, &str, &str); 2] = [
        ("libcuda.rs", "libcuda.so.1", include_str!("libcuda.rs")),
        ("libnccl.rs", "libnccl.so.2", include_str!("libnccl.rs")),
    ];
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(&compiler).arg("--version").output().unwrap().stdout;
    let mut digest = Sha256::new_with_prefix(&version);
    SOURCES.iter().for_each(|(_, _, text)| digest.update(text));
    let digest: String = digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = all.join(format!("hollow-driver-{digest}"));
    if folder.exists() {
        return folder;
    }
    let made = tempfile::tempdir_in(all).unwrap();
    for (source, library, _) in SOURCES {
        let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hollow_driver")).join(source);
        let compiled = Command::new(&compiler)
            .args(["--edition", "2024", "--crate-type", "cdylib", "-C", "opt-level=1", "-o"])
            .args([made.path().join(library), source])
            .status();
        assert!(compiled.unwrap().success(), "{library} does not compile");
    }
    // Whole or not at all: tests of other processes compile them at the same time, and the first one's stay.
    let moved = fs::rename(made.path(), &folder);
    assert!(moved.is_ok() || folder.exists(), "{moved:?}");
    folder
}
