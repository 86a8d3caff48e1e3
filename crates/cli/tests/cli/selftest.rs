//! `counterpoint selftest`.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::Folder;

#[test]
fn the_cpu_proves_itself_and_prints_seeds_and_one_row_of_figures() {
    let folder = Folder::new();
    let ran = folder.run("selftest --quick --verbose").ok();
    let lines: Vec<&str> = ran.stdout.lines().collect();
    let (last, rest) = lines.split_last().unwrap();
    let table = rest.iter().position(|line| line.starts_with(" group ")).unwrap();
    assert_eq!(rest.len() - table - 2, 3, "{}", ran.stdout);
    let (took, checks): (Vec<&str>, Vec<&str>) =
        rest[..table].iter().partition(|line| line.starts_with("took "));
    assert_eq!(took.len(), 3, "{}", ran.stdout);
    assert!(checks.len() > 25, "{}", checks.len());
    assert!(checks.iter().all(|line| line.starts_with("ok ") && line.contains(", seed ")), "{}", ran.stdout);
    assert!(last.contains(&format!("{} passed, 0 failed", checks.len())), "{last}");
    // Without --verbose the table and the row of figures are all that there is to say; of one group here, as all take long.
    let brief = folder.run("selftest --quick --only tcp").ok();
    assert_eq!(brief.stdout.lines().count(), 4, "{}", brief.stdout);
    assert!(brief.stdout.lines().last().unwrap().contains("10 passed, 0 failed"), "{}", brief.stdout);
}

/// Where standard error is not a terminal a line every few seconds says how far it is.
#[test]
fn it_says_how_far_it_is_while_it_runs() {
    let mut selftest = Command::new(env!("CARGO_BIN_EXE_counterpoint"))
        .args(["selftest", "--only", "cpu"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = std::io::BufReader::new(selftest.stderr.take().unwrap());
    let mut progress =
        std::io::BufRead::lines(stderr).map(Result::unwrap).filter(|line| line.starts_with("selftest, "));
    let made = |line: &str| -> usize {
        let (_, rest) = line.split_once(" s: ").unwrap();
        rest.split_once(" check").unwrap().0.replace(',', "").parse().unwrap()
    };
    let first = progress.next().unwrap();
    // Of checks that a process has made and not yet handed over; a busy machine makes few of them in a few seconds.
    let later = progress.by_ref().take(40).find(|line| made(line) > made(&first));
    selftest.kill().unwrap();
    selftest.wait().unwrap();
    let later = later.unwrap_or_else(|| panic!("nothing more than {first}"));
    assert!(later.contains("0 failed; 0 of 1 part") && later.contains("examining cpu"), "{later}");
}

#[test]
fn json_is_one_document() {
    let folder = Folder::new();
    let ran = folder.run("selftest --quick --only tcp --json").ok();
    let json: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let checks = json["checks"].as_array().unwrap();
    assert_eq!(json["passed"], checks.len());
    assert_eq!(json["failed"], 0);
    assert!(json["seconds"].as_f64().unwrap() > 0.0);
    assert!(!json["device"].as_str().unwrap().is_empty());
    assert_eq!(json["groups"].as_array().unwrap().len(), 1);
    assert_eq!(checks.len(), 10, "{}", ran.stdout);
    for check in checks {
        assert!(check["error"].as_f64().unwrap() <= check["bound"].as_f64().unwrap(), "{check}");
        assert!(check["seed"].is_u64() && check["name"].is_string() && check["passed"] == true, "{check}");
    }
}

/// What users run to see that processes hold among hostile others.
#[test]
fn ranks_hold_among_hostile_others() {
    let document = Folder::new().run("selftest --hostile --json").ok().json();
    let checks = document["checks"].as_array().unwrap();
    assert_eq!((checks.len(), &document["failed"]), (6, &0.into()), "{document}");
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    for words in
        ["strangers", "two jobs at one port", "other flags", "input that is old", "killed", "stopped"]
    {
        assert!(names.iter().any(|name| name.contains(words)), "{words} in {names:?}");
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

/// Processes that this one has started and that still run.
fn children(process: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let lists: Vec<String> = tasks.map(|task| of(task.unwrap())).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).map(|number| number.parse().unwrap()).collect()
}

#[test]
fn an_interruption_leaves_no_process_and_no_temporary_folder() {
    let folder = Folder::new();
    let mut selftest = Command::new(env!("CARGO_BIN_EXE_counterpoint"))
        .arg("selftest")
        .env("TMPDIR", folder.path("."))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    let mut examiners = Vec::new();
    while examiners.is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(30), "nothing began");
        thread::sleep(Duration::from_millis(10));
        examiners = children(selftest.id());
    }
    assert!(!folder.names().is_empty(), "it has a folder there");
    let kill = Command::new("kill").args(["-INT", &selftest.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!(selftest.wait().unwrap().code(), Some(130));
    assert!(folder.names().is_empty(), "{:?}", folder.names());
    for examiner in examiners {
        assert!(!std::path::Path::new(&format!("/proc/{examiner}")).exists(), "{examiner} runs on");
    }
}
