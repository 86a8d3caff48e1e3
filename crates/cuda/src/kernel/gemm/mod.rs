//! The launcher of `gemm/gemm.cuh`.

mod library;
mod order;
mod rows;
mod shape;
mod source;
mod spec;

use std::ops::Range;

pub use library::{GemmLibrary, LibraryGemm};
use order::GemmUnit;
pub use order::TileOrder;
pub use rows::GemmRows;
use rows::{GemmRowTile, GemmTerm, Stretch};
use shape::TILE_ROWS;
pub use shape::{GemmShape, TilePair};
use source::GemmChoice;
pub(super) use source::specialisations;
pub use spec::{
    GEMM_DESTINATIONS, GEMM_SOURCES, GemmEpilogue, GemmLayout, GemmSignals, GemmSpec, GemmTensors,
};

use super::Scalar;
use super::layout::{SharedLayout, shared_layout};
use crate::{
    CudaError, Device, DeviceBuffer, Function, Launch, Stream, Swizzle, TensorMap, TensorMapElement,
    TensorMapSpec,
};

/// A matrix product on Hopper, prepared to run many times. One run at a time where its k is split: the parts' memory is its
/// own.
///
/// The bits of a result depend on the spec's sizes, types and layout and on the GPU's number of multiprocessors, and on
/// nothing else: not on the epilogue (but for what it adds), where rows come from and go, the order, the signals or the margin.
/// Where k is not split they do not even depend on m.
#[derive(Clone, Debug)]
pub struct Gemm {
    function: Function,
    spec: GemmSpec,
    shape: GemmShape,
    stretches: Vec<Stretch>,
    tile_list: Vec<GemmRowTile>,
    unit_list: Vec<GemmUnit>,
    units: DeviceBuffer,
    row_tiles: DeviceBuffer,
    /// Empty where A is in one piece.
    terms: DeviceBuffer,
    signals: Vec<u32>,
    partials: DeviceBuffer,
    arrivals: DeviceBuffer,
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
    units: u64,
    row_tiles: u64,
    terms: u64,
    bias: u64,
    partials: u64,
    arrivals: u64,
    unit_count: u32,
    splits: u32,
    k_blocks: u32,
    n: u32,
    n_whole: u32,
    d_stride: u32,
    pairs_columns: u32,
    wide: u32,
    adds: u32,
    counters_of_peers: u32,
}

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
        if !device.arch().is_hopper() {
            let reason = format!("it is for compute capability 9.0, the GPU has {}", device.capability());
            return Err(refused(reason));
        }
        spec.check().map_err(refused)?;
        Ok(shape::shapes(spec, device.sm_count()))
    }

    /// The same in a given shape, one of [`Gemm::shapes`].
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn with_shape(stream: &Stream, spec: &GemmSpec, shape: GemmShape) -> Result<Self, CudaError> {
        let device = stream.device();
        if !Self::shapes(device, spec)?.contains(&shape) {
            return Err(refused(format!("{shape:?} is no shape of this product")));
        }
        let (stretches, rows) = (rows::stretches(spec), spec.tiled_rows());
        let tile_list = rows::row_tiles(&stretches);
        let mut unit_list = order::units(&spec.order, &shape, rows, spec.n).map_err(refused)?;
        let signals = match &spec.signals {
            GemmSignals::None => Vec::new(),
            GemmSignals::Device { sizes } | GemmSignals::System { sizes } => {
                order::group(&mut unit_list, sizes, &shape, rows, spec.n).map_err(refused)?
            }
        };
        let choice = GemmChoice { columns: shape.columns, layout: spec.layout, element: spec.element };
        let function = device.function(&choice.source())?;
        let units = DeviceBuffer::from_slice(stream, &unit_list)?;
        let row_tiles = DeviceBuffer::from_slice(stream, &tile_list)?;
        let terms = DeviceBuffer::from_slice(stream, &rows::terms(spec))?;
        let partials = DeviceBuffer::new(device, shape.partials(rows, spec.n) * size_of::<f32>())?;
        let arrivals = match shape.splits {
            1 => DeviceBuffer::new(device, 0)?,
            // For each of a unit's two tiles, from each of its two warpgroups.
            _ => DeviceBuffer::from_slice(stream, &vec![0u32; unit_list.len() * 4])?,
        };
        let clusters = (device.sm_count().saturating_sub(spec.sm_margin) / 2).max(1);
        let items = unit_list.len() as u32 * shape.splits;
        let launch = Launch::linear(2 * items.min(clusters), GemmShape::THREADS)
            .cluster([2, 1, 1])
            .shared_bytes(GemmShape::shared_bytes(shape.columns));
        Ok(Self {
            function,
            spec: spec.clone(),
            shape,
            stretches,
            tile_list,
            unit_list,
            units,
            row_tiles,
            terms,
            signals,
            partials,
            arrivals,
            launch,
        })
    }

    /// How it is cut up.
    pub fn shape(&self) -> GemmShape {
        self.shape
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
                columns: column..(column + columns).min(self.spec.n),
                group: unit.group as usize,
            }
        })
    }

    /// The row of D, all shares one after the other, with which a tile begins.
    fn first_row(&self, tile: &GemmRowTile) -> usize {
        let before = &self.stretches[..usize::from(tile.destination)];
        before.iter().map(|stretch| stretch.rows).sum::<usize>() + tile.destination_row as usize
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
        let [stride_a, stride_b, stride_d] = spec.strides;
        let element = spec.element.tensor_map_element();
        let map = |name: &str,
                   kind: TensorMapElement,
                   address,
                   [rows, columns]: [usize; 2],
                   stride: usize,
                   box_dims: [u32; 2]| {
            let swizzle = if box_dims[0] * kind.bytes() == 64 { Swizzle::Span64 } else { Swizzle::Span128 };
            TensorMapSpec::new(kind, address, [columns as u64, rows as u64], box_dims)
                .strides([stride as u64 * u64::from(kind.bytes())])
                .swizzle(swizzle)
                .encode(name)
        };
        // Along k, a CTA loads all rows of its operand, or half of those that the other reads too.
        let (rows_a, rows_b) = match shape.pair {
            TilePair::Rows => (TILE_ROWS as u32, shape.columns / 2),
            TilePair::Columns => (TILE_ROWS as u32 / 2, shape.columns),
        };
        let (box_a, box_b) = match spec.layout {
            GemmLayout::Nt => ([64, rows_a], [64, rows_b]),
            GemmLayout::Nn => ([64, rows_a], [64, 64]),
            GemmLayout::Tn => ([64, 64], [64, 64]),
        };
        let wide = spec.output == Scalar::F32;
        let (kind, box_columns) =
            if wide { (TensorMapElement::F32, 32) } else { (element, shape.chunk_columns()) };
        let n_whole = spec.n / (16 / kind.bytes() as usize) * (16 / kind.bytes() as usize);
        let mut d_maps = [None; GEMM_DESTINATIONS];
        let mut d = [0; GEMM_DESTINATIONS];
        let mut counters = [0; GEMM_DESTINATIONS];
        for (index, stretch) in self.stretches.iter().enumerate() {
            let Stretch { share, share_row, rows, .. } = *stretch;
            let address = tensors.d[share] + share_row as u64 * stride_d as u64 * u64::from(kind.bytes());
            // A tensor of the copy engine has at least one column. The kernel stores none of those beyond n_whole by it.
            let columns = n_whole.max(1);
            d_maps[index] = Some(map("D", kind, address, [rows, columns], stride_d, [box_columns, 64])?);
            d[index] = address;
            counters[index] = tensors.counters.get(share).copied().unwrap_or(0);
        }
        let columns_a = spec.layout.a_dims(spec.m, spec.k)[1];
        let mut a_maps = [None; GEMM_SOURCES];
        for (tensor, &address) in tensors.a.iter().enumerate() {
            let dims = [rows::tensor_rows(spec, tensor), columns_a];
            if dims[0] > 0 {
                a_maps[tensor] = Some(map("A", element, address, dims, stride_a, box_a)?);
            }
        }
        // Nobody looks at those that are not there.
        let missing = || refused("it has no destination or no source".to_owned());
        let some_d = d_maps[0].ok_or_else(missing)?;
        let some_a = a_maps.iter().flatten().next().copied().ok_or_else(missing)?;
        Ok(GemmArguments {
            a_maps: a_maps.map(|map| map.unwrap_or(some_a)),
            b_map: map("B", element, tensors.b, spec.layout.b_dims(spec.n, spec.k), stride_b, box_b)?,
            d_maps: d_maps.map(|map| map.unwrap_or(some_d)),
            d,
            counters,
            units: self.units.address(),
            row_tiles: self.row_tiles.address(),
            terms: if self.terms.is_empty() { 0 } else { self.terms.address() },
            bias: if spec.epilogue == GemmEpilogue::StoreBias { tensors.bias } else { 0 },
            partials: self.partials.address(),
            arrivals: self.arrivals.address(),
            unit_count: self.unit_list.len() as u32,
            splits: shape.splits,
            k_blocks: spec.k.div_ceil(64) as u32,
            n: spec.n as u32,
            n_whole: n_whole as u32,
            d_stride: stride_d as u32,
            pairs_columns: u32::from(shape.pair == TilePair::Columns),
            wide: u32::from(wide),
            adds: u32::from(spec.epilogue == GemmEpilogue::Accumulate),
            counters_of_peers: u32::from(matches!(spec.signals, GemmSignals::System { .. })),
        })
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

fn refused(reason: String) -> CudaError {
    CudaError::Launch { kernel: "gemm".to_owned(), reason }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("gemm/gemm_work.cuh", GemmUnit { row_tile, column_tile, group }),
        shared_layout!(
            "gemm/gemm_work.cuh",
            GemmRowTile { source_row, destination_row, source, destination, rows }
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
                units,
                row_tiles,
                terms,
                bias,
                partials,
                arrivals,
                unit_count,
                splits,
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
