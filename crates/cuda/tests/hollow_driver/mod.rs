//! Runs tests of what the host does with a driver that has no GPU: four GPUs that it calls H200, on which no kernel runs. With it comes an NCCL
//! that connects ranks when NCCL does.

pub(crate) mod processes;

use std::path::PathBuf;
use std::process::Command;

const INSIDE: &str = "COUNTERPOINT_TEST_INSIDE";

/// Whether the test runs with that driver. If not, it is run once more, by itself in a process that finds the driver first, and what that
/// comes to is what this does.
pub(crate) fn is_loaded(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = folder.path();
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    for (source, library) in [("libcuda.rs", "libcuda.so.1"), ("libnccl.rs", "libnccl.so.2")] {
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hollow_driver");
        let compiled = Command::new(&compiler)
            .args(["--edition", "2024", "--crate-type", "cdylib", "-C", "opt-level=1", "-o"])
            .args([&folder.join(library), &PathBuf::from(sources).join(source)])
            .status();
        assert!(compiled.unwrap().success(), "{source} does not compile");
    }
    let mut libraries = vec![folder.to_owned()];
    libraries.extend(std::env::split_paths(&std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    let ran = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap())
        .env("COUNTERPOINT_NCCL_DIR", folder)
        .env(INSIDE, "1")
        .status();
    assert!(ran.unwrap().success(), "see above");
    false
}
