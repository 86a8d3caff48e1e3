//! Products of a pass as one kernel that raises a signal group by group: groups of rows, or of columns. Those whose rows arrive group by group
//! are another (`arriving`), or, where there is none for them, each of its own behind its rows.

use counterpoint_exec::ExecError;
use counterpoint_mask::Range;
use counterpoint_schedule::{
    self as schedule, Accumulate, BufferId, GemmLayout, RowArrivals, RowBlocks, SignalId,
};

use super::arriving::Arriving;
use super::compute::Prepare;
use super::counter_waits::RaisedCounter;
use super::linear::{Product, RowSegment, segments};
use super::matrix_rows::SourceRows;
use super::{CudaBuffer, CudaSignal};
use crate::kernel::{
    GEMM_DESTINATIONS, Gemm, GemmEpilogue, GemmRows, GemmSignals, GemmSpec, GemmTensors, TileOrder,
};
use crate::{CudaError, DeviceBuffer, Stream};

/// The products.
pub(super) struct Waves {
    signal: Option<SignalId>,
    arrivals: Option<RowArrivals>,
    work: Work,
}

enum Work {
    /// One after the other, where no kernel stores results where they belong: those are copied, which events announce.
    Apart(Vec<Product>),
    Together(Box<Together>),
    Arriving(Box<Arriving>),
}

/// As few launches as destinations allow: mostly one.
struct Together {
    a: SourceRows,
    b: SourceRows,
    /// Of each group the result, and the bytes of its rows, where parts begin at some that are not the first.
    out: Vec<BufferId>,
    row_bytes: u64,
    bias: Option<BufferId>,
    launches: Vec<Launch>,
    counters: DeviceBuffer,
    /// What a run adds to the counter of each group.
    rises: Vec<u32>,
}

struct Launch {
    gemm: Gemm,
    tensors: Vec<usize>,
    parts: Vec<GroupRows>,
}

/// Rows of a group's result that one launch stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupRows {
    group: usize,
    first: usize,
    rows: usize,
}

impl Waves {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::WaveGemm) -> Result<Self, ExecError> {
        let together = match (&op.arrivals, op.signal, op.columns()) {
            (Some(arrivals), None, _) => Arriving::new(prepare, &op.groups, arrivals)?.map(Work::arriving),
            (None, Some(_), None) => Together::new(prepare, &op.groups)?.map(Work::together),
            (None, Some(_), Some(columns)) => {
                Together::of_columns(prepare, &op.groups, columns)?.map(Work::together)
            }
            // No kernel waits for rows and is waited for.
            (Some(_), Some(_), _) | (None, None, _) => None,
        };
        let apart = || {
            let products = op.groups.iter().map(|group| Product::new(prepare, group));
            products.collect::<Result<_, ExecError>>().map(Work::Apart)
        };
        let work = together.map_or_else(apart, Ok)?;
        Ok(Self { signal: op.signal, arrivals: op.arrivals.clone(), work })
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), CudaError> {
        let signal = self.signal.map(|signal| &signals[signal.0]);
        match &self.work {
            Work::Apart(products) => products.iter().enumerate().try_for_each(|(number, product)| {
                if let Some(RowArrivals { signal, values }) = &self.arrivals {
                    signals[signal.0].wait_for_streams(stream, values[number])?;
                }
                product.launch(stream, buffers)?;
                signal.map_or(Ok(()), |signal| signal.raise(stream, number as u64 + 1))
            }),
            Work::Together(together) => {
                together.launch(stream, buffers)?;
                let counters = together.rises.iter().enumerate();
                let counters =
                    counters.map(|(group, &rise)| RaisedCounter { address: together.counter(group), rise });
                if let Some(signal) = signal {
                    signal.raised_by_kernel(counters);
                }
                Ok(())
            }
            Work::Arriving(arriving) => arriving.launch(stream, buffers, signals),
        }
    }
}

impl Work {
    fn together(work: Together) -> Self {
        Self::Together(Box::new(work))
    }

    fn arriving(work: Arriving) -> Self {
        Self::Arriving(Box::new(work))
    }
}

/// What products of one launch have in common.
fn alike(a: &schedule::Gemm, b: &schedule::Gemm) -> bool {
    a.layout == b.layout
        && a.b == b.b
        && a.bias == b.bias
        && a.accumulate == b.accumulate
        && a.pass_rows == b.pass_rows
}

