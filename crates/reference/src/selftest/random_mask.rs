//! The masks of the selftest: random grids of slices, packed documents, windows, rows that see everything.

use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};

use crate::draw::Draw;

const TYPES: [MaskType; 4] = [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];

/// Disjoint slices of all types in a random, unaligned grid. Some cells are empty, so rows are covered by none, one or
/// many; rows of causal cells that are taller than wide see nothing either.
pub(super) fn grid(seqlen_q: usize, seqlen_k: usize, pieces: usize, draw: &mut Draw) -> Mask {
    let row_pieces = draw.within(1, pieces);
    let row_cuts = draw.cuts(seqlen_q, row_pieces);
    let mut slices = Vec::new();
    for rows in row_cuts.windows(2) {
        let col_pieces = draw.within(1, pieces);
        let col_cuts = draw.cuts(seqlen_k, col_pieces);
        for cols in col_cuts.windows(2) {
            if draw.chance(70) {
                let (rows, cols) = (Range::new(rows[0], rows[1]), Range::new(cols[0], cols[1]));
                slices.push(AttnSlice::new(rows, cols, draw.pick(&TYPES)));
            }
        }
    }
    made(seqlen_q, seqlen_k, slices)
}

/// Packed documents of unlike lengths, each causal, full or a band.
pub(super) fn documents(seqlen: usize, count: usize, draw: &mut Draw) -> Mask {
    let cuts = draw.cuts(seqlen, count);
    let slices = cuts.windows(2).map(|ends| {
        let range = Range::new(ends[0], ends[1]);
        AttnSlice::new(range, range, draw.pick(&[MaskType::Causal, MaskType::Full]))
    });
    made(seqlen, seqlen, slices.collect())
}

/// A causal window of `width` columns: a band that crosses every tile of its diagonal.
pub(super) fn window(seqlen: usize, width: usize) -> Mask {
    let width = width.min(seqlen);
    // Rows before the window is full see all before them; the others see `width` columns that move with the row.
    let head = Range::new(0, width);
    let mut slices = vec![AttnSlice::new(head, head, MaskType::Causal)];
    if width < seqlen {
        slices.push(AttnSlice::new(Range::new(width, seqlen), Range::new(1, seqlen), MaskType::BiCausal));
    }
    made(seqlen, seqlen, slices)
}

/// Packed documents, and `rows` rows at the end that see everything, or everything before them.
pub(super) fn with_last_block(seqlen: usize, rows: usize, mask_type: MaskType, draw: &mut Draw) -> Mask {
    let mut slices = documents(seqlen - rows, 8, draw).slices().to_vec();
    slices.push(AttnSlice::new(Range::new(seqlen - rows, seqlen), Range::new(0, seqlen), mask_type));
    made(seqlen, seqlen, slices)
}

/// One slice over everything.
pub(super) fn single(seqlen_q: usize, seqlen_k: usize, mask_type: MaskType) -> Mask {
    let slice = AttnSlice::new(Range::new(0, seqlen_q), Range::new(0, seqlen_k), mask_type);
    made(seqlen_q, seqlen_k, vec![slice])
}

/// No slice at all.
pub(super) fn nothing(seqlen_q: usize, seqlen_k: usize) -> Mask {
    made(seqlen_q, seqlen_k, Vec::new())
}

fn made(seqlen_q: usize, seqlen_k: usize, slices: Vec<AttnSlice>) -> Mask {
    Mask::new(seqlen_q, seqlen_k, slices)
        .unwrap_or_else(|error| panic!("slices that are disjoint by construction: {error}"))
}
