//! What the Hopper kernel of a matrix product is launched with: its grid, its arguments, and how TMA finds the operands.

use counterpoint_tiles::gemm::{GemmLayout, GemmShape, TILE_ROWS, TilePair};

use super::rows::{self, Destination, GemmKSource, GemmTile};
use super::source::GemmEnds;
use super::{
    GEMM_DESTINATIONS, GEMM_SOURCES, Gemm, GemmEpilogue, GemmFault, GemmGrid, GemmSignals, GemmSpec,
    GemmTensors, refused,
};
use crate::kernel::{CtaWaits, Scalar, WaitLimit};
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, Function, Launch, LaunchStart, Swizzle, TensorMap, TensorMapElement, TensorMapSpec};

/// `GemmArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct GemmArguments {
    pub(super) a_maps: [TensorMap; GEMM_SOURCES],
    pub(super) b_map: TensorMap,
    pub(super) d_maps: [TensorMap; GEMM_DESTINATIONS],
    pub(super) d: [u64; GEMM_DESTINATIONS],
    pub(super) counters: [u64; GEMM_DESTINATIONS],
    pub(super) tiles: u64,
    pub(super) k_sources: u64,
    pub(super) bias: u64,
    pub(super) partial_sums: u64,
    pub(super) parts_stored: u64,
    pub(super) wait: WaitLimit,
    pub(super) unit_count: u32,
    pub(super) splits: u32,
    pub(super) serial_parts: u32,
    pub(super) handed_parts: u32,
    pub(super) k_blocks: u32,
    pub(super) n: u32,
    pub(super) n_whole: u32,
    pub(super) d_stride: u32,
    pub(super) pairs_columns: u32,
    pub(super) wide: u32,
    pub(super) adds: u32,
    pub(super) counters_of_peers: u32,
}

/// Rows of D that a warpgroup puts into shared memory and TMA stores at once.
pub(super) const STORED_ROWS: usize = 64;

/// The launch of the Hopper kernel, and its CTAs, for so many units.
///
/// # Errors
/// When the driver does not say how many clusters run at once.
pub(super) fn launch(
    function: &Function,
    spec: &GemmSpec,
    shape: GemmShape,
    ends: GemmEnds,
    units: u32,
) -> Result<(Launch, u32), CudaError> {
    let (of_cluster, items) = (2 * shape.splits, units * shape.handed_parts);
    // What takes part in a collective holds all multiprocessors anyway, so it may do so as they become free.
    let alone = matches!(ends, GemmEnds::Memory | GemmEnds::OfArriving);
    let start = if alone { LaunchStart::AfterPrevious } else { LaunchStart::Overlapping };
    let launch = |clusters: u32| {
        Launch::linear(clusters * of_cluster, GemmShape::THREADS)
            .cluster([of_cluster, 1, 1])
            .shared_bytes(GemmShape::shared_bytes(shape.columns, spec.layout))
            .start(start)
    };
    // Not as many as there are multiprocessors for: a cluster lies within one of the groups that these come in. Those of a
    // kernel that waits for other ranks must all run at once.
    let most = function.clusters_at_once(&launch(1))?;
    let clusters = match spec.grid {
        GemmGrid::Persistent => {
            let left = function.device().sm_count().saturating_sub(spec.sm_margin) / of_cluster;
            // Who hands over and who takes come from whole pairs of clusters.
            items.min(left.min(most) / shape.handed_parts * shape.handed_parts).max(shape.handed_parts)
        }
        GemmGrid::PerUnit => items,
    };
    Ok((launch(clusters), clusters * of_cluster))
}

