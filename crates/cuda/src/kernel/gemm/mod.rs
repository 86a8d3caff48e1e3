//! The launchers of matrix products: `gemm/gemm.cuh` on Hopper, `gemm/portable_gemm.cuh` elsewhere.

mod arriving;
mod fault;
mod gather;
mod grouped;
mod hopper;
mod library;
mod portable;
mod problem_tiles;
mod problems;
mod reduce;
mod rows;
mod runner;
mod shape;
mod source;
mod spec;

use std::ops::Range;

pub use arriving::{GemmArrivalWords, GemmArriving};
use counterpoint_tiles::gemm::{self as tiles, GemmUnit, TILE_ROWS};
pub use counterpoint_tiles::gemm::{GemmLayout, GemmShape, TileOrder, TilePair, Warpgroups};
pub use fault::{GemmFault, ProblemFault};
pub use gather::{GemmGather, GemmGatherSpec, GemmGatherTensors};
pub use grouped::{GroupedGemm, GroupedGemmTensors};
use hopper::{GemmArguments, STORED_ROWS};
pub use library::{GemmLibrary, LibraryGemm};
pub use problems::{GemmProblem, GroupedGemmSpec, ProblemKBlock, ProblemRows};
pub use reduce::{GemmReduce, GemmReduceSpec, GemmReduceTensors, SumsGoTo};
pub use rows::GemmRows;
use rows::{Destination, GemmTile, RowTile};
pub use runner::GemmRunner;
use source::{GemmChoice, GemmEnds};
pub use spec::{GEMM_DESTINATIONS, GEMM_SOURCES, GemmEpilogue, GemmGrid, GemmSignals, GemmSpec, GemmTensors};

use super::{CtaWaits, Specialisation};
use crate::layout::SharedLayout;
use crate::{CudaError, Device, DeviceBuffer, Function, Launch, Stream};

/// A matrix product, prepared to run many times, on Hopper by warpgroups and elsewhere by warps (mma.sync). One run at a time
/// where parts of its k follow each other ([`GemmShape::serial_parts`]) or are handed over ([`GemmShape::handed_parts`]): the memory for
/// what is kept of the first is its own.
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
    k_sources: DeviceBuffer,
    signals: Vec<u32>,
    /// Empty where no part waits for another.
    partial_sums: DeviceBuffer,
    /// Of every CTA that takes a part over, zero between runs.
    parts_stored: DeviceBuffer,
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

const MISSED_HAND: &str = "a tile of a product waited in vain for the sums of the first part of its k, and is wrong now; run again, \
                           and report this product's M, N and K";

impl Gemm {
    /// Makes a product ready in the shape that is estimated to be the fastest: compiles or finds the kernel, and uploads the
    /// order of tiles by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when no kernel takes it; when the kernel cannot be compiled, or memory is short.
    pub fn new(stream: &Stream, spec: &GemmSpec) -> Result<Self, CudaError> {
        let none = || refused(GemmFault::NoTiles);
        let best = Self::shapes(stream.device(), spec)?.first().copied().ok_or_else(none)?;
        Self::with_shape(stream, spec, best)
    }

    /// The shapes that it can have on a device, the one that is estimated to be the fastest first.
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn shapes(device: &Device, spec: &GemmSpec) -> Result<Vec<GemmShape>, CudaError> {
        spec.check().map_err(refused)?;
        match device.arch().is_hopper() {
            true => Ok(shape::shapes(spec, device.sm_count())),
            false => portable::shapes(device, spec).map_err(refused),
        }
        .map(|shapes| shapes.into_iter().filter(|shape| spec.fits_columns(shape)).collect())
    }

