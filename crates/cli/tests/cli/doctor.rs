//! `counterpoint doctor`, and `selftest --compile-only`.

use serde_json::Value;

use crate::support::Folder;

/// Where no cache is: the user's is none of a test's business, and nothing here makes one.
const CACHE: (&str, &str) = ("COUNTERPOINT_CACHE_DIR", "/tmp/counterpoint-none/cache");

#[test]
fn what_is_missing_is_no_error() {
    let folder = Folder::new();
    let nowhere = ("COUNTERPOINT_NVRTC_DIR", "/nowhere");
    let ran = folder.run_with("doctor --json", &[CACHE, nowhere, ("COUNTERPOINT_NCCL_DIR", "/nowhere")]);
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    let document: Value = serde_json::from_str(&ran.stdout).unwrap();
    for library in ["nvrtc", "nccl"] {
        assert!(document[library].is_null(), "{document}");
    }
    let missing = document["missing"].as_array().unwrap();
    let remedy = |what: &str| {
        let found =
            missing.iter().find(|missing| missing["what"] == what).unwrap_or_else(|| panic!("{document}"));
        assert!(!found["costs"].as_str().unwrap().is_empty());
        found["remedy"].as_str().unwrap().to_owned()
    };
    assert!(remedy("NVRTC").contains("pip install nvidia-cuda-nvrtc==13.0.88"));
    assert!(remedy("NVRTC").contains("COUNTERPOINT_NVRTC_DIR=/nowhere: no libnvrtc.so.* in it"));
    assert!(remedy("NCCL").contains("pip install nvidia-nccl-cu13"));
    assert_eq!(document["cache"]["entries"], 0);
    assert!(folder.names().is_empty(), "looking changes nothing: {:?}", folder.names());
}

#[test]
fn packages_of_python_are_searched() {
    let Some(nvrtc) = std::env::var_os("COUNTERPOINT_NVRTC_DIR") else {
        assert!(std::env::var_os("CI").is_none(), "the test command sets COUNTERPOINT_NVRTC_DIR");
        eprintln!("SKIPPED, which CI would not accept: COUNTERPOINT_NVRTC_DIR is not set");
        return;
    };
    let folder = Folder::new();
    let packages = folder.path("site-packages");
    std::fs::create_dir_all(packages.join("nvidia/cu13")).unwrap();
    std::os::unix::fs::symlink(&nvrtc, packages.join("nvidia/cu13/lib")).unwrap();
    let path = folder.with_python(&format!("#!/bin/sh\necho {}\n", packages.display()));
    // Loaders and toolkits come first, so on a machine that has one that is what is found.
    let document = |variables: &[(&str, &str)]| -> Value {
        serde_json::from_str(&folder.run_with("doctor --json", variables).stdout).unwrap()
    };
    let found = document(&[CACHE, ("COUNTERPOINT_NVRTC_DIR", ""), ("PATH", &path)]);
    let library = found["nvrtc"]["path"].as_str().unwrap_or_else(|| panic!("{found}"));
    let elsewhere = document(&[CACHE, ("COUNTERPOINT_NVRTC_DIR", ""), ("PATH", "/usr/bin:/bin")]);
    assert!(library.contains("site-packages/nvidia/cu13/lib") || !elsewhere["nvrtc"].is_null(), "{found}");

    // Without its builtins next to it a compiler is none.
    let bare = folder.path("bare");
    std::fs::create_dir(&bare).unwrap();
    for entry in std::fs::read_dir(&nvrtc).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("libnvrtc.so") {
            std::os::unix::fs::symlink(&path, bare.join(name)).unwrap();
        }
    }
    let found = document(&[CACHE, ("COUNTERPOINT_NVRTC_DIR", bare.to_str().unwrap())]);
    let missing = found["missing"].as_array().unwrap().iter().find(|missing| missing["what"] == "NVRTC");
    let found_builtins = !elsewhere["nvrtc"].is_null();
    let said =
        missing.is_some_and(|missing| missing["remedy"].as_str().unwrap().contains("libnvrtc-builtins"));
    assert!(said || found_builtins, "{found}");
}

#[test]
fn a_python_that_fails_is_named() {
    let folder = Folder::new();
    let path = folder.with_python("#!/bin/sh\necho broken installation >&2\nexit 3\n");
    let variables = [CACHE, ("COUNTERPOINT_NCCL_DIR", ""), ("PATH", path.as_str())];
    let document: Value = serde_json::from_str(&folder.run_with("doctor --json", &variables).stdout).unwrap();
    let missing = document["missing"].as_array().unwrap().iter().find(|missing| missing["what"] == "NCCL");
    let remedy = missing.map_or("", |missing| missing["remedy"].as_str().unwrap());
    assert!(!document["nccl"].is_null() || remedy.contains("broken installation"), "{document}");
}

