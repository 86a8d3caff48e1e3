//! Checks of an operation's tensors against each other, once, so that kernels need not.

use counterpoint_mask::{Band, Range};
use counterpoint_plan::{DType, KEY_BLOCK};

use super::{OperandFault, ProgramError};
use crate::{
    ArrivingKeys, AttentionBackward, AttentionState, BufferId, BufferSpec, ForwardBegin, ForwardEnd, Gemm,
    GemmLayout, MaxLogits, Op, Program, RowArrivals, RowBlock, RowBlocks, RowNumbers, RowPiece, RowRanges,
};

impl Program {
    /// Checks that the tensors of compute operation `index` (of one that also communicates: of its computation) fit it and each other, which
    /// every backend asks for when it prepares the operation. Ids must be in range, as [`Program::validate_order`] sees. Whether it has a kernel for their types is the backend's own business.
    ///
    /// # Errors
    /// [`ProgramError::Operand`] with the operation, the buffer and what it must be.
    // Long: one arm for each operation.
    pub fn check_operands(&self, index: usize) -> Result<(), ProgramError> {
        let check = Check { program: self, index };
        match self.ops[index].op.computation() {
            Op::AttentionForward(op) => {
                let heads = check.heads(op.q, op.k, op.v)?;
                let (q, k) = (check.spec(op.q), check.spec(op.k));
                let acc = q.dtype.accumulator();
                let (rows, out_shape) = ([q.rows(), heads.q], [q.rows(), heads.q, heads.dim_v]);
                let state = |state: &AttentionState| {
                    check.tensor(state.acc, acc, &out_shape)?;
                    check.tensor(state.row_max, acc, &rows)?;
                    check.tensor(state.row_sum, acc, &rows)
                };
                match (op.begin, op.end) {
                    (ForwardBegin::Continue(from), ForwardEnd::State(to)) if from != to => {
                        return Err(check.error(OperandFault::OtherState));
                    }
                    (ForwardBegin::Continue(from), _) => state(&from)?,
                    (ForwardBegin::Start, _) => {}
                }
                match op.end {
                    ForwardEnd::State(to) => state(&to)?,
                    ForwardEnd::Result { sink, out, lse } => {
                        let out_dtype = check.result_type(out, q.dtype);
                        if out_dtype != q.dtype && sink.is_some() {
                            return Err(check.error(OperandFault::SinkOfPartial));
                        }
                        check.tensor(out, out_dtype, &out_shape)?;
                        check.tensor(lse, acc, &rows)?;
                        if let Some(sink) = sink {
                            check.tensor(sink, acc, &[check.spec(sink).rows(), heads.q])?;
                        }
                    }
                }
                if let Some(MaxLogits { buffer, .. }) = op.max_logits {
                    check.head_statistic(buffer, acc, heads.q)?;
                }
                let arriving = check.arriving(op.arriving.as_ref(), (op.k, op.v))?;
                check.bands(&op.bands, q.rows(), k.rows() + arriving)
            }
            Op::AttentionFinish(op) => {
                let (out, merged) = (check.three_axes(op.out)?, check.three_axes(op.merged_out)?);
                let (acc, heads) = (out.dtype.accumulator(), out.shape[1]);
                check.tensor(op.merged_out, acc, &[merged.rows(), heads, out.shape[2]])?;
                check.tensor(op.merged_lse, acc, &[merged.rows(), heads])?;
                check.tensor(op.lse, acc, &out.shape[..2])?;
                if let Some(sink) = op.sink {
                    check.tensor(sink, acc, &[check.spec(sink).rows(), heads])?;
                }
                check.places(&op.rows, merged.rows(), out.rows())
            }
            Op::AttentionDelta(op) => {
                let out = check.three_axes(op.out)?;
                let acc = out.dtype.accumulator();
                check.tensor(op.dout, out.dtype, &out.shape)?;
                check.tensor(op.lse, acc, &out.shape[..2])?;
                check.tensor(op.delta, acc, &out.shape[..2])?;
                if let Some(dlse) = op.dlse {
                    check.tensor(dlse, acc, &out.shape[..2])?;
                }
                let Some((sink, dsink)) = op.sink else { return Ok(()) };
                check.tensor(sink, acc, &[check.spec(sink).rows(), out.shape[1]])?;
                check.tensor(dsink, acc, &check.spec(sink).shape)
            }
            Op::AttentionBackward(op) => check.backward(op),
            Op::Gemm(op) => check.gemm(op),
            Op::WaveGemm(op) => {
                if let Some(RowArrivals { values, .. }) = &op.arrivals
                    && (op.grouped || values.len() != op.groups.len())
                {
                    let (values, products) = (values.len(), op.groups.len());
                    return Err(check.error(OperandFault::ArrivalsOfProducts { values, products }));
                }
                op.groups.iter().try_for_each(|group| check.gemm(group))
            }
            Op::UserKernel(op) => match op.parts.is_empty() {
                true => Err(check.error(OperandFault::NoParts)),
                // What its tensors must be like is its own business.
                false => Ok(()),
            },
            Op::RmsNorm(op) => {
                let Blocks { rows, columns, dtype } = check.blocks("src", &op.src)?;
                op.weight.map_or(Ok(()), |weight| check.tensor(weight, dtype, &[columns]))?;
                let mut whole = [Some(op.out), op.residual, Some(op.sum)].into_iter().flatten();
                whole.try_for_each(|tensor| check.tensor(tensor, dtype, &[rows, columns]))
            }
            Op::RmsNormBackward(op) => {
                let sum = check.spec(op.sum);
                let &[rows, columns] = &sum.shape[..] else {
                    return Err(check.error(OperandFault::NotRows { shape: sum.shape.clone() }));
                };
                let dtype = sum.dtype;
                if let Some((weight, dweight)) = op.weight {
                    check.tensor(weight, dtype, &[columns])?;
                    check.tensor(dweight, dtype.accumulator(), &[columns])?;
                }
                let mut whole = [Some(op.dout), Some(op.dh), op.dsum].into_iter().flatten();
                whole.try_for_each(|tensor| check.tensor(tensor, dtype, &[rows, columns]))
            }
            Op::ColumnSum(op) => {
                let Blocks { columns, dtype, .. } = check.blocks("src", &op.src)?;
                check.tensor(op.dst, check.result_type(op.dst, dtype), &[columns])
            }
            Op::ColumnMax(op) => {
                let (src, dst) = (check.spec(op.src), check.spec(op.dst));
                let narrower = |(columns, wanted): (&usize, &usize)| columns < wanted;
                if src.shape.len() != 2
                    || src.shape[0] == 0
                    || src.shape[1..].iter().zip(&dst.shape).any(narrower)
                {
                    return Err(check.error(OperandFault::TooFewColumns {
                        from: src.shape.clone(),
                        to: dst.shape.clone(),
                    }));
                }
                check.tensor(op.src, src.dtype.accumulator(), &src.shape)?;
                check.tensor(op.dst, src.dtype, &dst.shape[..1])
            }
            Op::Cast { src, dst } => {
                let (src, dst_dtype) = (check.spec(*src), check.spec(*dst).dtype);
                check.tensor(*dst, dst_dtype, &src.shape)
            }
            Op::Concat { srcs, dst } => {
                let target = check.spec(*dst);
                let mut shape = target.shape.clone();
                shape[0] = srcs.iter().map(|src| check.spec(*src).rows()).sum();
                check.tensor(*dst, target.dtype, &shape)?;
                srcs.iter().try_for_each(|src| {
                    shape[0] = check.spec(*src).rows();
                    check.tensor(*src, target.dtype, &shape)
                })
            }
            Op::PlaceRows { src, dst, rows } => {
                let (from, to) = (check.spec(*src), check.spec(*dst));
                let mut shape = to.shape.clone();
                shape[0] = from.rows();
                check.tensor(*src, from.dtype, &shape)?;
                check.places(rows, from.rows(), to.rows())
            }
            Op::PlaceColumns { src, dst, columns } => {
                let target = check.spec(*dst);
                let &[rows, has] = &target.shape[..] else {
                    return Err(check.error(OperandFault::NoColumns { shape: target.shape.clone() }));
                };
                check.columns(*columns, has)?;
                check.tensor(*src, target.dtype, &[rows, columns.len()])
            }
            Op::CopyRows { src, dst, rows } => {
                let source = check.spec(*src);
                let enough = source.rows().min(check.spec(*dst).rows()) >= *rows;
                if !enough {
                    return Err(check.error(OperandFault::TooManyRows { rows: *rows }));
                }
                let mut shape = source.shape.clone();
                shape[0] = check.spec(*dst).rows();
                check.tensor(*dst, source.dtype, &shape)
            }
            Op::ZeroRows { dst, rows } => check.places(&[*rows], rows.len(), check.spec(*dst).rows()),
            _ => Err(check.error(OperandFault::NotComputation)),
        }
    }
}

