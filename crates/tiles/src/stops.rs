//! Between which rows tiles are fitted, and where they may end early.

use counterpoint_mask::Band;

/// Segments of fewer rows than this part of a tile have no cuts of their own: what could be saved at each is little, and
/// looking at all of them takes time in the square of their number.
const SHORT_SEGMENT: usize = 8;

/// Rows that a path must not stride over, and those of them where a tile may end early. Both ascending, and both end with
/// the last row.
///
/// Bands begin and end at *edges*. Tiles may end there, and near the start of a long segment between two edges where full
/// tiles from the one or to the other end: below a diagonal the first rows of a segment are the cheapest, so it is better
/// that the tile that is not full lies there than at the end.
#[derive(Debug, Default)]
pub(super) struct Stops {
    pub(super) stops: Vec<usize>,
    pub(super) cuts: Vec<usize>,
    /// Where bands end, ascending; and where they begin or end.
    ends: Vec<usize>,
    edges: Vec<usize>,
}

impl Stops {
    /// Bytes of all lists.
    pub(super) fn bytes(&self) -> usize {
        let rows = [&self.stops, &self.cuts, &self.ends, &self.edges].map(Vec::capacity);
        rows.iter().sum::<usize>() * size_of::<usize>()
    }

    /// Of `bands`, which are ascending by row, in so many `rows`.
    pub(super) fn fill(&mut self, bands: &[Band], rows: usize, tile_rows: usize) {
        self.fill_edges(bands, rows);
        let Self { stops, cuts, edges, .. } = self;
        let short = tile_rows.div_ceil(SHORT_SEGMENT);
        stops.clear();
        cuts.clear();
        let (mut last, mut last_cut) = (0, 0);
        for (index, &edge) in edges.iter().enumerate() {
            if edge - last > tile_rows {
                let first = last + ((edge - last) as u32 % tile_rows as u32) as usize;
                // Ascending. Where full tiles fit exactly, the first row is the edge before, and the last two are equal.
                let near = [first, last + tile_rows, first + tile_rows];
                let near = if first == last { &near[1..2] } else { &near[..] };
                let near = near.iter().filter(|&&row| row < edge);
                stops.extend(near.clone());
                cuts.extend(near);
            }
            stops.push(edge);
            let next = edges.get(index + 1).map_or(usize::MAX, |next| next - edge);
            if edge - last_cut >= short || next >= short {
                cuts.push(edge);
                last_cut = edge;
            }
            last = edge;
        }
    }

    /// Where bands begin and end, and the first row and the end of all, ascending.
    fn fill_edges(&mut self, bands: &[Band], rows: usize) {
        let Self { ends, edges, .. } = self;
        ends.clear();
        ends.extend(bands.iter().map(|band| band.q_range.end));
        if !ends.is_sorted() {
            ends.sort_unstable();
        }
        edges.clear();
        edges.push(0);
        let mut push = |edge: usize| {
            if edges.last() != Some(&edge) {
                edges.push(edge);
            }
        };
        let mut next = 0;
        for band in bands {
            while next < ends.len() && ends[next] <= band.q_range.start {
                push(ends[next]);
                next += 1;
            }
            push(band.q_range.start);
        }
        ends[next..].iter().chain([&rows]).for_each(|&end| push(end));
    }
}