impl Gemm {
    pub(super) fn arguments(&self, tensors: &GemmTensors<'_>) -> Result<GemmArguments, CudaError> {
        let Self { spec, shape, .. } = self;
        self.check_tensors(tensors).map_err(refused)?;
        // Bound once for all tensor maps.
        let _bound = self.function.device().make_current()?;
        let wide = spec.output == Scalar::F32;
        let mut d_maps = [None; GEMM_DESTINATIONS];
        let mut d = [0; GEMM_DESTINATIONS];
        let mut counters = [0; GEMM_DESTINATIONS];
        let row_bytes = spec.strides[2] as u64 * spec.output.bytes();
        for (index, destination) in self.destinations.iter().enumerate() {
            let Destination { receiver, receiver_row, rows, columns } = *destination;
            let address = tensors.d[receiver] + receiver_row as u64 * row_bytes;
            d_maps[index] = Some(match columns {
                None => self.map_of_d(address, rows, STORED_ROWS)?,
                Some((begin, end)) => self.map_of_columns(address, rows, [begin, end])?,
            });
            d[index] = address;
            counters[index] = tensors.counters.get(receiver).copied().unwrap_or(0);
        }
        let mut a_maps = [None; GEMM_SOURCES];
        for (tensor, &address) in tensors.a.iter().enumerate() {
            let rows = rows::tensor_rows(spec, tensor);
            if rows > 0 {
                a_maps[tensor] = Some(self.map_of_a(address, rows)?);
            }
        }
        // Nobody looks at those that are not there.
        let missing = || refused(GemmFault::NoTensor);
        let some_d = d_maps[0].ok_or_else(missing)?;
        let some_a = a_maps.iter().flatten().next().copied().ok_or_else(missing)?;
        Ok(GemmArguments {
            a_maps: a_maps.map(|map| map.unwrap_or(some_a)),
            b_map: self.map_of_b(tensors.b)?,
            d_maps: d_maps.map(|map| map.unwrap_or(some_d)),
            d,
            counters,
            tiles: self.tiles.address(),
            k_sources: if self.k_sources.is_empty() { 0 } else { self.k_sources.address() },
            bias: if spec.epilogue == GemmEpilogue::StoreBias { tensors.bias } else { 0 },
            partial_sums: if self.partial_sums.is_empty() { 0 } else { self.partial_sums.address() },
            parts_stored: if self.parts_stored.is_empty() { 0 } else { self.parts_stored.address() },
            wait: self.waits.as_ref().map_or(WaitLimit::NONE, CtaWaits::limit),
            unit_count: self.unit_list.len() as u32,
            splits: shape.splits,
            serial_parts: shape.serial_parts,
            handed_parts: shape.handed_parts,
            k_blocks: spec.size.k.div_ceil(64) as u32,
            n: spec.size.n as u32,
            n_whole: self.columns_by_tma() as u32,
            d_stride: spec.strides[2] as u32,
            pairs_columns: u32::from(shape.pair == TilePair::Columns),
            wide: u32::from(wide),
            adds: u32::from(spec.epilogue == GemmEpilogue::Accumulate),
            counters_of_peers: u32::from(matches!(spec.signals, GemmSignals::System { .. })),
        })
    }

