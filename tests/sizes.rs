//! How large crates, files and functions may be, whatever language they are written in.

use std::fs;
use std::path::{Path, PathBuf};

use sources::{code_lines, root, sources};

mod sources;

/// Lines of a crate, its tests, comments and blank lines left out: what someone must know who carries it on.
const MOST_CODE: usize = 20_000;
/// The same of the binary, which parses, calls and prints.
const MOST_CODE_OF_CLI: usize = 6_000;
/// Lines of a file, and of a function that gives no reason.
const MOST_OF_FILE: usize = 500;
const MOST_OF_FUNCTION: usize = 80;

#[test]
fn crates_stay_small() {
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let code = code_lines(&folder.join("src"), "rs");
        let code = code
            .iter()
            .filter(|(path, _, text)| !path.ends_with("tests.rs") && !text.trim().is_empty())
            .count();
        let most = if folder.ends_with("cli") { MOST_CODE_OF_CLI } else { MOST_CODE };
        assert!(code <= most, "{} has {code} lines of code; {most} at most", folder.display());
        assert!(code > 100, "{} has {code} lines of code: are they counted wrong?", folder.display());
    }
}

#[test]
fn files_stay_small() {
    let mut kinds = Vec::new();
    for path in all_sources() {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= MOST_OF_FILE, "{} has {lines} lines; {MOST_OF_FILE} at most", path.display());
        kinds.extend(path.extension().map(|kind| kind.to_owned()));
    }
    for kind in ["rs", "cuh", "cu", "py", "pyi", "sh"] {
        assert!(kinds.iter().any(|found| found == kind), "no file of kind {kind}: is the search broken?");
    }
}

/// One that is longer says why in a comment that begins with `Long:`, above it or at its beginning.
#[test]
fn functions_stay_short_or_say_why() {
    let mut seen = [0; 3];
    for path in all_sources() {
        let language = match path.extension().and_then(|kind| kind.to_str()) {
            Some("rs") => Language::Rust,
            Some("cuh" | "cu") => Language::Cuda,
            Some("py") => Language::Python,
            _ => continue,
        };
        // Tests are read one assertion after the other.
        if path.components().any(|part| part.as_os_str() == "tests") {
            continue;
        }
        for Function { line, length, says_why } in functions(&fs::read_to_string(&path).unwrap(), language) {
            seen[language as usize] += 1;
            assert!(
                length <= MOST_OF_FUNCTION || says_why,
                "{}:{line}: {length} lines; {MOST_OF_FUNCTION} at most, or a comment `Long: ` with the reason",
                path.display()
            );
        }
    }
    let least = [3_000, 500, 500];
    assert!(
        seen.iter().zip(least).all(|(seen, least)| *seen > least),
        "{seen:?}: is the search for them broken?"
    );
}

#[test]
fn long_functions_are_found() {
    let lines = |count| "    x;\n".repeat(count);
    let lengths = |text: &str, language| -> Vec<(usize, usize, bool)> {
        functions(text, language).iter().map(|found| (found.line, found.length, found.says_why)).collect()
    };
    let rust = format!(
        "fn a();\n\npub(crate) const fn b() {{\n{}}}\n// Long: a list.\nfn c() {{\n    x;\n}}\n",
        lines(3)
    );
    assert_eq!(lengths(&rust, Language::Rust), [(3, 5, false), (9, 3, true)]);
    let cuda = format!(
        "template <u32 kA>\n__device__ __forceinline__ void a(u32 b,\n                 u32 c) {{\n  // Long: it is.\n{}}}\n",
        lines(2)
    );
    assert_eq!(lengths(&cuda, Language::Cuda), [(2, 6, true)]);
    let python = format!(
        "class A:\n    def a(\n        self,\n    ) -> None:\n    {}\n\nasync def b():\n{}\nx = 1\n",
        lines(1),
        lines(4)
    );
    assert_eq!(lengths(&python, Language::Python), [(2, 4, false), (8, 5, false)]);
}

#[derive(Clone, Copy)]
enum Language {
    Rust,
    Cuda,
    Python,
}

struct Function {
    /// Where it begins, from 1.
    line: usize,
    length: usize,
    says_why: bool,
}

/// Those that have a body.
fn functions(text: &str, language: Language) -> Vec<Function> {
    let lines: Vec<&str> = text.lines().collect();
    let of_line = |(begin, line): (usize, &&str)| {
        let start = line.trim_start();
        if !begins_function(start, language) {
            return None;
        }
        let margin = line.len() - start.len();
        let length = match language {
            Language::Python => python_length(&lines[begin..], margin),
            Language::Rust | Language::Cuda => braced_length(&lines[begin..], &line[..margin])?,
        };
        let is_above =
            |line: &&&str| ["//", "#", "template "].iter().any(|mark| line.trim_start().starts_with(mark));
        let above = lines[..begin].iter().rev().take_while(is_above);
        let mut near = above.chain(&lines[begin + 1..begin + length.min(8)]);
        let says_why = near.any(|line| line.contains("// Long: ") || line.contains("# Long: "));
        Some(Function { line: begin + 1, length, says_why })
    };
    lines.iter().enumerate().filter_map(of_line).collect()
}

fn begins_function(start: &str, language: Language) -> bool {
    match language {
        Language::Rust => start.split(" fn ").next().is_some_and(|before| {
            let is_mark = |word: &str| word.starts_with("pub") || ["const", "unsafe"].contains(&word);
            start.starts_with("fn ") || (before != start && before.split(' ').all(is_mark))
        }),
        Language::Cuda => ["__device__ ", "static __device__ ", "__global__ ", "extern \"C\" __global__ "]
            .iter()
            .any(|mark| start.starts_with(mark)),
        Language::Python => start.starts_with("def ") || start.starts_with("async def "),
    }
}

/// Lines to the brace in the column of the first; none where the declaration ends without a body.
fn braced_length(lines: &[&str], margin: &str) -> Option<usize> {
    let declared = lines.iter().position(|line| line.ends_with(['{', ';', '}']))?;
    if !lines[declared].ends_with('{') {
        return None;
    }
    let close = format!("{margin}}}");
    Some(1 + lines.iter().position(|line| *line == close).unwrap_or(0))
}

/// Lines to the last that lies further in.
fn python_length(lines: &[&str], margin: usize) -> usize {
    let is_inside =
        |line: &&str| line.is_empty() || line.starts_with(&" ".repeat(margin + 1)) || closes(line, margin);
    let inside = lines[1..].iter().take_while(|line| is_inside(line)).count();
    let blank = lines[1..=inside].iter().rev().take_while(|line| line.is_empty()).count();
    1 + inside - blank
}

/// Whether a line ends a declaration of several lines: `) -> None:`.
fn closes(line: &str, margin: usize) -> bool {
    line.len() > margin && line[margin..].starts_with(')')
}

/// All that is written by hand. Tests of a crate are its own to part.
fn all_sources() -> Vec<PathBuf> {
    const KINDS: [&str; 6] = ["rs", "cuh", "cu", "py", "pyi", "sh"];
    let folders = ["crates", "tests", "examples", "src", "python", "benches"];
    let of_folder = |folder: &str| sources(&root().join(folder), &KINDS);
    let is_test_of_crate = |path: &Path| {
        let of_crates = path.starts_with(root().join("crates"));
        of_crates && path.components().any(|part| part.as_os_str() == "tests")
    };
    let found = folders.into_iter().flat_map(of_folder).chain([root().join("test.sh")]);
    found.filter(|path| !is_test_of_crate(path)).collect()
}
