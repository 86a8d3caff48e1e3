//! Tiles of queries and blocks of keys on the CPU: which meet under a mask, and how their rows are gathered.

use counterpoint_mask::{Band, Range};
use counterpoint_plan::KEY_BLOCK;

use crate::element::HostElement;

/// Which bands touch which strip (a tile of query rows or a block of keys), each clipped to its strip.
///
/// Bands are looked up by strip, so a mask of very many slices costs its strips only the slices that meet them.
pub(crate) struct Strips {
    strips: Vec<Vec<Band>>,
}

impl Strips {
    /// By tiles of `tile_rows` query rows.
    pub(crate) fn of_rows(bands: &[Band], q_rows: usize, tile_rows: usize) -> Self {
        Self::new(bands, q_rows, tile_rows, |band| band.q_range, |band, rows| band.clip(&rows, &band.k_range))
    }

    /// By blocks of [`KEY_BLOCK`] key rows.
    pub(crate) fn of_columns(bands: &[Band], key_rows: usize) -> Self {
        Self::new(
            bands,
            key_rows,
            KEY_BLOCK,
            |band| band.k_range,
            |band, cols| band.clip(&band.q_range, &cols),
        )
    }

    fn new(
        bands: &[Band],
        len: usize,
        step: usize,
        range: impl Fn(&Band) -> Range,
        clip: impl Fn(&Band, Range) -> Band,
    ) -> Self {
        let mut strips = vec![Vec::new(); len.div_ceil(step)];
        for band in bands {
            let touched = range(band);
            if touched.is_empty() {
                continue;
            }
            assert!(touched.end <= len, "band {band:?} leaves the {len} rows of its tensor");
            for index in touched.start / step..=(touched.end - 1) / step {
                let part = clip(band, strip(index, step, len));
                if part.area() > 0 {
                    strips[index].push(part);
                }
            }
        }
        Self { strips }
    }

    /// Number of strips.
    pub(crate) fn len(&self) -> usize {
        self.strips.len()
    }

    /// The parts of the bands inside strip `index`.
    pub(crate) fn bands(&self, index: usize) -> &[Band] {
        &self.strips[index]
    }

    /// Unmasked pairs of strip `index`.
    pub(crate) fn area(&self, index: usize) -> u64 {
        self.strips[index].iter().map(Band::area).sum()
    }
}

/// Rows of strip `index` when `len` rows are cut every `step` rows.
pub(crate) fn strip(index: usize, step: usize, len: usize) -> Range {
    Range::new(index * step, ((index + 1) * step).min(len))
}

/// A tile of query rows that meets a key block.
pub(crate) struct Visit {
    /// Index of the other strip: of the key block in the loop over a tile, of the tile in the loop over a block.
    pub(crate) index: usize,
    /// The query rows of the tile from the first to the last that sees anything of the block.
    pub(crate) rows: Range,
    /// The key rows of the block.
    pub(crate) cols: Range,
    /// The bands inside; empty when every row of `rows` sees every column of `cols`.
    pub(crate) bands: Vec<Band>,
}

impl Visit {
    /// `None` when no pair inside is unmasked. All fields depend on the set of unmasked pairs alone, never on how it is
    /// cut into bands: results must not.
    fn new(index: usize, bands: &[Band], rows: Range, cols: Range) -> Option<Self> {
        let mut inside = Vec::with_capacity(bands.len());
        let mut hull: Option<Range> = None;
        let mut area = 0;
        for band in bands {
            let part = band.clip(&rows, &cols);
            let part_area = part.area();
            if part_area == 0 {
                continue;
            }
            // A row r has a column when r + diag_max reaches the first column and r + diag_min stays below the end.
            let first = (part.k_range.start as i64 - part.diag_max).max(part.q_range.start as i64) as usize;
            let end = (part.k_range.end as i64 - part.diag_min).min(part.q_range.end as i64) as usize;
            hull = Some(match hull {
                None => Range::new(first, end),
                Some(h) => Range::new(h.start.min(first), h.end.max(end)),
            });
            area += part_area;
            inside.push(part);
        }
        let rows = hull?;
        if area == (rows.len() as u64) * (cols.len() as u64) {
            inside.clear();
        }
        Some(Self { index, rows, cols, bands: inside })
    }
}

