//! A prepared matrix product, by our kernel or cuBLASLt.

use super::{Gemm, GemmTensors, LibraryGemm};
use crate::{CudaError, Stream};

/// Who computes a product: it is the same to whoever enqueues it.
#[derive(Debug)]
pub enum GemmRunner {
    /// This crate's kernel.
    Ours(Gemm),
    /// cuBLASLt.
    Library(LibraryGemm),
}

impl GemmRunner {
    /// Enqueues the product.
    ///
    /// # Safety
    /// As [`Gemm::launch`].
    ///
    /// # Errors
    /// As [`Gemm::launch`] and [`LibraryGemm::launch`].
    pub unsafe fn launch(&self, stream: &Stream, tensors: &GemmTensors<'_>) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is that of both.
        unsafe {
            match self {
                Self::Ours(gemm) => gemm.launch(stream, tensors),
                Self::Library(gemm) => gemm.launch(stream, tensors),
            }
        }
    }
}
