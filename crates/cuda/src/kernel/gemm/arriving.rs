//! The launcher of `gemm/gemm_arriving.cuh`.

use counterpoint_tiles::gemm::{self as tiles, GemmShape, TILE_ROWS, TileOrder};

use super::rows::{self, RowTile};
use super::source::GemmEnds;
use super::{
    GEMM_SOURCES, Gemm, GemmArguments, GemmFault, GemmSignals, GemmSpec, GemmTensors, check_arch, refused,
};
use crate::kernel::{CtaWaits, GemmLayout, WaitLimit};
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, Device, Stream};

/// A product whose first operand's tensors arrive one after the other, in the order of their numbers, while it runs; made ready to run many
/// times. Its result's bits are those of [`Gemm`].
#[derive(Clone, Debug)]
pub struct GemmArriving(Gemm);

/// What a run waits for.
#[derive(Clone, Copy, Debug)]
pub struct GemmArrivalWords<'a> {
    /// Of each tensor of A the address of a u32 that is 0 until it is there, and 0 again when the run has ended; 0 where the tensor is there
    /// before.
    pub words: &'a [u64],
    /// Address of a u32 of the product's own, 0 before the first run.
    pub ended: u64,
    /// How long it waits.
    pub limit: WaitLimit,
}

/// `GemmArrivals` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmArrivals {
    words: [u64; GEMM_SOURCES],
    ended: u64,
    wait: WaitLimit,
}

/// `GemmArrivingArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmArrivingArguments {
    gemm: GemmArguments,
    arrivals: GemmArrivals,
}

impl GemmArriving {
    /// The shapes that it can have on a device, those of the product by itself in its pass: the one that is estimated to be the fastest first.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when no kernel takes it.
    pub fn shapes(device: &Device, spec: &GemmSpec) -> Result<Vec<GemmShape>, CudaError> {
        check_arch(device)?;
        if spec.layout == GemmLayout::Tn {
            return Err(refused(GemmFault::RowsAreK));
        }
        if spec.signals != GemmSignals::None || spec.order != TileOrder::Grouped {
            return Err(refused(GemmFault::ArrivingOrder));
        }
        Gemm::shapes_in_pass(device, spec)
    }

    /// Makes it ready in one of its shapes, by `stream`, which is waited for.
    ///
    /// # Errors
    /// As [`GemmArriving::shapes`]; when the kernel cannot be compiled, or memory is short.
    pub fn with_shape(stream: &Stream, spec: &GemmSpec, shape: GemmShape) -> Result<Self, CudaError> {
        if !Self::shapes(stream.device(), spec)?.contains(&shape) {
            return Err(refused(GemmFault::Shape(Box::new(shape))));
        }
        let mut spec = spec.clone();
        spec.order = TileOrder::Cuts(cuts(&spec, &shape).into());
        let units = tiles::units(&spec.order, &shape, spec.tiled_rows(), spec.size.n).map_err(refused)?;
        Gemm::with_units(stream, &spec, shape, GemmEnds::OfArriving, units, Vec::new()).map(Self)
    }

    /// See [`Gemm::waits`].
    pub fn waits(&self) -> Option<&CtaWaits> {
        self.0.waits()
    }

    /// How it is cut up.
    pub fn shape(&self) -> GemmShape {
        self.0.shape()
    }

    /// Enqueues it. Nothing is allocated; the kernel waits for the words that are given.
    ///
    /// # Safety
    /// As [`Gemm::launch`]. What raises the words is enqueued before, and finds the multiprocessors that it needs besides those that the
    /// product holds; what raises them again follows the end of this kernel. The words live until that.
    ///
    /// # Errors
    /// As [`Gemm::launch`].
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        tensors: &GemmTensors<'_>,
        arrivals: &GemmArrivalWords<'_>,
    ) -> Result<(), CudaError> {
        let GemmArrivalWords { words, ended, limit } = *arrivals;
        if words.len() != tensors.a.len() {
            return Err(refused(GemmFault::ArrivalWords { words: words.len(), tensors: tensors.a.len() }));
        }
        let words = std::array::from_fn(|tensor| words.get(tensor).copied().unwrap_or(0));
        let gemm = self.0.arguments(tensors)?;
        let arguments = GemmArrivingArguments { gemm, arrivals: GemmArrivals { words, ended, wait: limit } };
        // SAFETY: the arguments are those of the kernel in `GemmChoice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.0.function.launch(stream, &self.0.launch, &(arguments,)) }
    }
}

