//! Products of a pass as one kernel that takes the rows of its groups as they arrive, and waits for them itself.

use counterpoint_exec::ExecError;
use counterpoint_schedule::{
    self as schedule, Accumulate, BufferId, GemmLayout, RowArrivals, RowBlock, RowBlocks, SignalId,
};

use super::CudaBuffer;
use super::compute::Prepare;
use super::matrix_rows::SourceRows;
use super::signal::CudaSignal;
use crate::kernel::{
    GemmArrivalWords, GemmArriving, GemmEpilogue, GemmFault, GemmRows, GemmSpec, GemmTensors, WaitRecord,
};
use crate::{CudaError, Stream};
use std::time::Duration;

/// The kernel, and what it is given.
pub(super) struct Arriving {
    gemm: GemmArriving,
    a: SourceRows,
    b: SourceRows,
    /// Of the tensors of A in the order in which they arrive: which of the operand's it is, and the value of the signal from which on it is there.
    order: Vec<(usize, u64)>,
    signal: SignalId,
    out: BufferId,
    bias: Option<BufferId>,
    label: String,
    limit: Duration,
}

impl Arriving {
    /// `None` where no one kernel computes these products as the Program has it: each then follows its rows.
    pub(super) fn new(
        prepare: &Prepare<'_>,
        groups: &[schedule::Gemm],
        arrivals: &RowArrivals,
    ) -> Result<Option<Self>, ExecError> {
        let Some(first) = groups.first().filter(|_| prepare.waits_inside()) else { return Ok(None) };
        let (rows, columns) = (prepare.spec(first.out).rows(), prepare.spec(first.out).row_elements());
        let scalar = prepare.scalar(first.out)?;
        let alike = |gemm: &schedule::Gemm| {
            (gemm.layout, gemm.out, gemm.bias, gemm.pass_rows)
                == (first.layout, first.out, first.bias, first.pass_rows)
                && gemm.b == first.b
                && gemm.accumulate == Accumulate::Start
                && gemm.columns.is_none()
        };
        let fits = first.layout != GemmLayout::Tn
            && groups.iter().all(alike)
            && (columns as u64 * scalar.bytes()).is_multiple_of(16);
        let Some(blocks) = Some(groups).filter(|_| fits).and_then(|groups| in_order_of_result(groups, rows))
        else {
            return Ok(None);
        };
        let a = SourceRows::new(prepare, &blocks, |_| true)?;
        let b = SourceRows::new(prepare, &first.b, |rows| rows.len() == 1)?;
        let Some(order) = order_of_arrival(&blocks, groups, &arrivals.values).filter(|_| !a.is_copied())
        else {
            return Ok(None);
        };
        let number = |tensor: usize| order.iter().position(|&(of, _)| of == tensor).unwrap_or(0);
        let renumbered = |rows: &GemmRows| GemmRows { tensor: number(rows.tensor), ..*rows };
        let element = prepare.element(first.a.pieces()[0].buffer)?;
        let k = prepare.spec(first.a.pieces()[0].buffer).row_elements();
        let epilogue = if first.bias.is_some() { GemmEpilogue::StoreBias } else { GemmEpilogue::Store };
        let spec = GemmSpec {
            output: scalar,
            pass_rows: first.pass_rows,
            strides: [a.stride(), b.stride(), columns],
            epilogue,
            sources: a.rows().iter().map(renumbered).collect(),
            sm_margin: prepare.sm_margin(),
            grid: prepare.grid(),
            ..GemmSpec::new(rows, columns, k, prepare.gemm_layout(first.layout), element)
        };
        if !prepare.has_shapes(&spec) {
            return Ok(None);
        }
        let gemm = prepare.arriving(&spec)?;
        let (label, limit) = (prepare.label().to_owned(), prepare.wait_limit());
        let (signal, out, bias) = (arrivals.signal, first.out, first.bias);
        Ok(Some(Self { gemm, a, b, order, signal, out, bias, label, limit }))
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), CudaError> {
        let signal = &signals[self.signal.0];
        // The signal was made with words for the same reason that this kernel was.
        let Some(words) = signal.words() else {
            return Err(CudaError::Launch {
                kernel: "gemm_arriving".to_owned(),
                reason: GemmFault::NoArrivalWords.into(),
            });
        };
        let record: WaitRecord = signal.record_of_words(&self.label, stream)?;
        self.b.enter(stream, buffers)?;
        let addresses = self.a.addresses(buffers);
        let a: Vec<u64> = self.order.iter().map(|&(tensor, _)| addresses[tensor]).collect();
        let of_tensors: Vec<u64> = self.order.iter().map(|&(_, value)| words.word(value)).collect();
        let tensors = GemmTensors {
            a: &a,
            b: self.b.first_row(buffers),
            d: &[buffers[self.out.0].address()],
            bias: self.bias.map_or(0, |bias| buffers[bias.0].address()),
            counters: &[],
        };
        let arrivals =
            GemmArrivalWords { words: &of_tensors, ended: words.ended(), limit: record.limit(self.limit) };
        // SAFETY: `check_operands` has compared all shapes and types; buffers and words live as long as what is enqueued. The Program's
        // validation has seen that what raises the words is enqueued before and brings the rows before; it runs on multiprocessors that the
        // margin leaves, and the next run follows this one.
        unsafe { self.gemm.launch(stream, &tensors, &arrivals) }
    }
}

