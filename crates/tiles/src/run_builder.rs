//! From the bands of a tile to its runs of blocks along the other axis, whole or with bounds to test.

use counterpoint_mask::{Band, Range};

use super::coverage::{Coverage, full_columns};
use super::nearly_sorted::sort_nearly_sorted;
use super::sweep::piece;
use super::{NO_LIMIT, TileBound, TileDirection, TilePlacement, TileRun};

/// What becomes of the runs of blocks of which a tile consists: written for a kernel, or counted.
pub(super) trait RunSink {
    /// Blocks of these columns that every row of the tile sees whole.
    fn whole(&mut self, columns: &Range);

    /// Blocks of these columns for which `pieces` are tested.
    fn bounded<'a>(&mut self, columns: &Range, pieces: impl Iterator<Item = &'a Band>);
}

/// Runs and bounds as kernels read them.
#[derive(Debug)]
pub(super) struct WrittenRuns {
    direction: TileDirection,
    pub(super) runs: Vec<TileRun>,
    pub(super) bounds: Vec<TileBound>,
}

impl WrittenRuns {
    /// Expects about so many `tiles`.
    pub(super) fn new(direction: TileDirection, tiles: usize) -> Self {
        // Most tiles have a full run and one across a diagonal or the end of a document. More would have to be moved.
        Self { direction, runs: Vec::with_capacity(3 * tiles), bounds: Vec::with_capacity(2 * tiles) }
    }
}

impl RunSink for WrittenRuns {
    fn whole(&mut self, columns: &Range) {
        self.bounded(columns, std::iter::empty());
    }

    fn bounded<'a>(&mut self, columns: &Range, pieces: impl Iterator<Item = &'a Band>) {
        let bound_begin = self.bounds.len() as u32;
        let direction = self.direction;
        self.bounds.extend(pieces.map(|piece| bound(&direction.turn(&piece.clip(&piece.q_range, columns)))));
        self.runs.push(TileRun {
            start: columns.start as i32,
            end: columns.end as i32,
            bound_begin,
            bound_end: self.bounds.len() as u32,
        });
    }
}

/// Lays tiles out as runs of blocks.
///
/// The steps of a tile are as many as its bounds change, not as many as its blocks.
#[derive(Debug)]
pub(super) struct RunBuilder<S> {
    pub(super) sink: S,
    block: usize,
    placement: TilePlacement,
    /// A column that no block holds together with those before it.
    cut: usize,
    pieces: Vec<Band>,
    coverage: Coverage,
    /// Pieces that the current block touches, ascending.
    live: Vec<usize>,
    /// Pieces of the open run.
    listed: Vec<usize>,
}

impl<S: RunSink> RunBuilder<S> {
    pub(super) fn new(sink: S, block: usize, placement: TilePlacement, cut: Option<usize>) -> Self {
        Self {
            sink,
            block,
            placement,
            cut: cut.unwrap_or(usize::MAX),
            pieces: Vec::new(),
            coverage: Coverage::default(),
            live: Vec::new(),
            listed: Vec::new(),
        }
    }

    /// The same lists for blocks of another size, and no cut.
    pub(super) fn reset(&mut self, block: usize, placement: TilePlacement) {
        (self.block, self.placement, self.cut) = (block, placement, usize::MAX);
    }

    /// Bytes of its lists.
    pub(super) fn bytes(&self) -> usize {
        self.pieces.capacity() * size_of::<Band>()
            + self.coverage.bytes()
            + (self.live.capacity() + self.listed.capacity()) * size_of::<usize>()
    }

    /// Appends the runs of a tile of `rows`. `bands` are those that touch it. Returns the number of its blocks.
    pub(super) fn tile(&mut self, rows: &Range, bands: &[Band]) -> usize {
        let cut = self.cut;
        if bands.iter().all(|band| band.k_range.end <= cut)
            || bands.iter().all(|band| band.k_range.start >= cut)
        {
            return self.columns(rows, bands);
        }
        [Range::new(0, cut), Range::new(cut, usize::MAX)]
            .map(|side| {
                let clipped = bands.iter().filter_map(|band| {
                    let columns = band.k_range.intersect(&side);
                    (!columns.is_empty()).then(|| band.clip(&band.q_range, &columns))
                });
                self.columns(rows, &clipped.collect::<Vec<_>>())
            })
            .iter()
            .sum()
    }

    fn columns(&mut self, rows: &Range, bands: &[Band]) -> usize {
        if let [band] = bands {
            return piece(band, rows).map_or(0, |piece| self.one_piece(rows, &piece));
        }
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.clear();
        pieces.extend(bands.iter().filter_map(|band| piece(band, rows)));
        let by_columns = |piece: &Band| (piece.k_range.start, piece.q_range.start);
        if pieces.len() > 1 {
            sort_nearly_sorted(&mut pieces, by_columns);
            let before = pieces.len();
            // Parts of two bands can be one band though the whole ones are not.
            pieces.dedup_by(|next, last| {
                if next.k_range.start > last.k_range.end {
                    return false;
                }
                match last.union_of_trimmed(next) {
                    Some(union) => {
                        *last = union;
                        true
                    }
                    None => false,
                }
            });
            if pieces.len() < before {
                sort_nearly_sorted(&mut pieces, by_columns);
            }
        }
        // Blocks that hold one of two pieces hold nothing of the other where a block fits in between.
        let (mut blocks, mut first) = (0, 0);
        while first < pieces.len() {
            let (mut end, mut next) = (pieces[first].k_range.end, first + 1);
            while let Some(piece) = pieces.get(next)
                && piece.k_range.start < end + self.block
            {
                end = end.max(piece.k_range.end);
                next += 1;
            }
            blocks += match &pieces[first..next] {
                [piece] => self.one_piece(rows, piece),
                pieces => self.blocks(rows, pieces),
            };
            first = next;
        }
        self.pieces = pieces;
        blocks
    }

