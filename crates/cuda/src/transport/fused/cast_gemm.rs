//! Products whose operand's rows come from other ranks while they are computed, each rank on a GPU of its own. In the first
//! run the host exchanges where each rank takes rows in; from then on a run is one launch.

use counterpoint_exec::collective::Collective;
use counterpoint_exec::{CollectiveCall, CollectiveContext, ExecError, OpPlace};
use counterpoint_mask::Range;
use counterpoint_schedule::{BufferId, BufferRole, Gemm, GroupCast, Program, RowBlock};

use super::product_side::ProductSide;
use super::{Rows, product_of, whole};
use crate::CudaError;
use crate::backend::CudaBackend;
use crate::kernel::{GemmGather, GemmGatherSpec, GemmGatherTensors};
use crate::transport::{Call, CallError, CudaPending, CudaTransport, Means, Work};

/// One rank's part.
pub(in crate::transport) struct CastGemmWork {
    kernel: GemmGather,
    /// With memory that counts what has come, and takes in rows that leave at once.
    pub(in crate::transport) side: ProductSide,
    /// This rank's rows, and the copy of all that the others write into.
    own: BufferId,
    all: BufferId,
    b: Rows,
    out: BufferId,
    bias: Option<BufferId>,
}

/// An operation whose tensors a kernel takes: its spec and where they are.
struct Fitting {
    spec: GemmGatherSpec,
    own: BufferId,
    all: BufferId,
    b: Rows,
}

/// The operation as the kernel takes it; `None` when it does not. Depends on what all ranks agree on only.
fn fitting((cast, gemm): (&GroupCast, &Gemm), collective: &Collective, program: &Program) -> Option<Fitting> {
    let (rank, ranks) = (program.rank, program.world_size);
    let spec_of = |id: BufferId| &program.buffers[id.0];
    let [(own, all)] = cast.tensors[..] else { return None };
    let dtype = spec_of(own).dtype;
    let b = whole(&gemm.b, &program.buffers)?;
    let (m, rows) = (spec_of(all).rows(), spec_of(own).rows());
    let product = product_of(gemm, own, m, program)?;
    let first = rank * rows;
    let blocks = [
        RowBlock { buffer: all, rows: Range::new(0, first) },
        RowBlock { buffer: own, rows: Range::new(0, rows) },
        RowBlock { buffer: all, rows: Range::new(first + rows, m) },
    ];
    let alike = rows * ranks == m
        && blocks.into_iter().filter(|block| !block.rows.is_empty()).eq(gemm.a.iter())
        && spec_of(gemm.b.pieces()[0].buffer).dtype == dtype
        && cast.wire_dtype == dtype;
    let exchanged = |peer: usize| {
        let theirs = Range::new(peer * rows, (peer + 1) * rows);
        let pattern = &collective.pattern;
        pattern.to(peer) == [Range::new(0, rows)] && pattern.from(peer) == [theirs]
    };
    if !alike || !(0..ranks).filter(|&peer| peer != rank).all(exchanged) {
        return None;
    }
    let spec = GemmGatherSpec { product, rank, ranks };
    Some(Fitting { spec, own, all, b }).filter(|fitting| fitting.spec.check().is_ok())
}

/// Whether anything but its product reads the copy of all rows, which rows that leave at once do not come into.
fn is_read_elsewhere(program: &Program, all: BufferId) -> bool {
    // The product's own copy is written by its cast.
    let is_read = program.ops.iter().any(|op| op.op.reads().contains(&all));
    is_read || program.buffers[all.0].role != BufferRole::Scratch
}

impl CudaTransport {
    /// The operation as one kernel, and what its ranks must agree on; `None` when there is no such kernel.
    pub(in crate::transport) fn cast_gemm_work(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        (cast, gemm): (&GroupCast, &Gemm),
        program: &Program,
    ) -> Result<Option<(Collective, Work)>, ExecError> {
        let Means::Link { .. } = &self.means else { return Ok(None) };
        let context =
            CollectiveContext { buffers: &program.buffers, policy: &program.policy, plan: None, turn: None };
        let collective = Collective::cast(self.rank, self.world.size(), place, cast, &context)?;
        let Some(Fitting { spec, own, all, b }) = fitting((cast, gemm), &collective, program) else {
            return Ok(None);
        };
        let make = || -> Result<Option<(Collective, Work)>, CudaError> {
            let setup = backend.setup();
            let Some(&shape) = GemmGather::shapes(&self.device, &spec)?.first() else { return Ok(None) };
            let kernel = GemmGather::with_shape(setup, &spec, shape)?;
            if kernel.leaves_at_once() && is_read_elsewhere(program, all) {
                return Ok(None);
            }
            let (bytes, written) = (kernel.exchange_bytes(), Rows { buffer: all, offset: 0 });
            let side = self.product_side(setup, bytes, bytes, Some(written))?;
            let mut collective = collective;
            let (shape, ctas) = (kernel.shape(), kernel.ctas());
            collective.contract.kind = format!("a product of rows of all ranks, {shape:?} by {ctas} CTAs");
            let work = CastGemmWork { kernel, side, own, all, b, out: gemm.out, bias: gemm.bias };
            Ok(Some((collective, Work::CastGemm(Box::new(work)))))
        };
        make().map_err(|error| backend.error(place, error))
    }

    pub(in crate::transport) fn cast_gemm(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &CastGemmWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { stream, place, collective, buffers, .. } = *call;
        let others = (0..self.world.size()).filter(|&rank| rank != self.rank);
        let users = &collective.collective.pattern.incoming;
        let connected =
            self.product_connected(call, pending, &work.side, work.kernel.waits(), others, users)?;
        if !work.kernel.leaves_at_once() {
            self.check_unmoved(place, connected.written[self.rank], buffers[work.all.0].address())?;
        }
        let link = self.product_call(&work.side, connected)?;
        let tensors = GemmGatherTensors {
            own: buffers[work.own.0].address(),
            gathered: &connected.written,
            exchanges: &connected.exchanges,
            b: work.b.address(buffers),
            d: buffers[work.out.0].address(),
            bias: work.bias.map_or(0, |bias| buffers[bias.0].address()),
        };
        // SAFETY: `fitting` has compared shapes and types; the other ranks' memory lives as long as `connected`; all ranks make the same
        // calls, each on a GPU of its own, and `Program::validate` has seen that nothing that runs with them waits for other ranks.
        unsafe { work.kernel.launch(stream.queue(), &tensors, &link) }?;
        Ok(())
    }
}