/// The rows of all products' first operands in the order of the result's rows; `None` where the products leave some of these out.
fn in_order_of_result(groups: &[schedule::Gemm], rows: usize) -> Option<RowBlocks> {
    let mut pieces: Vec<(usize, RowBlock)> = Vec::new();
    for gemm in groups {
        let mut blocks = gemm.a.iter();
        let mut block = blocks.next()?;
        for out in gemm.out_rows.iter() {
            let mut row = out.start;
            while row < out.end {
                if block.rows.is_empty() {
                    block = blocks.next()?;
                    continue;
                }
                let count = block.rows.len().min(out.end - row);
                let end = block.rows.start + count;
                let piece = counterpoint_mask::Range::new(block.rows.start, end);
                pieces.push((row, RowBlock { rows: piece, ..block }));
                block.rows = counterpoint_mask::Range::new(end, block.rows.end);
                row += count;
            }
        }
    }
    pieces.sort_by_key(|(row, _)| *row);
    let mut next = 0;
    let follows = |(row, block): &(usize, RowBlock)| {
        let follows = *row == next;
        next += block.rows.len();
        follows
    };
    let whole = pieces.iter().all(follows) && next == rows;
    whole.then(|| pieces.into_iter().map(|(_, block)| block).collect())
}

/// Tensors, by the number that they have where operands are put together from `blocks`, in the order in which they arrive, each with the value of
/// the signal from which on it is there; `None` where one comes in parts.
fn order_of_arrival(
    blocks: &RowBlocks,
    groups: &[schedule::Gemm],
    values: &[u64],
) -> Option<Vec<(usize, u64)>> {
    let (tensors, _) = super::matrix_rows::tensors_of(blocks.iter());
    let mut order = Vec::with_capacity(tensors.len());
    for (number, tensor) in tensors.iter().enumerate() {
        let reads = |gemm: &schedule::Gemm| gemm.a.pieces().iter().any(|piece| piece.buffer == *tensor);
        let of = groups.iter().zip(values).filter(|(gemm, _)| reads(gemm)).map(|(_, value)| *value);
        let (least, most) = (of.clone().min()?, of.max()?);
        if least != most {
            return None;
        }
        order.push((number, most));
    }
    order.sort_by_key(|&(number, value)| (value, number));
    Some(order)
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    /// The second of three ranks: own rows in buffer 0, two groups of the others' in buffers 1 and 2.
    fn groups() -> Vec<schedule::Gemm> {
        let gemm = |blocks: &[(usize, [usize; 2])], out: &[[usize; 2]]| schedule::Gemm {
            layout: GemmLayout::Nt,
            a: blocks
                .iter()
                .map(|&(buffer, [start, end])| RowBlock {
                    buffer: BufferId(buffer),
                    rows: Range::new(start, end),
                })
                .collect(),
            b: RowBlocks::default(),
            out: BufferId(3),
            out_rows: out.iter().map(|&[start, end]| Range::new(start, end)).collect(),
            pass_rows: 30,
            columns: None,
            bias: None,
            accumulate: Accumulate::Start,
        };
        vec![
            gemm(&[(0, [0, 10])], &[[10, 20]]),
            gemm(&[(1, [0, 4]), (1, [8, 12])], &[[0, 4], [20, 24]]),
            gemm(&[(2, [0, 6]), (2, [12, 18])], &[[4, 10], [24, 30]]),
        ]
    }

    #[test]
    fn rows_are_those_of_the_result_and_arrive_in_their_order() {
        let groups = groups();
        let blocks = in_order_of_result(&groups, 30).unwrap();
        let found: Vec<(usize, [usize; 2])> =
            blocks.iter().map(|block| (block.buffer.0, [block.rows.start, block.rows.end])).collect();
        assert_eq!(found, [(1, [0, 4]), (2, [0, 6]), (0, [0, 10]), (1, [8, 12]), (2, [12, 18])]);
        // Buffers 1, 2 and 0 are the operand's tensors 0, 1 and 2.
        assert_eq!(order_of_arrival(&blocks, &groups, &[0, 1, 2]), Some(vec![(2, 0), (0, 1), (1, 2)]));
        assert_eq!(in_order_of_result(&groups[1..], 30), None);
        assert_eq!(in_order_of_result(&groups, 31), None);
    }

    #[test]
    fn a_tensor_that_comes_in_parts_is_none_that_a_kernel_waits_for() {
        let mut groups = groups();
        groups[2].a = groups[2].a.iter().map(|block| RowBlock { buffer: BufferId(1), ..block }).collect();
        let blocks = in_order_of_result(&groups, 30).unwrap();
        assert_eq!(order_of_arrival(&blocks, &groups, &[0, 1, 2]), None);
        assert!(order_of_arrival(&blocks, &groups, &[0, 1, 1]).is_some());
    }
}
