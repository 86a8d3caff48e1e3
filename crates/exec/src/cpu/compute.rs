use counterpoint_plan::DType;
use counterpoint_schedule::{BufferId, BufferSpec, Op, Program};
use rayon::ThreadPool;

use super::buffer::{CpuBuffer, ReadGuard, WriteGuard};
use crate::host_element::{convert, with_host_element};
use crate::{ExecError, HostTensor, OpPlace};

/// A compute operation of the CPU backend, its tensors checked.
#[derive(Clone)]
pub struct CpuKernel {
    op: Op,
}

impl CpuKernel {
    /// Checks an operation's tensors against each other, so that kernels need not.
    pub(super) fn new(program: &Program, index: usize) -> Result<Self, ExecError> {
        let op = &program.ops[index].op;
        let check = Check { program, index };
        match op {
            Op::Cast { src, dst } => {
                let (src, dst) = (check.spec(*src), check.spec(*dst));
                check.shape(dst, &src.shape)?;
            }
            Op::Concat { srcs, dst } => {
                let dst = check.spec(*dst);
                let mut rows = 0;
                for src in srcs {
                    let src = check.spec(*src);
                    check.dtype(src, dst.dtype)?;
                    check.same_rows(src, dst)?;
                    rows += src.rows();
                }
                check.rows(dst, rows)?;
            }
            other => {
                return Err(check.error(format!("the CPU backend does not know {other:?}")));
            }
        }
        Ok(Self { op: op.clone() })
    }

    /// The buffers that the operation uses.
    pub(super) fn bind(&self, buffers: &[CpuBuffer]) -> Bound {
        let mut ids: Vec<BufferId> = self.op.reads().into_iter().chain(self.op.writes()).collect();
        ids.sort_unstable();
        ids.dedup();
        Bound(ids.into_iter().map(|id| (id, buffers[id.0].clone())).collect())
    }

    /// On a stream's thread: runs it on `workers`.
    pub(super) fn run(
        &self,
        rank: usize,
        place: &OpPlace,
        buffers: &Bound,
        workers: &ThreadPool,
    ) -> Result<(), ExecError> {
        let access = Access { rank, place, buffers };
        match &self.op {
            Op::Cast { src, dst } => {
                let (src, mut dst) = (access.read(*src)?, access.write(*dst)?);
                let (src, dst): (&HostTensor, &mut HostTensor) = (&src, &mut dst);
                workers.install(|| cast(src, dst));
            }
            Op::Concat { srcs, dst } => {
                let mut dst = access.write(*dst)?;
                let mut offset = 0;
                for src in srcs {
                    let src = access.read(*src)?;
                    with_host_element!(src.dtype(), T => {
                        if let (Some(src), Some(dst)) = (src.as_slice::<T>(), dst.as_mut_slice::<T>()) {
                            dst[offset..offset + src.len()].copy_from_slice(src);
                        }
                    });
                    offset += src.len();
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Buffers of one launch.
pub(super) struct Bound(Vec<(BufferId, CpuBuffer)>);

/// Gives an operation its tensors.
struct Access<'a> {
    rank: usize,
    place: &'a OpPlace,
    buffers: &'a Bound,
}

impl<'a> Access<'a> {
    fn buffer(&self, id: BufferId) -> &'a CpuBuffer {
        // `bind` took every buffer that the operation reads or writes.
        let index = self.buffers.0.partition_point(|(bound, _)| *bound < id);
        &self.buffers.0[index].1
    }

    fn read(&self, id: BufferId) -> Result<ReadGuard<'a>, ExecError> {
        self.buffer(id).read(self.rank, self.place)
    }

    fn write(&self, id: BufferId) -> Result<WriteGuard<'a>, ExecError> {
        self.buffer(id).write(self.rank, self.place)
    }
}

/// Checks of one operation's tensors.
struct Check<'a> {
    program: &'a Program,
    index: usize,
}

impl<'a> Check<'a> {
    fn spec(&self, id: BufferId) -> &'a BufferSpec {
        // `Program::validate` has checked the ids.
        &self.program.buffers[id.0]
    }

    fn error(&self, reason: String) -> ExecError {
        ExecError::Program {
            program: self.program.name.clone(),
            rank: self.program.rank,
            reason: format!("op {} ({}): {reason}", self.index, self.program.ops[self.index].label),
        }
    }

    fn shape(&self, spec: &BufferSpec, shape: &[usize]) -> Result<(), ExecError> {
        if spec.shape == shape {
            return Ok(());
        }
        Err(self.error(format!("buffer `{}` must be {shape:?}, not {:?}", spec.name, spec.shape)))
    }

    fn rows(&self, spec: &BufferSpec, rows: usize) -> Result<(), ExecError> {
        if spec.rows() == rows {
            return Ok(());
        }
        Err(self.error(format!("buffer `{}` must have {rows} rows, not {}", spec.name, spec.rows())))
    }

    fn same_rows(&self, spec: &BufferSpec, other: &BufferSpec) -> Result<(), ExecError> {
        if spec.shape[1..] == other.shape[1..] {
            return Ok(());
        }
        let (name, shape) = (&spec.name, &spec.shape[1..]);
        Err(self.error(format!(
            "rows of `{name}` must be {:?} as in `{}`, not {shape:?}",
            &other.shape[1..],
            other.name
        )))
    }

    fn dtype(&self, spec: &BufferSpec, dtype: DType) -> Result<(), ExecError> {
        if spec.dtype == dtype {
            return Ok(());
        }
        Err(self.error(format!("buffer `{}` must be {dtype:?}, not {:?}", spec.name, spec.dtype)))
    }
}
fn cast(src: &HostTensor, dst: &mut HostTensor) {
    with_host_element!(src.dtype(), S => with_host_element!(dst.dtype(), D => {
        if let (Some(src), Some(dst)) = (src.as_slice::<S>(), dst.as_mut_slice::<D>()) {
            dst.iter_mut().zip(src).for_each(|(dst, src)| *dst = convert(*src));
        }
    }))
}
