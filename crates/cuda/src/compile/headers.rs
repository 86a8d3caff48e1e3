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
    "attention/attention_forward.cuh",
    "attention/attention_forward_work.cuh",
    "attention/attention_mask.cuh",
    "attention/attention_softmax.cuh",
    "attention/portable_backward.cuh",
    "attention/portable_forward.cuh",
    "attention/portable_tile.cuh",
    "attention/tile_schedule.cuh",
    "cast.cuh",
    "head_resize.cuh",
    "ptx/barrier.cuh",
    "ptx/bits.cuh",
    "ptx/convert.cuh",
    "ptx/cp_async.cuh",
    "ptx/mbarrier.cuh",
    "ptx/mma.cuh",
    "ptx/reduce.cuh",
    "ptx/stmatrix.cuh",
    "ptx/tma.cuh",
    "ptx/wgmma.cuh",
    "row_copy.cuh",
    "row_merge.cuh",
    "row_reduce.cuh",
    "scalar.cuh",
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
