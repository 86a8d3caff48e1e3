//! The seam to the engine: attention and row collectives of the ranks in this process, on tensors of Python, in place.

mod callers;
mod linear_calls;
mod row_calls;
mod turns;

use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use counterpoint_cuda::GraphHandles;
use counterpoint_exec::{
    AttentionCalls, Backend, BackwardTensors, BufferAccess, DeviceFault, ExecError, ExpertLayer,
    ForwardTensors, Group, Machine, MemoryKeeper, Prepared, RunTimes, TablesOfRank, TensorFault, Ticket,
};
use counterpoint_schedule::Timeline;
use pyo3::pybacked::PyBackedBytes;

use callers::{CallerStream, CallerStreams, Callers};
use turns::Turns;

use crate::borrow::{Borrowed, InPlace};
use crate::capture::Captures;
use crate::captured::{CapturedCalls, Replaced};
use crate::experts::{ExpertEngine, Experts};
use crate::linear::{Layers, LinearEngine, ReadyLayer};
use crate::rows::{KeptRows, ReadyRows, RowEngine};
use crate::solution::Content;

/// Tensors of one call, by the names of the Program's inputs and outputs.
pub(crate) type Named = Vec<(&'static str, Borrowed)>;

/// Forward or backward.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// One pass of attention. Tensors hold the rows of the ranks here, one rank after the other.
pub(crate) struct PassCall {
    pub(crate) direction: Direction,
    /// PyTorch's current stream.
    pub(crate) stream: u64,
    pub(crate) inputs: Named,
    pub(crate) outputs: Named,
    /// All its tensors.
    pub(crate) keeper: MemoryKeeper,
}

/// What the engine does for a group of ranks.
pub(crate) trait Engine: Send + Sync {
    /// Makes a plan ready to be called: local. `stream` is the one of which it is known whether it captures; `tables` are step tables that
    /// were made ahead, those of each rank here.
    fn prepare(
        self: Arc<Self>,
        content: Arc<Content>,
        stream: Option<u64>,
        tables: Option<&[PyBackedBytes]>,
    ) -> Result<Arc<dyn Passes>, ExecError>;
    /// Likewise to be called and measured.
    fn measured(self: Arc<Self>, content: Arc<Content>) -> Arc<dyn Passes>;
    /// What it does for rows.
    fn rows(&self) -> &dyn RowEngine;
    /// What it does for linear layers.
    fn linear(&self) -> &dyn LinearEngine;
    /// What it does for layers of experts.
    fn experts(&self) -> &dyn ExpertEngine;
    /// Has calls on different streams of the caller overlap, of what is made ready from now on.
    fn overlap_calls(&self);
    /// Has calls and what a stream of another library is given follow each other from now on; false where there are no streams.
    fn order_with(&self, stream: u64) -> bool;
    /// Whether this thread is inside of a call: what it calls then, a handler of a signal say, would wait for ever.
    fn is_called_here(&self) -> bool;
    /// The first error, as far as it is known here.
    fn poll(&self) -> Result<(), ExecError>;
    /// Ends the group for all ranks.
    fn fail(&self, reason: &str);
    /// Returns once all ranks have called it and all calls have ended. Lets go of what graphs of the caller replay.
    fn close(&self) -> Result<(), ExecError>;
}

/// Attention of a plan that is ready.
pub(crate) trait Passes: Send + Sync {
    /// On the CPU it returns once the results are written; on a device once they are on their way on the stream. With times where they
    /// are asked for.
    fn run(self: Arc<Self>, call: PassCall) -> Result<Option<Timeline>, ExecError>;

    /// Calls of `from`, of the same group, that a graph of PyTorch's has become this one's: how many. Launches that come from now on do
    /// these; `stream` is the one that they are on.
    fn update(
        self: Arc<Self>,
        graph: GraphHandles,
        from: &Arc<dyn Passes>,
        stream: u64,
    ) -> Result<usize, ExecError>;
}

/// Ranks of a machine that have joined.
pub(crate) struct Joined<M: Machine>
where
    M::Backend: Captures,
{
    group: Group<M>,
    layers: Layers<M>,
    experts: Experts<M>,
    rows: KeptRows<M>,
    calling: Turns,
    /// What a call that failed half-way may still use.
    kept: Mutex<Vec<MemoryKeeper>>,
    /// What graphs of the caller replay.
    captured: CapturedCalls<M>,
    /// The caller's streams.
    callers: Callers<M>,
}

/// Buffers of one rank, by name.
type Buffers<B> = Vec<(&'static str, <B as Backend>::Buffer)>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M: Machine> Joined<M>
where
    M::Backend: Captures,
{
    pub(crate) fn new(group: Group<M>) -> Self {
        let (calling, kept, captured) = Default::default();
        let (layers, experts, rows) = (Layers::default(), Experts::default(), KeptRows::default());
        Self { group, layers, experts, rows, calling, kept, captured, callers: Callers::default() }
    }
}

impl<M> Joined<M>
where
    M: Machine,
    M::Backend: Captures,
{
    /// The caller's stream as every rank here has it; `None` where there is no such thing.
    fn callers(&self, stream: u64) -> Option<CallerStreams<M>> {
        self.callers.of(&self.group, stream)
    }

    /// Whether a stream captures; refused where ranks of one process share it.
    fn captures(&self, streams: Option<&[CallerStream<M>]>) -> Result<bool, ExecError> {
        let (Some([stream, ..]), [rank, ..]) = (streams, self.group.ranks()) else { return Ok(false) };
        let captures = rank.backend().captures(stream)?;
        if captures && self.group.ranks().len() > 1 {
            let ranks = self.group.ranks().len();
            let reason = DeviceFault::CaptureOfShared { ranks };
            return Err(ExecError::Device { rank: rank.rank(), place: "a capture".to_owned(), reason });
        }
        Ok(captures)
    }

    /// The tensors of every rank here, each rank's rows of them.
    fn split(&self, content: &Content, call: &PassCall) -> Result<Vec<Buffers<M::Backend>>, ExecError> {
        let mut starts = vec![0; call.inputs.len() + call.outputs.len()];
        let ranks = self.group.ranks().iter();
        let of_rank = ranks.map(|rank| {
            let read = call.inputs.iter().map(|named| (named, BufferAccess::Read));
            let written = call.outputs.iter().map(|named| (named, BufferAccess::Write));
            let all = read.chain(written).zip(&mut starts);
            all.map(|(((name, tensor), access), start)| {
                let rows = match *name {
                    "sink" => tensor.rows(),
                    // One after the other, a copy for each rank here.
                    "dsink" => content.spec.seqlen_sink,
                    "max_logits" => content.spec.heads_q,
                    "k" | "v" | "dk" | "dv" => content.k_rows(rank.rank()),
                    _ => content.q_rows(rank.rank()),
                };
                let first = if *name == "sink" { 0 } else { *start };
                *start += rows;
                Ok((*name, rank.backend().borrow(name, tensor, first..first + rows, access)?))
            })
            .collect()
        });
        of_rank.collect()
    }

    /// What came of a call. One that failed half-way may still use its tensors: the group has failed then, and keeps them.
    fn reported<T>(
        &self,
        result: Result<T, ExecError>,
        keepers: impl IntoIterator<Item = MemoryKeeper>,
    ) -> Result<T, ExecError> {
        if result.is_err() && self.group.poll().is_err() {
            lock(&self.kept).extend(keepers);
        }
        result
    }

    /// Step tables of the ranks here.
    fn read(&self, tables: &[PyBackedBytes]) -> Result<Vec<TablesOfRank<M>>, ExecError> {
        let first = self.group.ranks_here().start;
        let read = tables.iter().enumerate().map(|(at, bytes)| {
            TablesOfRank::<M>::from_bytes(bytes)
                .map_err(|reason| ExecError::Tables { rank: first + at, reason })
        });
        read.collect()
    }

    /// Waits for calls where nothing else does.
    fn ended(
        &self,
        tickets: &[Ticket<M::Backend>],
        streams: Option<&[CallerStream<M>]>,
    ) -> Result<(), ExecError> {
        match streams {
            Some(_) => Ok(()),
            None => tickets.iter().try_for_each(Ticket::wait),
        }
    }
}

/// A plan that is ready.
struct Ready<M: Machine>
where
    M::Backend: Captures,
{
    joined: Arc<Joined<M>>,
    content: Arc<Content>,
    calls: AttentionCalls<M>,
    /// Whether a graph of the caller replays it.
    is_captured: AtomicBool,
}

impl<M> Ready<M>
where
    M: Machine,
    M::Backend: Captures,
{
    fn operations(&self, direction: Direction) -> Vec<String> {
        match direction {
            Direction::Forward => self.calls.forward_operations(),
            Direction::Backward => self.calls.backward_operations(),
        }
    }

    fn enqueue(
        &self,
        direction: Direction,
        tensors: &[Buffers<M::Backend>],
        streams: Option<&[CallerStream<M>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let missing = |name: &str| ExecError::tensor(name, TensorFault::Missing);
        let find = |rank: usize, name: &str| {
            tensors[rank].iter().find(|(known, _)| *known == name).map(|(_, buffer)| buffer)
        };
        let get = |rank: usize, name: &str| find(rank, name).ok_or_else(|| missing(name));
        let ranks = 0..tensors.len();
        let streams: Option<Vec<_>> = streams.map(|streams| streams.iter().collect());
        match direction {
            Direction::Forward => {
                let forward = |rank| {
                    Ok(ForwardTensors {
                        q: get(rank, "q")?,
                        k: get(rank, "k")?,
                        v: get(rank, "v")?,
                        sink: find(rank, "sink"),
                        out: get(rank, "out")?,
                        lse: get(rank, "lse")?,
                        max_logits: find(rank, "max_logits"),
                    })
                };
                let tensors = ranks.map(forward).collect::<Result<Vec<_>, ExecError>>()?;
                self.calls.forward(&tensors, streams.as_deref())
            }
            Direction::Backward => {
                let backward = |rank| {
                    Ok(BackwardTensors {
                        dout: get(rank, "dout")?,
                        q: get(rank, "q")?,
                        k: get(rank, "k")?,
                        v: get(rank, "v")?,
                        sink: find(rank, "sink"),
                        out: get(rank, "out")?,
                        lse: get(rank, "lse")?,
                        dlse: find(rank, "dlse"),
                        dq: get(rank, "dq")?,
                        dk: get(rank, "dk")?,
                        dv: get(rank, "dv")?,
                        dsink: find(rank, "dsink"),
                    })
                };
                let tensors = ranks.map(backward).collect::<Result<Vec<_>, ExecError>>()?;
                self.calls.backward(&tensors, streams.as_deref())
            }
        }
    }
}

impl<M> Passes for Ready<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
    AttentionCalls<M>: Send + Sync,
{
    fn run(self: Arc<Self>, call: PassCall) -> Result<Option<Timeline>, ExecError> {
        let joined = &self.joined;
        let streams = joined.callers(call.stream);
        let captures = joined.captures(streams.as_deref())?;
        if captures && !self.is_captured.swap(true, Ordering::Relaxed) {
            joined.captured.keep(self.clone());
        }
        let tensors = joined.split(&self.content, &call)?;
        let called = {
            let _one = joined.calling.take();
            let enqueue = || self.enqueue(call.direction, &tensors, streams.as_deref());
            let tickets = match (streams.as_deref(), joined.group.ranks()) {
                (Some([stream, ..]), [rank, ..]) if captures => {
                    let (place, passes) = ((rank.backend(), &**stream), self.clone() as Arc<dyn Passes>);
                    let operations = self.operations(call.direction);
                    joined.captured.record(place, (&passes, &call), operations, enqueue)
                }
                _ => enqueue(),
            };
            tickets.and_then(|tickets| joined.ended(&tickets, streams.as_deref()))
        };
        joined.reported(called, [call.keeper]).map(|()| None)
    }

    fn update(
        self: Arc<Self>,
        graph: GraphHandles,
        from: &Arc<dyn Passes>,
        stream: u64,
    ) -> Result<usize, ExecError> {
        let joined = &self.joined;
        joined.group.poll()?;
        // Memory of what is replaced waits for what is on it.
        let _ = joined.callers(stream);
        let [rank] = joined.group.ranks() else { return Ok(0) };
        let _one = joined.calling.take();
        let replaced = Replaced { graph, from, to: self.clone() };
        let operations = |direction| self.operations(direction);
        joined.captured.update(rank.backend(), replaced, operations, |call, stream| {
            let tensors = joined.split(&self.content, call)?;
            self.enqueue(call.direction, &tensors, Some(slice::from_ref(stream))).map(drop)
        })
    }
}

/// A plan whose calls take times.
struct Measured<M: Machine>
where
    M::Backend: Captures,
{
    joined: Arc<Joined<M>>,
    content: Arc<Content>,
}

impl<M> Passes for Measured<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
{
    /// Strided tensors are not for it.
    fn run(self: Arc<Self>, call: PassCall) -> Result<Option<Timeline>, ExecError> {
        let (content, joined) = (&self.content, &self.joined);
        if let Some(streams) = joined.callers(call.stream) {
            let ranks = joined.group.ranks().iter().zip(streams.iter());
            ranks.into_iter().try_for_each(|(rank, stream)| rank.backend().await_end(stream))?;
        }
        let tensors = joined.split(content, &call)?;
        let lower = |rank| match call.direction {
            Direction::Forward => content.forward_program(rank),
            Direction::Backward => content.backward_program(rank),
        };
        let _one = joined.calling.take();
        let mut ranks = joined.group.prepare(lower, None)?;
        for (rank, buffers) in ranks.iter_mut().zip(tensors) {
            rank.set_timing(RunTimes::Operations);
            buffers.into_iter().try_for_each(|(name, buffer)| rank.bind(name, buffer))?;
        }
        joined.reported(Prepared::run_ranks(&mut ranks), [call.keeper]).map(Some)
    }

    /// Calls that take times are not captured.
    fn update(self: Arc<Self>, _: GraphHandles, _: &Arc<dyn Passes>, _: u64) -> Result<usize, ExecError> {
        Ok(0)
    }
}

impl<M> Engine for Joined<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
    AttentionCalls<M>: Send + Sync,
    ReadyLayer<M>: Send,
    ReadyRows<M>: Send,
    ExpertLayer<M>: Send,
{
    fn rows(&self) -> &dyn RowEngine {
        self
    }

    fn linear(&self) -> &dyn LinearEngine {
        self
    }

    fn experts(&self) -> &dyn ExpertEngine {
        self
    }

    fn prepare(
        self: Arc<Self>,
        content: Arc<Content>,
        stream: Option<u64>,
        tables: Option<&[PyBackedBytes]>,
    ) -> Result<Arc<dyn Passes>, ExecError> {
        self.group.poll()?;
        if self.captures(stream.and_then(|stream| self.callers(stream)).as_deref())? {
            let (rank, place) = (self.group.ranks_here().start, "a capture".to_owned());
            return Err(ExecError::Device { rank, place, reason: DeviceFault::CaptureBeforeCall });
        }
        let calls = match tables {
            None => self.group.attention_of(&content.task())?,
            Some(tables) => self.group.attention_with(&content.task(), &self.read(tables)?)?,
        };
        Ok(Arc::new(Ready { joined: self, content, calls, is_captured: AtomicBool::new(false) }))
    }

    fn measured(self: Arc<Self>, content: Arc<Content>) -> Arc<dyn Passes> {
        Arc::new(Measured { joined: self, content })
    }

    fn overlap_calls(&self) {
        self.group.ranks().iter().for_each(|rank| rank.overlap_calls());
    }

    fn order_with(&self, stream: u64) -> bool {
        let Some(streams) = self.callers(stream) else { return false };
        self.group
            .ranks()
            .iter()
            .zip(streams.iter())
            .for_each(|(rank, stream)| rank.order_with(stream.clone()));
        true
    }

    fn is_called_here(&self) -> bool {
        self.calling.are_taken_here()
    }

    fn poll(&self) -> Result<(), ExecError> {
        self.group.poll()
    }

    fn fail(&self, reason: &str) {
        self.group.fail(reason);
    }

    fn close(&self) -> Result<(), ExecError> {
        let _one = self.calling.take();
        let closed = self.group.close();
        self.captured.let_go();
        self.layers.let_go();
        self.experts.let_go();
        self.rows.let_go();
        closed
    }
}
