//! Key chunks to ranks in cross attention, where they are read most.

use std::cmp::Reverse;

use counterpoint_mask::Range;
use counterpoint_plan::{ChunkWork, Dispatch};

use super::capacity::capacity;
use super::sequential::sequential;

/// Gives every key chunk to a rank when queries and keys are dispatched each on its own (cross-attention). Key chunks
/// have no area: a chunk wants to live where most of its rows are read, and counts differ by at most one.
///
/// A key chunk saves `rows read by its owner` of traffic, so this is an assignment with capacities. Chunks that few ranks
/// read choose first, because the others lose less by waiting; then chunks of two ranks are exchanged where that keeps
/// more rows local. Choosing one by one is not the best assignment: chunks dealt out in runs or in turn are taken where
/// they keep more rows local, so that keys are never further from their readers than with those.
pub fn dispatch_keys(work: &ChunkWork, queries: &Dispatch, chunk_size: usize) -> Dispatch {
    let (seqlen, ranks) = (work.seqlen_k(), queries.cp_size());
    let chunks = seqlen.div_ceil(chunk_size);
    let readers = Readers::new(work, queries, chunk_size);

    let mut order: Vec<u32> = (0..chunks as u32).collect();
    order.sort_by_key(|&chunk| {
        let readers = readers.of(chunk);
        (readers.is_empty(), readers.iter().map(|&(_, rows)| u64::from(rows)).sum::<u64>(), chunk)
    });
    let mut room: Vec<usize> = (0..ranks).map(|rank| capacity(chunks, ranks, rank)).collect();
    let mut owner = vec![u32::MAX; chunks];
    let mut unread = Vec::new();
    for chunk in order {
        let best = readers
            .of(chunk)
            .iter()
            .filter(|&&(rank, _)| room[rank as usize] > 0)
            .max_by_key(|&&(rank, rows)| (rows, room[rank as usize], Reverse(rank)));
        match best {
            Some(&(rank, _)) => {
                owner[chunk as usize] = rank;
                room[rank as usize] -= 1;
            }
            None => unread.push(chunk),
        }
    }
    // Nobody with room reads these. In ascending order, so that what is left forms runs.
    unread.sort_unstable();
    let mut free = (0..ranks as u32).flat_map(|rank| std::iter::repeat_n(rank, room[rank as usize]));
    for (&chunk, rank) in unread.iter().zip(&mut free) {
        owner[chunk as usize] = rank;
    }
    exchange_unread(&readers, &unread, &mut owner, ranks);

    let mut rank_chunks = vec![Vec::new(); ranks];
    for (chunk, &rank) in owner.iter().enumerate() {
        rank_chunks[rank as usize].push(chunk as u32);
    }
    let in_turn = (0..ranks).map(|rank| (rank as u32..chunks as u32).step_by(ranks).collect()).collect();
    let mut most = readers.local_rows(&rank_chunks);
    for dealt in [sequential(chunks, ranks), in_turn] {
        let rows = readers.local_rows(&dealt);
        if rows > most {
            (rank_chunks, most) = (dealt, rows);
        }
    }
    Dispatch::new(seqlen, chunk_size, rank_chunks)
}

/// Chunks that found no reader with room try to change places with a chunk of one of their readers: a gain when that one
/// loses fewer rows by moving. One pass over what nobody with room reads, each looking at the chunks of at most eight readers.
fn exchange_unread(readers: &Readers, unread: &[u32], owner: &mut [u32], ranks: usize) {
    let mut rank_chunks: Vec<Vec<u32>> = vec![Vec::new(); ranks];
    for (chunk, &rank) in owner.iter().enumerate() {
        rank_chunks[rank as usize].push(chunk as u32);
    }
    for &chunk in unread {
        let here = owner[chunk as usize];
        let mut best: Option<(i64, u32, usize)> = None;
        for &(there, rows) in readers.of(chunk).iter().take(8) {
            for (place, &other) in rank_chunks[there as usize].iter().enumerate() {
                let before = i64::from(readers.rows(other, there)) + i64::from(readers.rows(chunk, here));
                let gain = i64::from(rows) + i64::from(readers.rows(other, here)) - before;
                if gain > best.map_or(0, |(gain, ..)| gain) {
                    best = Some((gain, there, place));
                }
            }
        }
        if let Some((_, there, place)) = best {
            let other = std::mem::replace(&mut rank_chunks[there as usize][place], chunk);
            rank_chunks[here as usize].retain(|&own| own != chunk);
            rank_chunks[here as usize].push(other);
            (owner[chunk as usize], owner[other as usize]) = (there, here);
        }
    }
}

/// Which ranks read how many rows of each key chunk.
struct Readers {
    offsets: Vec<usize>,
    /// `(rank, rows)`, ascending by rank in each chunk.
    readers: Vec<(u32, u32)>,
}

impl Readers {
    fn new(work: &ChunkWork, queries: &Dispatch, chunk_size: usize) -> Self {
        let chunks = work.seqlen_k().div_ceil(chunk_size);
        let mut reads: Vec<(u32, u32, u32)> = Vec::new();
        for rank in 0..queries.cp_size() {
            for needed in work.needs_of(queries.chunks(rank)) {
                for chunk in needed.start / chunk_size..=(needed.end - 1) / chunk_size {
                    let rows =
                        Range::new(chunk * chunk_size, (chunk + 1) * chunk_size).intersect(&needed).len();
                    match reads.last_mut() {
                        Some(last) if last.0 == chunk as u32 && last.1 == rank as u32 => {
                            last.2 += rows as u32
                        }
                        _ => reads.push((chunk as u32, rank as u32, rows as u32)),
                    }
                }
            }
        }
        reads.sort_unstable();
        let mut offsets = vec![0_usize; chunks + 1];
        for &(chunk, ..) in &reads {
            offsets[chunk as usize + 1] += 1;
        }
        for chunk in 0..chunks {
            offsets[chunk + 1] += offsets[chunk];
        }
        Self { offsets, readers: reads.into_iter().map(|(_, rank, rows)| (rank, rows)).collect() }
    }

    fn of(&self, chunk: u32) -> &[(u32, u32)] {
        &self.readers[self.offsets[chunk as usize]..self.offsets[chunk as usize + 1]]
    }

    /// Rows of `chunk` that `rank` reads.
    fn rows(&self, chunk: u32, rank: u32) -> u32 {
        let readers = self.of(chunk);
        readers.binary_search_by_key(&rank, |&(rank, _)| rank).map_or(0, |at| readers[at].1)
    }

    /// Rows that are read where they live when rank `r` owns `rank_chunks[r]`.
    fn local_rows(&self, rank_chunks: &[Vec<u32>]) -> u64 {
        let ranks = rank_chunks.iter().enumerate();
        ranks
            .flat_map(|(rank, chunks)| chunks.iter().map(move |&chunk| self.rows(chunk, rank as u32)))
            .map(u64::from)
            .sum()
    }
}
