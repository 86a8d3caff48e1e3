//! The maps of the code in ARCHITECTURE.md and docs/ name only files and folders that exist, and stay short; every file of code
//! says what it is for, in the field's words.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use sources::{root, sources};

mod sources;

/// Where a path in backticks may begin to count as one.
const ROOTS: [&str; 6] = ["crates/", "docs/", "tests/", "benches/", "examples/", "src/"];

#[test]
fn paths_in_the_maps_exist() {
    let mut missing = Vec::new();
    let mut seen = 0;
    for page in pages() {
        for path in paths(&fs::read_to_string(root().join(&page)).unwrap()) {
            seen += 1;
            if !root().join(&path).exists() {
                missing.push(format!("{}: `{path}`", page.display()));
            }
        }
    }
    assert!(seen > 60, "the pages name {seen} paths: is the search for them broken?");
    assert!(missing.is_empty(), "these do not exist:\n{}", missing.join("\n"));
}

#[test]
fn the_map_stays_a_map() {
    let lines = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap().lines().count();
    assert!(lines <= 150, "ARCHITECTURE.md has {lines} lines; move what explains a choice to docs/decisions");
}

/// Every relative link of a page leads to a file, and no page holds both sides of a merge.
#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for page in
        [markdown("docs"), markdown("benches"), ["README.md", "ARCHITECTURE.md"].map(PathBuf::from).to_vec()]
            .concat()
    {
        let text = fs::read_to_string(root().join(&page)).unwrap();
        let leads_nowhere = |link: &&str| !root().join(&page).parent().unwrap().join(link).exists();
        broken.extend(links(&text).filter(leads_nowhere).map(|link| format!("{}: {link}", page.display())));
        let merge = text.lines().filter(|line| line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> "));
        broken.extend(merge.map(|line| format!("{}: {line}", page.display())));
    }
    assert!(
        broken.is_empty(),
        "these links lead nowhere, or merges were not finished:\n{}",
        broken.join("\n")
    );
}

/// What lies in docs/ and in docs/experiments is linked from the index there.
#[test]
fn nothing_is_linked_from_nowhere() {
    for folder in ["docs", "docs/experiments"] {
        let index = fs::read_to_string(root().join(folder).join("README.md")).unwrap();
        let linked: Vec<&str> = links(&index).map(|link| link.trim_end_matches('/')).collect();
        let files = fs::read_dir(root().join(folder)).unwrap();
        let names = files.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
        let unlinked: Vec<String> = names
            .filter(|name| !["README.md", "report.png"].contains(&&**name) && !linked.contains(&&**name))
            .collect();
        assert_eq!(unlinked, Vec::<String>::new(), "link them in {folder}/README.md");
    }
}

/// The line that README has for installing names a package with the binary, and a binary that needs no feature.
#[test]
fn the_install_line_installs_the_binary() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let line =
        readme.lines().find(|line| line.starts_with("cargo install ")).expect("README says how to install");
    let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
    let path = words.iter().skip_while(|word| **word != "--path").nth(1).expect("it installs from a path");
    let known = ["cargo", "install", "--locked", "--path", *path];
    assert!(words.iter().all(|word| known.contains(word)), "{line}: what else is said is not looked at here");
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--locked", "--format-version=1", "--manifest-path"])
        .arg(root().join(path).join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{line}: {}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let manifest = root().join(path).join("Cargo.toml").canonicalize().unwrap();
    let is_at_path = |package: &&Value| Path::new(package["manifest_path"].as_str().unwrap()) == manifest;
    let package = metadata["packages"].as_array().unwrap().iter().find(is_at_path);
    let package = package.unwrap_or_else(|| panic!("{line}: there is a workspace, but no package"));
    let binaries = package["targets"].as_array().unwrap().iter().filter(|target| target["kind"][0] == "bin");
    let installed: Vec<_> = binaries.filter(|target| target.get("required-features").is_none()).collect();
    assert!(installed.iter().any(|target| target["name"] == "counterpoint"), "{line} installs {installed:?}");
}

/// All pages in a folder and in those below it.
fn markdown(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(folder))
        .unwrap()
        .map(|entry| Path::new(folder).join(entry.unwrap().file_name()));
    let of_entry = |path: PathBuf| match root().join(&path).is_dir() {
        true => markdown(&path.to_string_lossy()),
        false if path.extension().is_some_and(|extension| extension == "md") => vec![path],
        false => Vec::new(),
    };
    entries.flat_map(of_entry).collect()
}

