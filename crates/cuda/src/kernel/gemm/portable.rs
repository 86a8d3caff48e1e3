//! The portable matrix product: its tiles, what of it is compiled, its grid and its arguments.

use counterpoint_tiles::gemm::{GemmLayout, GemmShape, TILE_ROWS, TilePair, UnitGrid, Warpgroups};

use super::rows::Destination;
use super::{
    GEMM_DESTINATIONS, GEMM_SOURCES, Gemm, GemmEpilogue, GemmFault, GemmGrid, GemmSignals, GemmSpec,
    GemmTensors, refused,
};
use crate::headers::kernel_source;
use crate::kernel::portable_shape::fits;
use crate::kernel::{ElementType, MatrixUnit, Scalar, Specialisation};
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch};

/// `PortableGemmArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct PortableGemmArguments {
    a: [u64; GEMM_SOURCES],
    b: u64,
    d: [u64; GEMM_DESTINATIONS],
    counters: [u64; GEMM_DESTINATIONS],
    tiles: u64,
    k_sources: u64,
    bias: u64,
    tile_count: u32,
    n: u32,
    k: u32,
    a_stride: u32,
    b_stride: u32,
    d_stride: u32,
    wide: u32,
    adds: u32,
    counters_of_peers: u32,
}

/// Columns of a tile; depth of a block of k, and blocks in shared memory: the fastest first, then what GPUs with less shared memory hold as
/// many CTAs of.
const PIPELINES: [(u32, &[[u32; 2]]); 3] =
    [(64, &[[64, 3], [32, 4]]), (128, &[[64, 3], [32, 4], [32, 3]]), (256, &[[64, 3], [32, 4]])];

/// Shared memory of a CTA in bytes, of the kinds of GPUs that kernels are made for: compute capability 8.0, which holds what all other
/// 8.x hold, and 9.0.
const TARGETS: [(Arch, usize); 2] = [(Arch::SM_80, 163 << 10), (Arch::SM_90, 227 << 10)];

/// A CTA of a tile.
#[derive(Clone, Copy, Debug)]
struct Cta {
    /// Warps down and across.
    warps: [u32; 2],
    /// That a multiprocessor has registers for.
    per_sm: u32,
    shared_bytes: u32,
}

impl Cta {
    /// Of a shape that is portable.
    fn of(shape: &GemmShape) -> Self {
        // A warp has 64 x 64 elements, of as many sums as a thread has registers for.
        let (warps, per_sm) = match shape.columns {
            64 => ([2, 2], 3),
            128 => ([2, 2], 2),
            columns => ([2, columns / 64], 1),
        };
        let [block, stages] = pipeline(shape);
        let shared_bytes =
            stages * (TILE_ROWS as u32 + shape.columns) * block * ElementType::Bf16.bytes() as u32;
        Self { warps, per_sm, shared_bytes }
    }

    fn threads(&self) -> u32 {
        32 * self.warps[0] * self.warps[1]
    }

    /// How many a multiprocessor holds whose CTAs have at most so much shared memory.
    fn at_once(&self, limit: usize) -> u32 {
        (1..=self.per_sm).rev().find(|&ctas| fits(self.shared_bytes, ctas, limit)).unwrap_or(0)
    }
}

fn pipeline(shape: &GemmShape) -> [u32; 2] {
    match shape.warpgroups {
        Warpgroups::Warps { block, stages } => [block, stages],
        Warpgroups::Cooperative | Warpgroups::Pingpong => [64, 3],
    }
}

/// Every shape of a GPU whose CTAs have at most so much shared memory.
fn every_shape(limit: usize) -> Vec<GemmShape> {
    let of_width = |&(columns, pipelines): &(u32, &'static [[u32; 2]])| {
        pipelines.iter().map(move |&[block, stages]| GemmShape {
            warpgroups: Warpgroups::Warps { block, stages },
            ..GemmShape::whole(columns, TilePair::Rows)
        })
    };
    PIPELINES.iter().flat_map(of_width).filter(|shape| Cta::of(shape).at_once(limit) > 0).collect()
}

