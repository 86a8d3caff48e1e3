//! The compute operations of the CPU backend: which kernel each runs, on which tensors.

use std::sync::Arc;

use counterpoint_cpu_kernels::{
    BackwardArgs, DeltaArgs, FinishArgs, ForwardArgs, ForwardMode, GemmArgs, HeadShape, KernelElement,
    KernelResult, Real, ResultArgs, SinkArgs, StateArgs, StateMutArgs, TakeKeys, attention_backward_arriving,
    attention_delta, attention_finish, attention_forward_arriving, attention_partial, cast, cast_rows,
    column_max, column_sum, gemm,
};
use counterpoint_mask::Range;
use counterpoint_schedule::{
    Accumulate, ArrivingKeys, AttentionBackward, AttentionDelta, AttentionFinish, AttentionForward,
    AttentionState, BufferId, ColumnSum, Delivery, ForwardBegin, ForwardEnd, Gemm, Op, Program, RowArrivals,
    RowBlock, SignalId,
};
use rayon::ThreadPool;

use super::buffer::{CpuBuffer, ReadGuard, WriteGuard};
use super::normalise::{normalise_backward, normalise_rows};
use super::user_kernel::{self, CpuUserKernels};
use crate::{
    ExecError, HostElement, OpPlace, OperationFault, ProgramFault, TensorMut, TensorRef, with_host_element,
};

/// A compute operation of the CPU backend, its tensors checked.
#[derive(Clone)]
pub struct CpuKernel {
    op: Arc<Op>,
    user_kernels: CpuUserKernels,
}

impl CpuKernel {
    pub(super) fn new(
        program: &Program,
        index: usize,
        user_kernels: &CpuUserKernels,
    ) -> Result<Self, ExecError> {
        program.check_operands(index).map_err(|fault| ExecError::program(program, fault))?;
        let op = Arc::new(program.ops[index].op.clone());
        if let Op::UserKernel(user) = &*op
            && user_kernels.get(&user.kernel).is_none()
        {
            let (name, label) = (&user.kernel, &program.ops[index].label);
            let fault = ProgramFault::Operation {
                op: index,
                label: label.clone(),
                fault: OperationFault::UserKernel { kernel: name.clone() },
            };
            return Err(ExecError::program(program, fault));
        }
        Ok(Self { op, user_kernels: user_kernels.clone() })
    }

    /// The signal that it raises, and to what.
    pub(super) fn raises(&self) -> Option<(SignalId, u64)> {
        self.op.raises().map(|(signal, parts)| (signal, parts as u64))
    }

    /// That of the rows that it takes as they arrive, whose group-cast is enqueued before it.
    pub(super) fn delivery(&self) -> Option<Delivery> {
        self.op.arriving().map(|keys| keys.delivery)
    }

    /// That of the rows that its products take as they arrive.
    pub(super) fn arrivals(&self) -> Option<&RowArrivals> {
        self.op.arrivals()
    }

