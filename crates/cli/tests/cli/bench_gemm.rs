//! `counterpoint bench gemm`, as far as it goes without a GPU.

use crate::support::Folder;

#[test]
fn what_is_asked_must_be_products_on_a_gpu() {
    let folder = Folder::new();
    folder.refuses("bench gemm", &["--device cuda"]);
    folder.refuses("bench gemm --device cuda --shapes 128:256", &["128:256", "give m, n and k"]);
    folder.refuses("bench gemm --device cuda --layouts nt", &["--shapes"]);
    folder.refuses("bench gemm --device cuda --quick --shapes 8:8:8", &["--quick"]);
    folder.refuses("bench gemm --device cuda --peers", &["--experts"]);
    folder.refuses("bench gemm --device cuda --experts --peers=cudnn", &["cudnn", "deepgemm"]);
    folder.refuses("bench gemm --device cuda --experts --peer-folder .", &["--peers"]);
    folder.refuses("bench gemm --device cuda --experts --kernels portable", &["--kernels portable"]);
    folder.refuses("bench gemm --device cuda --experts=8", &["--shapes"]);
    folder.refuses("bench gemm --device cuda --experts --shapes 64:64:64", &["--experts=8"]);
    // Without a GPU: what is missing, and status 3.
    if !std::path::Path::new("/dev/nvidia0").exists() {
        for line in ["bench gemm --device cuda --quick", "bench gemm --device cuda --experts --peers"] {
            folder.run(line).is_refusal(3, &["NVIDIA"]);
        }
    }
}