/// The targets of relative links, without their anchors.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    targets
        .filter(|target| !target.contains("://") && !target.starts_with('#'))
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty())
}

/// The maps: the page of the house, where things are, and every decision.
fn pages() -> Vec<PathBuf> {
    let decisions = fs::read_dir(root().join("docs/decisions")).unwrap();
    let decisions = decisions.map(|entry| Path::new("docs/decisions").join(entry.unwrap().file_name()));
    ["ARCHITECTURE.md", "docs/where.md"].into_iter().map(PathBuf::from).chain(decisions).collect()
}

/// Every path in backticks.
fn paths(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted
        .filter(|word| {
            ROOTS.iter().any(|root| word.starts_with(root)) && !word.contains([' ', '*', '…', '<'])
        })
        .map(str::to_owned)
        .collect()
}

/// Old words that a reader of the field's papers would have to look up (docs/glossary.md has the pairs).
const OLD_WORDS: [&str; 24] = [
    "products whose rows travel",
    "rows away",
    "kernels meet",
    "meeting",
    "meet inside",
    "mailbox word",
    "start line",
    "ranks meet",
    "meet on the host",
    "homeward",
    "passoverlap::beside",
    "settle by seconds",
    "changes no bit",
    "ran in turns",
    " in turns with ",
    "shares of dk",
    "shares of dq",
    "shares of a sum",
    "shares of the sum",
    "own shares",
    "way home",
    "travel home",
    "travels home",
    "are home",
];

/// Likewise, but not in records of experiments.
const OLD_WORDS_OF_TEXT: [&str; 19] = [
    "that are away",
    "rows are away",
    "row is away",
    "with_away",
    "held back",
    "take turns",
    "takes turns",
    "in_turns",
    "by turns",
    "kernels walk",
    "ctas walk",
    "cta walks",
    "tiles walk",
    "tile walks",
    "walked axis",
    "a stretch of",
    "crossing_rows",
    "terms of k",
    "and terms",
];

/// Whole words of these.
const OLD_WHOLE_WORDS_OF_TEXT: [&str; 7] =
    ["beside", "taker", "takers", "settle", "settled", "stretches", "walked"];

/// What has one of them all the same: names of results.
const KEPT: [&str; 1] = ["beside: "];

/// In kernels, where CUTLASS and FlashAttention have other words for them (`crates/cuda/kernels/README.md` has the pairs): also within names.
const OLD_WORDS_OF_KERNELS: [&str; 16] = [
    "walk",
    "stretch",
    "kturn",
    "_turn",
    "backwardturns",
    "khands",
    "hands_over",
    "keeper",
    "beside",
    "homes",
    "homed",
    "gemmring",
    "gemmterm",
    "kterms",
    "kshares",
    "the copy engine",
];

/// Whole words, in names as well: who is told what is notified, sent, given or printed something.
const OLD_WHOLE_WORDS: [&str; 5] = ["told", "tell", "tells", "telling", "teller"];

#[test]
fn old_words_are_gone() {
    let mut found = Vec::new();
    let mut seen = 0;
    for folder in ["crates", "docs", "examples", "python", "src"] {
        for path in sources(&root().join(folder), &["rs", "cuh", "md", "py", "pyi"]) {
            if path.ends_with("docs/glossary.md") {
                continue;
            }
            seen += 1;
            let is_text = !path.starts_with(root().join("docs/experiments"));
            let is_kernel = path.starts_with(root().join("crates/cuda/kernels"));
            for (number, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
                let line = line.to_lowercase();
                let without = KEPT.iter().fold(line.clone(), |line, kept| line.replace(kept, " "));
                let whole =
                    |old: &&&str| without.split(|c: char| !c.is_alphanumeric()).any(|word| word == **old);
                let old = OLD_WORDS.iter().filter(|word| line.contains(**word));
                let old = old.chain(OLD_WHOLE_WORDS.iter().filter(whole));
                let of_text = OLD_WORDS_OF_TEXT.iter().filter(|word| line.contains(**word));
                let of_text = of_text.chain(OLD_WHOLE_WORDS_OF_TEXT.iter().filter(whole));
                // A wait in a kernel is settled, which is no search.
                let old = old.chain(of_text.filter(|word| is_text && !(is_kernel && **word == "settled")));
                let of_kernels =
                    OLD_WORDS_OF_KERNELS.iter().filter(|word| is_kernel && line.contains(**word));
                let old = old.chain(of_kernels);
                found.extend(old.map(|word| format!("{}:{}: `{word}`", path.display(), number + 1)));
            }
        }
    }
    assert!(seen > 800, "{seen} files: is the search for them broken?");
    assert!(found.is_empty(), "docs/glossary.md has the field's word for these:\n{}", found.join("\n"));
}

