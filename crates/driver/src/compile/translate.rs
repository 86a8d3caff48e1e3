//! One compilation by NVRTC: options, headers in memory, the log.

use std::ffi::{CString, c_int};
use std::ptr;

use cudarc::nvrtc::sys::nvrtcProgram;

use super::KernelSource;
use crate::CudaError;
use crate::library::Nvrtc;

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// The ELF file that the driver loads.
    pub image: Vec<u8>,
    /// What the compiler said: warnings, and the assembler's figures.
    pub log: String,
}

/// Options besides the architecture. A part of the cache's key.
pub(super) const OPTIONS: [&str; 4] = ["--std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v"];

/// Compiles a kernel now, whatever was compiled before.
///
/// # Errors
/// [`CudaError::NoNvrtc`] when there is no compiler; [`CudaError::Compile`] with its log when it does not compile.
pub fn compile(source: &KernelSource) -> Result<Cubin, CudaError> {
    Program::new(Nvrtc::get()?, source)?.compile(source)
}

/// A program of NVRTC.
struct Program {
    nvrtc: &'static Nvrtc,
    raw: nvrtcProgram,
}

impl Program {
    fn new(nvrtc: &'static Nvrtc, source: &KernelSource) -> Result<Self, CudaError> {
        let text = c_string(source.text());
        let name = c_string(&format!("{}.cu", source.name()));
        // The compiler sees no header that is not in the cache's key.
        let headers = source.headers();
        let header_texts: Vec<_> = headers.iter().map(|(_, text)| c_string(text)).collect();
        let header_names: Vec<_> = headers.iter().map(|(name, _)| c_string(name)).collect();
        let header_texts: Vec<_> = header_texts.iter().map(|text| text.as_ptr()).collect();
        let header_names: Vec<_> = header_names.iter().map(|name| name.as_ptr()).collect();
        let mut raw = ptr::null_mut();
        // SAFETY: all strings are terminated and outlive the call, which copies them.
        let code = unsafe {
            (nvrtc.nvrtcCreateProgram)(
                &mut raw,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        nvrtc.check("nvrtcCreateProgram", code)?;
        Ok(Self { nvrtc, raw })
    }

    fn compile(&self, source: &KernelSource) -> Result<Cubin, CudaError> {
        // An option that it does not know is an architecture newer than it is; the log says so.
        const INVALID_OPTION: u32 = 5;
        const COMPILATION: u32 = 6;
        let nvrtc = self.nvrtc;
        let arch = c_string(&format!("--gpu-architecture={}", source.arch()));
        let options = OPTIONS.map(c_string);
        let options: Vec<_> = [&arch]
            .into_iter()
            .chain(&options)
            .chain(nvrtc.no_cache())
            .map(|option| option.as_ptr())
            .collect();
        // SAFETY: the program is alive; the options are terminated and outlive the call.
        let code = unsafe { (nvrtc.nvrtcCompileProgram)(self.raw, options.len() as c_int, options.as_ptr()) };
        if code == COMPILATION || code == INVALID_OPTION {
            let (kernel, arch) = (source.name().to_owned(), source.arch().to_string());
            return Err(CudaError::Compile { kernel, arch, log: self.log()? });
        }
        nvrtc.check("nvrtcCompileProgram", code)?;
        let mut bytes = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (nvrtc.nvrtcGetCUBINSize)(self.raw, &mut bytes) };
        nvrtc.check("nvrtcGetCUBINSize", code)?;
        let mut image = vec![0u8; bytes];
        // SAFETY: the buffer has the size that was just returned.
        let code = unsafe { (nvrtc.nvrtcGetCUBIN)(self.raw, image.as_mut_ptr().cast()) };
        nvrtc.check("nvrtcGetCUBIN", code)?;
        Ok(Cubin { image, log: self.log()? })
    }

    fn log(&self) -> Result<String, CudaError> {
        let nvrtc = self.nvrtc;
        let mut bytes = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (nvrtc.nvrtcGetProgramLogSize)(self.raw, &mut bytes) };
        nvrtc.check("nvrtcGetProgramLogSize", code)?;
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has the size that was just returned.
        let code = unsafe { (nvrtc.nvrtcGetProgramLog)(self.raw, log.as_mut_ptr().cast()) };
        nvrtc.check("nvrtcGetProgramLog", code)?;
        let log = String::from_utf8_lossy(&log);
        // The same source gives the same log: how long it took is left out.
        let lines: Vec<_> = log.trim_end_matches(['\0', '\n']).lines().collect();
        let kept = lines.into_iter().filter(|line| !line.contains("Compile time ="));
        Ok(kept.collect::<Vec<_>>().join("\n"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in new.
        unsafe { (self.nvrtc.nvrtcDestroyProgram)(&mut self.raw) };
    }
}

/// A terminated string; a NUL inside, which no source of ours has, ends it early and so does not compile.
fn c_string(text: &str) -> CString {
    let text = text.split('\0').next().unwrap_or_default();
    CString::new(text).unwrap_or_default()
}
