//! What transports of ranks in one process share: a rank's part in a group collective made ready, and the board on which
//! ranks publish their parts and find those of others.

mod board;
mod contract;
mod pattern;

pub use board::{Board, Listener, Payload, Post, Waiter};
pub use contract::{Collective, Contract, Reduction, WireTensor};
pub use pattern::{Pattern, PeerRows};
