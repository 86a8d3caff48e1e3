//! The launcher of `gemm/gemm_gather.cuh`.

use super::shape::TilingCost;
use super::source::GemmEnds;
use super::{
    GEMM_DESTINATIONS, Gemm, GemmArguments, GemmFault, GemmRows, GemmSpec, GemmTensors, check_arch, refused,
};
use crate::kernel::{CtaWaits, GemmEpilogue, GemmLayout, LinkCall};
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, Device, Stream};
use counterpoint_tiles::gemm::{self as tiles, TOGETHER_ROWS, TileOrder, UnitGrid};
use counterpoint_tiles::gemm::{GemmShape, TILE_ROWS, Warpgroups};

/// A product whose first operand's rows are dealt to ranks, each of which sends its own to all others.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmGatherSpec {
    /// The product of one rank.
    pub product: GemmSpec,
    /// This rank.
    pub rank: usize,
    /// Ranks; each has as many rows of A as every other, one after the other.
    pub ranks: usize,
}

/// Bytes of a rank's rows that leave at once. More keep the tiles that wait for the last of them from beginning with the first.
const AT_ONCE: usize = 2 << 20;

/// [`GemmGatherSpec`] made ready to run many times.
#[derive(Clone, Debug)]
pub struct GemmGather {
    gemm: Gemm,
    spec: GemmGatherSpec,
}

/// Addresses of one run.
#[derive(Clone, Copy, Debug)]
pub struct GemmGatherTensors<'a> {
    /// This rank's rows of A, contiguous.
    pub own: u64,
    /// Of each rank its copy of A `[m, k]`, contiguous, whose rows of its own nobody writes or reads; not looked at where rows leave at
    /// once ([`GemmGather::leaves_at_once`]).
    pub gathered: &'a [u64],
    /// Of each rank the memory for what it counts, and for rows that leave at once: [`GemmGather::exchange_bytes`], zero before the
    /// first run.
    pub exchanges: &'a [u64],
    /// B.
    pub b: u64,
    /// D.
    pub d: u64,
    /// The bias `[n]`, under [`GemmEpilogue::StoreBias`].
    pub bias: u64,
}

/// `GemmGathering` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmGathering {
    link: LinkCall,
    own: u64,
    gathered: [u64; GEMM_DESTINATIONS],
    arrivals: u64,
    peer_arrivals: [u64; GEMM_DESTINATIONS],
    own_bytes: u64,
    block_bytes: u64,
    block_rows: u32,
    blocks: u32,
    own_rows: u32,
    rank: u32,
    ranks: u32,
    pieces: u32,
    piece_bytes: u32,
    sends_to: u32,
    one_by_one: u32,
    copy_rows: u32,
    copy_bytes: u64,
}

/// `GemmGatherArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmGatherArguments {
    gemm: GemmArguments,
    gathering: GemmGathering,
}

impl GemmGatherSpec {
    /// Why no kernel takes it.
    ///
    /// # Errors
    /// With the figures that do not fit.
    pub fn check(&self) -> Result<(), GemmFault> {
        let Self { product, rank, ranks } = self;
        product.check()?;
        if *ranks < 2 || *ranks > GEMM_DESTINATIONS || rank >= ranks {
            return Err(GemmFault::Ranks { rank: *rank, ranks: *ranks, most: GEMM_DESTINATIONS });
        }
        if !product.size.m.is_multiple_of(*ranks) || (self.mixes_owners() && self.own_bytes() > AT_ONCE) {
            let (rows, ranks) = (product.size.m, *ranks);
            return Err(GemmFault::RowsOfGather { rows, ranks, tile: TILE_ROWS, bytes: AT_ONCE });
        }
        if product.strides[0] != product.size.k {
            return Err(GemmFault::RowsApart { stride: product.strides[0], columns: product.size.k });
        }
        if product.output != product.element.scalar() || product.epilogue == GemmEpilogue::Accumulate {
            return Err(GemmFault::ResultIsWritten);
        }
        if product.layout == GemmLayout::Tn {
            return Err(GemmFault::RowsAreK);
        }
        Ok(())
    }

    fn own_bytes(&self) -> usize {
        self.own_rows() * self.product.size.k * self.product.element.bytes()
    }

    /// Whether tiles have rows of several ranks.
    fn mixes_owners(&self) -> bool {
        !self.own_rows().is_multiple_of(TILE_ROWS)
    }

    /// Whether tiles are taken as those of any product are, because none can do without what comes last: few rows are all computed
    /// at the same time, and what they share is B. Others begin with the rank's own and follow the ranks after it.
    fn awaits_all(&self) -> bool {
        self.pieces().is_some() && (self.mixes_owners() || self.own_rows() <= TILE_ROWS)
    }

