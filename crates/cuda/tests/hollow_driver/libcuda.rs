//! A driver without a GPU, for tests of what the host does: compiled by itself as `libcuda.so.1` ([`super`] says how). It keeps books of
//! memory, streams and events, copies to and from the host at once, and leaves memory of a device as it is: no kernel runs. A handle that is gone is an error, as it is
//! of the driver. Memory of another process that is opened is memory of one's own, for nothing is ever read there.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;
const NOT_SUPPORTED: u32 = 801;

/// What has been made and is not gone.
struct Books {
    /// Sizes and numbers, by address.
    memory: BTreeMap<usize, (usize, u64)>,
    streams: BTreeSet<usize>,
    events: BTreeSet<usize>,
    next: usize,
}

static BOOKS: Mutex<Books> = Mutex::new(Books {
    memory: BTreeMap::new(),
    streams: BTreeSet::new(),
    events: BTreeSet::new(),
    next: 0x1000,
});

thread_local! {
    /// The context that is current.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Its capture mode.
    static MODE: Cell<c_int> = const { Cell::new(0) };
}

fn books() -> MutexGuard<'static, Books> {
    BOOKS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Books {
    fn handle(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    fn allocate(&mut self, bytes: usize) -> usize {
        let (read_write, private_anonymous) = (3, 0x22);
        // SAFETY: new memory, all zero, which nobody has.
        let address = unsafe { mmap(std::ptr::null_mut(), bytes, read_write, private_anonymous, -1, 0) };
        let number = self.handle() as u64;
        self.memory.insert(address as usize, (bytes, number));
        address as usize
    }

    /// The allocation that an address lies in.
    fn find(&self, address: usize) -> Option<(usize, usize, u64)> {
        let (base, (bytes, number)) = self.memory.range(..=address).next_back()?;
        (address < base + bytes).then_some((*base, *bytes, *number))
    }

    fn has_stream(&self, stream: usize) -> bool {
        // 0 to 2 are the default streams.
        stream <= 2 || self.streams.contains(&stream)
    }
}

unsafe extern "C" {
    fn mmap(at: *mut c_void, bytes: usize, access: c_int, flags: c_int, file: c_int, from: i64) -> *mut c_void;
    fn munmap(at: *mut c_void, bytes: usize) -> c_int;
}

/// Functions of the driver, by their C names, each with what it does; those on streams fail where the stream is gone.
macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*) $body:block)*) => {
        $(
            /// # Safety
            /// As of the driver's function of this name.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
                // SAFETY: the caller's promise: pointers are to what the driver may write.
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks)]
                unsafe { $body }
            }
        )*
    };
}

fn on(stream: usize, work: impl FnOnce()) -> u32 {
    if !books().has_stream(stream) {
        return INVALID_HANDLE;
    }
    work();
    0
}

/// What names something to other processes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Handle([usize; 8]);

/// A kernel that is loaded: where each of its arguments begins, and its bytes.
struct Kernels(Vec<(String, Vec<(usize, usize)>)>);

/// # Safety
/// `at` is the first byte of a cubin, which is as long as it says.
unsafe fn kernels(at: *const u8) -> Kernels {
    // SAFETY: the caller's promise.
    let number = |offset: usize, bytes: usize| {
        (0..bytes).fold(0usize, |sum, byte| sum | usize::from(unsafe { *at.add(offset + byte) }) << (8 * byte))
    };
    let (table, size, count, names) = (number(0x28, 8), number(0x3a, 2), number(0x3c, 2), number(0x3e, 2));
    let names = number(table + names * size + 0x18, 8);
    let mut found = Vec::new();
    for header in (0..count).map(|index| table + index * size) {
        let name: Vec<u8> = (names + number(header, 4)..).map(|at| number(at, 1) as u8).take_while(|byte| *byte != 0).collect();
        let name = String::from_utf8_lossy(&name).into_owned();
        let Some(kernel) = name.strip_prefix(".nv.info.") else { continue };
        let (mut begin, bytes) = (number(header + 0x18, 8), number(header + 0x20, 8));
        let end = begin + bytes;
        let mut arguments = BTreeMap::new();
        while begin + 4 <= end {
            let (format, kind, payload) = (number(begin, 1), number(begin + 1, 1), number(begin + 2, 2));
            if kind == 0x17 {
                arguments.insert(number(begin + 8, 2), (number(begin + 10, 2), number(begin + 12, 4) >> 18));
            }
            begin += 4 + if format == 4 { payload } else { 0 };
        }
        found.push((kernel.to_owned(), arguments.into_values().collect()));
    }
    Kernels(found)
}

