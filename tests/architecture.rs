//! The invariants of ARCHITECTURE.md that are absences, held over `cargo metadata` and the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use sources::{code_lines, root};

mod sources;

/// Which of the workspace's crates each may use.
const MAY_USE: &[(&str, &[&str])] = &[
    ("counterpoint-files", &[]),
    ("counterpoint-mask", &[]),
    ("counterpoint-tiles", &["mask"]),
    ("counterpoint-cost", &["mask", "tiles"]),
    ("counterpoint-plan", &["mask", "tiles"]),
    ("counterpoint-schedule", &["mask", "cost", "plan"]),
    ("counterpoint-choose", &["mask", "cost", "plan", "schedule"]),
    ("counterpoint-cpu-kernels", &["mask", "plan", "schedule"]),
    ("counterpoint-exec", &["mask", "cost", "plan", "schedule", "choose", "cpu-kernels"]),
    ("counterpoint-reference", &["mask", "plan", "schedule", "choose", "cpu-kernels", "exec"]),
    (
        "counterpoint-measure",
        &["mask", "cost", "plan", "schedule", "choose", "cpu-kernels", "exec", "reference"],
    ),
    ("counterpoint-driver", &["files"]),
    ("counterpoint-nccl", &["driver", "plan", "exec"]),
    ("counterpoint-cuda", &["driver", "nccl", "mask", "tiles", "cost", "plan", "schedule", "choose", "exec"]),
    ("counterpoint-report", &["mask", "plan", "schedule"]),
    (
        "counterpoint",
        &[
            "mask",
            "tiles",
            "cost",
            "plan",
            "schedule",
            "choose",
            "exec",
            "reference",
            "measure",
            "cuda",
            "report",
        ],
    ),
    (
        "counterpoint-python",
        &["mask", "cost", "plan", "schedule", "choose", "exec", "cuda", "report", "console", "cli"],
    ),
    (
        "counterpoint-console",
        &[
            "files",
            "mask",
            "cost",
            "plan",
            "schedule",
            "choose",
            "exec",
            "reference",
            "measure",
            "cuda",
            "report",
        ],
    ),
    (
        "counterpoint-bench",
        &[
            "files",
            "mask",
            "cost",
            "plan",
            "schedule",
            "choose",
            "exec",
            "reference",
            "measure",
            "cuda",
            "report",
            "console",
        ],
    ),
    (
        "counterpoint-verify",
        &[
            "files",
            "mask",
            "cost",
            "plan",
            "schedule",
            "choose",
            "exec",
            "reference",
            "cuda",
            "report",
            "console",
            "bench",
        ],
    ),
    (
        "counterpoint-cli",
        &[
            "mask",
            "cost",
            "plan",
            "schedule",
            "choose",
            "exec",
            "reference",
            "measure",
            "cuda",
            "report",
            "console",
            "bench",
            "verify",
        ],
    ),
];

/// What the binary is made of.
const COMMANDS: &[&str] = &["crates/cli/src", "crates/console/src", "crates/bench/src", "crates/verify/src"];

/// What the pure crates must not name.
const IMPURE: &[&str] = &[
    "std::time",
    "std::env",
    "std::fs",
    "std::net",
    "std::thread",
    "std::process",
    "HashMap",
    "HashSet",
    "rayon",
    "rand::",
];

#[test]
fn crates_depend_one_way() {
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let mut seen = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let uses: BTreeSet<String> = package["dependencies"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|dependency| dependency["kind"].is_null())
            .filter_map(|dependency| {
                dependency["name"].as_str()?.strip_prefix("counterpoint-").map(str::to_owned)
            })
            .collect();
        seen.insert(package["name"].as_str().unwrap().to_owned(), uses);
    }
    assert_eq!(seen.len(), MAY_USE.len(), "a crate without a line in the table: {:?}", seen.keys());
    for (name, may_use) in MAY_USE {
        for used in &seen[*name] {
            assert!(may_use.contains(&used.as_str()), "{name} must not use counterpoint-{used}");
        }
    }
}

#[test]
fn pure_crates_name_nothing_impure() {
    for name in ["mask", "tiles", "cost", "plan", "schedule", "choose"] {
        for (path, line, text) in code_lines(&root().join("crates").join(name).join("src"), "rs") {
            for word in IMPURE {
                assert!(!text.contains(word), "{}:{line} names {word}: {text}", path.display());
            }
        }
    }
}

#[test]
fn only_crate_driver_names_a_gpu_library() {
    let driver = root().join("crates/driver");
    for (path, line, text) in code_lines(&root().join("crates"), "rs") {
        for word in ["cudarc", "libnccl", "libcuda", "nvrtc::"] {
            // Tests plant files of these names to see that they are left alone.
            let is_test = path.components().any(|part| part.as_os_str() == "tests");
            let found = text.contains(word) && !path.starts_with(&driver) && !is_test;
            assert!(!found, "{}:{line} names {word}: {text}", path.display());
        }
        // It can put a machine's GPUs out of service.
        assert!(!text.contains("cuMulticast"), "{}:{line} makes a multicast object: {text}", path.display());
    }
}

