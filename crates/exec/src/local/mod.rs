//! The local transport: ranks are threads of one process, and receivers copy straight from senders' buffers.
//!
//! A rank publishes its part in a collective on a board, copies what others published for it, in the order of their ranks,
//! and is through once everyone has copied from it. Nobody else is involved: a rank that neither sends nor receives passes
//! at once.

mod convert;
mod reduce;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use counterpoint_mask::Range;
use counterpoint_schedule::{Accumulate, BufferId, BufferSpec, GroupCast, GroupReduce, ReduceOp, SpanKind};

use crate::collective::{Board, Collective, Payload, PeerRows, Post, Reduction, Waiter, WireTensor};
use crate::cpu::{CpuBackend, CpuBuffer, ReadGuard, StreamShared, WriteGuard};
use crate::monitor::lock;
use crate::world::{World, after};
use crate::{CollectiveCall, ExecError, HostTensor, OpPlace, SlowLink, Transport};

/// What a rank publishes: its inputs.
type Inputs = Vec<CpuBuffer>;

impl Payload for Inputs {
    fn spent(&self) -> Self {
        Vec::new()
    }
}

/// One rank of the local transport.
pub struct LocalTransport {
    world: Arc<World>,
    board: Arc<Board<Inputs>>,
    rank: usize,
    slow_link: Option<SlowLink>,
    next: AtomicU64,
}

impl LocalTransport {
    /// A transport for every rank of `world`. With a slow link, every collective takes at least as long on each rank as
    /// such a link would, counted from when the rank and those it exchanges rows with have all reached it.
    pub fn connect(world: &Arc<World>, slow_link: Option<SlowLink>) -> Vec<Self> {
        let board = Arc::new(Board::new(world));
        let rank = |rank| Self {
            world: world.clone(),
            board: board.clone(),
            rank,
            slow_link,
            next: AtomicU64::new(0),
        };
        (0..world.size()).map(rank).collect()
    }

    fn prepare(
        &self,
        collective: Result<Collective, ExecError>,
        specs: &[BufferSpec],
    ) -> Result<LocalCollective, ExecError> {
        let collective = Arc::new(self.report(collective)?);
        let workspace = |&(_, output): &(BufferId, BufferId)| {
            let (spec, reduction) = (&specs[output.0], collective.reduction.as_ref()?);
            (spec.dtype != reduction.dtype).then(|| HostTensor::zeros(spec.shape.clone(), reduction.dtype))
        };
        let workspaces = Arc::new(Mutex::new(collective.tensors.iter().map(workspace).collect()));
        Ok(LocalCollective { collective, workspaces })
    }

    /// A bad part leaves the other ranks without this one: tell them why instead of letting them wait.
    fn report<T>(&self, result: Result<T, ExecError>) -> Result<T, ExecError> {
        if let Err(error) = &result {
            self.world.fail(error.clone());
        }
        result
    }
}

/// One rank's part in a group collective, made ready for the local transport.
#[derive(Clone)]
pub struct LocalCollective {
    collective: Arc<Collective>,
    workspaces: Workspaces,
}

/// For each output of another type than operands are combined in, its sums. Allocated once, so that a run allocates nothing.
type Workspaces = Arc<Mutex<Vec<Option<HostTensor>>>>;

impl Transport<CpuBackend> for LocalTransport {
    type Collective = LocalCollective;
    type Meeting = ();

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world.size()
    }

    fn prepare_cast(
        &self,
        place: &OpPlace,
        op: &GroupCast,
        specs: &[BufferSpec],
    ) -> Result<LocalCollective, ExecError> {
        self.prepare(Collective::cast(self.rank, self.world.size(), place, op, specs), specs)
    }

    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        specs: &[BufferSpec],
    ) -> Result<LocalCollective, ExecError> {
        self.prepare(Collective::reduce(self.rank, self.world.size(), place, op, specs), specs)
    }

    fn begin(&self, call: &CollectiveCall<'_, CpuBackend, LocalCollective>) -> Result<(), ExecError> {
        let CollectiveCall { backend, stream, place, collective, buffers, barrier } = *call;
        let LocalCollective { collective, workspaces } = collective.clone();
        let (inputs, outputs) = collective
            .tensors
            .iter()
            .map(|(input, output)| (buffers[input.0].clone(), buffers[output.0].clone()))
            .unzip();
        if let Some(barrier) = barrier {
            barrier.expect(stream, place);
        }
        let call = Call {
            rank: self.rank,
            sequence: self.next.fetch_add(1, Ordering::Relaxed),
            place: place.clone(),
            board: self.board.clone(),
            slow_link: self.slow_link,
            collective,
            workspaces,
            inputs,
            outputs,
        };
        let barrier = barrier.cloned();
        stream.push(backend.program(), place, move |stream| {
            if let Some(barrier) = barrier {
                barrier.arrive();
            }
            call.perform(stream)?;
            Ok(Some(SpanKind::Communication))
        })
    }

    // Ranks meet on their streams' threads.
    fn fetch(
        &self,
        _call: &CollectiveCall<'_, CpuBackend, LocalCollective>,
        (): &mut (),
    ) -> Result<(), ExecError> {
        Ok(())
    }

    fn end(&self, _call: &CollectiveCall<'_, CpuBackend, LocalCollective>, (): ()) -> Result<(), ExecError> {
        Ok(())
    }
}

