//! Products that are summed over ranks while they are computed, each rank on a GPU of its own. In the first run the host
//! exchanges where each rank takes parts of tiles in; from then on a run is one launch.

use counterpoint_exec::collective::Collective;
use counterpoint_exec::{CollectiveCall, CollectiveContext, ExecError, OpPlace};
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::{Accumulate, BufferId, Gemm, GroupCast, GroupReduce, Program, ReduceOp};

use super::product_side::ProductSide;
use super::{Rows, one_range, product_of, whole};
use crate::CudaError;
use crate::backend::CudaBackend;
use crate::kernel::{GemmReduce, GemmReduceSpec, GemmReduceTensors, SumsGoTo};
use crate::transport::{Call, CallError, CudaPending, CudaTransport, Means, Work};

/// One rank's part.
pub(in crate::transport) struct GemmReduceWork {
    kernel: GemmReduce,
    /// With memory where the others' parts of this rank's tiles come in.
    pub(in crate::transport) side: ProductSide,
    a: Rows,
    b: Rows,
    bias: Option<BufferId>,
    /// This rank's rows of the sums.
    sums: Rows,
    /// Whether those are rows of a tensor that all ranks have and write.
    spread: SumsGoTo,
}

/// A product, the reduction of its rows, and where the sums go other than their owners.
type GemmReduceParts<'a> = (&'a Gemm, &'a GroupReduce, Option<&'a GroupCast>);

/// An operation whose tensors a kernel takes: its spec and where they are.
struct Fitting {
    spec: GemmReduceSpec,
    a: Rows,
    b: Rows,
    sums: Rows,
}

/// The operation as the kernel takes it; `None` when it does not. Depends on what all ranks agree on only.
fn fitting(
    (gemm, reduce, spread): GemmReduceParts<'_>,
    collective: &Collective,
    program: &Program,
) -> Option<Fitting> {
    let (rank, ranks) = (program.rank, program.world_size);
    let specs = &program.buffers;
    let spec_of = |id: BufferId| &specs[id.0];
    let dtype = spec_of(gemm.out).dtype;
    let (a, m) = one_range(&gemm.a, specs)?;
    let b = whole(&gemm.b, specs)?;
    let product = product_of(gemm, a.buffer, m, program)?;
    let [(partial, sum)] = reduce.tensors[..] else { return None };
    let alike = partial == gemm.out
        && spec_of(sum).dtype == dtype
        && reduce.wire_dtype == dtype
        && reduce.reduce_dtype == DType::F32
        && reduce.op == ReduceOp::Sum
        && reduce.accumulate == Accumulate::Start;
    let own = m / ranks;
    let sends_own = |peer: usize| {
        let rows = Range::new(peer * own, (peer + 1) * own);
        collective.pattern.to(peer) == [rows] && collective.pattern.from(peer) == [Range::new(0, own)]
    };
    if !alike || spec_of(sum).rows() != own || !(0..ranks).all(sends_own) {
        return None;
    }
    let row_bytes = (product.size.n * dtype.size()) as u64;
    let (sums, goes_to) = match spread {
        None => (Rows { buffer: sum, offset: 0 }, SumsGoTo::Owner),
        Some(cast) => {
            let (all, row) = spread_to(cast, sum, rank, ranks, own)?;
            (Rows { buffer: all, offset: row as u64 * row_bytes }, SumsGoTo::All)
        }
    };
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
    pub(in crate::transport) fn gemm_reduce_work(
        &self,
        backend: &CudaBackend,
        place: &OpPlace,
        parts: GemmReduceParts<'_>,
        program: &Program,
    ) -> Result<Option<(Collective, Work)>, ExecError> {
        let Means::Link { .. } = &self.means else { return Ok(None) };
        let (gemm, reduce, spread) = parts;
        let context =
            CollectiveContext { buffers: &program.buffers, policy: &program.policy, plan: None, turn: None };
        let collective = Collective::reduce(self.rank, self.world.size(), place, reduce, &context)?;
        let Some(Fitting { spec, a, b, sums }) = fitting(parts, &collective, program) else {
            return Ok(None);
        };
        let make = || -> Result<Option<(Collective, Work)>, CudaError> {
            let setup = backend.setup();
            let Some(&shape) = GemmReduce::shapes(&self.device, &spec)?.first() else { return Ok(None) };
            let kernel = GemmReduce::with_shape(setup, &spec, shape)?;
            let written = match spec.spread {
                SumsGoTo::Owner => None,
                SumsGoTo::All => Some(sums),
            };
            let (bytes, zeroed) = (kernel.exchange_bytes(), kernel.zeroed_bytes());
            let side = self.product_side(setup, bytes, zeroed, written)?;
            let mut collective = collective;
            let spread = spread.map(|cast| &cast.part.remote);
            collective.contract.kind =
                format!("a product and its sum over ranks, {:?}, spread to {spread:?}", kernel.shape());
            let work = GemmReduceWork { kernel, side, a, b, bias: gemm.bias, sums, spread: spec.spread };
            Ok(Some((collective, Work::GemmReduce(Box::new(work)))))
        };
        make().map_err(|error| backend.error(place, error))
    }

    pub(in crate::transport) fn gemm_reduce(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        work: &GemmReduceWork,
    ) -> Result<(), CallError> {
        let CollectiveCall { stream, place, collective, buffers, .. } = *call;
        let pattern = &collective.collective.pattern;
        let (ranks, users) = (pattern.incoming.iter().map(|peer| peer.rank), &pattern.outgoing);
        let connected =
            self.product_connected(call, pending, &work.side, work.kernel.waits(), ranks, users)?;
        let own = work.sums.address(buffers);
        let sums = match work.spread {
            // Nobody else's are looked at.
            SumsGoTo::Owner => vec![own; connected.exchanges.len()],
            SumsGoTo::All => {
                self.check_unmoved(place, connected.written[self.rank], own)?;
                connected.written.clone()
            }
        };
        let link = self.product_call(&work.side, connected)?;
        let tensors = GemmReduceTensors {
            a: work.a.address(buffers),
            b: work.b.address(buffers),
            bias: work.bias.map_or(0, |bias| buffers[bias.0].address()),
            exchanges: &connected.exchanges,
            sums: &sums,
        };
        // SAFETY: `fitting` has compared shapes and types; the other ranks' memory lives as long as `connected`; all ranks make the same
        // calls, each on a GPU of its own, and `Program::validate` has seen that nothing that runs with them waits for other ranks.
        unsafe { work.kernel.launch(stream.queue(), &tensors, &link) }?;
        Ok(())
    }
}
