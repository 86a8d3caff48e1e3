//! The launcher of `gemm/gemm.cuh`.

mod gather;
mod grouped;
mod library;
mod problem_tiles;
mod problems;
mod reduce;
mod rows;
mod runner;
mod shape;
mod source;
mod spec;

use std::ops::Range;

use counterpoint_tiles::gemm::{self as tiles, GemmUnit, TILE_ROWS};
pub use counterpoint_tiles::gemm::{GemmLayout, GemmShape, TileOrder, TilePair, Warpgroups};
pub use gather::{GemmGather, GemmGatherSpec, GemmGatherTensors};
pub use grouped::{GroupedGemm, GroupedGemmTensors};
pub use library::{GemmLibrary, LibraryGemm};
pub use problems::{GemmProblem, GroupedGemmSpec, ProblemRows, ProblemTerm};
pub use reduce::{GemmReduce, GemmReduceSpec, GemmReduceTensors, SumsGoTo};
pub use rows::GemmRows;
use rows::{Destination, GemmTerm, GemmTile, RowTile};
pub use runner::GemmRunner;
pub(super) use source::specialisations;
use source::{GemmChoice, GemmEnds};
pub use spec::{GEMM_DESTINATIONS, GEMM_SOURCES, GemmEpilogue, GemmGrid, GemmSignals, GemmSpec, GemmTensors};

use super::{CtaWaits, Scalar, WaitLimit};
use crate::layout::{SharedLayout, shared_layout};
use crate::{
    CudaError, Device, DeviceBuffer, Function, Launch, LaunchStart, Stream, Swizzle, TensorMap,
    TensorMapElement, TensorMapSpec,
};

/// A matrix product on Hopper, prepared to run many times. One run at a time where parts of its k take turns ([`GemmShape::turns`]) or are
/// handed over ([`GemmShape::hands`]): the memory for what is kept of the first is its own.
///
/// The bits of a result depend on the spec's sizes, types and layout and on the GPU's number of multiprocessors, and on
/// nothing else: not on the epilogue (but for what it adds), where rows come from and go, the order, the signals, the grid or the
/// margin.
/// They depend on m no more than the number of parts of k does ([`GemmShape::parts`]).
#[derive(Clone, Debug)]
pub struct Gemm {
    function: Function,
    spec: GemmSpec,
    shape: GemmShape,
    destinations: Vec<Destination>,
    tile_list: Vec<RowTile>,
    unit_list: Vec<GemmUnit>,
    tiles: DeviceBuffer,
    /// Empty where A is in one piece.
    terms: DeviceBuffer,
    signals: Vec<u32>,
    /// Empty where no part waits for another.
    kept: DeviceBuffer,
    /// Of every CTA that takes a part over, zero between runs.
    handed: DeviceBuffer,
    /// Where no part is handed over, nobody waits.
    waits: Option<CtaWaits>,
    ctas: u32,
    launch: Launch,
}

/// Two tiles that are computed together, clipped to the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileUnit {
    /// Rows of D.
    pub rows: Range<usize>,
    /// Columns of D.
    pub columns: Range<usize>,
    /// The group whose counter hears of them.
    pub group: usize,
}

/// `GemmArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmArguments {
    a_maps: [TensorMap; GEMM_SOURCES],
    b_map: TensorMap,
    d_maps: [TensorMap; GEMM_DESTINATIONS],
    d: [u64; GEMM_DESTINATIONS],
    counters: [u64; GEMM_DESTINATIONS],
    tiles: u64,
    terms: u64,
    bias: u64,
    kept: u64,
    handed: u64,
    wait: WaitLimit,
    unit_count: u32,
    splits: u32,
    turns: u32,
    hands: u32,
    k_blocks: u32,
    n: u32,
    n_whole: u32,
    d_stride: u32,
    pairs_columns: u32,
    wide: u32,
    adds: u32,
    counters_of_peers: u32,
}

const MISSED_HAND: &str = "a tile of a product waited in vain for the sums of the first part of its k, and is wrong now; run again, \
                           and report this product's rows, columns and terms";

/// Rows of D that a warpgroup puts into shared memory and the copy engine stores at once.
const STORED_ROWS: usize = 64;

impl Gemm {
    /// Makes a product ready in the shape that is estimated to be the fastest: compiles or finds the kernel, and uploads the
    /// order of tiles by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when no kernel takes it; when the kernel cannot be compiled, or memory is short.
    pub fn new(stream: &Stream, spec: &GemmSpec) -> Result<Self, CudaError> {
        let best = Self::shapes(stream.device(), spec)?[0];
        Self::with_shape(stream, spec, best)
    }

