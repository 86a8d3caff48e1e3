//! Kernels loaded on a device: compiled or found in the cache, with what the driver says of their arguments and registers.

use std::collections::BTreeMap;
use std::ffi::{CString, c_int};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};

use crate::compile::{CubinCache, count_arguments};
use crate::library::{Driver, call};
use crate::{CudaError, Device, KernelSource};

/// A kernel on a device, ready to launch. Cheap to clone. It stays loaded as long as the device is open.
#[derive(Clone)]
pub struct Function {
    device: Device,
    loaded: Arc<Loaded>,
}

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
        // One caller at a time compiles: ranks that share a device mostly want the same kernels.
        let compiling = kernels.compiling.lock().unwrap_or_else(PoisonError::into_inner);
        let missing: Vec<_> = sources.iter().filter(|source| kernels.get(source).is_none()).collect();
        if !missing.is_empty() {
            for (source, cached) in missing.iter().zip(CubinCache::of_process().cubins(&missing)) {
                let cached = cached?;
                kernels.load(self, source, &cached.cubin.image)?;
            }
        }
        drop(compiling);
        let missing = |source: &KernelSource| CudaError::Launch {
            kernel: source.name().to_owned(),
            reason: "it was not loaded".to_owned(),
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

/// The kernels that are loaded on a device. They belong to it, not to the functions that point to them, and go when it goes.
#[derive(Default)]
pub(crate) struct LoadedKernels {
    loaded: Mutex<BTreeMap<KernelSource, Arc<Loaded>>>,
    compiling: Mutex<()>,
}

struct Loaded {
    name: String,
    module: CUmodule,
    function: CUfunction,
    attributes: FunctionAttributes,
    argument_bytes: Vec<usize>,
}

// SAFETY: modules and functions may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl LoadedKernels {
    fn get(&self, source: &KernelSource) -> Option<Arc<Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).get(source).cloned()
    }

    /// Loads a compiled source, unless another thread was faster.
    fn load(&self, device: &Device, source: &KernelSource, image: &[u8]) -> Result<(), CudaError> {
        let mut kernels = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !kernels.contains_key(source) {
            kernels.insert(source.clone(), Arc::new(Loaded::new(device, source.name(), image)?));
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
    fn new(device: &Device, name: &str, image: &[u8]) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let bad_name =
            || CudaError::Launch { kernel: name.to_owned(), reason: "its name holds a NUL".to_owned() };
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
        let max_dynamic_shared_bytes =
            device.properties().shared_bytes_per_block.saturating_sub(static_shared_bytes);
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
