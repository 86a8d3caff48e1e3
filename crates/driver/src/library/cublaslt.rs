//! cuBLASLt's functions, looked up at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::cublaslt::sys::{
    cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatrixLayout_t,
};
use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::search;
use super::table::function_table;
use crate::{CudaError, LoadFault, TriedPlace};

function_table! {
    /// Functions of cuBLASLt, by their C names. Enumerations are plain numbers.
    pub CublasLtFunctions {
        cublasLtCreate(handle: *mut cublasLtHandle_t);
        cublasLtDestroy(handle: cublasLtHandle_t);
        cublasLtMatmulDescCreate(desc: *mut cublasLtMatmulDesc_t, compute: u32, scale: u32);
        cublasLtMatmulDescDestroy(desc: cublasLtMatmulDesc_t);
        cublasLtMatmulDescSetAttribute(
            desc: cublasLtMatmulDesc_t, attribute: u32, value: *const c_void, bytes: usize,
        );
        cublasLtMatrixLayoutCreate(layout: *mut cublasLtMatrixLayout_t, kind: u32, rows: u64, columns: u64, stride: i64);
        cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t);
        cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t);
        cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t);
        cublasLtMatmulPreferenceSetAttribute(
            preference: cublasLtMatmulPreference_t, attribute: u32, value: *const c_void, bytes: usize,
        );
        cublasLtMatmulAlgoGetHeuristic(
            handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, a: cublasLtMatrixLayout_t, b: cublasLtMatrixLayout_t,
            c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t, preference: cublasLtMatmulPreference_t,
            wanted: c_int, results: *mut cublasLtMatmulHeuristicResult_t, found: *mut c_int,
        );
        cublasLtMatmul(
            handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, alpha: *const c_void, a: u64,
            a_layout: cublasLtMatrixLayout_t, b: u64, b_layout: cublasLtMatrixLayout_t, beta: *const c_void, c: u64,
            c_layout: cublasLtMatrixLayout_t, d: u64, d_layout: cublasLtMatrixLayout_t,
            algorithm: *const cublasLtMatmulAlgo_t, workspace: u64, workspace_bytes: usize, stream: CUstream,
        );
    }
}

/// Handles, structs and enumerations of cuBLASLt, by their C names.
pub mod cublaslt_types {
    pub use cudarc::cublaslt::sys::{
        cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
        cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t,
        cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t,
        cudaDataType_t,
    };
}

/// cuBLASLt, opened once a process, on first use.
pub struct CublasLt {
    functions: CublasLtFunctions,
    status_text: unsafe extern "C" fn(u32) -> *const c_char,
    version: usize,
    path: PathBuf,
    // Never closed: handles of other threads may be alive.
    _library: Library,
}

impl std::ops::Deref for CublasLt {
    type Target = CublasLtFunctions;

    fn deref(&self) -> &CublasLtFunctions {
        &self.functions
    }
}

impl std::fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuBLASLt {}", self.version().version)
    }
}

impl CublasLt {
    /// The process's cuBLASLt.
    ///
    /// # Errors
    /// [`CudaError::NoCublasLt`] with the places that were tried.
    pub fn get() -> Result<&'static Self, CudaError> {
        static CUBLASLT: OnceLock<Result<CublasLt, CudaError>> = OnceLock::new();
        CUBLASLT.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, CudaError> {
        let mut tried = Vec::new();
        for path in search::cublaslt() {
            match Self::open_at(&path) {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(TriedPlace::Library { library: path, reason }),
            }
        }
        tried.extend(search::notes(search::CUBLASLT_VARIABLE, "libcublasLt.so"));
        Err(CudaError::NoCublasLt { tried })
    }

    fn open_at(path: &Path) -> Result<Self, LoadFault> {
        // SAFETY: initialisers of NVIDIA's libraries do not depend on us.
        let library = unsafe { super::open(path) }?;
        let missing = |symbol| LoadFault::TooOld { symbol, needed: "cuBLAS 12" };
        let functions = CublasLtFunctions::resolve(&library).map_err(missing)?;
        // SAFETY: the signatures are those of cublasLt.h.
        let (status_text, version) = unsafe {
            let text =
                library.get::<unsafe extern "C" fn(u32) -> *const c_char>(b"cublasLtGetStatusString\0");
            let version = library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0");
            (
                *text.map_err(|_| missing("cublasLtGetStatusString"))?,
                version.map_err(|_| missing("cublasLtGetVersion"))?(),
            )
        };
        let path = search::opened_file(path);
        Ok(Self { functions, status_text, version, path, _library: library })
    }

    /// Its version, such as `13.0.0`, and where it was found.
    pub fn version(&self) -> super::LibraryVersion {
        let version = self.version;
        let version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        super::LibraryVersion { version, path: self.path.clone() }
    }

    /// A result as ours.
    ///
    /// # Errors
    /// [`CudaError::CublasLt`] unless it is 0.
    pub fn check(&self, call: &'static str, code: u32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a string of its own for every code.
        let text = unsafe { CStr::from_ptr((self.status_text)(code)) }.to_string_lossy().into_owned();
        Err(CudaError::CublasLt { call, code, text })
    }
}
