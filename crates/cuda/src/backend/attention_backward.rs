//! Operations of the backward: from buffers of a Program to addresses of a launcher.

use counterpoint_exec::ExecError;
use counterpoint_mask::Range;
use counterpoint_schedule::{self as schedule, BufferId, Program, SignalId};

use super::attention::Operand;
use super::attention_problem::{BackwardProblem, OperationOf};
use super::compute::Prepare;
use super::keys::Keys;
use super::padding::padded_dim;
use super::{CudaBackend, CudaBuffer, CudaSignal, CudaTables};
use crate::kernel::{AttentionDelta, BackwardKernel, BackwardTensors, DeltaTensors, DqBegin, GradientOwners};
use crate::{CudaError, Stream};

/// The row statistic of the backward.
pub(super) struct Delta {
    kernel: AttentionDelta,
    out: Operand,
    dout: Operand,
    lse: BufferId,
    dlse: Option<BufferId>,
    delta: BufferId,
    sink: Option<(BufferId, BufferId)>,
}

impl Delta {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::AttentionDelta) -> Result<Self, ExecError> {
        let out = prepare.spec(op.out);
        let element = prepare.element(op.out)?;
        let seqlen_sink = op.sink.map_or(0, |(sink, _)| prepare.spec(sink).rows());
        let dim = padded_dim(out.shape[2]);
        let kernel =
            AttentionDelta::new(prepare.setup(), element, [out.rows(), out.shape[1], dim], seqlen_sink);
        Ok(Self {
            kernel: kernel.map_err(|error| prepare.device_error(error))?,
            out: Operand::new(prepare, op.out)?,
            dout: Operand::new(prepare, op.dout)?,
            lse: op.lse,
            dlse: op.dlse,
            delta: op.delta,
            sink: op.sink,
        })
    }

    pub(super) fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let address = |id: BufferId| buffers[id.0].address();
        self.out.enter(stream, buffers)?;
        self.dout.enter(stream, buffers)?;
        let tensors = DeltaTensors {
            out: self.out.address(buffers),
            dout: self.dout.address(buffers),
            lse: address(self.lse),
            dlse: self.dlse.map(address),
            delta: address(self.delta),
            sink: self.sink.map(|(sink, dsink)| (address(sink), address(dsink))),
        };
        // SAFETY: as in `Forward::launch`.
        unsafe { self.kernel.launch(stream, &tensors) }
    }
}

impl CudaBackend {
    /// Makes a stage of the backward ready, which operation `index` of `program` is or begins with.
    pub(crate) fn backward(
        &self,
        program: &Program,
        index: usize,
        tables: &CudaTables,
        op: &schedule::AttentionBackward,
    ) -> Result<Backward, ExecError> {
        program.check_operands(index).map_err(|fault| ExecError::program(program, fault))?;
        Backward::new(&Prepare::new(self, OperationOf { program, index }, tables), op)
    }
}

/// A stage of the backward.
pub(crate) struct Backward {
    kernel: BackwardKernel,
    q: Operand,
    keys: Keys,
    dout: Operand,
    lse: BufferId,
    delta: BufferId,
    dq: Operand,
    rounded_dq: Option<Operand>,
    dk: Operand,
    dv: Operand,
    continues_dq: bool,
}

impl Backward {
    pub(super) fn new(prepare: &Prepare<'_>, op: &schedule::AttentionBackward) -> Result<Self, ExecError> {
        let of = prepare.operation();
        let BackwardProblem { problem, mode, arrives_inside } = BackwardProblem::new(of, op, prepare.arch())?;
        let kernel = BackwardKernel::new(prepare.setup(), &problem, mode, prepare.tables().backward(of)?)
            .map_err(|error| prepare.device_error(error))?;
        if let Some(waits) = kernel.waits() {
            prepare.watch(waits);
        }
        let operand = |id| Operand::new(prepare, id);
        Ok(Self {
            kernel,
            q: operand(op.q)?,
            keys: Keys::new(prepare, (op.k, op.v), op.arriving.as_ref(), arrives_inside)?,
            dout: operand(op.dout)?,
            lse: op.lse,
            delta: op.delta,
            dq: operand(op.dq)?,
            rounded_dq: op.rounded_dq.map(operand).transpose()?,
            dk: operand(op.dk)?,
            dv: operand(op.dv)?,
            continues_dq: mode.dq == DqBegin::Sums,
        })
    }

    /// See [`AttentionBackward::round_alone`].
    pub(crate) fn round_alone(&mut self, setup: &Stream, shared: &[Range]) -> Result<Vec<Range>, CudaError> {
        self.kernel.round_alone(setup, shared)
    }

    /// Whether its kernel sends gradients of keys where they belong.
    pub(crate) fn sends_gradients(&self) -> bool {
        let whole = [&self.dk, &self.dv].into_iter().all(Operand::is_whole);
        whole && matches!(self.kernel, BackwardKernel::Hopper(_))
    }

    /// The signal of keys that arrive, in the Program's table.
    pub(super) fn signal(&self) -> Option<SignalId> {
        self.keys.signal()
    }

    /// `signal` is raised as keys arrive; `rounded` is where gradients of keys go that are results, and `owners` where those go that
    /// belong to other ranks, if they are sent.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signal: Option<&CudaSignal>,
        rounded: Option<[u64; 2]>,
        owners: Option<GradientOwners>,
    ) -> Result<(), CudaError> {
        let arriving = self.keys.arriving(stream, buffers, signal)?;
        let read = [&self.q, &self.keys.k, &self.keys.v, &self.dout];
        for operand in read.into_iter().chain(self.continues_dq.then_some(&self.dq)) {
            operand.enter(stream, buffers)?;
        }
        let tensors = BackwardTensors {
            q: self.q.head_rows(buffers),
            k: self.keys.k.head_rows(buffers),
            v: self.keys.v.head_rows(buffers),
            arriving,
            dout: self.dout.address(buffers),
            lse: buffers[self.lse.0].address(),
            delta: buffers[self.delta.0].address(),
            dq: self.dq.address(buffers),
            rounded_dq: self.rounded_dq.as_ref().map(|operand| operand.address(buffers)),
            dk: self.dk.address(buffers),
            dv: self.dv.address(buffers),
            rounded,
            owners,
        };
        // SAFETY: as in `Forward::launch`.
        unsafe { self.kernel.launch(stream, &tensors) }?;
        let written = [&self.dq, &self.dk, &self.dv].into_iter().chain(&self.rounded_dq);
        written.into_iter().try_for_each(|operand| operand.leave(stream, buffers))
    }
}
