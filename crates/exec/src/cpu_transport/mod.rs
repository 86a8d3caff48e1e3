//! The transport between CPU ranks.
//!
//! A rank publishes its part in a collective on a board, copies what others published for it, in the order of their ranks,
//! and is through once everyone has copied from it. Nobody else is involved: a rank that neither sends nor receives passes
//! at once.
//!
//! Where all ranks are threads of one process there is one board, and receivers copy straight from senders' buffers. Where
//! each is a process, every process has a board; a [`Courier`] carries each part, with the rows that it has for the
//! receiver, to the boards of the others, and acknowledgements back. So a collective waits for the same things, and gives
//! the same bits, wherever the ranks are.

mod call;
mod courier;
mod message;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use counterpoint_schedule::{BufferId, BufferSpec, GroupCast, GroupReduce, SpanKind};

use self::call::Call;
pub(crate) use self::courier::{Courier, Inbox};
pub(crate) use self::message::PeerMessage;
use crate::collective::{Board, Collective, Payload};
use crate::cpu::{CpuBackend, CpuBuffer};
use crate::world::World;
use crate::{CollectiveCall, CollectiveContext, ExecError, HostTensor, OpPlace, SlowLink, Transport};

/// Where the rows of a published part are.
pub(crate) enum Rows {
    /// In the inputs of a rank of this process.
    Here(Vec<CpuBuffer>),
    /// They have come from another process: of each tensor the rows for this one, one after the other, in the type on the
    /// wire.
    Arrived(Vec<HostTensor>),
}

impl Payload for Rows {
    fn spent(&self) -> Self {
        Self::Arrived(Vec::new())
    }
}

/// One rank of the transport between CPU ranks.
pub struct CpuTransport {
    world: Arc<World>,
    board: Arc<Board<Rows>>,
    /// To the ranks of other processes, where there are any.
    courier: Option<Arc<dyn Courier>>,
    rank: usize,
    slow_link: Option<SlowLink>,
    next: AtomicU64,
}

impl CpuTransport {
    /// A transport for every rank of `world`, all in this process. With a slow link, every collective takes at least as long
    /// on each rank as such a link would, counted from when the rank and those it exchanges rows with have all reached it.
    pub fn local(world: &Arc<World>, slow_link: Option<SlowLink>) -> Vec<Self> {
        let board = Arc::new(Board::new(world));
        let rank = |rank| Self {
            world: world.clone(),
            board: board.clone(),
            courier: None,
            rank,
            slow_link,
            next: AtomicU64::new(0),
        };
        (0..world.size()).map(rank).collect()
    }

    /// The transport of `rank`, the only one of `world` in this process. What the others send is to be given to the inbox.
    pub(crate) fn remote(
        world: &Arc<World>,
        rank: usize,
        courier: Arc<dyn Courier>,
        inbox: &Inbox,
        slow_link: Option<SlowLink>,
    ) -> Self {
        let board = inbox.board().clone();
        Self { world: world.clone(), board, courier: Some(courier), rank, slow_link, next: AtomicU64::new(0) }
    }

    fn prepare(
        &self,
        collective: Result<Collective, ExecError>,
        specs: &[BufferSpec],
    ) -> Result<CpuCollective, ExecError> {
        let collective = Arc::new(collective?);
        let workspace = |&(_, output): &(BufferId, BufferId)| {
            let (spec, reduction) = (&specs[output.0], collective.reduction.as_ref()?);
            (spec.dtype != reduction.dtype).then(|| HostTensor::zeros(spec.shape.clone(), reduction.dtype))
        };
        let workspaces = Arc::new(Mutex::new(collective.tensors.iter().map(workspace).collect()));
        Ok(CpuCollective { collective, workspaces })
    }
}

impl Drop for CpuTransport {
    /// The rank has left: what it was given before is still done.
    fn drop(&mut self) {
        // Ranks of other processes hear it of the courier, which goes behind the last of these.
        if self.courier.is_none() {
            self.board.leave(self.rank, self.next.load(Ordering::Relaxed));
        }
    }
}

