//! What an attention operation of a Program asks of a kernel: pure, of the Program and the GPU's architecture.

use std::sync::Arc;

use counterpoint_exec::{ExecError, OperationFault, ProgramFault};
use counterpoint_mask::Band;
use counterpoint_plan::DType;
use counterpoint_schedule::{
    Accumulate, ArrivingKeys, AttentionBackward, AttentionForward, BufferId, BufferRole, BufferSpec,
    ForwardBegin, ForwardEnd, KeyBlocks, Program, WorkerShare,
};

use super::padding::padded_dim;
use crate::Arch;
use crate::kernel::{
    AttentionBackward as BackwardLauncher, AttentionProblem, BackwardMode, DqBegin, ElementType,
    ForwardKernel, ForwardMode, ForwardModeEnd,
};

/// An operation by its place in a Program.
#[derive(Clone, Copy)]
pub(super) struct OperationOf<'a> {
    pub(super) program: &'a Program,
    pub(super) index: usize,
}

impl<'a> OperationOf<'a> {
    pub(super) fn spec(self, id: BufferId) -> &'a BufferSpec {
        // The Program's validation has checked the ids.
        &self.program.buffers[id.0]
    }

    /// What errors call it.
    pub(super) fn label(self) -> &'a str {
        &self.program.ops[self.index].label
    }

    pub(super) fn error(self, fault: OperationFault) -> ExecError {
        let label = self.label().to_owned();
        ExecError::program(self.program, ProgramFault::Operation { op: self.index, label, fault })
    }

    /// Multiprocessors that its kernel leaves to communication.
    pub(super) fn sm_margin(self) -> u32 {
        let workers = match self.program.policy.workers {
            // Those of communication are not there for this one's blocks.
            WorkerShare::Margin(workers) | WorkerShare::Partition(workers) => workers,
            WorkerShare::Common => 0,
        };
        workers.try_into().unwrap_or(u32::MAX)
    }

    /// The elements' type of a tensor that the matrix unit multiplies.
    pub(super) fn element(self, id: BufferId) -> Result<ElementType, ExecError> {
        match self.spec(id).dtype {
            DType::Bf16 => Ok(ElementType::Bf16),
            DType::F16 => Ok(ElementType::F16),
            other => {
                Err(self
                    .error(OperationFault::ProductDType { name: self.spec(id).name.clone(), dtype: other }))
            }
        }
    }

    /// The problem of `q`, `k` and `v`, whose heads are as long as they are padded to.
    fn problem(
        self,
        [q, k, v]: [BufferId; 3],
        bands: &Arc<[Band]>,
        scale: f64,
        softcap: f64,
    ) -> Result<AttentionProblem, ExecError> {
        let element = self.element(q)?;
        let (q, k, v) = (self.spec(q), self.spec(k), self.spec(v));
        Ok(AttentionProblem {
            bands: bands.clone(),
            rows_q: q.rows(),
            rows_k: k.rows(),
            rows_arriving: 0,
            heads_q: q.shape[1],
            heads_kv: k.shape[1],
            head_dim: padded_dim(q.shape[2]),
            head_dim_v: padded_dim(v.shape[2]),
            element,
            scale: scale as f32,
            softcap: (softcap > 0.0).then_some(softcap as f32),
            sm_margin: self.sm_margin(),
            deterministic: false,
        })
    }

    /// Adds the rows of keys that arrive after those of `k` to a problem; whether its kernel takes them where they are. Portable
    /// kernels and padded heads do not, nor does what `takes` refuses.
    fn arrive(
        self,
        problem: &mut AttentionProblem,
        k: BufferId,
        arriving: Option<&ArrivingKeys>,
        takes: impl Fn(&AttentionProblem) -> bool,
    ) -> bool {
        let Some(keys) = arriving else { return false };
        let rows = self.spec(keys.k).rows();
        problem.rows_k += rows;
        let padded = [(k, problem.head_dim), (keys.v, problem.head_dim_v)];
        let padded = padded.iter().any(|&(id, dim)| self.spec(id).shape[2] != dim);
        let inside = !padded && takes(problem);
        problem.rows_arriving = if inside { rows } else { 0 };
        inside
    }
}

/// A stage of the forward, as its kernel computes it.
pub(super) struct ForwardProblem {
    pub(super) problem: AttentionProblem,
    pub(super) mode: ForwardMode,
    /// Whether the kernel takes keys that arrive where they are.
    pub(super) arrives_inside: bool,
}

impl ForwardProblem {
    pub(super) fn new(of: OperationOf<'_>, op: &AttentionForward, arch: Arch) -> Result<Self, ExecError> {
        let mut problem = of.problem([op.q, op.k, op.v], &op.bands, op.scale, op.softcap)?;
        problem.deterministic = op.blocks == KeyBlocks::Aligned;
        let arrives_inside = of.arrive(&mut problem, op.k, op.arriving.as_ref(), |_| arch.is_hopper());
        let seqlen_sink = |sink: Option<BufferId>| sink.map_or(0, |sink| of.spec(sink).rows());
        let is_partial = |out: BufferId| of.spec(out).dtype != of.spec(op.q).dtype;
        let continues = matches!(op.begin, ForwardBegin::Continue(_));
        let by_state = continues || !ForwardKernel::leaves_partials(arch);
        let mode = ForwardMode {
            continues,
            max_logits: op.max_logits.is_some(),
            end: match op.end {
                ForwardEnd::State(_) => ForwardModeEnd::State,
                ForwardEnd::Result { out, .. } if is_partial(out) && by_state => ForwardModeEnd::State,
                ForwardEnd::Result { out, .. } if is_partial(out) => ForwardModeEnd::Partial,
                ForwardEnd::Result { sink, .. } => ForwardModeEnd::Result { seqlen_sink: seqlen_sink(sink) },
            },
        };
        Ok(Self { problem, mode, arrives_inside })
    }
}

/// A stage of the backward, likewise.
pub(super) struct BackwardProblem {
    pub(super) problem: AttentionProblem,
    pub(super) mode: BackwardMode,
    /// Whether the kernel takes keys that arrive where they are.
    pub(super) arrives_inside: bool,
}

impl BackwardProblem {
    pub(super) fn new(of: OperationOf<'_>, op: &AttentionBackward, arch: Arch) -> Result<Self, ExecError> {
        let mut problem = of.problem([op.q, op.k, op.v], &op.bands, op.scale, op.softcap)?;
        problem.deterministic = op.deterministic;
        let takes = |problem: &AttentionProblem| arch.is_hopper() && BackwardLauncher::takes(problem);
        let arrives_inside = of.arrive(&mut problem, op.k, op.arriving.as_ref(), takes);
        let dq = of.spec(op.dq);
        // A copy that is padded is the operation's own, and not zero before the first run.
        let is_whole = dq.shape[2] == padded_dim(dq.shape[2]);
        let mode = BackwardMode {
            dq: match op.accumulate_dq {
                Accumulate::Continue => DqBegin::Sums,
                Accumulate::Start if dq.role == BufferRole::Persistent && is_whole => DqBegin::Persistent,
                Accumulate::Start => DqBegin::Anything,
            },
            rounds_queries: op.rounded_dq.is_some(),
            rounds_keys: of.spec(op.dk).dtype != DType::F32,
        };
        Ok(Self { problem, mode, arrives_inside })
    }
}
