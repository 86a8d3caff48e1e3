//! Joining ranks that are processes: through the store of a process group of PyTorch's, and through nothing else of it.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use counterpoint_exec::{ExecError, Group, Machine, RendezvousError, Store, StoreFault};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{raise, raised};
use crate::integers::duration;
use crate::interrupt::interruptible;

/// A `torch.distributed.Store`, by its methods `set`, `get` and `check`.
pub(crate) struct PythonStore {
    store: Py<PyAny>,
    rank: usize,
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
    fn new(store: Py<PyAny>, rank: usize) -> (Self, GiveUp) {
        let is_given_up = Arc::new(AtomicBool::new(false));
        (Self { store, rank, is_given_up: is_given_up.clone() }, GiveUp(is_given_up))
    }

    fn ask<T>(&self, question: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, ExecError> {
        let broken = |reason| RendezvousError::Broken { rank: self.rank, reason }.into();
        let answer = Python::try_attach(|py| match self.is_given_up.load(Ordering::Acquire) {
            true => Err(StoreFault::GivenUp),
            false => {
                question(self.store.bind(py)).map_err(|error| StoreFault::Lent { text: error.to_string() })
            }
        });
        answer.ok_or(StoreFault::ProgramEnds).flatten().map_err(broken)
    }
}

impl Store for PythonStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        self.ask(|store| store.call_method1("set", (key, PyBytes::new(store.py(), value))).map(drop))
    }

    fn find(&self, key: &str) -> Result<Option<Vec<u8>>, ExecError> {
        self.ask(|store| {
            let is_set: bool = store.call_method1("check", ([key],))?.extract()?;
            is_set.then(|| store.call_method1("get", (key,))?.extract()).transpose()
        })
    }
}

/// An attempt of all ranks to join, in which this process is one of them.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Attempt {
    store: Py<PyAny>,
    rank: usize,
    size: usize,
    native: Mutex<counterpoint_exec::Attempt>,
}

#[pymethods]
impl Attempt {
    /// Takes part as `rank` of `size` that join through `store`, a `torch.distributed.Store` of theirs alone. Collective.
    #[new]
    #[pyo3(signature = (store, rank, size, *, limit))]
    fn new(py: Python<'_>, store: Py<PyAny>, rank: usize, size: usize, limit: f64) -> PyResult<Self> {
        let limit = duration(py, limit)?;
        let (lent, _give_up) = PythonStore::new(store.clone_ref(py), rank);
        let begun = move || counterpoint_exec::Attempt::begin(&lent, rank, size, limit);
        let native = Mutex::new(interruptible(py, begun, |_| {})?);
        Ok(Self { store, rank, size, native })
    }

    /// Every rank's text, in the order of ranks. Collective.
    #[pyo3(signature = (own, *, limit))]
    fn exchange(&self, py: Python<'_>, own: String, limit: f64) -> PyResult<Vec<String>> {
        let limit = duration(py, limit)?;
        let (store, mut attempt, _give_up) = self.lend(py);
        let exchanged = move || -> Result<_, ExecError> {
            let all = attempt.exchange(&store, own.as_bytes(), limit);
            Ok((attempt, all))
        };
        let (attempt, all) = interruptible(py, exchanged, |_| {})?;
        *self.native.lock().unwrap_or_else(PoisonError::into_inner) = attempt;
        let all = all.map_err(|error| raised(py, &error))?;
        Ok(all.iter().map(|one| String::from_utf8_lossy(one).into_owned()).collect())
    }

    /// Ends it for all ranks, which hear `reason` wherever in it they wait. Local.
    fn fail(&self, py: Python<'_>, reason: String) {
        let (store, attempt, _give_up) = self.lend(py);
        let rank = self.rank;
        py.detach(|| attempt.fail(&store, ExecError::GaveUp { rank, reason }));
    }
}

impl Attempt {
    /// This process's rank, and how many there are.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    /// The attempt for a thread that waits in it, with its store, until the last is dropped.
    pub(crate) fn lend(&self, py: Python<'_>) -> (PythonStore, counterpoint_exec::Attempt, GiveUp) {
        let (store, give_up) = PythonStore::new(self.store.clone_ref(py), self.rank);
        (store, self.native.lock().unwrap_or_else(PoisonError::into_inner).clone(), give_up)
    }
}

/// An address as text.
pub(crate) fn address(py: Python<'_>, text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|_| raise(py, "Error", &format!("{text:?} is no address of this host"), &[]))
}

/// A group whose calls run with collectives of other libraries, or by itself.
pub(crate) fn placed<M: Machine>(group: Group<M>, concurrent_collectives: bool) -> Group<M> {
    if concurrent_collectives { group.concurrent_collectives() } else { group }
}