    /// The shapes that it can have on a device, the one that is estimated to be the fastest first.
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn shapes(device: &Device, spec: &GemmSpec) -> Result<Vec<GemmShape>, CudaError> {
        check_arch(device)?;
        spec.check().map_err(refused)?;
        Ok(shape::shapes(spec, device.sm_count()))
    }

    /// Those of them under which an element's bits do not depend on which rows of its pass are computed together: k is in as many
    /// parts in all products of the pass.
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn shapes_in_pass(device: &Device, spec: &GemmSpec) -> Result<Vec<GemmShape>, CudaError> {
        let parts = shape::parts_in_pass(spec, device.sm_count());
        let alike = |shape: &GemmShape| shape.parts() == parts;
        Ok(Self::shapes(device, spec)?.into_iter().filter(alike).collect())
    }

    /// The same in a given shape, one of [`Gemm::shapes`].
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn with_shape(stream: &Stream, spec: &GemmSpec, shape: GemmShape) -> Result<Self, CudaError> {
        let device = stream.device();
        if !Self::shapes(device, spec)?.contains(&shape) {
            return Err(refused(format!("{shape:?} is not a shape of this product")));
        }
        let rows = spec.tiled_rows();
        let mut unit_list = tiles::units(&spec.order, &shape, rows, spec.size.n).map_err(refused)?;
        let signals = match &spec.signals {
            GemmSignals::None => Vec::new(),
            GemmSignals::Device { sizes } | GemmSignals::System { sizes } => {
                tiles::group(&mut unit_list, sizes, &shape, rows, spec.size.n).map_err(refused)?
            }
            GemmSignals::Shares => Self::signals_of_shares(spec, shape, &unit_list),
        };
        Self::with_units(stream, spec, shape, GemmEnds::Memory, unit_list, signals)
    }

    /// The same with units in their order, whose groups have been given.
    fn with_units(
        stream: &Stream,
        spec: &GemmSpec,
        shape: GemmShape,
        ends: GemmEnds,
        unit_list: Vec<GemmUnit>,
        signals: Vec<u32>,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let stretches = rows::stretches(spec);
        let destinations = rows::destinations(&stretches).0;
        let tile_list = rows::row_tiles(&stretches);
        let GemmShape { columns, warpgroups, hands, .. } = shape;
        let choice =
            GemmChoice { columns, layout: spec.layout, element: spec.element, ends, warpgroups, hands };
        let function = device.function(&choice.source())?;
        let tiles: Vec<GemmTile> =
            unit_list.iter().flat_map(|unit| GemmTile::of_unit(unit, &shape, &tile_list)).collect();
        let tiles = DeviceBuffer::from_slice(stream, &tiles)?;
        let terms = DeviceBuffer::from_slice(stream, &rows::terms(spec))?;
        let (of_cluster, items) = (2 * shape.splits, unit_list.len() as u32 * shape.hands);
        // What takes part in a collective holds all multiprocessors anyway, so it may do so as they become free.
        let start =
            if ends == GemmEnds::Memory { LaunchStart::AfterPrevious } else { LaunchStart::Overlapping };
        let launch = |clusters: u32| {
            Launch::linear(clusters * of_cluster, GemmShape::THREADS)
                .cluster([of_cluster, 1, 1])
                .shared_bytes(GemmShape::shared_bytes(columns, spec.layout))
                .start(start)
        };
        // Not as many as there are multiprocessors for: a cluster lies within one of the groups that these come in. Those of a
        // kernel that waits for other ranks must all run at once.
        let most = function.clusters_at_once(&launch(1))?;
        let clusters = match spec.grid {
            GemmGrid::Persistent => {
                let left = device.sm_count().saturating_sub(spec.sm_margin) / of_cluster;
                // Who hands over and who takes come from whole pairs of clusters.
                items.min(left.min(most) / shape.hands * shape.hands).max(shape.hands)
            }
            GemmGrid::PerUnit => items,
        };
        let (ctas, launch) = (clusters * of_cluster, launch(clusters));
        let tile_bytes = TILE_ROWS * shape.columns as usize * size_of::<f32>();
        let keeping = match (shape.turns, shape.hands) {
            (1, 1) => 0,
            (_, 1) => ctas as usize,
            _ => 2 * unit_list.len(),
        };
        let kept = DeviceBuffer::new(device, keeping * tile_bytes)?;
        let hands_over = shape.hands > 1;
        let handed = DeviceBuffer::from_slice(stream, &vec![0u32; if hands_over { keeping } else { 0 }])?;
        let waits = hands_over.then(|| CtaWaits::new(device, MISSED_HAND)).transpose()?;
        Ok(Self {
            function,
            spec: spec.clone(),
            shape,
            destinations,
            tile_list,
            unit_list,
            tiles,
            terms,
            signals,
            kept,
            handed,
            waits,
            ctas,
            launch,
        })
    }

