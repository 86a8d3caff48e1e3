//! Operations of the forward, and what they share with the backward: from buffers of a Program to addresses of a launcher.

use counterpoint_exec::ExecError;
use counterpoint_schedule::{
    Accumulate, AttentionForward, AttentionState, BufferId, ForwardBegin, ForwardEnd, MaxLogits,
};

use super::attention_problem::ForwardProblem;
use super::compute::Prepare;
use super::keys::Keys;
use super::padding::{Padding, padded_dim};
use super::{CudaBuffer, CudaSignal};
use crate::kernel::{
    AttentionFinish, ForwardKernel, ForwardModeEnd, ForwardTarget, ForwardTensors, HeadRows, ResultTensors,
    Scalar, StateTensors,
};
use crate::{CudaError, DeviceBuffer, Stream};

/// A buffer of the Program as a kernel sees it.
pub(super) struct Operand {
    rows: Rows,
    padding: Option<Padding>,
}

/// Where the rows of an operand are.
enum Rows {
    /// In a buffer.
    Of(BufferId),
    /// In two, for a kernel that takes one: they are copied before it.
    Gathered { from: [BufferId; 2], memory: DeviceBuffer },
}

impl Operand {
    pub(super) fn new(prepare: &Prepare<'_>, id: BufferId) -> Result<Self, ExecError> {
        let padding = Padding::of(prepare.setup(), prepare.spec(id));
        Ok(Self { rows: Rows::Of(id), padding: padding.map_err(|error| prepare.device_error(error))? })
    }

    /// The rows of two buffers, one after the other.
    pub(super) fn gathered(prepare: &Prepare<'_>, from: [BufferId; 2]) -> Result<Self, ExecError> {
        let mut spec = prepare.spec(from[0]).clone();
        spec.shape[0] += prepare.spec(from[1]).rows();
        let gather = || -> Result<Self, CudaError> {
            let memory = DeviceBuffer::new(prepare.setup().device(), (spec.bytes() as usize).max(1))?;
            Ok(Self { rows: Rows::Gathered { from, memory }, padding: Padding::of(prepare.setup(), &spec)? })
        };
        gather().map_err(|error| prepare.device_error(error))
    }

    /// Whether the kernel has its buffer itself.
    pub(super) fn is_whole(&self) -> bool {
        self.padding.is_none() && matches!(self.rows, Rows::Of(_))
    }

    /// Where the rows are before they are padded.
    fn unpadded(&self, buffers: &[CudaBuffer]) -> u64 {
        match &self.rows {
            Rows::Of(id) => buffers[id.0].address(),
            Rows::Gathered { memory, .. } => memory.address(),
        }
    }

    /// What a kernel is given that takes rows and heads that lie apart.
    pub(super) fn head_rows(&self, buffers: &[CudaBuffer]) -> HeadRows {
        match (&self.padding, &self.rows) {
            (None, Rows::Of(id)) => buffers[id.0].head_rows(),
            _ => self.address(buffers).into(),
        }
    }

    /// The address that a kernel is given that takes a dense tensor.
    pub(super) fn address(&self, buffers: &[CudaBuffer]) -> u64 {
        self.padding.as_ref().map_or_else(|| self.unpadded(buffers), Padding::address)
    }

    /// Before a kernel that reads it.
    pub(super) fn enter(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        if let Rows::Gathered { from, memory } = &self.rows {
            let mut offset = 0;
            for id in from {
                let rows = buffers[id.0].memory();
                memory.copy_from(stream, offset, rows)?;
                offset += rows.len();
            }
        }
        self.padding.as_ref().map_or(Ok(()), |padding| padding.enter(stream, self.unpadded(buffers)))
    }

    /// After a kernel that wrote it.
    pub(super) fn leave(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        self.padding.as_ref().map_or(Ok(()), |padding| padding.leave(stream, self.unpadded(buffers)))
    }
}

/// The state of a forward: only `acc` has rows of heads.
struct State {
    acc: Operand,
    row_max: BufferId,
    row_sum: BufferId,
}

impl State {
    fn new(prepare: &Prepare<'_>, state: &AttentionState) -> Result<Self, ExecError> {
        let AttentionState { acc, row_max, row_sum } = *state;
        Ok(Self { acc: Operand::new(prepare, acc)?, row_max, row_sum })
    }

    fn tensors(&self, buffers: &[CudaBuffer]) -> StateTensors {
        StateTensors {
            acc: self.acc.address(buffers),
            row_max: buffers[self.row_max.0].address(),
            row_sum: buffers[self.row_sum.0].address(),
        }
    }
}

/// Results in f32, to be merged with others, by kernels that leave states: the state is made where they go.
struct Partial {
    kernel: AttentionFinish,
    out: Operand,
    lse: BufferId,
    row_sum: DeviceBuffer,
    rows: usize,
}

impl Partial {
    fn new(prepare: &Prepare<'_>, out: BufferId, lse: BufferId) -> Result<Self, ExecError> {
        let (spec, device) = (prepare.spec(out), prepare.setup().device());
        let (rows, heads, dim) = (spec.rows(), spec.shape[1], padded_dim(spec.shape[2]));
        let kernel = AttentionFinish::new(device, Scalar::F32, heads, dim);
        // A buffer has at least one byte.
        let row_sum = DeviceBuffer::new(device, (rows * heads * size_of::<f32>()).max(1));
        Ok(Self {
            kernel: kernel.map_err(|error| prepare.device_error(error))?,
            out: Operand::new(prepare, out)?,
            lse,
            row_sum: row_sum.map_err(|error| prepare.device_error(error))?,
            rows,
        })
    }