impl Together {
    /// `None` where no kernel stores the results where they belong.
    fn new(prepare: &Prepare<'_>, groups: &[schedule::Gemm]) -> Result<Option<Self>, ExecError> {
        let Some(first) = groups.first() else { return Ok(None) };
        let columns = prepare.spec(first.out).row_elements();
        let scalar = prepare.scalar(first.out)?;
        let row_bytes = columns as u64 * scalar.bytes();
        let fits = first.layout != GemmLayout::Tn
            && groups.iter().all(|group| group.columns.is_none())
            && first.accumulate == Accumulate::Start
            && groups
                .iter()
                .all(|group| alike(first, group) && prepare.scalar(group.out).ok() == Some(scalar))
            && row_bytes.is_multiple_of(16);
        if !fits {
            return Ok(None);
        }
        let element = prepare.element(first.a.pieces()[0].buffer)?;
        let blocks: RowBlocks = groups.iter().flat_map(|group| group.a.iter()).collect();
        let a = SourceRows::new(prepare, &blocks, |_| true)?;
        let b = SourceRows::new(prepare, &first.b, |rows| rows.len() == 1)?;
        let k = prepare.spec(first.a.pieces()[0].buffer).row_elements();
        let epilogue = if first.bias.is_some() { GemmEpilogue::StoreBias } else { GemmEpilogue::Store };
        let mut rises = vec![0; groups.len()];
        let mut launches = Vec::new();
        for pieces in launches_of(&pieces(a.rows(), groups)) {
            let mut tensors: Vec<usize> = pieces.iter().map(|(source, _)| source.tensor).collect();
            tensors.sort_unstable();
            tensors.dedup();
            let sources = pieces.iter().map(|(source, _)| GemmRows {
                tensor: tensors.binary_search(&source.tensor).unwrap_or(0),
                ..*source
            });
            let parts = rows_by_group(&pieces);
            let m = parts.iter().map(|part| part.rows).sum();
            let spec = GemmSpec {
                output: scalar,
                pass_rows: first.pass_rows,
                strides: [a.stride(), b.stride(), columns],
                epilogue,
                sources: sources.collect(),
                receivers: parts.iter().map(|part| part.rows).collect(),
                signals: GemmSignals::Receivers,
                order: TileOrder::Cuts(cuts(&pieces).into()),
                sm_margin: prepare.sm_margin(),
                grid: prepare.grid(),
                ..GemmSpec::new(m, columns, k, prepare.gemm_layout(first.layout), element)
            };
            let gemm = prepare.gemm(&spec)?;
            for (part, signals) in parts.iter().zip(gemm.signals_of()) {
                rises[part.group] += signals;
            }
            launches.push(Launch { gemm, tensors, parts });
        }
        let counters = DeviceBuffer::from_slice(prepare.setup(), &vec![0u32; groups.len()])
            .map_err(|error| prepare.device_error(error))?;
        let out = groups.iter().map(|group| group.out).collect();
        Ok(Some(Self { a, b, out, row_bytes, bias: first.bias, launches, counters, rises }))
    }

