//! The launcher of users' own kernels, which include `user_kernel.cuh` and signal the parts that they have done.

use super::RowsFault;
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{CudaError, Device, Function, Launch, Stream};

/// Parts of one launch (`kUserParts`).
const PARTS: usize = 32;
/// Tensors of a part (`kUserTensors`).
const TENSORS: usize = 4;

/// A kernel of a user's own: CUDA C++ that includes `user_kernel.cuh`, which says what it is given and how it signals its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserKernelSource {
    /// The translation unit.
    pub text: String,
    /// Its `extern "C"` entry point, which takes one `const __grid_constant__ counterpoint::UserCall`.
    pub entry: String,
    /// Blocks of a launch. All of them compute each part together.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// A tensor that a part is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct UserTensor {
    /// Where it begins.
    pub address: u64,
    /// Its elements.
    pub elements: u64,
}

/// `UserPart` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct UserPart {
    tensors: [UserTensor; TENSORS],
}

/// `UserCall` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct UserCall {
    parts: [UserPart; PARTS],
    counters: u64,
    part_count: u32,
    tensor_count: u32,
}

/// A user's own kernel, loaded.
#[derive(Clone, Debug)]
pub struct UserKernel {
    function: Function,
    launch: Launch,
    blocks: u32,
}

impl UserKernel {
    /// Compiles or finds it.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for a grid that is empty; the compiler's words when it does not compile.
    pub fn new(device: &Device, source: &UserKernelSource) -> Result<Self, CudaError> {
        let UserKernelSource { text, entry, blocks, threads } = source;
        if *blocks == 0 || *threads == 0 || *threads > 1024 {
            let reason = RowsFault::UserGrid { blocks: *blocks, threads: *threads }.into();
            return Err(CudaError::Launch { kernel: entry.clone(), reason });
        }
        let function = device.function(&kernel_source(entry, device.arch()).line(text))?;
        Ok(Self { function, launch: Launch::linear(*blocks, *threads), blocks: *blocks })
    }

    /// By how much one launch raises the counter of each part.
    pub fn rise(&self) -> u32 {
        self.blocks
    }

    /// Enqueues it. `parts` are the tensors of each part; `counters` the address of a u32 for each, or 0.
    ///
    /// # Safety
    /// The kernel reads and writes what its parts say and nothing else, and signals each part once. Tensors and counters live until it
    /// has run.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for more parts or tensors than a launch takes; the driver's refusal.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        parts: &[Vec<UserTensor>],
        counters: u64,
    ) -> Result<(), CudaError> {
        let tensor_count = parts.iter().map(Vec::len).max().unwrap_or(0);
        if parts.len() > PARTS || tensor_count > TENSORS {
            let fault = RowsFault::UserParts {
                parts: parts.len(),
                tensors: tensor_count,
                most_parts: PARTS,
                most_tensors: TENSORS,
            };
            return Err(CudaError::Launch { kernel: "a user's".to_owned(), reason: fault.into() });
        }
        let mut call = UserCall {
            parts: [UserPart::default(); PARTS],
            counters,
            part_count: parts.len() as u32,
            tensor_count: tensor_count as u32,
        };
        for (to, from) in call.parts.iter_mut().zip(parts) {
            to.tensors[..from.len()].copy_from_slice(from);
        }
        // SAFETY: the argument is that of the header, a test compares their layouts; what the kernel does with it is the caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(call,)) }
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("user_kernel.cuh", UserTensor { address, elements }),
        shared_layout!("user_kernel.cuh", UserPart { tensors }),
        shared_layout!("user_kernel.cuh", UserCall { parts, counters, part_count, tensor_count }),
    ]
}
