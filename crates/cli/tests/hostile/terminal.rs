//! Names and words from elsewhere that would command a terminal.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::support::{Folder, Ran};

/// What a terminal acts on: a title, colours, a bell, a cleared screen, a forged line, text that runs the other way.
const HOSTILE: &str = "x\u{1b}]0;title\u{7}\u{1b}[31m\u{9b}2J\r\nerror: forged\u{202e}y";

fn commands_nothing(ran: &Ran) {
    for text in [&ran.stdout, &ran.stderr] {
        let commands = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
        assert!(!text.chars().any(commands), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("error: forged")), "{text:?}");
    }
}

/// A safetensors file with a tensor of a hostile name, of a hostile type, and without tensors but that.
#[test]
fn names_of_tensors() {
    let folder = Folder::new();
    let name = serde_json::to_string(HOSTILE).unwrap();
    for header in [
        format!(r#"{{{name}: {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}}}"#),
        format!(r#"{{{name}: {{"dtype": {name}, "shape": [1], "data_offsets": [0, 4]}}}}"#),
        format!(r#"{{"q": {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4], {name}: 1}}}}"#),
    ] {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat();
        folder.write("in.st", bytes);
        let ran = folder.run("attention --mask causal:8 --input in.st --output o");
        assert_eq!(ran.status, 2, "{}", ran.stderr);
        assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
        assert!(ran.stderr.contains("\\x1b]0;title\\x07\\x1b[31m"), "{}", ran.stderr);
        commands_nothing(&ran);
    }
}

/// Profiles and tuned plans whose machines, transports and policies have hostile names; they are shown in tables and JSON.
#[test]
fn words_of_profiles_and_plans() {
    let folder = Folder::new();
    folder.run("doctor --calibrate --output profile.json").ok();
    let profile: Value = serde_json::from_slice(&folder.read("profile.json")).unwrap();
    for field in ["machine", "source"] {
        let mut profile = profile.clone();
        profile[field] = HOSTILE.into();
        folder.write("hostile.json", profile.to_string());
        for line in [
            "simulate linear --kind row --tokens 8k --in-features 64 --out-features 64 --tp-size 2",
            "simulate linear --kind row --tokens 8k --in-features 64 --out-features 64 --tp-size 2 --json",
            "plan --mask causal:64 --cp-size 2",
            "plan --mask causal:64 --cp-size 2 --json",
            "attention --mask causal:64 --heads-q 1 --head-dim 4",
        ] {
            let ran = folder.run(&format!("{line} --profile hostile.json"));
            commands_nothing(&ran);
            if line.contains("--json") && ran.status == 0 {
                ran.json();
            }
        }
    }
    folder
        .write("plans.json", format!(r#"{{"version": 1, {}: 1}}"#, serde_json::to_string(HOSTILE).unwrap()));
    let tune =
        "tune gemm --m 64 --n 32 --k 32 --tp-size 2 --iterations 1 --warmups 0 --collective all-gather";
    commands_nothing(&folder.run(&format!("{tune} --plans plans.json")));
}

/// Arguments, paths and variables, and the last words of a program that was asked.
#[test]
fn words_of_arguments_and_programs() {
    let folder = Folder::new();
    let hostile = HOSTILE.replace(' ', "");
    for line in
        ["mask", "plan --cp-size 2 --mask", "attention --mask causal:8 --output", "bench --masks", "plan --"]
    {
        commands_nothing(
            &folder.run(&format!("{line}{}{hostile}", if line.ends_with("--") { "" } else { " " })),
        );
    }
    let path =
        folder.with_python(&format!("#!/bin/sh\nprintf 'bad \\033[31m\\007 words' >&2\nexit 3\n# {hostile}"));
    fs::set_permissions(folder.path("bin/python3"), fs::Permissions::from_mode(0o755)).unwrap();
    let variables = [
        ("COUNTERPOINT_NCCL_DIR", ""),
        ("COUNTERPOINT_NVRTC_DIR", ""),
        ("PATH", &path),
        ("COUNTERPOINT_X", HOSTILE),
    ];
    for line in ["doctor", "doctor --json"] {
        let ran = folder.run_with(line, &variables);
        commands_nothing(&ran);
        assert!(ran.stdout.contains("forged"), "{}", ran.stdout);
    }
}
