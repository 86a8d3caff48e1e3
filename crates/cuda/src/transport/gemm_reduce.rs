//! Products that are summed over ranks while they are computed, each rank on a GPU of its own. The host's meeting of the first
//! run tells each rank where the others take parts of tiles in; from then on a run is one launch.

use std::sync::{Arc, OnceLock};

use counterpoint_exec::collective::{Collective, PeerRows};
use counterpoint_exec::{CollectiveCall, ExecError, OpPlace};
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::{self as schedule, Accumulate, BufferId, GroupCast, Program, ReduceOp};

use super::fused::{Rows, element_of, layout_of, one_stretch, whole};
use super::{Call, CallError, CudaMeeting, CudaTransport, Means, Work, untold};
use crate::backend::{CudaBackend, CudaBuffer};
use crate::kernel::{
    GemmEpilogue, GemmReduce, GemmReduceSpec, GemmReduceTensors, GemmSpec, LinkAbort, LinkEnd, LinkPeers,
    SumsGoTo,
};
use crate::{CudaError, DeviceBuffer};

/// One rank's part.
pub(super) struct GemmReduceWork {
    end: Arc<LinkEnd>,
    abort: LinkAbort,
    kernel: GemmReduce,
    /// Where the others' parts of this rank's tiles come in.
    exchange: DeviceBuffer,
    a: Rows,
    b: Rows,
    bias: Option<BufferId>,
    /// This rank's rows of the sums.
    sums: Rows,
    /// Whether those are rows of a tensor that all ranks have and write.
    spread: SumsGoTo,
    /// Made when ranks first meet.
    met: OnceLock<Met>,
}

/// What a rank knows of the others.
struct Met {
    peers: LinkPeers,
    exchanges: Vec<u64>,
    /// Under [`SumsGoTo::All`] where every rank has this one's rows.
    sums: Vec<u64>,
    _memory: Vec<DeviceBuffer>,
}

impl GemmReduceWork {
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

    /// The tensor that others write sums into.
    pub(super) fn written_by_others(&self, buffers: &[CudaBuffer]) -> Vec<CudaBuffer> {
        match self.spread {
            SumsGoTo::Owner => Vec::new(),
            SumsGoTo::All => vec![buffers[self.sums.buffer.0].clone()],
        }
    }
}

/// An operation whose tensors a kernel takes: its spec and where they are.
struct Fitting {
    spec: GemmReduceSpec,
    a: Rows,
    b: Rows,
    sums: Rows,
}

/// The operation as the kernel takes it; `None` when it does not. Depends on what all ranks agree on only.
fn fitting(op: &schedule::GemmReduce, collective: &Collective, program: &Program) -> Option<Fitting> {
    let (rank, ranks) = (program.rank, program.world_size);
    let specs = &program.buffers;
    let schedule::GemmReduce { gemm, reduce, spread } = op;
    let spec_of = |id: BufferId| &specs[id.0];
    let dtype = spec_of(gemm.out).dtype;
    let element = element_of(dtype)?;
    let layout = layout_of(gemm.layout)?;
    let (a, m) = one_stretch(&gemm.a, specs)?;
    let b = whole(&gemm.b, specs)?;
    let n = spec_of(gemm.out).row_elements();
    let [(share, sum)] = reduce.tensors[..] else { return None };
    let alike = share == gemm.out
        && gemm.out_rows == [Range::new(0, m)]
        && spec_of(gemm.out).rows() == m
        && gemm.accumulate == Accumulate::Start
        && spec_of(a.buffer).dtype == dtype
        && spec_of(sum).dtype == dtype
        && reduce.wire_dtype == dtype
        && reduce.reduce_dtype == DType::F32
        && reduce.op == ReduceOp::Sum
        && reduce.accumulate == Accumulate::Start;
    let own = m / ranks;
    let shares = |peer: usize| {
        let rows = Range::new(peer * own, (peer + 1) * own);
        collective.pattern.to(peer) == [rows] && collective.pattern.from(peer) == [Range::new(0, own)]
    };
    if !alike || spec_of(sum).rows() != own || !(0..ranks).all(shares) {
        return None;
    }
    let row_bytes = (n * dtype.size()) as u64;
    let (sums, goes_to) = match spread {
        None => (Rows { buffer: sum, offset: 0 }, SumsGoTo::Owner),
        Some(cast) => {
            let (all, row) = spread_to(cast, sum, rank, ranks, own)?;
            (Rows { buffer: all, offset: row as u64 * row_bytes }, SumsGoTo::All)
        }
    };
    let k = spec_of(a.buffer).row_elements();
    let mut product = GemmSpec::new(m, n, k, layout, element);
    product.pass_rows = gemm.pass_rows;
    if gemm.bias.is_some() {
        product.epilogue = GemmEpilogue::StoreBias;
    }
    product.sm_margin = program.policy.sm_margin().try_into().unwrap_or(u32::MAX);
    let spec = GemmReduceSpec { product, rank, ranks, spread: goes_to };
    Some(Fitting { spec, a, b, sums }).filter(|fitting| fitting.spec.check().is_ok())
}

