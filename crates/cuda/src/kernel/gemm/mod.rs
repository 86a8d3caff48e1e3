//! The launcher of `gemm/gemm.cuh`.

mod gather;
mod library;
mod order;
mod reduce;
mod shape;
mod source;
mod spec;

use std::ops::Range;

pub use gather::{GemmGather, GemmGatherSpec, GemmGatherTensors};
pub use library::{GemmLibrary, LibraryGemm};
use order::GemmUnit;
pub use order::TileOrder;
pub use reduce::{GemmReduce, GemmReduceSpec, GemmReduceTensors, SumsGoTo};
use shape::TILE_ROWS;
pub use shape::{GemmShape, TilePair};
pub(super) use source::specialisations;
use source::{GemmChoice, GemmEnds};
pub use spec::{GEMM_DESTINATIONS, GemmEpilogue, GemmLayout, GemmSignals, GemmSpec, GemmTensors};

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
/// nothing else: not on the epilogue (but for what it adds), the order, the destinations, the signals or the margin.
#[derive(Clone, Debug)]
pub struct Gemm {
    function: Function,
    spec: GemmSpec,
    shape: GemmShape,
    unit_list: Vec<GemmUnit>,
    units: DeviceBuffer,
    signals: Vec<u32>,
    partials: DeviceBuffer,
    arrivals: DeviceBuffer,
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
    a_map: TensorMap,
    b_map: TensorMap,
    d_maps: [TensorMap; GEMM_DESTINATIONS],
    d: [u64; GEMM_DESTINATIONS],
    counters: [u64; GEMM_DESTINATIONS],
    units: u64,
    bias: u64,
    partials: u64,
    arrivals: u64,
    unit_count: u32,
    splits: u32,
    k_blocks: u32,
    m: u32,
    n: u32,
    n_whole: u32,
    d_stride: u32,
    rows_per_destination: u32,
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
        let mut unit_list = order::units(&spec.order, &shape, spec.m, spec.n).map_err(refused)?;
        let signals = match &spec.signals {
            GemmSignals::None => Vec::new(),
            GemmSignals::Device { sizes } | GemmSignals::System { sizes } => {
                order::group(&mut unit_list, sizes, &shape, spec.m, spec.n).map_err(refused)?
            }
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
        let choice = GemmChoice { columns: shape.columns, layout: spec.layout, element: spec.element, ends };
        let function = device.function(&choice.source())?;
        let units = DeviceBuffer::from_slice(stream, &unit_list)?;
        let partials = DeviceBuffer::new(device, shape.partials(spec.m, spec.n) * size_of::<f32>())?;
        let arrivals = match shape.splits {
            1 => DeviceBuffer::new(device, 0)?,
            // For each of a unit's two tiles, from each of its two warpgroups.
            _ => DeviceBuffer::from_slice(stream, &vec![0u32; unit_list.len() * 4])?,
        };
        let clusters = (device.sm_count().saturating_sub(spec.sm_margin) / 2).max(1);
        let items = unit_list.len() as u32 * shape.splits;
        let ctas = 2 * items.min(clusters);
        let launch = Launch::linear(ctas, GemmShape::THREADS)
            .cluster([2, 1, 1])
            .shared_bytes(GemmShape::shared_bytes(shape.columns));
        Ok(Self {
            function,
            spec: spec.clone(),
            shape,
            unit_list,
            units,
            signals,
            partials,
            arrivals,
            ctas,
            launch,
        })
    }

    /// How it is cut up.
    pub fn shape(&self) -> GemmShape {
        self.shape
    }

    /// What is computed, in the order in which it is begun.
    pub fn units(&self) -> impl ExactSizeIterator<Item = TileUnit> {
        let [rows, columns] = self.shape.unit();
        self.unit_list.iter().map(move |unit| {
            let row = usize::from(unit.row_tile) * TILE_ROWS;
            let column = usize::from(unit.column_tile) * self.shape.columns as usize;
            TileUnit {
                rows: row..(row + rows).min(self.spec.m),
                columns: column..(column + columns).min(self.spec.n),
                group: unit.group as usize,
            }
        })
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
        let wide = spec.output == Scalar::F32;
        let rows = spec.rows_per_destination();
        let mut d_maps = [None; GEMM_DESTINATIONS];
        let mut d = [0; GEMM_DESTINATIONS];
        for (index, &address) in tensors.d.iter().enumerate() {
            d_maps[index] = Some(self.map_of_d(address)?);
            d[index] = address;
        }
        // Nobody looks at those that are not there.
        let some = d_maps[0].ok_or_else(|| refused("it has no destination".to_owned()))?;
        let mut counters = [0; GEMM_DESTINATIONS];
        counters[..tensors.counters.len()].copy_from_slice(tensors.counters);
        Ok(GemmArguments {
            a_map: self.map_of_a(tensors.a, spec.m)?,
            b_map: self.map_of_b(tensors.b)?,
            d_maps: d_maps.map(|map| map.unwrap_or(some)),
            d,
            counters,
            units: self.units.address(),
            bias: if spec.epilogue == GemmEpilogue::StoreBias { tensors.bias } else { 0 },
            partials: self.partials.address(),
            arrivals: self.arrivals.address(),
            unit_count: self.unit_list.len() as u32,
            splits: shape.splits,
            k_blocks: spec.k.div_ceil(64) as u32,
            m: spec.m as u32,
            n: spec.n as u32,
            n_whole: self.columns_by_copy_engine() as u32,
            d_stride: spec.strides[2] as u32,
            rows_per_destination: if spec.destinations == 1 { u32::MAX } else { rows as u32 },
            pairs_columns: u32::from(shape.pair == TilePair::Columns),
            wide: u32::from(wide),
            adds: u32::from(spec.epilogue == GemmEpilogue::Accumulate),
            counters_of_peers: u32::from(matches!(spec.signals, GemmSignals::System { .. })),
        })
    }

