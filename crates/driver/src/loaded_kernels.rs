//! The kernels that are loaded on a device, with what the driver says of their arguments and registers.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};

use crate::compile::count_arguments;
use crate::library::{Driver, call};
use crate::{CudaError, KernelSource, LaunchFault};

/// What a compiled kernel takes, as the driver says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionAttributes {
    /// Registers of each thread when it starts.
    pub registers: u32,
    /// Bytes of local memory of each thread: 0 unless registers spill or an array is indexed at run time.
    pub local_bytes: usize,
    /// Bytes of shared memory that are declared with a size.
    pub static_shared_bytes: usize,
    /// Threads of the largest block.
    pub max_threads: u32,
    /// Bytes of shared memory that a launch may add.
    pub max_dynamic_shared_bytes: usize,
}

/// The kernels that are loaded on a device. They belong to it, not to the functions that point to them, and go when it goes.
#[derive(Default)]
pub(crate) struct LoadedKernels {
    loaded: Mutex<BTreeMap<KernelSource, Arc<Loaded>>>,
    /// Held by who compiles.
    compiling: Mutex<()>,
}

/// A kernel that is loaded.
pub(crate) struct Loaded {
    pub(crate) name: String,
    module: CUmodule,
    pub(crate) function: CUfunction,
    pub(crate) attributes: FunctionAttributes,
    /// The sizes of its arguments, in order.
    pub(crate) argument_bytes: Vec<usize>,
}

// SAFETY: modules and functions may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl LoadedKernels {
    /// Keeps others from compiling meanwhile: ranks that share a device mostly want the same kernels.
    pub(crate) fn begin_compiling(&self) -> MutexGuard<'_, ()> {
        self.compiling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel of a source, where it is loaded.
    pub(crate) fn get(&self, source: &KernelSource) -> Option<Arc<Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).get(source).cloned()
    }

    /// Loads a compiled source, unless another thread was faster. The device's context is current; blocks have so many bytes of shared
    /// memory at most.
    pub(crate) fn load(
        &self,
        driver: &Driver,
        shared_bytes_per_block: usize,
        source: &KernelSource,
        image: &[u8],
    ) -> Result<(), CudaError> {
        let mut kernels = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !kernels.contains_key(source) {
            kernels.insert(
                source.clone(),
                Arc::new(Loaded::new(driver, shared_bytes_per_block, source.name(), image)?),
            );
        }
        Ok(())
    }

    /// Unloads all of them. Their context is current, and no function of them is left.
    pub(crate) fn unload(&self, driver: &Driver) {
        let kernels = std::mem::take(&mut *self.loaded.lock().unwrap_or_else(PoisonError::into_inner));
        for kernel in kernels.values() {
            // SAFETY: loaded in new, and functions keep the device open. An error means that the context is already lost.
            unsafe { (driver.cuModuleUnload)(kernel.module) };
        }
    }
}

impl Loaded {
    fn new(
        driver: &Driver,
        shared_bytes_per_block: usize,
        name: &str,
        image: &[u8],
    ) -> Result<Self, CudaError> {
        let bad_name =
            || CudaError::Launch { kernel: name.to_owned(), reason: LaunchFault::NulInName.into() };
        let symbol = CString::new(name).map_err(|_| bad_name())?;
        let mut module = ptr::null_mut();
        let mut function = ptr::null_mut();
        // SAFETY: the image is a cubin, whose header says how long it is; the name is terminated. The module is unloaded with
        // the device.
        unsafe {
            call!(driver, cuModuleLoadData(&mut module, image.as_ptr().cast()))?;
            call!(driver, cuModuleGetFunction(&mut function, module, symbol.as_ptr()))?;
        }
        let attribute = |attribute: CUfunction_attribute| -> Result<usize, CudaError> {
            let mut value = 0;
            // SAFETY: the function is loaded, the pointer is to a local.
            unsafe { call!(driver, cuFuncGetAttribute(&mut value, attribute, function)) }?;
            Ok(usize::try_from(value).unwrap_or(0))
        };
        use CUfunction_attribute as A;
        let static_shared_bytes = attribute(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let max_dynamic_shared_bytes = shared_bytes_per_block.saturating_sub(static_shared_bytes);
        // Only a permission: what a launch takes is what counts for occupancy.
        let allow = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        unsafe { call!(driver, cuFuncSetAttribute(function, allow, max_dynamic_shared_bytes as c_int)) }?;
        let attributes = FunctionAttributes {
            registers: attribute(A::CU_FUNC_ATTRIBUTE_NUM_REGS)? as u32,
            local_bytes: attribute(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_shared_bytes,
            max_threads: attribute(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)? as u32,
            max_dynamic_shared_bytes,
        };
        // Asking beyond the last argument is an error, which tools that watch for errors would report.
        let count = count_arguments(image, name).unwrap_or(usize::MAX);
        let mut argument_bytes = Vec::new();
        while argument_bytes.len() < count {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the function is loaded, the pointers are to locals.
            let code = unsafe {
                (driver.cuFuncGetParamInfo)(function, argument_bytes.len(), &mut offset, &mut size)
            };
            if code != 0 {
                break;
            }
            argument_bytes.push(size);
        }
        Ok(Self { name: name.to_owned(), module, function, attributes, argument_bytes })
    }
}
