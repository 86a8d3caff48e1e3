//! From a compute operation of a Program to the launcher that does it, its tensors checked before any run.

use std::sync::Arc;
use std::time::Duration;

use counterpoint_driver::PitchedCopy;
use counterpoint_exec::{ExecError, OperationFault};
use counterpoint_mask::Range;
use counterpoint_schedule::{
    self as schedule, BufferId, BufferRole, BufferSpec, Op, Program, ProgramOp, RowsOrigin, SignalId,
};

use super::attention::Forward;
use super::attention_backward::{Backward, Delta};
use super::attention_finish::{Finish, Placing};
use super::attention_problem::OperationOf;
use super::grouped::Grouped;
use super::linear::{BiasGradient, Product};
use super::norm::{Normalisation, NormalisationGradients};
use super::row_lists::ListKey;
use super::tables::CudaTables;
use super::user_kernel::UserWork;
use super::waves::Waves;
use super::{CudaBackend, CudaBuffer, CudaSignal};
use crate::kernel::{Cast, ColumnMax, CtaWaits, ElementType, GemmLibrary, Scalar, UserKernelSource};
use crate::{Arch, CudaError, DeviceBuffer, Stream};

/// A compute operation of the CUDA backend, its tensors checked and its kernels loaded.
pub struct CudaKernel(Work);

enum Work {
    Forward(Box<Forward>),
    Finish(Box<Finish>),
    Placing(Box<Placing>),
    Delta(Box<Delta>),
    Backward(Box<Backward>),
    Product(Box<Product>),
    Waves(Box<Waves>),
    Grouped(Box<Grouped>),
    BiasGradient(Box<BiasGradient>),
    Largest {
        kernel: ColumnMax,
        src: BufferId,
        dst: BufferId,
    },
    Normalisation(Box<Normalisation>),
    NormalisationGradients(Box<NormalisationGradients>),
    User(Box<UserWork>),
    Cast {
        cast: Cast,
        src: BufferId,
        dst: BufferId,
    },
    /// Whole buffers one after the other; a single one is a plain copy.
    Concat {
        srcs: Vec<BufferId>,
        dst: BufferId,
    },
    /// A buffer to columns of another.
    PlaceColumns(PlacedColumns),
    /// Bytes of a buffer to zero.
    Zero {
        dst: BufferId,
        bytes: std::ops::Range<usize>,
    },
    /// The first bytes of a buffer to those of another.
    CopyFirst {
        src: BufferId,
        dst: BufferId,
        bytes: usize,
    },
}