    /// Those of them under which an element's bits do not depend on which rows of its pass are computed together: k is in as many
    /// parts in all products of the pass.
    ///
    /// # Errors
    /// As [`Gemm::new`].
    pub fn shapes_in_pass(device: &Device, spec: &GemmSpec) -> Result<Vec<GemmShape>, CudaError> {
        let parts = if device.arch().is_hopper() { shape::parts_in_pass(spec, device.sm_count()) } else { 1 };
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
            return Err(refused(GemmFault::Shape(shape.into())));
        }
        let rows = spec.tiled_rows();
        let mut unit_list = tiles::units(&spec.order, &shape, rows, spec.size.n).map_err(refused)?;
        let signals = match &spec.signals {
            GemmSignals::None => Vec::new(),
            GemmSignals::Device { sizes } | GemmSignals::System { sizes } => {
                tiles::group(&mut unit_list, sizes, &shape, rows, spec.size.n).map_err(refused)?
            }
            GemmSignals::Receivers => Self::signals_of_receivers(spec, shape, &unit_list),
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
        let segments = rows::segments(spec);
        let destinations = rows::destinations_of(spec);
        let tile_list = match ends {
            GemmEnds::OfArriving => arriving::in_order_of_arrival(rows::row_tiles(&segments)),
            _ => rows::row_tiles(&segments),
        };
        let source = match shape.is_portable() {
            true => portable::source(shape, spec.layout, spec.element, device.arch()),
            false => {
                let GemmShape { columns, warpgroups, handed_parts, .. } = shape;
                GemmChoice {
                    columns,
                    layout: spec.layout,
                    element: spec.element,
                    ends,
                    warpgroups,
                    handed_parts,
                }
                .source()
            }
        };
        let function = device.function(&source)?;
        let mut tiles: Vec<GemmTile> = rows::unit_tiles(spec, &shape, &unit_list, &tile_list).collect();
        if shape.is_portable() {
            // Each is of one CTA, which needs none to make a pair whole.
            tiles.retain(|tile| tile.has_elements(spec.size.n));
        }
        let k_sources = DeviceBuffer::from_slice(stream, &rows::k_sources(spec))?;
        let (launch, ctas) = match shape.is_portable() {
            true => portable::launch(&function, spec, shape, tiles.len() as u32)?,
            false => hopper::launch(&function, spec, shape, ends, unit_list.len() as u32)?,
        };
        let tiles = DeviceBuffer::from_slice(stream, &tiles)?;
        let tile_bytes = TILE_ROWS * shape.columns as usize * size_of::<f32>();
        let keeping = match (shape.serial_parts, shape.handed_parts) {
            (1, 1) => 0,
            (_, 1) => ctas as usize,
            _ => 2 * unit_list.len(),
        };
        let partial_sums = DeviceBuffer::new(device, keeping * tile_bytes)?;
        let hands_over = shape.handed_parts > 1;
        let parts_stored =
            DeviceBuffer::from_slice(stream, &vec![0u32; if hands_over { keeping } else { 0 }])?;
        let waits = hands_over.then(|| CtaWaits::new(device, MISSED_HAND)).transpose()?;
        Ok(Self {
            function,
            spec: spec.clone(),
            shape,
            destinations,
            tile_list,
            unit_list,
            tiles,
            k_sources,
            signals,
            partial_sums,
            parts_stored,
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

    /// The row of D, all receivers one after the other, with which a tile begins.
    fn first_row(&self, tile: &RowTile) -> usize {
        if !self.spec.column_receivers.is_empty() {
            return tile.destination_row as usize;
        }
        let before = &self.destinations[..usize::from(tile.destination)];
        before.iter().map(|destination| destination.rows).sum::<usize>() + tile.destination_row as usize
    }

    /// How often a launch raises the signal of each receiver: once from each warpgroup that stores some of a tile that has elements.
    fn signals_of_receivers(spec: &GemmSpec, shape: GemmShape, units: &[GemmUnit]) -> Vec<u32> {
        let (destinations, tiles) = (rows::destinations_of(spec), rows::row_tiles(&rows::segments(spec)));
        let mut signals = vec![0; spec.receiver_count()];
        for tile in rows::unit_tiles(spec, &shape, units, &tiles) {
            if tile.has_elements(spec.size.n) {
                signals[destinations[usize::from(tile.destination)].receiver] += shape.raises();
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
        // SAFETY: the arguments are those of the kernel in `portable::source` or `GemmChoice::source`, a test compares their layouts; the
        // rest is the caller's promise.
        unsafe {
            match self.shape.is_portable() {
                true => self.function.launch(stream, &self.launch, &(self.portable_arguments(tensors)?,)),
                false => self.function.launch(stream, &self.launch, &(self.arguments(tensors)?,)),
            }
        }
    }

    /// Whether there are as many addresses as the spec speaks of.
    fn check_tensors(&self, tensors: &GemmTensors<'_>) -> Result<(), GemmFault> {
        let GemmSpec { sources, signals, epilogue, .. } = &self.spec;
        let receivers = self.spec.receiver_count();
        if tensors.d.len() != receivers {
            return Err(GemmFault::AddressesOfD { given: tensors.d.len(), receivers });
        }
        let wanted = sources.iter().map(|source| source.tensor + 1).max().unwrap_or(0);
        if tensors.a.len() != wanted {
            return Err(GemmFault::AddressesOfA { given: tensors.a.len(), tensors: wanted });
        }
        let counters = if *signals == GemmSignals::None { 0 } else { receivers };
        if tensors.counters.len() != counters || tensors.counters.contains(&0) {
            return Err(GemmFault::Counters { given: tensors.counters.to_vec(), wanted: counters });
        }
        if *epilogue == GemmEpilogue::StoreBias && tensors.bias == 0 {
            return Err(GemmFault::NoBias);
        }
        Ok(())
    }
}

/// Refuses GPUs for which there are no kernels that do more than one product: those are made of what Hopper has.
fn check_arch(device: &Device) -> Result<(), CudaError> {
    if device.arch().is_hopper() {
        return Ok(());
    }
    Err(refused(GemmFault::NotHopper(device.capability())))
}

fn refused(fault: impl Into<GemmFault>) -> CudaError {
    CudaError::Launch { kernel: "gemm".to_owned(), reason: fault.into().into() }
}

/// What host and kernels share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    let all = [
        hopper::layouts(),
        portable::layouts(),
        arriving::layouts(),
        gather::layouts(),
        grouped::layouts(),
        reduce::layouts(),
    ];
    all.into_iter().flatten().collect()
}

/// Every kernel that the launchers here may ask for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    source::specialisations().into_iter().chain(portable::specialisations()).collect()
}
