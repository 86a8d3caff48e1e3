//! Operations of linear layers: from rows of a Program's buffers to tensors of a launcher.

use counterpoint_exec::{ExecError, OperationFault};
use counterpoint_mask::Range;
use counterpoint_schedule::{self as schedule, Accumulate, BufferId};

use super::CudaBuffer;
use super::compute::Prepare;
use super::matrix_rows::{ResultRows, SourceRows};
use crate::kernel::{
    ColumnSum, ColumnSumSpec, GEMM_DESTINATIONS, Gemm, GemmArriving, GemmEpilogue, GemmGrid, GemmLayout,
    GemmRows, GemmRunner, GemmSpec, GemmTensors,
};
use crate::{CudaError, Stream};

/// Bytes at whose multiples kernels read.
const ALIGNMENT: u64 = 16;

/// A matrix product.
pub(super) struct Product {
    a: SourceRows,
    b: SourceRows,
    out: ResultRows,
    bias: Option<BufferId>,
    /// Bytes from the second operand's first element to the first that is multiplied, and of the bias before the first that is added.
    skipped: [u64; 2],
    parts: Vec<Part>,
}

// What is predicted to be copied is.
const _: () = assert!(schedule::Gemm::RANGES == GEMM_DESTINATIONS);

/// What one launch computes.
struct Part {
    gemm: GemmRunner,
    /// Which of A's tensors it is given.
    tensors: Vec<usize>,
    /// The first row of the result of each of its receivers.
    receivers: Vec<usize>,
}

/// Rows of A, and of the result, that lie together.
#[derive(Clone, Copy)]
pub(super) struct RowSegment {
    pub(super) source: GemmRows,
    pub(super) out: usize,
}

impl Product {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::Gemm) -> Result<Self, ExecError> {
        let element = prepare.element(op.a.pieces()[0].buffer)?;
        let layout = prepare.gemm_layout(op.layout);
        let rows_are_k = layout == GemmLayout::Tn;
        let m = op.out_rows.count();
        let out_rows: Vec<Range> = op.out_rows.iter().collect();
        let a = SourceRows::new(prepare, &op.a, |rows| match rows_are_k {
            true => GemmRows::can_be_k(rows),
            false => !schedule::Gemm::copies_rows(rows.len(), m),
        })?;
        let b = SourceRows::new(prepare, &op.b, |rows| rows.len() == 1)?;
        let n = prepare.spec(op.out).row_elements();
        let k = if rows_are_k { a.count() } else { prepare.spec(op.a.pieces()[0].buffer).row_elements() };
        let epilogue = match (op.bias, op.accumulate) {
            (None, Accumulate::Start) => GemmEpilogue::Store,
            (Some(_), Accumulate::Start) => GemmEpilogue::StoreBias,
            (None, Accumulate::Continue) => GemmEpilogue::Accumulate,
            (Some(_), Accumulate::Continue) => {
                return Err(prepare.error(OperationFault::BiasOfAccumulated));
            }
        };
        let out = ResultRows::new(prepare, op.out, &out_rows, op.accumulate, |rows| {
            if rows_are_k { columns_fit(rows) } else { !schedule::Gemm::copies_rows(rows.len(), m) }
        })?;
        let (pass_columns, first_column) = match op.columns {
            None => (n, 0),
            Some(columns) if layout == GemmLayout::Nt => (b.count(), columns.start),
            Some(columns) => (prepare.spec(op.b.pieces()[0].buffer).row_elements(), columns.start),
        };
        let skipped_elements =
            if layout == GemmLayout::Nt { first_column * b.stride() } else { first_column };
        let skipped = [skipped_elements, first_column].map(|elements| (elements * element.bytes()) as u64);
        if !skipped.iter().all(|bytes| bytes.is_multiple_of(ALIGNMENT)) {
            return Err(prepare.error(OperationFault::ColumnsBegin { first: first_column }));
        }
        let spec = |m: usize, sources: Vec<GemmRows>, receivers: Vec<usize>| GemmSpec {
            output: out.scalar(),
            pass_rows: op.pass_rows,
            pass_columns,
            strides: [a.stride(), b.stride(), out.stride()],
            epilogue,
            sources,
            receivers,
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
            ..GemmSpec::new(m, n, k, layout, element)
        };
        let mut parts = Vec::new();
        if rows_are_k {
            let receivers: Vec<usize> = out.rows().iter().map(Range::len).collect();
            let tensors = (0..a.tensors()).collect();
            let gemm = prepare.product(&spec(m, a.rows().to_vec(), receivers))?;
            parts.push(Part { gemm, tensors, receivers: out.rows().iter().map(|rows| rows.start).collect() });
        } else {
            for segments in segments(a.rows(), out.rows()).chunks(GEMM_DESTINATIONS) {
                let mut tensors: Vec<usize> = segments.iter().map(|segment| segment.source.tensor).collect();
                tensors.sort_unstable();
                tensors.dedup();
                let renumbered = |rows: GemmRows| {
                    let tensor = tensors.binary_search(&rows.tensor).unwrap_or(0);
                    GemmRows { tensor, ..rows }
                };
                let sources = segments.iter().map(|segment| renumbered(segment.source)).collect();
                let counts: Vec<usize> = segments.iter().map(|segment| segment.source.count).collect();
                let gemm = prepare.product(&spec(counts.iter().sum(), sources, counts))?;
                let receivers = segments.iter().map(|segment| segment.out).collect();
                parts.push(Part { gemm, tensors, receivers });
            }
        }
        Ok(Self { a, b, out, bias: op.bias, skipped, parts })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        self.a.enter(stream, buffers)?;
        self.b.enter(stream, buffers)?;
        self.out.enter(stream, buffers)?;
        let a = self.a.addresses(buffers);
        for Part { gemm, tensors, receivers } in &self.parts {
            let a: Vec<u64> = tensors.iter().map(|&tensor| a[tensor]).collect();
            let d: Vec<u64> = receivers.iter().map(|&row| self.out.address(buffers, row)).collect();
            let tensors = GemmTensors {
                a: &a,
                b: self.b.first_row(buffers) + self.skipped[0],
                d: &d,
                bias: self.bias.map_or(0, |bias| buffers[bias.0].address() + self.skipped[1]),
                counters: &[],
            };
            // SAFETY: `check_operands` has compared all shapes and types; buffers and copies live as long as what is enqueued;
            // the Program orders who else uses them.
            unsafe { gemm.launch(stream, &tensors) }?;
        }
        self.out.leave(stream, buffers)
    }
}