    /// Groups of all `n` columns of one product; `None` where no kernel stores each in a result of its own: tiles must not have columns of
    /// two of them.
    fn of_columns(
        prepare: &Prepare<'_>,
        groups: &[schedule::Gemm],
        n: usize,
    ) -> Result<Option<Self>, ExecError> {
        let Some(first) = groups.first() else { return Ok(None) };
        let (m, scalar) = (prepare.spec(first.out).rows(), prepare.scalar(first.out)?);
        let mut end = 0;
        let follows = |group: &schedule::Gemm| {
            let columns = group.columns.unwrap_or(Range::new(0, 0));
            let begin = std::mem::replace(&mut end, columns.end);
            let bytes = columns.len() as u64 * scalar.bytes();
            columns.start == begin
                && bytes.is_multiple_of(16)
                && group.out_rows.only() == Some(Range::new(0, m))
        };
        let fits = first.layout != GemmLayout::Tn
            && first.accumulate == Accumulate::Start
            && groups.len() <= GEMM_DESTINATIONS
            && groups.iter().all(follows)
            && groups.iter().all(|group| {
                alike(first, group)
                    && prepare.scalar(group.out).ok() == Some(scalar)
                    && prepare.spec(group.out).rows() == m
            });
        if !fits {
            return Ok(None);
        }
        let element = prepare.element(first.a.pieces()[0].buffer)?;
        let a = SourceRows::new(prepare, &first.a, |rows| rows.len() == 1)?;
        let b = SourceRows::new(prepare, &first.b, |rows| rows.len() == 1)?;
        let k = prepare.spec(first.a.pieces()[0].buffer).row_elements();
        let epilogue = if first.bias.is_some() { GemmEpilogue::StoreBias } else { GemmEpilogue::Store };
        let widths: Vec<usize> =
            groups.iter().filter_map(|group| group.columns).map(|columns| columns.len()).collect();
        let ends = groups.iter().filter_map(|group| group.columns).map(|columns| columns.end);
        let source = a.rows()[0];
        let spec = GemmSpec {
            output: scalar,
            pass_rows: first.pass_rows,
            strides: [a.stride(), b.stride(), n],
            epilogue,
            sources: vec![GemmRows { tensor: 0, ..source }],
            column_receivers: widths,
            signals: GemmSignals::Receivers,
            order: TileOrder::ColumnCuts(ends.take(groups.len() - 1).collect()),
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
            ..GemmSpec::new(m, n, k, prepare.gemm_layout(first.layout), element)
        };
        if !prepare.has_shapes(&spec) {
            return Ok(None);
        }
        let gemm = prepare.gemm(&spec)?;
        if !gemm.describes_columns() {
            return Ok(None);
        }
        let counters = DeviceBuffer::from_slice(prepare.setup(), &vec![0u32; groups.len()])
            .map_err(|error| prepare.device_error(error))?;
        let rises = gemm.signals_of().to_vec();
        let parts = (0..groups.len()).map(|group| GroupRows { group, first: 0, rows: m }).collect();
        let launches = vec![Launch { gemm, tensors: vec![source.tensor], parts }];
        let out = groups.iter().map(|group| group.out).collect();
        Ok(Some(Self { a, b, out, row_bytes: 0, bias: first.bias, launches, counters, rises }))
    }

    fn counter(&self, group: usize) -> u64 {
        self.counters.address() + (group * size_of::<u32>()) as u64
    }

    fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        self.a.enter(stream, buffers)?;
        self.b.enter(stream, buffers)?;
        let addresses = self.a.addresses(buffers);
        for Launch { gemm, tensors, parts } in &self.launches {
            let a: Vec<u64> = tensors.iter().map(|&tensor| addresses[tensor]).collect();
            let out = |part: &GroupRows| {
                buffers[self.out[part.group].0].address() + part.first as u64 * self.row_bytes
            };
            let d: Vec<u64> = parts.iter().map(out).collect();
            let counters: Vec<u64> = parts.iter().map(|part| self.counter(part.group)).collect();
            let tensors = GemmTensors {
                a: &a,
                b: self.b.first_row(buffers),
                d: &d,
                bias: self.bias.map_or(0, |bias| buffers[bias.0].address()),
                counters: &counters,
            };
            // SAFETY: `check_operands` has compared all shapes and types; buffers, copies and counters live as long as what is
            // enqueued; the Program orders who else uses them.
            unsafe { gemm.launch(stream, &tensors) }?;
        }
        Ok(())
    }
}

/// Rows of A and where they go: of which group, and from which row of its result on.
type Piece = (GemmRows, (usize, usize));

/// Rows of A next to the groups' rows of the result, cut wherever one of them is.
fn pieces(a: &[GemmRows], groups: &[schedule::Gemm]) -> Vec<Piece> {
    // Every range of rows once, by its number: rows of different groups are not neighbours.
    let places: Vec<(usize, Range)> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, gemm)| gemm.out_rows.iter().map(move |rows| (group, rows)))
        .collect();
    let mut end = 0;
    let ranges: Vec<Range> = places
        .iter()
        .map(|(_, rows)| {
            end += rows.len();
            Range::new(end - rows.len(), end)
        })
        .collect();
    let place = |RowSegment { source, out }: RowSegment| {
        let at = ranges.partition_point(|range| range.end <= out);
        let (group, rows) = places[at];
        (source, (group, rows.start + out - ranges[at].start))
    };
    segments(a, &ranges).into_iter().map(place).collect()
}