    /// How TMA finds `rows` rows of one of A's tensors: along k, a CTA loads all rows of its operand, or half of those
    /// that the other reads too.
    pub(super) fn map_of_a(&self, address: u64, rows: usize) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let box_rows = match (spec.layout, shape.pair) {
            (GemmLayout::Tn, _) => 64,
            (_, TilePair::Rows) => TILE_ROWS as u32,
            (_, TilePair::Columns) => TILE_ROWS as u32 / 2,
        };
        let dims = [rows, spec.layout.a_dims(spec.size.m, spec.size.k)[1]];
        self.map_of_operand("A", address, dims, spec.strides[0], box_rows)
    }

    /// Likewise B.
    fn map_of_b(&self, address: u64) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let rows = match (spec.layout, shape.pair) {
            (GemmLayout::Nn | GemmLayout::Tn, _) => 64,
            (GemmLayout::Nt, TilePair::Rows) => shape.columns / 2,
            (GemmLayout::Nt, TilePair::Columns) => shape.columns,
        };
        self.map_of_operand("B", address, spec.layout.b_dims(spec.size.n, spec.size.k), spec.strides[1], rows)
    }

    fn map_of_operand(
        &self,
        name: &str,
        address: u64,
        [rows, columns]: [usize; 2],
        stride: usize,
        box_rows: u32,
    ) -> Result<TensorMap, CudaError> {
        let element = self.spec.element.tensor_map_element();
        TensorMapSpec::new(element, address, [columns as u64, rows as u64], [64, box_rows])
            .strides([stride as u64 * u64::from(element.bytes())])
            .swizzle(Swizzle::Span128)
            .encode(self.function.device(), name)
    }

    /// Columns of D up to the last multiple of 16 bytes.
    fn columns_by_tma(&self) -> usize {
        let of_16_bytes = 16 / self.spec.output.bytes() as usize;
        self.spec.size.n / of_16_bytes * of_16_bytes
    }

    /// How TMA finds one destination's rows of D, of which it stores some at once.
    pub(super) fn map_of_d(&self, address: u64, rows: usize, at_once: usize) -> Result<TensorMap, CudaError> {
        // A tensor of TMA has at least one column. The kernel stores none by it where there are fewer.
        let columns = self.columns_by_tma().max(1);
        self.map_of_result(address, [rows, columns], self.spec.strides[2], at_once)
    }

    /// The same of a destination that has columns `begin` to `end` of D and no others, at this address: the kernel calls them as they are
    /// called in D, so the tensor begins where column 0 would be. Nobody stores the columns before, and none behind are in it.
    fn map_of_columns(
        &self,
        address: u64,
        rows: usize,
        [begin, end]: [usize; 2],
    ) -> Result<TensorMap, CudaError> {
        let before = begin as u64 * self.spec.output.bytes();
        let none = || refused(GemmFault::BeforeMemory { begin: begin as u64, address });
        let first = address.checked_sub(before).ok_or_else(none)?;
        self.map_of_result(first, [rows, end], end - begin, STORED_ROWS)
    }

    /// Whether the driver describes receivers of columns as the kernel is given them: each is a tensor whose rows are closer than they are
    /// long. It looks at no memory, so any address is as good as those of results, which are not known yet.
    pub(crate) fn describes_columns(&self) -> bool {
        const SOMEWHERE: u64 = 1 << 40;
        let Ok(_bound) = self.function.device().make_current() else { return false };
        self.shape.is_portable()
            || self.destinations.iter().all(|destination| {
                let Destination { rows, columns, .. } = *destination;
                columns.is_none_or(|(begin, end)| self.map_of_columns(SOMEWHERE, rows, [begin, end]).is_ok())
            })
    }

    /// Rows and columns of a result, so many elements from one row to the next, of which it stores some rows at once.
    fn map_of_result(
        &self,
        address: u64,
        [rows, columns]: [usize; 2],
        stride: usize,
        at_once: usize,
    ) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let (kind, box_columns) = match spec.output {
            Scalar::F32 => (TensorMapElement::F32, shape.wide_columns()),
            _ => (spec.element.tensor_map_element(), shape.chunk_columns()),
        };
        let swizzle = match box_columns * kind.bytes() {
            32 => Swizzle::Span32,
            64 => Swizzle::Span64,
            _ => Swizzle::Span128,
        };
        TensorMapSpec::new(kind, address, [columns as u64, rows as u64], [box_columns, at_once as u32])
            .strides([stride as u64 * u64::from(kind.bytes())])
            .swizzle(swizzle)
            .encode(self.function.device(), "D")
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!(
            "gemm/gemm_work.cuh",
            GemmTile { source_row, destination_row, source, destination, rows, column, group, first, blocks }
        ),
        shared_layout!("gemm/gemm_work.cuh", GemmKSource { source, row }),
        shared_layout!(
            "gemm/gemm_work.cuh",
            GemmArguments {
                a_maps,
                b_map,
                d_maps,
                d,
                counters,
                tiles,
                k_sources,
                bias,
                partial_sums,
                parts_stored,
                wait,
                unit_count,
                splits,
                serial_parts,
                handed_parts,
                k_blocks,
                n,
                n_whole,
                d_stride,
                pairs_columns,
                wide,
                adds,
                counters_of_peers,
            }
        ),
    ]
}
