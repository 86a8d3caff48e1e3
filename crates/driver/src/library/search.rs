//! Where libraries are looked for: the folder that an environment variable names, the loader, toolkits, and what pip
//! installed for `python3`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use counterpoint_files::{RelativeFolder, absolute_entries, command, folder_named, output_of, program};

use crate::{PackagesFault, TriedPlace};

/// A library to try, and those that must be open before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) before: Vec<PathBuf>,
    pub(super) library: PathBuf,
}

/// The variable that names NVRTC's folder.
pub(crate) const NVRTC_VARIABLE: &str = "COUNTERPOINT_NVRTC_DIR";

/// The variable that names NCCL's folder.
pub(crate) const NCCL_VARIABLE: &str = "COUNTERPOINT_NCCL_DIR";

/// The variable that names cuBLASLt's folder.
pub(crate) const CUBLASLT_VARIABLE: &str = "COUNTERPOINT_CUBLAS_DIR";

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

/// Folders of packages of the interpreter that this process is.
static PACKAGES: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Sets where the packages of the interpreter lie that this process is: libraries are taken from there, behind those that are loaded
/// already, and no `python3` is asked. Relative folders do not count. Later calls change nothing.
pub fn search_packages(folders: Vec<PathBuf>) {
    PACKAGES.get_or_init(|| folders.into_iter().filter(|folder| folder.is_absolute()).collect());
}

/// Names under which the loader may know NVRTC, the newest first.
const NVRTC_NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where packages have NVRTC.
const NVRTC_PARTS: &[&str] = &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib", "torch/lib"];

/// The candidates for NVRTC, in the order in which to try them. Lazy, because `python3` is to be asked only when all before it
/// failed.
pub(super) fn nvrtc() -> impl Iterator<Item = Candidate> {
    let (named, elsewhere) = named_folder(NVRTC_VARIABLE);
    let of_interpreter = PACKAGES.get().filter(|_| elsewhere).into_iter().flat_map(|packages| {
        let loaded = loaded("libnvrtc.so").into_iter().filter_map(|path| Some(path.parent()?.to_owned()));
        loaded.chain(parts_of(packages.clone(), NVRTC_PARTS))
    });
    let by_name = NVRTC_NAMES.map(|name| Candidate { before: Vec::new(), library: PathBuf::from(name) });
    let by_name = by_name.into_iter().filter(move |_| elsewhere);
    let in_folders = named.into_iter().chain(usual_folders(elsewhere, NVRTC_PARTS));
    let first = of_interpreter.flat_map(|folder| nvrtc_in(&folder));
    first.chain(by_name).chain(in_folders.flat_map(|folder| nvrtc_in(&folder)))
}

/// The candidates for NCCL, likewise.
pub(super) fn nccl() -> impl Iterator<Item = PathBuf> {
    let parts = &["nvidia/nccl/lib", "nvidia/cu13/lib", "torch/lib"];
    by_name_then_folder(NCCL_VARIABLE, ["libnccl.so.2", "libnccl.so"], parts, "libnccl.so")
}

/// The candidates for cuBLASLt, likewise.
pub(super) fn cublaslt() -> impl Iterator<Item = PathBuf> {
    let names = ["libcublasLt.so.13", "libcublasLt.so.12"];
    let parts = &["nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/cu12/lib", "torch/lib"];
    by_name_then_folder(CUBLASLT_VARIABLE, names, parts, "libcublasLt.so")
}

/// What the loader knows by these names, then the files that begin with `prefix` in toolkits and in the `parts` of `python3`'s
/// packages; only those of the folder that the variable names, where it names one.
fn by_name_then_folder(
    variable: &'static str,
    names: [&'static str; 2],
    parts: &'static [&'static str],
    prefix: &'static str,
) -> impl Iterator<Item = PathBuf> + use<> {
    let (named, elsewhere) = named_folder(variable);
    let of_interpreter = PACKAGES.get().filter(|_| elsewhere).into_iter().flat_map(move |packages| {
        let in_packages =
            parts_of(packages.clone(), parts).flat_map(move |folder| files_named(&folder, prefix));
        loaded(prefix).into_iter().chain(in_packages)
    });
    let by_name = names.map(PathBuf::from).into_iter().filter(move |_| elsewhere);
    let in_folders = named.into_iter().chain(usual_folders(elsewhere, parts));
    of_interpreter.chain(by_name).chain(in_folders.flat_map(move |folder| files_named(&folder, prefix)))
}

/// Why a search found so little, behind what the loader said of each candidate.
pub(super) fn notes(variable: &'static str, prefix: &'static str) -> Vec<TriedPlace> {
    let note = match folder_named(variable) {
        Err(relative) => Some(relative.into()),
        Ok(Some(folder)) if files_named(&folder, prefix).is_empty() => {
            Some(TriedPlace::Folder { variable, folder, prefix })
        }
        Ok(Some(_)) => None,
        Ok(None) if PACKAGES.get().is_some() => None,
        Ok(None) => {
            let reason = python_answer().as_ref().err();
            reason.map(|reason| TriedPlace::Packages { reason: reason.clone() })
        }
    };
    note.into_iter().collect()
}