impl CudaKernel {
    pub(super) fn new(
        backend: &CudaBackend,
        of: OperationOf<'_>,
        tables: &CudaTables,
        scratch: &mut Vec<BufferSpec>,
    ) -> Result<Self, ExecError> {
        let OperationOf { program, index } = of;
        program.check_operands(index).map_err(|fault| ExecError::program(program, fault))?;
        let mut prepare = Prepare::new(backend, of, tables);
        prepare.scratch.append(scratch);
        // Where the transport has no kernel for a fused operation, its collectives are operations of their own.
        let work = match program.ops[index].op.computation() {
            Op::AttentionForward(op) => Work::Forward(Box::new(Forward::new(&prepare, op)?)),
            Op::AttentionFinish(op) => Work::Finish(Box::new(Finish::new(&prepare, op)?)),
            Op::PlaceRows { src, dst, rows } => {
                Work::Placing(Box::new(Placing::new(&prepare, *src, *dst, rows)?))
            }
            Op::AttentionDelta(op) => Work::Delta(Box::new(Delta::new(&prepare, op)?)),
            Op::AttentionBackward(op) => Work::Backward(Box::new(Backward::new(&prepare, op)?)),
            Op::Gemm(op) => Work::Product(Box::new(Product::new(&prepare, op)?)),
            Op::WaveGemm(op) if op.grouped => Work::Grouped(Box::new(Grouped::new(&mut prepare, op)?)),
            Op::WaveGemm(op) => Work::Waves(Box::new(Waves::new(&prepare, op)?)),
            Op::ColumnSum(op) => Work::BiasGradient(Box::new(BiasGradient::new(&prepare, op)?)),
            Op::ColumnMax(op) => Work::Largest { kernel: prepare.column_max(op)?, src: op.src, dst: op.dst },
            Op::UserKernel(op) => Work::User(Box::new(UserWork::new(&prepare, op)?)),
            Op::RmsNorm(op) => Work::Normalisation(Box::new(Normalisation::new(&prepare, op)?)),
            Op::RmsNormBackward(op) => {
                Work::NormalisationGradients(Box::new(NormalisationGradients::new(&prepare, op)?))
            }
            Op::Cast { src, dst } if prepare.spec(*src).dtype == prepare.spec(*dst).dtype => {
                Work::Concat { srcs: vec![*src], dst: *dst }
            }
            Op::Cast { src, dst } => Work::Cast { cast: prepare.cast(*src, *dst)?, src: *src, dst: *dst },
            Op::Concat { srcs, dst } => Work::Concat { srcs: srcs.clone(), dst: *dst },
            Op::CopyRows { src, dst, rows } => {
                let spec = prepare.spec(*src);
                let bytes = rows * spec.row_elements() * spec.dtype.size();
                Work::CopyFirst { src: *src, dst: *dst, bytes }
            }
            Op::PlaceColumns { src, dst, columns } => {
                Work::PlaceColumns(PlacedColumns::new(&prepare, *src, *dst, *columns))
            }
            Op::ZeroRows { dst, rows } => {
                let spec = prepare.spec(*dst);
                let row = spec.row_elements() * spec.dtype.size();
                Work::Zero { dst: *dst, bytes: rows.start * row..rows.end * row }
            }
            _ => return Err(prepare.error(OperationFault::NoCudaKernel)),
        };
        scratch.append(&mut prepare.scratch);
        Ok(Self(work))
    }

    /// `buffers` and `signals` are the Program's tables.
    pub(super) fn launch(
        &self,
        stream: &Stream,
        buffers: &[CudaBuffer],
        signals: &[CudaSignal],
    ) -> Result<(), CudaError> {
        match &self.0 {
            Work::Forward(work) => work.launch(stream, buffers, signals),
            Work::Finish(work) => work.launch(stream, buffers),
            Work::Placing(work) => work.launch(stream, buffers),
            Work::Delta(work) => work.launch(stream, buffers),
            Work::Backward(work) => {
                work.launch(stream, buffers, work.signal().map(|id| &signals[id.0]), None, None)
            }
            Work::Product(work) => work.launch(stream, buffers),
            Work::Waves(work) => work.launch(stream, buffers, signals),
            Work::Grouped(work) => work.launch(stream, buffers, signals),
            Work::BiasGradient(work) => work.launch(stream, buffers),
            Work::Largest { kernel, src, dst } => {
                let (src, dst) = (buffers[src.0].address(), buffers[dst.0].address());
                // SAFETY: `check_operands` has compared the shapes; events of the Program order who else uses them.
                unsafe { kernel.launch(stream, src, dst) }
            }
            Work::Normalisation(work) => work.launch(stream, buffers),
            Work::NormalisationGradients(work) => work.launch(stream, buffers),
            Work::User(work) => work.launch(stream, buffers, signals),
            Work::Cast { cast, src, dst } => {
                let (src, dst) = (&buffers[src.0], &buffers[dst.0]);
                // SAFETY: both hold as many elements of the types that the kernel is for, aligned by `CudaBuffer::new`; events
                // of the Program order who else uses them.
                unsafe { cast.launch(stream, src.address(), dst.address(), src.len() as u64) }
            }
            Work::PlaceColumns(placed) => placed.launch(stream, buffers),
            Work::Zero { dst, bytes } => buffers[dst.0].memory().slice(bytes.clone())?.fill(stream, 0),
            Work::CopyFirst { src, dst, bytes } => {
                let first = buffers[src.0].memory().slice(0..*bytes)?;
                buffers[dst.0].memory().copy_from(stream, 0, &first)
            }
            Work::Concat { srcs, dst } => {
                let mut offset = 0;
                for src in srcs {
                    let src = buffers[src.0].memory();
                    buffers[dst.0].memory().copy_from(stream, offset, src)?;
                    offset += src.len();
                }
                Ok(())
            }
        }
    }
}

