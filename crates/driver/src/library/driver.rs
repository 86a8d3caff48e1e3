//! The CUDA driver API, looked up at run time, with its results as errors in words.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdevResource,
    CUdevResourceDesc, CUdevResourceType, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeType, CUgreenCtx, CUipcEventHandle,
    CUipcMemHandle, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUmodule,
    CUpointer_attribute, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus, CUtensorMap,
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, CUuuid,
};
use libloading::Library;

use super::driver_calls::{self, DriverCalls};
use super::table::function_table;
use crate::CudaError;

function_table! {
    /// Functions of the driver API, by their C names.
    counted DriverFunctions {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuGetErrorName(code: u32, text: *mut *const c_char);
        cuGetErrorString(code: u32, text: *mut *const c_char);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
        cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
        cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        cuCtxGetCurrent(context: *mut CUcontext);
        cuCtxSetCurrent(context: CUcontext);
        cuCtxSynchronize();
        cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
        cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
        cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamSynchronize(stream: CUstream);
        cuStreamQuery(stream: CUstream);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
        cuStreamGetCaptureInfo_v2(
            stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut c_ulonglong, graph: *mut CUgraph,
            dependencies: *mut *const CUgraphNode, count: *mut usize,
        );
        cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
        cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
        cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        cuEventCreate(event: *mut CUevent, flags: c_uint);
        cuEventDestroy_v2(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventQuery(event: CUevent);
        cuEventSynchronize(event: CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: CUdeviceptr);
        cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost(address: *mut c_void);
        cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
        cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
        cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);
        cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
        cuIpcCloseMemHandle(address: CUdeviceptr);
        cuIpcGetEventHandle(handle: *mut CUipcEventHandle, event: CUevent);
        cuIpcOpenEventHandle(event: *mut CUevent, handle: CUipcEventHandle);
        cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream);
        cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemsetD8Async(address: CUdeviceptr, value: u8, count: usize, stream: CUstream);
        cuMemsetD32Async(address: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
        cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        cuModuleUnload(module: CUmodule);
        cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
        cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
        cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, size: *mut usize);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int, function: CUfunction, block_size: c_int, shared_bytes: usize,
        );
        cuOccupancyMaxActiveClusters(clusters: *mut c_int, function: CUfunction, config: *const CUlaunchConfig);
        cuLaunchKernelEx(
            config: *const CUlaunchConfig, function: CUfunction, arguments: *mut *mut c_void, extra: *mut *mut c_void,
        );
        cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
        cuGraphLaunch(executable: CUgraphExec, stream: CUstream);
        cuGraphUpload(executable: CUgraphExec, stream: CUstream);
        cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
        cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType);
        cuGraphKernelNodeGetAttribute(
            node: CUgraphNode, attribute: CUlaunchAttributeID, value: *mut CUlaunchAttributeValue,
        );
        cuGraphKernelNodeGetParams_v2(node: CUgraphNode, values: *mut CUDA_KERNEL_NODE_PARAMS);
        cuGraphExecKernelNodeSetParams_v2(
            executable: CUgraphExec, node: CUgraphNode, values: *const CUDA_KERNEL_NODE_PARAMS,
        );
        cuGraphMemsetNodeGetParams(node: CUgraphNode, values: *mut CUDA_MEMSET_NODE_PARAMS);
        cuGraphExecMemsetNodeSetParams(
            executable: CUgraphExec, node: CUgraphNode, values: *const CUDA_MEMSET_NODE_PARAMS, context: CUcontext,
        );
        cuGraphMemcpyNodeGetParams(node: CUgraphNode, values: *mut CUDA_MEMCPY3D);
        cuGraphExecMemcpyNodeSetParams(
            executable: CUgraphExec, node: CUgraphNode, values: *const CUDA_MEMCPY3D, context: CUcontext,
        );
        cuGraphDestroy(graph: CUgraph);
        cuGraphExecDestroy(executable: CUgraphExec);
        cuTensorMapEncodeTiled(
            map: *mut CUtensorMap, element: CUtensorMapDataType, rank: u32, address: *mut c_void, dims: *const u64,
            strides: *const u64, box_dims: *const u32, element_strides: *const u32, interleave: CUtensorMapInterleave,
            swizzle: CUtensorMapSwizzle, promotion: CUtensorMapL2promotion, fill: CUtensorMapFloatOOBfill,
        );
    }
}

function_table! {
    /// Functions of the driver API by which multiprocessors are dealt out. Not every driver has them.
    pub(crate) GreenFunctions {
        cuDeviceGetDevResource(device: CUdevice, resource: *mut CUdevResource, kind: CUdevResourceType);
        cuDevSmResourceSplitByCount(
            groups: *mut CUdevResource, count: *mut c_uint, all: *const CUdevResource, rest: *mut CUdevResource,
            flags: c_uint, least: c_uint,
        );
        cuDevResourceGenerateDesc(desc: *mut CUdevResourceDesc, resources: *mut CUdevResource, count: c_uint);
        cuGreenCtxCreate(context: *mut CUgreenCtx, desc: CUdevResourceDesc, device: CUdevice, flags: c_uint);
        cuGreenCtxDestroy(context: CUgreenCtx);
        cuGreenCtxStreamCreate(stream: *mut CUstream, context: CUgreenCtx, flags: c_uint, priority: c_int);
    }
}

