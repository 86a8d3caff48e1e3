//! Joining ranks that are processes: through the store of a process group of PyTorch's, and through nothing else of it.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use counterpoint_exec::{ExecError, Group, Machine, RendezvousError, Store, StoreFault};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raise;

/// Between two looks for a key: the first, and the longest.
const LOOKS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// A `torch.distributed.Store`, by its methods `set`, `get`, `add` and `check`.
pub(crate) struct PythonStore {
    store: Py<PyAny>,
    rank: usize,
    world_size: usize,
    is_given_up: Arc<AtomicBool>,
}

/// Notifies a join that nobody waits for it any more.
pub(crate) struct GiveUp(Arc<AtomicBool>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl PythonStore {
    /// Of `rank`, which gives up once the second is dropped.
    pub(crate) fn new(store: Py<PyAny>, rank: usize, world_size: usize) -> (Self, GiveUp) {
        let is_given_up = Arc::new(AtomicBool::new(false));
        (Self { store, rank, world_size, is_given_up: is_given_up.clone() }, GiveUp(is_given_up))
    }

    fn ask<T>(&self, question: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, ExecError> {
        let broken = |reason| RendezvousError::Broken { rank: self.rank, reason }.into();
        let answer = Python::try_attach(|py| {
            question(self.store.bind(py)).map_err(|error| StoreFault::Lent { text: error.to_string() })
        });
        answer.ok_or(StoreFault::ProgramEnds).flatten().map_err(broken)
    }
}

impl Store for PythonStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        self.ask(|store| store.call_method1("set", (key, PyBytes::new(store.py(), value))).map(drop))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, ExecError> {
        self.ask(|store| store.call_method1("get", (key,))?.extract())
    }

    fn add(&self, key: &str, by: i64) -> Result<i64, ExecError> {
        self.ask(|store| store.call_method1("add", (key, by))?.extract())
    }

    fn wait(&self, key: &str, limit: Duration) -> Result<(), ExecError> {
        let (began, mut pause) = (Instant::now(), LOOKS.0);
        while !self.ask(|store| store.call_method1("check", ([key],))?.extract::<bool>())? {
            let waited = began.elapsed();
            if waited > limit || self.is_given_up.load(Ordering::Acquire) {
                let place = "the store of the process group".to_owned();
                let (rank, world_size, missing) = (self.rank, self.world_size, vec![0]);
                return Err(RendezvousError::Absent { rank, place, waited, missing, world_size }.into());
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LOOKS.1);
        }
        Ok(())
    }
}

/// An address as text.
pub(crate) fn address(py: Python<'_>, text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|_| raise(py, "Error", &format!("{text:?} is no address of this host"), &[]))
}

/// Seconds that Python gives.
pub(crate) fn duration(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| raise(py, "Error", &format!("{seconds} is no number of seconds to wait"), &[]))
}

/// A group whose calls run with collectives of other libraries, or by itself.
pub(crate) fn placed<M: Machine>(group: Group<M>, beside_collectives: bool) -> Group<M> {
    if beside_collectives { group.beside_collectives() } else { group }
}