/// The shapes that a product can have, the one that is estimated to be the fastest first, or why there is none.
pub(super) fn shapes(device: &Device, spec: &GemmSpec) -> Result<Vec<GemmShape>, GemmFault> {
    if device.capability().major < 8 {
        return Err(GemmFault::BeforeAmpere(device.capability()));
    }
    if let Some(odd) = spec.column_receivers.windows(2).find(|pair| pair[0] != pair[1]) {
        return Err(GemmFault::UnequalReceivers { first: odd[0], second: odd[1] });
    }
    let limit = device.properties().shared_bytes_per_block;
    Ok(sorted(spec, device.sm_count().saturating_sub(spec.sm_margin), limit))
}

fn sorted(spec: &GemmSpec, workers: u32, limit: usize) -> Vec<GemmShape> {
    let mut all = every_shape(limit);
    let cost = |shape: &GemmShape| cost(spec, shape, workers.max(1), limit);
    all.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    all
}

/// An estimate of the time that a product takes on so many multiprocessors, in columns of a tile and K: all that matters is
/// which one is least.
fn cost(spec: &GemmSpec, shape: &GemmShape, workers: u32, limit: usize) -> f64 {
    /// What a tile takes besides its K.
    const END: f64 = 200.0;
    /// And what it takes to add it in f32 to what is there, of a CTA by itself.
    const ADDED: f64 = 500.0;
    let cta = Cta::of(shape);
    let at_once = cta.at_once(limit);
    // Of narrow tiles more is loaded for each product, and of fewer CTAs than there are registers for nothing hides the barriers.
    let slower = match (shape.columns, at_once) {
        (64, 3..) => 1.17,
        (64, 2) => 1.3,
        (64, _) => 1.6,
        (128, 1) => 1.25,
        (128, _) => 1.01,
        _ => 1.0,
    };
    let pipeline = match pipeline(shape) {
        [64, _] => 1.0,
        [_, 4] => 1.04,
        _ => 1.05,
    };
    // While one CTA stores, another one multiplies.
    let added = if spec.epilogue == GemmEpilogue::Accumulate && spec.output == Scalar::F32 {
        ADDED / f64::from(at_once * at_once)
    } else {
        0.0
    };
    let tiles = 2 * UnitGrid::new(shape, spec.size.m, spec.size.n).count() as u32;
    let rounds = tiles / (workers * at_once) * at_once;
    // Those of the last round share a multiprocessor with fewer, and are faster.
    let last = (tiles % (workers * at_once)).div_ceil(workers);
    let last =
        f64::from(last) + 0.5 * f64::from(u32::from(last > 0) * (at_once - last.max(1))) / f64::from(at_once);
    let term = spec.size.k as f64 * slower * pipeline + END + added;
    (f64::from(rounds) + last) * f64::from(shape.columns) * term
}

/// The kernel of a shape.
pub(super) fn source(shape: GemmShape, layout: GemmLayout, element: ElementType, arch: Arch) -> KernelSource {
    let cta = Cta::of(&shape);
    let ([block, stages], [down, across], columns) = (pipeline(&shape), cta.warps, shape.columns);
    let name = format!("portable_gemm_{}_{}_128x{columns}x{block}_{stages}", element.name(), layout.name());
    let (a, b) = match layout {
        GemmLayout::Nt => ("kAlong", "kAlong"),
        GemmLayout::Nn => ("kAlong", "kAcross"),
        GemmLayout::Tn => ("kAcross", "kAcross"),
    };
    kernel_source(&name, arch)
        .define("ELEMENT_BF16", element.define())
        .line("#include \"gemm/portable_gemm.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!(
            "using Config = PortableGemmConfig<{columns}, {down}, {across}, {block}, {stages}, Lie::{a}, Lie::{b}>;"
        ))
        .line(format_args!(
            "static_assert(Config::kThreads == {} && Config::kSharedBytes == {}, \"threads and shared memory of a launch\");",
            cta.threads(),
            cta.shared_bytes
        ))
        .line(format_args!(
            "extern \"C\" __global__ void __launch_bounds__(Config::kThreads, {})",
            cta.per_sm
        ))
        .line(format_args!("{name}(const __grid_constant__ PortableGemmArguments arguments) {{"))
        .line("  portable_gemm<Config>(arguments);")
        .line("}")
}

