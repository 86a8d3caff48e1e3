//! Where the rows of a product come from and where they go, as tables that the kernel reads.

use bytemuck::NoUninit;

use super::{GEMM_DESTINATIONS, GEMM_SOURCES, GemmFault, GemmLayout, GemmSpec};
use counterpoint_tiles::gemm::GemmUnit;
use counterpoint_tiles::gemm::{BLOCK, GemmShape, TILE_ROWS, TilePair};

/// Some rows of one of the tensors that A is put together from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmRows {
    /// Which tensor: [`GemmTensors::a`](super::GemmTensors::a) has its address.
    pub tensor: usize,
    /// The first row.
    pub first: usize,
    /// How many.
    pub count: usize,
}

/// Rows of D that lie together, and whose operands do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowSegment {
    /// The tensor of A, and what the first row is in it: a column where A lies along m.
    source: usize,
    source_row: usize,
    /// The receiver, and the first row in it.
    pub(super) receiver: usize,
    pub(super) receiver_row: usize,
    pub(super) rows: usize,
}

/// Rows of D that TMA knows as one tensor: segments that follow each other in a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) receiver: usize,
    pub(super) receiver_row: usize,
    pub(super) rows: usize,
    /// The columns of D that it has, where these are not all.
    pub(super) columns: Option<(usize, usize)>,
}

/// A row of tiles: where its rows come from and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowTile {
    pub(super) source_row: u32,
    pub(super) destination_row: u32,
    pub(super) source: u16,
    pub(super) destination: u16,
    pub(super) rows: u32,
}

/// `GemmTile` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(C, align(32))]
pub(super) struct GemmTile {
    pub(super) source_row: u32,
    pub(super) destination_row: u32,
    pub(super) source: u16,
    pub(super) destination: u16,
    pub(super) rows: u32,
    pub(super) column: u32,
    pub(super) group: u32,
    pub(super) first: u32,
    pub(super) blocks: u32,
}

impl GemmTile {
    /// Those of both CTAs of a pair.
    pub(super) fn of_unit(unit: &GemmUnit, shape: &GemmShape, rows: &[RowTile]) -> [Self; 2] {
        let of_rank = |rank: usize| {
            let (down, across) = if shape.pair == TilePair::Rows { (rank, 0) } else { (0, rank) };
            let RowTile { source_row, destination_row, source, destination, rows } =
                rows[usize::from(unit.row_tile) + down];
            let column = (u32::from(unit.column_tile) + across as u32) * shape.columns;
            Self {
                source_row,
                destination_row,
                source,
                destination,
                rows,
                column,
                group: unit.group,
                first: 0,
                blocks: 0,
            }
        };
        [of_rank(0), of_rank(1)]
    }
}

impl GemmTile {
    /// Whether anything of it is stored.
    pub(super) fn has_elements(&self, n: usize) -> bool {
        self.rows > 0 && (self.column as usize) < n
    }
}

/// `GemmKSource` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(C)]
pub(super) struct GemmKSource {
    pub(super) source: u32,
    pub(super) row: u32,
}

/// Why A's and D's rows are none that a kernel takes.
pub(super) fn check(spec: &GemmSpec) -> Result<(), GemmFault> {
    let rows_a = spec.layout.a_dims(spec.size.m, spec.size.k)[0];
    let counts = || spec.sources.iter().map(|source| source.count);
    if counts().sum::<usize>() != rows_a || counts().any(|count| count == 0) {
        return Err(GemmFault::Sources { rows: rows_a, counts: counts().collect() });
    }
    if let Some(source) = spec.sources.iter().find(|source| source.tensor >= GEMM_SOURCES) {
        return Err(GemmFault::SourceCount { tensor: source.tensor, most: GEMM_SOURCES });
    }
    if spec.receivers.iter().sum::<usize>() != spec.size.m || spec.receivers.contains(&0) {
        return Err(GemmFault::Receivers { rows: spec.size.m, receivers: spec.receivers.clone() });
    }
    let segments = segments(spec);
    let destinations = destinations(&segments).0.len();
    if destinations > GEMM_DESTINATIONS {
        return Err(GemmFault::SegmentCount { count: destinations, most: GEMM_DESTINATIONS });
    }
    if !spec.column_receivers.is_empty() {
        check_columns(spec, destinations)?;
    }
    if spec.layout == GemmLayout::Tn && !GemmRows::can_be_k(&spec.sources) {
        return Err(GemmFault::PiecesOfK { counts: counts().collect(), block: BLOCK });
    }
    // Boxes of TMA begin at multiples of 16 bytes.
    let begins = |segment: &RowSegment| (segment.source_row * spec.element.bytes()).is_multiple_of(16);
    if spec.layout == GemmLayout::Tn && !segments.iter().all(begins) {
        return Err(GemmFault::ReceiversOfColumnsOfA { receivers: spec.receivers.clone() });
    }
    Ok(())
}