functions! {
    cuInit(_flags: c_uint) { 0 }
    cuDriverGetVersion(version: *mut c_int) { *version = 13_000; 0 }
    cuGetErrorName(_code: u32, text: *mut *const c_char) { *text = c"AN_ERROR".as_ptr(); 0 }
    cuGetErrorString(_code: u32, text: *mut *const c_char) { *text = c"as the driver without a GPU has it".as_ptr(); 0 }
    cuDeviceGetCount(count: *mut c_int) { *count = 4; 0 }
    cuDeviceGet(device: *mut c_int, ordinal: c_int) { *device = ordinal; 0 }
    cuDeviceGetName(name: *mut c_char, bytes: c_int, _device: c_int) {
        let text = c"NVIDIA H200";
        std::ptr::copy_nonoverlapping(text.as_ptr(), name, text.count_bytes().min(bytes as usize - 1) + 1);
        0
    }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) { *uuid = [device as u8; 16]; 0 }
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        // Multiprocessors, level 2 cache, capability, shared memory of a block.
        *value = match attribute { 16 => 132, 38 => 50 << 20, 75 => 9, 76 => 0, 97 => 232_448, _ => 1 };
        0
    }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { *bytes = 140 << 30; 0 }
    cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) { *context = 0x100 + device as usize; 0 }
    cuDevicePrimaryCtxRelease_v2(_device: c_int) { 0 }
    cuDeviceCanAccessPeer(can: *mut c_int, _device: c_int, _peer: c_int) { *can = 1; 0 }
    cuCtxGetCurrent(context: *mut usize) { *context = CURRENT.get(); 0 }
    cuCtxSetCurrent(context: usize) { CURRENT.set(context); 0 }
    cuCtxSynchronize() { 0 }
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) { *least = 0; *greatest = -5; 0 }
    cuCtxEnablePeerAccess(_peer: usize, _flags: c_uint) { 0 }
    cuStreamCreateWithPriority(stream: *mut usize, _flags: c_uint, _priority: c_int) {
        let mut books = books();
        *stream = books.handle();
        books.streams.insert(*stream);
        0
    }
    cuStreamDestroy_v2(stream: usize) { if books().streams.remove(&stream) { 0 } else { INVALID_HANDLE } }
    cuStreamSynchronize(stream: usize) { on(stream, || ()) }
    cuStreamQuery(stream: usize) { on(stream, || ()) }
    cuStreamWaitEvent(stream: usize, event: usize, _flags: c_uint) {
        if books().events.contains(&event) { on(stream, || ()) } else { INVALID_HANDLE }
    }
    cuStreamIsCapturing(stream: usize, status: *mut c_int) { on(stream, || *status = 0) }
    cuStreamGetCaptureInfo_v2(
        stream: usize, status: *mut c_int, _id: *mut u64, _graph: *mut usize, _nodes: *mut usize, _count: *mut usize
    ) { on(stream, || *status = 0) }
    cuStreamBeginCapture_v2(_stream: usize, _mode: c_int) { NOT_SUPPORTED }
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int) { *mode = MODE.replace(*mode); 0 }
    cuStreamEndCapture(_stream: usize, _graph: *mut usize) { NOT_SUPPORTED }
    cuEventCreate(event: *mut usize, _flags: c_uint) {
        let mut books = books();
        *event = books.handle();
        books.events.insert(*event);
        0
    }
    cuEventDestroy_v2(event: usize) { if books().events.remove(&event) { 0 } else { INVALID_HANDLE } }
    cuEventRecord(event: usize, stream: usize) {
        if books().events.contains(&event) { on(stream, || ()) } else { INVALID_HANDLE }
    }
    cuEventQuery(event: usize) { if books().events.contains(&event) { 0 } else { INVALID_HANDLE } }
    cuEventSynchronize(_event: usize) { 0 }
    cuEventElapsedTime(milliseconds: *mut f32, _start: usize, _end: usize) { *milliseconds = 0.0; 0 }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) { *free = 100 << 30; *total = 140 << 30; 0 }
    cuMemAlloc_v2(address: *mut usize, bytes: usize) { *address = books().allocate(bytes); 0 }
    cuMemFree_v2(address: usize) {
        let Some((bytes, _)) = books().memory.remove(&address) else { return INVALID_VALUE };
        munmap(address as *mut c_void, bytes);
        0
    }
    cuMemHostAlloc(address: *mut usize, bytes: usize, _flags: c_uint) { *address = books().allocate(bytes); 0 }
    cuMemFreeHost(address: usize) {
        let Some((bytes, _)) = books().memory.remove(&address) else { return INVALID_VALUE };
        munmap(address as *mut c_void, bytes);
        0
    }
    cuMemGetAddressRange_v2(base: *mut usize, bytes: *mut usize, address: usize) {
        let Some(found) = books().find(address) else { return INVALID_VALUE };
        (*base, *bytes) = (found.0, found.1);
        0
    }
    cuPointerGetAttribute(value: *mut u64, _attribute: c_int, address: usize) {
        let Some((_, _, number)) = books().find(address) else { return INVALID_VALUE };
        *value = number;
        0
    }
    cuIpcGetMemHandle(handle: *mut Handle, address: usize) {
        let Some((_, bytes, number)) = books().find(address) else { return INVALID_VALUE };
        *handle = Handle([bytes, number as usize, 0, 0, 0, 0, 0, 0]);
        0
    }
    cuIpcOpenMemHandle_v2(address: *mut usize, handle: Handle, _flags: c_uint) {
        *address = books().allocate(handle.0[0]);
        0
    }
    cuIpcCloseMemHandle(address: usize) { cuMemFree_v2(address) }
    cuIpcGetEventHandle(handle: *mut Handle, event: usize) { *handle = Handle([event; 8]); 0 }
    cuIpcOpenEventHandle(event: *mut usize, _handle: Handle) { cuEventCreate(event, 0) }
    cuMemcpyAsync(_to: usize, _from: usize, _bytes: usize, stream: usize) { on(stream, || ()) }
    cuMemcpy2DAsync_v2(_copy: *const c_void, stream: usize) { on(stream, || ()) }
    cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        on(stream, || std::ptr::copy(from as *const u8, to as *mut u8, bytes))
    }
    cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) {
        on(stream, || std::ptr::copy(from as *const u8, to as *mut u8, bytes))
    }
    cuMemsetD8Async(_address: usize, _value: u8, _count: usize, stream: usize) { on(stream, || ()) }
    cuMemsetD32Async(_address: usize, _value: c_uint, _count: usize, stream: usize) { on(stream, || ()) }
    cuModuleLoadData(module: *mut usize, image: *const u8) {
        *module = Box::into_raw(Box::new(kernels(image))) as usize;
        0
    }
    cuModuleUnload(_module: usize) { 0 }
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        let name = std::ffi::CStr::from_ptr(name).to_string_lossy();
        let Kernels(kernels) = &*(module as *const Kernels);
        let Some((_, arguments)) = kernels.iter().find(|(kernel, _)| *kernel == name) else { return INVALID_VALUE };
        *function = std::ptr::from_ref(arguments) as usize;
        0
    }
    cuFuncGetAttribute(value: *mut c_int, attribute: c_int, _function: usize) {
        // Threads of a block, shared memory, local memory, registers.
        *value = match attribute { 0 => 1024, 1 | 3 => 0, 4 => 128, _ => 0 };
        0
    }
    cuFuncSetAttribute(_function: usize, _attribute: c_int, _value: c_int) { 0 }
    cuFuncGetParamInfo(function: usize, index: usize, offset: *mut usize, size: *mut usize) {
        let arguments = &*(function as *const Vec<(usize, usize)>);
        let Some(argument) = arguments.get(index) else { return INVALID_VALUE };
        (*offset, *size) = *argument;
        0
    }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, _function: usize, _threads: c_int, _shared: usize) {
        *blocks = 1;
        0
    }
    cuOccupancyMaxActiveClusters(clusters: *mut c_int, _function: usize, _config: *const c_void) { *clusters = 66; 0 }
    cuLaunchKernelEx(config: *const usize, _function: usize, _arguments: *mut usize, _extra: *mut usize) {
        // The stream lies behind seven words of 32 bits.
        on(*config.add(4), || ())
    }
    cuGraphInstantiateWithFlags(_executable: *mut usize, _graph: usize, _flags: u64) { NOT_SUPPORTED }
    cuGraphLaunch(_executable: usize, _stream: usize) { NOT_SUPPORTED }
    cuGraphUpload(_executable: usize, _stream: usize) { NOT_SUPPORTED }
    cuGraphGetNodes(_graph: usize, _nodes: *mut usize, _count: *mut usize) { NOT_SUPPORTED }
    cuGraphNodeGetType(_node: usize, _kind: *mut c_int) { NOT_SUPPORTED }
    cuGraphKernelNodeGetAttribute(_node: usize, _attribute: c_int, _value: *mut c_void) { NOT_SUPPORTED }
    cuGraphKernelNodeGetParams_v2(_node: usize, _values: *mut c_void) { NOT_SUPPORTED }
    cuGraphExecKernelNodeSetParams_v2(_executable: usize, _node: usize, _values: *const c_void) { NOT_SUPPORTED }
    cuGraphMemsetNodeGetParams(_node: usize, _values: *mut c_void) { NOT_SUPPORTED }
    cuGraphExecMemsetNodeSetParams(_executable: usize, _node: usize, _values: *const c_void, _context: usize) { NOT_SUPPORTED }
    cuGraphMemcpyNodeGetParams(_node: usize, _values: *mut c_void) { NOT_SUPPORTED }
    cuGraphExecMemcpyNodeSetParams(_executable: usize, _node: usize, _values: *const c_void, _context: usize) { NOT_SUPPORTED }
    cuGraphDestroy(_graph: usize) { 0 }
    cuGraphExecDestroy(_executable: usize) { 0 }
    cuTensorMapEncodeTiled(
        _map: *mut c_void, _element: c_int, _rank: u32, _address: usize, _dims: *const u64, _strides: *const u64,
        _box_dims: *const u32, _element_strides: *const u32, _interleave: c_int, _swizzle: c_int, _promotion: c_int, _fill: c_int
    ) { 0 }
}