#[test]
fn every_variable_is_listed() {
    let folder = Folder::new();
    let ran = folder.run_with("doctor", &[CACHE, ("COUNTERPOINT_CASH_DIR", "x")]);
    assert_eq!(ran.status, 0);
    for words in [
        "COUNTERPOINT_CACHE_DIR = /tmp/counterpoint-none/cache (the folder of compiled kernels)",
        "COUNTERPOINT_NCCL_DIR",
        "COUNTERPOINT_NVRTC_DIR",
        "COUNTERPOINT_RENDEZVOUS",
        "COUNTERPOINT_CASH_DIR = x (nothing reads it; is it misspelt?)",
    ] {
        assert!(ran.stdout.contains(words), "{words}: {}", ran.stdout);
    }
}

/// What the job was started with is printed, each with what to do.
#[test]
fn variables_of_the_job_are_judged() {
    let folder = Folder::new();
    let variables =
        [CACHE, ("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_DEBUG", "WARN")];
    let ran = folder.run_with("doctor", &variables).ok();
    for words in [
        "  ok     CUDA_DEVICE_MAX_CONNECTIONS=1: ",
        "  costs  CUDA_LAUNCH_BLOCKING=1: ",
        "unset it but to debug",
    ] {
        assert!(ran.stdout.contains(words), "{words}: {}", ran.stdout);
    }
    let document: Value =
        serde_json::from_str(&folder.run_with("doctor --json", &variables).ok().stdout).unwrap();
    let found: Vec<_> = document["job"].as_array().unwrap().iter().map(|found| &found["verdict"]).collect();
    assert_eq!(found, ["fine", "costs"], "{document}");
    // A launcher that gives what cannot be.
    let beyond = folder.run_with("doctor --json", &[CACHE, ("RANK", "2"), ("WORLD_SIZE", "2")]).ok();
    let document: Value = serde_json::from_str(&beyond.stdout).unwrap();
    let launcher = document["job"].as_array().unwrap().iter().find(|found| found["name"] == "launcher");
    assert!(launcher.is_some_and(|found| found["advice"].as_str().unwrap().contains("RANK")), "{document}");
}

#[test]
fn a_gpu_is_described_or_missing() {
    let document: Value =
        serde_json::from_str(&Folder::new().run_with("doctor --json", &[CACHE]).stdout).unwrap();
    let gpus = document["gpus"].as_array().unwrap();
    let missing = document["missing"].as_array().unwrap().iter().any(|missing| missing["what"] == "GPU");
    assert_eq!(gpus.is_empty(), missing, "{document}");
    for gpu in gpus {
        for field in ["name", "uuid", "capability", "arch", "kernels"] {
            assert!(!gpu[field].as_str().unwrap().is_empty(), "{field} of {gpu}");
        }
    }
}

#[test]
fn kernels_cannot_be_compiled_without_a_compiler() {
    let ran =
        Folder::new().run_with("selftest --compile-only", &[CACHE, ("COUNTERPOINT_NVRTC_DIR", "/nowhere")]);
    assert_eq!(ran.status, 3);
    assert!(ran.stderr.contains("pip install nvidia-cuda-nvrtc==13.0.88"), "{}", ran.stderr);
    assert_eq!(ran.stdout, "");
}

#[test]
fn kernels_compile() {
    // A few of them: all are compiled by a test of crate cuda.
    let ran = Folder::new().run_with("selftest --compile-only --only cast --json", &[]);
    if ran.status == 3 {
        assert!(std::env::var_os("CI").is_none(), "{}", ran.stderr);
        eprintln!("SKIPPED, which CI would not accept: {}", ran.stderr);
        return;
    }
    let document: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert!(document["nvrtc"].as_str().is_some_and(|version| version.starts_with("1")), "{document}");
    assert_eq!(document["failed"], serde_json::json!([]));
    let kernels = document["kernels"].as_array().unwrap();
    assert_eq!(ran.status, 0, "{}", ran.stderr);
    assert!(!kernels.is_empty());
    for kernel in kernels {
        assert!(kernel["name"].as_str().unwrap().contains("cast"));
        assert!(kernel["registers"].as_u64().is_some_and(|registers| registers > 0), "{kernel}");
        assert_eq!((&kernel["local_bytes"], &kernel["spill_bytes"]), (&Value::from(0), &Value::from(0)));
        assert!(kernel["hgmma"].is_null() || kernel["hgmma"].is_u64());
    }
    let none = Folder::new().run_with("selftest --compile-only --only no-such-kernel", &[]);
    assert_eq!(none.status, 2, "nothing compiled is nothing proved");
    assert!(none.stderr.contains("no-such-kernel"), "{}", none.stderr);
}