/// Whether rows that follow others in a result need a destination of their own, as [`Gemm`] cuts them.
fn begins_destination(before: Option<&Piece>, piece: &Piece) -> bool {
    /// Rows that the copy engine stores at once.
    const BOX_ROWS: usize = 64;
    before.is_none_or(|(source, (group, first))| {
        let (of, row) = piece.1;
        of != *group || row != first + source.count || !source.count.is_multiple_of(BOX_ROWS)
    })
}

/// The pieces of each launch, which has so many destinations at most.
fn launches_of(pieces: &[Piece]) -> Vec<Vec<Piece>> {
    let mut launches: Vec<Vec<Piece>> = Vec::new();
    let mut destinations = 0;
    for piece in pieces {
        let before = launches.last().and_then(|launch| launch.last());
        destinations += usize::from(begins_destination(before, piece));
        match launches.last_mut() {
            Some(launch) if destinations <= GEMM_DESTINATIONS => launch.push(*piece),
            _ => {
                destinations = 1;
                launches.push(vec![*piece]);
            }
        }
    }
    launches
}

/// Rows that lie together in a group's result.
fn rows_by_group(pieces: &[Piece]) -> Vec<GroupRows> {
    let mut parts: Vec<GroupRows> = Vec::new();
    for &(GemmRows { count, .. }, (group, first)) in pieces {
        match parts.last_mut() {
            Some(last) if last.group == group && last.first + last.rows == first => last.rows += count,
            _ => parts.push(GroupRows { group, first, rows: count }),
        }
    }
    parts
}

/// Rows of tiles before the end of each group but the last.
fn cuts(pieces: &[Piece]) -> Vec<usize> {
    const TILE_ROWS: usize = 128;
    let mut tiles = 0;
    let mut cuts = Vec::new();
    for (index, (source, (group, _))) in pieces.iter().enumerate() {
        tiles += source.count.div_ceil(TILE_ROWS);
        if pieces.get(index + 1).is_some_and(|(_, (next, _))| next != group) {
            cuts.push(tiles);
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gemm(rows: usize) -> schedule::Gemm {
        schedule::Gemm {
            layout: GemmLayout::Nt,
            a: RowBlocks::default(),
            b: RowBlocks::default(),
            out: BufferId(0),
            out_rows: vec![Range::new(0, rows)].into(),
            pass_rows: rows,
            columns: None,
            bias: None,
            accumulate: Accumulate::Start,
        }
    }

    fn rows(first: usize, count: usize) -> GemmRows {
        GemmRows { tensor: 0, first, count }
    }

    /// Groups of two ranks' tokens: each has rows of both, which lie together in its result.
    #[test]
    fn groups_of_whole_tiles_are_one_launch() {
        let a = [rows(0, 128), rows(1024, 128), rows(128, 896), rows(1152, 896)];
        let pieces = pieces(&a, &[gemm(256), gemm(1792)]);
        let wanted = [(a[0], (0, 0)), (a[1], (0, 128)), (a[2], (1, 0)), (a[3], (1, 896))];
        assert_eq!(pieces, wanted);
        assert_eq!(launches_of(&pieces), [wanted.to_vec()]);
        let part = |group, rows| GroupRows { group, first: 0, rows };
        assert_eq!(rows_by_group(&pieces), [part(0, 256), part(1, 1792)]);
        assert_eq!(cuts(&pieces), [2]);
    }

    /// Neighbouring rows of A belong to different groups, and more destinations than a launch has.
    #[test]
    fn many_ragged_groups_are_several_launches() {
        let a = [rows(0, 10 * 70)];
        let groups: Vec<_> = (0..10).map(|_| gemm(70)).collect();
        let pieces = pieces(&a, &groups);
        assert_eq!(pieces.len(), 10);
        assert_eq!(pieces[3], (rows(210, 70), (3, 0)));
        let launches = launches_of(&pieces);
        assert_eq!(launches.iter().map(Vec::len).collect::<Vec<_>>(), [GEMM_DESTINATIONS, 2]);
        assert_eq!(launches.concat(), pieces);
        assert_eq!(cuts(&launches[1]), [1]);
    }
}
