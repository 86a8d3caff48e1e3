//! Users' own kernels on the CPU.

use std::collections::HashMap;
use std::sync::Arc;

use counterpoint_schedule::{BufferId, UserKernel};

use super::compute::Access;
use crate::{ExecError, TensorMut, TensorRef};

/// One part of a user's own kernel: which it is, what it reads and what it writes, in the Program's order.
pub struct CpuUserPart<'a> {
    /// Counted from 0.
    pub part: usize,
    /// What it reads.
    pub reads: Vec<TensorRef<'a>>,
    /// What it writes.
    pub writes: Vec<TensorMut<'a>>,
}

/// What a user's own kernel does on the CPU.
type Body = Arc<dyn Fn(CpuUserPart<'_>) + Send + Sync>;

/// Users' own kernels, by name.
#[derive(Clone, Default)]
pub(crate) struct CpuUserKernels(Arc<HashMap<String, Body>>);

impl CpuUserKernels {
    /// The same and one more.
    pub(crate) fn with(&self, name: &str, body: impl Fn(CpuUserPart<'_>) + Send + Sync + 'static) -> Self {
        let mut kernels = (*self.0).clone();
        kernels.insert(name.to_owned(), Arc::new(body));
        Self(Arc::new(kernels))
    }

    pub(super) fn get(&self, name: &str) -> Option<&Body> {
        self.0.get(name)
    }
}

/// Runs a kernel part by part; `raise` is called after each with how many have ended.
pub(super) fn run(
    op: &UserKernel,
    body: &Body,
    access: &Access<'_>,
    raise: impl Fn(u64),
) -> Result<(), ExecError> {
    for (part, of) in op.parts.iter().enumerate() {
        let read = |id: &BufferId| access.read(*id);
        let reads = of.reads.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let write = |id: &BufferId| access.write(*id);
        let mut writes = of.writes.iter().map(write).collect::<Result<Vec<_>, _>>()?;
        body(CpuUserPart {
            part,
            reads: reads.iter().map(|guard| guard.view()).collect(),
            writes: writes.iter_mut().map(|guard| guard.view()).collect(),
        });
        drop((reads, writes));
        raise(part as u64 + 1);
    }
    Ok(())
}
