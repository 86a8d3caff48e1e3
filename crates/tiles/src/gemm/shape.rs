//! How a GEMM is tiled: tile size, cooperative or ping-pong warpgroups or warps by themselves, split-k.

use std::collections::BTreeSet;

use super::GemmLayout;

/// Rows of a tile (`kGemmTileM`).
pub const TILE_ROWS: usize = 128;
/// Depth of a block (`kGemmBlockK`).
pub const BLOCK: usize = 64;

/// Where the second tile of a unit lies, and so which operand its CTAs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TilePair {
    /// Below the first: B is shared.
    Rows,
    /// Besides it: A is shared.
    Columns,
}

/// Who of a CTA multiplies, and how they share its tiles; of the two warpgroups on Hopper in CUTLASS's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Warpgroups {
    /// Each has 64 rows of every tile.
    Cooperative,
    /// They take tiles in turn, so that one's storing is hidden by the other's products.
    Pingpong,
    /// There are none: each warp has a part of every tile (mma.sync, on every GPU since Ampere).
    Warps {
        /// Depth of a block of k.
        block: u32,
        /// Blocks in shared memory.
        stages: u32,
    },
}

impl Warpgroups {
    /// Columns of the tiles that there are kernels for. One warpgroup's registers hold the sums of 192 columns of 128 rows.
    pub const fn columns(self) -> &'static [u32] {
        match self {
            Self::Cooperative => &[64, 80, 128, 160, 192, 224, 256],
            Self::Pingpong => &[128, 160, 176, 192],
            Self::Warps { .. } => &[64, 128, 256],
        }
    }
}

/// How a product is cut up: tiles of 128 rows, two to a unit, and each unit's k into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmShape {
    /// Columns of a tile.
    pub columns: u32,
    /// Where the second tile of a unit lies.
    pub pair: TilePair,
    /// Who computes a tile; both together where k is in parts.
    pub warpgroups: Warpgroups,
    /// Parts of k, which the CTAs of a cluster compute at the same time and sum in their order.
    pub splits: u32,
    /// Or 2 parts of k, which the same CTAs compute one after the other: 1 where there are several of the above.
    pub serial_parts: u32,
    /// Or 2 parts of k, the first of which one pair of CTAs handed_parts over to another through memory: 1 where there are several of the
    /// above.
    pub handed_parts: u32,
}

impl GemmShape {
    /// Threads of a CTA.
    pub const THREADS: u32 = 384;

    /// All of k at once, each tile by both warpgroups.
    pub const fn whole(columns: u32, pair: TilePair) -> Self {
        Self {
            columns,
            pair,
            warpgroups: Warpgroups::Cooperative,
            splits: 1,
            serial_parts: 1,
            handed_parts: 1,
        }
    }

    /// Bytes of a block of k. Where B lies along n, whole chunks of 64 columns are loaded.
    const fn stage_bytes(columns: u32, layout: GemmLayout) -> u32 {
        let loaded = match layout {
            GemmLayout::Nt => columns,
            GemmLayout::Nn | GemmLayout::Tn => columns.next_multiple_of(64),
        };
        (TILE_ROWS as u32 + loaded) * 128
    }

    /// What of `GemmShared` is no block of k: results on their way, records and barriers, and what aligning it to 1024 bytes may take.
    const BYTES_OUTSIDE_STAGES: u32 = (32 << 10) + 1024 + 1024;

    /// Blocks of k on their way at once: as many as shared memory holds. From a load to its bytes pass 1300 cycles and more, in which the
    /// tensor cores work through two blocks of 160 columns.
    pub const fn stages(columns: u32, layout: GemmLayout) -> u32 {
        /// What a CTA may have.
        const SHARED_BYTES: u32 = 232_448;
        (SHARED_BYTES - Self::BYTES_OUTSIDE_STAGES) / Self::stage_bytes(columns, layout)
    }

    /// Dynamic shared memory of a CTA.
    pub const fn shared_bytes(columns: u32, layout: GemmLayout) -> u32 {
        Self::stages(columns, layout) * Self::stage_bytes(columns, layout) + Self::BYTES_OUTSIDE_STAGES
    }

    /// Whether there are kernels that hand parts of k over: wider tiles have no registers for it, and are for more rows.
    pub const fn hands_over(columns: u32, layout: GemmLayout) -> bool {
        columns <= 192 && !matches!(layout, GemmLayout::Tn)
    }

    /// Whether there are kernels that sum tiles of so many columns over ranks: what is sent comes in chunks of 32 columns and more.
    pub const fn sums_over_ranks(columns: u32) -> bool {
        columns.is_multiple_of(32)
    }

    /// Columns of elements that are stored at once (`kChunkColumns`).
    pub const fn chunk_columns(&self) -> u32 {
        match self.columns % 64 {
            0 => 64,
            32 => 32,
            _ => 16,
        }
    }

    /// The same of f32 (`kWideColumns`).
    pub const fn wide_columns(&self) -> u32 {
        if self.chunk_columns() < 32 { self.chunk_columns() } else { 32 }
    }

    /// Rows and columns of a unit.
    pub const fn unit(&self) -> [usize; 2] {
        match self.pair {
            TilePair::Rows => [2 * TILE_ROWS, self.columns as usize],
            TilePair::Columns => [TILE_ROWS, 2 * self.columns as usize],
        }
    }

    /// Pieces of a tile that parts sum, in turn (`GemmParts::kPieces`).
    pub const fn pieces(&self) -> u32 {
        2 * self.columns / self.chunk_columns()
    }

    /// How often a tile's signal is raised: by the warpgroups that store some of it, number `piece % 2` of part `piece % splits`, or once by all
    /// warps together.
    pub fn raises(&self) -> u32 {
        if self.is_portable() {
            return 1;
        }
        let all = (0..self.pieces()).map(|piece| [piece % 2, piece % self.splits.max(1)]);
        all.collect::<BTreeSet<_>>().len() as u32
    }

    /// Whether every GPU since Ampere can have it.
    pub const fn is_portable(&self) -> bool {
        matches!(self.warpgroups, Warpgroups::Warps { .. })
    }

    /// Parts of k whose sums are added: what the bits of a result depend on.
    pub const fn parts(&self) -> u32 {
        self.splits * self.serial_parts * self.handed_parts
    }
}
