//! Builders of masks in blocks: block-causal video, a last block that sees all, and block-sparse grids.

use super::Drawing;
use crate::{Documents, Mask, MaskError, MaskType, Range};

impl Mask {
    /// Each document is divided into blocks of `block` tokens from its start; a token sees its own block and all
    /// earlier ones of its document (video: a block is a frame or more). One slice a block.
    ///
    /// # Errors
    /// See [`Mask::full`]; also a `block` of 0.
    pub fn block_causal(documents: impl Into<Documents>, block: usize) -> Result<Self, MaskError> {
        let documents = documents.into();
        let mut drawing = Drawing::new(documents.seqlen(), documents.seqlen())?;
        add_block_causal(&mut drawing, documents.ranges(), block)?;
        drawing.finish()
    }

    /// [`Mask::block_causal`], then a last block of `global` tokens that sees the whole sequence. `documents` do not
    /// include that block, and no token outside it sees it. With `block` 1 the documents are causal.
    ///
    /// # Errors
    /// See [`Mask::block_causal`].
    pub fn last_global(
        documents: impl Into<Documents>,
        block: usize,
        global: usize,
    ) -> Result<Self, MaskError> {
        let documents = documents.into();
        let start = documents.seqlen();
        let seqlen = start.saturating_add(global);
        let mut drawing = Drawing::new(seqlen, seqlen)?;
        add_block_causal(&mut drawing, documents.ranges(), block)?;
        drawing.add(Range { start, end: seqlen }, Range { start: 0, end: seqlen }, MaskType::Full)?;
        drawing.finish()
    }

    /// Block sparse: the plane is a grid of `block_q` x `block_k` tokens (the last blocks may be short), and the blocks
    /// `(block row, block column)` in `blocks` are unmasked; naming one twice changes nothing. Neighbours along a row
    /// become one slice, and so do equal runs of consecutive rows.
    ///
    /// # Errors
    /// See [`Mask::full`]; also a block size of 0, or a block outside the grid.
    pub fn block_sparse(
        seqlen_q: usize,
        seqlen_k: usize,
        block_q: usize,
        block_k: usize,
        blocks: &[(usize, usize)],
    ) -> Result<Self, MaskError> {
        let mut drawing = Drawing::new(seqlen_q, seqlen_k)?;
        for (field, size) in [("block_q", block_q), ("block_k", block_k)] {
            if size == 0 {
                return Err(MaskError::EmptyBlock { field });
            }
        }
        let (rows, cols) = (seqlen_q.div_ceil(block_q), seqlen_k.div_ceil(block_k));
        if let Some(&(row, col)) = blocks.iter().find(|&&(row, col)| row >= rows || col >= cols) {
            return Err(MaskError::BlockOutOfBounds { row, col, rows, cols });
        }
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable();
        // Runs `(columns, rows)` in block coordinates: first along each row, then equal runs of consecutive rows.
        let mut runs: Vec<(Range, Range)> = Vec::new();
        for (row, col) in blocks {
            match runs.last_mut() {
                Some((run, rows)) if rows.start == row && col <= run.end => run.end = run.end.max(col + 1),
                _ => runs.push((Range { start: col, end: col + 1 }, Range { start: row, end: row + 1 })),
            }
        }
        runs.sort_unstable();
        runs.dedup_by(|(next_cols, next_rows), (cols, rows)| {
            let joins = next_cols == cols && next_rows.start == rows.end;
            if joins {
                rows.end = next_rows.end;
            }
            joins
        });
        runs.sort_unstable_by_key(|&(cols, rows)| (rows, cols));
        for (cols, rows) in runs {
            let tokens = |blocks: Range, size: usize, seqlen: usize| Range {
                start: blocks.start * size,
                end: blocks.end.saturating_mul(size).min(seqlen),
            };
            drawing.add(tokens(rows, block_q, seqlen_q), tokens(cols, block_k, seqlen_k), MaskType::Full)?;
        }
        drawing.finish()
    }
}

fn add_block_causal(
    drawing: &mut Drawing,
    documents: impl Iterator<Item = Range>,
    block: usize,
) -> Result<(), MaskError> {
    if block == 0 {
        return Err(MaskError::EmptyBlock { field: "block" });
    }
    for document in documents {
        if block == 1 {
            // One slice instead of one a token.
            drawing.add(document, document, MaskType::Causal)?;
            continue;
        }
        let mut rest = document;
        while !rest.is_empty() {
            let (rows, below) = rest.cut(rest.start.saturating_add(block));
            drawing.add(rows, Range { start: document.start, end: rows.end }, MaskType::Full)?;
            rest = below;
        }
    }
    Ok(())
}
