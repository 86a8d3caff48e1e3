//! What transports of ranks in one process share: a rank's part in a group collective made ready, and the board on which
//! ranks publish their parts and find those of others.

mod board;
mod contract;
mod late_checks;
mod pattern;
mod waiter;

pub use board::{Board, Payload, Post};
pub use contract::{Collective, Contract, Reduction};
pub use late_checks::LateChecks;
pub use pattern::{Pattern, PeerRows};
pub use waiter::{Listener, Waiter};