/// Why receivers of columns are none that a kernel takes.
fn check_columns(spec: &GemmSpec, segments: usize) -> Result<(), GemmFault> {
    let columns = &spec.column_receivers;
    if columns.iter().sum::<usize>() != spec.size.n || columns.contains(&0) {
        let (columns, receivers) = (spec.size.n, columns.clone());
        return Err(GemmFault::ColumnReceivers { columns, receivers });
    }
    if columns.len() > GEMM_DESTINATIONS {
        return Err(GemmFault::ColumnReceiverCount { count: columns.len(), most: GEMM_DESTINATIONS });
    }
    if segments > 1 {
        return Err(GemmFault::BothReceivers { receivers: spec.receivers.clone() });
    }
    let whole = |columns: &usize| (*columns as u64 * spec.output.bytes()).is_multiple_of(16);
    if !columns.iter().all(whole) {
        return Err(GemmFault::ColumnReceiverBytes { receivers: columns.clone() });
    }
    Ok(())
}

/// Rows of one of A's tensors, as far as anyone reads it.
pub(super) fn tensor_rows(spec: &GemmSpec, tensor: usize) -> usize {
    read_rows(&spec.sources, tensor)
}

fn read_rows(sources: &[GemmRows], tensor: usize) -> usize {
    let of = sources.iter().filter(|source| source.tensor == tensor);
    of.map(|source| source.first + source.count).max().unwrap_or(0)
}

impl GemmRows {
    /// Whether these rows can be the K of a product ([`GemmLayout::Tn`]): blocks of 64 one after the other, the last of which
    /// may be shorter if nothing that is read follows it.
    pub fn can_be_k(sources: &[Self]) -> bool {
        let whole = |source: &Self| source.count.is_multiple_of(BLOCK);
        sources.split_last().is_some_and(|(last, before)| {
            let ends = read_rows(sources, last.tensor) == last.first + last.count;
            let tensors = sources.iter().all(|source| source.tensor < GEMM_SOURCES);
            before.iter().all(whole) && (ends || whole(last)) && tensors
        })
    }
}

/// D's rows, cut wherever a receiver or a source of A ends.
pub(super) fn segments(spec: &GemmSpec) -> Vec<RowSegment> {
    // Where A lies along m, all tensors have all of m.
    let along_m = [GemmRows { tensor: 0, first: 0, count: spec.size.m }];
    let sources = if spec.layout == GemmLayout::Tn { &along_m[..] } else { &spec.sources };
    let mut segments = Vec::new();
    let mut sources = sources.iter().copied();
    let mut source = GemmRows { tensor: 0, first: 0, count: 0 };
    for (receiver, &rows) in spec.receivers.iter().enumerate() {
        let mut receiver_row = 0;
        while receiver_row < rows {
            if source.count == 0 {
                let Some(next) = sources.next() else { return segments };
                source = next;
                continue;
            }
            let count = source.count.min(rows - receiver_row);
            let GemmRows { tensor, first, .. } = source;
            segments.push(RowSegment {
                source: tensor,
                source_row: first,
                receiver,
                receiver_row,
                rows: count,
            });
            receiver_row += count;
            source = GemmRows { tensor, first: first + count, count: source.count - count };
        }
    }
    segments
}

/// Rows of tiles.
pub(super) fn tile_rows(spec: &GemmSpec) -> usize {
    segments(spec).iter().map(|segment| segment.rows.div_ceil(TILE_ROWS)).sum()
}