    /// On a stream's thread: runs it on `workers`. `raise` raises its signal, `delivered` waits for the rows that it takes as they
    /// arrive, `arrived` for those of its product of this number.
    // Long: one arm for each operation.
    pub(super) fn run(
        &self,
        rank: usize,
        place: &OpPlace,
        buffers: &[CpuBuffer],
        workers: &ThreadPool,
        raise: impl Fn(u64),
        delivered: &dyn Fn() -> Result<(), ExecError>,
        arrived: &dyn Fn(usize) -> Result<(), ExecError>,
    ) -> Result<(), ExecError> {
        let access = Access { rank, place, buffers, delivered };
        let dtype = |id: BufferId| buffers[id.0].dtype();
        // Collectives of a fused operation are operations of their own here.
        match self.op.computation() {
            Op::AttentionForward(op) => {
                with_host_element!(dtype(op.q), T => forward::<T>(op, &access, workers))
            }
            Op::AttentionFinish(op) => {
                with_host_element!(dtype(op.out), T => finish::<T>(op, &access, workers))
            }
            Op::AttentionDelta(op) => {
                with_host_element!(dtype(op.out), T => delta::<T>(op, &access, workers))
            }
            Op::AttentionBackward(op) => backward_of_type(op, &access, workers),
            Op::Gemm(op) => multiply(op, &access, workers),
            Op::WaveGemm(op) => op.groups.iter().enumerate().try_for_each(|(done, group)| {
                arrived(done)?;
                multiply(group, &access, workers)?;
                raise(done as u64 + 1);
                Ok(())
            }),
            Op::UserKernel(op) => match self.user_kernels.get(&op.kernel) {
                Some(body) => user_kernel::run(op, body, &access, raise),
                // `new` has found it.
                None => Ok(()),
            },
            Op::RmsNorm(op) => {
                with_host_element!(dtype(op.out), T => normalise_rows::<T>(op, &access, workers))
            }
            Op::RmsNormBackward(op) => {
                with_host_element!(dtype(op.dh), T => normalise_backward::<T>(op, &access, workers))
            }
            Op::ColumnSum(op) => {
                with_host_element!(dtype(op.src[0].buffer), T => if dtype(op.dst) == T::DTYPE {
                    sum_columns::<T, T>(op, &access, workers)
                } else {
                    sum_columns::<T, <T as HostElement>::Accumulator>(op, &access, workers)
                })
            }
            Op::ColumnMax(op) => {
                let (src, mut dst) = (access.read(op.src)?, access.write(op.dst)?);
                column_max(src.view(), &mut dst.view());
                Ok(())
            }
            Op::Cast { src, dst } => {
                let (src, mut dst) = (access.read(*src)?, access.write(*dst)?);
                cast(src.view(), &mut dst.view(), workers);
                Ok(())
            }
            Op::Concat { srcs, dst } => concat(srcs, *dst, &access),
            Op::PlaceRows { src, dst, rows } => {
                let (src, mut dst) = (access.read(*src)?, access.write(*dst)?);
                cast_rows(src.view(), &mut dst.view(), rows, workers);
                Ok(())
            }
            Op::PlaceColumns { src, dst, columns } => {
                let (src, mut dst) = (access.read(*src)?, access.write(*dst)?);
                place_columns(src.view(), &mut dst.view(), *columns);
                Ok(())
            }
            Op::CopyRows { src, dst, rows } => {
                let (src, mut dst) = (access.read(*src)?, access.write(*dst)?);
                let bytes = rows * src.view().row_elements() * src.dtype().size();
                dst.view().bytes_mut()[..bytes].copy_from_slice(&src.view().bytes()[..bytes]);
                Ok(())
            }
            Op::ZeroRows { dst, rows } => {
                let mut dst = access.write(*dst)?;
                let row = dst.view().row_elements() * dst.dtype().size();
                // Zero is bytes of zeros in every element type.
                dst.view().bytes_mut()[rows.start * row..rows.end * row].fill(0);
                Ok(())
            }
            // `check_operands` lets no other operation through.
            _ => Ok(()),
        }
    }
}

fn backward_of_type(
    op: &AttentionBackward,
    access: &Access<'_>,
    workers: &ThreadPool,
) -> Result<(), ExecError> {
    let dtype = |id: BufferId| access.buffers[id.0].dtype();
    // `check_operands` has seen that there is no third type.
    let rounded = dtype(op.dk) == dtype(op.q);
    with_host_element!(dtype(op.q), T => if rounded {
        backward::<T, T>(op, access, workers)
    } else {
        backward::<T, <T as HostElement>::Accumulator>(op, access, workers)
    })
}

