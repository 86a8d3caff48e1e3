//! Machine profiles: measured, kept, read, and refused.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::support::Folder;

const ATTENTION: &str =
    "attention --mask causal:256 --heads-q 2 --head-dim 16 --cp-size 2 --chunk-size 64 --json";

#[test]
fn a_measured_profile_is_kept_and_planned_with() {
    let folder = Folder::new();
    let profiles = folder.path("profiles");
    let kept = ("COUNTERPOINT_PROFILE_DIR", profiles.to_str().unwrap());
    let measured = folder.run_with("doctor --calibrate --json", &[kept]).ok().json();
    assert_eq!(measured["version"], 1);
    let names: Vec<_> = std::fs::read_dir(folder.path("profiles")).unwrap().collect();
    assert_eq!(names.len(), 1, "one machine, one file, nothing next to it");
    // It is this user's alone to change, as whoever reads it wants it.
    let file = names[0].as_ref().unwrap().path();
    assert_eq!([&file, &profiles].map(|path| path.metadata().unwrap().permissions().mode() & 0o022), [0, 0]);
    set_permissions(&file, Permissions::from_mode(0o646)).unwrap();
    let measure = "bench gemm-collective --shapes 64:32:16 --ranks 2 --json";
    let refused = folder.run_with(measure, &[kept]);
    let sentence = "is not used: others may write to it (mode 0646); chmod go-w it, if nobody has";
    assert!(refused.status == 2 && refused.stderr.contains(sentence), "{}", refused.stderr);
    set_permissions(&file, Permissions::from_mode(0o644)).unwrap();

    folder.run("doctor --calibrate --output mine.json").ok();
    folder.run(&format!("{ATTENTION} --profile mine.json")).ok();
    folder.run("plan --mask causal:2k --cp-size 2 --profile mine.json --report plan.html").ok();
    let report = String::from_utf8(folder.read("plan.html")).unwrap();
    assert!(report.contains(measured["machine"].as_str().unwrap()), "the report says what it is planned for");
}

#[test]
fn what_cannot_be_used_is_refused() {
    let folder = Folder::new();
    folder.run("doctor --calibrate --output mine.json").ok();
    let mut profile: Value = serde_json::from_slice(&folder.read("mine.json")).unwrap();
    profile["machine"] = "another machine".into();
    folder.write("other.json", profile.to_string());
    profile["version"] = 9.into();
    folder.write("later.json", profile.to_string());
    folder.write("broken.json", "{\"version\": 1,");
    let with = |name: &str| format!("{ATTENTION} --profile {name}");
    folder.refuses(&with("other.json"), &["other.json", "another machine", "doctor --calibrate"]);
    folder.refuses(&with("later.json"), &["later.json", "version 9"]);
    folder.refuses(&with("broken.json"), &["broken.json", "not a machine profile"]);
    folder.refuses(&with("missing.json"), &["missing.json"]);
    folder.run(&format!("{ATTENTION} --overlap auto")).ok();
    folder.refuses("doctor --output mine.json", &["--calibrate"]);
    folder.refuses("doctor --calibrate --overlap", &["--overlap"]);
}
