//! Where ranks that are processes find each other: a small store in the process of rank 0, which every rank keeps one
//! connection to for as long as the job lasts.
//!
//! It moves bytes and knows no device: values by key, counters, gatherings of every rank's bytes, barriers. It is also how
//! an error of one rank ends the others at once: the first one is sent to all, a process that dies is noticed by its closed
//! connection, and a rank that waits can ask another what it is doing. Every wait has a limit, and its error names who was
//! waited for.
//!
//! Only processes that have the job's token get a seat (`network`), each rank one, and only those that were started with the same.
//! A token is random and handed out among ranks of one user on one host, or follows from a secret that all were given, or comes
//! from the caller.
//!
//! ```text
//! rank 0:  Launch -> Server (Store) <-+- Rendezvous of rank 0
//! rank n:  Launch --------------------+- Rendezvous of rank n
//! ```

mod admission;
mod agreement;
mod client;
mod connection;
mod launch;
mod local_token;
mod message;
mod outbox;
mod seek;
mod server;
mod start;
mod store;
mod watch;

use crate::RendezvousError;
pub use agreement::Facet;
pub use client::{LeavingAtTheEnd, Rendezvous, RendezvousHost};
pub use launch::{
    ENVIRONMENT, JOB_SECRET_VARIABLE, JobSecret, Launch, Launcher, RENDEZVOUS_VARIABLE, RendezvousPoint,
};
pub use start::RunStart;
pub(crate) use watch::Watch;

#[cfg(test)]
mod tests;
