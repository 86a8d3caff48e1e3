//! Devices as values: what the tables of Programs depend on of a device, in processes that have none.

use std::fmt;

use counterpoint_schedule::Program;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ExecError;

/// A device as the tables of Programs depend on it. Pure: equal values make equal tables, in every process.
pub trait DescribedDevice:
    Clone + fmt::Debug + fmt::Display + PartialEq + Serialize + DeserializeOwned + Send + Sync
{
    /// Of what kind such devices are, in errors.
    const KIND: &'static str;

    /// What is searched for the operations of a Program before they are made ready: what takes long and needs no device.
    type Tables: Clone + fmt::Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync;

    /// Makes the tables of a Program.
    ///
    /// # Errors
    /// [`ExecError::Program`] when tensors do not fit an operation; when the device has no kernel for one.
    fn tables(&self, program: &Program) -> Result<Self::Tables, ExecError>;
}

/// CPU ranks: their kernels follow the bands of a mask as they are, so that Programs have no tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DescribedCpu;

impl fmt::Display for DescribedCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::KIND)
    }
}

impl DescribedDevice for DescribedCpu {
    const KIND: &'static str = "a CPU";
    type Tables = ();

    fn tables(&self, _program: &Program) -> Result<(), ExecError> {
        Ok(())
    }
}