    /// The order of tiles. Where each rank has fewer rows than are computed together, as many of its own come first as are computed
    /// while the others' travel, and then all rows together, which read the second operand once.
    fn order(&self, shape: &GemmShape) -> TileOrder {
        /// Units that are computed at the same time.
        const ROUND: usize = 66;
        /// Cycles until the first rows have come, and bytes that come in a cycle while tiles are computed.
        const FIRST: f64 = 26_000.0;
        const BYTES: f64 = 150.0;
        let (shards, first) = (self.ranks, self.rank);
        if self.awaits_all() {
            return TileOrder::Grouped;
        }
        let grid = UnitGrid::new(shape, self.own_rows(), self.product.size.n);
        let travel = FIRST + (self.own_bytes() * (self.ranks - 1)) as f64 / BYTES;
        let rounds = (travel / shape.unit_cycles(&self.product)).ceil() as usize;
        let ahead = (rounds * ROUND).div_ceil(grid.rows);
        if self.own_rows() < TOGETHER_ROWS && ahead < grid.columns {
            TileOrder::ShardAhead { shards, first, ahead }
        } else {
            TileOrder::Shards { shards, first }
        }
    }

    /// Pieces in which a rank's rows leave at once, and the bytes of one; `None` where they go block by block.
    fn pieces(&self) -> Option<[u32; 2]> {
        /// Pieces that small ones are: each ends with fences, which follow each other.
        const FEW: usize = 32;
        /// Shared memory that a CTA has for one (`GemmShared::staging`).
        const MOST_BYTES: usize = 32 << 10;
        let bytes = self.own_bytes();
        let piece = bytes.div_ceil(FEW).next_multiple_of(1024).min(MOST_BYTES);
        (bytes <= AT_ONCE).then(|| [bytes.div_ceil(piece) as u32, piece as u32])
    }

    /// Rows of a block, which travels as one: whole tiles, of a few megabytes, because each ends with a fence that waits until
    /// all of it has been stored; fewer where groups of CTAs would have none.
    fn block_rows(&self) -> usize {
        if self.pieces().is_some() {
            return self.own_rows();
        }
        const BYTES: usize = 4 << 20;
        /// Groups of CTAs that copy a block each (`groups`).
        const GROUPS: usize = 4;
        let tile = TILE_ROWS * self.product.size.k * self.product.element.bytes();
        let tiles = self.own_rows() / TILE_ROWS;
        let of_each_group = (tiles * (self.ranks - 1) / GROUPS).max(1);
        BYTES.div_ceil(tile).min(of_each_group).min(tiles) * TILE_ROWS
    }

    /// A's rows: of its copy those of the other ranks, and this rank's own.
    fn sources(&self) -> Vec<GemmRows> {
        let own = self.own_rows();
        if self.mixes_owners() {
            return vec![GemmRows { tensor: 0, first: 0, count: self.product.size.m }];
        }
        let first = self.rank * own;
        let after = GemmRows { tensor: 0, first: first + own, count: self.product.size.m - first - own };
        let sources = [
            GemmRows { tensor: 0, first: 0, count: first },
            GemmRows { tensor: 1, first: 0, count: own },
            after,
        ];
        sources.into_iter().filter(|rows| rows.count > 0).collect()
    }

    fn own_rows(&self) -> usize {
        self.product.size.m / self.ranks
    }
}

impl GemmGather {
    /// The shapes that it can have on a device, the one that is estimated to be the fastest first: those of the product by
    /// itself in its pass whose units lie within one rank's, and whose warpgroups compute each tile together: in turn they have not run
    /// on GPUs whose ranks wait for each other.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when no kernel takes it.
    pub fn shapes(device: &Device, spec: &GemmGatherSpec) -> Result<Vec<GemmShape>, CudaError> {
        check_arch(device)?;
        spec.check().map_err(refused)?;
        let in_rank = |shape: &GemmShape| spec.own_rows().is_multiple_of(shape.unit()[0]);
        let fits = |shape: &GemmShape| spec.awaits_all() || in_rank(shape);
        let mut shapes = Gemm::shapes_in_pass(device, &spec.product)?;
        shapes.retain(|shape| shape.warpgroups == Warpgroups::Cooperative && fits(shape));
        Ok(shapes)
    }

