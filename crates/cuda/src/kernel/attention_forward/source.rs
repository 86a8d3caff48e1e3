//! The instantiations of the Hopper attention forward: shapes, element types, stages and score options that are compiled.

use super::shape::{ForwardShape, HEAD_DIMS, Loop, PACKS};
use crate::headers::kernel_source;
use crate::kernel::{AttentionProblem, ElementType, MatrixUnit, Specialisation};
use crate::{Arch, KernelSource};

/// What of the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ForwardChoice {
    pub shape: ForwardShape,
    pub element: ElementType,
    pub span: Span,
    pub scores: Scores,
    pub max_logits: bool,
}

/// `Span` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Span {
    Whole,
    Staged,
}

/// `Scores` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scores {
    Scaled,
    Transformed,
}

impl Scores {
    pub(super) fn of(problem: &AttentionProblem) -> Self {
        if problem.softcap.is_none() && problem.scale > 0.0 { Self::Scaled } else { Self::Transformed }
    }
}

impl ForwardChoice {
    pub(super) const fn new(shape: ForwardShape, element: ElementType, span: Span, scores: Scores) -> Self {
        Self { shape, element, span, scores, max_logits: false }
    }

    /// Whether the largest scores are wanted. Small blocks then have one kernel, which finds out at a launch whether it is a stage.
    pub(super) fn with_max_logits(mut self, max_logits: bool) -> Self {
        self.max_logits = max_logits;
        if max_logits && self.shape.divides_stages() {
            self.span = Span::Staged;
        }
        self
    }

    pub(super) fn source(self) -> KernelSource {
        let Self { shape, element, span, scores, max_logits } = self;
        let ForwardShape { head_dim, head_dim_v, rows, block, pack, query_slots, steps, ctas } = shape;
        let name = format!(
            "attention_forward_{}_{head_dim}_{head_dim_v}_{rows}x{block}{}{}_pack{pack}_{span:?}_{scores:?}{}",
            element.name(),
            if steps == Loop::Interior { "_interior" } else { "" },
            if ctas > 1 { "_cluster" } else { "" },
            if max_logits { "_max_logits" } else { "" },
        )
        .to_lowercase();
        kernel_source(&name, Arch::SM_90A)
            .define("ELEMENT_BF16", element.define())
            .line("#include \"attention/attention_forward.cuh\"")
            .line("using namespace counterpoint;")
            .line(format_args!(
                "using Config = AttentionForwardConfig<{head_dim}, {head_dim_v}, {rows}, {block}, {pack}, \
                 {query_slots}, Loop::k{steps:?}, Span::k{span:?}, Scores::k{scores:?}, {max_logits}, {ctas}>;"
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
    let mut all = Vec::new();
    for element in ElementType::ALL {
        let mut add = |shape: ForwardShape, span, scores| {
            for max_logits in [false, true] {
                let choice = ForwardChoice::new(shape, element, span, scores).with_max_logits(max_logits);
                let source = choice.source();
                // Those of a launch; consumers then take more from the producer.
                let register_limit = 65536 / shape.threads() / 8 * 8;
                let kernel = Specialisation { source, matrix_unit: MatrixUnit::Warpgroup, register_limit };
                // Two spans may ask for one kernel.
                if !all.contains(&kernel) {
                    all.push(kernel);
                }
            }
        };
        for dims in HEAD_DIMS {
            for pack in PACKS {
                let small = ForwardShape::small(dims, pack);
                add(small, Span::Whole, Scores::Scaled);
                add(small, Span::Staged, Scores::Scaled);
                let large = ForwardShape::large(dims, pack).flat_map(ForwardShape::loops);
                for large in large.filter(|&large| large != small) {
                    add(large, Span::Whole, Scores::Scaled);
                }
            }
            for cluster in ForwardShape::clusters(dims) {
                add(cluster, Span::Whole, Scores::Scaled);
            }
            add(ForwardShape::small(dims, 1), Span::Staged, Scores::Transformed);
        }
    }
    all
}
