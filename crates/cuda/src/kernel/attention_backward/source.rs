//! The instantiations of the Hopper attention backward: shapes, element types, and modes that are compiled.

use super::arguments::{
    AttentionBackwardArguments, BackwardAlone, BackwardClasses, BackwardDqOrder, BackwardHalfHeads,
    BackwardRounding, BackwardSums, Then,
};
use super::shape::{BackwardShape, KeyOwners};
use crate::headers::kernel_source;
use crate::kernel::{ElementType, MatrixUnit, Specialisation};
use crate::{Arch, KernelSource};

/// Threads of a CTA: four warpgroups.
pub(super) const THREADS: u32 = 512;
/// Threads of a block of `attention_backward_rows`.
pub(super) const ROWS_THREADS: u32 = 256;
/// Dynamic shared memory of a CTA: all there is, since one CTA fills a multiprocessor.
pub(super) const SHARED_BYTES: u32 = 227 << 10;

/// What of the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackwardChoice {
    pub(super) shape: BackwardShape,
    pub(super) element: ElementType,
    pub(super) gradients: KeyGradients,
    pub(super) softcap: bool,
    /// Whether additions to dq come in one order.
    pub(super) fixed_order: bool,
}

/// `KeyGradients` of the kernel: what items give for a row of dk and dv.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyGradients {
    /// Elements.
    Results,
    /// f32, of which others have some too.
    Partials,
    /// Elements, each the sum of what several items have.
    Sums,
}

/// The one parameter of a kernel. Were it several, the compiler would load some of them long before they are used, for which the thread
/// that loads tiles has no register.
struct Parameter {
    /// Its fields.
    fields: String,
    /// What `BackwardParams` is made of.
    values: String,
    /// As long as a launch gives it.
    bytes: usize,
}

impl BackwardChoice {
    /// Whether the kernel rounds dq itself.
    pub(super) fn rounds_dq(self) -> bool {
        self.shape.owners == KeyOwners::Warpgroups
    }

    /// Whether some tiles' gradients may be results where others' are partial sums.
    pub(super) fn alone(self) -> bool {
        self.gradients == KeyGradients::Partials && !self.fixed_order
    }

    /// Whether items may be half of a tile's query heads: shorter heads have no register for that.
    pub(super) fn half_heads(self) -> bool {
        self.alone() && self.shape.head_dim == 128
    }

    /// Whether items are parts of a tile's query heads, of which the last one has the sum.
    pub(super) fn sums(self) -> bool {
        self.gradients == KeyGradients::Sums
    }

    /// Whether there is such a kernel: sums are for tiles that add in any order, where there are registers for them.
    fn exists(self) -> bool {
        !self.sums() || (!self.fixed_order && !self.softcap && self.shape.head_dim == 128)
    }

    /// The kernel's parameter.
    fn parameter(self) -> Parameter {
        // In the order of `BackwardParams`, there and here.
        let features = [
            ("BackwardRounding", "rounding", self.rounds_dq()),
            (if self.fixed_order { "BackwardDqOrder" } else { "BackwardClasses" }, "order", true),
            ("BackwardAlone", "alone", self.alone()),
            ("BackwardHalfHeads", "half_heads", self.half_heads()),
            ("BackwardSums", "sums", self.sums()),
        ];
        let mut fields = "AttentionBackwardArguments all;".to_owned();
        let mut values = "given.all".to_owned();
        for (kind, name, has) in features {
            if has {
                fields += &format!(" {kind} {name};");
                values += &format!(", given.{name}");
            } else {
                values += ", {}";
            }
        }
        Parameter { fields, values, bytes: self.parameter_bytes() }
    }

    /// Bytes of what [`BackwardParams`](super::arguments::BackwardParams) gives a launch.
    fn parameter_bytes(self) -> usize {
        fn ending_in<O>(choice: BackwardChoice) -> usize {
            if choice.rounds_dq() {
                size_of::<Then<AttentionBackwardArguments, Then<BackwardRounding, O>>>()
            } else {
                size_of::<Then<AttentionBackwardArguments, O>>()
            }
        }
        if self.sums() {
            return ending_in::<Then<BackwardClasses, BackwardSums>>(self);
        }
        match (self.fixed_order, self.alone(), self.half_heads()) {
            (true, ..) => ending_in::<BackwardDqOrder>(self),
            (false, false, _) => ending_in::<BackwardClasses>(self),
            (false, true, false) => ending_in::<Then<BackwardClasses, BackwardAlone>>(self),
            (false, true, true) => {
                ending_in::<Then<BackwardClasses, Then<BackwardAlone, BackwardHalfHeads>>>(self)
            }
        }
    }

