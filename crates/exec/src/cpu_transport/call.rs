//! One collective of the CPU transport, on a stream's thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use counterpoint_cpu_kernels::{convert, reduce};
use counterpoint_mask::Range;
use counterpoint_plan::Topology;
use counterpoint_schedule::{Accumulate, ReduceOp};

use super::{Courier, PeerMessage, Rows, Workspaces};
use crate::collective::{Board, Collective, PeerRows, Post, Reduction, Waiter};
use crate::cpu::{CpuBuffer, ReadGuard, StreamShared, WriteGuard};
use crate::monitor::lock;
use crate::world::after;
use crate::{ExecError, HostTensor, OpPlace, SlowLink, TensorMut, TensorRef, WireTensor};

/// One collective on its way.
pub(super) struct Call {
    pub(super) rank: usize,
    pub(super) sequence: u64,
    pub(super) place: OpPlace,
    pub(super) board: Arc<Board<Rows>>,
    pub(super) courier: Option<Arc<dyn Courier>>,
    pub(super) slow_link: Option<SlowLink>,
    pub(super) collective: Arc<Collective>,
    pub(super) workspaces: Workspaces,
    pub(super) inputs: Vec<CpuBuffer>,
    pub(super) outputs: Vec<CpuBuffer>,
}

impl Call {
    /// On a stream's thread.
    pub(super) fn perform(&self, stream: &StreamShared) -> Result<(), ExecError> {
        let pattern = &self.collective.pattern;
        // Both held to the end: whoever writes an input or touches an output meanwhile is a data race.
        let inputs: Vec<ReadGuard<'_>> =
            self.inputs.iter().map(|input| input.read(self.rank, &self.place)).collect::<Result<_, _>>()?;
        let mut guards: Vec<WriteGuard<'_>> = self
            .outputs
            .iter()
            .map(|output| output.write(self.rank, &self.place))
            .collect::<Result<_, _>>()?;

        let mut outputs: Vec<TensorMut<'_>> = guards.iter_mut().map(WriteGuard::view).collect();

        let mut began = Instant::now();
        let own = self.board.publish(
            self.rank,
            self.sequence,
            Post {
                place: self.place.clone(),
                collective: self.collective.clone(),
                at: began,
                payload: Rows::Here(self.inputs.clone()),
            },
            &pattern.outgoing,
        );
        self.send(&inputs)?;
        match &self.collective.reduction {
            None => self.receive(stream, &own, &mut began, |tensors, from, to| {
                for ((input, output), wire) in
                    tensors.iter().zip(&mut outputs).zip(&self.collective.contract.tensors)
                {
                    convert::copy_rows(*input, from, output, to, wire.wire);
                }
            })?,
            Some(reduction) => self.reduce(stream, &own, &mut began, reduction, &mut outputs)?,
        }
        for peer in &pattern.outgoing {
            let post = self.board.post_of(&stream.world, &self.waiter(stream), peer.rank, self.sequence)?;
            own.check_peer(self.rank, self.sequence, peer.rank, &post)?;
            began = began.max(post.at);
        }
        self.board.all_used(&stream.world, &self.waiter(stream), self.sequence)?;
        if let Some(link) = self.slow_link {
            stream.world.sleep_until(after(began, self.link_time(link)))?;
        }
        self.board.finish(self.rank, self.sequence, &self.place);
        Ok(())
    }

