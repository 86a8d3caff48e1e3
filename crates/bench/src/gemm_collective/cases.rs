//! The products that `bench gemm-collective` measures where none are named: published shapes and layers of known models.

use counterpoint_console::arguments::Device;
use counterpoint_cost::ProblemSize;
use counterpoint_exec::GemmCollectiveSpec;
use counterpoint_plan::{DType, GemmCollective};

use crate::arguments::{BenchDType, BenchGemmCollectiveArguments};

/// Products before a reduce-scatter or an all-reduce in published measurements, as each rank computes them.
const PUBLISHED: [[usize; 3]; 5] =
    [[8192, 8192, 3584], [16384, 8192, 3584], [8192, 12288, 6144], [4096, 4096, 4096], [8192, 8192, 1024]];
/// Outputs and inputs of row-parallel layers over all ranks: Llama-3 70B's o_proj and fc2, GPT-3's second.
const ROW: [[usize; 2]; 3] = [[8192, 8192], [8192, 28672], [12288, 49152]];
/// Likewise of column-parallel layers: Llama-3 70B's qkv and gate-up, GPT-3's first.
const COLUMN: [[usize; 2]; 3] = [[10240, 8192], [57344, 8192], [49152, 12288]];
/// Rows.
const ROWS: [usize; 5] = [128, 512, 2048, 8192, 32768];

/// What is measured, in its order.
pub(super) fn chosen(arguments: &BenchGemmCollectiveArguments) -> Vec<GemmCollectiveSpec> {
    let collectives: Vec<GemmCollective> = match arguments.collective.as_slice() {
        [] => vec![GemmCollective::ReduceScatter, GemmCollective::AllReduce, GemmCollective::AllGather],
        given => given.to_vec(),
    };
    let dtype = match (arguments.dtype, arguments.device) {
        (Some(BenchDType::F16), _) => DType::F16,
        (None, Device::Cpu) => DType::F32,
        (Some(BenchDType::Bf16) | None, _) => DType::Bf16,
    };
    let ranks = arguments.ranks as usize;
    let spec = |collective, size: ProblemSize| GemmCollectiveSpec { collective, ranks, size, dtype };
    let sizes = |collective| {
        if !arguments.shapes.is_empty() {
            arguments.shapes.clone()
        } else if arguments.device == Device::Cpu {
            vec![[512, 256, 128].into()]
        } else if arguments.quick {
            vec![[512, 1024, 512].into(), [4096, 4096, 4096].into()]
        } else {
            usual(collective, ranks)
        }
    };
    collectives
        .into_iter()
        .flat_map(|collective| sizes(collective).into_iter().map(move |s| spec(collective, s)))
        .collect()
}

fn usual(collective: GemmCollective, ranks: usize) -> Vec<ProblemSize> {
    let layers = match collective {
        GemmCollective::AllGather => COLUMN.map(|[n, k]| [n / ranks, k]),
        GemmCollective::ReduceScatter | GemmCollective::AllReduce => ROW.map(|[n, k]| [n, k / ranks]),
    };
    let of_layer = |[n, k]: [usize; 2]| ROWS.map(|m| ProblemSize { m, n, k });
    PUBLISHED.map(ProblemSize::from).into_iter().chain(layers.into_iter().flat_map(of_layer)).collect()
}
