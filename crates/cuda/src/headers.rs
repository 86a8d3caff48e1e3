//! The headers below `kernels/`, which the build script lists, and sources that may include them.

use counterpoint_driver::HeaderSet;
// The build script's list names it.
use counterpoint_driver::Header;

use crate::{Arch, KernelSource};

/// Every header below `kernels/`, sorted by name. Not a constant, of which every part of the program that asks for a kernel would have a copy.
static HEADERS: HeaderSet = HeaderSet::new(include!(concat!(env!("OUT_DIR"), "/headers.rs")));

/// A source with no text yet, which may include any header below `kernels/`. `name` is that of its one `extern "C"` entry point, and says
/// what was chosen, such as `attention_forward_bf16_128`.
pub fn kernel_source(name: impl Into<String>, arch: Arch) -> KernelSource {
    KernelSource::new(name, arch).with_headers(HEADERS)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn they_are_those_of_the_folder_and_include_nothing_else() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let headers = HEADERS.headers();
        assert!(headers.is_sorted_by_key(|header| header.name));
        for header in headers {
            assert_eq!(fs::read_to_string(root.join(header.name)).unwrap(), header.text, "{}", header.name);
            let includes = header.text.lines().filter_map(|line| line.trim_start().strip_prefix("#include"));
            for name in includes.map(|name| name.trim().trim_matches(['"', '<', '>'])) {
                let known = headers.iter().any(|header| header.name == name);
                assert!(known, "{name} is included by {} and is no file of ours", header.name);
            }
        }
    }

    #[test]
    fn a_source_has_the_headers_that_it_includes() {
        let source = kernel_source("f", Arch::SM_90A).line("#include \"ptx/tma.cuh\"");
        let names: Vec<&str> = source.headers().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["ptx/mbarrier.cuh", "ptx/tma.cuh", "types.cuh"]);
    }
}
