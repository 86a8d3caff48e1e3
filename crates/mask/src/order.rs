//! Masks of sequences whose rows lie in another order.

use crate::{AttnSlice, Band, Mask, MaskError, Range};

impl Mask {
    /// The same pairs of queries and keys where those lie in another order: `q_order` has the ranges of queries of this mask, one after
    /// the other as they lie then, `k_order` those of keys. `O(s log n)` of `n` ranges, where `s` pairs of ranges hold a part of a
    /// slice.
    ///
    /// # Errors
    /// [`MaskError::Order`] unless every row is in one range.
    ///
    /// ```
    /// use counterpoint_mask::{Mask, Range};
    ///
    /// let mask: Mask = "causal:4".parse()?;
    /// // The halves change places.
    /// let order = [Range::new(2, 4), Range::new(0, 2)];
    /// let moved = mask.rearranged(&order, &order)?;
    /// assert!(moved.contains(0, 2) && moved.contains(0, 3) && !moved.contains(2, 0));
    /// # Ok::<(), counterpoint_mask::MaskError>(())
    /// ```
    pub fn rearranged(&self, q_order: &[Range], k_order: &[Range]) -> Result<Mask, MaskError> {
        let q_moves = moves("q", q_order, self.seqlen_q())?;
        let k_moves = moves("k", k_order, self.seqlen_k())?;
        let mut bands = Vec::new();
        for band in self.bands() {
            for of_queries in touched(&q_moves, &band.rows()) {
                let rows = band.clip(&of_queries.rows, &band.k_range);
                for of_keys in touched(&k_moves, &rows.keys()) {
                    let part = rows.clip(&of_queries.rows, &of_keys.rows);
                    if !part.is_empty() {
                        bands.push(part.shift(of_queries.by, of_keys.by));
                    }
                }
            }
        }
        let slices: Vec<AttnSlice> = Band::merged(bands).iter().flat_map(Band::to_slices).collect();
        Mask::new(self.seqlen_q(), self.seqlen_k(), slices)
    }
}

/// A range of rows, and how far it is moved.
struct Move {
    rows: Range,
    by: i64,
}

/// The ranges of an order, by their first rows.
fn moves(axis: &'static str, order: &[Range], seqlen: usize) -> Result<Vec<Move>, MaskError> {
    let (mut next, mut moves) = (0, Vec::with_capacity(order.len()));
    for &range in order.iter().filter(|range| !range.is_empty()) {
        moves.push(Move { rows: range, by: next as i64 - range.start as i64 });
        next += range.len();
    }
    moves.sort_unstable_by_key(|moved| moved.rows);
    let mut expected = 0;
    for Move { rows: range, .. } in &moves {
        if range.start != expected || range.end > seqlen {
            let row = expected.min(range.start).max(if range.start == expected { seqlen } else { 0 });
            return Err(MaskError::Order { axis, row, seqlen });
        }
        expected = range.end;
    }
    match expected == seqlen {
        true => Ok(moves),
        false => Err(MaskError::Order { axis, row: expected, seqlen }),
    }
}

/// Those that have rows of `rows`.
fn touched<'a>(moves: &'a [Move], rows: &Range) -> impl Iterator<Item = &'a Move> + use<'a> {
    let (first, end) = (moves.partition_point(|moved| moved.rows.end <= rows.start), rows.end);
    moves[first..].iter().take_while(move |moved| moved.rows.start < end)
}
