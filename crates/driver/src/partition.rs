//! Green contexts: SMs divided between communication and computation.

use std::mem;
use std::ptr;

use cudarc::driver::sys::{
    CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevice, CUgreenCtx, CUstream,
};

use crate::library::Driver;
use crate::{CudaError, Device};

/// A GPU's multiprocessors in two sets that share none, one for communication and one for computation ("green contexts"). Streams
/// of either run on its multiprocessors only.
pub struct Partition {
    device: Device,
    communication: CUgreenCtx,
    computation: CUgreenCtx,
}

// SAFETY: contexts may be used from any thread.
unsafe impl Send for Partition {}
// SAFETY: as above.
unsafe impl Sync for Partition {}

/// Which of the two sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// For communication.
    Communication,
    /// For computation.
    Computation,
}

impl Partition {
    /// At least `workers` multiprocessors for communication, as many more as the device deals out together.
    ///
    /// # Errors
    /// When the driver or the device cannot, or nothing would be left.
    pub fn new(device: &Device, workers: u32) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let functions = driver.green()?;
        let handle = device.handle();
        // SAFETY: the resources are plain data for which all zeros are valid; pointers are to locals of the right types.
        let (group, rest) = unsafe {
            let mut all: CUdevResource = mem::zeroed();
            let kind = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
            let code = (functions.cuDeviceGetDevResource)(handle, &mut all, kind);
            driver.check("cuDeviceGetDevResource", code)?;
            let (mut group, mut rest): (CUdevResource, CUdevResource) = (mem::zeroed(), mem::zeroed());
            let mut count = 1;
            let code =
                (functions.cuDevSmResourceSplitByCount)(&mut group, &mut count, &all, &mut rest, 0, workers);
            driver.check("cuDevSmResourceSplitByCount", code)?;
            (group, rest)
        };
        let communication = green(&driver, handle, group)?;
        let computation = green(&driver, handle, rest).inspect_err(|_| {
            // SAFETY: made just now, and nothing is on it.
            unsafe { (functions.cuGreenCtxDestroy)(communication) };
        })?;
        Ok(Self { device: device.clone(), communication, computation })
    }

    /// A stream on one of the sets, which must live as long.
    pub(crate) fn stream(&self, part: Part, flags: u32, priority: i32) -> Result<CUstream, CudaError> {
        let driver = self.device.bind()?;
        let context = match part {
            Part::Communication => self.communication,
            Part::Computation => self.computation,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local, the context is alive.
        let code = unsafe { (driver.green()?.cuGreenCtxStreamCreate)(&mut raw, context, flags, priority) };
        driver.check("cuGreenCtxStreamCreate", code)?;
        Ok(raw)
    }
}

/// A context of some multiprocessors.
fn green(driver: &Driver, device: CUdevice, mut resource: CUdevResource) -> Result<CUgreenCtx, CudaError> {
    const DEFAULT_STREAM: u32 = 1;
    let functions = driver.green()?;
    let mut desc: CUdevResourceDesc = ptr::null_mut();
    let mut context: CUgreenCtx = ptr::null_mut();
    // SAFETY: pointers are to locals of the right types; the description is the driver's own.
    unsafe {
        let code = (functions.cuDevResourceGenerateDesc)(&mut desc, &mut resource, 1);
        driver.check("cuDevResourceGenerateDesc", code)?;
        driver.check(
            "cuGreenCtxCreate",
            (functions.cuGreenCtxCreate)(&mut context, desc, device, DEFAULT_STREAM),
        )?;
    }
    Ok(context)
}

impl Drop for Partition {
    fn drop(&mut self) {
        self.device.release(|driver| {
            let functions = driver.green()?;
            for context in [self.communication, self.computation] {
                // SAFETY: made in new; streams on it keep this value alive.
                driver.check("cuGreenCtxDestroy", unsafe { (functions.cuGreenCtxDestroy)(context) })?;
            }
            Ok(())
        });
    }
}