/// The folder that a variable names, and whether to look elsewhere: who names a folder wants that one or an error. A relative path names
/// none.
fn named_folder(variable: &'static str) -> (Option<PathBuf>, bool) {
    match folder_named(variable) {
        Ok(named) => (named.clone(), named.is_none()),
        Err(RelativeFolder { .. }) => (None, false),
    }
}

/// Folders of toolkits, then the `parts` of each folder of `python3`'s packages.
fn usual_folders(wanted: bool, parts: &'static [&'static str]) -> impl Iterator<Item = PathBuf> {
    let toolkits = std::iter::once_with(toolkit_folders).take(usize::from(wanted)).flatten();
    let asked = wanted && PACKAGES.get().is_none();
    let packages = std::iter::once_with(python_packages).take(usize::from(asked));
    let packages = packages.flat_map(move |packages| parts_of(packages, parts));
    toolkits.map(|root| root.join("lib64")).chain(packages)
}

/// These parts of each folder of packages.
fn parts_of(packages: Vec<PathBuf>, parts: &'static [&'static str]) -> impl Iterator<Item = PathBuf> {
    packages.into_iter().flat_map(|packages| parts.iter().map(move |part| packages.join(part)))
}

/// The files whose names begin so that this process has loaded.
fn loaded(prefix: &str) -> Vec<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| Some(PathBuf::from(&line[line.find('/')?..])));
    let mut paths: Vec<PathBuf> = paths.filter(|path| file_name(path).starts_with(prefix)).collect();
    paths.dedup();
    paths
}

/// NVRTCs in a folder, the newest first.
fn nvrtc_in(folder: &Path) -> Vec<Candidate> {
    let builtins = files_named(folder, "libnvrtc-builtins.so");
    files_named(folder, "libnvrtc.so")
        .into_iter()
        .map(|library| {
            let major = major_version(&library);
            let before =
                builtins.iter().filter(|path| major_version(path) == major).take(1).cloned().collect();
            Candidate { before, library }
        })
        .collect()
}

/// The files of a folder whose names begin so, the newest version first.
fn files_named(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut files = files_in(folder);
    files.retain(|path| file_name(path).starts_with(prefix));
    files.sort();
    files.reverse();
    files
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

/// Toolkits in their usual places, the newest first.
fn toolkit_folders() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = files_in(Path::new("/usr/local"))
        .into_iter()
        .filter(|path| file_name(path).starts_with("cuda"))
        .collect();
    roots.sort();
    roots.reverse();
    // One that is empty or relative names no toolkit.
    let home = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|name| folder_named(name).ok().flatten());
    home.chain(roots).chain([PathBuf::from("/opt/cuda")]).collect()
}

/// How long `python3` may take to name its folders.
const PYTHON_LIMIT: Duration = Duration::from_secs(10);

/// Prints `python3`'s folders of packages, which may be several and a virtual environment's. It runs isolated, which leaves the user's own
/// folder out of `sys.path`; `site` names it all the same.
const PYTHON_SCRIPT: &str = "\
import site, sys, sysconfig
paths = [sysconfig.get_paths()['purelib'], sysconfig.get_paths()['platlib'], *sys.path]
try:
    paths += site.getsitepackages() + [site.getusersitepackages()]
except AttributeError:
    pass
print('\\n'.join(dict.fromkeys(p for p in paths if p.endswith('-packages'))))";

/// Folders of packages that pip installed for `python3`, which is asked once a process. None when it does not answer.
fn python_packages() -> Vec<PathBuf> {
    python_answer().clone().unwrap_or_default()
}

fn python_answer() -> &'static Result<Vec<PathBuf>, PackagesFault> {
    static ANSWER: OnceLock<Result<Vec<PathBuf>, PackagesFault>> = OnceLock::new();
    ANSWER.get_or_init(ask_python)
}

/// Asks the `python3` of an absolute folder of `PATH`, which imports nothing from the current folder: it runs isolated, and elsewhere.
/// What `PYTHONPATH` would have added is added here.
fn ask_python() -> Result<Vec<PathBuf>, PackagesFault> {
    let python = program("python3")?;
    let mut question = command(&python);
    question.args(["-I", "-c", PYTHON_SCRIPT]).current_dir("/");
    let answer = output_of(&mut question, PYTHON_LIMIT)?;
    let of_user = absolute_entries(&std::env::var_os("PYTHONPATH").unwrap_or_default());
    let of_user = of_user.into_iter().filter(|folder| file_name(folder).ends_with("-packages"));
    let named = String::from_utf8_lossy(&answer).into_owned();
    Ok(of_user.chain(named.lines().map(PathBuf::from).filter(|folder| folder.is_absolute())).collect())
}

/// The file behind a library that is open: the loader may have been given a bare name.
pub(super) fn opened_file(library: &Path) -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    // The mapping names the file that a link leads to, so its version may be longer.
    let found = paths.find(|path| !library.is_absolute() && file_name(path).starts_with(file_name(library)));
    found.unwrap_or(library).to_owned()
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
