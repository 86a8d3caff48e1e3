//! `counterpoint selftest`.

mod support;

use support::Folder;

#[test]
fn the_cpu_proves_itself_and_prints_seeds_and_one_row_of_figures() {
    let folder = Folder::new();
    let ran = folder.run("selftest --quick").ok();
    let lines: Vec<&str> = ran.stdout.lines().collect();
    let (last, rest) = lines.split_last().unwrap();
    let table = rest.iter().position(|line| line.starts_with("group ")).unwrap();
    assert_eq!(rest.len() - table - 1, 3, "{}", ran.stdout);
    let (took, checks): (Vec<&str>, Vec<&str>) =
        rest[..table].iter().partition(|line| line.starts_with("took "));
    assert_eq!(took.len(), 3, "{}", ran.stdout);
    assert!(checks.len() > 25, "{}", checks.len());
    assert!(checks.iter().all(|line| line.starts_with("ok ") && line.contains(", seed ")), "{}", ran.stdout);
    assert!(last.contains(&format!("{} passed, 0 failed", checks.len())), "{last}");
}

#[test]
fn json_is_one_document() {
    let folder = Folder::new();
    let ran = folder.run("selftest --quick --json").ok();
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let checks = json["checks"].as_array().unwrap();
    assert_eq!(json["passed"], checks.len());
    assert_eq!(json["failed"], 0);
    assert!(json["seconds"].as_f64().unwrap() > 0.0);
    assert!(!json["device"].as_str().unwrap().is_empty());
    assert_eq!(json["groups"].as_array().unwrap().len(), 3);
    for check in checks {
        assert!(check["error"].as_f64().unwrap() <= check["bound"].as_f64().unwrap(), "{check}");
        assert!(check["seed"].is_u64() && check["name"].is_string() && check["passed"] == true, "{check}");
    }
}

#[test]
fn modes_exclude_each_other() {
    let folder = Folder::new();
    folder.refuses("selftest --compile-only --device cuda", &["--compile-only", "--device"]);
    folder.refuses("selftest --stress", &["--stress", "--device cpu"]);
    folder.refuses("selftest --compile-only --quick", &["--compile-only", "--quick"]);
}

#[test]
fn a_name_that_nothing_has_is_refused_with_the_names_that_there_are() {
    let folder = Folder::new();
    folder.refuses("selftest --only atention", &["--only atention", "cpu, cpu linear layers"]);
    folder.refuses("selftest --compile-only --only atention", &["--only atention", "no kernel"]);
}

#[test]
fn a_gpu_that_is_not_there_is_status_3() {
    if !std::path::Path::new("/dev/nvidia0").exists() {
        Folder::new().run("selftest --device cuda --quick").is_refusal(3, &["NVIDIA"]);
    }
}
