use counterpoint_mask::{Band, Mask, Range};
use counterpoint_plan::Dispatch;

/// A mask on a grid: how much of each cell is unmasked.
pub(crate) struct Raster {
    /// Ascending row limits of the cells, from 0 to `seqlen_q`.
    pub(crate) q_edges: Vec<usize>,
    /// Ascending column limits of the cells, from 0 to `seqlen_k`.
    pub(crate) k_edges: Vec<usize>,
    /// Unmasked pairs of each cell, row by row.
    areas: Vec<u64>,
}

impl Raster {
    /// Exact areas, in time linear in the (slice, cell) pairs that meet.
    pub(crate) fn new(mask: &Mask, q_edges: Vec<usize>, k_edges: Vec<usize>) -> Self {
        let columns = k_edges.len() - 1;
        let mut areas = vec![0; (q_edges.len() - 1) * columns];
        for band in mask.bands() {
            for row in cells(&q_edges, band.q_range) {
                let q = Range::new(q_edges[row], q_edges[row + 1]);
                let part = band.clip(&q, &band.k_range);
                for column in cells(&k_edges, columns_of(&part)) {
                    let k = Range::new(k_edges[column], k_edges[column + 1]);
                    areas[row * columns + column] += part.clip(&q, &k).area();
                }
            }
        }
        Self { q_edges, k_edges, areas }
    }

    pub(crate) fn rows(&self) -> usize {
        self.q_edges.len() - 1
    }

    pub(crate) fn columns(&self) -> usize {
        self.k_edges.len() - 1
    }

    /// Unmasked part of the pairs of a cell, 0 to 1.
    pub(crate) fn density(&self, row: usize, column: usize) -> f64 {
        let rows = self.q_edges[row + 1] - self.q_edges[row];
        let columns = self.k_edges[column + 1] - self.k_edges[column];
        self.areas[row * self.columns() + column] as f64 / (rows as f64 * columns as f64)
    }
}

/// The cells of `edges` that `range` meets.
fn cells(edges: &[usize], range: Range) -> std::ops::Range<usize> {
    if range.is_empty() {
        return 0..0;
    }
    let first = edges.partition_point(|&edge| edge <= range.start) - 1;
    first..edges.partition_point(|&edge| edge < range.end)
}

/// The columns that any row of `band` sees lie in this range: the diagonals' bounds cut off the rest.
fn columns_of(band: &Band) -> Range {
    if band.q_range.is_empty() || band.k_range.is_empty() {
        return Range::default();
    }
    let low = (band.q_range.start as i64 + band.diag_min).max(band.k_range.start as i64);
    let high = (band.q_range.end as i64 + band.diag_max).min(band.k_range.end as i64);
    if low >= high { Range::default() } else { Range::new(low as usize, high as usize) }
}

/// Limits of at most `cells` even parts of `0..seqlen`; no part is empty, so a short sequence has one a token.
pub(crate) fn even_edges(seqlen: usize, cells: usize) -> Vec<usize> {
    let cells = cells.min(seqlen).max(1);
    (0..=cells).map(|cell| (cell as u128 * seqlen as u128 / cells as u128) as usize).collect()
}

/// As [`even_edges`], with no part across two chunks as long as there are no more chunks than `cells`: each part then
/// belongs to one rank.
pub(crate) fn chunk_edges(dispatch: &Dispatch, cells: usize) -> Vec<usize> {
    let chunks = dispatch.num_chunks();
    if chunks == 0 || chunks > cells {
        return even_edges(dispatch.seqlen(), cells);
    }
    let mut edges = vec![0];
    for chunk in 0..chunks {
        let range = dispatch.chunk_range(chunk);
        edges.extend(even_edges(range.len(), cells / chunks)[1..].iter().map(|edge| range.start + edge));
    }
    edges
}

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

/// A rank that owns rows of each part between `edges`. Where a part lies in several chunks, the one at a place that
/// moves from part to part by the golden ratio: over many parts every rank is met as often as it owns rows, whatever
/// the period in which chunks go round the ranks. (The owner of most rows would always be the first of equals.)
pub(crate) fn owners(dispatch: &Dispatch, edges: &[usize]) -> Vec<usize> {
    let of_chunk = chunk_owners(dispatch);
    let owner = |(index, edge): (usize, &[usize])| {
        let place = (index as f64 * 0.618_033_988_7).fract();
        let row = edge[0] + ((edge[1] - edge[0]) as f64 * place) as usize;
        of_chunk.get(row / dispatch.chunk_size()).copied().unwrap_or(0)
    };
    edges.windows(2).enumerate().map(owner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use counterpoint_mask::{AttnSlice, MaskType};
    use proptest::prelude::*;

    fn slice() -> impl Strategy<Value = AttnSlice> {
        let mask_type = prop::sample::select(vec![
            MaskType::Full,
            MaskType::Causal,
            MaskType::InvCausal,
            MaskType::BiCausal,
        ]);
        (0usize..40, 1usize..30, 0usize..50, 1usize..30, mask_type).prop_map(|(q, sq, k, sk, mask_type)| {
            let (q, k) = (Range::new(q, (q + sq).min(48)), Range::new(k, (k + sk).min(64)));
            AttnSlice::new(q, k, mask_type)
        })
    }

    proptest! {
        #[test]
        fn densities_are_counted_pairs(slice in slice(), q_cells in 1usize..60, k_cells in 1usize..60) {
            let mask = Mask::new(48, 64, vec![slice]).unwrap();
            let raster = Raster::new(&mask, even_edges(48, q_cells), even_edges(64, k_cells));
            for row in 0..raster.rows() {
                for column in 0..raster.columns() {
                    let (q, k) = (&raster.q_edges[row..row + 2], &raster.k_edges[column..column + 2]);
                    let pairs = (q[0]..q[1]).flat_map(|i| (k[0]..k[1]).map(move |j| (i, j)));
                    let all = pairs.clone().count();
                    let unmasked = pairs.filter(|&(i, j)| slice.contains(i, j)).count();
                    prop_assert_eq!(raster.density(row, column), unmasked as f64 / all as f64);
                }
            }
        }

        #[test]
        fn even_parts_cover_the_sequence(seqlen in 1usize..10_000, count in 1usize..600) {
            let edges = even_edges(seqlen, count);
            prop_assert_eq!(edges.len() - 1, count.min(seqlen));
            prop_assert_eq!((edges[0], edges[edges.len() - 1]), (0, seqlen));
            let sizes: Vec<usize> = edges.windows(2).map(|edge| edge[1] - edge[0]).collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
        }
    }
}
