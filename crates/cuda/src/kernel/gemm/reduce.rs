//! The launcher of `gemm/gemm_reduce.cuh`.

use super::shape::TilingCost;
use super::source::GemmEnds;
use super::{
    GEMM_DESTINATIONS, Gemm, GemmArguments, GemmFault, GemmSpec, GemmTensors, STORED_ROWS, check_arch,
    refused,
};
use crate::kernel::{CtaWaits, GemmEpilogue, GemmLayout, LinkCall};
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, Device, Stream};
use counterpoint_tiles::gemm::{self as tiles, GemmUnit, TileOrder, UnitGrid};
use counterpoint_tiles::gemm::{GemmShape, ProblemSize, TILE_ROWS, TilePair, Warpgroups};

/// A product whose rows are summed over ranks, each of which keeps, or spreads, the sums of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmReduceSpec {
    /// The product of one rank.
    pub product: GemmSpec,
    /// This rank.
    pub rank: usize,
    /// Ranks; each has as many rows as every other, one after the other.
    pub ranks: usize,
    /// Whether all ranks get all sums, or each its own.
    pub spread: SumsGoTo,
}

/// Who gets sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumsGoTo {
    /// The rank that owns the rows: a reduce-scatter.
    Owner,
    /// All ranks: an all-reduce.
    All,
}

/// Rows of each rank that are no tile but slices of one, which a warp or several have (`GemmReduction::own_rows`).
const SLICES: [usize; 3] = [16, 32, 64];

/// Bytes that a rank sends in a cycle, as measured on H200s: 380 GB/s.
const LINK_BYTES: f64 = 220.0;

/// [`GemmReduceSpec`] made ready to run many times.
#[derive(Clone, Debug)]
pub struct GemmReduce {
    gemm: Gemm,
    spec: GemmReduceSpec,
}

/// Addresses of one run.
#[derive(Clone, Copy, Debug)]
pub struct GemmReduceTensors<'a> {
    /// A.
    pub a: u64,
    /// B.
    pub b: u64,
    /// The bias `[n]`, under [`GemmEpilogue::StoreBias`].
    pub bias: u64,
    /// Of each rank the memory that it has for what others send it: [`GemmReduce::exchange_bytes`], zero before the first run.
    pub exchanges: &'a [u64],
    /// Of each rank that gets them, this rank's rows of the sums `[m / ranks, n]`; others are not looked at.
    pub sums: &'a [u64],
}

/// `GemmReduction` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmReduction {
    link: LinkCall,
    parts: u64,
    stamps: u64,
    peer_parts: [u64; GEMM_DESTINATIONS],
    peer_stamps: [u64; GEMM_DESTINATIONS],
    sums: [u64; GEMM_DESTINATIONS],
    part_bytes: u64,
    stamps_of_rank: u32,
    own_rows: u32,
    rank: u32,
    ranks: u32,
    spreads: u32,
}

/// `GemmReduceArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmReduceArguments {
    gemm: GemmArguments,
    reduction: GemmReduction,
}

impl GemmReduceSpec {
    /// Why no kernel takes it.
    ///
    /// # Errors
    /// With the figures that do not fit.
    pub fn check(&self) -> Result<(), GemmFault> {
        let Self { product, rank, ranks, .. } = self;
        product.check()?;
        let ProblemSize { m, n, .. } = product.size;
        if *ranks < 2 || *ranks > GEMM_DESTINATIONS || rank >= ranks {
            return Err(GemmFault::Ranks { rank: *rank, ranks: *ranks, most: GEMM_DESTINATIONS });
        }
        let whole = m.is_multiple_of(ranks * TILE_ROWS);
        if !whole && !SLICES.iter().any(|slice| m == ranks * slice) {
            let (ranks, slices) = (*ranks, SLICES.to_vec());
            return Err(GemmFault::RowsOfSum { rows: m, ranks, tile: TILE_ROWS, slices });
        }
        if !n.is_multiple_of(8) {
            return Err(GemmFault::ColumnsOfSum { columns: n });
        }
        if product.output != product.element.scalar() || product.epilogue == GemmEpilogue::Accumulate {
            return Err(GemmFault::SumIsWritten);
        }
        if product.layout == GemmLayout::Tn {
            return Err(GemmFault::GradientIsSummed);
        }
        Ok(())
    }

    fn own_rows(&self) -> usize {
        self.product.size.m / self.ranks
    }

