//! Group-cast and group-reduce of a group: made ready once, called on tensors of the caller, as attention is.

use std::sync::{Arc, Mutex};

use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{
    Accumulate, BufferId, BufferRole, BufferSpec, GroupCast, GroupReduce, Op, OverlapPolicy, Program,
    ProgramOp, ReduceOp, StreamId, StreamKind, StreamSpec,
};

use super::Group;
use crate::monitor::lock;
use crate::{Backend, Call, ExecError, GroupRank, Machine, Prepared, Ticket, Transport};

/// One rank's part in a collective: the same label, operation and tensors on all ranks, and parts that fit each other.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveSpec {
    /// Its name in errors and timelines.
    pub label: String,
    /// Which rows go where.
    pub part: GroupPart,
    /// What becomes of them.
    pub what: GroupCollective,
    /// The tensors whose rows travel together.
    pub tensors: Vec<TensorPair>,
}

/// What becomes of rows that travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupCollective {
    /// Rows of the inputs come into the outputs, in this type on their way. Rows of an output that no split names are left alone.
    Cast(DType),
    /// Partial results are combined into the outputs, in the order of source ranks.
    Reduce(Reduce),
}

/// How a group-reduce combines partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduce {
    /// The operation.
    pub op: ReduceOp,
    /// Whether the result's own contents are the first operand.
    pub accumulate: Accumulate,
    /// Type on the wire (the logarithms of [`ReduceOp::Lse`] travel as they are stored).
    pub wire_dtype: DType,
    /// Type in which operands are combined.
    pub reduce_dtype: DType,
}

/// Shape and element type of an input and of its output. Row shapes are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPair {
    /// Read.
    pub input: (Vec<usize>, DType),
    /// Written.
    pub output: (Vec<usize>, DType),
}

impl TensorPair {
    /// Of tensors that are there.
    pub fn of<B: Backend>(backend: &B, input: &B::Buffer, output: &B::Buffer) -> Self {
        Self { input: backend.layout(input), output: backend.layout(output) }
    }
}

/// A collective, prepared on the ranks of a group that are in this process.
pub struct CollectiveCalls<M: Machine> {
    ranks: Vec<CollectiveRank<M::Backend, M::Transport>>,
}

/// A collective on one rank.
pub struct CollectiveRank<B: Backend, T: Transport<B>>(Mutex<Prepared<B, T>>);

/// A rank's tensors of a collective: pairs of an input and its output.
pub type CollectiveTensors<'a, B> = [(&'a <B as Backend>::Buffer, &'a <B as Backend>::Buffer)];

impl<M: Machine> Group<M> {
    /// Makes a collective ready, from what `of_rank` gives for each rank here: local, on any thread. Parts that do not fit each other are
    /// found in the first call.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when a part does not fit its tensors.
    pub fn collective(
        &self,
        of_rank: impl Fn(usize) -> CollectiveSpec,
    ) -> Result<CollectiveCalls<M>, ExecError> {
        let ranks = self.ranks().iter().map(|rank| CollectiveRank::prepare(rank, &of_rank(rank.rank())));
        Ok(CollectiveCalls { ranks: ranks.collect::<Result<_, _>>()? })
    }
}

impl<M: Machine> CollectiveCalls<M> {
    /// The ranks that are in this process, in their order.
    pub fn ranks(&self) -> &[CollectiveRank<M::Backend, M::Transport>] {
        &self.ranks
    }