    /// Makes it ready in one of its shapes, by `stream`, which is waited for. All ranks must take the same.
    ///
    /// # Errors
    /// As [`GemmGather::shapes`]; when the kernel cannot be compiled, or memory is short.
    pub fn with_shape(stream: &Stream, spec: &GemmGatherSpec, shape: GemmShape) -> Result<Self, CudaError> {
        if !Self::shapes(stream.device(), spec)?.contains(&shape) {
            return Err(refused(GemmFault::Shape(shape.into())));
        }
        let mut product = spec.product.clone();
        product.sources = spec.sources();
        product.order = spec.order(&shape);
        let units = tiles::units(&product.order, &shape, product.size.m, product.size.n).map_err(refused)?;
        let gemm = Gemm::with_units(stream, &product, shape, GemmEnds::RowsOfRanks, units, Vec::new())?;
        Ok(Self { gemm, spec: spec.clone() })
    }

    /// See [`Gemm::waits`].
    pub fn waits(&self) -> Option<&CtaWaits> {
        self.gemm.waits()
    }

    /// How it is cut up.
    pub fn shape(&self) -> GemmShape {
        self.gemm.shape()
    }

    /// CTAs of a launch, each of which counts what it has sent: the same on all ranks.
    pub fn ctas(&self) -> u32 {
        self.gemm.ctas
    }

    fn blocks(&self) -> usize {
        self.spec.own_rows().div_ceil(self.spec.block_rows())
    }

    /// Whether rows leave at once, into memory of the exchange's own, and nothing is written to the copies of A.
    pub fn leaves_at_once(&self) -> bool {
        self.spec.pieces().is_some()
    }

    fn arrival_bytes(&self) -> usize {
        (self.spec.ranks * self.blocks() * size_of::<u64>()).next_multiple_of(256)
    }

    fn copy_bytes(&self) -> usize {
        if self.leaves_at_once() { self.spec.own_bytes() * self.spec.ranks } else { 0 }
    }

    /// Bytes of a rank's memory for what comes from others: words that count it and, where rows leave at once, two copies of A, of
    /// which calls use one and the other.
    pub fn exchange_bytes(&self) -> usize {
        self.arrival_bytes() + 2 * self.copy_bytes()
    }

