//! Where libraries are looked for: the folder that an environment variable names, the loader, toolkits, and what pip
//! installed for `python3`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// A library to try, and those that must be open before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) before: Vec<PathBuf>,
    pub(super) library: PathBuf,
}

/// The variable that names NVRTC's folder.
const NVRTC_VARIABLE: &str = "COUNTERPOINT_NVRTC_DIR";

/// The variables that the search depends on, the loader's and `python3`'s own among them.
pub(crate) const SEARCH_VARIABLES: [&str; 9] = [
    NVRTC_VARIABLE,
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "PATH",
    "HOME",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
];

/// Names under which the loader may know NVRTC, the newest first.
const NVRTC_NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// The candidates for NVRTC, in the order in which to try them. Lazy: `python3` is only asked when all before it failed.
/// Folders that hold none are noted in `tried`, except those that are merely usual places.
pub(super) fn nvrtc(tried: &mut Vec<String>) -> Vec<Candidate> {
    if let Some(folder) = std::env::var_os(NVRTC_VARIABLE).filter(|folder| !folder.is_empty()) {
        // Whoever names a folder wants that one or an error.
        let found = nvrtc_in(Path::new(&folder));
        if found.is_empty() {
            tried.push(format!("{NVRTC_VARIABLE}={}: no libnvrtc.so.* in it", folder.to_string_lossy()));
        }
        return found;
    }
    let by_name = NVRTC_NAMES.map(|name| Candidate { before: Vec::new(), library: PathBuf::from(name) });
    let mut candidates = by_name.to_vec();
    candidates.extend(toolkit_folders().iter().flat_map(|folder| nvrtc_in(folder)));
    candidates.extend(python_folders(tried).iter().flat_map(|folder| nvrtc_in(folder)));
    candidates
}

/// NVRTCs in a folder, the newest first.
fn nvrtc_in(folder: &Path) -> Vec<Candidate> {
    let files = files_in(folder);
    let named = |prefix: &str| -> Vec<PathBuf> {
        let mut found: Vec<_> =
            files.iter().filter(|path| file_name(path).starts_with(prefix)).cloned().collect();
        found.sort();
        found.reverse();
        found
    };
    let builtins = named("libnvrtc-builtins.so");
    named("libnvrtc.so")
        .into_iter()
        .map(|library| {
            let major = major_version(&library);
            let before =
                builtins.iter().filter(|path| major_version(path) == major).take(1).cloned().collect();
            Candidate { before, library }
        })
        .collect()
}

/// The number behind `.so.`.
fn major_version(path: &Path) -> Option<u32> {
    file_name(path).split_once(".so.")?.1.split('.').next()?.parse().ok()
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(OsStr::to_str).unwrap_or_default()
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()
}

/// Library folders of toolkits in their usual places, the newest first.
fn toolkit_folders() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = files_in(Path::new("/usr/local"))
        .into_iter()
        .filter(|path| file_name(path).starts_with("cuda"))
        .collect();
    roots.sort();
    roots.reverse();
    let home = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    home.chain(roots).chain([PathBuf::from("/opt/cuda")]).map(|root| root.join("lib64")).collect()
}

/// How long `python3` may take to name its folders.
const PYTHON_LIMIT: Duration = Duration::from_secs(10);

/// Prints `python3`'s folders of packages, which may be several and a virtual environment's.
const PYTHON_SCRIPT: &str = "\
import site, sys, sysconfig
paths = [sysconfig.get_paths()['purelib'], sysconfig.get_paths()['platlib'], *sys.path]
try:
    paths += site.getsitepackages() + [site.getusersitepackages()]
except AttributeError:
    pass
print('\\n'.join(dict.fromkeys(p for p in paths if p.endswith('-packages'))))";

/// Library folders of packages that pip installed for `python3`: NVIDIA's own wheels, and what PyTorch brings along.
/// `python3` is asked once a process.
fn python_folders(tried: &mut Vec<String>) -> Vec<PathBuf> {
    static ANSWER: OnceLock<Result<Vec<PathBuf>, String>> = OnceLock::new();
    match ANSWER.get_or_init(ask_python) {
        Ok(packages) => packages
            .iter()
            .flat_map(|packages| {
                ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib", "torch/lib"]
                    .map(|folder| packages.join(folder))
            })
            .collect(),
        Err(reason) => {
            tried.push(format!("site-packages of python3: {reason}"));
            Vec::new()
        }
    }
}

fn ask_python() -> Result<Vec<PathBuf>, String> {
    let mut child = Command::new("python3")
        .args(["-c", PYTHON_SCRIPT])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let start = Instant::now();
    // The answer is a few lines, less than a pipe holds, so waiting before reading cannot block it.
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if start.elapsed() < PYTHON_LIMIT => thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer within {} s", PYTHON_LIMIT.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("python3 ended with {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtins_of_the_same_version_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let names = [
            "libnvrtc.so.12",
            "libnvrtc.so.13",
            "libnvrtc.alt.so.13",
            "libnvrtc-builtins.so.12.9",
            "libnvrtc-builtins.so.13.0",
            "libnvrtc-builtins.alt.so.13.0",
        ];
        for name in names {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        let path = |name: &str| folder.path().join(name);
        let expected = [
            Candidate { before: vec![path("libnvrtc-builtins.so.13.0")], library: path("libnvrtc.so.13") },
            Candidate { before: vec![path("libnvrtc-builtins.so.12.9")], library: path("libnvrtc.so.12") },
        ];
        assert_eq!(nvrtc_in(folder.path()), expected);
        assert!(nvrtc_in(&path("nowhere")).is_empty());
    }
}
