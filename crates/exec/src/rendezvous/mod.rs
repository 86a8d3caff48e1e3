//! Where ranks that are processes find each other: a small store in the process of rank 0, which every rank keeps one
//! connection to for as long as the job lasts.
//!
//! It moves bytes and knows no device: values by key, counters, gatherings of every rank's bytes, barriers. It is also how
//! an error of one rank ends the others at once: the first one is told to all, a process that dies is noticed by its closed
//! connection, and a rank that waits can ask another what it is doing. Every wait has a limit, and its error names who was
//! waited for.
//!
//! ```text
//! rank 0:  Launch -> Server (Store) <-+- Rendezvous of rank 0
//! rank n:  Launch --------------------+- Rendezvous of rank n
//! ```

mod agreement;
mod client;
mod connection;
mod error;
mod knock;
mod launch;
mod message;
mod server;
mod start;
mod store;

pub use agreement::Facet;
pub use client::Rendezvous;
pub use error::RendezvousError;
pub use launch::{ENVIRONMENT, Launch, Launcher, MeetingPoint, RENDEZVOUS_VARIABLE};
pub use message::RankActivity;
pub use start::RunStart;

#[cfg(test)]
mod tests;
