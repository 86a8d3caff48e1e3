//! Where a sequence falls into parts that share keys, found from what chunks read: packed documents, without knowing them.

use std::ops::Range;

use counterpoint_mask::Range as Rows;
use counterpoint_plan::ChunkWork;

/// Key rows that more than this part of all chunks read say nothing about who belongs together: 3 / 4.
const POPULAR: (usize, usize) = (3, 4);

/// Cuts the sequence into clusters: neighbouring chunks that read common key rows, so that dividing them between ranks
/// costs traffic. Packed documents longer than a chunk come out as a cluster each; a causal, full or sliding-window
/// sequence is one cluster.
///
/// Two neighbours are apart where they share less than a chunk's rows. A chunk in which one document ends and the next
/// begins shares rows with both of its neighbours; these are apart where they share little with each other, and the
/// chunk stays with the one that it shares more with.
pub(super) fn clusters(work: &ChunkWork) -> Vec<Range<u32>> {
    let chunks = work.num_chunks();
    let little = work.chunk_size();
    // Of chunk `i`: rows shared with `i - 1`, and those that `i - 1` and `i + 1` share.
    let popular = popular_rows(work);
    let needs: Vec<Vec<Rows>> = (0..chunks).map(|chunk| Rows::without(work.needs(chunk), &popular)).collect();
    let shared = |a: usize, b: usize| shared_rows(&needs[a], &needs[b]);
    let back: Vec<usize> = (0..chunks).map(|i| if i == 0 { 0 } else { shared(i - 1, i) }).collect();
    let at_end = |i: usize| i == 0 || i + 1 == chunks;
    let across: Vec<usize> =
        (0..chunks).map(|i| if at_end(i) { usize::MAX } else { shared(i - 1, i + 1) }).collect();
    let apart = |i: usize| {
        let joins_right = across[i] < little && back[i] <= back[i + 1];
        let joins_left = across[i - 1] < little && back[i] < back[i - 1];
        back[i] < little || joins_right || joins_left
    };
    let mut clusters: Vec<Range<u32>> = Vec::new();
    for chunk in 0..chunks {
        match clusters.last_mut() {
            Some(last) if !apart(chunk) => last.end += 1,
            _ => clusters.push(chunk as u32..chunk as u32 + 1),
        }
    }
    clusters
}

/// The key rows that nearly every chunk reads (a shared question, global tokens), merged and ascending.
fn popular_rows(work: &ChunkWork) -> Vec<Rows> {
    let mut events: Vec<(usize, bool)> = Vec::new();
    for range in (0..work.num_chunks()).flat_map(|chunk| work.needs(chunk)) {
        events.extend([(range.start, true), (range.end, false)]);
    }
    events.sort_unstable();
    let (mut popular, mut row, mut readers) = (Vec::new(), 0, 0);
    for (at, begins) in events {
        if readers * POPULAR.1 > work.num_chunks() * POPULAR.0 && at > row {
            popular.push(Rows::new(row, at));
        }
        row = at;
        readers = if begins { readers + 1 } else { readers - 1 };
    }
    Rows::merged(popular)
}

/// Rows that are in both lists, which are merged and ascending.
fn shared_rows(a: &[Rows], b: &[Rows]) -> usize {
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

/// Joins neighbouring clusters of fewer than `small` chunks each. A cut between clusters is cheap but not free, and
/// clusters that stay together save it.
pub(super) fn join_small(clusters: &[Range<u32>], small: usize) -> Vec<Range<u32>> {
    let mut joined: Vec<Range<u32>> = Vec::new();
    let mut last_is_small = false;
    for cluster in clusters {
        let is_small = cluster.len() < small;
        match joined.last_mut() {
            Some(last) if is_small && last_is_small => last.end = cluster.end,
            _ => joined.push(cluster.clone()),
        }
        last_is_small = is_small;
    }
    joined
}
