//! `counterpoint bench group-cast` and `bench group-reduce`, and `--transport`.

use crate::support::Folder;

#[test]
fn bad_requests_are_refused() {
    let folder = Folder::new();
    folder.refuses("bench group-cast -b 1X", &["1X", "8M"]);
    folder.refuses("bench group-cast -g 1", &["--gpus"]);
    folder.refuses("bench group-cast -f 1", &["--step-factor"]);
    folder.refuses("bench group-reduce -c 0", &["--cycles"]);
    folder.refuses("bench group-reduce --transports nvlink,smoke", &["smoke", "copy-engine"]);
    folder.refuses("attention --mask causal:64 --transport nccl", &["--transport nccl", "--device cuda"]);
    folder.refuses("bench cp --transport nvlink", &["--transport nvlink", "--device cuda"]);
    if !std::path::Path::new("/dev/nvidia0").exists() {
        folder.run("bench group-cast").is_refusal(3, &["NVIDIA"]);
        folder.run("bench group-reduce -b 1M -e 1M").is_refusal(3, &["NVIDIA"]);
    }
}
