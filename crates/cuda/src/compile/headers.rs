/// A header of ours, by the name that `#include` uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

macro_rules! headers {
    ($($name:literal),* $(,)?) => {
        &[$(Header { name: $name, text: include_str!(concat!("../../kernels/", $name)) }),*]
    };
}

/// Every file below `kernels/`, sorted by name.
pub(super) const HEADERS: &[Header] = headers![
    "attention/tile_schedule.cuh",
    "ptx/barrier.cuh",
    "ptx/mbarrier.cuh",
    "ptx/tma.cuh",
    "ptx/wgmma.cuh",
    "types.cuh",
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn all_of_the_folder_and_nothing_else() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let (mut names, mut folders) = (Vec::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    names.push(path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        names.sort();
        let listed: Vec<_> = HEADERS.iter().map(|header| header.name).collect();
        assert_eq!(listed, names, "list every file below crates/cuda/kernels in {}", file!());
    }
}