/// Every file of code begins with a sentence that says what it is for. One made of others' text, which cannot, would be named here.
#[test]
fn every_file_says_what_it_is_for() {
    const KINDS: [&str; 6] = ["rs", "cu", "cuh", "py", "pyi", "sh"];
    let folders = ["crates", "src", "tests", "examples", "python", "benches"];
    let mut paths: Vec<PathBuf> =
        folders.iter().flat_map(|folder| sources(&root().join(folder), &KINDS)).collect();
    paths.extend(["test.sh", ".ci/run"].map(|path| root().join(path)));
    assert!(paths.len() > 1_000, "{} files: is the search for them broken?", paths.len());
    let silent = paths.iter().filter(|path| {
        let kind = path.extension().map_or("sh", |extension| extension.to_str().unwrap());
        !head(&fs::read_to_string(path).unwrap(), kind).is_some_and(|head| is_sentence(&head))
    });
    let silent: Vec<String> = silent.map(|path| path.display().to_string()).collect();
    assert!(
        silent.is_empty(),
        "these do not begin with a sentence on what they are for:\n{}",
        silent.join("\n")
    );
}

#[test]
fn a_file_that_does_not_say_what_it_is_for_is_found() {
    let says = |text: &str, kind: &str| head(text, kind).is_some_and(|head| is_sentence(&head));
    for (text, kind) in [
        ("//! Chunks to ranks.\n\nuse std::fmt;\n", "rs"),
        ("//! A long one, which goes on\n//! in the next line.\nmod tests;\n", "rs"),
        ("// The launcher of `cast.cuh`: conversions.\n#pragma once\n", "cuh"),
        ("\"\"\"Rows of ranks.\"\"\"\n", "py"),
        ("#!/usr/bin/env python3\n\"\"\"Times a call\nof Python.\n\nUsage: none\n\"\"\"\n", "py"),
        ("#!/usr/bin/env bash\n# Builds the wheel.\nset -e\n", "sh"),
    ] {
        assert!(says(text, kind), "{text}");
    }
    for (text, kind) in [
        ("use std::fmt;\n//! Chunks to ranks.\n", "rs"),
        ("/// Chunks to ranks.\nfn f() {}\n", "rs"),
        ("// Chunks to ranks.\n", "rs"),
        ("//!\n", "rs"),
        ("//! Chunks\n", "rs"),
        ("", "rs"),
        ("#pragma once\n// Conversions of tensors.\n", "cuh"),
        ("import math\n\"\"\"Rows of ranks.\"\"\"\n", "py"),
        ("#!/usr/bin/env bash\nset -e\n# Builds the wheel.\n", "sh"),
    ] {
        assert!(!says(text, kind), "{text}");
    }
}

/// The comment or docstring that a file of this kind begins with, after the line that names its interpreter.
fn head(text: &str, kind: &str) -> Option<String> {
    let text = match text.strip_prefix("#!/") {
        Some(rest) => rest.split_once('\n')?.1,
        None => text,
    };
    let mark = match kind {
        "py" | "pyi" => return Some(text.strip_prefix("\"\"\"")?.split_once("\"\"\"")?.0.to_owned()),
        "rs" => "//!",
        "sh" => "#",
        _ => "//",
    };
    let lines = text.lines().map_while(|line| line.strip_prefix(mark));
    Some(lines.collect::<Vec<_>>().join("\n"))
}

/// Whether the first paragraph has words, and an end.
fn is_sentence(head: &str) -> bool {
    let paragraph = head.trim_start().split("\n\n").next().unwrap_or_default().trim_end();
    paragraph.split_whitespace().count() > 1 && paragraph.ends_with(['.', ':', '?', ';'])
}