/// Whether one launch stores these rows, which are columns of A.
fn columns_fit(rows: &[Range]) -> bool {
    /// Elements of 16 bytes, at whose multiples the copy engine reads.
    const ELEMENTS: usize = 8;
    let Some((_, before)) = rows.split_last() else { return true };
    rows.len() <= GEMM_DESTINATIONS && before.iter().all(|rows| rows.len().is_multiple_of(ELEMENTS))
}

/// Rows of A and of the result side by side, cut wherever one of them is.
pub(super) fn segments(sources: &[GemmRows], out: &[Range]) -> Vec<RowSegment> {
    let mut segments = Vec::new();
    let mut sources = sources.iter().copied();
    let mut source = GemmRows { tensor: 0, first: 0, count: 0 };
    for rows in out {
        let mut row = rows.start;
        while row < rows.end {
            if source.count == 0 {
                let Some(next) = sources.next() else { return segments };
                source = next;
                continue;
            }
            let count = source.count.min(rows.end - row);
            segments.push(RowSegment { source: GemmRows { count, ..source }, out: row });
            source = GemmRows { first: source.first + count, count: source.count - count, ..source };
            row += count;
        }
    }
    segments
}

/// Sums of columns.
pub(super) struct BiasGradient {
    kernel: ColumnSum,
    tensors: Vec<BufferId>,
    dst: BufferId,
}

impl BiasGradient {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::ColumnSum) -> Result<Self, ExecError> {
        let (tensors, rows) = super::matrix_rows::tensors_of(op.src.iter().copied());
        let spec = ColumnSumSpec {
            rows,
            columns: prepare.spec(op.dst).shape[0],
            element: prepare.element(op.src[0].buffer)?.scalar(),
            result: prepare.scalar(op.dst)?,
            adds: op.accumulate == Accumulate::Continue,
            sm_margin: prepare.sm_margin(),
        };
        let kernel = ColumnSum::new(prepare.setup(), &spec).map_err(|error| prepare.device_error(error))?;
        Ok(Self { kernel, tensors, dst: op.dst })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let tensors: Vec<u64> = self.tensors.iter().map(|id| buffers[id.0].address()).collect();
        // SAFETY: as for a product.
        unsafe { self.kernel.launch(stream, &tensors, buffers[self.dst.0].address()) }
    }
}

