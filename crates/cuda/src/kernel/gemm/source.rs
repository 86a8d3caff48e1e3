//! The instantiations of the Hopper GEMM: layouts, types, tiles and what becomes of results.

use super::GemmLayout;
use crate::headers::kernel_source;
use crate::kernel::{ElementType, MatrixUnit, Specialisation};
use crate::{Arch, KernelSource};
use counterpoint_tiles::gemm::{GemmShape, Warpgroups};

/// What of the kernel is compiled. What a launch does with the product is no part of it: it costs nothing to choose that when
/// the kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemmChoice {
    pub(super) columns: u32,
    pub(super) layout: GemmLayout,
    pub(super) element: ElementType,
    pub(super) ends: GemmEnds,
    pub(super) warpgroups: Warpgroups,
    /// Parts of k that are handed over ([`GemmShape::handed_parts`]).
    pub(super) handed_parts: u32,
}

/// What becomes of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum GemmEnds {
    /// They are stored.
    Memory,
    /// They are summed over ranks.
    SumOverRanks,
    /// They are stored; rows of A come from other ranks.
    RowsOfRanks,
    /// They are stored; tensors of A arrive.
    OfArriving,
    /// They are stored; they are of several problems.
    OfProblems,
}

impl GemmEnds {
    /// Header, name, type of the parameter, and the call.
    const fn parts(self) -> [&'static str; 4] {
        match self {
            Self::Memory => [
                "gemm/gemm.cuh",
                "gemm",
                "GemmArguments",
                "gemm<Config>(arguments, GemmToMemory<Config>{arguments})",
            ],
            Self::SumOverRanks => [
                "gemm/gemm_reduce.cuh",
                "gemm_reduce",
                "GemmReduceArguments",
                "gemm_reduce<Config>(arguments)",
            ],
            Self::RowsOfRanks => [
                "gemm/gemm_gather.cuh",
                "gemm_gather",
                "GemmGatherArguments",
                "gemm_gather<Config>(arguments)",
            ],
            Self::OfArriving => [
                "gemm/gemm_arriving.cuh",
                "gemm_arriving",
                "GemmArrivingArguments",
                "gemm_arriving<Config>(arguments)",
            ],
            Self::OfProblems => [
                "gemm/gemm_grouped.cuh",
                "gemm_grouped",
                "GemmGroupedArguments",
                "gemm_grouped<Config>(arguments)",
            ],
        }
    }
}

/// How the tiles of several problems are computed: chunks of results have 64 columns ([`GemmEnds::OfProblems`]).
pub(super) const TILES_OF_PROBLEMS: [(Warpgroups, u32); 5] = [
    (Warpgroups::Cooperative, 128),
    (Warpgroups::Cooperative, 192),
    (Warpgroups::Cooperative, 256),
    (Warpgroups::Pingpong, 128),
    (Warpgroups::Pingpong, 192),
];

impl GemmChoice {
    pub(super) fn source(self) -> KernelSource {
        let Self { columns, layout, element, ends, warpgroups, handed_parts } = self;
        let [header, stem, parameter, call] = ends.parts();
        let handed = if handed_parts > 1 { "_handed" } else { "" };
        let (pingpong, warpgroups) = match warpgroups {
            Warpgroups::Cooperative => ("", "kCooperative"),
            Warpgroups::Pingpong => ("_pingpong", "kPingpong"),
            // Of `portable.rs`.
            Warpgroups::Warps { .. } => ("_warps", ""),
        };
        let name = format!("{stem}_{}_{}_128x{columns}{pingpong}{handed}", element.name(), layout.name());
        let (a, b) = match layout {
            GemmLayout::Nt => ("kK", "kK"),
            GemmLayout::Nn => ("kK", "kMN"),
            GemmLayout::Tn => ("kMN", "kMN"),
        };
        let stages = GemmShape::stages(columns, layout);
        let grouped = if ends == GemmEnds::OfProblems { ", true" } else { "" };
        kernel_source(&name, Arch::SM_90A)
            .define("ELEMENT_BF16", element.define())
            .line(format_args!("#include \"{header}\""))
            .line("using namespace counterpoint;")
            .line(format_args!(
                "using Config = GemmConfig<{columns}, {stages}, Major::{a}, Major::{b}, Warpgroups::{warpgroups}, {handed_parts}{grouped}>;"
            ))
            .line(format_args!(
                "static_assert(kGemmThreads == {} && sizeof(GemmShared<Config>) + 1024 <= {}, \
                 \"threads and shared memory of a launch\");",
                GemmShape::THREADS,
                GemmShape::shared_bytes(columns, layout)
            ))
            .line("extern \"C\" __global__ void __launch_bounds__(kGemmThreads, 1)")
            .line(format_args!("{name}(const __grid_constant__ {parameter} arguments) {{"))
            .line(format_args!("  {call};"))
            .line("}")
    }
}

/// Every Hopper kernel that [`Gemm`](super::Gemm) may ask for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let mut all = Vec::new();
    // Those of a launch; consumers then take more from the warps that load and store.
    let register_limit = 65536 / GemmShape::THREADS / 8 * 8;
    for element in ElementType::ALL {
        for layout in GemmLayout::ALL {
            // The gradient of a weight needs no other rank.
            let of_ranks = layout != GemmLayout::Tn;
            let mut add = |ends, warpgroups, columns, handed_parts| {
                let source = GemmChoice { columns, layout, element, ends, warpgroups, handed_parts }.source();
                all.push(Specialisation { source, matrix_unit: MatrixUnit::Warpgroup, register_limit });
            };
            for &columns in Warpgroups::Cooperative.columns() {
                for handed_parts in 1..=if GemmShape::hands_over(columns, layout) { 2 } else { 1 } {
                    add(GemmEnds::Memory, Warpgroups::Cooperative, columns, handed_parts);
                    if of_ranks && GemmShape::sums_over_ranks(columns) {
                        add(GemmEnds::SumOverRanks, Warpgroups::Cooperative, columns, handed_parts);
                    }
                    if of_ranks {
                        add(GemmEnds::RowsOfRanks, Warpgroups::Cooperative, columns, handed_parts);
                        add(GemmEnds::OfArriving, Warpgroups::Cooperative, columns, handed_parts);
                    }
                }
            }
            for &columns in Warpgroups::Pingpong.columns() {
                add(GemmEnds::Memory, Warpgroups::Pingpong, columns, 1);
                if of_ranks {
                    add(GemmEnds::OfArriving, Warpgroups::Pingpong, columns, 1);
                }
            }
            for (warpgroups, columns) in TILES_OF_PROBLEMS {
                add(GemmEnds::OfProblems, warpgroups, columns, 1);
            }
        }
    }
    all
}
