//! What may end the joining of ranks from outside: an attempt that one of them has failed before it had a seat.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::connection::Connection;
use crate::ExecError;

/// Between two looks while a rank has a seat and waits for the others.
const LOOK: Duration = Duration::from_millis(50);

/// Says whether joining goes on, and otherwise why not.
pub(crate) trait Watch: Fn() -> Result<(), ExecError> + Sync {}

impl<F: Fn() -> Result<(), ExecError> + Sync> Watch for F {}

/// Joining that nothing outside of it ends.
pub(super) fn unwatched() -> Result<(), ExecError> {
    Ok(())
}

/// Does `work`, and meanwhile ends the job of `connection` once `watch` says so.
pub(super) fn watched<R>(connection: &Connection, watch: &dyn Watch, work: impl FnOnce() -> R) -> R {
    thread::scope(|scope| {
        let (ended, has_ended) = mpsc::channel::<()>();
        let look = move || {
            while has_ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = watch() {
                    return drop(connection.fail(error));
                }
            }
        };
        // Without a thread the limit ends what it would have.
        let looking = thread::Builder::new().name("rendezvous watch".to_owned()).spawn_scoped(scope, look);
        let result = work();
        drop((ended, looking));
        result
    })
}