impl Prepare<'_> {
    pub(super) fn gemm_layout(&self, layout: schedule::GemmLayout) -> GemmLayout {
        match layout {
            schedule::GemmLayout::Nt => GemmLayout::Nt,
            schedule::GemmLayout::Nn => GemmLayout::Nn,
            schedule::GemmLayout::Tn => GemmLayout::Tn,
        }
    }

    /// Where something that takes multiprocessors may run concurrently with a product, and none are left to it, it must find some between
    /// two units.
    pub(super) fn grid(&self) -> GemmGrid {
        match self.has_one_stream() || self.has_casts_by_engines_alone() || self.sm_margin() > 0 {
            true => GemmGrid::Persistent,
            false => GemmGrid::PerUnit,
        }
    }

    /// A product that stores its result and does nothing else: the library's where that is wanted and no policy would have it otherwise.
    fn product(&self, spec: &GemmSpec) -> Result<GemmRunner, ExecError> {
        let whole = spec.size.m == spec.pass_rows
            && spec.size.n == spec.pass_columns
            && spec.sources.len() == 1
            && spec.receivers.len() == 1;
        if whole && self.sends_nothing() {
            let library = self.library()?;
            if let Some(library) = library {
                let gemm = library.gemm(spec).map_err(|error| self.device_error(error))?;
                return Ok(GemmRunner::Library(gemm));
            }
        }
        self.gemm(spec).map(GemmRunner::Ours)
    }

    /// Whether there are kernels for it whose bits do not depend on what else of its pass is computed.
    pub(super) fn has_shapes(&self, spec: &GemmSpec) -> bool {
        Gemm::shapes_in_pass(self.setup().device(), spec).is_ok_and(|shapes| !shapes.is_empty())
    }

    /// A product whose bits do not depend on which rows of its pass are computed together, unless all of a gradient of a weight is
    /// one product anyway.
    pub(super) fn gemm(&self, spec: &GemmSpec) -> Result<Gemm, ExecError> {
        let device = self.setup().device();
        let shapes = match spec.layout {
            GemmLayout::Tn => Gemm::shapes(device, spec),
            GemmLayout::Nt | GemmLayout::Nn => Gemm::shapes_in_pass(device, spec),
        };
        let Some(&shape) = shapes.map_err(|error| self.device_error(error))?.first() else {
            return Err(self.error(OperationFault::NoKernel));
        };
        let gemm = Gemm::with_shape(self.setup(), spec, shape).map_err(|error| self.device_error(error))?;
        if let Some(waits) = gemm.waits() {
            self.watch(waits);
        }
        Ok(gemm)
    }

    /// The same of a product whose operand arrives while it runs.
    pub(super) fn arriving(&self, spec: &GemmSpec) -> Result<GemmArriving, ExecError> {
        let made = GemmArriving::shapes(self.setup().device(), spec).and_then(|shapes| {
            let shape = shapes.first().copied();
            shape.map(|shape| GemmArriving::with_shape(self.setup(), spec, shape)).transpose()
        });
        let Some(gemm) = made.map_err(|error| self.device_error(error))? else {
            return Err(self.error(OperationFault::NoKernel));
        };
        if let Some(waits) = gemm.waits() {
            self.watch(waits);
        }
        Ok(gemm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row by row, the definition.
    #[test]
    fn segments_pair_rows_in_their_order() {
        let sources = [(2, 7, 5), (0, 0, 3), (2, 12, 4)];
        let sources = sources.map(|(tensor, first, count)| GemmRows { tensor, first, count });
        let out = [Range::new(1, 3), Range::new(10, 20)];
        let from = sources.iter().flat_map(|s| (s.first..s.first + s.count).map(|row| (s.tensor, row)));
        let wanted: Vec<_> = from.zip(out.iter().flat_map(|rows| rows.start..rows.end)).collect();
        let found = segments(&sources, &out);
        assert_eq!(found.len(), 4);
        let rows = |s: &RowSegment| {
            let RowSegment { source, out } = *s;
            (0..source.count).map(move |i| ((source.tensor, source.first + i), out + i)).collect::<Vec<_>>()
        };
        assert_eq!(found.iter().flat_map(rows).collect::<Vec<_>>(), wanted);
    }
}