    /// What `blocks` does, for a piece with nobody near: bounded blocks, blocks that every row sees whole,
    /// bounded blocks.
    fn one_piece(&mut self, rows: &Range, piece: &Band) -> usize {
        let block = self.block;
        // Mostly there is nothing to divide.
        let blocks = |columns: usize| if columns <= block { 1 } else { columns.div_ceil(block) };
        let (mut column, end) = (first_block(piece.k_range.start, block, self.placement), piece.k_range.end);
        let mut count = 0;
        if let Some(full) = full_columns(rows, piece) {
            let before = if full.start > column { blocks(full.start - column) } else { 0 };
            let start = column + before * block;
            if full.end >= start + block {
                if before > 0 {
                    self.sink.bounded(&Range::new(column, start), std::iter::once(piece));
                }
                let whole = (full.end - start) / block;
                column = start + whole * block;
                self.sink.whole(&Range::new(start, column));
                count = before + whole;
            }
        }
        if column < end {
            self.sink.bounded(&Range::new(column, end), std::iter::once(piece));
            count += blocks(end - column);
        }
        count
    }

    fn blocks(&mut self, rows: &Range, pieces: &[Band]) -> usize {
        let block = self.block;
        self.coverage.measure(rows, pieces);
        let (mut seen, mut full, mut next_piece) = (0, 0, 0);
        // The first column that no block holds yet.
        let mut column = 0;
        let mut blocks = 0;
        let mut open: Option<Range> = None;
        self.live.clear();
        loop {
            while self.coverage.seen.get(seen).is_some_and(|range| range.end <= column) {
                seen += 1;
            }
            let Some(range) = self.coverage.seen.get(seen) else { break };
            let start = first_block(range.start.max(column), block, self.placement);
            // A span that every row sees must hold a whole block.
            while self.coverage.full.get(full).is_some_and(|range| range.end < start + block) {
                full += 1;
            }
            let next_full = self.coverage.full.get(full);
            if let Some(range) = next_full
                && range.start <= start
            {
                let count = (range.end - start) / block;
                self.close(pieces, open.take());
                self.sink.whole(&Range::new(start, start + count * block));
                blocks += count;
                column = start + count * block;
                continue;
            }
            while pieces.get(next_piece).is_some_and(|piece| piece.k_range.start < start + block) {
                self.live.push(next_piece);
                next_piece += 1;
            }
            self.live.retain(|&index| pieces[index].k_range.end > start);
            // The blocks after this one are like it until a piece ends or begins, or every row sees a whole block.
            let ends = self.live.iter().map(|&index| pieces[index].k_range.end);
            let (first_end, last_end) =
                ends.fold((usize::MAX, 0), |(first, last), end| (first.min(end), last.max(end)));
            let alike = [
                (first_end - 1 - start) / block,
                pieces.get(next_piece).map_or(usize::MAX, |piece| (piece.k_range.start - start) / block - 1),
                next_full.map_or(usize::MAX, |range| (range.start - start).div_ceil(block) - 1),
            ];
            let count = 1 + alike.into_iter().min().unwrap_or(0);
            let end = start + count * block;
            let rows = Range::new(start, end.min(last_end));
            match &mut open {
                // A piece is one span of columns, so blocks that touch the same ones follow each other.
                Some(open) if self.listed == self.live => open.end = rows.end,
                _ => {
                    self.close(pieces, open.replace(rows));
                    self.listed.clone_from(&self.live);
                }
            }
            blocks += count;
            column = end;
        }
        self.close(pieces, open);
        blocks
    }

    /// Appends the open run with its bounds.
    fn close(&mut self, pieces: &[Band], open: Option<Range>) {
        let Some(columns) = open else { return };
        self.sink.bounded(&columns, self.listed.iter().map(|&index| &pieces[index]));
    }
}

fn bound(band: &Band) -> TileBound {
    let diagonal = |diagonal: i64| diagonal.clamp(-i64::from(NO_LIMIT), i64::from(NO_LIMIT)) as i32;
    TileBound {
        q_start: band.q_range.start as i32,
        q_end: band.q_range.end as i32,
        k_start: band.k_range.start as i32,
        k_end: band.k_range.end as i32,
        diag_min: diagonal(band.diag_min),
        diag_max: diagonal(band.diag_max),
        reserved: [0; 2],
    }
}

/// Where the block begins that is to hold `column`.
pub(super) fn first_block(column: usize, block: usize, placement: TilePlacement) -> usize {
    match placement {
        TilePlacement::Tight => column,
        TilePlacement::Aligned => column - column % block,
    }
}