/// Where segments go, and for each of them the destination and its first row there. TMA stores 64 rows at once and
/// stops at a destination's end, so a segment that others follow in it has whole boxes of rows.
pub(super) fn destinations(segments: &[RowSegment]) -> (Vec<Destination>, Vec<(usize, usize)>) {
    const BOX_ROWS: usize = 64;
    let mut destinations: Vec<Destination> = Vec::new();
    let mut places = Vec::with_capacity(segments.len());
    for &RowSegment { receiver, receiver_row, rows, .. } in segments {
        match destinations.last_mut() {
            Some(last) if last.receiver == receiver && last.rows.is_multiple_of(BOX_ROWS) => {
                last.rows += rows
            }
            _ => destinations.push(Destination { receiver, receiver_row, rows, columns: None }),
        }
        let last = destinations.len() - 1;
        places.push((last, receiver_row - destinations[last].receiver_row));
    }
    (destinations, places)
}

/// Where D goes.
pub(super) fn destinations_of(spec: &GemmSpec) -> Vec<Destination> {
    if spec.column_receivers.is_empty() {
        return destinations(&segments(spec)).0;
    }
    let mut end = 0;
    let of = |(receiver, &columns): (usize, &usize)| {
        end += columns;
        let columns = Some((end - columns, end));
        Destination { receiver, receiver_row: 0, rows: spec.size.m, columns }
    };
    spec.column_receivers.iter().enumerate().map(of).collect()
}

/// The tiles of both CTAs of every unit, each with where it goes.
pub(super) fn unit_tiles<'a>(
    spec: &'a GemmSpec,
    shape: &'a GemmShape,
    units: &'a [GemmUnit],
    rows: &'a [RowTile],
) -> impl Iterator<Item = GemmTile> + 'a {
    let destinations = destinations_of(spec);
    units.iter().flat_map(|unit| GemmTile::of_unit(unit, shape, rows)).map(move |tile| {
        let has = |destination: &Destination| {
            destination.columns.is_some_and(|(_, end)| (tile.column as usize) < end)
        };
        match destinations.iter().position(has) {
            Some(index) => GemmTile { destination: index as u16, ..tile },
            None => tile,
        }
    })
}

/// The tiles of segments, and one more for a unit that needs a second.
pub(super) fn row_tiles(segments: &[RowSegment]) -> Vec<RowTile> {
    let mut tiles = Vec::new();
    let (_, places) = destinations(segments);
    for (segment, (destination, first)) in segments.iter().zip(places) {
        for begin in (0..segment.rows).step_by(TILE_ROWS) {
            // A product's rows are fewer than 2^22, tensors and segments a few.
            tiles.push(RowTile {
                source_row: (segment.source_row + begin) as u32,
                destination_row: (first + begin) as u32,
                source: segment.source as u16,
                destination: destination as u16,
                rows: TILE_ROWS.min(segment.rows - begin) as u32,
            });
        }
    }
    let empty = tiles.last().map(|&last| RowTile { rows: 0, ..last });
    tiles.extend(empty);
    tiles
}

