use std::sync::Arc;

use counterpoint_exec::{ElementTypes, Ends, ExecError, Machine, World, check_memory};
use counterpoint_plan::DType;

use super::clock::Clock;
use super::{CudaBackend, exec_error};
use crate::{CudaError, CudaTransport, Device, compiler_version};

/// Whether a run measures its operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// Every operation, by events around it: what a timeline needs.
    #[default]
    Spans,
    /// Nothing: the fewest calls, for benchmarks of a whole run.
    Off,
}

/// The GPUs of this process. Ranks are dealt out to them in turn: on one GPU they share it.
#[derive(Clone, Debug)]
pub struct CudaMachine {
    devices: Vec<Device>,
    timing: Timing,
}

impl CudaMachine {
    /// These devices, each of which must be able to read the others' memory.
    ///
    /// # Errors
    /// [`CudaError::NoNvrtc`] when there is no compiler for the kernels; the driver's refusal.
    ///
    /// # Panics
    /// When there is no device.
    pub fn new(devices: Vec<Device>, timing: Timing) -> Result<Self, CudaError> {
        assert!(!devices.is_empty(), "a machine has a device");
        compiler_version()?;
        for device in &devices {
            for peer in devices.iter().filter(|peer| *peer != device) {
                device.enable_access(peer)?;
            }
        }
        Ok(Self { devices, timing })
    }

    /// All ranks on the first GPU.
    ///
    /// # Errors
    /// When there is no driver, GPU or compiler.
    pub fn open(timing: Timing) -> Result<Self, CudaError> {
        Self::new(vec![Device::open(0)?], timing)
    }

    /// The devices.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }
}

impl Machine for CudaMachine {
    type Backend = CudaBackend;
    type Transport = CudaTransport;

    fn element_types(&self) -> ElementTypes {
        ElementTypes { tensors: &[DType::F32, DType::Bf16, DType::F16], sums: &[DType::F32] }
    }

    fn connect(&self, world: &Arc<World>) -> Result<Vec<Ends<Self>>, ExecError> {
        let clocks: Vec<Arc<Clock>> = self.devices.iter().map(|_| Arc::default()).collect();
        let device_of = |rank: usize| rank % self.devices.len();
        CudaTransport::connect(world, (0..world.size()).map(|rank| self.devices[device_of(rank)].clone()))
            .into_iter()
            .enumerate()
            .map(|(rank, transport)| {
                let place = device_of(rank);
                let (device, clock) = (&self.devices[place], clocks[place].clone());
                let backend = CudaBackend::new(world, rank, device, self.timing, clock)?;
                Ok((backend, transport))
            })
            .collect()
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(host)?;
        let mut available = 0u64;
        for device in &self.devices {
            let memory = device.memory().map_err(|error| exec_error(0, "the memory of a device", error))?;
            available = available.saturating_add(memory.free as u64);
        }
        if ranks > available {
            return Err(ExecError::OutOfMemory { needed: ranks, available });
        }
        Ok(())
    }
}
