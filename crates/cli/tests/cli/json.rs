//! The documents that `--json` prints.

use serde_json::Value;

use crate::support::Folder;

/// Small commands, and the schema of what each prints.
const DOCUMENTS: [(&str, &str); 10] = [
    ("plan --mask causal:1k --cp-size 2", "counterpoint.plan/1"),
    ("mask causal:8", "counterpoint.mask/1"),
    ("attention --mask causal:64 --cp-size 2", "counterpoint.attention/1"),
    ("bench plan --mask causal:4k --cp-size 2", "counterpoint.bench-plan/1"),
    ("bench fresh-masks --ranks 2 --tokens 256", "counterpoint.bench-fresh-masks/1"),
    (
        "simulate linear --kind row --tokens 1k --in-features 1k --out-features 1k --tp-size 2",
        "counterpoint.simulate-linear/1",
    ),
    ("simulate attention --mask causal:1k --cp-size 2", "counterpoint.simulate-attention/1"),
    ("simulate model --ranks 8", "counterpoint.simulate-model/1"),
    ("selftest --quick --only tcp", "counterpoint.selftest/1"),
    ("doctor", "counterpoint.doctor/1"),
];

#[test]
fn every_document_says_first_what_it_is() {
    let folder = Folder::new();
    for (line, schema) in DOCUMENTS {
        let ran = folder.run(&format!("{line} --json")).ok();
        let documents: Vec<Value> =
            serde_json::Deserializer::from_str(&ran.stdout).into_iter().map(Result::unwrap).collect();
        assert!(!documents.is_empty(), "{line}");
        assert!(documents.iter().all(|document| document["schema"] == schema), "{line}\n{}", ran.stdout);
        let first = ran.stdout.trim_start_matches(['{', '\n', ' ']);
        assert!(first.starts_with("\"schema\""), "{line}\n{first}");
    }
}

/// What is printed may be given again.
#[test]
fn a_printed_mask_is_a_mask_file() {
    let folder = Folder::new();
    let printed = folder.run("mask varlen-causal:0,3,9 --json").ok().stdout;
    folder.write("mask.json", &printed).write("other.json", printed.replace("mask/1", "plan/1"));
    assert_eq!(folder.run("mask mask.json --json").ok().stdout, printed);
    folder.refuses("mask other.json", &["other.json", "schema", "counterpoint.mask/1"]);
}
