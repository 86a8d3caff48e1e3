//! Products whose operand's rows come from other ranks while they are computed, each rank on a GPU of its own. The host's meeting
//! of the first run tells each rank where the others take rows in; from then on a run is one launch.

use std::sync::{Arc, OnceLock};

use counterpoint_exec::collective::Collective;
use counterpoint_exec::{CollectiveCall, ExecError, OpPlace};
use counterpoint_mask::Range;
use counterpoint_schedule::{self as schedule, Accumulate, BufferId, BufferRole, Program, RowBlock};

use super::fused::{Rows, element_of, layout_of, whole};
use super::{Call, CallError, CudaMeeting, CudaTransport, Means, Work, untold};
use crate::backend::{CudaBackend, CudaBuffer};
use crate::kernel::{
    GemmEpilogue, GemmGather, GemmGatherSpec, GemmGatherTensors, GemmSpec, LinkAbort, LinkEnd, LinkPeers,
};
use crate::{CudaError, DeviceBuffer};

/// One rank's part.
pub(super) struct CastGemmWork {
    end: Arc<LinkEnd>,
    abort: LinkAbort,
    kernel: GemmGather,
    /// Counts what has come, and takes in rows that leave at once.
    exchange: DeviceBuffer,
    /// This rank's rows, and the copy of all that the others write into.
    own: BufferId,
    all: BufferId,
    b: Rows,
    out: BufferId,
    bias: Option<BufferId>,
    /// Made when ranks first meet.
    met: OnceLock<Met>,
}

/// What a rank knows of the others.
struct Met {
    peers: LinkPeers,
    exchanges: Vec<u64>,
    gathered: Vec<u64>,
    _memory: Vec<DeviceBuffer>,
}

impl CastGemmWork {
    /// Whether the ranks know each other.
    pub(super) fn has_met(&self) -> bool {
        self.met.get().is_some()
    }

    pub(super) fn mailbox(&self) -> DeviceBuffer {
        self.end.mailbox().clone()
    }

    pub(super) fn exchange(&self) -> DeviceBuffer {
        self.exchange.clone()
    }

    /// The tensor that others write rows into.
    pub(super) fn written_by_others(&self, buffers: &[CudaBuffer]) -> CudaBuffer {
        buffers[self.all.0].clone()
    }
}

/// An operation whose tensors a kernel takes: its spec and where they are.
struct Fitting {
    spec: GemmGatherSpec,
    own: BufferId,
    all: BufferId,
    b: Rows,
}

/// The operation as the kernel takes it; `None` when it does not. Depends on what all ranks agree on only.
fn fitting(op: &schedule::CastGemm, collective: &Collective, program: &Program) -> Option<Fitting> {
    let (rank, ranks) = (program.rank, program.world_size);
    let schedule::CastGemm { cast, gemm } = op;
    let spec_of = |id: BufferId| &program.buffers[id.0];
    let [(own, all)] = cast.tensors[..] else { return None };
    let dtype = spec_of(own).dtype;
    let element = element_of(dtype)?;
    let layout = layout_of(gemm.layout)?;
    let b = whole(&gemm.b, &program.buffers)?;
    let (m, rows) = (spec_of(all).rows(), spec_of(own).rows());
    let (n, k) = (spec_of(gemm.out).row_elements(), spec_of(own).row_elements());
    let first = rank * rows;
    let blocks = [
        RowBlock { buffer: all, rows: Range::new(0, first) },
        RowBlock { buffer: own, rows: Range::new(0, rows) },
        RowBlock { buffer: all, rows: Range::new(first + rows, m) },
    ];
    let alike = rows * ranks == m
        && blocks.iter().filter(|block| !block.rows.is_empty()).eq(&gemm.a)
        && gemm.out_rows == [Range::new(0, m)]
        && spec_of(gemm.out).rows() == m
        && gemm.accumulate == Accumulate::Start
        && [gemm.out, gemm.b[0].buffer].iter().all(|&id| spec_of(id).dtype == dtype)
        && cast.wire_dtype == dtype;
    let exchanged = |peer: usize| {
        let theirs = Range::new(peer * rows, (peer + 1) * rows);
        let pattern = &collective.pattern;
        pattern.to(peer) == [Range::new(0, rows)] && pattern.from(peer) == [theirs]
    };
    if !alike || !(0..ranks).filter(|&peer| peer != rank).all(exchanged) {
        return None;
    }
    let mut product = GemmSpec::new(m, n, k, layout, element);
    product.pass_rows = gemm.pass_rows;
    if gemm.bias.is_some() {
        product.epilogue = GemmEpilogue::StoreBias;
    }
    product.sm_margin = program.policy.sm_margin().try_into().unwrap_or(u32::MAX);
    let spec = GemmGatherSpec { product, rank, ranks };
    Some(Fitting { spec, own, all, b }).filter(|fitting| fitting.spec.check().is_ok())
}