/// One rank's part in a group collective, made ready for the CPU transport.
#[derive(Clone)]
pub struct CpuCollective {
    collective: Arc<Collective>,
    workspaces: Workspaces,
}

/// For each output of another type than operands are combined in, its sums. Allocated once, so that a run allocates nothing.
type Workspaces = Arc<Mutex<Vec<Option<HostTensor>>>>;

impl Transport<CpuBackend> for CpuTransport {
    type Collective = CpuCollective;
    type Pending = ();

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
        context: &CollectiveContext<'_>,
    ) -> Result<CpuCollective, ExecError> {
        self.prepare(Collective::cast(self.rank, self.world.size(), place, op, context), context.buffers)
    }

    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        context: &CollectiveContext<'_>,
    ) -> Result<CpuCollective, ExecError> {
        self.prepare(Collective::reduce(self.rank, self.world.size(), place, op, context), context.buffers)
    }

    fn begin(&self, call: &CollectiveCall<'_, CpuBackend, CpuCollective>) -> Result<(), ExecError> {
        let CollectiveCall { backend, stream, place, collective, buffers, barrier, signal } = *call;
        let CpuCollective { collective, workspaces } = collective.clone();
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
            courier: self.courier.clone(),
            slow_link: self.slow_link,
            collective,
            workspaces,
            inputs,
            outputs,
        };
        let barrier = barrier.cloned();
        let delivered = signal.zip(call.collective.delivery_parts);
        let delivered = delivered.map(|(signal, parts)| signal.expect(stream, place, parts as u64));
        stream.push(backend.part(), place, move |stream| {
            if let Some(barrier) = barrier {
                barrier.arrive();
            }
            call.perform(stream)?;
            if let Some(delivered) = delivered {
                delivered.raise();
            }
            Ok(Some(SpanKind::Communication))
        })
    }

    // Ranks wait for each other on their streams' threads.
    fn fetch(
        &self,
        _call: &CollectiveCall<'_, CpuBackend, CpuCollective>,
        (): &mut (),
    ) -> Result<(), ExecError> {
        Ok(())
    }

    fn end(&self, _call: &CollectiveCall<'_, CpuBackend, CpuCollective>, (): ()) -> Result<(), ExecError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use counterpoint_plan::{DType, GroupPart};
    use counterpoint_schedule::{BufferRole, OverlapPolicy, StreamKind, StreamSpec};

    use super::*;
    use crate::{Backend, WorldConfig};

    /// A transport that lives long keeps nothing of what is over: neither posts nor buffers.
    #[test]
    fn the_board_forgets() {
        let world = World::new(2, WorldConfig::default());
        let workers = CpuBackend::workers(0).unwrap();
        let ranks = CpuTransport::local(&world, None);
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
            let policy = OverlapPolicy::default();
            let spec = StreamSpec { name: "s".into(), kind };
            let stream = backend.create_stream(&spec, &policy).unwrap();
            let op = GroupCast {
                part: Arc::new(GroupPart::all_gather_v(rank.rank, &[1, 0])),
                tensors: vec![(BufferId(0), BufferId(1))],
                wire_dtype: DType::F32,
                arrive: None,
                delivery: None,
            };
            let collective = {
                let context = CollectiveContext { buffers: &specs, policy: &policy, plan: None, turn: None };
                rank.prepare_cast(&place, &op, &context).unwrap()
            };
            let buffers = specs.each_ref().map(|spec| backend.allocate(spec).unwrap());
            running.push((backend, stream, collective, buffers));
        }
        for _ in 0..1000 {
            for (rank, (backend, stream, collective, buffers)) in ranks.iter().zip(&running) {
                let (barrier, signal) = (None, None);
                let call =
                    CollectiveCall { backend, stream, place: &place, collective, buffers, barrier, signal };
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
