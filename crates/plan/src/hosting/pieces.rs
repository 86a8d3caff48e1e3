//! How many pieces hosted work comes in, counted before any is made.

use counterpoint_mask::{Band, Range};

use super::HostedRows;
use crate::Dispatch;
use crate::row_list::RowList;
use crate::runs::Runs;

/// At least so many bands does [`assign`](super::assign) cut before it joins neighbours again, where all owners of keys host.
pub(crate) fn pieces(
    work: &[Vec<Band>],
    offloaded: &[Vec<HostedRows>],
    q_dispatch: &Dispatch,
    k_runs: &Runs,
) -> u64 {
    let of_rank = |(rank, (bands, offloaded)): (usize, (&Vec<Band>, &Vec<HostedRows>))| -> u64 {
        if offloaded.is_empty() {
            return 0;
        }
        let own = RowList::new(q_dispatch.ranges(rank));
        let of_rows = |band: &Band, rows: Range| -> u64 {
            let mut start = rows.start;
            let neighbours = own.rows(rows.start, rows.end).into_iter().map(|rows| {
                start += rows.len();
                Range::new(start - rows.len(), start)
            });
            let parts = neighbours.filter_map(|rows| band.clip(&rows, &band.k_range).trim());
            parts.map(|part| k_runs.overlapping(&part.k_range).len() as u64).sum()
        };
        let of_band = |band: &Band| -> u64 {
            let first = offloaded.partition_point(|offloaded| offloaded.rows.end <= band.q_range.start);
            let gone =
                offloaded[first..].iter().take_while(|offloaded| offloaded.rows.start < band.q_range.end);
            gone.map(|offloaded| of_rows(band, offloaded.rows.intersect(&band.q_range))).sum()
        };
        bands.iter().map(of_band).sum()
    };
    work.iter().zip(offloaded).enumerate().map(of_rank).sum()
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask};
    use proptest::prelude::*;

    use super::*;
    use crate::division::Owners;
    use crate::hosting::assign;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// What is counted is what is made, where nothing is joined: hosts have as many bands or, joined, fewer.
        #[test]
        fn as_many_as_are_counted_are_made(
            lengths in proptest::collection::vec(1..400_usize, 1..5),
            ranks in 2..7_usize, chunk_size in 8..90_usize, is_full: bool, picked in proptest::collection::vec(0..40_usize, 1..6),
        ) {
            let documents = Documents::from_lengths(lengths).unwrap();
            let mask = if is_full { Mask::full(documents) } else { Mask::causal(documents) }.unwrap();
            let chunks = mask.seqlen_q().div_ceil(chunk_size);
            // A run from the front and its mirror from the back to each.
            let mut rank_chunks = vec![Vec::new(); ranks];
            for chunk in 0..chunks {
                rank_chunks[chunk.min(chunks - 1 - chunk) * 2 * ranks / (chunks + 1)].push(chunk as u32);
            }
            let dispatch = Dispatch::new(mask.seqlen_q(), chunk_size, rank_chunks);
            let owners = Owners::new(dispatch.clone(), dispatch);
            let work = owners.work(&mask);
            let of_rank = |rank: usize| -> Vec<Range> {
                let rows = owners.q_dispatch.tokens(rank);
                let some = picked.iter().map(|&at| Range::new((at * 7).min(rows), (at * 7 + 11 + at).min(rows)));
                Range::merged(some.filter(|rows| !rows.is_empty()).collect())
            };
            let offloaded = HostedRows::by_all(&(0..ranks).map(of_rank).collect());
            let counted = pieces(&work, &offloaded, &owners.q_dispatch, &owners.k_runs);
            let (_, hosted) = assign(&work, &offloaded, &owners.q_dispatch, &owners.q_runs, &owners.k_runs);
            let made: u64 = hosted.iter().map(|host| host.bands.len() as u64).sum();
            prop_assert!(made <= counted && counted <= made * 4, "{made} {counted}");
            prop_assert_eq!(made == 0, counted == 0);
        }
    }
}