/// Whether anything but its product reads the copy of all rows, which rows that leave at once do not come into.
fn is_read_elsewhere(program: &Program, all: BufferId) -> bool {
    let reading = program.ops.iter().filter(|op| op.op.reads().contains(&all)).count();
    reading > 1 || program.buffers[all.0].role != BufferRole::Scratch
}

impl CudaTransport {
    /// The operation as one kernel, and what its ranks must agree on; `None` when there is no such kernel.
    pub(super) fn cast_gemm_work(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        op: &schedule::CastGemm,
        program: &Program,
    ) -> Result<Option<(Collective, Work)>, ExecError> {
        let Means::Link { abort, .. } = &self.means else { return Ok(None) };
        let collective = Collective::cast(self.rank, self.world.size(), place, &op.cast, &program.buffers)?;
        let Some(Fitting { spec, own, all, b }) = fitting(op, &collective, program) else { return Ok(None) };
        let make = || -> Result<Option<(Collective, Work)>, CudaError> {
            let setup = backend.setup();
            let Some(&shape) = GemmGather::shapes(&self.device, &spec)?.first() else { return Ok(None) };
            let kernel = GemmGather::with_shape(setup, &spec, shape)?;
            if kernel.leaves_at_once() && is_read_elsewhere(program, all) {
                return Ok(None);
            }
            let exchange = DeviceBuffer::new(&self.device, kernel.exchange_bytes())?;
            exchange.fill(setup, 0)?;
            setup.synchronize()?;
            let mut collective = collective;
            let (shape, ctas) = (kernel.shape(), kernel.ctas());
            collective.contract.kind = format!("a product of rows of all ranks, {shape:?} by {ctas} CTAs");
            let work = CastGemmWork {
                end: Arc::new(LinkEnd::new(setup)?),
                abort: abort.clone(),
                kernel,
                exchange,
                own,
                all,
                b,
                out: op.gemm.out,
                bias: op.gemm.bias,
                met: OnceLock::new(),
            };
            Ok(Some((collective, Work::CastGemm(Box::new(work)))))
        };
        make().map_err(|error| backend.error(place, error))
    }

    pub(super) fn cast_gemm(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        work: &CastGemmWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { backend, stream, place, buffers, .. } = *call;
        let met = match work.met.get() {
            Some(met) => met,
            None => {
                let met = self.meet_copies(call, meeting, work)?;
                backend.watch_link(place.to_string(), work.end.clone());
                if let Some(missed) = work.kernel.missed_hand() {
                    backend.watch(place.to_string(), missed.clone());
                }
                work.met.get_or_init(|| met)
            }
        };
        if !work.kernel.leaves_at_once() {
            self.check_unmoved(place, met.gathered[self.rank], buffers[work.all.0].address())?;
        }
        let limit = self.world.config().limit;
        let link = work.end.call(self.rank, &met.peers, &[], &[], &work.abort, limit)?;
        let tensors = GemmGatherTensors {
            own: buffers[work.own.0].address(),
            gathered: &met.gathered,
            exchanges: &met.exchanges,
            b: work.b.address(buffers),
            d: buffers[work.out.0].address(),
            bias: work.bias.map_or(0, |bias| buffers[bias.0].address()),
        };
        // SAFETY: `fitting` has compared shapes and types; the other ranks' memory lives as long as `met`; all ranks make the same
        // calls, each on a GPU of its own, and `Program::validate` has seen that nothing beside them waits for other ranks.
        unsafe { work.kernel.launch(stream.queue(), &tensors, &link) }?;
        Ok(())
    }

    /// Learns where the others' memory is.
    fn meet_copies(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        work: &CastGemmWork,
    ) -> Result<Met, CallError> {
        let ranks = self.world.size();
        let own = call.buffers[work.all.0].address();
        let (mut exchanges, mut gathered) = (vec![work.exchange.address(); ranks], vec![own; ranks]);
        let (mut mailboxes, mut memory) = (Vec::new(), Vec::new());
        let others: Vec<usize> = (0..ranks).filter(|&rank| rank != self.rank).collect();
        for &rank in &others {
            let post = self.post_of(call, meeting, rank)?;
            let part = &post.payload;
            let (Some(mailbox), Some(exchange), Some(all)) =
                (&part.mailbox, &part.staging, part.outputs.first())
            else {
                return Err(untold(rank));
            };
            (exchanges[rank], gathered[rank]) = (exchange.address(), all.address());
            mailboxes.push((rank, mailbox.clone()));
            memory.extend([exchange.clone(), all.memory().clone()]);
        }
        let pattern = &call.collective.collective.pattern;
        pattern.incoming.iter().try_for_each(|peer| self.acknowledge(peer.rank, meeting.sequence))?;
        let peers = LinkPeers { mailboxes, announce_to: others.clone(), work_on: others };
        Ok(Met { peers, exchanges, gathered, _memory: memory })
    }
}