/// Rows of tiles in the order in which the tensors of their rows arrive.
pub(super) fn in_order_of_arrival(mut tiles: Vec<RowTile>) -> Vec<RowTile> {
    // The one that is there to make a unit whole stays the last.
    let Some(filler) = tiles.pop() else { return tiles };
    tiles.sort_by_key(|tile| tile.source);
    tiles.extend(tiles.last().map(|&last| RowTile { rows: filler.rows, ..last }));
    tiles
}

/// Rows of tiles before the first that waits for each tensor but the first one. A unit with rows of two tensors comes with the later one.
fn cuts(spec: &GemmSpec, shape: &GemmShape) -> Vec<usize> {
    let of_unit = shape.unit()[0] / TILE_ROWS;
    let tensors = spec.sources.iter().map(|source| source.tensor).max().map_or(0, |last| last + 1);
    let tiles = rows::row_tiles(&rows::segments(spec));
    let before = |tensor: usize| {
        let earlier = |tile: &&RowTile| tile.rows > 0 && usize::from(tile.source) < tensor;
        tiles.iter().filter(earlier).count() / of_unit * of_unit
    };
    (1..tensors).map(before).collect()
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("gemm/gemm_arriving.cuh", GemmArrivals { words, ended, wait }),
        shared_layout!("gemm/gemm_arriving.cuh", GemmArrivingArguments { gemm, arrivals }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::ElementType;
    use crate::kernel::gemm::{GemmRows, TilePair};

    /// Three ranks' rows in the order of tokens; this one is the second, and two groups come from the others.
    #[test]
    fn tiles_are_in_the_order_in_which_rows_arrive() {
        let own = 384;
        let source = |tensor, first, count| GemmRows { tensor, first, count };
        let mut spec = GemmSpec::new(3 * own, 512, 64, GemmLayout::Nt, ElementType::Bf16);
        spec.sources = vec![
            source(1, 0, 128),
            source(2, 0, 256),
            source(0, 0, own),
            source(1, 256, 128),
            source(2, 512, 256),
        ];
        let tiles = in_order_of_arrival(rows::row_tiles(&rows::segments(&spec)));
        let found: Vec<(u16, u32, u32)> =
            tiles.iter().map(|tile| (tile.source, tile.source_row, tile.destination_row)).collect();
        let wanted = [
            (0, 0, 384),
            (0, 128, 512),
            (0, 256, 640),
            (1, 0, 0),
            (1, 256, 768),
            (2, 0, 128),
            (2, 128, 256),
            (2, 512, 896),
            (2, 640, 1024),
        ];
        assert_eq!(found[..9], wanted);
        // One destination, for its rows follow each other, and a tile of no rows to make the last unit whole.
        assert!(tiles.iter().all(|tile| tile.destination == 0));
        assert_eq!((tiles.len(), tiles[9].rows), (10, 0));
        assert_eq!(cuts(&spec, &GemmShape::whole(256, TilePair::Columns)), [3, 5]);
        // The second unit has the last own rows and the first group's, and waits for those.
        let shape = GemmShape::whole(256, TilePair::Rows);
        assert_eq!(cuts(&spec, &shape), [2, 4]);
        let order = TileOrder::Cuts(cuts(&spec, &shape).into());
        let units = tiles::units(&order, &shape, spec.tiled_rows(), 512).unwrap();
        let last = |unit: &tiles::GemmUnit| {
            let first = usize::from(unit.row_tile);
            tiles[first].source.max(tiles[first + 1].source)
        };
        assert!(units.iter().map(last).is_sorted());
    }
}