    /// Enqueues it. Nothing is allocated; the kernel waits for the other ranks' as `link` says, each of which is on a GPU of
    /// its own.
    ///
    /// # Safety
    /// As [`Gemm::launch`], also for the memory of the other ranks. All ranks make the same calls in the same order, and
    /// enqueue nothing concurrently with them whose kernels wait for other ranks.
    ///
    /// # Errors
    /// As [`Gemm::launch`].
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        tensors: &GemmGatherTensors<'_>,
        link: &LinkCall,
    ) -> Result<(), CudaError> {
        let GemmGatherSpec { rank, ranks, ref product } = self.spec;
        let GemmGatherTensors { own, gathered, exchanges, b, d, bias } = *tensors;
        if gathered.len() != ranks || exchanges.len() != ranks {
            let (copies, exchanges) = (gathered.len(), exchanges.len());
            return Err(refused(GemmFault::RanksOfLaunch { what: "copies", copies, exchanges, ranks }));
        }
        let at = |addresses: &[u64], offset: usize| -> [u64; GEMM_DESTINATIONS] {
            std::array::from_fn(|peer| addresses.get(peer).map_or(0, |address| address + offset as u64))
        };
        let copies = match self.leaves_at_once() {
            true => at(exchanges, self.arrival_bytes()),
            false => at(gathered, 0),
        };
        let a = [copies[rank], own];
        // Tiles with rows of several ranks read all of them from the copy.
        let a = if self.spec.mixes_owners() { &a[..1] } else { &a };
        let mut gemm = self.gemm.arguments(&GemmTensors { a, b, d: &[d], bias, counters: &[] })?;
        if self.leaves_at_once() {
            gemm.a_maps[0] = self.gemm.map_of_a(copies[rank], 2 * product.size.m)?;
        }
        let (own_rows, block_rows) = (self.spec.own_rows(), self.spec.block_rows());
        let row_bytes = product.size.k * product.element.bytes();
        let [pieces, piece_bytes] = self.spec.pieces().unwrap_or_default();
        let all = (1u32 << ranks) - 1;
        let gathering = GemmGathering {
            link: *link,
            own,
            gathered: copies.map(|copy| copy + (rank * own_rows * row_bytes) as u64),
            arrivals: exchanges[rank],
            peer_arrivals: at(exchanges, rank * self.blocks() * size_of::<u64>()),
            own_bytes: (own_rows * row_bytes) as u64,
            block_bytes: (block_rows * row_bytes) as u64,
            block_rows: block_rows as u32,
            blocks: self.blocks() as u32,
            own_rows: own_rows as u32,
            rank: rank as u32,
            ranks: ranks as u32,
            pieces,
            piece_bytes,
            sends_to: if self.spec.mixes_owners() { all } else { all & !(1 << rank) },
            one_by_one: u32::from(!self.spec.awaits_all()),
            copy_rows: if self.leaves_at_once() { product.size.m as u32 } else { 0 },
            copy_bytes: self.copy_bytes() as u64,
        };
        let arguments = GemmGatherArguments { gemm, gathering };
        // SAFETY: the arguments are those of the kernel in `GemmChoice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.gemm.function.launch(stream, &self.gemm.launch, &(arguments,)) }
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!(
            "gemm/gemm_gather.cuh",
            GemmGathering {
                link,
                own,
                gathered,
                arrivals,
                peer_arrivals,
                own_bytes,
                block_bytes,
                block_rows,
                blocks,
                own_rows,
                rank,
                ranks,
                pieces,
                piece_bytes,
                sends_to,
                one_by_one,
                copy_rows,
                copy_bytes,
            }
        ),
        shared_layout!("gemm/gemm_gather.cuh", GemmGatherArguments { gemm, gathering }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::ElementType;
    use crate::kernel::gemm::TilePair;

    fn spec(m: usize, k: usize, ranks: usize) -> GemmGatherSpec {
        let product = GemmSpec::new(m, 256, k, GemmLayout::Nt, ElementType::Bf16);
        GemmGatherSpec { product, rank: 0, ranks }
    }

    #[test]
    fn what_no_kernel_takes_is_refused_with_figures() {
        assert_eq!(spec(512, 64, 4).check(), Ok(()));
        assert!(spec(512, 64, 3).check().unwrap_err().to_string().contains("512 rows of 3"));
        assert!(spec(512, 64, 1).check().unwrap_err().to_string().contains("rank 0 of 1"));
        let mut apart = spec(512, 64, 4);
        apart.product.strides[0] = 128;
        assert!(apart.check().unwrap_err().to_string().contains("128 elements apart"));
    }

    #[test]
    fn blocks_are_whole_tiles_of_a_few_megabytes() {
        assert_eq!(spec(16384, 8192, 2).block_rows(), 256);
        assert_eq!(spec(16384, 12288, 2).block_rows(), 256);
        assert_eq!(spec(16384, 65536, 2).block_rows(), 128);
        assert_eq!(spec(16384, 1024, 2).block_rows(), 2048);
        // Four groups of CTAs copy them.
        assert_eq!(spec(1024, 16384, 4).block_rows(), 128);
        assert_eq!(spec(8192, 1024, 4).block_rows(), 1536);
    }

    #[test]
    fn own_tiles_come_first_while_rows_travel() {
        let order = |m: usize, n: usize| {
            let product = GemmSpec::new(m, n, 8192, GemmLayout::Nt, ElementType::Bf16);
            let shape = GemmShape::whole(224, TilePair::Rows);
            GemmGatherSpec { product, rank: 1, ranks: 2 }.order(&shape)
        };
        assert_eq!(order(512, 28672), TileOrder::ShardAhead { shards: 2, first: 1, ahead: 66 });
        // Own tiles are no more than what hides the others' way, or as many as are computed together anyway.
        assert_eq!(order(2048, 5120), TileOrder::Shards { shards: 2, first: 1 });
        assert_eq!(order(8192, 28672), TileOrder::Shards { shards: 2, first: 1 });
        // All wait for all.
        assert_eq!(order(128, 28672), TileOrder::Grouped);
    }

    #[test]
    fn few_rows_leave_at_once_in_pieces_that_cover_them() {
        for (m, k, ranks) in [(128, 4096, 4), (512, 4096, 4), (1024, 4096, 4), (16, 64, 2), (96, 8, 2)] {
            let spec = spec(m, k, ranks);
            let [pieces, bytes] = spec.pieces().unwrap();
            let covered = (pieces * bytes) as usize;
            assert!((spec.own_bytes()..spec.own_bytes() + bytes as usize).contains(&covered), "{m} x {k}");
            assert!(bytes <= 32 << 10 && spec.block_rows() == m / ranks);
        }
        assert_eq!(spec(2048, 4096, 4).pieces(), None);
        // Tiles with rows of several owners read all of them from the copy.
        assert_eq!(spec(128, 4096, 4).sources(), [GemmRows { tensor: 0, first: 0, count: 128 }]);
        assert!(spec(1000, 16384, 4).check().unwrap_err().to_string().contains("1000 rows of 4 ranks"));
    }
}
