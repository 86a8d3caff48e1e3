//! NVTX: what this process enqueues, reported to profilers by name (Nsight Systems, CUPTI), where one is attached.
//!
//! NVTX is a protocol, not a library: a profiler starts the process with `NVTX_INJECTION64_PATH`, the path of a library of its own. Whoever
//! has names opens that, calls `InitializeInjectionNvtx2` there with a function that gives tables, and the profiler writes its functions
//! into them. Where the variable is not set nothing is opened, and a range costs a comparison.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

/// The profiler's own variable.
const INJECTION: &str = "NVTX_INJECTION64_PATH";
/// The profiler's function, as NVTX 3 calls it.
const ENTRY: &[u8] = b"InitializeInjectionNvtx2\0";
/// Of NVTX.
const VERSION: u16 = 3;

/// Functions of NVTX's modules, each counted with the place 0, which has none (`NvtxCallbackModule`).
const COUNTS: [c_uint; 7] = [0, 16, 9, 15, 7, 16, 7];
const MOST: usize = 16;
/// The module of domains.
const CORE2: usize = 5;

/// A function of the profiler's, or null.
type Slot = AtomicPtr<c_void>;

/// What the profiler has written.
static SLOTS: [[Slot; MOST]; COUNTS.len()] =
    [const { [const { Slot::new(ptr::null_mut()) }; MOST] }; COUNTS.len()];
/// Where it writes: the places of a module's slots, the first of which is null, as is the one behind the last.
static TABLES: [[AtomicPtr<Slot>; MOST + 1]; COUNTS.len()] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; MOST + 1] }; COUNTS.len()];