/// The driver: opened and initialised once a process, on first use.
pub(crate) struct Driver {
    functions: DriverFunctions,
    /// The same, each of which is counted before it is called.
    counted: OnceLock<DriverFunctions>,
    /// How many threads count what they call.
    counting: AtomicUsize,
    /// Once it has been asked.
    version: OnceLock<(u32, u32)>,
    /// Or the name of one that is missing.
    green: Result<GreenFunctions, &'static str>,
    // Never closed: handles of its own live in statics and other threads.
    _library: Library,
}

impl std::ops::Deref for Driver {
    type Target = DriverFunctions;

    fn deref(&self) -> &DriverFunctions {
        match self.counting.load(Ordering::Relaxed) {
            0 => &self.functions,
            _ => self.counted.get().unwrap_or(&self.functions),
        }
    }
}

/// Calls a function of the driver by its C name and turns its result into one of ours:
/// `call!(driver, cuMemFree_v2(address))`. The caller puts it into an `unsafe` block with its reason.
macro_rules! call {
    ($driver:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let driver = &$driver;
        driver.check(stringify!($function), (driver.$function)($($argument),*))
    }};
}
pub(crate) use call;

const SUCCESS: u32 = 0;
const NO_DEVICE: u32 = 100;
const NOT_READY: u32 = 600;

impl Driver {
    /// The process's driver.
    pub(crate) fn get() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let name = "libcuda.so.1";
        // SAFETY: the driver's initialisers do not depend on us.
        let library = unsafe { super::open(name) }.map_err(|reason| CudaError::NoDriver { reason })?;
        let functions = DriverFunctions::resolve(&library).map_err(|symbol| CudaError::MissingSymbol {
            path: PathBuf::from(name),
            symbol,
            remedy: "install a driver for CUDA 12.4 (550) or newer",
        })?;
        let green = GreenFunctions::resolve(&library);
        let (counted, counting) = (OnceLock::new(), AtomicUsize::new(0));
        let version = OnceLock::new();
        let driver = Self { functions, counted, counting, version, green, _library: library };
        // SAFETY: cuInit may be called any number of times, from any thread.
        match unsafe { (driver.cuInit)(0) } {
            SUCCESS => Ok(driver),
            NO_DEVICE => Err(CudaError::NoDevice { text: driver.error_text(NO_DEVICE) }),
            code => {
                let text =
                    format!("cuInit: {} ({code}), {}", driver.error_name(code), driver.error_text(code));
                Err(CudaError::NoDevice { text })
            }
        }
    }

    /// Runs `work` on this thread, and counts the functions of the driver that it calls meanwhile.
    pub(super) fn count_calls<R>(&'static self, work: impl FnOnce() -> R) -> (R, DriverCalls) {
        self.counted.get_or_init(|| DriverFunctions::counted(&self.functions));
        self.counting.fetch_add(1, Ordering::Relaxed);
        let counted = driver_calls::count(work);
        self.counting.fetch_sub(1, Ordering::Relaxed);
        counted
    }

    /// The functions by which multiprocessors are dealt out.
    pub(crate) fn green(&self) -> Result<&GreenFunctions, CudaError> {
        self.green.as_ref().map_err(|&symbol| CudaError::MissingSymbol {
            path: PathBuf::from("libcuda.so.1"),
            symbol,
            remedy: "install a driver for CUDA 12.5 (555) or newer",
        })
    }

    /// The newest CUDA version that the driver supports, such as (13, 0).
    pub(crate) fn version(&self) -> Result<(u32, u32), CudaError> {
        if let Some(known) = self.version.get() {
            return Ok(*known);
        }
        let mut version = 0;
        // SAFETY: the pointer is to a local of the right type.
        unsafe { call!(self, cuDriverGetVersion(&mut version)) }?;
        let version = version.unsigned_abs();
        Ok(*self.version.get_or_init(|| (version / 1000, version % 1000 / 10)))
    }

    /// A result as ours.
    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(CudaError::Driver { call, code, name: self.error_name(code), text: self.error_text(code) })
    }

    /// The result of a query: whether what it asked about is done.
    pub(crate) fn check_done(&self, call: &'static str, code: u32) -> Result<bool, CudaError> {
        if code == NOT_READY {
            return Ok(false);
        }
        self.check(call, code).map(|()| true)
    }

    fn error_name(&self, code: u32) -> String {
        self.describe(self.functions.cuGetErrorName, code)
    }

    fn error_text(&self, code: u32) -> String {
        self.describe(self.functions.cuGetErrorString, code)
    }

    fn describe(&self, function: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, code: u32) -> String {
        let mut text = ptr::null();
        // SAFETY: the driver sets the pointer to a string of its own, or to null when it does not know the code.
        unsafe {
            function(code, &mut text);
            if text.is_null() {
                return "unknown to this driver".to_owned();
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
