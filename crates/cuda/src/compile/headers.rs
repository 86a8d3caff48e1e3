/// A header of ours, by the name that `#include` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

/// Every header below `kernels/`, sorted by name; the build script lists them.
pub(super) const HEADERS: &[Header] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// `name` and every header that it includes, directly or not; all must be ours.
    fn reach<'a>(name: &'a str, reached: &mut Vec<&'a str>) {
        if reached.contains(&name) {
            return;
        }
        reached.push(name);
        let header = HEADERS.iter().find(|header| header.name == name);
        let header = header.unwrap_or_else(|| panic!("{name} is included and is no file of ours"));
        for line in header.text.lines().filter_map(|line| line.trim().strip_prefix("#include ")) {
            reach(line.trim_matches('"'), reached);
        }
    }

    #[test]
    fn they_are_those_of_the_folder_and_include_nothing_else() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        assert!(HEADERS.is_sorted_by_key(|header| header.name));
        for header in HEADERS {
            assert_eq!(fs::read_to_string(root.join(header.name)).unwrap(), header.text, "{}", header.name);
            reach(header.name, &mut Vec::new());
        }
        let mut reached = Vec::new();
        reach("ptx/tma.cuh", &mut reached);
        assert_eq!(reached, ["ptx/tma.cuh", "ptx/mbarrier.cuh", "types.cuh"]);
    }
}
