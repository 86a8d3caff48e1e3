//! Kernels of a device: compiled or found in the cache, loaded, ready to launch.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction;

use crate::compile::CubinCache;
use crate::library::call;
use crate::loaded_kernels::Loaded;
use crate::{CudaError, Device, FunctionAttributes, KernelSource, LaunchFault};

/// A kernel on a device, ready to launch. Cheap to clone. It stays loaded as long as the device is open.
#[derive(Clone)]
pub struct Function {
    device: Device,
    loaded: Arc<Loaded>,
}

impl Device {
    /// The kernel of a source: compiled on first use, found in the cache on disk, or loaded already.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn function(&self, source: &KernelSource) -> Result<Function, CudaError> {
        let mut functions = self.functions(std::slice::from_ref(source))?;
        Ok(functions.remove(0))
    }

    /// The kernels of several sources, in their order. Those that must be compiled are compiled at the same time.
    ///
    /// # Errors
    /// The first source's that cannot be compiled or loaded.
    pub fn functions(&self, sources: &[KernelSource]) -> Result<Vec<Function>, CudaError> {
        let kernels = self.kernels();
        let compiling = kernels.begin_compiling();
        let missing: Vec<_> = sources.iter().filter(|source| kernels.get(source).is_none()).collect();
        if !missing.is_empty() {
            let shared_bytes = self.properties().shared_bytes_per_block;
            for (source, cached) in missing.iter().zip(CubinCache::of_process().cubins(&missing)) {
                let cached = cached?;
                kernels.load(&*self.bind()?, shared_bytes, source, &cached.cubin.image)?;
            }
        }
        drop(compiling);
        let missing = |source: &KernelSource| CudaError::Launch {
            kernel: source.name().to_owned(),
            reason: LaunchFault::NotLoaded.into(),
        };
        let get = |source: &KernelSource| kernels.get(source).ok_or_else(|| missing(source));
        sources.iter().map(|source| Ok(Function { device: self.clone(), loaded: get(source)? })).collect()
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.loaded.name
    }

    /// The device that it is loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it takes.
    pub fn attributes(&self) -> FunctionAttributes {
        self.loaded.attributes
    }

    /// The sizes of its arguments in bytes, in order.
    pub fn argument_bytes(&self) -> &[usize] {
        &self.loaded.argument_bytes
    }

    /// How many of its blocks run on one multiprocessor at once.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn blocks_per_sm(&self, threads: u32, dynamic_shared_bytes: usize) -> Result<u32, CudaError> {
        let driver = self.device.bind()?;
        let mut blocks = 0;
        let function = self.loaded.function;
        // SAFETY: the function is loaded, the pointer is to a local.
        unsafe {
            call!(
                driver,
                cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &mut blocks,
                    function,
                    threads as c_int,
                    dynamic_shared_bytes
                )
            )
        }?;
        Ok(blocks.unsigned_abs())
    }

    pub(crate) fn raw(&self) -> CUfunction {
        self.loaded.function
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Function({}, {:?})", self.loaded.name, self.device)
    }
}