/// Heads of an attention's tensors.
struct Heads {
    q: usize,
    dim_v: usize,
}

/// An operand that is put together from rows.
struct Blocks {
    rows: usize,
    columns: usize,
    dtype: DType,
}

struct Check<'a> {
    program: &'a Program,
    index: usize,
}

/// The shape of a tensor like this one with so many rows.
fn with_rows(spec: &BufferSpec, rows: usize) -> Vec<usize> {
    let mut shape = spec.shape.clone();
    shape[0] = rows;
    shape
}

impl<'a> Check<'a> {
    fn backward(&self, op: &AttentionBackward) -> Result<(), ProgramError> {
        let heads = self.heads(op.q, op.k, op.v)?;
        let (q, k, v) = (self.spec(op.q), self.spec(op.k), self.spec(op.v));
        let acc = q.dtype.accumulator();
        self.tensor(op.dout, q.dtype, &[q.rows(), heads.q, heads.dim_v])?;
        self.tensor(op.lse, acc, &[q.rows(), heads.q])?;
        self.tensor(op.delta, acc, &[q.rows(), heads.q])?;
        self.tensor(op.dq, acc, &q.shape)?;
        if let Some(rounded) = op.rounded_dq {
            self.tensor(rounded, q.dtype, &q.shape)?;
        }
        let dk = self.spec(op.dk).dtype;
        let dk = if dk == q.dtype { dk } else { acc };
        let key_rows = k.rows() + self.arriving(op.arriving.as_ref(), (op.k, op.v))?;
        self.tensor(op.dk, dk, &with_rows(k, key_rows))?;
        self.tensor(op.dv, dk, &with_rows(v, key_rows))?;
        self.bands(&op.bands, q.rows(), key_rows)
    }

