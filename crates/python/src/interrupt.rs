//! Signals that Python handles while the engine waits, such as that of Ctrl-C.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::{Raised, panicked, raise, raised};

thread_local! {
    /// What a handler has raised on this thread, until the call that it interrupts has ended.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

const ATTENTION: Duration = Duration::from_millis(100);

/// What a wait of the engine asks: runs handlers of signals, and gives what one of them raises as a reason to end the group.
pub(crate) fn reason() -> Option<String> {
    let error = Python::try_attach(|py| py.check_signals().err())??;
    let reason = Python::try_attach(|py| name_of(py, &error));
    RAISED.set(Some(error));
    Some(reason.unwrap_or_else(|| "a signal".to_owned()))
}

fn name_of(py: Python<'_>, error: &PyErr) -> String {
    error.get_type(py).name().map_or_else(|_| "a signal".to_owned(), |name| name.to_string())
}

/// What a handler has raised during a call that has just ended.
pub(crate) fn take() -> Option<PyErr> {
    RAISED.take()
}

/// Runs a part of the engine on a thread of its own, and goes on without it when a handler raises, once `give_up` has heard what.
pub(crate) fn interruptible<T, E>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
    give_up: impl FnOnce(&str),
) -> PyResult<T>
where
    T: Send + 'static,
    E: Raised + Send + 'static,
{
    let (send, receive) = mpsc::channel();
    let run = move || drop(send.send(catch_unwind(AssertUnwindSafe(work))));
    let thread = thread::Builder::new().name("counterpoint wait".to_owned()).spawn(run);
    thread.map_err(|error| raise(py, "Error", &format!("the system gives no thread: {error}"), &[]))?;
    let receive = std::sync::Mutex::new(receive);
    loop {
        let received = py.detach(|| {
            let receive = receive.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            receive.recv_timeout(ATTENTION)
        });
        match received {
            Ok(Ok(result)) => return result.map_err(|error| raised(py, &error)),
            Ok(Err(panic)) => return Err(panicked(py, &*panic)),
            Err(RecvTimeoutError::Timeout) => {
                if let Err(error) = py.check_signals() {
                    give_up(&name_of(py, &error));
                    return Err(error);
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(raise(py, "InternalError", "a thread of counterpoint has gone", &[]));
            }
        }
    }
}
