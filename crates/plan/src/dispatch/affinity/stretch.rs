use std::ops::Range;

use crate::dispatch::ChunkWork;

/// Cuts the sequence into stretches: neighbouring chunks that read common key rows, so that dividing them between ranks
/// costs traffic. Packed documents longer than a chunk come out as a stretch each; a causal, full or sliding-window
/// sequence is one stretch.
///
/// A cut is made where two neighbours share less than a chunk's rows: what it costs at most.
pub(super) fn stretches(work: &ChunkWork) -> Vec<Range<u32>> {
    let mut stretches: Vec<Range<u32>> = Vec::new();
    for chunk in 0..work.num_chunks() {
        match stretches.last_mut() {
            Some(last) if shared_rows(work, chunk - 1, chunk) >= work.chunk_size() => last.end += 1,
            _ => stretches.push(chunk as u32..chunk as u32 + 1),
        }
    }
    stretches
}

/// Key rows that both chunks read.
fn shared_rows(work: &ChunkWork, a: usize, b: usize) -> usize {
    let (a, b) = (work.needs(a), work.needs(b));
    let (mut i, mut j, mut shared) = (0, 0, 0);
    while i < a.len() && j < b.len() {
        shared += a[i].intersect(&b[j]).len();
        if a[i].end <= b[j].end {
            i += 1;
        } else {
            j += 1;
        }
    }
    shared
}

/// Joins neighbouring stretches of fewer than `small` chunks each. A cut between stretches is cheap but not free, and
/// stretches that stay together save it.
pub(super) fn join_small(stretches: &[Range<u32>], small: usize) -> Vec<Range<u32>> {
    let mut joined: Vec<Range<u32>> = Vec::new();
    let mut last_is_small = false;
    for stretch in stretches {
        let is_small = stretch.len() < small;
        match joined.last_mut() {
            Some(last) if is_small && last_is_small => last.end = stretch.end,
            _ => joined.push(stretch.clone()),
        }
        last_is_small = is_small;
    }
    joined
}
