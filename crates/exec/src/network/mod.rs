//! Connections that only processes of one job get: a token that they share, a handshake that proves it without sending it,
//! and a door that strangers neither pass nor block.
//!
//! ```text
//! connect (knock) --- greeting, nonce ----------------> Door (its own thread, nothing in it waits for one connection)
//!                 <-- greeting, nonce, proof ----------
//!                 --- proof, hello -------------------> Doorman::admit
//! ```
//!
//! Proofs are HMAC-SHA256 over both nonces. What follows a handshake is neither encrypted nor authenticated: whoever can read
//! or change packets between the hosts is not kept out.

mod deadline;
mod door;
mod handshake;
mod knock;
mod token;

pub(crate) use self::deadline::Until;
pub(crate) use self::door::{Door, Doorman, poll_until};
pub(crate) use self::knock::{KnockError, knock};
pub use self::token::JobToken;

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Whether an error says that this process, or its host, has no file descriptors left.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    [Errno::MFILE, Errno::NFILE].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// How many file descriptors this process may have, where there is a limit.
pub(crate) fn descriptor_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}