    pub(super) fn source(self) -> KernelSource {
        let Self { shape, element, gradients, softcap, fixed_order } = self;
        let BackwardShape { head_dim, head_dim_v, rows, owners } = shape;
        let (keys, ctas) = (BackwardShape::KEYS, shape.ctas());
        let (gradient, gradients) = match gradients {
            KeyGradients::Results => ("rounded", "kResults"),
            KeyGradients::Partials => ("f32", "kPartialSums"),
            KeyGradients::Sums => ("summed", "kSums"),
        };
        let cap = if softcap { "_softcap" } else { "" };
        let name = format!(
            "attention_backward_{}_{head_dim}_{head_dim_v}_{gradient}{cap}{}",
            element.name(),
            if fixed_order { "_ordered" } else { "" },
        );
        let (body, config, scope) = match owners {
            KeyOwners::Warpgroups => ("attention_backward", "AttentionBackwardConfig", "backward"),
            KeyOwners::Ctas => ("attention_backward_pair", "AttentionBackwardPairConfig", "backward_pair"),
        };
        let order = if fixed_order { "kFixed" } else { "kAny" };
        let Parameter { fields, values, bytes } = self.parameter();
        kernel_source(&name, Arch::SM_90A)
            .define("ELEMENT_BF16", element.define())
            .line(format_args!("#include \"attention/{body}.cuh\""))
            .line("using namespace counterpoint;")
            .line(format_args!(
                "using Config = {config}<{head_dim}, {head_dim_v}, KeyGradients::{gradients}, {softcap}, DqOrder::{order}>;"
            ))
            .line(format_args!(
                "static_assert(Config::kKeys == {keys} && Config::kRows == {rows} && Config::kThreads == {THREADS} && \
                 sizeof({scope}::Storage<Config>) <= {SHARED_BYTES} && Config::kCtas == {ctas}, \"launch\");"
            ))
            .line(format_args!("struct Parameter {{ {fields} }};"))
            .line(format_args!("static_assert(sizeof(Parameter) == {bytes}, \"what a launch gives\");"))
            .line("extern \"C\" __global__ void __launch_bounds__(Config::kThreads, 1)")
            .line(format_args!("{name}(const __grid_constant__ Parameter given) {{"))
            .line(format_args!("  {body}<Config>({{{values}}});"))
            .line("}")
    }
}

/// The pass that transposes the rows' statistics and begins all counts.
pub(super) fn rows_source(element: ElementType) -> KernelSource {
    let name = format!("attention_backward_rows_{}", element.name());
    kernel_source(&name, Arch::SM_90A)
        .define("ELEMENT_BF16", element.define())
        .line("#include \"attention/attention_backward_rows.cuh\"")
        .line(format_args!(
            "static_assert(counterpoint::backward_rows::kThreads == {ROWS_THREADS}, \"launch\");"
        ))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({ROWS_THREADS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ counterpoint::AttentionBackwardRowsArguments arguments) {{"
        ))
        .line("  counterpoint::attention_backward_rows(arguments);")
        .line("}")
}

/// Every shape with every element type and mode.
pub(in crate::kernel) fn specialisations() -> Vec<Specialisation> {
    let rows = ElementType::ALL.map(|element| Specialisation {
        source: rows_source(element),
        matrix_unit: MatrixUnit::None,
        register_limit: 65536 / 2048,
    });
    let mut all = rows.to_vec();
    for (head_dim, head_dim_v) in BackwardShape::HEADS {
        for element in ElementType::ALL {
            for gradients in [KeyGradients::Partials, KeyGradients::Results, KeyGradients::Sums] {
                for [softcap, fixed_order] in (0..4).map(|bits| [2, 1].map(|bit| bits & bit != 0)) {
                    let Some(shape) = BackwardShape::of(head_dim, head_dim_v, softcap) else {
                        continue;
                    };
                    let choice = BackwardChoice { shape, element, gradients, softcap, fixed_order };
                    all.extend(choice.exists().then(|| Specialisation {
                        source: choice.source(),
                        matrix_unit: MatrixUnit::Warpgroup,
                        register_limit: 65536 / THREADS,
                    }));
                }
            }
        }
    }
    all
}
