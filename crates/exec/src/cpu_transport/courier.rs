//! What TCP and MPI have to provide for CPU ranks in different processes, and where their messages arrive.

use std::sync::Arc;
use std::time::Instant;

use super::message::received_part;
use super::{PeerMessage, Rows};
use crate::collective::{Board, Contract, Post};
use crate::world::World;
use crate::{ConnectionFault, ExecError, HostTensor, OpPlace, Recipient};

/// Carries messages to the ranks of other processes. Dropping it lets them know that this one has left.
pub(crate) trait Courier: Send + Sync {
    /// Ranks, this one among them.
    fn world_size(&self) -> usize;

    /// Sends a message, with a payload of these parts, to `peer`. Messages to one rank arrive in the order in which they
    /// were sent. May wait for the peer's process to take them, for the world's limit.
    ///
    /// # Errors
    /// The world's, which a connection that has broken becomes.
    fn send(&self, peer: usize, message: &PeerMessage, payload: &[&[u8]]) -> Result<(), ExecError>;
}

/// Where a courier puts what arrives for a rank: on its process's board.
#[derive(Clone)]
pub(crate) struct Inbox {
    rank: usize,
    board: Arc<Board<Rows>>,
}

impl Inbox {
    /// The inbox of `rank`, the only one of `world` in this process.
    pub(crate) fn new(world: &World, rank: usize) -> Self {
        Self { rank, board: Arc::new(Board::of_rank(world, rank)) }
    }

    pub(super) fn board(&self) -> &Arc<Board<Rows>> {
        &self.board
    }
}

impl Recipient for Inbox {
    type Message = PeerMessage;

    fn receive(&self, peer: usize, message: PeerMessage, payload: &[u8]) -> Result<(), ConnectionFault> {
        match message {
            PeerMessage::Part { sequence, place, contract, sent, expected } => {
                let rows = unpack(&contract, &sent, payload, &place)?;
                let collective = Arc::new(received_part(self.rank, contract, &sent, &expected));
                let post = Post { place, collective, at: Instant::now(), payload: Rows::Arrived(rows) };
                let users = post.collective.pattern.outgoing.clone();
                self.board.publish(peer, sequence, post, &users);
            }
            PeerMessage::Copied { sequence } => self.board.acknowledge(self.rank, sequence, peer),
            PeerMessage::Left => self.left(peer),
        }
        Ok(())
    }

    fn left(&self, peer: usize) {
        // Its parts come before its farewell.
        self.board.leave(peer, 0);
    }
}

fn unpack(
    contract: &Contract,
    sent: &[usize],
    mut payload: &[u8],
    place: &OpPlace,
) -> Result<Vec<HostTensor>, ConnectionFault> {
    let wrong = |bytes: usize| ConnectionFault::RowBytes { bytes, place: place.to_string() };
    let all = payload.len();
    let rows: usize = sent.iter().sum();
    let mut tensors = Vec::with_capacity(contract.tensors.len());
    for tensor in &contract.tensors {
        let bytes = rows.checked_mul(tensor.row_elements).and_then(|n| n.checked_mul(tensor.wire.size()));
        let part = bytes.and_then(|bytes| payload.split_off(..bytes)).ok_or_else(|| wrong(all))?;
        tensors.push(HostTensor::from_bytes(vec![rows, tensor.row_elements], tensor.wire, part));
    }
    if payload.is_empty() { Ok(tensors) } else { Err(wrong(all)) }
}