/// Where A's blocks of k lie, where that is not one after the other from the first row of one tensor.
pub(super) fn k_sources(spec: &GemmSpec) -> Vec<GemmKSource> {
    if spec.layout != GemmLayout::Tn || spec.sources == [GemmRows { tensor: 0, first: 0, count: spec.size.k }]
    {
        return Vec::new();
    }
    let blocks = |source: &GemmRows| {
        let GemmRows { tensor, first, count } = *source;
        let block = move |row| GemmKSource { source: tensor as u32, row: row as u32 };
        (first..first + count).step_by(BLOCK).map(block)
    };
    spec.sources.iter().flat_map(blocks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::ElementType;

    fn spec(layout: GemmLayout, sources: &[(usize, usize, usize)], receivers: &[usize]) -> GemmSpec {
        let rows: usize = sources.iter().map(|source| source.2).sum();
        let m: usize = receivers.iter().sum();
        let k = if layout == GemmLayout::Tn { rows } else { 64 };
        let mut spec = GemmSpec::new(m, 64, k, layout, ElementType::Bf16);
        spec.sources =
            sources.iter().map(|&(tensor, first, count)| GemmRows { tensor, first, count }).collect();
        spec.receivers = receivers.to_vec();
        spec
    }

    /// Row by row, the definition.
    #[test]
    fn every_row_is_in_one_tile() {
        let spec = spec(GemmLayout::Nt, &[(1, 5, 300), (0, 0, 20), (1, 400, 80)], &[290, 110]);
        assert_eq!(check(&spec), Ok(()));
        let wanted: Vec<(u16, u32)> = (5..305)
            .map(|row| (1, row))
            .chain((0..20).map(|row| (0, row)))
            .chain((400..480).map(|row| (1, row)))
            .collect();
        assert_eq!(rows_of_tiles(&spec), wanted);
        assert_eq!(destinations(&segments(&spec)).0.len(), 4);
    }

    /// Where D's rows come from, as its tiles say.
    fn rows_of_tiles(spec: &GemmSpec) -> Vec<(u16, u32)> {
        let segments = segments(spec);
        let destinations = destinations(&segments).0;
        let tiles = row_tiles(&segments);
        assert_eq!(tiles.len(), tile_rows(spec) + 1);
        let mut found = Vec::new();
        for tile in &tiles {
            let destination = destinations[usize::from(tile.destination)];
            for row in 0..tile.rows {
                let before: usize = spec.receivers[..destination.receiver].iter().sum();
                let at = before + destination.receiver_row + (tile.destination_row + row) as usize;
                assert_eq!(at, found.len());
                found.push((tile.source, tile.source_row + row));
            }
        }
        found
    }

    /// Groups of rows of several ranks' tokens, as wave groups have them.
    #[test]
    fn segments_of_whole_boxes_are_one_destination() {
        let pieces = [(0, 0, 128), (0, 512, 192), (0, 128, 384), (0, 704, 320)];
        let spec = spec(GemmLayout::Nt, &pieces, &[320, 704]);
        let wanted: Vec<(u16, u32)> = pieces
            .iter()
            .flat_map(|&(_, first, count)| (first..first + count).map(|row| (0, row as u32)))
            .collect();
        assert_eq!(rows_of_tiles(&spec), wanted);
        let (destinations, places) = destinations(&segments(&spec));
        assert_eq!(
            destinations.iter().map(|d| (d.receiver, d.rows)).collect::<Vec<_>>(),
            [(0, 320), (1, 704)]
        );
        assert_eq!(places, [(0, 0), (0, 128), (1, 0), (1, 384)]);
    }

    #[test]
    fn terms_are_whole_blocks_and_end_with_their_tensor() {
        let rows =
            |spec: &GemmSpec| k_sources(spec).iter().map(|term| (term.source, term.row)).collect::<Vec<_>>();
        let pieces = spec(GemmLayout::Tn, &[(1, 64, 128), (0, 0, 64), (1, 192, 30)], &[64]);
        assert_eq!(check(&pieces), Ok(()));
        assert_eq!(rows(&pieces), [(1, 64), (1, 128), (0, 0), (1, 192)]);
        assert!(rows(&spec(GemmLayout::Tn, &[(0, 0, 100)], &[64])).is_empty());
        for wrong in [&[(0, 0, 60), (1, 0, 64)][..], &[(0, 0, 64), (1, 0, 64), (0, 64, 30), (1, 64, 64)]] {
            assert!(check(&spec(GemmLayout::Tn, wrong, &[64])).is_err());
        }
        // Rows of the same tensor lie behind the last ones.
        assert!(check(&spec(GemmLayout::Tn, &[(0, 64, 64), (0, 0, 30)], &[64])).is_err());
    }

    #[test]
    fn rows_that_do_not_add_up_are_refused() {
        assert!(check(&spec(GemmLayout::Nn, &[(0, 0, 100)], &[60, 50])).is_err());
        assert!(check(&spec(GemmLayout::Nn, &[(16, 0, 100)], &[100])).is_err());
        assert!(
            check(&spec(GemmLayout::Nn, &[(0, 0, 90)], &[10; 9]))
                .unwrap_err()
                .to_string()
                .contains("9 segments")
        );
        assert!(check(&spec(GemmLayout::Nn, &[(0, 0, 90)], &[35, 55])).is_ok());
        assert!(
            check(&spec(GemmLayout::Tn, &[(0, 0, 64)], &[35, 55]))
                .unwrap_err()
                .to_string()
                .contains("16 bytes")
        );
        assert!(check(&spec(GemmLayout::Tn, &[(0, 0, 64)], &[40, 50])).is_ok());
    }
}