/// One collective on its way.
struct Call {
    rank: usize,
    sequence: u64,
    place: OpPlace,
    board: Arc<Board<Inputs>>,
    slow_link: Option<SlowLink>,
    collective: Arc<Collective>,
    workspaces: Workspaces,
    inputs: Vec<CpuBuffer>,
    outputs: Vec<CpuBuffer>,
}

impl Call {
    /// On a stream's thread.
    fn perform(&self, stream: &StreamShared) -> Result<(), ExecError> {
        let pattern = &self.collective.pattern;
        // Both held to the end: whoever writes an input or touches an output meanwhile is a data race.
        let _inputs: Vec<ReadGuard<'_>> =
            self.inputs.iter().map(|input| input.read(self.rank, &self.place)).collect::<Result<_, _>>()?;
        let mut outputs: Vec<WriteGuard<'_>> = self
            .outputs
            .iter()
            .map(|output| output.write(self.rank, &self.place))
            .collect::<Result<_, _>>()?;

        let mut began = Instant::now();
        let own = self.board.publish(
            self.rank,
            self.sequence,
            Post {
                place: self.place.clone(),
                collective: self.collective.clone(),
                at: began,
                payload: self.inputs.clone(),
            },
            &pattern.outgoing,
        );
        match &self.collective.reduction {
            None => self.receive(stream, &own, &mut began, |tensors, from, to| {
                for ((input, output), wire) in
                    tensors.iter().zip(&mut outputs).zip(&self.collective.contract.tensors)
                {
                    convert::copy_rows(input, from, output, to, wire.wire);
                }
            })?,
            Some(reduction) => self.reduce(stream, &own, &mut began, reduction, &mut outputs)?,
        }
        for peer in &pattern.outgoing {
            let post = self.board.post_of(&stream.world, &self.waiter(stream), peer.rank, self.sequence)?;
            own.meet(self.rank, self.sequence, peer.rank, &post)?;
            began = began.max(post.at);
        }
        self.board.all_used(&stream.world, &self.waiter(stream), self.sequence)?;
        if let Some(link) = self.slow_link {
            stream.world.sleep_until(after(began, self.link_time(link)))?;
        }
        self.board.finish(self.rank, self.sequence, &self.place);
        Ok(())
    }

