//! Our headers, and which of them a kernel includes.

/// A header of ours, by the name that `#include` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

/// Every header below `kernels/`, sorted by name; the build script lists them.
pub(super) const HEADERS: &[Header] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// The headers of `known` that `text` includes, directly or through others, sorted by name. Conditions are not looked at, so it may be
/// more than the compiler reads, never less: where a name is computed (`#include NAME`), it is all of them.
pub(super) fn closure<'a>(text: &str, known: &'a [Header]) -> Vec<&'a Header> {
    let mut found: Vec<&Header> = Vec::new();
    let mut texts = vec![text];
    while let Some(text) = texts.pop() {
        for name in included(text) {
            let Some(name) = name else { return known.iter().collect() };
            let header = known.iter().find(|header| header.name == name);
            if let Some(header) = header.filter(|header| !found.contains(header)) {
                found.push(header);
                texts.push(header.text);
            }
        }
    }
    found.sort_unstable_by_key(|header| header.name);
    found
}

/// The names that a text includes; `None` where one is computed.
fn included(text: &str) -> impl Iterator<Item = Option<&str>> {
    text.lines().filter_map(|line| {
        let name = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
        let end = match name.chars().next() {
            Some('"') => '"',
            Some('<') => '>',
            _ => return Some(None),
        };
        Some(name[1..].split(end).next())
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn they_are_those_of_the_folder_and_include_nothing_else() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        assert!(HEADERS.is_sorted_by_key(|header| header.name));
        for header in HEADERS {
            assert_eq!(fs::read_to_string(root.join(header.name)).unwrap(), header.text, "{}", header.name);
            for name in included(header.text) {
                let name = name.unwrap_or_else(|| panic!("{} computes a name", header.name));
                let known = HEADERS.iter().any(|header| header.name == name);
                assert!(known, "{name} is included by {} and is no file of ours", header.name);
            }
        }
    }

    fn names<'a>(text: &str, known: &'a [Header]) -> Vec<&'a str> {
        closure(text, known).iter().map(|header| header.name).collect()
    }

    #[test]
    fn a_closure_holds_what_is_included_and_nothing_else() {
        let tma = ["ptx/mbarrier.cuh", "ptx/tma.cuh", "types.cuh"];
        assert_eq!(names("#include \"ptx/tma.cuh\"\nint x;", HEADERS), tma);
        assert_eq!(names("  #  include <ptx/tma.cuh> // twice\n#include \"types.cuh\"", HEADERS), tma);
        assert_eq!(names("// nothing", HEADERS), [""; 0]);
        assert_eq!(names("#include <stdint.h>", HEADERS), [""; 0]);
        assert_eq!(names("#define NAME \"types.cuh\"\n#include NAME", HEADERS).len(), HEADERS.len());
        // Headers that include each other.
        let known = [
            Header { name: "a", text: "#include \"b\"" },
            Header { name: "b", text: "#include \"a\"" },
            Header { name: "c", text: "" },
        ];
        assert_eq!(names("#include \"a\"", &known), ["a", "b"]);
    }
}