    /// How the copy engine finds `m` rows of A: along k, a CTA loads all rows of its operand, or half of those that the other
    /// reads too.
    fn map_of_a(&self, address: u64, m: usize) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let rows = match (spec.layout, shape.pair) {
            (GemmLayout::Tn, _) => 64,
            (_, TilePair::Rows) => TILE_ROWS as u32,
            (_, TilePair::Columns) => TILE_ROWS as u32 / 2,
        };
        self.map_of_operand("A", address, spec.layout.a_dims(m, spec.k), spec.strides[0], rows)
    }

    /// Likewise B.
    fn map_of_b(&self, address: u64) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let rows = match (spec.layout, shape.pair) {
            (GemmLayout::Nn | GemmLayout::Tn, _) => 64,
            (GemmLayout::Nt, TilePair::Rows) => shape.columns / 2,
            (GemmLayout::Nt, TilePair::Columns) => shape.columns,
        };
        self.map_of_operand("B", address, spec.layout.b_dims(spec.n, spec.k), spec.strides[1], rows)
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
            .encode(name)
    }

    /// Columns of D up to the last multiple of 16 bytes.
    fn columns_by_copy_engine(&self) -> usize {
        let of_16_bytes = 16 / self.spec.output.bytes() as usize;
        self.spec.n / of_16_bytes * of_16_bytes
    }

    /// How the copy engine finds one destination's rows of D.
    fn map_of_d(&self, address: u64) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let (kind, box_columns) = match spec.output {
            Scalar::F32 => (TensorMapElement::F32, 32),
            _ => (spec.element.tensor_map_element(), shape.chunk_columns()),
        };
        // A tensor of the copy engine has at least one column. The kernel stores none by it where there are fewer.
        let columns = self.columns_by_copy_engine().max(1) as u64;
        let swizzle = if box_columns * kind.bytes() == 64 { Swizzle::Span64 } else { Swizzle::Span128 };
        TensorMapSpec::new(kind, address, [columns, spec.rows_per_destination() as u64], [box_columns, 64])
            .strides([spec.strides[2] as u64 * u64::from(kind.bytes())])
            .swizzle(swizzle)
            .encode("D")
    }

    /// Whether there are as many addresses as the spec speaks of.
    fn check_tensors(&self, tensors: &GemmTensors<'_>) -> Result<(), String> {
        let GemmSpec { destinations, ref signals, epilogue, .. } = self.spec;
        if tensors.d.len() != destinations {
            return Err(format!("{} addresses of D, it has {destinations} destinations", tensors.d.len()));
        }
        let counters = if *signals == GemmSignals::None { 0 } else { destinations };
        if tensors.counters.len() != counters || tensors.counters.contains(&0) {
            return Err(format!("counters at {:x?}; it needs {counters} addresses", tensors.counters));
        }
        if epilogue == GemmEpilogue::StoreBias && tensors.bias == 0 {
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
    let mut all = vec![
        shared_layout!("gemm/gemm_work.cuh", GemmUnit { row_tile, column_tile, group }),
        shared_layout!(
            "gemm/gemm_work.cuh",
            GemmArguments {
                a_map,
                b_map,
                d_maps,
                d,
                counters,
                units,
                bias,
                partials,
                arrivals,
                unit_count,
                splits,
                k_blocks,
                m,
                n,
                n_whole,
                d_stride,
                rows_per_destination,
                pairs_columns,
                wide,
                adds,
                counters_of_peers,
            }
        ),
    ];
    all.extend(gather::layouts());
    all.extend(reduce::layouts());
    all
}