    /// Blocks in which sums that everyone gets are made. Sums that take longer to be sent than to be computed are begun before all of
    /// the others' parts are; what is left of that at the end is a block's. Each of the others' blocks is a round of the
    /// multiprocessors, so that parts have come when a rank adds them.
    fn blocks(&self, shape: &GemmShape) -> usize {
        /// Units that are computed at the same time.
        const ROUND: usize = 66;
        /// What may be left, of the whole product.
        const LEFT: f64 = 0.04;
        let units = UnitGrid::new(shape, self.own_rows(), self.product.size.n).count();
        let others = units * (self.ranks - 1);
        let own_cycles = units as f64 / ROUND as f64 * shape.unit_cycles(&self.product);
        let late = self.spread_cycles(self.own_rows() * self.product.size.n) - own_cycles;
        let wanted = (late / (LEFT * own_cycles * self.ranks as f64)).ceil();
        // Less than one where nothing is late.
        (wanted as usize).clamp(1, (others / ROUND).max(1))
    }

    /// Cycles in which a rank sends so many sums to all others.
    fn spread_cycles(&self, sums: usize) -> f64 {
        (sums * (self.ranks - 1) * self.product.element.bytes()) as f64 / LINK_BYTES
    }

    /// An estimate of the cycles that it takes in a shape: those of the product; the others' parts of the last tiles, which are sent
    /// while nothing is multiplied; and the last block of sums that everyone gets.
    fn cycles(&self, shape: &GemmShape, sm_count: u32) -> f64 {
        /// What the last sums take besides their bytes' time on the links: measured 2.2 to 2.7 on four H200s.
        const LAST: f64 = 2.2;
        let columns = shape.columns as usize;
        let own = self.own_rows() / TILE_ROWS * self.product.size.n.div_ceil(columns);
        let (tiles, at_once) = (own * self.ranks, sm_count.max(1) as usize);
        let last = (tiles - 1) % at_once + 1;
        let (blocks, sums) = match self.spread {
            SumsGoTo::Owner => (1, 0.0),
            SumsGoTo::All => {
                let blocks = self.blocks(shape);
                (blocks, LAST * self.spread_cycles(self.own_rows() * self.product.size.n / blocks))
            }
        };
        let parts = last.saturating_sub(own / blocks) * TILE_ROWS * columns * self.product.element.bytes();
        shape.cost(&self.product, sm_count) + parts as f64 / LINK_BYTES + sums
    }

    /// Parts of its rows that are computed one after the other, those of one rank each; one part where tiles have rows of several.
    fn shards(&self) -> usize {
        if self.own_rows() < TILE_ROWS { 1 } else { self.ranks }
    }
}

impl GemmReduce {
    /// The shapes that it can have on a device, the one that is estimated to be the fastest first: those of the product by
    /// itself in its pass, whose units lie within one rank's, or, where those are no tile, within one row of tiles. Parts of k follow
    /// each other or are handed over, since what is sent of a tile ends in one CTA, and warpgroups compute each tile together.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when no kernel takes it.
    pub fn shapes(device: &Device, spec: &GemmReduceSpec) -> Result<Vec<GemmShape>, CudaError> {
        check_arch(device)?;
        spec.check().map_err(refused)?;
        let (rows, shards) = (spec.own_rows(), spec.shards());
        // Both tiles of a unit alternate in the ring for what comes of them, or neither.
        let fits = |shape: &GemmShape| match shards {
            1 => shape.pair == TilePair::Columns,
            _ => rows.is_multiple_of(shape.unit()[0]),
        };
        let one_end = |shape: &GemmShape| {
            shape.splits == 1
                && shape.warpgroups == Warpgroups::Cooperative
                && GemmShape::sums_over_ranks(shape.columns)
        };
        let mut shapes: Vec<GemmShape> = Gemm::shapes_in_pass(device, &spec.product)?
            .into_iter()
            .filter(|shape| one_end(shape) && fits(shape))
            .collect();
        if shards > 1 {
            let cycles = |shape: &GemmShape| spec.cycles(shape, device.sm_count());
            shapes.sort_by(|a, b| cycles(a).total_cmp(&cycles(b)));
        }
        Ok(shapes)
    }

