//! Tiles whose bands lie far enough apart to be computed one after another: counted without laying out their runs.

use counterpoint_mask::{Band, Range};

/// Most bands that are looked at together.
const MOST: usize = 8;

/// Trimmed bands that touch a tile and begin no later than it, by columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct BandsApart {
    bands: [Columns; MOST],
    count: usize,
    /// Where the first of them ends.
    rows_end: usize,
    block: u32,
}

/// What one tile reads of all the bands.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileApart {
    pub blocks: usize,
    /// Those of them that bounds are tested for.
    pub bounded_blocks: u64,
    /// Where the first block begins, if there is one.
    pub begin: Option<i32>,
}

/// Of a band, the first and the end of the columns, and the first and the last diagonal.
#[derive(Clone, Copy, Debug, Default)]
struct Columns {
    start: i64,
    end: i64,
    diag_min: i64,
    diag_max: i64,
}

impl BandsApart {
    /// Of no bands.
    pub(super) fn new(block: usize) -> Self {
        Self { bands: [Columns::default(); MOST], count: 0, rows_end: usize::MAX, block: block as u32 }
    }

    /// Takes the bands `touching` in place of those before; `false` where they are many, begin inside the tile, or are all rectangles:
    /// whose tiles are alike.
    pub(super) fn take(&mut self, touching: &[Band], tile: &Range) -> bool {
        if touching.len() > MOST {
            return false;
        }
        (self.count, self.rows_end) = (0, usize::MAX);
        let mut diagonals = false;
        for band in touching {
            if band.q_range.start > tile.start {
                return false;
            }
            diagonals |= !band.is_rectangle();
            let (start, end) = (band.k_range.start as i64, band.k_range.end as i64);
            // By columns, in which bands mostly are already.
            let mut at = self.count;
            while at > 0 && self.bands[at - 1].start > start {
                self.bands[at] = self.bands[at - 1];
                at -= 1;
            }
            self.bands[at] = Columns { start, end, diag_min: band.diag_min, diag_max: band.diag_max };
            self.count += 1;
            self.rows_end = self.rows_end.min(band.q_range.end);
        }
        diagonals
    }

    /// Where the first of the bands ends.
    pub(super) fn rows_end(&self) -> usize {
        self.rows_end
    }

    /// A tile of `rows`, which lie inside all the bands'; `None` where two bands are nearer to each other than a block.
    pub(super) fn tile(&self, rows: &Range) -> Option<TileApart> {
        let block = i64::from(self.block);
        let (mut blocks, mut bounded, mut begin, mut end) = (0, 0, None, -block);
        for columns in &self.bands[..self.count] {
            let span = columns.blocks_of(rows, self.block);
            if span.begin < end + block {
                return None;
            }
            begin = begin.or(Some(span.begin as i32));
            (blocks, bounded, end) = (blocks + span.blocks, bounded + span.bounded, span.end);
        }
        Some(TileApart { blocks: blocks as usize, bounded_blocks: u64::from(bounded), begin })
    }
}

/// What a tile reads of one band, the first block beginning at the first column that it sees.
struct BlockSpan {
    begin: i64,
    end: i64,
    blocks: u32,
    bounded: u32,
}

impl Columns {
    /// Every row of a trimmed band sees something, so the columns that all of `rows` see are those between the last row's first and the
    /// first row's last.
    fn blocks_of(&self, rows: &Range, block: u32) -> BlockSpan {
        let (first, last) = (rows.start as i64, rows.end as i64 - 1);
        let (begin, end) =
            ((first + self.diag_min).max(self.start), (last + 1 + self.diag_max).min(self.end));
        let seen_by_all = ((last + self.diag_min).max(self.start), (first + 1 + self.diag_max).min(self.end));
        // Differences of rows and columns, of which there are fewer than 2^32.
        let distance = |column: i64| (column - begin) as u32;
        let (mut before, mut whole) = (0, 0);
        if seen_by_all.0 < seen_by_all.1 {
            before = distance(seen_by_all.0).div_ceil(block);
            whole = distance(seen_by_all.1).saturating_sub(before * block) / block;
        }
        if whole == 0 {
            before = 0;
        }
        let rest = distance(end).saturating_sub((before + whole) * block).div_ceil(block);
        BlockSpan { begin, end, blocks: before + whole + rest, bounded: before + rest }
    }
}
