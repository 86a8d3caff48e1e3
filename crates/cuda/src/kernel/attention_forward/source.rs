use super::shape::{ForwardShape, HEAD_DIMS, PACKS};
use crate::kernel::{ElementType, MatrixUnit, Specialisation};
use crate::{Arch, KernelSource};

/// What of the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ForwardChoice {
    pub shape: ForwardShape,
    pub element: ElementType,
    pub begin: Begin,
    pub end: End,
    pub scores: Scores,
}

/// `Begin` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Begin {
    Start,
    Continue,
}

/// `End` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum End {
    Result,
    Partial,
    State,
}

/// `Scores` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scores {
    Scaled,
    Transformed,
}

impl ForwardChoice {
    pub(super) fn source(self) -> KernelSource {
        let Self { shape, element, begin, end, scores } = self;
        let ForwardShape { head_dim, head_dim_v, rows, block, pack, query_slots } = shape;
        let name = format!(
            "attention_forward_{}_{head_dim}_{head_dim_v}_{rows}x{block}_pack{pack}_{begin:?}_{end:?}_{scores:?}",
            element.name(),
        )
        .to_lowercase();
        KernelSource::new(&name, Arch::SM_90A)
            .define("ELEMENT_BF16", element.define())
            .line("#include \"attention/attention_forward.cuh\"")
            .line("using namespace counterpoint;")
            .line(format_args!(
                "using Config = AttentionForwardConfig<{head_dim}, {head_dim_v}, {rows}, {block}, {pack}, \
                 {query_slots}, Begin::k{begin:?}, End::k{end:?}, Scores::k{scores:?}>;"
            ))
            .line(format_args!(
                "static_assert(Config::kThreads == {} && sizeof(AttentionForwardShared<Config>) + 1024 <= {}, \
                 \"threads and shared memory of a launch\");",
                shape.threads(),
                shape.shared_bytes()
            ))
            .line("extern \"C\" __global__ void __launch_bounds__(Config::kThreads, 1)")
            .line(format_args!("{name}(const __grid_constant__ AttentionForwardArguments arguments) {{"))
            .line("  attention_forward<Config>(arguments);")
            .line("}")
    }
}

/// Every kernel that [`AttentionForward`](super::AttentionForward) may ask for.
pub(in crate::kernel) fn specialisations() -> Vec<Specialisation> {
    let mut shapes_of_results = Vec::new();
    let mut small = Vec::new();
    for dims in HEAD_DIMS {
        for pack in PACKS {
            shapes_of_results.extend([ForwardShape::large(dims, pack), ForwardShape::small(dims, pack)]);
            small.push(ForwardShape::small(dims, pack));
        }
    }
    shapes_of_results.dedup();
    let mut all = Vec::new();
    for element in ElementType::ALL {
        let mut add = |shape, begin, end, scores| {
            let source = ForwardChoice { shape, element, begin, end, scores }.source();
            // Those of a launch; consumers then take more from the producer.
            let register_limit = 65536 / shape.threads() / 8 * 8;
            all.push(Specialisation { source, matrix_unit: MatrixUnit::Warpgroup, register_limit });
        };
        for &shape in &shapes_of_results {
            add(shape, Begin::Start, End::Result, Scores::Scaled);
        }
        for &shape in &small {
            add(shape, Begin::Start, End::State, Scores::Scaled);
            add(shape, Begin::Continue, End::State, Scores::Scaled);
            add(shape, Begin::Continue, End::Result, Scores::Scaled);
            if shape.pack > 1 {
                continue;
            }
            add(shape, Begin::Start, End::Partial, Scores::Scaled);
            for begin in [Begin::Start, Begin::Continue] {
                for end in [End::State, End::Result] {
                    add(shape, begin, end, Scores::Transformed);
                }
            }
        }
    }
    all
}