    /// Makes it ready in one of its shapes, by `stream`, which is waited for. All ranks must take the same.
    ///
    /// # Errors
    /// As [`GemmReduce::shapes`]; when the kernel cannot be compiled, or memory is short.
    pub fn with_shape(stream: &Stream, spec: &GemmReduceSpec, shape: GemmShape) -> Result<Self, CudaError> {
        if !Self::shapes(stream.device(), spec)?.contains(&shape) {
            return Err(refused(GemmFault::Shape(shape.into())));
        }
        let mut product = spec.product.clone();
        product.order = match spec.shards() {
            // All ranks alike: each waits for parts of a tile that it has itself just sent.
            1 => TileOrder::Grouped,
            shards => {
                let first = (spec.rank + 1) % shards;
                match spec.spread {
                    SumsGoTo::Owner => TileOrder::Shards { shards, first },
                    SumsGoTo::All => TileOrder::ShardBlocks { shards, first, blocks: spec.blocks(&shape) },
                }
            }
        };
        let mut units =
            tiles::units(&product.order, &shape, product.size.m, product.size.n).map_err(refused)?;
        number_in_shards(&mut units, &shape, &product, spec.shards());
        let gemm = Gemm::with_units(stream, &product, shape, GemmEnds::SumOverRanks, units, Vec::new())?;
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

    /// Parts of tiles that one rank sends to one other.
    fn parts(&self) -> usize {
        let rows = self.spec.product.size.m / self.spec.shards();
        // Of each of a unit's two tiles, one from each warpgroup.
        UnitGrid::new(&self.gemm.shape, rows, self.spec.product.size.n).count() * 4
    }

    fn part_bytes(&self) -> usize {
        self.parts() * (TILE_ROWS / 2) * self.gemm.shape.columns as usize * self.spec.product.element.bytes()
    }

    fn stamp_bytes(&self) -> usize {
        (self.spec.ranks * self.parts() * size_of::<u64>()).next_multiple_of(256)
    }

    /// Bytes of a rank's memory for what the others send it.
    pub fn exchange_bytes(&self) -> usize {
        self.stamp_bytes() + self.spec.ranks * self.part_bytes()
    }

    /// Bytes at its beginning that must be zero before the first run.
    pub fn zeroed_bytes(&self) -> usize {
        self.stamp_bytes()
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
        tensors: &GemmReduceTensors<'_>,
        link: &LinkCall,
    ) -> Result<(), CudaError> {
        let GemmReduceSpec { rank, ranks, spread, .. } = self.spec;
        let GemmReduceTensors { a, b, bias, exchanges, sums } = *tensors;
        if exchanges.len() != ranks || sums.len() != ranks {
            let (copies, exchanges) = (sums.len(), exchanges.len());
            return Err(refused(GemmFault::RanksOfLaunch { what: "sums", copies, exchanges, ranks }));
        }
        let (own, own_rows) = (sums[rank], self.spec.own_rows());
        let mut gemm = self.gemm.arguments(&GemmTensors { a: &[a], b, d: &[own], bias, counters: &[] })?;
        for (peer, map) in gemm.d_maps[..ranks].iter_mut().enumerate() {
            // Nobody stores to ranks that get no sums.
            let to = if spread == SumsGoTo::All { sums[peer] } else { own };
            *map = self.gemm.map_of_d(to, own_rows, own_rows.min(STORED_ROWS))?;
        }
        let mut peer_parts = [0; GEMM_DESTINATIONS];
        let mut peer_stamps = [0; GEMM_DESTINATIONS];
        for peer in 0..ranks {
            peer_stamps[peer] = exchanges[peer] + (rank * self.parts() * size_of::<u64>()) as u64;
            peer_parts[peer] = exchanges[peer] + (self.stamp_bytes() + rank * self.part_bytes()) as u64;
        }
        let reduction = GemmReduction {
            link: *link,
            parts: exchanges[rank] + self.stamp_bytes() as u64,
            stamps: exchanges[rank],
            peer_parts,
            peer_stamps,
            sums: std::array::from_fn(|peer| sums.get(peer).copied().unwrap_or(0)),
            part_bytes: self.part_bytes() as u64,
            stamps_of_rank: self.parts() as u32,
            own_rows: own_rows as u32,
            rank: rank as u32,
            ranks: ranks as u32,
            spreads: u32::from(spread == SumsGoTo::All),
        };
        let arguments = GemmReduceArguments { gemm, reduction };
        // SAFETY: the arguments are those of the kernel in `GemmChoice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.gemm.function.launch(stream, &self.gemm.launch, &(arguments,)) }
    }
}

/// Gives every unit its number among those of its shard, in the order in which all ranks count them.
fn number_in_shards(units: &mut [GemmUnit], shape: &GemmShape, product: &GemmSpec, shards: usize) {
    let grid = UnitGrid::new(shape, product.size.m / shards, product.size.n);
    let [row_tiles, column_tiles] = match shape.pair {
        TilePair::Rows => [2, 1],
        TilePair::Columns => [1, 2],
    };
    for unit in units {
        let row = usize::from(unit.row_tile) / row_tiles % grid.rows;
        unit.group = (row * grid.columns + usize::from(unit.column_tile) / column_tiles) as u32;
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!(
            "gemm/gemm_reduce.cuh",
            GemmReduction {
                link,
                parts,
                stamps,
                peer_parts,
                peer_stamps,
                sums,
                part_bytes,
                stamps_of_rank,
                own_rows,
                rank,
                ranks,
                spreads,
            }
        ),
        shared_layout!("gemm/gemm_reduce.cuh", GemmReduceArguments { gemm, reduction }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::ElementType;

    fn spec(m: usize, n: usize, ranks: usize) -> GemmReduceSpec {
        let product = GemmSpec::new(m, n, 512, GemmLayout::Nt, ElementType::Bf16);
        GemmReduceSpec { product, rank: 0, ranks, spread: SumsGoTo::Owner }
    }

    #[test]
    fn what_no_kernel_takes_is_refused_with_figures() {
        assert_eq!(spec(512, 264, 4).check(), Ok(()));
        assert_eq!(spec(256, 264, 4).check(), Ok(()));
        assert!(spec(512, 264, 3).check().unwrap_err().to_string().contains("512 rows of 3"));
        assert!(spec(384, 264, 2).check().unwrap_err().to_string().contains("384 rows of 2"));
        assert!(spec(512, 260, 2).check().unwrap_err().to_string().contains("260"));
        assert!(spec(512, 256, 9).check().unwrap_err().to_string().contains("9"));
    }

    #[test]
    fn sums_that_links_hold_up_are_begun_early() {
        let blocks = |m: usize, n: usize, k: usize| {
            let product = GemmSpec::new(m, n, k, GemmLayout::Nt, ElementType::Bf16);
            let spec = GemmReduceSpec { product, rank: 0, ranks: 4, spread: SumsGoTo::All };
            spec.blocks(&GemmShape::whole(256, TilePair::Rows))
        };
        assert_eq!(blocks(8192, 8192, 14336), 1);
        assert_eq!(blocks(8192, 12288, 6144), 1);
        assert_eq!(blocks(8192, 8192, 3584), 6);
        // Not before there is a round of others' parts.
        assert_eq!(blocks(2048, 8192, 4096), 2);
        assert_eq!(blocks(1024, 1024, 1024), 1);
    }

    /// As measured on four H200s, rows by 8192 x 4096.
    #[test]
    fn few_rows_take_narrow_tiles_where_the_last_ones_wait_for_links() {
        let best = |m: usize, spread| {
            let product = GemmSpec::new(m, 8192, 4096, GemmLayout::Nt, ElementType::Bf16);
            let spec = GemmReduceSpec { product, rank: 0, ranks: 4, spread };
            let shapes =
                |columns| [TilePair::Rows, TilePair::Columns].map(|pair| GemmShape::whole(columns, pair));
            let mut all: Vec<GemmShape> = [128, 256].into_iter().flat_map(shapes).collect();
            all.retain(|shape| spec.own_rows().is_multiple_of(shape.unit()[0]));
            all.sort_by(|a, b| spec.cycles(a, 132).total_cmp(&spec.cycles(b, 132)));
            all[0].columns
        };
        assert_eq!([512, 1024, 2048].map(|m| best(m, SumsGoTo::Owner)), [128, 128, 256]);
        assert_eq!([512, 1024, 2048, 8192].map(|m| best(m, SumsGoTo::All)), [128, 128, 128, 256]);
    }

    /// Every rank counts an owner's units alike, whatever its order, and each number is taken once.
    #[test]
    fn units_are_numbered_within_their_shard() {
        let (ranks, m, n) = (4, 2048, 1000);
        for pair in [TilePair::Rows, TilePair::Columns] {
            let shape = GemmShape::whole(160, pair);
            let product = &spec(m, n, ranks).product;
            let numbered = |first: usize| {
                let order = TileOrder::Shards { shards: ranks, first };
                let mut units = tiles::units(&order, &shape, m, n).unwrap();
                number_in_shards(&mut units, &shape, product, ranks);
                units.sort_by_key(|unit| (unit.row_tile, unit.column_tile));
                units
            };
            let all = numbered(0);
            assert_eq!(all, numbered(3));
            let of_shard = all.len() / ranks;
            for shard in all.chunks(of_shard) {
                let mut numbers: Vec<u32> = shard.iter().map(|unit| unit.group).collect();
                numbers.sort_unstable();
                assert_eq!(numbers, (0..of_shard as u32).collect::<Vec<_>>());
            }
        }
    }
}
