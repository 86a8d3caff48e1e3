//! Who takes the messages of other processes.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ConnectionFault;

/// Takes what the ranks of other processes send, on a thread for each of them.
pub trait Recipient: Send + Sync + 'static {
    /// What they send.
    type Message: Serialize + DeserializeOwned;

    /// Takes a message of `peer`, in the order in which it was sent.
    ///
    /// # Errors
    /// Where it makes no sense: the world fails then.
    fn receive(&self, peer: usize, message: Self::Message, payload: &[u8]) -> Result<(), ConnectionFault>;

    /// `peer` has said farewell: it begins nothing more.
    fn left(&self, _peer: usize) {}

    /// The connection of `peer` has ended, after its farewell.
    fn ended(&self, _peer: usize) {}
}