    /// Takes what every peer has for this rank, in the order of their ranks. `take` gets a peer's inputs, a range of their
    /// rows and the range of own rows that it meets.
    fn receive(
        &self,
        stream: &StreamShared,
        own: &Post<Inputs>,
        began: &mut Instant,
        mut take: impl FnMut(&[ReadGuard<'_>], Range, Range),
    ) -> Result<(), ExecError> {
        for peer in &self.collective.pattern.incoming {
            let post = self.board.post_of(&stream.world, &self.waiter(stream), peer.rank, self.sequence)?;
            own.meet(self.rank, self.sequence, peer.rank, &post)?;
            *began = (*began).max(post.at);
            let inputs: Vec<ReadGuard<'_>> = post
                .payload
                .iter()
                .map(|input| input.read(self.rank, &self.place))
                .collect::<Result<_, _>>()?;
            for (&from, &to) in post.collective.pattern.to(self.rank).iter().zip(&peer.rows) {
                take(&inputs, from, to);
            }
            drop(inputs);
            self.board.acknowledge(peer.rank, self.sequence, self.rank);
        }
        Ok(())
    }

    fn reduce(
        &self,
        stream: &StreamShared,
        own: &Post<Inputs>,
        began: &mut Instant,
        reduction: &Reduction,
        outputs: &mut [WriteGuard<'_>],
    ) -> Result<(), ExecError> {
        let mut workspaces = lock(&self.workspaces);
        let wires = &self.collective.contract.tensors;
        {
            let mut sums: Vec<&mut HostTensor> = Vec::with_capacity(outputs.len());
            for (index, (output, workspace)) in outputs.iter_mut().zip(workspaces.iter_mut()).enumerate() {
                let sum = match workspace {
                    Some(workspace) => {
                        if reduction.accumulate == Accumulate::Continue {
                            convert::convert_all(output, workspace);
                        }
                        workspace
                    }
                    None => &mut **output,
                };
                if reduction.accumulate == Accumulate::Start {
                    reduce::set_identity(reduction.op, index, sum);
                }
                sums.push(sum);
            }
            self.receive(stream, own, began, |inputs, from, to| match reduction.op {
                ReduceOp::Sum | ReduceOp::Avg => {
                    for ((input, sum), wire) in inputs.iter().zip(&mut sums).zip(wires) {
                        reduce::add_rows(input, from, wire.wire, sum, to);
                    }
                }
                ReduceOp::Lse => {
                    let pairs =
                        inputs.chunks_exact(2).zip(sums.chunks_exact_mut(2)).zip(wires.chunks_exact(2));
                    for ((input, sum), wire) in pairs {
                        let (out, lse) = sum.split_at_mut(1);
                        let wire = (wire[0].wire, wire[1].wire);
                        reduce::merge_rows((&input[0], &input[1]), from, wire, (out[0], lse[0]), to);
                    }
                }
            })?;
            if reduction.op == ReduceOp::Avg {
                sums.iter_mut().for_each(|sum| reduce::divide_rows(sum, &reduction.operands));
            }
        }
        // Rows that nobody sends are the own ones still, not those rounded on the way through the workspace.
        let own = u32::from(reduction.accumulate == Accumulate::Continue);
        for (output, workspace) in outputs.iter_mut().zip(workspaces.iter()) {
            let Some(workspace) = workspace else { continue };
            for (row, &operands) in reduction.operands.iter().enumerate().take(output.rows()) {
                if operands > own || own == 0 {
                    convert::convert_row(workspace, row, output);
                }
            }
        }
        Ok(())
    }

    /// How long a link takes for what this rank exchanges with others.
    fn link_time(&self, link: SlowLink) -> Duration {
        let remote = |peers: &[PeerRows]| -> usize {
            peers.iter().filter(|peer| peer.rank != self.rank).map(PeerRows::total).sum()
        };
        let pattern = &self.collective.pattern;
        let rows = remote(&pattern.outgoing).max(remote(&pattern.incoming));
        if rows == 0 {
            return Duration::ZERO;
        }
        let row_bytes = |tensor: &WireTensor| tensor.row_elements * tensor.wire.size();
        let bytes = rows * self.collective.contract.tensors.iter().map(row_bytes).sum::<usize>();
        let seconds = Duration::try_from_secs_f64(bytes as f64 / link.bytes_per_second);
        link.alpha.saturating_add(seconds.unwrap_or(Duration::MAX))
    }

    fn waiter<'a>(&'a self, stream: &'a StreamShared) -> Waiter<'a> {
        Waiter { rank: self.rank, place: &self.place, status: &stream.status }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use counterpoint_plan::{DType, GroupPart};
    use counterpoint_schedule::{BufferRole, StreamKind, StreamSpec};

    use super::*;
    use crate::{Backend, WorldConfig};

    /// A transport that lives long keeps nothing of what is over: neither posts nor buffers.
    #[test]
    fn the_board_forgets() {
        let world = World::new(2, WorldConfig::default());
        let workers = CpuBackend::workers(0).unwrap();
        let ranks = LocalTransport::connect(&world, None);
        let spec = |name: &str| BufferSpec {
            name: name.into(),
            dtype: DType::F32,
            shape: vec![1],
            role: BufferRole::Scratch,
        };
        let specs = [spec("from"), spec("to")];
        let place = OpPlace::new(0, "cast");
        let mut running = Vec::new();
        for rank in &ranks {
            let backend = CpuBackend::new(&world, rank.rank, workers.clone());
            let kind = StreamKind::Communication;
            let stream = backend.create_stream(&StreamSpec { name: "s".into(), kind }).unwrap();
            let op = GroupCast {
                part: Arc::new(GroupPart::all_gather_v(rank.rank, &[1, 0])),
                tensors: vec![(BufferId(0), BufferId(1))],
                wire_dtype: DType::F32,
                arrive: None,
            };
            let collective = rank.prepare_cast(&place, &op, &specs).unwrap();
            let buffers = specs.each_ref().map(|spec| backend.allocate(spec).unwrap());
            running.push((backend, stream, collective, buffers));
        }
        for _ in 0..1000 {
            for (rank, (backend, stream, collective, buffers)) in ranks.iter().zip(&running) {
                let call =
                    CollectiveCall { backend, stream, place: &place, collective, buffers, barrier: None };
                rank.enqueue(&call).unwrap();
            }
            running.iter().for_each(|(backend, stream, ..)| backend.synchronize(&[stream]).unwrap());
        }
        for rank in 0..2 {
            assert!(ranks[0].board.kept(rank) <= 8, "{}", ranks[0].board.kept(rank));
        }
        for (.., buffers) in &running {
            assert!(buffers.iter().all(|buffer| buffer.handles() == 1));
        }
    }
}
