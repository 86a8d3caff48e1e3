//! NCCL's functions, looked up at run time, and its communicator configuration.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::search;
use super::table::function_table;
use crate::{CudaError, LoadFault, TriedPlace};

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryVersion {
    /// Such as `2.28.9`.
    pub version: String,
    /// Where it is.
    pub path: PathBuf,
}

/// The NCCL that collectives between GPUs would use.
///
/// # Errors
/// [`CudaError::NoNccl`] with the places that were tried.
pub fn nccl_version() -> Result<LibraryVersion, CudaError> {
    Nccl::get().map(|nccl| nccl.version.clone())
}

/// What names a group of ranks that are to find each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NcclUniqueId {
    /// Only NCCL knows what they say.
    pub bytes: [u8; 128],
}

/// A rank's end; only NCCL looks into it.
pub type NcclHandle = *mut c_void;

/// What NCCL saves with the blocks of its kernels (`NCCL_CTA_POLICY`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum NcclCtaPolicy {
    /// Nothing: the fastest.
    Default = 0,
    /// Blocks, where it loses no bandwidth.
    Efficiency = 1,
    /// All of them, where copy engines can do what it was asked.
    Zero = 2,
}

/// `ncclConfig_t` as NCCL 2.27 has it. It says that it is as long as that of 2.18, unless it has a policy; newer ones choose what it lacks.
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

/// NCCL leaves it to itself.
const UNDEFINED: c_int = c_int::MIN;

impl NcclConfig {
    /// Calls come back when they are done.
    pub fn blocking() -> Self {
        Self {
            size: std::mem::offset_of!(Self, comm_name),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 1,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
        }
    }

    /// The same, with so many blocks in a cluster, and at least and at most so many in a kernel, where they are given.
    #[must_use]
    pub fn with_ctas(self, cluster_size: Option<u32>, [min, max]: [Option<u32>; 2]) -> Self {
        let given = |number: Option<u32>| {
            number.map_or(UNDEFINED, |number| c_int::try_from(number).unwrap_or(c_int::MAX))
        };
        Self { cga_cluster_size: given(cluster_size), min_ctas: given(min), max_ctas: given(max), ..self }
    }

    /// The same with a policy. NCCL before 2.27 does not look at it.
    #[must_use]
    pub fn with_cta_policy(self, policy: NcclCtaPolicy) -> Self {
        Self { size: size_of::<Self>(), version: 22_700, cta_policy: policy as c_int, ..self }
    }
}

function_table! {
    /// Functions of NCCL, by their C names.
    pub NcclFunctions {
        ncclGetVersion(version: *mut c_int);
        ncclGetUniqueId(id: *mut NcclUniqueId);
        ncclCommInitRankConfig(
            handle: *mut NcclHandle, ranks: c_int, id: NcclUniqueId, rank: c_int, config: *mut NcclConfig,
        );
        ncclCommGetAsyncError(handle: NcclHandle, result: *mut u32);
        ncclCommAbort(handle: NcclHandle);
        ncclGroupStart();
        ncclGroupEnd();
        ncclSend(from: *const c_void, count: usize, kind: c_int, peer: c_int, handle: NcclHandle, stream: CUstream);
        ncclRecv(to: *mut c_void, count: usize, kind: c_int, peer: c_int, handle: NcclHandle, stream: CUstream);
        ncclAllGather(
            from: *const c_void, to: *mut c_void, count: usize, kind: c_int, handle: NcclHandle, stream: CUstream,
        );
        ncclReduceScatter(
            from: *const c_void, to: *mut c_void, count: usize, kind: c_int, op: c_int, handle: NcclHandle,
            stream: CUstream,
        );
        ncclAllReduce(
            from: *const c_void, to: *mut c_void, count: usize, kind: c_int, op: c_int, handle: NcclHandle,
            stream: CUstream,
        );
    }
}

/// NCCL: opened once a process, on first use.
pub struct Nccl {
    functions: NcclFunctions,
    text_of: unsafe extern "C" fn(u32) -> *const c_char,
    version: LibraryVersion,
    // Never closed: it may have started threads.
    _library: Library,
}

impl std::ops::Deref for Nccl {
    type Target = NcclFunctions;

    fn deref(&self) -> &NcclFunctions {
        &self.functions
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "NCCL {}", self.version.version)
    }
}

const SUCCESS: u32 = 0;
const IN_PROGRESS: u32 = 7;

impl Nccl {
    /// The process's NCCL.
    ///
    /// # Errors
    /// [`CudaError::NoNccl`] with the places that were tried.
    pub fn get() -> Result<&'static Self, CudaError> {
        static NCCL: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
        NCCL.get_or_init(Self::find).as_ref().map_err(Clone::clone)
    }

    fn find() -> Result<Self, CudaError> {
        let mut tried = Vec::new();
        for path in search::nccl() {
            match Self::open(&path) {
                Ok(nccl) => return Ok(nccl),
                Err(reason) => tried.push(TriedPlace::Library { library: path, reason }),
            }
        }
        tried.extend(search::notes(search::NCCL_VARIABLE, "libnccl.so"));
        Err(CudaError::NoNccl { tried })
    }

    fn open(path: &Path) -> Result<Self, LoadFault> {
        // SAFETY: initialisers of NCCL do not depend on us.
        let library = unsafe { super::open(path) }?;
        let functions =
            NcclFunctions::resolve(&library).map_err(|symbol| LoadFault::NoFunction { symbol })?;
        // SAFETY: the signature is that of nccl.h, and the library stays open.
        let text_of = unsafe {
            let symbol = library.get::<unsafe extern "C" fn(u32) -> *const c_char>(b"ncclGetErrorString\0");
            *symbol.map_err(|error| LoadFault::Loader { text: error.to_string() })?
        };
        let mut version: c_int = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (functions.ncclGetVersion)(&mut version) };
        if code != SUCCESS {
            return Err(LoadFault::NoVersion { call: "ncclGetVersion", code });
        }
        let version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        let version = LibraryVersion { version, path: search::opened_file(path) };
        Ok(Self { functions, text_of, version, _library: library })
    }

    /// A result as ours; whether what was called has come to its end.
    ///
    /// # Errors
    /// [`CudaError::Nccl`] for any other result.
    pub fn check(&self, call: &'static str, code: u32) -> Result<NcclProgress, CudaError> {
        match code {
            SUCCESS => Ok(NcclProgress::Done),
            IN_PROGRESS => Ok(NcclProgress::Running),
            code => {
                // SAFETY: NCCL gives a string of its own for every code.
                let text = unsafe { CStr::from_ptr((self.text_of)(code)) }.to_string_lossy().into_owned();
                Err(CudaError::Nccl { call, code, text })
            }
        }
    }
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclProgress {
    /// It has.
    Done,
    /// It goes on by itself.
    Running,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layouts of nccl.h: as long as 2.18's structure without a policy, and as 2.27's with one.
    #[test]
    fn a_configuration_is_as_long_as_the_version_that_it_names() {
        let plain = NcclConfig::blocking().with_ctas(Some(1), [None, Some(8)]);
        assert_eq!((plain.size, plain.version), (48, 21_800));
        assert_eq!((plain.cga_cluster_size, plain.min_ctas, plain.max_ctas), (1, UNDEFINED, 8));
        let saving = plain.with_cta_policy(NcclCtaPolicy::Efficiency);
        assert_eq!((saving.size, saving.version, saving.cta_policy), (72, 22_700, 1));
        assert_eq!(std::mem::offset_of!(NcclConfig, cta_policy), 60);
    }
}
