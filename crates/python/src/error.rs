//! Errors of the engine as the exceptions of `counterpoint.errors`, and panics as `InternalError`.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use counterpoint_cuda::CudaError;
use counterpoint_exec::{ExecError, RendezvousError};
use counterpoint_mask::MaskError;
use counterpoint_plan::PlanError;
use counterpoint_schedule::SimulateError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::interrupt;

/// An error that has a class in `counterpoint.errors`.
pub(crate) trait Raised: std::fmt::Display {
    /// The class.
    fn class(&self) -> &'static str;

    /// Attributes of the exception besides its sentence.
    fn attributes(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

impl Raised for MaskError {
    fn class(&self) -> &'static str {
        "MaskError"
    }
}

impl Raised for PlanError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

impl Raised for SimulateError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

impl Raised for CudaError {
    fn class(&self) -> &'static str {
        match self {
            Self::NoNvrtc { .. } | Self::NoNccl { .. } | Self::NoCublasLt { .. } => "MissingLibraryError",
            Self::OutOfMemory { .. } => "OutOfMemoryError",
            _ => "DeviceError",
        }
    }

    fn attributes(&self) -> Vec<(&'static str, u64)> {
        match self {
            Self::OutOfMemory { bytes, free, .. } => {
                vec![("needed", *bytes as u64), ("available", *free as u64)]
            }
            _ => Vec::new(),
        }
    }
}

impl Raised for ExecError {
    fn class(&self) -> &'static str {
        match self {
            Self::Tensor { .. } => "TensorError",
            Self::Policy { .. } => "PolicyError",
            Self::BadCollective { .. }
            | Self::CollectiveMismatch { .. }
            | Self::CollectiveOrder { .. }
            | Self::PlanDiffers { .. }
            | Self::Rendezvous(RendezvousError::Disagreement { .. }) => "MismatchError",
            Self::Tables { .. } => "PlanError",
            Self::Stalled(_) => "StalledError",
            Self::RankPanicked { .. } | Self::Program { .. } | Self::DataRace { .. } => "InternalError",
            Self::OutOfMemory { .. } => "OutOfMemoryError",
            Self::Device { .. } | Self::Capture { .. } => "DeviceError",
            Self::Rendezvous(_) | Self::GaveUp { .. } | Self::Left { .. } => "PeerError",
            _ => "Error",
        }
    }

    fn attributes(&self) -> Vec<(&'static str, u64)> {
        match self {
            Self::Policy { rank, .. }
            | Self::Program { rank, .. }
            | Self::Tables { rank, .. }
            | Self::BadCollective { rank, .. }
            | Self::RankPanicked { rank, .. }
            | Self::Thread { rank, .. }
            | Self::Capture { rank, .. }
            | Self::Device { rank, .. } => vec![("rank", *rank as u64)],
            Self::CollectiveMismatch { rank, peer, .. }
            | Self::CollectiveOrder { rank, peer, .. }
            | Self::PlanDiffers { rank, peer, .. } => vec![("rank", *rank as u64), ("peer", *peer as u64)],
            Self::Stalled(stall) => vec![("rank", stall.rank as u64), ("peer", stall.culprit as u64)],
            Self::Left { left, rank, .. } => vec![("rank", *rank as u64), ("peer", *left as u64)],
            Self::GaveUp { rank, .. } => vec![("peer", *rank as u64)],
            Self::Rendezvous(error) => of_rendezvous(error),
            Self::OutOfMemory { rank, needed, available } => {
                let rank = rank.map(|rank| ("rank", rank as u64));
                [("needed", *needed), ("available", *available)].into_iter().chain(rank).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Who saw it, and whom it concerns.
fn of_rendezvous(error: &RendezvousError) -> Vec<(&'static str, u64)> {
    let (rank, peer) = match error {
        RendezvousError::Lost { lost, rank, .. } => (Some(*rank), Some(*lost)),
        RendezvousError::Connection { rank, peer, .. } => (Some(*rank), Some(*peer)),
        RendezvousError::RankFailed { rank, .. } | RendezvousError::Unresponsive { rank, .. } => {
            (None, Some(*rank))
        }
        RendezvousError::Absent { rank, missing, .. } | RendezvousError::NotJoined { rank, missing, .. } => {
            (Some(*rank), missing.first().copied())
        }
        RendezvousError::Unreachable { rank, .. } => (Some(*rank), Some(0)),
        RendezvousError::OtherVersion { rank, .. }
        | RendezvousError::AnotherJob { rank, .. }
        | RendezvousError::Descriptors { rank, .. }
        | RendezvousError::Unset { rank, .. }
        | RendezvousError::Broken { rank, .. } => (Some(*rank), None),
        _ => (None, None),
    };
    let named = |name: &'static str, rank: Option<usize>| rank.map(|rank| (name, rank as u64));
    named("rank", rank).into_iter().chain(named("peer", peer)).collect()
}

/// The exception of `class` in `counterpoint.errors`.
pub(crate) fn raise(py: Python<'_>, class: &str, message: &str, attributes: &[(&str, u64)]) -> PyErr {
    let made = (|| {
        let errors = py.import("counterpoint.errors")?;
        let keywords = PyDict::new(py);
        for (name, value) in attributes {
            keywords.set_item(name, value)?;
        }
        errors.getattr("of")?.call((class, message), Some(&keywords))
    })();
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// Runs a part of the engine without Python's lock; its errors and panics become exceptions.
pub(crate) fn engine<T, E>(py: Python<'_>, work: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
where
    T: Send,
    E: Raised + Send,
{
    let result = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    if let Some(interruption) = interrupt::take() {
        return Err(interruption);
    }
    match result {
        Ok(result) => result.map_err(|error| raised(py, &error)),
        Err(panic) => Err(panicked(py, &*panic)),
    }
}

/// An error as its exception.
pub(crate) fn raised(py: Python<'_>, error: &impl Raised) -> PyErr {
    raise(py, error.class(), &error.to_string(), &error.attributes())
}

/// A panic as its exception.
pub(crate) fn panicked(py: Python<'_>, panic: &(dyn Any + Send)) -> PyErr {
    let message = format!("this is a bug in counterpoint, please report it: {}", text(panic));
    raise(py, "InternalError", &message, &[])
}

/// What a panic says.
fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words")
}