/// Every portable kernel that [`Gemm`] may ask for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let mut all = Vec::new();
    for (arch, limit) in TARGETS {
        for shape in every_shape(limit) {
            let cta = Cta::of(&shape);
            let register_limit = (65536 / (cta.threads() * cta.per_sm)).min(255);
            for element in ElementType::ALL {
                all.extend(GemmLayout::ALL.map(|layout| {
                    let source = source(shape, layout, element, arch);
                    Specialisation { source, matrix_unit: MatrixUnit::Warp, register_limit }
                }));
            }
        }
    }
    all
}

/// The launch of so many tiles, and its CTAs.
///
/// # Errors
/// When the driver does not say how many CTAs a multiprocessor holds.
pub(super) fn launch(
    function: &Function,
    spec: &GemmSpec,
    shape: GemmShape,
    tiles: u32,
) -> Result<(Launch, u32), CudaError> {
    let cta = Cta::of(&shape);
    let ctas = match spec.grid {
        GemmGrid::Persistent => {
            let per_sm = function.blocks_per_sm(cta.threads(), cta.shared_bytes as usize)?;
            let left = function.device().sm_count().saturating_sub(spec.sm_margin);
            tiles.min((left * per_sm).max(1))
        }
        GemmGrid::PerUnit => tiles,
    };
    Ok((Launch::linear(ctas, cta.threads()).shared_bytes(cta.shared_bytes), ctas))
}