/// A buffer's rows to columns of another's.
struct PlacedColumns {
    src: BufferId,
    dst: BufferId,
    lines: usize,
    /// Bytes of a row of either, and of those before the columns.
    row_bytes: [usize; 2],
    before: usize,
}

impl PlacedColumns {
    fn new(prepare: &Prepare<'_>, src: BufferId, dst: BufferId, columns: Range) -> Self {
        let spec = prepare.spec(dst);
        let bytes = |elements: usize| elements * spec.dtype.size();
        let row_bytes = [columns.len(), spec.row_elements()].map(bytes);
        Self { src, dst, lines: spec.rows(), row_bytes, before: bytes(columns.start) }
    }

    fn launch(&self, stream: &Stream, buffers: &[CudaBuffer]) -> Result<(), CudaError> {
        let [bytes, to_pitch] = self.row_bytes;
        if self.lines == 0 {
            return Ok(());
        }
        let copy = PitchedCopy {
            from: buffers[self.src.0].address(),
            to: buffers[self.dst.0].address() + self.before as u64,
            bytes,
            lines: self.lines,
            from_pitch: bytes,
            to_pitch,
        };
        // SAFETY: `check_operands` has compared the shapes; events of the Program order who else uses them.
        unsafe { copy.launch(stream) }
    }
}

/// What an operation is made ready from.
pub(super) struct Prepare<'a> {
    backend: &'a CudaBackend,
    operation: OperationOf<'a>,
    /// Of the Program.
    tables: &'a CudaTables,
    /// Memory that kernels of the Program need, of operations before this one too.
    scratch: Vec<BufferSpec>,
}

impl<'a> Prepare<'a> {
    pub(super) fn new(backend: &'a CudaBackend, operation: OperationOf<'a>, tables: &'a CudaTables) -> Self {
        Self { backend, operation, tables, scratch: Vec::new() }
    }