fn multiply(op: &Gemm, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError> {
    let dtype = |id: BufferId| access.buffers[id.0].dtype();
    with_host_element!(dtype(op.a.pieces()[0].buffer), T => if dtype(op.out) == T::DTYPE {
        product::<T, T>(op, access, workers)
    } else {
        product::<T, <T as HostElement>::Accumulator>(op, access, workers)
    })
}

fn forward<T>(op: &AttentionForward, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError>
where
    T: KernelElement,
{
    let (q, k, v) = (access.read(op.q)?, access.read(op.k)?, access.read(op.v)?);
    let mut max_logits = op.max_logits.map(|max| access.write(max.buffer)).transpose()?;
    if let (Some(rows), Some(Accumulate::Start)) = (&mut max_logits, op.max_logits.map(|max| max.accumulate))
    {
        elements_mut::<T::Accumulator>(rows).fill(-T::Accumulator::INFINITY);
    }
    let mut run = |mode: ForwardMode<'_, T>| {
        let args = ForwardArgs {
            shape: head_shape(&q, &k, &v),
            q: elements::<T>(&q),
            k: elements::<T>(&k),
            v: elements::<T>(&v),
            mode,
            bands: &op.bands,
            scale: op.scale,
            softcap: op.softcap,
            max_logits: max_logits.as_mut().map(|rows| &mut elements_mut(rows)[..q.shape()[1]]),
        };
        let (arriving, rows) = access.arriving(op.arriving.as_ref());
        attention_forward_arriving(args, rows, workers, |take| access.take_arriving(arriving, take))
    };
    let (sink, out, lse) = match op.end {
        ForwardEnd::State(AttentionState { acc, row_max, row_sum }) => {
            let (mut acc, mut row_max, mut row_sum) =
                (access.write(acc)?, access.write(row_max)?, access.write(row_sum)?);
            let state = StateMutArgs {
                acc: elements_mut(&mut acc),
                row_max: elements_mut(&mut row_max),
                row_sum: elements_mut(&mut row_sum),
            };
            return run(match op.begin {
                ForwardBegin::Start => ForwardMode::First(state),
                ForwardBegin::Continue(_) => ForwardMode::Next(state),
            });
        }
        ForwardEnd::Result { sink, out, lse } => (sink, out, lse),
    };
    let sink = sink.map(|sink| access.read(sink)).transpose()?;
    let (mut out, mut lse) = (access.write(out)?, access.write(lse)?);
    if out.dtype() != T::DTYPE {
        // A partial result: the state is made where it goes.
        let (out, lse) = (elements_mut::<T::Accumulator>(&mut out), elements_mut::<T::Accumulator>(&mut lse));
        let mut row_sum = vec![T::Accumulator::ZERO; lse.len()];
        if let ForwardBegin::Continue(begin) = op.begin {
            out.copy_from_slice(elements(&access.read(begin.acc)?));
            lse.copy_from_slice(elements(&access.read(begin.row_max)?));
            row_sum.copy_from_slice(elements(&access.read(begin.row_sum)?));
        }
        let state = StateMutArgs { acc: &mut *out, row_max: &mut *lse, row_sum: &mut row_sum };
        run(match op.begin {
            ForwardBegin::Start => ForwardMode::First(state),
            ForwardBegin::Continue(_) => ForwardMode::Next(state),
        })?;
        attention_partial::<T>(out, lse, &row_sum, v.shape()[2], workers);
        return Ok(());
    }
    let result = ResultArgs {
        sink: sink.as_ref().map(|sink| elements(sink)),
        out: elements_mut(&mut out),
        lse: elements_mut(&mut lse),
    };
    match op.begin {
        ForwardBegin::Start => run(ForwardMode::Whole(result)),
        ForwardBegin::Continue(AttentionState { acc, row_max, row_sum }) => {
            let (acc, row_max, row_sum) = (access.read(acc)?, access.read(row_max)?, access.read(row_sum)?);
            let state =
                StateArgs { acc: elements(&acc), row_max: elements(&row_max), row_sum: elements(&row_sum) };
            run(ForwardMode::Last(state, result))
        }
    }
}

fn finish<T>(op: &AttentionFinish, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError>
where
    T: KernelElement,
{
    let (merged_out, merged_lse) = (access.read(op.merged_out)?, access.read(op.merged_lse)?);
    let sink = op.sink.map(|sink| access.read(sink)).transpose()?;
    let (mut out, mut lse) = (access.write(op.out)?, access.write(op.lse)?);
    let args = FinishArgs::<T> {
        heads_q: merged_out.shape()[1],
        head_dim_v: merged_out.shape()[2],
        merged_out: elements(&merged_out),
        merged_lse: elements(&merged_lse),
        sink: sink.as_ref().map_or(&[], |sink| elements(sink)),
        rows: &op.rows,
        out: elements_mut(&mut out),
        lse: elements_mut(&mut lse),
    };
    attention_finish(args, workers);
    Ok(())
}

fn delta<T>(op: &AttentionDelta, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError>
where
    T: KernelElement,
{
    let (out, dout, lse) = (access.read(op.out)?, access.read(op.dout)?, access.read(op.lse)?);
    let mut delta = access.write(op.delta)?;
    let dlse = op.dlse.map(|dlse| access.read(dlse)).transpose()?;
    let sink = op.sink.map(|(sink, _)| access.read(sink)).transpose()?;
    let mut dsink = op.sink.map(|(_, dsink)| access.write(dsink)).transpose()?;
    let args = DeltaArgs::<T> {
        heads_q: out.shape()[1],
        head_dim_v: out.shape()[2],
        out: elements(&out),
        dout: elements(&dout),
        lse: elements(&lse),
        dlse: dlse.as_ref().map(|dlse| elements(dlse)),
        delta: elements_mut(&mut delta),
        sink: sink
            .as_ref()
            .zip(dsink.as_mut())
            .map(|(sink, dsink)| SinkArgs { sink: elements(sink), dsink: elements_mut(dsink) }),
    };
    attention_delta(args, workers);
    Ok(())
}

/// `G` is the type of `dk` and `dv`.
fn backward<T, G>(op: &AttentionBackward, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError>
where
    T: KernelElement,
    G: KernelResult<T>,
{
    let (q, k, v) = (access.read(op.q)?, access.read(op.k)?, access.read(op.v)?);
    let (dout, lse, delta) = (access.read(op.dout)?, access.read(op.lse)?, access.read(op.delta)?);
    let (mut dq, mut dk, mut dv) = (access.write(op.dq)?, access.write(op.dk)?, access.write(op.dv)?);
    let args = BackwardArgs {
        shape: head_shape(&q, &k, &v),
        q: elements::<T>(&q),
        k: elements::<T>(&k),
        v: elements::<T>(&v),
        dout: elements::<T>(&dout),
        lse: elements(&lse),
        delta: elements(&delta),
        dq: elements_mut(&mut dq),
        dk: elements_mut::<G>(&mut dk),
        dv: elements_mut::<G>(&mut dv),
        bands: &op.bands,
        scale: op.scale,
        softcap: op.softcap,
        accumulate_dq: op.accumulate_dq,
    };
    let (arriving, rows) = access.arriving(op.arriving.as_ref());
    attention_backward_arriving(args, rows, workers, |take| access.take_arriving(arriving, take))?;
    if let Some(rounded) = op.rounded_dq {
        let mut rounded = access.write(rounded)?;
        cast(dq.view().view(), &mut rounded.view(), workers);
    }
    Ok(())
}

/// `D` is the type of the result.
fn product<T, D>(op: &Gemm, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError>
where
    T: KernelElement,
    D: KernelResult<T>,
{
    let [a_blocks, b_blocks] = [&op.a, &op.b].map(|rows| rows.iter().collect::<Vec<_>>());
    let (a, b) = (access.read_blocks(&a_blocks)?, access.read_blocks(&b_blocks)?);
    let out_rows: Vec<Range> = op.out_rows.iter().collect();
    let bias = op.bias.map(|bias| access.read(bias)).transpose()?;
    let mut out = access.write(op.out)?;
    let n = out.shape()[1];
    let args = GemmArgs::<T, D> {
        layout: op.layout,
        a: pieces(&a_blocks, &a),
        a_columns: a[0].shape()[1],
        b: pieces(&b_blocks, &b),
        b_columns: b[0].shape()[1],
        out: elements_mut(&mut out),
        n,
        out_rows: &out_rows,
        columns: op.columns,
        bias: bias.as_ref().map(|bias| elements(bias)),
        accumulate: op.accumulate,
    };
    gemm(args, workers);
    Ok(())
}

fn sum_columns<T, D>(op: &ColumnSum, access: &Access<'_>, workers: &ThreadPool) -> Result<(), ExecError>
where
    T: KernelElement,
    D: KernelResult<T>,
{
    let src = access.read_blocks(&op.src)?;
    let mut dst = access.write(op.dst)?;
    column_sum::<T, D>(&pieces(&op.src, &src), elements_mut(&mut dst), op.accumulate, workers);
    Ok(())
}

/// The rows of each block.
pub(super) fn pieces<'a, T: HostElement>(blocks: &[RowBlock], tensors: &'a [ReadGuard<'_>]) -> Vec<&'a [T]> {
    let rows = |(block, tensor): (&RowBlock, &'a ReadGuard<'_>)| {
        let columns = tensor.shape()[1];
        &elements::<T>(tensor)[block.rows.start * columns..block.rows.end * columns]
    };
    blocks.iter().zip(tensors).map(rows).collect()
}

fn concat(srcs: &[BufferId], dst: BufferId, access: &Access<'_>) -> Result<(), ExecError> {
    let mut dst = access.write(dst)?;
    let mut offset = 0;
    for src in srcs {
        let src = access.read(*src)?;
        let bytes = src.view().bytes();
        dst.view().bytes_mut()[offset..offset + bytes.len()].copy_from_slice(bytes);
        offset += bytes.len();
    }
    Ok(())
}

fn place_columns(src: TensorRef<'_>, dst: &mut TensorMut<'_>, columns: Range) {
    let size = src.dtype().size();
    let (from, to) = (src.row_elements() * size, dst.row_elements() * size);
    let place = columns.start * size..columns.end * size;
    for (src, dst) in src.bytes().chunks_exact(from).zip(dst.bytes_mut().chunks_exact_mut(to)) {
        dst[place.clone()].copy_from_slice(src);
    }
}

fn head_shape(q: &ReadGuard<'_>, k: &ReadGuard<'_>, v: &ReadGuard<'_>) -> HeadShape {
    HeadShape {
        heads_q: q.shape()[1],
        heads_kv: k.shape()[1],
        head_dim: q.shape()[2],
        head_dim_v: v.shape()[2],
    }
}

/// Elements of a tensor whose type `check_operands` has seen: for any other it would be empty, and the kernel would refuse
/// its length.
pub(super) fn elements<'a, T: HostElement>(tensor: &'a ReadGuard<'_>) -> &'a [T] {
    tensor.view().as_slice().unwrap_or(&[])
}

pub(super) fn elements_mut<'a, T: HostElement>(tensor: &'a mut WriteGuard<'_>) -> &'a mut [T] {
    tensor.view().into_slice().unwrap_or(&mut [])
}

/// Gives an operation its tensors.
pub(super) struct Access<'a> {
    rank: usize,
    place: &'a OpPlace,
    /// The Program's table.
    buffers: &'a [CpuBuffer],
    delivered: &'a dyn Fn() -> Result<(), ExecError>,
}

impl<'a> Access<'a> {
    pub(super) fn read(&self, id: BufferId) -> Result<ReadGuard<'a>, ExecError> {
        self.buffers[id.0].read(self.rank, self.place)
    }

    pub(super) fn read_blocks(&self, blocks: &[RowBlock]) -> Result<Vec<ReadGuard<'a>>, ExecError> {
        blocks.iter().map(|block| self.read(block.buffer)).collect()
    }

    /// Gives a kernel the rows that arrive while it runs, once they are there. On this thread, because workers may be what another
    /// rank needs to send them.
    fn take_arriving<T: HostElement>(
        &self,
        arriving: Option<&ArrivingKeys>,
        take: TakeKeys<'_, T>,
    ) -> Result<(), ExecError> {
        let Some(ArrivingKeys { k, v, .. }) = arriving else {
            take(&[], &[]);
            return Ok(());
        };
        (self.delivered)()?;
        let (k, v) = (self.read(*k)?, self.read(*v)?);
        take(elements(&k), elements(&v));
        Ok(())
    }

    /// And their number of rows.
    fn arriving<'b>(&self, arriving: Option<&'b ArrivingKeys>) -> (Option<&'b ArrivingKeys>, usize) {
        (arriving, arriving.map_or(0, |keys| self.buffers[keys.k.0].shape()[0]))
    }

    pub(super) fn write(&self, id: BufferId) -> Result<WriteGuard<'a>, ExecError> {
        self.buffers[id.0].write(self.rank, self.place)
    }
}
