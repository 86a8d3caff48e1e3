//! The products that `bench gemm` measures where none are named: linear layers of Llama-3 70B and GPT-3, and published shapes.

use counterpoint_cost::ProblemSize;
use counterpoint_cuda::kernel::{ElementType, GemmEpilogue, GemmLayout, GemmSpec, Scalar};

use crate::arguments::{BenchGemmArguments, BenchGemmLayout};

/// Outputs and inputs of linear layers: Llama-3 70B's o_proj, fc2, qkv and gate-up, and GPT-3's first.
const LAYERS: [(usize, usize); 5] =
    [(8192, 8192), (8192, 28672), (10240, 8192), (57344, 8192), (49152, 12288)];
/// Rows of their inputs.
const ROWS: [usize; 9] = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];
/// Products before a reduce-scatter or an all-reduce.
const BEFORE_COLLECTIVES: [[usize; 3]; 5] =
    [[8192, 8192, 3584], [16384, 8192, 3584], [8192, 12288, 6144], [4096, 4096, 4096], [8192, 8192, 1024]];
/// Tokens, hidden and local outputs of column-parallel layers, for their backward.
const BACKWARD: [[usize; 3]; 3] = [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]];

/// The products to measure.
pub(super) fn chosen(arguments: &BenchGemmArguments, element: ElementType) -> Vec<GemmSpec> {
    let forward = |size: [usize; 3]| spec(size.into(), GemmLayout::Nt, element);
    if !arguments.shapes.is_empty() {
        let layouts = layouts(arguments);
        let of_shape =
            |size: &ProblemSize| layouts.iter().map(|&layout| spec(*size, layout, element)).collect();
        return arguments.shapes.iter().flat_map::<Vec<_>, _>(of_shape).collect();
    }
    if arguments.quick {
        return [[128, 8192, 8192], [4096, 4096, 4096]].map(forward).to_vec();
    }
    let layers = LAYERS.into_iter().flat_map(|(n, k)| ROWS.map(|m| forward([m, n, k])));
    let backward = BACKWARD.into_iter().flat_map(|[tokens, hidden, local]| {
        let of_input = spec([tokens, hidden, local].into(), GemmLayout::Nn, element);
        let of_weight = spec([local, hidden, tokens].into(), GemmLayout::Tn, element);
        [of_input, of_weight]
    });
    layers.chain(BEFORE_COLLECTIVES.map(forward)).chain(backward).collect()
}

/// Those of `--shapes`.
pub(super) fn layouts(arguments: &BenchGemmArguments) -> Vec<GemmLayout> {
    match arguments.layouts.as_slice() {
        [] => vec![GemmLayout::Nt],
        given => given.iter().map(|layout| layout_of(*layout)).collect(),
    }
}

/// Gradients of weights are added to those that are there, in f32.
fn spec(ProblemSize { m, n, k }: ProblemSize, layout: GemmLayout, element: ElementType) -> GemmSpec {
    let mut spec = GemmSpec::new(m, n, k, layout, element);
    if layout == GemmLayout::Tn {
        (spec.epilogue, spec.output) = (GemmEpilogue::Accumulate, Scalar::F32);
    }
    spec
}

fn layout_of(layout: BenchGemmLayout) -> GemmLayout {
    match layout {
        BenchGemmLayout::Nt => GemmLayout::Nt,
        BenchGemmLayout::Nn => GemmLayout::Nn,
        BenchGemmLayout::Tn => GemmLayout::Tn,
    }
}