    pub(super) fn operation(&self) -> OperationOf<'a> {
        self.operation
    }

    pub(super) fn tables(&self) -> &'a CudaTables {
        self.tables
    }

    /// What kernels are compiled for.
    pub(super) fn arch(&self) -> Arch {
        self.setup().device().arch()
    }

    fn program(&self) -> &'a Program {
        self.operation.program
    }

    /// Scratch memory for rows as those of a buffer, of `name`: what else has that name on the operation's stream has the same.
    pub(super) fn scratch_rows(&mut self, name: &str, like: BufferId, rows: usize) -> BufferId {
        let (BufferSpec { dtype, .. }, columns) = (self.spec(like), self.spec(like).row_elements());
        let name = format!("{name} of stream {}", self.program().ops[self.operation.index].stream.0);
        let (shape, role) = (vec![rows, columns], BufferRole::Scratch);
        self.scratch.push(BufferSpec { name, dtype: *dtype, shape, role });
        BufferId(self.program().buffers.len() + self.scratch.len() - 1)
    }

    pub(super) fn spec(&self, id: BufferId) -> &'a BufferSpec {
        self.operation.spec(id)
    }

    /// A stream for uploads that are waited for.
    pub(super) fn setup(&self) -> &'a Stream {
        self.backend.setup()
    }

    pub(super) fn sm_margin(&self) -> u32 {
        self.operation.sm_margin()
    }

    /// At least so many bytes of zeros, which nobody writes.
    pub(super) fn zeros(&self, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        self.backend.zeros(bytes)
    }

    /// A list of rows that other passes of a routing may have too: where there is none, what `make` makes, if anything.
    pub(super) fn shared_list<T: Send + Sync + 'static>(
        &self,
        origin: &RowsOrigin,
        key: ListKey,
        make: impl FnOnce() -> Result<Option<T>, CudaError>,
    ) -> Result<Option<Arc<T>>, ExecError> {
        let (lists, unsent) = self.backend.lists();
        lists.of(unsent, origin, key, make).map_err(|error| self.device_error(error))
    }

    /// A kernel that a user has given the machine.
    pub(super) fn user_kernel(&self, name: &str) -> Option<&'a UserKernelSource> {
        self.backend.user_kernel(name)
    }

    /// Whether nothing is communicated under products but rows that copy engines move.
    pub(super) fn has_casts_by_engines_alone(&self) -> bool {
        let reduces = |op: &ProgramOp| {
            !op.op.is_fused_gemm() && op.op.parts().iter().any(|part| matches!(part, Op::GroupReduce(_)))
        };
        self.program().policy.is_fused() && !self.program().ops.iter().any(reduces)
    }

    /// Whether the Program has no collective: then no policy has one, nor another kernel for its products.
    pub(super) fn sends_nothing(&self) -> bool {
        !self.program().ops.iter().any(|op| op.op.is_collective())
    }

    /// cuBLASLt, where plain products are its.
    pub(super) fn library(&self) -> Result<Option<GemmLibrary>, ExecError> {
        self.backend.library().map_err(|error| self.device_error(error))
    }

    /// Whether anything of the Program waits for a signal.
    pub(super) fn is_waited_for(&self, wanted: SignalId) -> bool {
        let waits = |op: &ProgramOp| matches!(op.op, Op::WaitSignal { signal, .. } if signal == wanted);
        self.program().ops.iter().any(waits)
    }

    /// Whether its products wait for rows themselves.
    pub(super) fn waits_inside(&self) -> bool {
        self.backend.waits_inside(self.program())
    }

    /// How long kernels wait.
    pub(super) fn wait_limit(&self) -> Duration {
        self.backend.world().config().limit
    }

    /// What errors call the operation.
    pub(super) fn label(&self) -> &'a str {
        self.operation.label()
    }

    /// The elements' type of a tensor that the matrix unit multiplies.
    pub(super) fn element(&self, id: BufferId) -> Result<ElementType, ExecError> {
        self.operation.element(id)
    }

    /// Whether the Program's operations follow each other.
    pub(super) fn has_one_stream(&self) -> bool {
        self.program().streams.len() == 1
    }

    /// Has the end of every run ask whether a wait inside a kernel of this operation gave up.
    pub(super) fn watch(&self, waits: &CtaWaits) {
        self.backend.watch(self.label().to_owned(), waits.clone());
    }

    pub(super) fn error(&self, fault: OperationFault) -> ExecError {
        self.operation.error(fault)
    }

    pub(super) fn device_error(&self, error: CudaError) -> ExecError {
        self.backend.error(&format_args!("the preparation of `{}`", self.label()), error)
    }

    pub(super) fn scalar(&self, id: BufferId) -> Result<Scalar, ExecError> {
        let BufferSpec { name, dtype, .. } = self.spec(id);
        Scalar::of(*dtype)
            .ok_or_else(|| self.error(OperationFault::DType { name: name.clone(), dtype: *dtype }))
    }

    fn column_max(&self, op: &schedule::ColumnMax) -> Result<ColumnMax, ExecError> {
        let (src, columns) = (self.spec(op.src), self.spec(op.dst).shape[0]);
        if self.scalar(op.src)? != Scalar::F32 {
            return Err(self.error(OperationFault::LargestDType));
        }
        ColumnMax::new(self.backend.device(), [src.shape[0], src.shape[1]], columns)
            .map_err(|error| self.device_error(error))
    }

    fn cast(&self, src: BufferId, dst: BufferId) -> Result<Cast, ExecError> {
        let (src, dst) = (self.scalar(src)?, self.scalar(dst)?);
        Cast::new(self.backend.device(), src, dst).map_err(|error| self.device_error(error))
    }
}