    /// How it is cut up.
    pub fn shape(&self) -> GemmShape {
        self.shape
    }

    /// Waits for parts of k that are handed over; `None` where no part is.
    pub fn waits(&self) -> Option<&CtaWaits> {
        self.waits.as_ref()
    }

    /// What is computed, in the order in which it is begun.
    pub fn units(&self) -> impl ExactSizeIterator<Item = TileUnit> {
        let tiles = self.shape.unit()[0] / TILE_ROWS;
        let columns = self.shape.unit()[1];
        self.unit_list.iter().map(move |unit| {
            let first = usize::from(unit.row_tile);
            let of_unit = &self.tile_list[first..(first + tiles).min(self.tile_list.len())];
            let row = self.first_row(&self.tile_list[first]);
            let column = usize::from(unit.column_tile) * self.shape.columns as usize;
            TileUnit {
                rows: row..row + of_unit.iter().map(|tile| tile.rows as usize).sum::<usize>(),
                columns: column..(column + columns).min(self.spec.size.n),
                group: unit.group as usize,
            }
        })
    }

    /// The row of D, all shares one after the other, with which a tile begins.
    fn first_row(&self, tile: &RowTile) -> usize {
        let before = &self.destinations[..usize::from(tile.destination)];
        before.iter().map(|destination| destination.rows).sum::<usize>() + tile.destination_row as usize
    }

    /// How often a launch tells of each share: once from each warpgroup that stores some of a tile that has elements.
    fn signals_of_shares(spec: &GemmSpec, shape: GemmShape, units: &[GemmUnit]) -> Vec<u32> {
        let stretches = rows::stretches(spec);
        let (destinations, tiles) = (rows::destinations(&stretches).0, rows::row_tiles(&stretches));
        let mut signals = vec![0; spec.shares.len()];
        for tile in units.iter().flat_map(|unit| GemmTile::of_unit(unit, &shape, &tiles)) {
            if tile.rows > 0 && (tile.column as usize) < spec.size.n {
                signals[destinations[usize::from(tile.destination)].share] += shape.tellers();
            }
        }
        signals
    }

    /// By how much one launch raises each group's counters, those of all destinations together. Counters are never reset:
    /// launch number e is done with a group when they have risen by e times as much.
    pub fn signals_of(&self) -> &[u32] {
        &self.signals
    }

