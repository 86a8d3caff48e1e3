//! A group as a value: what plans and step tables of it follow from, in processes that have not joined it.

use std::ops::Range;
use std::sync::{Arc, MutexGuard};

use counterpoint_cuda::DescribedGpu;
use counterpoint_exec::{AttentionTask, DescribedCpu, DescribedDevice, ExecError, PlanningThreads};
use counterpoint_plan::PlanCache;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple, PyType};
use serde::{Deserialize, Serialize};

use crate::error::engine;
use crate::ranks::Ranks;
use crate::site::Site;
use crate::solution::{Content, Solution};

/// The device of a group's ranks in one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum PlacedOn {
    Cpu,
    Gpu(DescribedGpu),
}

/// What plans and step tables of a group follow from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupFacts {
    /// Of the process that joined; `None` where all ranks are in it.
    pub(crate) rank: Option<usize>,
    /// What moves rows, as users know it.
    pub(crate) transport: String,
    pub(crate) site: Site,
    pub(crate) device: PlacedOn,
}

impl GroupFacts {
    pub(crate) fn size(&self) -> usize {
        self.site.topology.world_size
    }

    /// The ranks of the process that joined.
    pub(crate) fn here(&self) -> Range<usize> {
        self.rank.map_or(0..self.size(), |rank| rank..rank + 1)
    }

    /// Step tables of these ranks, as bytes.
    fn tables(&self, content: &Content) -> Result<Vec<Vec<u8>>, ExecError> {
        let task = content.task();
        match &self.device {
            PlacedOn::Cpu => tables_on(&DescribedCpu, &task, self.here()),
            PlacedOn::Gpu(gpu) => tables_on(gpu, &task, self.here()),
        }
    }
}

fn tables_on<D: DescribedDevice>(
    device: &D,
    task: &AttentionTask<'_>,
    ranks: Range<usize>,
) -> Result<Vec<Vec<u8>>, ExecError> {
    ranks.map(|rank| Ok(task.tables(device, rank)?.to_bytes())).collect()
}

/// A group as a value, which can be pickled.
#[pyclass(frozen, eq, module = "counterpoint._native")]
#[derive(PartialEq)]
pub(crate) struct Described {
    pub(crate) facts: Arc<GroupFacts>,
}

#[pymethods]
impl Described {
    /// The inverse of `to_json`.
    #[classmethod]
    fn from_json(cls: &Bound<'_, PyType>, text: &str) -> PyResult<Self> {
        let facts = engine(cls.py(), || serde_json::from_str(text))?;
        Ok(Self { facts: Arc::new(facts) })
    }

    /// All of it.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        engine(py, || serde_json::to_string(&*self.facts))
    }

    /// The rank of the process that joined; None where all ranks are in it.
    #[getter]
    fn rank(&self) -> Option<usize> {
        self.facts.rank
    }

    /// Number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.facts.size()
    }

    /// What moves rows between ranks.
    #[getter]
    fn transport(&self) -> &str {
        &self.facts.transport
    }

    /// The device of that process's ranks, in words.
    #[getter]
    fn device(&self) -> String {
        match &self.facts.device {
            PlacedOn::Cpu => DescribedCpu.to_string(),
            PlacedOn::Gpu(gpu) => gpu.to_string(),
        }
    }

    /// Whether that is a GPU.
    #[getter]
    fn on_gpu(&self) -> bool {
        matches!(self.facts.device, PlacedOn::Gpu(_))
    }

    /// Makes the step tables of a plan for the ranks of that process. Local; asks no device.
    fn tables(&self, py: Python<'_>, solution: &Solution) -> PyResult<StepTables> {
        let (facts, content) = (self.facts.clone(), solution.content.clone());
        let made = engine(py, move || facts.tables(&content))?;
        Ok(StepTables { ranks: made.iter().map(|bytes| PyBytes::new(py, bytes).into()).collect() })
    }
}

/// Step tables of a plan: what the device of each rank of a process needs of it, in the order of ranks.
#[pyclass(frozen, eq, module = "counterpoint._native")]
pub(crate) struct StepTables {
    pub(crate) ranks: Vec<PyBackedBytes>,
}

impl PartialEq for StepTables {
    fn eq(&self, other: &Self) -> bool {
        self.ranks.iter().map(|bytes| &**bytes).eq(other.ranks.iter().map(|bytes| &**bytes))
    }
}

#[pymethods]
impl StepTables {
    /// Of each rank's bytes. Whether these are step tables, and of what, is looked at by the group that takes them.
    #[new]
    fn new(ranks: Vec<PyBackedBytes>) -> Self {
        Self { ranks }
    }

    /// Bytes of all of them.
    #[getter]
    fn nbytes(&self) -> usize {
        self.ranks.iter().map(|bytes| bytes.len()).sum()
    }

    fn __repr__(&self) -> String {
        format!("StepTables(ranks={}, nbytes={})", self.ranks.len(), self.nbytes())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyType>, Bound<'py, PyTuple>)> {
        let ranks: Vec<Bound<'py, PyBytes>> =
            self.ranks.iter().map(|bytes| PyBytes::new(py, bytes)).collect();
        Ok((py.get_type::<Self>(), PyTuple::new(py, [ranks])?))
    }
}

/// Who plans: the ranks of a group, or a process that has its description.
#[derive(FromPyObject)]
pub(crate) enum Planner<'py> {
    Ranks(PyRef<'py, Ranks>),
    Described(PyRef<'py, Described>),
}

impl Planner<'_> {
    pub(crate) fn site(&self) -> &Site {
        match self {
            Self::Ranks(ranks) => &ranks.facts().site,
            Self::Described(described) => &described.facts.site,
        }
    }

    /// Plans that were made for the group, where it is here.
    pub(crate) fn plans(&self) -> Option<MutexGuard<'_, PlanCache<Content>>> {
        match self {
            Self::Ranks(ranks) => Some(ranks.plans()),
            Self::Described(_) => None,
        }
    }

    /// Threads that plan with the caller's, where the group has some here.
    pub(crate) fn planning_threads(&self) -> Option<Arc<PlanningThreads>> {
        match self {
            Self::Ranks(ranks) => ranks.planning_threads(),
            Self::Described(_) => None,
        }
    }
}