    /// Enqueues a call of all ranks here from this thread: the tensors of each, in their order. With `streams`, one each, a rank's call
    /// begins behind what its stream was given before, and what that is given later comes behind the call.
    ///
    /// # Errors
    /// As [`CollectiveRank::call`]; nothing has been enqueued on any rank then.
    pub fn call(
        &self,
        tensors: &[&CollectiveTensors<'_, M::Backend>],
        streams: Option<&[&Arc<StreamOf<M>>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let ranks: Vec<_> = self.ranks.iter().map(|rank| lock(&rank.0)).collect();
        let names: Vec<Vec<[String; 2]>> = tensors.iter().map(|tensors| names(tensors.len())).collect();
        let named: Vec<_> =
            tensors.iter().zip(&names).map(|(tensors, names)| named::<M::Backend>(tensors, names)).collect();
        Prepared::call_ranks(&ranks.iter().map(|rank| &**rank).collect::<Vec<_>>(), &named, streams)
    }
}

/// A stream of a machine's ranks.
type StreamOf<M> = <<M as Machine>::Backend as Backend>::Stream;

impl<B: Backend, T: Transport<B>> CollectiveRank<B, T> {
    /// Makes a collective ready on one rank; as [`Group::collective`].
    ///
    /// # Errors
    /// As there.
    pub fn prepare(rank: &Arc<GroupRank<B, T>>, spec: &CollectiveSpec) -> Result<Self, ExecError> {
        Prepared::on(rank, spec.program(rank.rank(), rank.world_size()), None)
            .map(|one| Self(Mutex::new(one)))
    }

    /// Enqueues a call and returns at once; with `stream`, behind what that was given before, and before what it is given later.
    ///
    /// # Errors
    /// As [`Call::new`]: nothing has been enqueued then; the group's first error.
    pub fn call(
        &self,
        tensors: &CollectiveTensors<'_, B>,
        stream: Option<&Arc<B::Stream>>,
    ) -> Result<Ticket<B>, ExecError> {
        let names = names(tensors.len());
        Call::new(&lock(&self.0), &named::<B>(tensors, &names), stream)?.enqueue()
    }
}

impl CollectiveSpec {
    /// The Program of one rank.
    fn program(&self, rank: usize, world_size: usize) -> Program {
        let mut buffers = Vec::with_capacity(2 * self.tensors.len());
        for (pair, [input, output]) in self.tensors.iter().zip(names(self.tensors.len())) {
            // What no row comes to is left alone, so an output is not written as a whole.
            let of_pair =
                [(input, &pair.input, BufferRole::Input), (output, &pair.output, BufferRole::Updated)];
            buffers.extend(of_pair.map(|(name, (shape, dtype), role)| BufferSpec {
                name,
                dtype: *dtype,
                shape: shape.clone(),
                role,
            }));
        }
        let tensors = (0..self.tensors.len()).map(|at| (BufferId(2 * at), BufferId(2 * at + 1))).collect();
        let (part, arrive) = (Arc::new(self.part.clone()), None);
        let op = match self.what {
            GroupCollective::Cast(wire_dtype) => {
                Op::GroupCast(GroupCast { part, tensors, wire_dtype, arrive, delivery: None })
            }
            GroupCollective::Reduce(Reduce { op, accumulate, wire_dtype, reduce_dtype }) => {
                Op::GroupReduce(GroupReduce {
                    part,
                    tensors,
                    op,
                    accumulate,
                    wire_dtype,
                    reduce_dtype,
                    arrive,
                })
            }
        };
        Program {
            name: self.label.clone(),
            rank,
            world_size,
            streams: vec![StreamSpec { name: "communication".to_owned(), kind: StreamKind::Communication }],
            buffers,
            slots: Vec::new(),
            num_events: 0,
            num_barriers: 0,
            num_signals: 0,
            policy: OverlapPolicy::default(),
            ops: vec![ProgramOp { stream: StreamId(0), stage: None, label: self.label.clone(), op }],
        }
    }
}

/// What inputs and outputs of so many pairs are called.
fn names(pairs: usize) -> Vec<[String; 2]> {
    (0..pairs).map(|at| [format!("input {at}"), format!("output {at}")]).collect()
}

fn named<'a, B: Backend>(
    tensors: &CollectiveTensors<'_, B>,
    names: &'a [[String; 2]],
) -> Vec<(&'a str, B::Buffer)> {
    let pairs = tensors.iter().zip(names);
    pairs
        .flat_map(|((input, output), [of_input, of_output])| {
            [(of_input.as_str(), (*input).clone()), (of_output.as_str(), (*output).clone())]
        })
        .collect()
}