    /// Enqueues the product. Nothing is allocated and nothing waits.
    ///
    /// # Safety
    /// `tensors` are addresses of what the spec says, in memory that this GPU reaches, which live until the kernel has run;
    /// what is written overlaps nothing else. This value lives as long.
    ///
    /// # Errors
    /// [`CudaError::TensorMap`] for an address that is no multiple of 16, [`CudaError::Launch`] for addresses that are missing
    /// or too many, or the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &GemmTensors<'_>) -> Result<(), CudaError> {
        let arguments = self.arguments(tensors)?;
        // SAFETY: the arguments are those of the kernel in `GemmChoice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,)) }
    }

    fn arguments(&self, tensors: &GemmTensors<'_>) -> Result<GemmArguments, CudaError> {
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
            let Destination { share, share_row, rows } = *destination;
            let address = tensors.d[share] + share_row as u64 * row_bytes;
            d_maps[index] = Some(self.map_of_d(address, rows, STORED_ROWS)?);
            d[index] = address;
            counters[index] = tensors.counters.get(share).copied().unwrap_or(0);
        }
        let mut a_maps = [None; GEMM_SOURCES];
        for (tensor, &address) in tensors.a.iter().enumerate() {
            let rows = rows::tensor_rows(spec, tensor);
            if rows > 0 {
                a_maps[tensor] = Some(self.map_of_a(address, rows)?);
            }
        }
        // Nobody looks at those that are not there.
        let missing = || refused("it has no destination or no source".to_owned());
        let some_d = d_maps[0].ok_or_else(missing)?;
        let some_a = a_maps.iter().flatten().next().copied().ok_or_else(missing)?;
        Ok(GemmArguments {
            a_maps: a_maps.map(|map| map.unwrap_or(some_a)),
            b_map: self.map_of_b(tensors.b)?,
            d_maps: d_maps.map(|map| map.unwrap_or(some_d)),
            d,
            counters,
            tiles: self.tiles.address(),
            terms: if self.terms.is_empty() { 0 } else { self.terms.address() },
            bias: if spec.epilogue == GemmEpilogue::StoreBias { tensors.bias } else { 0 },
            kept: if self.kept.is_empty() { 0 } else { self.kept.address() },
            handed: if self.handed.is_empty() { 0 } else { self.handed.address() },
            wait: self.waits.as_ref().map_or(WaitLimit::NONE, CtaWaits::limit),
            unit_count: self.unit_list.len() as u32,
            splits: shape.splits,
            turns: shape.turns,
            hands: shape.hands,
            k_blocks: spec.size.k.div_ceil(64) as u32,
            n: spec.size.n as u32,
            n_whole: self.columns_by_copy_engine() as u32,
            d_stride: spec.strides[2] as u32,
            pairs_columns: u32::from(shape.pair == TilePair::Columns),
            wide: u32::from(wide),
            adds: u32::from(spec.epilogue == GemmEpilogue::Accumulate),
            counters_of_peers: u32::from(matches!(spec.signals, GemmSignals::System { .. })),
        })
    }

    /// How the copy engine finds `rows` rows of one of A's tensors: along k, a CTA loads all rows of its operand, or half of those
    /// that the other reads too.
    fn map_of_a(&self, address: u64, rows: usize) -> Result<TensorMap, CudaError> {
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
    fn columns_by_copy_engine(&self) -> usize {
        let of_16_bytes = 16 / self.spec.output.bytes() as usize;
        self.spec.size.n / of_16_bytes * of_16_bytes
    }

    /// How the copy engine finds one destination's rows of D, of which it stores some at once.
    fn map_of_d(&self, address: u64, rows: usize, at_once: usize) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let (kind, box_columns) = match spec.output {
            Scalar::F32 => (TensorMapElement::F32, shape.wide_columns()),
            _ => (spec.element.tensor_map_element(), shape.chunk_columns()),
        };
        // A tensor of the copy engine has at least one column. The kernel stores none by it where there are fewer.
        let columns = self.columns_by_copy_engine().max(1) as u64;
        let swizzle = match box_columns * kind.bytes() {
            32 => Swizzle::Span32,
            64 => Swizzle::Span64,
            _ => Swizzle::Span128,
        };
        TensorMapSpec::new(kind, address, [columns, rows as u64], [box_columns, at_once as u32])
            .strides([spec.strides[2] as u64 * u64::from(kind.bytes())])
            .swizzle(swizzle)
            .encode(self.function.device(), "D")
    }

    /// Whether there are as many addresses as the spec speaks of.
    fn check_tensors(&self, tensors: &GemmTensors<'_>) -> Result<(), String> {
        let GemmSpec { sources, shares, signals, epilogue, .. } = &self.spec;
        if tensors.d.len() != shares.len() {
            return Err(format!("{} addresses of D, it has {} shares", tensors.d.len(), shares.len()));
        }
        let wanted = sources.iter().map(|source| source.tensor + 1).max().unwrap_or(0);
        if tensors.a.len() != wanted {
            return Err(format!("{} addresses of A, it has {wanted} tensors", tensors.a.len()));
        }
        let counters = if *signals == GemmSignals::None { 0 } else { shares.len() };
        if tensors.counters.len() != counters || tensors.counters.contains(&0) {
            return Err(format!("counters at {:x?}; it needs {counters} addresses", tensors.counters));
        }
        if *epilogue == GemmEpilogue::StoreBias && tensors.bias == 0 {
            return Err("a bias is to be added, but has no address".to_owned());
        }
        Ok(())
    }
}

/// Refuses GPUs for which there are no such kernels.
fn check_arch(device: &Device) -> Result<(), CudaError> {
    if device.arch().is_hopper() {
        return Ok(());
    }
    Err(refused(format!("it is for compute capability 9.0, the GPU has {}", device.capability())))
}

fn refused(reason: String) -> CudaError {
    CudaError::Launch { kernel: "gemm".to_owned(), reason }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    let mut all = vec![
        shared_layout!(
            "gemm/gemm_work.cuh",
            GemmTile { source_row, destination_row, source, destination, rows, column, group, first, blocks }
        ),
        shared_layout!("gemm/gemm_work.cuh", GemmTerm { source, row }),
        shared_layout!(
            "gemm/gemm_work.cuh",
            GemmArguments {
                a_maps,
                b_map,
                d_maps,
                d,
                counters,
                tiles,
                terms,
                bias,
                kept,
                handed,
                wait,
                unit_count,
                splits,
                turns,
                hands,
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
    ];
    all.extend(gather::layouts());
    all.extend(grouped::layouts());
    all.extend(reduce::layouts());
    all
}
