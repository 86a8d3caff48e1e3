//! The instantiations of the Hopper attention backward: shapes, element types, and modes that are compiled.

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
    /// Whether dk and dv are rounded to elements.
    pub(super) rounds_keys: bool,
    pub(super) softcap: bool,
    /// Whether additions to dq come in one order.
    pub(super) turns: bool,
}

impl BackwardChoice {
    pub(super) fn source(self) -> KernelSource {
        let Self { shape, element, rounds_keys, softcap, turns } = self;
        let BackwardShape { head_dim, head_dim_v, rows, owners } = shape;
        let (keys, ctas) = (BackwardShape::KEYS, shape.ctas());
        let gradient = if rounds_keys { "rounded" } else { "f32" };
        let cap = if softcap { "_softcap" } else { "" };
        let order = if turns { "_turns" } else { "" };
        let name =
            format!("attention_backward_{}_{head_dim}_{head_dim_v}_{gradient}{cap}{order}", element.name());
        let (body, scope) = match owners {
            KeyOwners::Warpgroups => ("attention_backward", "backward"),
            KeyOwners::Ctas => ("attention_backward_pair", "backward_pair"),
        };
        kernel_source(&name, Arch::SM_90A)
            .define("ELEMENT_BF16", element.define())
            .define("HEAD_DIM", head_dim)
            .define("HEAD_DIM_V", head_dim_v)
            .define("OUTPUT_F32", u32::from(!rounds_keys))
            .define("SOFTCAP", u32::from(softcap))
            .define("DETERMINISTIC", u32::from(turns))
            .line(format_args!("#include \"attention/{body}.cuh\""))
            .line("using namespace counterpoint;")
            .line(format_args!(
                "static_assert(backward::kKeys == {keys} && backward::kRows == {rows} && {scope}::kThreads == {THREADS} \
                 && {scope}::kSharedBytes <= {SHARED_BYTES} && backward::kCtas == {ctas}, \"launch\");"
            ))
            .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS}, 1)"))
            .line(format_args!("{name}(const __grid_constant__ AttentionBackwardArguments arguments) {{"))
            .line(format_args!("  {body}(arguments);"))
            .line("}")
    }
}

/// The pass that turns the rows' statistics and begins all counts.
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
            for [rounds_keys, softcap, turns] in (0..8).map(|bits| [4, 2, 1].map(|bit| bits & bit != 0)) {
                let Some(shape) = BackwardShape::of(head_dim, head_dim_v, softcap) else {
                    continue;
                };
                let choice = BackwardChoice { shape, element, rounds_keys, softcap, turns };
                all.push(Specialisation {
                    source: choice.source(),
                    matrix_unit: MatrixUnit::Warpgroup,
                    register_limit: 65536 / THREADS,
                });
            }
        }
    }
    all
}