/// Where all ranks' copies of the sums have this rank's, when everyone gets all of everyone's.
fn spread_to(
    cast: &GroupCast,
    sum: BufferId,
    rank: usize,
    ranks: usize,
    own: usize,
) -> Option<(BufferId, usize)> {
    let [(from, to)] = cast.tensors[..] else { return None };
    let everyone: Vec<u32> = (0..ranks as u32).collect();
    let [owned] = &cast.part.owned[..] else { return None };
    let whole = owned.rows == Range::new(0, own) && owned.ranks == everyone;
    let in_turn = cast.part.remote.iter().map(|split| split.rank).eq(everyone);
    let rows = cast.part.remote.get(rank)?.rows;
    (from == sum && whole && in_turn && rows.len() == own).then_some((to, rows.start))
}

impl CudaTransport {
    /// The operation as one kernel, and what its ranks must agree on; `None` when there is no such kernel, or when it would
    /// bring nothing.
    pub(super) fn gemm_reduce_work(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        op: &schedule::GemmReduce,
        program: &Program,
    ) -> Result<Option<(Collective, Work)>, ExecError> {
        let Means::Link { abort, .. } = &self.means else { return Ok(None) };
        let collective =
            Collective::reduce(self.rank, self.world.size(), place, &op.reduce, &program.buffers)?;
        let Some(Fitting { spec, a, b, sums }) = fitting(op, &collective, program) else { return Ok(None) };
        let make = || -> Result<Option<(Collective, Work)>, CudaError> {
            let setup = backend.setup();
            let Some(&shape) = GemmReduce::shapes(&self.device, &spec)?.first() else { return Ok(None) };
            let kernel = GemmReduce::with_shape(setup, &spec, shape)?;
            let exchange = DeviceBuffer::new(&self.device, kernel.exchange_bytes())?;
            exchange.slice(0..kernel.zeroed_bytes())?.fill(setup, 0)?;
            setup.synchronize()?;
            let mut collective = collective;
            let spread = op.spread.as_ref().map(|cast| &cast.part.remote);
            collective.contract.kind =
                format!("a product and its sum over ranks, {:?}, spread to {spread:?}", kernel.shape());
            let work = GemmReduceWork {
                end: Arc::new(LinkEnd::new(setup)?),
                abort: abort.clone(),
                kernel,
                exchange,
                a,
                b,
                bias: op.gemm.bias,
                sums,
                spread: spec.spread,
                met: OnceLock::new(),
            };
            Ok(Some((collective, Work::GemmReduce(Box::new(work)))))
        };
        make().map_err(|error| backend.error(place, error))
    }

    pub(super) fn gemm_reduce(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        work: &GemmReduceWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { backend, stream, place, buffers, .. } = *call;
        let met = match work.met.get() {
            Some(met) => met,
            None => {
                let met = self.meet_exchanges(call, meeting, work)?;
                backend.watch_link(place.to_string(), work.end.clone());
                if let Some(missed) = work.kernel.missed_hand() {
                    backend.watch(place.to_string(), missed.clone());
                }
                work.met.get_or_init(|| met)
            }
        };
        let mut sums = met.sums.clone();
        let own = work.sums.address(buffers);
        if work.spread == SumsGoTo::All {
            self.check_unmoved(place, sums[self.rank], own)?;
        }
        sums[self.rank] = own;
        let limit = self.world.config().limit;
        let link = work.end.call(self.rank, &met.peers, &[], &[], &work.abort, limit)?;
        let tensors = GemmReduceTensors {
            a: work.a.address(buffers),
            b: work.b.address(buffers),
            bias: work.bias.map_or(0, |bias| buffers[bias.0].address()),
            exchanges: &met.exchanges,
            sums: &sums,
        };
        // SAFETY: `fitting` has compared shapes and types; the other ranks' memory lives as long as `met`; all ranks make the same
        // calls, each on a GPU of its own, and `Program::validate` has seen that nothing beside them waits for other ranks.
        unsafe { work.kernel.launch(stream.queue(), &tensors, &link) }?;
        Ok(())
    }

    /// Learns where the others' memory is.
    fn meet_exchanges(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        work: &GemmReduceWork,
    ) -> Result<Met, CallError> {
        let pattern = &call.collective.collective.pattern;
        let ranks: Vec<usize> = pattern.incoming.iter().map(|PeerRows { rank, .. }| *rank).collect();
        let own = work.sums.address(call.buffers);
        let (mut exchanges, mut sums) = (vec![0; ranks.len()], vec![own; ranks.len()]);
        let (mut mailboxes, mut memory) = (Vec::new(), Vec::new());
        for &rank in &ranks {
            let post = self.post_of(call, meeting, rank)?;
            let part = &post.payload;
            let (Some(mailbox), Some(exchange)) = (&part.mailbox, &part.staging) else {
                return Err(untold(rank));
            };
            exchanges[rank] = exchange.address();
            mailboxes.push((rank, mailbox.clone()));
            memory.push(exchange.clone());
            if work.spread == SumsGoTo::All {
                let all = part.outputs.first().ok_or_else(|| untold(rank))?;
                sums[rank] = all.address() + work.sums.offset;
                memory.push(all.memory().clone());
            }
        }
        pattern.outgoing.iter().try_for_each(|peer| self.acknowledge(peer.rank, meeting.sequence))?;
        let others: Vec<usize> = ranks.iter().copied().filter(|&rank| rank != self.rank).collect();
        let peers = LinkPeers { mailboxes, announce_to: others.clone(), work_on: others };
        Ok(Met { peers, exchanges, sums, _memory: memory })
    }
}