    /// Announces this part to the ranks of other processes, and sends each its rows. All are notified, as all could look at a board
    /// that they share.
    fn send(&self, inputs: &[ReadGuard<'_>]) -> Result<(), ExecError> {
        let Some(courier) = &self.courier else { return Ok(()) };
        let ranks = courier.world_size();
        // Everybody starts at another, so that nobody is sent everything at once.
        for peer in (1..ranks).map(|step| (self.rank + step) % ranks) {
            let rows = self.collective.pattern.to(peer);
            let packed: Vec<HostTensor> = inputs
                .iter()
                .zip(&self.collective.contract.tensors)
                .map(|(input, tensor)| convert::pack_rows(input.view(), rows, tensor.wire))
                .collect();
            let bytes: Vec<&[u8]> = packed.iter().map(HostTensor::bytes).collect();
            courier.send(
                peer,
                &PeerMessage::part(self.sequence, &self.place, &self.collective, peer),
                &bytes,
            )?;
        }
        Ok(())
    }

    /// Takes what every peer has for this rank, in the order of their ranks. `take` gets a peer's inputs, a range of their
    /// rows and the range of own rows that it intersects.
    fn receive(
        &self,
        stream: &StreamShared,
        own: &Post<Rows>,
        began: &mut Instant,
        mut take: impl FnMut(&[TensorRef<'_>], Range, Range),
    ) -> Result<(), ExecError> {
        for peer in &self.collective.pattern.incoming {
            let post = self.board.post_of(&stream.world, &self.waiter(stream), peer.rank, self.sequence)?;
            own.check_peer(self.rank, self.sequence, peer.rank, &post)?;
            *began = (*began).max(post.at);
            let mut take_all = |inputs: &[TensorRef<'_>]| {
                for (&from, &to) in post.collective.pattern.to(self.rank).iter().zip(&peer.rows) {
                    take(inputs, from, to);
                }
            };
            match &post.payload {
                Rows::Here(inputs) => {
                    let inputs: Vec<ReadGuard<'_>> = inputs
                        .iter()
                        .map(|input| input.read(self.rank, &self.place))
                        .collect::<Result<_, _>>()?;
                    take_all(&inputs.iter().map(ReadGuard::view).collect::<Vec<_>>());
                }
                Rows::Arrived(inputs) => take_all(&inputs.iter().map(HostTensor::view).collect::<Vec<_>>()),
            }
            self.board.acknowledge(peer.rank, self.sequence, self.rank);
            if let Some(courier) = self.courier.as_ref().filter(|_| peer.rank != self.rank) {
                courier.send(peer.rank, &PeerMessage::Copied { sequence: self.sequence }, &[])?;
            }
        }
        Ok(())
    }

    fn reduce(
        &self,
        stream: &StreamShared,
        own: &Post<Rows>,
        began: &mut Instant,
        reduction: &Reduction,
        outputs: &mut [TensorMut<'_>],
    ) -> Result<(), ExecError> {
        let mut workspaces = lock(&self.workspaces);
        let wires = &self.collective.contract.tensors;
        {
            let mut sums: Vec<TensorMut<'_>> = Vec::with_capacity(outputs.len());
            for (index, (output, workspace)) in outputs.iter_mut().zip(workspaces.iter_mut()).enumerate() {
                let mut sum = match workspace {
                    Some(workspace) => {
                        let mut workspace = workspace.view_mut();
                        if reduction.accumulate == Accumulate::Continue {
                            convert::convert_all(output.view(), &mut workspace);
                        }
                        workspace
                    }
                    None => output.reborrow(),
                };
                if reduction.accumulate == Accumulate::Start {
                    reduce::set_identity(reduction.op, index, &mut sum);
                }
                sums.push(sum);
            }
            self.receive(stream, own, began, |inputs, from, to| match reduction.op {
                ReduceOp::Sum | ReduceOp::Avg => {
                    for ((input, sum), wire) in inputs.iter().zip(&mut sums).zip(wires) {
                        reduce::add_rows(*input, from, wire.wire, sum, to);
                    }
                }
                ReduceOp::Lse => {
                    let pairs =
                        inputs.chunks_exact(2).zip(sums.chunks_exact_mut(2)).zip(wires.chunks_exact(2));
                    for ((input, sum), wire) in pairs {
                        let (out, lse) = sum.split_at_mut(1);
                        let wire = (wire[0].wire, wire[1].wire);
                        reduce::merge_rows((input[0], input[1]), from, wire, (&mut out[0], &mut lse[0]), to);
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
                    convert::convert_row(workspace.view(), row, output);
                }
            }
        }
        Ok(())
    }

    /// How long a link takes for what this rank exchanges with others.
    fn link_time(&self, link: SlowLink) -> Duration {
        let SlowLink { alpha, bytes_per_second, network } = link;
        let is_far = |peer: &PeerRows| {
            let node = |topology: Topology, rank| topology.node(rank);
            network.is_some_and(|slow| node(slow.topology, peer.rank) != node(slow.topology, self.rank))
        };
        let near = self.seconds_of(alpha, bytes_per_second, |peer| !is_far(peer));
        let far = network.map(|slow| self.seconds_of(slow.alpha, slow.bytes_per_second, is_far));
        near.max(far.unwrap_or_default())
    }

    /// What moving the rows shared with some peers takes; nothing where there are none.
    fn seconds_of(
        &self,
        alpha: Duration,
        bytes_per_second: f64,
        counts: impl Fn(&PeerRows) -> bool,
    ) -> Duration {
        let remote = |peers: &[PeerRows]| -> usize {
            peers.iter().filter(|peer| peer.rank != self.rank && counts(peer)).map(PeerRows::total).sum()
        };
        let pattern = &self.collective.pattern;
        let rows = remote(&pattern.outgoing).max(remote(&pattern.incoming));
        if rows == 0 {
            return Duration::ZERO;
        }
        let row_bytes = |tensor: &WireTensor| tensor.row_elements * tensor.wire.size();
        let bytes = rows * self.collective.contract.tensors.iter().map(row_bytes).sum::<usize>();
        let seconds = Duration::try_from_secs_f64(bytes as f64 / bytes_per_second);
        alpha.saturating_add(seconds.unwrap_or(Duration::MAX))
    }

    fn waiter<'a>(&'a self, stream: &'a StreamShared) -> Waiter<'a> {
        // Cores are for computation.
        Waiter {
            rank: self.rank,
            place: &self.place,
            status: &stream.status,
            polls: Duration::ZERO,
            listener: None,
        }
    }
}