/// The key blocks that tile `rows` meets, ascending. `bands` are those of the tile's strip.
pub(crate) fn blocks_of_tile(bands: &[Band], rows: Range, key_rows: usize) -> impl Iterator<Item = Visit> {
    visits(
        bands,
        KEY_BLOCK,
        |band| {
            let start = (band.q_range.start as i64 + band.diag_min).max(band.k_range.start as i64);
            let end = (band.q_range.end as i64 + band.diag_max).min(band.k_range.end as i64);
            (start, end)
        },
        move |index| (rows, strip(index, KEY_BLOCK, key_rows)),
    )
}

/// The tiles that key block `cols` meets, ascending. `bands` are those of the block's strip.
pub(crate) fn tiles_of_block(
    bands: &[Band],
    cols: Range,
    q_rows: usize,
    tile_rows: usize,
) -> impl Iterator<Item = Visit> {
    visits(
        bands,
        tile_rows,
        |band| {
            let start = (band.k_range.start as i64 - band.diag_max).max(band.q_range.start as i64);
            let end = (band.k_range.end as i64 - band.diag_min).min(band.q_range.end as i64);
            (start, end)
        },
        move |index| (strip(index, tile_rows, q_rows), cols),
    )
}

/// Groups the bands of one strip by the strips of the other axis that they reach.
fn visits(
    bands: &[Band],
    step: usize,
    reach: impl Fn(&Band) -> (i64, i64),
    rectangle: impl Fn(usize) -> (Range, Range),
) -> impl Iterator<Item = Visit> {
    // (strip, band) pairs: their number is linear in what the strip touches.
    let mut pairs: Vec<(usize, Band)> = Vec::new();
    for band in bands {
        let (start, end) = reach(band);
        if start < end {
            pairs.extend((start as usize / step..=(end as usize - 1) / step).map(|index| (index, *band)));
        }
    }
    pairs.sort_by_key(|pair| pair.0);
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < pairs.len() {
            let index = pairs[at].0;
            let end = at + pairs[at..].partition_point(|pair| pair.0 == index);
            let inside: Vec<Band> = pairs[at..end].iter().map(|pair| pair.1).collect();
            at = end;
            let (rows, cols) = rectangle(index);
            if let Some(visit) = Visit::new(index, &inside, rows, cols) {
                return Some(visit);
            }
        }
        None
    })
}

/// Copies columns `[offset, offset + width)` of some rows of a row-major tensor into dense rows, in the accumulator
/// type. With the heads of a group side by side in a row, this also stacks them: the result's rows are (row, head).
pub(crate) fn gather<T: HostElement>(
    tensor: &[T],
    row_elements: usize,
    rows: Range,
    offset: usize,
    width: usize,
    dst: &mut [T::Accumulator],
) {
    let rows = rows.start..rows.end;
    for (row, dst) in rows.zip(dst.chunks_exact_mut(width)) {
        let at = row * row_elements + offset;
        T::widen_slice(&tensor[at..at + width], dst);
    }
}

/// Cuts a tensor `[rows, heads, width]` into strips of `step` rows of one head: entry `strip * heads + head` holds that
/// strip's rows. This is how work items own disjoint, interleaved parts of one tensor.
pub(crate) fn split_heads<A>(
    tensor: &mut [A],
    heads: usize,
    width: usize,
    step: usize,
) -> Vec<Vec<&mut [A]>> {
    let rows = tensor.len() / (heads * width);
    let mut parts: Vec<Vec<&mut [A]>> = Vec::new();
    parts.resize_with(rows.div_ceil(step) * heads, || Vec::with_capacity(step));
    for (row, elements) in tensor.chunks_exact_mut(heads * width).enumerate() {
        for (head, part) in elements.chunks_exact_mut(width).enumerate() {
            parts[row / step * heads + head].push(part);
        }
    }
    parts
}
