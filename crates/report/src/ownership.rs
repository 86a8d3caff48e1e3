//! Who owns what of a sequence, chunk by chunk, or for parts that are too coarse to show every chunk.

use counterpoint_mask::Range;
use counterpoint_plan::Dispatch;

/// The rank of every chunk of `dispatch`.
pub(crate) fn chunk_owners(dispatch: &Dispatch) -> Vec<usize> {
    let mut owners = vec![0; dispatch.num_chunks()];
    for rank in 0..dispatch.cp_size() {
        for &chunk in dispatch.chunks(rank) {
            owners[chunk as usize] = rank;
        }
    }
    owners
}

/// A rank that owns rows of each part. Where a part lies in several chunks, the one at a place that moves from part to
/// part by the golden ratio: over many parts every rank is met as often as it owns rows, whatever the period in which
/// chunks go round the ranks. (The owner of most rows would always be the first of equals.)
pub(crate) fn part_owners(dispatch: &Dispatch, parts: impl Iterator<Item = Range>) -> Vec<usize> {
    let of_chunk = chunk_owners(dispatch);
    let owner = |(index, part): (usize, Range)| {
        let place = (index as f64 * 0.618_033_988_7).fract();
        let row = part.start + (part.len() as f64 * place) as usize;
        of_chunk.get(row / dispatch.chunk_size()).copied().unwrap_or(0)
    };
    parts.enumerate().map(owner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four ranks in turn, and parts of exactly four chunks: the owner of most rows or of the first row would be the same
    /// rank in every part.
    #[test]
    fn ranks_are_met_as_often_as_they_own_rows() {
        let chunks: Vec<Vec<u32>> = (0..4).map(|rank| (rank..2048).step_by(4).collect()).collect();
        let json = serde_json::json!({"seqlen": 2048 * 512, "chunk_size": 512, "rank_chunks": chunks});
        let dispatch: Dispatch = serde_json::from_value(json).unwrap();
        let owners = part_owners(&dispatch, (0..512).map(|part| Range::new(part * 2048, (part + 1) * 2048)));
        for rank in 0..4 {
            let met = owners.iter().filter(|&&owner| owner == rank).count();
            assert!((126..=130).contains(&met), "rank {rank} is met {met} times");
        }
    }
}
