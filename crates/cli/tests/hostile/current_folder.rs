//! A current folder that someone else has filled: nothing in it runs, is imported or opened.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::Folder;

/// A folder with programs, modules and libraries that leave a file `ran` behind when something runs them.
fn planted() -> Folder {
    let folder = Folder::new();
    let mark = format!("open({:?}, 'w')", folder.path("ran").display().to_string());
    for module in ["site", "sysconfig", "sitecustomize", "usercustomize", "encodings", "json", "torch"] {
        folder.write(&format!("{module}.py"), &mark);
    }
    for program in ["python3", "kill", "nice", "nvidia-smi", "mpirun", "sh", "env"] {
        folder.write(program, format!("#!/bin/sh\ntouch '{}'\nexit 1\n", folder.path("ran").display()));
        fs::set_permissions(folder.path(program), fs::Permissions::from_mode(0o755)).unwrap();
    }
    for place in ["lib64", "nvidia/nccl/lib", "nvidia/cu13/lib", "site-packages/nvidia/cu13/lib"] {
        fs::create_dir_all(folder.path(place)).unwrap();
        // Where there is a compiler it is a real one, so that opening it would succeed.
        let real = std::env::var_os("COUNTERPOINT_NVRTC_DIR").map(|named| Path::new(&named).to_owned());
        for entry in real.iter().flat_map(|real| fs::read_dir(real).unwrap()) {
            let entry = entry.unwrap();
            symlink(entry.path(), folder.path(place).join(entry.file_name())).unwrap();
        }
        for name in ["libnvrtc.so.12", "libnvrtc.so.13", "libnccl.so.2", "libcublasLt.so.13"] {
            let path = folder.path(place).join(name);
            if !path.exists() {
                fs::write(path, b"no library").unwrap();
            }
        }
    }
    folder
}

const CLEAN: [(&str, &str); 4] = [
    ("COUNTERPOINT_NVRTC_DIR", ""),
    ("COUNTERPOINT_NCCL_DIR", ""),
    ("COUNTERPOINT_CUBLAS_DIR", ""),
    ("COUNTERPOINT_CACHE_DIR", "/tmp/counterpoint-none/cache"),
];

fn doctor(folder: &Folder, variables: &[(&str, &str)]) -> Value {
    let variables: Vec<_> = CLEAN.iter().chain(variables).copied().collect();
    folder.run_with("doctor --json", &variables).ok().json()
}

/// Every variable by which a search could be led into the current folder.
#[test]
fn nothing_of_the_current_folder_is_used() {
    let folder = planted();
    let names = folder.names();
    let mut cases: Vec<(&str, &str)> = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HOME", "TMPDIR"] {
        cases.extend(["", ".", "lib64", "site-packages"].map(|value| (variable, value)));
    }
    for path in ["", ".", ":/usr/bin:/bin", "/usr/bin:/bin:", ".:/usr/bin:/bin", "./:/usr/bin:/bin"] {
        cases.push(("PATH", path));
    }
    for variable in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME"] {
        cases.extend(["", "."].map(|value| (variable, value)));
    }
    let here = folder.path("").canonicalize().unwrap();
    for case in cases {
        let document = doctor(&folder, &[case]);
        for library in ["nvrtc", "nccl"] {
            let path = document[library]["path"].as_str().map(|path| Path::new(path).canonicalize().unwrap());
            let own = std::env::var_os("COUNTERPOINT_NVRTC_DIR").map(|named| Path::new(&named).to_owned());
            let foreign = path.is_some_and(|path| {
                path.starts_with(&here)
                    || own.is_some_and(|own| path.starts_with(own.canonicalize().unwrap()))
            });
            assert!(!foreign, "{case:?}: {document}");
        }
        // What was tried is named where nothing was found.
        let missing = document["missing"].to_string();
        assert!(!missing.contains("\"lib64") && !missing.contains("./lib"), "{case:?}: {document}");
        assert!(!missing.contains(here.to_str().unwrap()), "{case:?}: {document}");
        assert_eq!(folder.names(), names, "{case:?}");
    }
}

/// A folder that a variable of ours names by a relative path is refused with a sentence, wherever it is read.
#[test]
fn relative_folders_are_refused_or_ignored() {
    let folder = planted();
    let names = folder.names();
    let found = doctor(&folder, &[("COUNTERPOINT_NVRTC_DIR", "lib64"), ("COUNTERPOINT_CACHE_DIR", "cache")]);
    assert!(found["nvrtc"].is_null() && found["cache"].is_null(), "{found}");
    let missing = found["missing"].to_string();
    for words in
        ["COUNTERPOINT_NVRTC_DIR=lib64 is not an absolute path", "COUNTERPOINT_CACHE_DIR=cache is not"]
    {
        assert!(missing.contains(words), "{missing}");
    }
    let profiles = [("COUNTERPOINT_PROFILE_DIR", "profiles")];
    for line in [
        "doctor --calibrate",
        "tune gemm --m 64 --n 32 --k 32 --tp-size 2 --iterations 1 --warmups 0 --collective all-gather",
    ] {
        folder.run_with(line, &profiles).is_refusal(2, &["COUNTERPOINT_PROFILE_DIR=profiles", "absolute"]);
    }
    assert_eq!(folder.names(), names);
}

/// Packages of a virtual environment and of the user are found by the isolated python too.
#[test]
fn packages_of_environments_and_users_are_found() {
    let folder = Folder::new();
    let python = |code: &str| {
        let output = Command::new("python3").args(["-I", "-c", code]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let version = python("import sys; print('python%d.%d' % sys.version_info[:2])");
    if version.is_empty() {
        assert!(std::env::var_os("CI").is_none(), "no python3");
        eprintln!("SKIPPED, which CI would not accept: no python3");
        return;
    }
    let environment = folder.path("environment");
    let made = Command::new("python3")
        .args(["-m", "venv", "--without-pip"])
        .arg(&environment)
        .stderr(Stdio::null())
        .status();
    assert!(made.unwrap().success(), "python3 -m venv");
    let home = folder.path("home");
    let listed = folder.path("elsewhere/site-packages");
    for packages in [
        environment.join(format!("lib/{version}/site-packages")),
        home.join(format!(".local/lib/{version}/site-packages")),
        listed.clone(),
    ] {
        let place = packages.join("nvidia/nccl/lib");
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("libnccl.so.2"), b"no library").unwrap();
    }
    let bin = format!("{}/bin", environment.display());
    let variables: [&[(&str, &str)]; 3] =
        [&[("PATH", &bin)], &[("HOME", home.to_str().unwrap())], &[("PYTHONPATH", listed.to_str().unwrap())]];
    for (case, place) in variables.into_iter().zip([&environment, &home, &listed]) {
        let document = doctor(&folder, case);
        let tried = document["missing"].to_string();
        let tried = tried.contains(&format!("{}/", place.display())) && tried.contains("libnccl.so.2");
        assert!(tried || !document["nccl"].is_null(), "{case:?}: {document}");
    }
}

/// A cache that others may write to is named by `doctor`.
#[test]
fn an_open_cache_is_named() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    fs::create_dir(&cache).unwrap();
    for (mode, trusted) in [(0o700, true), (0o755, true), (0o770, false), (0o1777, false)] {
        fs::set_permissions(&cache, fs::Permissions::from_mode(mode)).unwrap();
        let document = doctor(&folder, &[("COUNTERPOINT_CACHE_DIR", cache.to_str().unwrap())]);
        let named = document["missing"].to_string().contains("others may write to it");
        assert_eq!(named, !trusted, "{mode:o}: {document}");
    }
}
