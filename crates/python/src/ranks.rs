//! The ranks of a group that are in this process, and what they do together.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use counterpoint_exec::{CpuMachine, ExecError, Group, JoinConfig, SlowLink, WorldConfig};
use counterpoint_schedule::OverlapPolicy;
use pyo3::prelude::*;

use crate::borrow::Borrowed;
use crate::engine::{AttentionCall, Engine, Joined, Named};
use crate::error::{engine, raise};
use crate::interrupt::{self, interruptible};
use crate::join::{self, PythonStore};
use crate::row_program::RowCollective;
use crate::solution::Solution;
use crate::timeline::Timeline;

/// Ranks that are joined: all of a group in this process, or one of several processes.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Ranks {
    rank: Option<usize>,
    size: usize,
    engine: Mutex<Option<Arc<dyn Engine>>>,
    process: u32,
}

/// Names and tensors of one call.
type Tensors = Vec<(String, Borrowed)>;

const NAMES: [&str; 11] = ["q", "k", "v", "sink", "out", "lse", "dout", "dq", "dk", "dv", "dsink"];

fn named(tensors: Tensors) -> Result<Named, ExecError> {
    let name = |(name, tensor): (String, Borrowed)| {
        let known = NAMES.into_iter().find(|known| *known == name);
        known
            .map(|known| (known, tensor))
            .ok_or_else(|| ExecError::Tensor { name, reason: "is no tensor of attention".to_owned() })
    };
    tensors.into_iter().map(name).collect()
}

#[pymethods]
impl Ranks {
    /// All `size` ranks in this process. `slow_link` imitates a link: (seconds of a collective, bytes a second).
    #[staticmethod]
    #[pyo3(signature = (size, *, slow_link, limit))]
    fn local(py: Python<'_>, size: usize, slow_link: Option<(f64, f64)>, limit: f64) -> PyResult<Self> {
        let limit = duration(py, limit)?;
        let slow_link = match slow_link {
            None => None,
            Some((alpha, bytes_per_second)) => {
                Some(SlowLink { alpha: duration(py, alpha)?, bytes_per_second, network: None })
            }
        };
        let group = engine(py, || Group::connect(&CpuMachine::new(0, slow_link)?, size, config(limit)))?;
        Ok(Self::with(None, size, Arc::new(Joined::new(group))))
    }

    /// This process as `rank` of `size` that are processes, which meet through `store`, a `torch.distributed.Store` of theirs alone.
    /// `address` is one of rank 0's host at which all reach it. Collective.
    #[staticmethod]
    #[pyo3(signature = (store, rank, size, *, address, limit))]
    fn join(
        py: Python<'_>,
        store: Py<PyAny>,
        rank: usize,
        size: usize,
        address: &str,
        limit: f64,
    ) -> PyResult<Self> {
        let (address, world) = (join::address(py, address)?, config(duration(py, limit)?));
        let (store, _give_up) = PythonStore::new(store, rank, size);
        let joined = move || Group::join(&store, rank, size, &JoinConfig { address, world });
        let group = interruptible(py, joined)?;
        Ok(Self::with(Some(rank), size, Arc::new(Joined::new(group))))
    }

    /// This process's rank; None where all are here.
    #[getter]
    fn rank(&self) -> Option<usize> {
        self.rank
    }

    /// Number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    /// One pass of attention: `outputs` are written. Its times, where it is `measured`. Collective.
    #[pyo3(signature = (solution, *, backward, overlap, deterministic, measured, inputs, outputs))]
    fn attention(
        &self,
        py: Python<'_>,
        solution: &Solution,
        backward: bool,
        overlap: &str,
        deterministic: bool,
        measured: bool,
        inputs: Tensors,
        outputs: Tensors,
    ) -> PyResult<Option<Timeline>> {
        let policy: OverlapPolicy = match overlap {
            "auto" => OverlapPolicy::default(),
            text => text.parse().map_err(|error| raise(py, "PolicyError", &format!("{error}"), &[]))?,
        };
        let ranks = self.engine(py)?;
        let content = solution.content.clone();
        let native = engine(py, || {
            let (inputs, outputs) = (named(inputs)?, named(outputs)?);
            let call = AttentionCall { content, policy, deterministic, backward, measured, inputs, outputs };
            ranks.attention(&call)
        })?;
        Ok(native.map(|native| Timeline { native }))
    }

    /// Moves rows of a tensor that is dispatched as the queries (or keys) of a plan: "gather", "reduce_scatter", or "roll". Collective.
    #[pyo3(signature = (solution, what, role, *, shift, source, target))]
    fn rows(
        &self,
        py: Python<'_>,
        solution: &Solution,
        what: &str,
        role: &str,
        shift: i64,
        source: Borrowed,
        target: Borrowed,
    ) -> PyResult<()> {
        let ranks = self.engine(py)?;
        let content = solution.content.clone();
        let what = match what {
            "gather" => RowCollective::Gather,
            "reduce_scatter" => RowCollective::ReduceScatter,
            _ => RowCollective::Roll(shift),
        };
        let keys = role == "k";
        engine(py, || {
            let dispatch = if keys { &content.plan.k_dispatch } else { &content.plan.q_dispatch };
            ranks.rows(dispatch, what, &source, &target)
        })
    }

    /// Ends the group for all ranks, which hear `reason`.
    fn fail(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let ranks = self.engine(py)?;
        engine::<_, ExecError>(py, || {
            ranks.fail(reason);
            Ok(())
        })
    }

    /// Raises the group's first error, as far as it is known here; never waits.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let ranks = self.engine(py)?;
        engine(py, || ranks.poll())
    }

    /// Leaves the group, once all its ranks do. Calls from now on are errors.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let ranks = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(ranks) = ranks else { return Ok(()) };
        if std::process::id() != self.process {
            // Its threads are those of another process.
            std::mem::forget(ranks);
            return Ok(());
        }
        engine(py, move || ranks.close())
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl Ranks {
    fn with(rank: Option<usize>, size: usize, engine: Arc<dyn Engine>) -> Self {
        Self { rank, size, engine: Mutex::new(Some(engine)), process: std::process::id() }
    }

    fn engine(&self, py: Python<'_>) -> PyResult<Arc<dyn Engine>> {
        if std::process::id() != self.process {
            let message = "this group was made in another process, and a fork does not copy its threads; start workers \
                           with spawn, or make the group in them";
            return Err(raise(py, "Error", message, &[]));
        }
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone();
        engine.ok_or_else(|| raise(py, "Error", "this group is closed; make a new one", &[]))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(engine);
        }
    }
}

fn config(limit: Duration) -> WorldConfig {
    WorldConfig { limit, interrupted: interrupt::reason, ..WorldConfig::default() }
}

fn duration(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| raise(py, "Error", &format!("{seconds} is no number of seconds to wait"), &[]))
}
