//! The messages between CPU ranks in different processes: parts of collectives with their rows, and receipts.

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::OpPlace;
use crate::collective::{Collective, Contract, Pattern, PeerRows};

/// What CPU ranks of different processes send each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum PeerMessage {
    /// A rank's part in a collective, as the receiver must know it. The payload holds, tensor by tensor, the rows that the
    /// sender has for the receiver.
    Part {
        sequence: u64,
        place: OpPlace,
        contract: Contract,
        /// Lengths of the splits that are sent.
        sent: Vec<usize>,
        /// Lengths of the splits that are expected of the receiver.
        expected: Vec<usize>,
    },
    /// The rows of the receiver's part have been copied.
    Copied { sequence: u64 },
    /// The sender has left, where the connection has no farewell of its own.
    Left,
}

impl PeerMessage {
    /// What `peer` is sent of a part.
    pub(super) fn part(sequence: u64, place: &OpPlace, collective: &Collective, peer: usize) -> Self {
        let Collective { contract, pattern, .. } = collective;
        Self::Part {
            sequence,
            place: place.clone(),
            contract: contract.clone(),
            sent: pattern.to(peer).iter().map(Range::len).collect(),
            expected: pattern.from(peer).iter().map(Range::len).collect(),
        }
    }
}

/// A part that was sent to `rank`, as if it had been published here: rows are those of the payload.
pub(super) fn received_part(
    rank: usize,
    contract: Contract,
    sent: &[usize],
    expected: &[usize],
) -> Collective {
    let pattern =
        Pattern { outgoing: one_after_the_other(rank, sent), incoming: one_after_the_other(rank, expected) };
    Collective { contract, pattern, tensors: Vec::new(), reduction: None, delivery_parts: None }
}

fn one_after_the_other(rank: usize, lengths: &[usize]) -> Vec<PeerRows> {
    if lengths.is_empty() {
        return Vec::new();
    }
    let mut start = 0;
    let rows = lengths.iter().map(|length| {
        let range = Range::new(start, start + length);
        start = range.end;
        range
    });
    vec![PeerRows { rank, rows: rows.collect() }]
}
