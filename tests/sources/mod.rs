//! The sources of the repository, for the tests that look at them.
#![allow(dead_code, reason = "each of them uses some of it")]

use std::fs;
use std::path::{Path, PathBuf};

/// The repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every line of files of this kind below `folder` that is not a comment, up to the file's test module.
pub(crate) fn code_lines(folder: &Path, kind: &str) -> Vec<(PathBuf, usize, String)> {
    let files = sources(folder, &[kind]);
    let mut lines = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path).unwrap();
        let all: Vec<&str> = text.lines().collect();
        let is_test =
            |at: usize| all[at] == "#[cfg(test)]" && all.get(at + 1).is_some_and(|next| next.ends_with('{'));
        let end = (0..all.len()).find(|&at| is_test(at)).unwrap_or(all.len());
        let code = all[..end].iter().enumerate();
        for (number, line) in code.filter(|(_, line)| !line.trim_start().starts_with("//")) {
            lines.push((path.clone(), number + 1, (*line).to_owned()));
        }
    }
    lines
}

/// Every file of these kinds below `folder`.
pub(crate) fn sources(folder: &Path, kinds: &[&str]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kinds.iter().any(|known| kind == *known)) {
                files.push(path);
            }
        }
    }
    assert!(!files.is_empty(), "no sources below {}", folder.display());
    files
}