    /// Rows of keys that arrive after those of `k` and `v`.
    fn arriving(
        &self,
        arriving: Option<&ArrivingKeys>,
        (k, v): (BufferId, BufferId),
    ) -> Result<usize, ProgramError> {
        let Some(keys) = arriving else { return Ok(0) };
        let (k, v, rows) = (self.spec(k), self.spec(v), self.three_axes(keys.k)?.rows());
        self.tensor(keys.k, k.dtype, &with_rows(k, rows))?;
        self.tensor(keys.v, v.dtype, &with_rows(v, rows))?;
        match k.rows().is_multiple_of(KEY_BLOCK) {
            true => Ok(rows),
            false => Err(self.error(OperandFault::ArrivalsAfter { rows: k.rows(), multiple: KEY_BLOCK })),
        }
    }

    fn spec(&self, id: BufferId) -> &'a BufferSpec {
        // `Program::validate` has checked the ids.
        &self.program.buffers[id.0]
    }

    fn error(&self, fault: OperandFault) -> ProgramError {
        let label = self.program.ops[self.index].label.clone();
        ProgramError::Operand { op: self.index, label, fault }
    }

    fn tensor(&self, id: BufferId, dtype: DType, shape: &[usize]) -> Result<(), ProgramError> {
        let spec = self.spec(id);
        if spec.dtype == dtype && spec.shape == shape {
            return Ok(());
        }
        let BufferSpec { name, dtype: found_dtype, shape: found_shape, .. } = spec.clone();
        Err(self.error(OperandFault::Layout { name, dtype, shape: shape.to_vec(), found_dtype, found_shape }))
    }

    /// Whether it has a value for each head, in one row if in any.
    fn head_statistic(&self, id: BufferId, dtype: DType, heads: usize) -> Result<(), ProgramError> {
        match self.spec(id).shape[..] {
            [1, columns] if columns >= heads => self.tensor(id, dtype, &[1, columns]),
            _ => self.tensor(id, dtype, &[heads]),
        }
    }

    fn three_axes(&self, id: BufferId) -> Result<&'a BufferSpec, ProgramError> {
        let spec = self.spec(id);
        if spec.shape.len() == 3 && spec.shape[1] > 0 && spec.shape[2] > 0 {
            return Ok(spec);
        }
        let BufferSpec { name, shape, .. } = spec.clone();
        Err(self.error(OperandFault::NotHeads { name, shape }))
    }

    fn heads(&self, q: BufferId, k: BufferId, v: BufferId) -> Result<Heads, ProgramError> {
        let (q, k_spec, v_spec) = (self.three_axes(q)?, self.three_axes(k)?, self.three_axes(v)?);
        let (heads, heads_kv) = (q.shape[1], k_spec.shape[1]);
        if !heads.is_multiple_of(heads_kv) {
            return Err(self.error(OperandFault::Heads { heads_q: heads, heads_kv }));
        }
        self.tensor(k, q.dtype, &[k_spec.rows(), heads_kv, q.shape[2]])?;
        self.tensor(v, q.dtype, &[k_spec.rows(), heads_kv, v_spec.shape[2]])?;
        Ok(Heads { q: heads, dim_v: v_spec.shape[2] })
    }

    /// A result is of the operands' type or of that of their sums.
    fn result_type(&self, id: BufferId, operands: DType) -> DType {
        if self.spec(id).dtype == operands { operands } else { operands.accumulator() }
    }

    fn blocks(&self, operand: &str, blocks: &[RowBlock]) -> Result<Blocks, ProgramError> {
        self.operand(operand, &blocks.iter().copied().collect())
    }

    fn operand(&self, operand: &str, blocks: &RowBlocks) -> Result<Blocks, ProgramError> {
        let Some(first) = blocks.pieces().first().map(|piece| self.spec(piece.buffer)) else {
            return Err(self.error(OperandFault::NoRows { operand: operand.to_owned() }));
        };
        let columns = first.shape.get(1).copied().unwrap_or_default();
        for RowPiece { buffer, rows } in blocks.pieces() {
            let spec = self.spec(*buffer);
            self.tensor(*buffer, first.dtype, &[spec.rows(), columns])?;
            let has = spec.rows();
            let beyond = match rows {
                RowNumbers::Range(rows) => (rows.is_empty() || rows.end > has).then_some(*rows),
                RowNumbers::List(rows) => {
                    let last = rows.iter().fold(0, |last, row| last.max(*row)) as usize;
                    (last >= has).then_some(Range { start: last, end: last + 1 })
                }
            };
            if let Some(rows) = beyond {
                let (operand, name) = (operand.to_owned(), spec.name.clone());
                return Err(self.error(OperandFault::RowsBeyond { rows, operand, name, has }));
            }
        }
        Ok(Blocks { rows: blocks.count(), columns, dtype: first.dtype })
    }

    fn gemm(&self, op: &Gemm) -> Result<(), ProgramError> {
        let (a, b) = (self.operand("a", &op.a)?, self.operand("b", &op.b)?);
        let (m, k) = match op.layout {
            GemmLayout::Nt | GemmLayout::Nn => (a.rows, a.columns),
            GemmLayout::Tn => (a.columns, a.rows),
        };
        let (b_k, n) = match op.layout {
            GemmLayout::Nt => (b.columns, b.rows),
            GemmLayout::Nn | GemmLayout::Tn => (b.rows, b.columns),
        };
        let columns = op.columns.unwrap_or(Range::new(0, n));
        self.columns(columns, n)?;
        if (b.dtype, b_k) != (a.dtype, k) {
            let fault = OperandFault::Inner { a: k, a_dtype: a.dtype, b: b_k, b_dtype: b.dtype };
            return Err(self.error(fault));
        }
        let out = self.spec(op.out);
        self.tensor(op.out, self.result_type(op.out, a.dtype), &[out.rows(), columns.len()])?;
        if let Some(bias) = op.bias {
            self.tensor(bias, a.dtype, &[n])?;
        }
        self.result_rows(&op.out_rows, m, out.rows())
    }

    /// Whether there are these columns among so many.
    fn columns(&self, columns: Range, has: usize) -> Result<(), ProgramError> {
        match columns.end > has || columns.start > columns.end {
            true => Err(self.error(OperandFault::ColumnsOut { columns, has })),
            false => Ok(()),
        }
    }

    /// Whether `rows` are places for `given` rows in a tensor of `held`.
    fn places(&self, rows: &[Range], given: usize, held: usize) -> Result<(), ProgramError> {
        self.result_rows(&rows.iter().copied().collect(), given, held)
    }

    fn result_rows(&self, rows: &RowRanges, given: usize, held: usize) -> Result<(), ProgramError> {
        let mut end = 0;
        let mut follows = |piece: &RowNumbers| {
            let (places, ascends) = match piece {
                RowNumbers::Range(places) => (*places, true),
                RowNumbers::List(list) => {
                    let last = list[list.len() - 1] as usize;
                    let ascends = list.windows(2).fold(true, |all, pair| all & (pair[0] < pair[1]));
                    (Range { start: list[0] as usize, end: last + 1 }, ascends)
                }
            };
            let before = std::mem::replace(&mut end, places.end);
            ascends && places.start >= before && !places.is_empty() && places.end <= held
        };
        if !rows.pieces().iter().all(&mut follows) {
            let mut end = 0;
            let mut wrong = |rows: &Range| {
                let before = std::mem::replace(&mut end, rows.end);
                let is_wrong = rows.start < before || rows.is_empty() || rows.end > held;
                is_wrong.then_some(OperandFault::PlacesOut { rows: *rows, end: before })
            };
            let mut ranges = rows.iter();
            if let Some(fault) = ranges.find_map(|rows| wrong(&rows)) {
                return Err(self.error(fault));
            }
        }
        let places = rows.count();
        if places != given {
            return Err(self.error(OperandFault::Places { given, places }));
        }
        Ok(())
    }

    fn bands(&self, bands: &[Band], q_rows: usize, key_rows: usize) -> Result<(), ProgramError> {
        let leaves = |band: &&Band| band.q_range.end > q_rows || band.k_range.end > key_rows;
        match bands.iter().find(leaves) {
            Some(band) => {
                let (q, k) = (band.q_range, band.k_range);
                Err(self.error(OperandFault::BandOut { q, k, q_rows, key_rows }))
            }
            None => Ok(()),
        }
    }
}
