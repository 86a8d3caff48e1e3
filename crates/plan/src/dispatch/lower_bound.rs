use super::ChunkWork;

/// Key rows that all ranks together receive at least, in every dispatch whose counts differ by at most one and in which
/// no rank computes more than `max_area` pairs.
///
/// The argument, for one key row: the chunks that read it hold together some number of chunks and some area. A set of
/// ranks can compute them only if it has that much room of both kinds, so the row is read by at least that many ranks;
/// one of them at most owns it, and each other one receives it. The bound is the sum over all key rows. It holds whether
/// keys are dispatched with the queries or on their own, and for a full mask it is exact: `seqlen_k (cp_size - 1)` where
/// the ranks divide the chunks.
pub fn received_rows_lower_bound(work: &ChunkWork, cp_size: usize, max_area: u64) -> u64 {
    let chunks = work.num_chunks();
    let (room, larger) = (chunks / cp_size, chunks % cp_size);
    let ranks_for_chunks = |readers: usize| match readers.checked_sub(larger * (room + 1)) {
        // The larger ranks go first. Without room on the others the larger ones hold everything.
        Some(rest) if rest > 0 => larger + rest.div_ceil(room),
        _ => readers.div_ceil(room + 1),
    };

    // Where chunks begin and stop to read, along the key sequence.
    let mut events: Vec<(usize, bool, u64)> = Vec::new();
    for chunk in 0..chunks {
        for range in work.needs(chunk) {
            events.push((range.start, true, work.area(chunk)));
            events.push((range.end, false, work.area(chunk)));
        }
    }
    events.sort_unstable();
    let (mut bound, mut row, mut readers, mut area) = (0, 0, 0, 0_u64);
    for (at, begins, chunk_area) in events {
        if readers > 0 && at > row {
            let ranks = (ranks_for_chunks(readers) as u64).max(area.div_ceil(max_area.max(1)));
            bound += (at - row) as u64 * (ranks - 1);
        }
        row = at;
        if begins {
            readers += 1;
            area += chunk_area;
        } else {
            readers -= 1;
            area -= chunk_area;
        }
    }
    bound
}
