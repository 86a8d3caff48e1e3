//! The judge of compiled kernels: no spills, no local memory, and the matrix instructions that they are written for.

use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::{MatrixUnit, Specialisation};
use crate::{CompilerVersion, CubinCache, CudaError, compiler_version};
use counterpoint_driver::{MatrixInstructions, count_matrix_instructions, map_parallel};

/// What became of every kernel that was to be compiled. No GPU is needed for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompileReport {
    /// The compiler's version, such as `13.0`.
    pub nvrtc: String,
    /// The kernels that compiled, by the order of what was asked for.
    pub kernels: Vec<KernelReport>,
    /// What is wrong, if anything.
    pub failed: Vec<KernelFault>,
}

/// What a compiled kernel takes of a multiprocessor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KernelReport {
    /// Its entry point.
    pub name: String,
    /// What it was compiled for.
    pub arch: String,
    /// Registers of each thread when it starts.
    pub registers: u32,
    /// Bytes of local memory of each thread, which lies in device memory.
    pub local_bytes: u32,
    /// Bytes written and read because there were too few registers.
    pub spill_bytes: u32,
    /// Matrix instructions of a warpgroup; `None` for an architecture whose machine code is not known.
    pub hgmma: Option<u32>,
    /// Matrix instructions of a warp, likewise.
    pub hmma: Option<u32>,
}

/// A kernel that is not what it must be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelFault {
    /// Its entry point.
    pub name: String,
    /// What is wrong.
    pub reason: String,
}

/// Compiles kernels, or finds them in the cache, and judges what came out. `hear` is called with each as it is done, in any
/// order.
///
/// # Errors
/// [`CudaError::NoNvrtc`] when there is no compiler. That a kernel does not compile is a fault in the report.
pub fn examine(
    specialisations: &[Specialisation],
    cache: &CubinCache,
    hear: impl FnMut(&str) + Send,
) -> Result<CompileReport, CudaError> {
    let CompilerVersion { version: (major, minor), .. } = compiler_version()?;
    let hear = Mutex::new(hear);
    let results = map_parallel(specialisations, |specialisation| {
        let result = examine_one(specialisation, cache);
        (hear.lock().unwrap_or_else(PoisonError::into_inner))(specialisation.source.name());
        result
    });
    let mut report =
        CompileReport { nvrtc: format!("{major}.{minor}"), kernels: Vec::new(), failed: Vec::new() };
    for (specialisation, result) in specialisations.iter().zip(results) {
        let faults = match result {
            Ok((kernel, faults)) => {
                report.kernels.push(kernel);
                faults
            }
            Err(error) => vec![error.to_string()],
        };
        let name = specialisation.source.name();
        report.failed.extend(faults.into_iter().map(|reason| KernelFault { name: name.to_owned(), reason }));
    }
    Ok(report)
}

fn examine_one(
    specialisation: &Specialisation,
    cache: &CubinCache,
) -> Result<(KernelReport, Vec<String>), CudaError> {
    let source = &specialisation.source;
    let cubin = cache.cubins(&[source]).remove(0)?.cubin;
    let log = CompilerLog::read(&cubin.log);
    let mut faults = log.faults(specialisation.register_limit);
    let counts = source.arch().has_known_encoding().then(|| count_matrix_instructions(&cubin.image));
    let missing = match (specialisation.matrix_unit, counts) {
        (MatrixUnit::Warpgroup, Some(MatrixInstructions { hgmma: 0, .. })) => Some("HGMMA"),
        (MatrixUnit::Warp, Some(MatrixInstructions { hmma: 0, .. })) => Some("HMMA"),
        _ => None,
    };
    faults.extend(missing.map(|missing| format!("holds no {missing} instruction")));
    let report = KernelReport {
        name: source.name().to_owned(),
        arch: source.arch().to_string(),
        registers: log.registers,
        local_bytes: log.local_bytes,
        spill_bytes: log.spill_bytes,
        hgmma: counts.map(|counts| counts.hgmma),
        hmma: counts.map(|counts| counts.hmma),
    };
    Ok((report, faults))
}

/// What the compiler says with `-v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct CompilerLog {
    registers: u32,
    local_bytes: u32,
    spill_bytes: u32,
    remarks: Vec<String>,
}

impl CompilerLog {
    fn read(log: &str) -> Self {
        let mut read = Self::default();
        for line in log.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let before = |word: &str| number_before(line, word);
            if let Some(bytes) = before("bytes stack frame") {
                // One line a function that was not inlined. They may call each other.
                read.local_bytes += bytes;
                read.spill_bytes += before("bytes spill stores").unwrap_or(0);
                read.spill_bytes += before("bytes spill loads").unwrap_or(0);
            } else if let (true, Some(registers)) = (line.contains("Used"), before("registers")) {
                read.registers = read.registers.max(registers);
            } else if !line.starts_with("ptxas info") || line.contains("(C") {
                // Numbered remarks, of serialised wgmma or ignored setmaxnreg say, come as mere "info".
                read.remarks.push(line.to_owned());
            }
        }
        read
    }

    fn faults(&self, register_limit: u32) -> Vec<String> {
        let mut faults = self.remarks.clone();
        if self.registers == 0 {
            faults.push("the compiler does not say how many registers it takes".to_owned());
        }
        if self.registers > register_limit {
            faults.push(format!("takes {} registers, its launch leaves it {register_limit}", self.registers));
        }
        if self.local_bytes > 0 {
            faults.push(format!("takes {} bytes of local memory", self.local_bytes));
        }
        if self.spill_bytes > 0 {
            faults.push(format!("spills {} bytes of registers", self.spill_bytes));
        }
        faults
    }
}

/// The number that stands before `words` in a line.
fn number_before(line: &str, words: &str) -> Option<u32> {
    line[..line.find(words)?].split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_both_versions() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers";
        let read = CompilerLog::read(log);
        let expected = CompilerLog { registers: 168, local_bytes: 16, spill_bytes: 20, remarks: Vec::new() };
        assert_eq!(read, expected);
        assert_eq!(
            read.faults(128),
            [
                "takes 168 registers, its launch leaves it 128",
                "takes 16 bytes of local memory",
                "spills 20 bytes of registers"
            ]
        );
        let older = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                     ptxas info    : Used 40 registers, 380 bytes cmem[0]";
        assert_eq!(CompilerLog::read(older).faults(40), [""; 0]);
        assert_eq!(CompilerLog::read("").faults(255).len(), 1, "no figures, no proof");
    }

    #[test]
    fn remarks_are_faults() {
        let remarks = [
            "f.cu(3): warning #177-D: variable \"x\" was declared but never referenced",
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
            "ptxas warning : Stack size for entry function 'f' cannot be statically determined",
        ];
        for remark in remarks {
            let log = format!("ptxas info    : Used 40 registers, used 0 barriers\n{remark}");
            assert_eq!(CompilerLog::read(&log).faults(255), [remark]);
        }
    }
}