impl Gemm {
    pub(super) fn portable_arguments(
        &self,
        tensors: &GemmTensors<'_>,
    ) -> Result<PortableGemmArguments, CudaError> {
        let Self { spec, .. } = self;
        self.check_tensors(tensors).map_err(refused)?;
        let addresses = tensors.a.iter().chain([&tensors.b]).chain(tensors.d).chain([&tensors.bias]);
        if let Some(address) = addresses.copied().find(|address| !address.is_multiple_of(16)) {
            return Err(refused(GemmFault::Address { address }));
        }
        let mut a = [0; GEMM_SOURCES];
        a[..tensors.a.len()].copy_from_slice(tensors.a);
        let mut d = [0; GEMM_DESTINATIONS];
        let mut counters = [0; GEMM_DESTINATIONS];
        let row_bytes = spec.strides[2] as u64 * spec.output.bytes();
        let mut stride = None;
        for (index, destination) in self.destinations.iter().enumerate() {
            let Destination { receiver, receiver_row, columns, .. } = *destination;
            let address = tensors.d[receiver] + receiver_row as u64 * row_bytes;
            // The kernel calls columns as they are called in D.
            let begin = columns.map_or(0, |(begin, _)| begin as u64);
            let before = begin * spec.output.bytes();
            let none = || refused(GemmFault::BeforeMemory { begin, address });
            d[index] = address.checked_sub(before).ok_or_else(none)?;
            stride = columns.map(|(begin, end)| end - begin);
            counters[index] = tensors.counters.get(receiver).copied().unwrap_or(0);
        }
        let [a_stride, b_stride, d_stride] =
            [spec.strides[0], spec.strides[1], stride.unwrap_or(spec.strides[2])].map(|stride| stride as u32);
        Ok(PortableGemmArguments {
            a,
            b: tensors.b,
            d,
            counters,
            tiles: self.tiles.address(),
            k_sources: if self.k_sources.is_empty() { 0 } else { self.k_sources.address() },
            bias: if spec.epilogue == GemmEpilogue::StoreBias { tensors.bias } else { 0 },
            tile_count: (self.tiles.len() / size_of::<super::rows::GemmTile>()) as u32,
            n: spec.size.n as u32,
            k: spec.size.k as u32,
            a_stride,
            b_stride,
            d_stride,
            wide: u32::from(spec.output == Scalar::F32),
            adds: u32::from(spec.epilogue == GemmEpilogue::Accumulate),
            counters_of_peers: u32::from(matches!(spec.signals, GemmSignals::System { .. })),
        })
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "gemm/portable_gemm_config.cuh",
        PortableGemmArguments {
            a,
            b,
            d,
            counters,
            tiles,
            k_sources,
            bias,
            tile_count,
            n,
            k,
            a_stride,
            b_stride,
            d_stride,
            wide,
            adds,
            counters_of_peers,
        }
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_has_every_width() {
        for limit in [99 << 10, 163 << 10, 227 << 10] {
            for (columns, pipelines) in PIPELINES {
                assert!(Warpgroups::Warps { block: 32, stages: 4 }.columns().contains(&columns));
                let shapes = every_shape(limit);
                let mut of_width = shapes.iter().filter(|shape| shape.columns == columns);
                assert!(of_width.next().is_some(), "{pipelines:?} of {columns} in {limit}");
            }
        }
    }

    #[test]
    fn large_products_take_wide_tiles_and_few_rows_narrow_ones() {
        let columns = |m, n| {
            let spec = GemmSpec::new(m, n, 4096, GemmLayout::Nt, ElementType::Bf16);
            sorted(&spec, 108, 163 << 10)[0].columns
        };
        assert_eq!(columns(8192, 8192), 256);
        assert!(columns(128, 4096) < 256);
    }

    /// TFLOP/s of `benches/runs/2026-11-28-h200-x2-portable`: of each shape, the products in order.
    const MEASURED: [(u32, [u32; 2], [f64; 9]); 7] = [
        (64, [64, 3], [375.0, 370.0, 357.0, 381.0, 380.0, 360.0, 372.0, 363.0, 354.0]),
        (64, [32, 4], [356.0, 353.0, 348.0, 372.0, 367.0, 340.0, 353.0, 346.0, 348.0]),
        (128, [64, 3], [436.0, 431.0, 368.0, 451.0, 441.0, 359.0, 421.0, 412.0, 383.0]),
        (128, [32, 4], [428.0, 423.0, 357.0, 441.0, 433.0, 348.0, 416.0, 406.0, 355.0]),
        (128, [32, 3], [422.0, 416.0, 347.0, 435.0, 430.0, 343.0, 412.0, 399.0, 345.0]),
        (256, [64, 3], [439.0, 437.0, 349.0, 454.0, 450.0, 351.0, 429.0, 423.0, 344.0]),
        (256, [32, 4], [438.0, 428.0, 341.0, 452.0, 440.0, 342.0, 427.0, 411.0, 333.0]),
    ];

    #[test]
    fn the_tile_that_is_chosen_is_within_two_percent_of_the_fastest() {
        let sizes = [[2048, 12288], [4096, 4096], [8192, 8192]];
        let layouts = [GemmLayout::Nn, GemmLayout::Nt, GemmLayout::Tn];
        let products = sizes.iter().flat_map(|&size| layouts.map(|layout| (size, layout)));
        for (index, ([m, n], layout)) in products.enumerate() {
            let mut spec = GemmSpec::new(m, n, 4096, layout, ElementType::Bf16);
            if layout == GemmLayout::Tn {
                (spec.epilogue, spec.output) = (GemmEpilogue::Accumulate, Scalar::F32);
            }
            let chosen = sorted(&spec, 132, 227 << 10)[0];
            let of = |&&(columns, at, _): &&(u32, [u32; 2], [f64; 9])| {
                columns == chosen.columns && at == pipeline(&chosen)
            };
            let rate = MEASURED.iter().find(of).unwrap().2[index];
            let best = MEASURED.iter().map(|one| one.2[index]).fold(0.0, f64::max);
            assert!(rate >= 0.98 * best, "{m} {n} {layout:?}: {rate} of {best}");
        }
    }
}