#[test]
fn unsafe_code_lives_beside_gpus_and_in_a_few_files() {
    // The matrix product calls BLAS-like routines with pointers; tensors of another library, such as PyTorch's, are pointers.
    // Processes of a host map memory that they share. A test borrows memory as such a library's binding does. Crates driver and nccl call C functions, crate cuda launches kernels on addresses.
    let allowed = [
        "crates/cpu-kernels/src/matmul.rs",
        "crates/exec/src/cpu/host_view.rs",
        "crates/exec/src/shared_rings.rs",
        "crates/python/src/borrow.rs",
        "crates/cli/src/allocator.rs",
        "crates/exec/tests/cpu/group.rs",
    ]
    .map(|path| root().join(path));
    let rooms =
        ["crates/driver", "crates/nccl", "crates/cuda", "crates/bench/src/gpu", "crates/verify/src/gpu"]
            .map(|path| root().join(path));
    let words = ["unsafe {", "unsafe fn", "unsafe impl", "allow(unsafe_code)"];
    for (path, line, text) in code_lines(&root().join("crates"), "rs") {
        let found = words.iter().any(|word| text.contains(word));
        assert!(
            !found || allowed.contains(&path) || rooms.iter().any(|room| path.starts_with(room)),
            "{}:{line} is unsafe: {text}",
            path.display()
        );
    }
}

/// Columns of a table are set by its one printer, which keeps what names a row where a terminal is narrow.
#[test]
fn tables_have_one_printer() {
    let printer = root().join("crates/report/src/table");
    let sources =
        COMMANDS.iter().chain(&["crates/report/src"]).map(|folder| code_lines(&root().join(folder), "rs"));
    for (path, line, text) in sources.into_iter().flatten() {
        let is_printer = path.starts_with(&printer) || path == printer.with_extension("rs");
        // As in `{name:<18}` and `{:>6}`.
        let pads = text.match_indices(['<', '>']).any(|(at, _)| {
            let before = &text[..at];
            before.ends_with(':') && !before.ends_with("::") && before.contains('{')
        });
        assert!(
            is_printer || !(pads || text.contains("comfy_table")),
            "{}:{line} sets columns of its own: {text}",
            path.display()
        );
    }
}

/// Files are read with limits and programs found by absolute paths in one place, crate files. What is read besides it are the
/// system's own files, and what this program wrote itself.
#[test]
fn files_are_read_and_programs_found_in_one_place() {
    let own = root().join("crates/verify/src");
    let words = ["fs::read(", "fs::read_to_string(", "File::open(", "Command::new(\"", "env::temp_dir("];
    for folder in COMMANDS.iter().chain(&["crates/driver/src", "crates/nccl/src", "crates/cuda/src"]) {
        for (path, line, text) in code_lines(&root().join(folder), "rs") {
            let allowed = path.starts_with(&own)
                || ["\"/proc/", "\"/sys/", "OpenFile::open(", "TensorFile::open("]
                    .iter()
                    .any(|word| text.contains(word))
                || text.contains("TunedFile::open(");
            let found = words.iter().any(|word| text.contains(word));
            assert!(allowed || !found, "{}:{line} goes around crate files: {text}", path.display());
        }
    }
}

/// Invariant 4 on the device: a loop over a word that others write is `wait_until`'s, which has a limit, a word that ends all waits, and a
/// record for the host. What proves other things, a neighbour's kernel say, has loops of its own.
#[test]
fn kernels_wait_in_one_way_only() {
    const OTHERS: &[&str] = &["flag.cuh", "foreign_barrier.cuh", "signal_litmus.cuh"];
    let is_other = |path: &Path| OTHERS.iter().any(|name| path.ends_with(name));
    let mut waits = 0;
    let mut before = String::new();
    for (path, line, text) in code_lines(&root().join("crates/cuda/kernels"), "cuh") {
        let looks = ["load_acquire(", "load_acquire_system("].iter().any(|load| text.contains(load));
        let loops = text.contains("while (") && text.contains("load_") && !text.contains("_shared(");
        let in_wait = text.contains("[&]") || before.trim_end().ends_with("[&] {");
        assert!(is_other(&path) || !loops, "{}:{line} waits without a limit: {text}", path.display());
        assert!(
            is_other(&path) || !looks || in_wait,
            "{}:{line} looks outside of a wait: {text}",
            path.display()
        );
        waits += usize::from(looks && in_wait);
        before = text;
    }
    assert!(waits >= 5, "{waits} waits were found");
}

/// Adding an overlap policy is a file and a line: whoever asks what a policy does asks its rules and not its name.
#[test]
fn overlap_policies_are_named_in_their_table_alone() {
    let folder = root().join("crates/schedule/src/policy");
    let table = fs::read_to_string(folder.join("table.rs")).unwrap();
    let lines = table.lines().filter_map(|line| line.trim().strip_suffix(',')?.split_once(" = "));
    let policies: Vec<(&str, &str)> = lines.collect();
    assert!(policies.len() >= 7, "{policies:?}");
    for (_, file) in &policies {
        let text = fs::read_to_string(folder.join(file).with_extension("rs")).unwrap();
        assert!(text.contains("pub(super) const RULES: "), "{file}.rs says what the policy is in RULES");
    }
    let may_name = ["table.rs", "named.rs"].map(|file| folder.join(file));
    for (path, line, text) in code_lines(&root().join("crates"), "rs") {
        let is_test = path.components().any(|part| part.as_os_str() == "tests");
        if is_test || may_name.contains(&path) {
            continue;
        }
        for (policy, _) in &policies {
            let names = ["StartOrder", "Mover"].map(|kind| format!("{kind}::{policy}"));
            let named = names
                .iter()
                .any(|name| text.split(|c: char| !c.is_alphanumeric() && c != ':').any(|word| word == name));
            assert!(!named, "{}:{line} names {policy}; ask its rules: {text}", path.display());
        }
    }
}
