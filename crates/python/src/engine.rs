//! The seam to the engine: attention and row collectives of the ranks in this process, on tensors of Python.

use std::sync::{Arc, Mutex, PoisonError};

use counterpoint_exec::{
    AttentionInputs, Backend, Communicator, ExecError, HostTensor, Machine, Pass, Prepared,
    PreparedAttention, RankBuffer, RankProblem, Reduce, RunConfig, World, WorldConfig,
};
use counterpoint_mask::Range;
use counterpoint_plan::{Dispatch, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{Accumulate, BufferRole, BufferSpec, OverlapPolicy, ReduceOp, Timeline};

use crate::borrow::Borrowed;
use crate::solution::Content;

/// Tensors of one call, by the names of the Program's inputs and outputs.
pub(crate) type Named = Vec<(&'static str, Borrowed)>;

/// One pass of attention of the ranks in this process. Tensors hold the rows of these ranks, one rank after the other.
pub(crate) struct Call {
    pub(crate) content: Arc<Content>,
    pub(crate) policy: OverlapPolicy,
    pub(crate) deterministic: bool,
    pub(crate) backward: bool,
    pub(crate) inputs: Named,
    pub(crate) outputs: Named,
}

/// A collective over rows of a dispatched tensor.
pub(crate) enum RowCollective {
    /// Every rank gets the rows of all, in global order.
    Gather,
    /// Every rank gives all rows and gets the sums of its own.
    ReduceScatter,
    /// Rows move by so many places along the sequence.
    Roll(i64),
}

/// What the engine does for a group of ranks.
pub(crate) trait Engine: Send + Sync {
    fn attention(&self, call: &Call) -> Result<Timeline, ExecError>;
    fn rows(
        &self,
        dispatch: &Dispatch,
        what: &RowCollective,
        from: &Borrowed,
        to: &Borrowed,
    ) -> Result<(), ExecError>;
}

/// Plans that stay ready. All ranks make the same calls, so all let go of the same ones.
const KEPT: usize = 8;

/// A plan that is ready, and for which of its settings.
struct Ready<M: Machine> {
    content: Arc<Content>,
    policy: OverlapPolicy,
    deterministic: bool,
    attention: PreparedAttention<M>,
}

/// A machine whose ranks are joined.
pub(crate) struct Joined<M: Machine> {
    machine: M,
    size: usize,
    config: RunConfig,
    /// Latest last.
    ready: Mutex<Vec<Ready<M>>>,
    communicator: Mutex<Option<Communicator<M::Backend, M::Transport>>>,
}

impl<M: Machine> Joined<M> {
    pub(crate) fn new(machine: M, size: usize, config: RunConfig) -> Self {
        Self { machine, size, config, ready: Mutex::new(Vec::new()), communicator: Mutex::new(None) }
    }

    fn prepare(&self, call: &Call) -> Result<Ready<M>, ExecError> {
        let Call { content, policy, deterministic, .. } = call;
        let Content { spec, plan, .. } = &**content;
        let zeros =
            |rows: usize, shape: [usize; 2]| HostTensor::zeros(vec![rows, shape[0], shape[1]], spec.dtype);
        let inputs = self.machine.ranks_here(self.size).map(|rank| {
            let (q, k) = (plan.ranks[rank].q_rows, plan.ranks[rank].k_rows);
            AttentionInputs {
                q: zeros(q, [spec.heads_q, spec.head_dim]),
                k: zeros(k, [spec.heads_kv, spec.head_dim]),
                v: zeros(k, [spec.heads_kv, spec.head_dim_v]),
                sink: (spec.seqlen_sink > 0).then(|| {
                    HostTensor::zeros(vec![spec.seqlen_sink, spec.heads_q], spec.dtype.accumulator())
                }),
                dout: Some(zeros(q, [spec.heads_q, spec.head_dim_v])),
            }
        });
        let problem = RankProblem { plan, spec, pass: Pass::ForwardBackward, host_bytes: 0 };
        let config = RunConfig { policy: *policy, deterministic: *deterministic, ..self.config.clone() };
        let attention = PreparedAttention::new(&self.machine, &problem, &config, inputs.collect())?;
        Ok(Ready { content: content.clone(), policy: *policy, deterministic: *deterministic, attention })
    }

    /// Rows of every rank here, of a tensor that holds them one after the other.
    fn split(&self, content: &Content, name: &str, tensor: &Borrowed) -> Vec<HostTensor> {
        let mut start = 0;
        let rank = |rank: usize| {
            let rows = match name {
                "sink" => return tensor.read(0..tensor.rows()),
                "k" | "v" => content.rows(rank, true),
                _ => content.rows(rank, false),
            };
            start += rows;
            tensor.read(start - rows..start)
        };
        self.machine.ranks_here(self.size).map(rank).collect()
    }
}

impl<M> Engine for Joined<M>
where
    M: Machine + Send + Sync,
    PreparedAttention<M>: Send,
    Communicator<M::Backend, M::Transport>: Send,
{
    fn attention(&self, call: &Call) -> Result<Timeline, ExecError> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |ready: &Ready<M>| {
            Arc::ptr_eq(&ready.content, &call.content)
                && (ready.policy, ready.deterministic) == (call.policy, call.deterministic)
        };
        let mut at = match ready.iter().position(is_it) {
            Some(index) => ready.remove(index),
            None => {
                ready.truncate(KEPT - 1);
                self.prepare(call)?
            }
        };
        let done = self.run(&mut at.attention, call);
        if done.is_ok() {
            ready.insert(0, at);
        }
        done
    }

    fn rows(
        &self,
        dispatch: &Dispatch,
        what: &RowCollective,
        from: &Borrowed,
        to: &Borrowed,
    ) -> Result<(), ExecError> {
        let mut communicator = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        if communicator.is_none() {
            let config = WorldConfig { limit: self.config.limit, ..WorldConfig::default() };
            let ends = self.machine.connect(&World::new(self.size, config))?;
            let Some((backend, transport)) = ends.into_iter().next() else { return Ok(()) };
            *communicator = Some(Communicator::new(backend, transport)?);
        }
        let Some(communicator) = &*communicator else { return Ok(()) };
        let backend = communicator.backend();
        let source = backend.upload("rows", from.read(0..from.rows()))?;
        let (mut shape, dtype) = backend.layout(&source);
        shape[0] = to.rows();
        let place = BufferSpec { name: "rows".to_owned(), dtype, shape, role: BufferRole::Output };
        let target = backend.allocate(&place)?;
        match what {
            RowCollective::Gather => {
                let part = gather_part(dispatch, communicator.rank());
                communicator.group_cast("gather rows", &part, &[(&source, &target)], dtype)?.synchronize()?;
            }
            RowCollective::ReduceScatter => {
                let part = gather_part(dispatch, communicator.rank());
                let reduce = Reduce {
                    op: ReduceOp::Sum,
                    accumulate: Accumulate::Start,
                    wire_dtype: dtype,
                    reduce_dtype: dtype.accumulator(),
                };
                communicator.group_reduce("sum rows", &part, &[(&source, &target)], reduce)?.synchronize()?;
            }
            RowCollective::Roll(shift) => {
                communicator.roll(dispatch, *shift, &source, &target)?.synchronize()?
            }
        }
        to.write(0, &backend.download(&target)?);
        Ok(())
    }
}

impl<M: Machine> Joined<M> {
    fn run(&self, attention: &mut PreparedAttention<M>, call: &Call) -> Result<Timeline, ExecError> {
        for (name, tensor) in &call.inputs {
            let rows = self.split(&call.content, name, tensor);
            let buffers: Vec<RankBuffer<M>> = attention.upload(name, rows)?;
            match *name {
                "out" | "lse" => Prepared::bind_ranks(attention.passes()[1], name, &buffers)?,
                _ => attention.bind(name, &buffers)?,
            }
        }
        let timeline = match call.backward {
            true => attention.backward(&self.machine)?,
            false => attention.forward(&self.machine)?,
        };
        let [forward, backward] = attention.passes();
        let ranks = if call.backward { backward } else { forward };
        for (name, tensor) in &call.outputs {
            let mut first = 0;
            for (rank, buffer) in ranks.iter().zip(Prepared::buffers_of(ranks, name)?) {
                let rows = rank.backend().download(&buffer)?;
                tensor.write(first, &rows);
                // Every rank has the whole gradient of the sink.
                first += if *name == "dsink" { 0 } else { rows.rows() };
            }
        }
        Ok(timeline)
    }
}

/// Every row to every rank, in global order; rows that a rank owns itself, too.
fn gather_part(dispatch: &Dispatch, rank: usize) -> GroupPart {
    let ranks: Vec<u32> = (0..dispatch.cp_size() as u32).collect();
    let mut start = 0;
    // The splits of two ranks match in order and in length, so rows are cut as they are laid down.
    let owned = dispatch.ranges(rank).into_iter().map(|rows| {
        start += rows.len();
        OwnedSplit { rows: Range::new(start - rows.len(), start), ranks: ranks.clone() }
    });
    let of_owner = |owner: u32| {
        let ranges = dispatch.ranges(owner as usize).into_iter();
        ranges.map(move |rows| RemoteSplit { rows, rank: owner })
    };
    GroupPart { owned: owned.collect(), remote: ranks.iter().copied().flat_map(of_owner).collect() }
}