    fn state(&self, buffers: &[CudaBuffer]) -> StateTensors {
        let (acc, row_max) = (self.out.address(buffers), buffers[self.lse.0].address());
        StateTensors { acc, row_max, row_sum: self.row_sum.address() }
    }

    fn finish(&self, stream: &Stream, buffers: &[CudaBuffer], max_scale: f32) -> Result<(), CudaError> {
        let state = self.state(buffers);
        let partial = ResultTensors { sink: 0, out: state.acc, lse: state.row_max };
        // SAFETY: `check_operands` has compared the shapes; the kernel before it on the stream has written the state.
        unsafe { self.kernel.partial(stream, self.rows, &state, max_scale, &partial) }?;
        self.out.leave(stream, buffers)
    }
}

/// A stage of the forward.
pub(super) struct Forward {
    kernel: ForwardKernel,
    q: Operand,
    keys: Keys,
    begin: Option<State>,
    end: End,
    max_logits: Option<MaxLogits>,
}

/// What a stage of the forward leaves.
enum End {
    /// `None` where it continues a state, which it leaves in the same buffers.
    State(Option<State>),
    /// Made of a state.
    Partial(Partial),
    /// Or a partial result, as the kernel leaves it.
    Result { sink: Option<BufferId>, out: Operand, lse: BufferId },
}

impl Forward {
    pub(super) fn new(prepare: &Prepare<'_>, op: &AttentionForward) -> Result<Self, ExecError> {
        let of = prepare.operation();
        let ForwardProblem { problem, mode, arrives_inside } = ForwardProblem::new(of, op, prepare.arch())?;
        let kernel = ForwardKernel::new(prepare.setup(), &problem, mode, prepare.tables().forward(of)?);
        let begin = match &op.begin {
            ForwardBegin::Start => None,
            ForwardBegin::Continue(state) => Some(State::new(prepare, state)?),
        };
        Ok(Self {
            kernel: kernel.map_err(|error| prepare.device_error(error))?,
            q: Operand::new(prepare, op.q)?,
            keys: Keys::new(prepare, (op.k, op.v), op.arriving.as_ref(), arrives_inside)?,
            end: match &op.end {
                ForwardEnd::State(_) if begin.is_some() => End::State(None),
                ForwardEnd::State(state) => End::State(Some(State::new(prepare, state)?)),
                // Partial results by kernels that leave none.
                ForwardEnd::Result { out, lse, .. } if mode.end == ForwardModeEnd::State => {
                    End::Partial(Partial::new(prepare, *out, *lse)?)
                }
                ForwardEnd::Result { sink, out, lse } => {
                    End::Result { sink: *sink, out: Operand::new(prepare, *out)?, lse: *lse }
                }
            },
            begin,
            max_logits: op.max_logits,
        })
    }

    pub(super) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), CudaError> {
        let address = |id: BufferId| buffers[id.0].address();
        let signal = self.keys.signal().map(|id| &signals[id.0]);
        let arriving = self.keys.arriving(stream, buffers, signal)?;
        for operand in [&self.q, &self.keys.k, &self.keys.v]
            .into_iter()
            .chain(self.begin.as_ref().map(|state| &state.acc))
        {
            operand.enter(stream, buffers)?;
        }
        let begin = self.begin.as_ref().map(|state| state.tensors(buffers));
        let (end, written) = match &self.end {
            End::State(state) => {
                let state = state.as_ref().or(self.begin.as_ref());
                let tensors =
                    state.map_or(StateTensors { acc: 0, row_max: 0, row_sum: 0 }, |s| s.tensors(buffers));
                (ForwardTarget::State(tensors), state.map(|state| &state.acc))
            }
            End::Partial(partial) => (ForwardTarget::State(partial.state(buffers)), None),
            End::Result { sink, out, lse } => {
                let (sink, lse) = (sink.map_or(0, address), address(*lse));
                (ForwardTarget::Result(ResultTensors { sink, out: out.address(buffers), lse }), Some(out))
            }
        };
        if let Some(MaxLogits { buffer, accumulate: Accumulate::Start }) = self.max_logits {
            buffers[buffer.0].memory().fill_words(stream, f32::NEG_INFINITY.to_bits())?;
        }
        let tensors = ForwardTensors {
            q: self.q.head_rows(buffers),
            k: self.keys.k.head_rows(buffers),
            v: self.keys.v.head_rows(buffers),
            arriving,
            begin,
            end,
            max_logits: self.max_logits.map(|max| address(max.buffer)),
        };
        // SAFETY: `check_operands` has compared all shapes and types; buffers and copies live as long as what is enqueued; the
        // Program orders who else uses them.
        unsafe { self.kernel.launch(stream, &tensors) }?;
        if let End::Partial(partial) = &self.end {
            return partial.finish(stream, buffers, self.kernel.max_scale());
        }
        written.map_or(Ok(()), |operand| operand.leave(stream, buffers))
    }
}
