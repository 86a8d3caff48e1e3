//! NVRTC's functions, looked up at run time and tried out before they are trusted.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::nvrtcProgram;
use libloading::Library;

use super::search::{self, Candidate};
use super::table::function_table;
use crate::{CudaError, LoadFault, TriedPlace};

function_table! {
    /// Functions of NVRTC, by their C names.
    pub(crate) NvrtcFunctions {
        nvrtcVersion(major: *mut c_int, minor: *mut c_int);
        nvrtcCreateProgram(
            program: *mut nvrtcProgram, source: *const c_char, name: *const c_char, headers: c_int,
            header_texts: *const *const c_char, header_names: *const *const c_char,
        );
        nvrtcDestroyProgram(program: *mut nvrtcProgram);
        nvrtcCompileProgram(program: nvrtcProgram, count: c_int, options: *const *const c_char);
        nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize);
        nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char);
        nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize);
        nvrtcGetCUBIN(program: nvrtcProgram, cubin: *mut c_char);
    }
}

/// NVRTC, the compiler of kernels: opened once a process, on first use.
pub(crate) struct Nvrtc {
    functions: NvrtcFunctions,
    error_text: unsafe extern "C" fn(u32) -> *const c_char,
    version: (u32, u32),
    path: PathBuf,
    no_cache: Vec<CString>,
    // Never closed: it has state of its own in threads.
    _libraries: Vec<Library>,
}

impl std::ops::Deref for Nvrtc {
    type Target = NvrtcFunctions;

    fn deref(&self) -> &NvrtcFunctions {
        &self.functions
    }
}

const UNKNOWN_OPTION: u32 = 5;

impl Nvrtc {
    /// The process's NVRTC.
    pub(crate) fn get() -> Result<&'static Self, CudaError> {
        static NVRTC: OnceLock<Result<Nvrtc, CudaError>> = OnceLock::new();
        NVRTC.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    /// Its version, such as (13, 0).
    pub(crate) fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Where it was found.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn open() -> Result<Self, CudaError> {
        let mut tried = Vec::new();
        for candidate in search::nvrtc() {
            match Self::open_candidate(&candidate) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(reason) => {
                    tried.push(TriedPlace::Library { library: candidate.library, reason });
                }
            }
        }
        tried.extend(search::notes(search::NVRTC_VARIABLE, "libnvrtc.so"));
        Err(CudaError::NoNvrtc { tried })
    }

    fn open_candidate(candidate: &Candidate) -> Result<Self, LoadFault> {
        let mut libraries = Vec::new();
        // NVRTC opens its builtins by bare name when it first compiles. Outside of the loader's folders it only finds them
        // when they are open already.
        for path in &candidate.before {
            // SAFETY: initialisers of NVIDIA's libraries do not depend on us.
            libraries.push(unsafe { super::open(path) }?);
        }
        // SAFETY: as above.
        let library = unsafe { super::open(&candidate.library) }?;
        let missing = |symbol| LoadFault::TooOld { symbol, needed: "NVRTC 12.0" };
        let functions = NvrtcFunctions::resolve(&library).map_err(missing)?;
        // SAFETY: the signature is that of nvrtc.h.
        let error_text =
            unsafe { library.get::<unsafe extern "C" fn(u32) -> *const c_char>(b"nvrtcGetErrorString\0") };
        let error_text = *error_text.map_err(|_| missing("nvrtcGetErrorString"))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the pointers are to locals.
        let code = unsafe { (functions.nvrtcVersion)(&mut major, &mut minor) };
        if code != 0 || major < 12 {
            return Err(LoadFault::Version { major, minor });
        }
        libraries.push(library);
        let version = (major.unsigned_abs(), minor.unsigned_abs());
        let path = search::opened_file(&candidate.library);
        let no_cache = vec![c"--no-cache".to_owned()];
        let mut nvrtc = Self { functions, error_text, version, path, no_cache, _libraries: libraries };
        // Older ones have neither the cache nor the option.
        if nvrtc.try_with(&nvrtc.no_cache)? == UNKNOWN_OPTION {
            nvrtc.no_cache.clear();
        }
        nvrtc.try_out()?;
        Ok(nvrtc)
    }

    /// Options against NVRTC's own cache, where it has one: what comes out of that has no log, and so no proof of what the
    /// kernel takes. Ours keeps the log.
    pub(crate) fn no_cache(&self) -> &[CString] {
        &self.no_cache
    }

    /// Compiles next to nothing: NVRTC opens, yet compiles nothing, where its builtins cannot be found.
    fn try_out(&self) -> Result<(), LoadFault> {
        const NO_BUILTINS: u32 = 7;
        match self.try_with(&self.no_cache)? {
            NO_BUILTINS => {
                let (major, minor) = self.version;
                Err(LoadFault::NoBuiltins { major, minor })
            }
            code => self.try_check("nvrtcCompileProgram", code),
        }
    }

    /// The result of compiling next to nothing with these options.
    fn try_with(&self, options: &[CString]) -> Result<u32, LoadFault> {
        let options: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let (source, name) = (c"__global__ void f() {}", c"f.cu");
        let mut program = ptr::null_mut();
        // SAFETY: the strings are terminated, the pointers are to locals or null where there is nothing; the program is
        // destroyed after its last use.
        unsafe {
            let create = self.nvrtcCreateProgram;
            let code = create(&mut program, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null());
            self.try_check("nvrtcCreateProgram", code)?;
            let code = (self.nvrtcCompileProgram)(program, options.len() as c_int, options.as_ptr());
            (self.nvrtcDestroyProgram)(&mut program);
            Ok(code)
        }
    }

    /// A result as ours.
    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            code => Err(CudaError::Nvrtc { call, code, text: self.text_of(code) }),
        }
    }

    /// A result of a call that tries it out.
    fn try_check(&self, call: &'static str, code: u32) -> Result<(), LoadFault> {
        match code {
            0 => Ok(()),
            code => Err(LoadFault::Call { call, code, text: self.text_of(code) }),
        }
    }

    fn text_of(&self, code: u32) -> String {
        // SAFETY: NVRTC returns a string of its own for every code.
        unsafe { CStr::from_ptr((self.error_text)(code)) }.to_string_lossy().into_owned()
    }
}
