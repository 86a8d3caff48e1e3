//! Who waits for another rank's part in a collective, and by whom it hears of that.

use std::time::Duration;

use crate::OpPlace;
use crate::world::StreamStatus;

/// Who waits, for errors and for those who ask what it is doing.
pub struct Waiter<'a> {
    /// The rank.
    pub rank: usize,
    /// The collective's place in its Program.
    pub place: &'a OpPlace,
    /// What the rank's stream is doing.
    pub status: &'a StreamStatus,
    /// How long it polls for a peer's part before it sleeps: a thread takes tens of microseconds to wake.
    pub polls: Duration,
    /// Whom it asks to take in what peers have written where no thread listens.
    pub listener: Option<&'a dyn Listener>,
}

/// Takes in what peers write into memory that they share with a rank.
pub trait Listener {
    /// Takes in what `peer` has written; false where it writes nothing so.
    fn listen(&self, peer: usize) -> bool;
}
