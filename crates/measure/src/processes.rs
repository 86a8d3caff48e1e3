//! Measurements of ranks that are processes: what each has is brought to all, so that all decide alike.

use std::time::Duration;

use counterpoint_exec::{ExecError, HostTensor, Rendezvous};
use counterpoint_plan::DType;
use counterpoint_schedule::Timeline;

/// Where the ranks of a measurement are.
#[derive(Clone, Copy)]
pub enum Processes<'a> {
    /// All in this process.
    One,
    /// Each in a process of its own; all of them come to a barrier here, and measure the same at the same time.
    Each(&'a Rendezvous),
}

impl Processes<'_> {
    /// What all ranks did in a run, each by the clock of its process from the run's start on. The same in every process.
    ///
    /// # Errors
    /// Those of [`Rendezvous::gather`].
    pub fn joined(&self, own: Timeline) -> Result<Timeline, ExecError> {
        let Self::Each(rendezvous) = self else { return Ok(own) };
        let spans = rendezvous.gather("times", &own.spans)?.concat();
        Ok(Timeline { spans, ..own })
    }

    /// A tensor of every rank, of those of the ranks here, which have the same columns and type. The same in every process.
    ///
    /// # Errors
    /// Those of [`Rendezvous::all_gather`].
    pub fn gathered(&self, here: Vec<HostTensor>) -> Result<Vec<HostTensor>, ExecError> {
        let (Self::Each(rendezvous), Some(own)) = (self, here.first()) else { return Ok(here) };
        let all = rendezvous.all_gather("a tensor", own.bytes())?;
        Ok(all.iter().map(|bytes| rows(own.dtype(), own.row_elements(), bytes)).collect())
    }

    /// The rows of all ranks, one rank's after the other's. The same in every process.
    ///
    /// # Errors
    /// As [`Processes::gathered`].
    pub fn rows(&self, here: Vec<HostTensor>) -> Result<HostTensor, ExecError> {
        let all = self.gathered(here)?;
        let (dtype, columns) = all.first().map_or((DType::F64, 0), |one| (one.dtype(), one.row_elements()));
        let bytes: Vec<&[u8]> = all.iter().map(HostTensor::bytes).collect();
        Ok(rows(dtype, columns, &bytes.concat()))
    }

    /// How long something took that all processes do: for as long as the slowest says. The same in every process.
    ///
    /// # Errors
    /// Those of [`Rendezvous::gather`].
    pub fn longest(&self, own: Duration) -> Result<Duration, ExecError> {
        let Self::Each(rendezvous) = self else { return Ok(own) };
        Ok(rendezvous.gather("a duration", &own)?.into_iter().max().unwrap_or(own))
    }
}

/// `[rows, columns]` of that type, as many rows as the bytes are.
fn rows(dtype: DType, columns: usize, bytes: &[u8]) -> HostTensor {
    let row_bytes = (columns * dtype.size()).max(1);
    let count = bytes.len() / row_bytes;
    HostTensor::from_bytes(vec![count, columns], dtype, &bytes[..count * row_bytes])
}
