//! What users do with dispatched rows between two attentions: know their positions, and roll them.

use counterpoint_mask::Range;

use crate::{Dispatch, GroupPart, OwnedSplit, RemoteSplit};

impl Dispatch {
    /// The position in the whole sequence of each local row of `rank`, in local order: what rotary embeddings need.
    pub fn position_ids(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.chunks(rank).iter().flat_map(|&chunk| {
            let range = self.chunk_range(chunk as usize);
            range.start..range.end
        })
    }

    /// The rank that owns each chunk.
    pub fn owners(&self) -> Vec<u32> {
        let mut owners = vec![0; self.num_chunks()];
        for rank in 0..self.cp_size() {
            for &chunk in self.chunks(rank) {
                owners[chunk as usize] = rank as u32;
            }
        }
        owners
    }

    /// The group-cast that rolls a dispatched tensor by `shift` rows along the whole sequence: afterwards the row at
    /// position `p` is the one that was at `p - shift`, modulo the length, as if the tensor had been undispatched, rolled
    /// and dispatched. Each row moves once; rows that stay on their rank are splits from it to itself.
    pub fn roll_part(&self, rank: usize, shift: i64) -> GroupPart {
        let seqlen = self.seqlen();
        let Some(forward) = (seqlen > 0).then(|| shift.rem_euclid(seqlen as i64) as usize) else {
            return GroupPart::default();
        };
        let owners = self.owners();
        let mut part = GroupPart::default();
        let mut arrivals = Vec::new();
        let mut local = 0;
        for &chunk in self.chunks(rank) {
            let range = self.chunk_range(chunk as usize);
            for piece in self.pieces(range, forward) {
                let rows =
                    Range::new(local + piece.near.start - range.start, local + piece.near.end - range.start);
                part.owned.push(OwnedSplit { rows, ranks: vec![owners[piece.far_chunk]] });
            }
            for piece in self.pieces(range, seqlen - forward) {
                let rows =
                    Range::new(local + piece.near.start - range.start, local + piece.near.end - range.start);
                arrivals.push((piece.far_start, RemoteSplit { rows, rank: owners[piece.far_chunk] }));
            }
            local += range.len();
        }
        // Owners send in ascending order of their rows, so the rows of one owner must be expected in that order.
        arrivals.sort_by_key(|&(source, _)| source);
        part.remote = arrivals.into_iter().map(|(_, split)| split).collect();
        part
    }

    /// Cuts `range` where the rows `distance` further on (modulo the length) pass from one chunk to the next.
    fn pieces(&self, range: Range, distance: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut start = range.start;
        while start < range.end {
            let far_start = (start + distance) % self.seqlen();
            let far_chunk = far_start / self.chunk_size();
            let room = self.chunk_range(far_chunk).end - far_start;
            let end = range.end.min(start + room);
            pieces.push(Piece { near: Range::new(start, end), far_start, far_chunk });
            start = end;
        }
        pieces
    }
}

/// Rows of one chunk whose counterparts lie in one chunk.
struct Piece {
    near: Range,
    far_start: usize,
    far_chunk: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A dispatch of `seqlen` rows with chunks dealt by `deal`.
    fn dispatch(seqlen: usize, chunk_size: usize, cp_size: usize, deal: u64) -> Dispatch {
        let mut ranks = vec![Vec::new(); cp_size];
        let mut state = deal;
        for chunk in 0..seqlen.div_ceil(chunk_size) {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ranks[(state >> 33) as usize % cp_size].push(chunk as u32);
        }
        Dispatch::new(seqlen, chunk_size, ranks)
    }

    proptest! {
        #[test]
        fn rolling_is_undispatch_roll_dispatch(
            seqlen in 0usize..200, chunk_size in 1usize..40, cp_size in 1usize..6, deal: u64, shift in -500i64..500,
        ) {
            let dispatch = dispatch(seqlen, chunk_size, cp_size, deal);
            let rows: Vec<Vec<usize>> = (0..cp_size).map(|rank| dispatch.position_ids(rank).collect()).collect();
            let parts: Vec<_> = (0..cp_size).map(|rank| dispatch.roll_part(rank, shift)).collect();
            for rank in 0..cp_size {
                let mut got = vec![usize::MAX; rows[rank].len()];
                for source in 0..cp_size {
                    let sent = parts[source].owned.iter().filter(|split| split.ranks == [rank as u32]);
                    let expected = parts[rank].remote.iter().filter(|split| split.rank == source as u32);
                    prop_assert_eq!(sent.clone().count(), expected.clone().count());
                    for (from, to) in sent.zip(expected) {
                        prop_assert_eq!(from.rows.len(), to.rows.len());
                        got[to.rows.start..to.rows.end].copy_from_slice(&rows[source][from.rows.start..from.rows.end]);
                    }
                }
                let want: Vec<usize> = rows[rank]
                    .iter()
                    .map(|&p| (p as i64 - shift).rem_euclid(seqlen as i64) as usize)
                    .collect();
                prop_assert_eq!(got, want);
            }
        }

        #[test]
        fn few_pieces(seqlen in 1usize..300, chunk_size in 1usize..40, shift in -500i64..500) {
            let dispatch = dispatch(seqlen, chunk_size, 3, 7);
            for rank in 0..3 {
                prop_assert!(dispatch.roll_part(rank, shift).owned.len() <= 3 * dispatch.chunks(rank).len());
            }
        }
    }
}
