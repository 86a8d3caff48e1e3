use counterpoint_mask::{Band, Range};

use super::coverage::{Coverage, full_columns};
use super::sweep::piece;
use super::{NO_LIMIT, TileBound, TileDirection, TilePlacement, TileRun};

/// Lays the walks of tiles out as runs and bounds.
///
/// The steps of a tile's walk are as many as its bounds change, not as many as its blocks.
#[derive(Debug)]
pub(super) struct Walk {
    direction: TileDirection,
    block: usize,
    placement: TilePlacement,
    /// A column that no block holds together with those before it.
    cut: usize,
    pub(super) runs: Vec<TileRun>,
    pub(super) bounds: Vec<TileBound>,
    pieces: Vec<Band>,
    coverage: Coverage,
    /// Pieces that the current block touches, ascending.
    live: Vec<usize>,
    /// Pieces of the open run.
    listed: Vec<usize>,
}

impl Walk {
    /// Expects about so many `tiles`.
    pub(super) fn new(
        direction: TileDirection,
        block: usize,
        placement: TilePlacement,
        cut: Option<usize>,
        tiles: usize,
    ) -> Self {
        Self {
            direction,
            block,
            placement,
            cut: cut.unwrap_or(usize::MAX),
            // Most tiles have a full run and one across a diagonal or the end of a document. More would have to be moved.
            runs: Vec::with_capacity(3 * tiles),
            bounds: Vec::with_capacity(2 * tiles),
            pieces: Vec::new(),
            coverage: Coverage::default(),
            live: Vec::new(),
            listed: Vec::new(),
        }
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
            pieces.sort_unstable_by_key(by_columns);
            let before = pieces.len();
            // Parts of two bands can be one band though the whole ones are not.
            pieces.dedup_by(|next, last| {
                if next.k_range.start > last.k_range.end {
                    return false;
                }
                match last.union(next) {
                    Some(union) => {
                        *last = union;
                        true
                    }
                    None => false,
                }
            });
            if pieces.len() < before {
                pieces.sort_unstable_by_key(by_columns);
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
                    self.bounded(piece, &Range::new(column, start));
                }
                let whole = (full.end - start) / block;
                column = start + whole * block;
                self.run(&Range::new(start, column));
                count = before + whole;
            }
        }
        if column < end {
            self.bounded(piece, &Range::new(column, end));
            count += blocks(end - column);
        }
        count
    }

    /// Appends a run with one bound.
    fn bounded(&mut self, piece: &Band, columns: &Range) {
        self.run(columns);
        self.bounds.push(bound(&self.direction.turn(&piece.clip(&piece.q_range, columns))));
        if let Some(run) = self.runs.last_mut() {
            run.bound_end += 1;
        }
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
            // A stretch that every row sees must hold a whole block.
            while self.coverage.full.get(full).is_some_and(|range| range.end < start + block) {
                full += 1;
            }
            let next_full = self.coverage.full.get(full);
            if let Some(range) = next_full
                && range.start <= start
            {
                let count = (range.end - start) / block;
                self.close(pieces, open.take());
                self.run(&Range::new(start, start + count * block));
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
                // A piece is one stretch of columns, so blocks that touch the same ones follow each other.
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
        for &index in &self.listed {
            let piece = &pieces[index];
            self.bounds.push(bound(&self.direction.turn(&piece.clip(&piece.q_range, &columns))));
        }
        let begin = self.bounds.len() - self.listed.len();
        self.run(&columns);
        if let Some(run) = self.runs.last_mut() {
            run.bound_begin = begin as u32;
        }
    }

    fn run(&mut self, columns: &Range) {
        let bounds = self.bounds.len() as u32;
        self.runs.push(TileRun {
            start: columns.start as i32,
            end: columns.end as i32,
            bound_begin: bounds,
            bound_end: bounds,
        });
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
