//! Headers that sources may include, and which of them one does.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};

/// A header, by the name that `#include` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Such as `ptx/tma.cuh`.
    pub name: &'static str,
    /// All of it.
    pub text: &'static str,
}

/// Headers that a source may include. Sets are equal when they are the same memory: nobody compares their texts.
#[derive(Clone, Copy)]
pub struct HeaderSet(&'static [Header]);

impl HeaderSet {
    /// No headers.
    pub const EMPTY: Self = Self(&[]);

    /// Headers of different names.
    pub const fn new(headers: &'static [Header]) -> Self {
        Self(headers)
    }

    /// All of them.
    pub const fn headers(self) -> &'static [Header] {
        self.0
    }

    fn place(self) -> (usize, usize) {
        (self.0.len(), if self.0.is_empty() { 0 } else { self.0.as_ptr() as usize })
    }
}

impl PartialEq for HeaderSet {
    fn eq(&self, other: &Self) -> bool {
        self.place() == other.place()
    }
}

impl Eq for HeaderSet {}

impl PartialOrd for HeaderSet {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HeaderSet {
    fn cmp(&self, other: &Self) -> Ordering {
        self.place().cmp(&other.place())
    }
}

impl Hash for HeaderSet {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.place().hash(state);
    }
}

impl fmt::Debug for HeaderSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HeaderSet({} headers)", self.0.len())
    }
}

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
    use super::*;

    fn names<'a>(text: &str, known: &'a [Header]) -> Vec<&'a str> {
        closure(text, known).iter().map(|header| header.name).collect()
    }

    #[test]
    fn a_closure_holds_what_is_included_and_nothing_else() {
        let known = [
            Header { name: "ptx/mbarrier.cuh", text: "#include \"types.cuh\"" },
            Header { name: "ptx/tma.cuh", text: "#pragma once\n#include \"ptx/mbarrier.cuh\"" },
            Header { name: "ptx/wgmma.cuh", text: "" },
            Header { name: "types.cuh", text: "" },
        ];
        let tma = ["ptx/mbarrier.cuh", "ptx/tma.cuh", "types.cuh"];
        assert_eq!(names("#include \"ptx/tma.cuh\"\nint x;", &known), tma);
        assert_eq!(names("  #  include <ptx/tma.cuh> // twice\n#include \"types.cuh\"", &known), tma);
        assert_eq!(names("// nothing", &known), [""; 0]);
        assert_eq!(names("#include <stdint.h>", &known), [""; 0]);
        assert_eq!(names("#define NAME \"types.cuh\"\n#include NAME", &known).len(), known.len());
        // Headers that include each other.
        let known = [
            Header { name: "a", text: "#include \"b\"" },
            Header { name: "b", text: "#include \"a\"" },
            Header { name: "c", text: "" },
        ];
        assert_eq!(names("#include \"a\"", &known), ["a", "b"]);
    }
}