/// `NvtxGetExportTableFunc_t`.
type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
/// `NvtxInitializeInjectionNvtxFunc_t`: whether it could be attached.
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    bytes: usize,
    get_module_function_table:
        unsafe extern "C" fn(c_uint, *mut *const AtomicPtr<Slot>, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    bytes: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

static CALLBACKS: Callbacks =
    Callbacks { bytes: size_of::<Callbacks>(), get_module_function_table: module_table };
static VERSION_INFO: VersionInfo = VersionInfo {
    bytes: size_of::<VersionInfo>(),
    version: VERSION as u32,
    reserved: 0,
    set_injection_version: ignore_version,
};

unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    const CALLBACKS_ID: u32 = 1;
    const VERSION_ID: u32 = 3;
    match id {
        CALLBACKS_ID => ptr::from_ref(&CALLBACKS).cast(),
        VERSION_ID => ptr::from_ref(&VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn module_table(
    module: c_uint,
    table: *mut *const AtomicPtr<Slot>,
    count: *mut c_uint,
) -> c_int {
    let module = module as usize;
    let Some(places) = TABLES.get(module).filter(|_| module > 0) else { return 0 };
    // SAFETY: each pointer is null or the profiler's own place for what it asks.
    unsafe {
        if !table.is_null() {
            *table = places.as_ptr();
        }
        if !count.is_null() {
            *count = COUNTS[module];
        }
    }
    1
}

extern "C" fn ignore_version(_version: u32) {}

/// `nvtxEventAttributes_t`.
#[repr(C)]
struct EventAttributes {
    version: u16,
    bytes: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

/// Of an attached profiler.
#[derive(Clone, Copy)]
struct Functions {
    create: Option<unsafe extern "C" fn(*const c_char) -> *mut c_void>,
    destroy: Option<unsafe extern "C" fn(*mut c_void)>,
    push: unsafe extern "C" fn(*mut c_void, *const EventAttributes) -> c_int,
    pop: unsafe extern "C" fn(*mut c_void) -> c_int,
}

impl Functions {
    /// Those of the process's profiler, which is asked for once: a profiler is attached from the start, or never.
    fn get() -> Option<Self> {
        static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
        *FUNCTIONS.get_or_init(|| {
            let path = std::env::var_os(INJECTION).filter(|path| !path.is_empty())?;
            // SAFETY: whoever started the process has named the profiler's library, to be opened by it.
            let library = unsafe { super::open(path) }.ok()?;
            // SAFETY: the signature is that of NVTX's header.
            let initialize: Initialize = unsafe { *library.get(ENTRY).ok()? };
            let functions = Self::attach(initialize)?;
            keep(library);
            Some(functions)
        })
    }

    /// Has a profiler write its functions; `None` where it does not want to be attached, or shows no ranges.
    fn attach(initialize: Initialize) -> Option<Self> {
        for module in 1..COUNTS.len() {
            for at in 1..COUNTS[module] as usize {
                let slot = ptr::from_ref(&SLOTS[module][at]).cast_mut();
                TABLES[module][at].store(slot, Ordering::Release);
            }
        }
        // SAFETY: a profiler's entry, which is given what NVTX gives.
        if unsafe { initialize(export_table) } == 0 {
            return None;
        }
        const PUSH: usize = 4;
        const POP: usize = 5;
        const CREATE: usize = 12;
        const DESTROY: usize = 14;
        let function = |at: usize| SLOTS[CORE2][at].load(Ordering::Acquire);
        if function(PUSH).is_null() || function(POP).is_null() {
            return None;
        }
        // SAFETY: the profiler has put functions of these signatures there, or left null, which is `None`.
        unsafe {
            Some(Self {
                create: mem::transmute::<
                    *mut c_void,
                    Option<unsafe extern "C" fn(*const c_char) -> *mut c_void>,
                >(function(CREATE)),
                destroy: mem::transmute::<*mut c_void, Option<unsafe extern "C" fn(*mut c_void)>>(function(
                    DESTROY,
                )),
                push: mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *const EventAttributes) -> c_int,
                >(function(PUSH)),
                pop: mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> c_int>(function(POP)),
            })
        }
    }
}

/// A profiler's library is never closed: its functions are called from any thread, until the process ends.
fn keep(library: Library) {
    mem::forget(library);
}

/// A domain of NVTX: ranges that a profiler shows together, under one name.
pub struct NvtxDomain {
    functions: Functions,
    raw: *mut c_void,
}

// SAFETY: NVTX's functions may be called from any thread.
unsafe impl Send for NvtxDomain {}
// SAFETY: as above.
unsafe impl Sync for NvtxDomain {}

impl NvtxDomain {
    /// A domain of this name; `None` where no profiler is attached that shows ranges.
    pub fn open(name: &CStr) -> Option<Self> {
        Functions::get().map(|functions| Self::of(functions, name))
    }

    fn of(functions: Functions, name: &CStr) -> Self {
        // SAFETY: the name is terminated. A profiler that makes no domains takes null, the default one.
        let raw = functions.create.map_or(ptr::null_mut(), |create| unsafe { create(name.as_ptr()) });
        Self { functions, raw }
    }

    /// A range begins on the calling thread, inside of those that this thread has pushed and not popped.
    pub fn push(&self, name: &str) {
        const ASCII: i32 = 1;
        let message = CString::new(name.split('\0').next().unwrap_or_default()).unwrap_or_default();
        let attributes = EventAttributes {
            version: VERSION,
            bytes: size_of::<EventAttributes>() as u16,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: 0,
            reserved: 0,
            payload: 0,
            message_type: ASCII,
            message: message.as_ptr(),
        };
        // SAFETY: the profiler reads the attributes before it returns.
        unsafe { (self.functions.push)(self.raw, &attributes) };
    }

    /// The innermost range of the calling thread ends.
    pub fn pop(&self) {
        // SAFETY: the domain is alive.
        unsafe { (self.functions.pop)(self.raw) };
    }
}

impl Drop for NvtxDomain {
    fn drop(&mut self) {
        if let Some(destroy) = self.functions.destroy.filter(|_| !self.raw.is_null()) {
            // SAFETY: made in of, and nobody else has it.
            unsafe { destroy(self.raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    static CALLS: Mutex<Vec<String>> = Mutex::new(Vec::new());

    fn record(what: String) {
        CALLS.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    unsafe fn text(text: *const c_char) -> String {
        // SAFETY: NVTX gives terminated strings.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
    }

    unsafe extern "C" fn create(name: *const c_char) -> *mut c_void {
        // SAFETY: as above.
        record(format!("create {}", unsafe { text(name) }));
        8 as *mut c_void
    }

    unsafe extern "C" fn destroy(domain: *mut c_void) {
        record(format!("destroy {domain:?}"));
    }

    unsafe extern "C" fn push(domain: *mut c_void, attributes: *const EventAttributes) -> c_int {
        // SAFETY: attributes that live as long as the call.
        let (bytes, version, name) =
            unsafe { ((*attributes).bytes, (*attributes).version, text((*attributes).message)) };
        assert_eq!((bytes, version), (48, 3));
        record(format!("push {domain:?} {name}"));
        0
    }

    unsafe extern "C" fn pop(domain: *mut c_void) -> c_int {
        record(format!("pop {domain:?}"));
        0
    }

    /// As a profiler attaches: by the tables, as C has them.
    unsafe extern "C" fn initialize(get: GetExportTable) -> c_int {
        type GetTable = unsafe extern "C" fn(c_uint, *mut *mut *mut *mut c_void, *mut c_uint) -> c_int;
        // SAFETY: the tables are laid out as in NVTX's header.
        unsafe {
            assert!(get(0).is_null() && get(2).is_null() && get(4).is_null());
            assert_eq!((get(3) as *const usize).read(), 24);
            assert_eq!((get(3) as *const u32).add(2).read(), 3);
            let callbacks = get(1) as *const usize;
            assert_eq!(callbacks.read(), 16);
            let get_table: GetTable = mem::transmute(callbacks.add(1).read());
            let (mut table, mut count) = (ptr::null_mut(), 0);
            assert_eq!(get_table(0, &mut table, &mut count), 0);
            assert_eq!(get_table(7, &mut table, &mut count), 0);
            for (module, functions) in [(1, 16), (2, 9), (3, 15), (4, 7), (6, 7), (5, 16)] {
                assert_eq!(get_table(module, &mut table, &mut count), 1);
                assert_eq!(count, functions);
                assert!((*table).is_null() && (*table.add(count as usize)).is_null());
                assert!(
                    (1..count as usize).all(|at| !(*table.add(at)).is_null() && (**table.add(at)).is_null())
                );
            }
            **table.add(4) = push as *mut c_void;
            **table.add(5) = pop as *mut c_void;
            **table.add(12) = create as *mut c_void;
            **table.add(14) = destroy as *mut c_void;
        }
        1
    }

    unsafe extern "C" fn refuse(_get: GetExportTable) -> c_int {
        0
    }

    /// One test, as the tables are the process's.
    #[test]
    fn a_profiler_gets_ranges_that_nest() {
        assert!(
            Functions::get().is_none() && NvtxDomain::open(c"nobody").is_none(),
            "no profiler is attached"
        );
        assert!(Functions::attach(refuse).is_none());
        let functions = Functions::attach(initialize).unwrap();
        let domain = NvtxDomain::of(functions, c"counterpoint");
        domain.push("a call");
        domain.push("a product\0of two");
        domain.pop();
        domain.pop();
        drop(domain);
        let calls = CALLS.lock().unwrap();
        let expected = [
            "create counterpoint",
            "push 0x8 a call",
            "push 0x8 a product",
            "pop 0x8",
            "pop 0x8",
            "destroy 0x8",
        ];
        assert_eq!(*calls, expected);
    }
}
