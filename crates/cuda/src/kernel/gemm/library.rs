//! Matrix products by cuBLASLt: the same problems as the GEMM kernel's, but for signals and rows in pieces.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use counterpoint_cost::ProblemSize;
use counterpoint_driver::CublasLt;
use counterpoint_driver::cublaslt_types::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType_t,
};

use super::{GemmEpilogue, GemmFault, GemmLayout, GemmSignals, GemmSpec, GemmTensors};
use crate::kernel::Scalar;
use crate::{CudaError, Device, DeviceBuffer, LibraryVersion, Stream};

/// Memory that an algorithm may use besides the tensors: what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// cuBLASLt on a device: products of whole tensors that need no signals.
#[derive(Clone, Debug)]
pub struct GemmLibrary(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    library: &'static CublasLt,
    device: Device,
    raw: cublasLtHandle_t,
}

// SAFETY: cuBLASLt's handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// A product by cuBLASLt, prepared to run many times. One run at a time: its workspace is its own.
#[derive(Debug)]
pub struct LibraryGemm {
    library: GemmLibrary,
    spec: GemmSpec,
    desc: Described<cublasLtMatmulDesc_t>,
    layouts: [Described<cublasLtMatrixLayout_t>; 3],
    algorithm: cublasLtMatmulAlgo_t,
    workspace: DeviceBuffer,
}

/// An object of cuBLASLt, destroyed with this value.
#[derive(Debug)]
struct Described<T: Copy> {
    raw: T,
    destroy: unsafe extern "C" fn(T) -> u32,
}

// SAFETY: a description belongs to no thread.
unsafe impl<T: Copy> Send for Described<T> {}

impl<T: Copy> Drop for Described<T> {
    fn drop(&mut self) {
        // SAFETY: made by the function that belongs to this one.
        unsafe { (self.destroy)(self.raw) };
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made in open.
        unsafe { (self.library.cublasLtDestroy)(self.raw) };
    }
}

impl GemmLibrary {
    /// Opens the library for a device.
    ///
    /// # Errors
    /// [`CudaError::NoCublasLt`] with the places that were tried.
    pub fn open(device: &Device) -> Result<Self, CudaError> {
        let library = CublasLt::get()?;
        let _bound = device.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        library.check("cublasLtCreate", unsafe { (library.cublasLtCreate)(&mut raw) })?;
        Ok(Self(Arc::new(Handle { library, device: device.clone(), raw })))
    }

    /// Which one it is.
    pub fn version(&self) -> LibraryVersion {
        self.0.library.version()
    }

    /// Makes a product ready, by the algorithm that the library thinks is best.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when it is none that the library can do, or memory is short.
    pub fn gemm(&self, spec: &GemmSpec) -> Result<LibraryGemm, CudaError> {
        let refused = |fault: GemmFault| CudaError::Launch {
            kernel: "cublasLtMatmul".to_owned(),
            reason: fault.into(),
        };
        spec.check().map_err(refused)?;
        if spec.receivers.len() != 1 || spec.sources.len() != 1 || spec.signals != GemmSignals::None {
            return Err(refused(GemmFault::LibraryPieces));
        }
        let Handle { library, device, raw } = &*self.0;
        let _bound = device.make_current()?;
        let desc = self.describe(spec)?;
        let layouts = self.layouts(spec)?;
        let preference = self.preference()?;
        let [a, b, d] = [&layouts[0], &layouts[1], &layouts[2]];
        let mut found = 0;
        // SAFETY: plain data for which all zeros are valid; the other objects are alive, the pointers are to locals.
        let (code, best) = unsafe {
            let mut best: cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let code = (library.cublasLtMatmulAlgoGetHeuristic)(
                *raw,
                desc.raw,
                a.raw,
                b.raw,
                d.raw,
                d.raw,
                preference.raw,
                1,
                &mut best,
                &mut found,
            );
            (code, best)
        };
        library.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        if found == 0 {
            let (ProblemSize { m, n, k }, layout) = (spec.size, spec.layout);
            return Err(refused(GemmFault::LibraryAlgorithm { m, n, k, layout }));
        }
        // The algorithm, and with it bits, is that for all multiprocessors.
        if spec.sm_margin > 0 {
            let target = device.sm_count().saturating_sub(spec.sm_margin).max(1);
            self.set(&desc, cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, target)?;
        }
        let workspace = DeviceBuffer::new(device, WORKSPACE_BYTES)?;
        Ok(LibraryGemm {
            library: self.clone(),
            spec: spec.clone(),
            desc,
            layouts,
            algorithm: best.algo,
            workspace,
        })
    }

    /// The library's matrices are column after column: what it computes is the transpose, `D^T[n, m] = B^T A^T`.
    fn describe(&self, spec: &GemmSpec) -> Result<Described<cublasLtMatmulDesc_t>, CudaError> {
        use cublasLtMatmulDescAttributes_t as A;
        let library = self.0.library;
        let mut raw = ptr::null_mut();
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F as u32;
        // SAFETY: the pointer is to a local.
        let code = unsafe {
            (library.cublasLtMatmulDescCreate)(&mut raw, compute, cudaDataType_t::CUDA_R_32F as u32)
        };
        library.check("cublasLtMatmulDescCreate", code)?;
        let desc = Described { raw, destroy: library.cublasLtMatmulDescDestroy };
        // CUBLAS_OP_N and CUBLAS_OP_T.
        let (plain, turned) = (0u32, 1u32);
        let (first, second) = match spec.layout {
            GemmLayout::Nt => (turned, plain),
            GemmLayout::Nn => (plain, plain),
            GemmLayout::Tn => (plain, turned),
        };
        self.set(&desc, A::CUBLASLT_MATMUL_DESC_TRANSA, first)?;
        self.set(&desc, A::CUBLASLT_MATMUL_DESC_TRANSB, second)?;
        if spec.epilogue == GemmEpilogue::StoreBias {
            self.set(
                &desc,
                A::CUBLASLT_MATMUL_DESC_EPILOGUE,
                cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32,
            )?;
            self.set(&desc, A::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(spec.element.scalar()))?;
        }
        Ok(desc)
    }

    fn set<T: Copy>(
        &self,
        desc: &Described<cublasLtMatmulDesc_t>,
        attribute: cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let library = self.0.library;
        let value = ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the pointer is to a local of the size given.
        let code = unsafe {
            (library.cublasLtMatmulDescSetAttribute)(desc.raw, attribute as u32, value, size_of::<T>())
        };
        library.check("cublasLtMatmulDescSetAttribute", code)
    }

    /// Of what the library takes for its A, B and D: our B, A and D.
    fn layouts(&self, spec: &GemmSpec) -> Result<[Described<cublasLtMatrixLayout_t>; 3], CudaError> {
        let library = self.0.library;
        let [stride_a, stride_b, stride_d] = spec.strides;
        let layout = |scalar, [rows, columns]: [usize; 2], stride: usize| {
            let mut raw = ptr::null_mut();
            // SAFETY: the pointer is to a local.
            let code = unsafe {
                (library.cublasLtMatrixLayoutCreate)(
                    &mut raw,
                    data_type(scalar),
                    columns as u64,
                    rows as u64,
                    stride as i64,
                )
            };
            library.check("cublasLtMatrixLayoutCreate", code)?;
            Ok::<_, CudaError>(Described { raw, destroy: library.cublasLtMatrixLayoutDestroy })
        };
        let element = spec.element.scalar();
        Ok([
            layout(element, spec.layout.b_dims(spec.size.n, spec.size.k), stride_b)?,
            layout(element, spec.layout.a_dims(spec.size.m, spec.size.k), stride_a)?,
            layout(spec.output, [spec.size.m, spec.size.n], stride_d)?,
        ])
    }

    fn preference(&self) -> Result<Described<cublasLtMatmulPreference_t>, CudaError> {
        let library = self.0.library;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        let code = unsafe { (library.cublasLtMatmulPreferenceCreate)(&mut raw) };
        library.check("cublasLtMatmulPreferenceCreate", code)?;
        let preference = Described { raw, destroy: library.cublasLtMatmulPreferenceDestroy };
        let attribute = cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32;
        let bytes = ptr::from_ref(&WORKSPACE_BYTES).cast::<c_void>();
        // SAFETY: the pointer is to a constant of the size given.
        let code = unsafe {
            (library.cublasLtMatmulPreferenceSetAttribute)(
                preference.raw,
                attribute,
                bytes,
                size_of::<usize>(),
            )
        };
        library.check("cublasLtMatmulPreferenceSetAttribute", code)?;
        Ok(preference)
    }
}

fn data_type(scalar: Scalar) -> u32 {
    let kind = match scalar {
        Scalar::F32 => cudaDataType_t::CUDA_R_32F,
        Scalar::Bf16 => cudaDataType_t::CUDA_R_16BF,
        Scalar::F16 => cudaDataType_t::CUDA_R_16F,
    };
    kind as u32
}

impl LibraryGemm {
    /// Enqueues the product.
    ///
    /// # Safety
    /// As [`Gemm::launch`](super::Gemm::launch).
    ///
    /// # Errors
    /// [`CudaError::CublasLt`] when the library refuses.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &GemmTensors<'_>) -> Result<(), CudaError> {
        use cublasLtMatmulDescAttributes_t as A;
        let Handle { library, device, raw } = &*self.library.0;
        let _bound = device.make_current()?;
        if self.spec.epilogue == GemmEpilogue::StoreBias {
            self.library.set(&self.desc, A::CUBLASLT_MATMUL_DESC_BIAS_POINTER, tensors.bias)?;
        }
        let alpha = 1.0f32;
        let beta = if self.spec.epilogue == GemmEpilogue::Accumulate { 1.0f32 } else { 0.0 };
        let d = tensors.d.first().copied().unwrap_or(0);
        let source = self.spec.sources[0];
        let skipped = source.first * self.spec.strides[0] * self.spec.element.bytes();
        let a = tensors.a.get(source.tensor).copied().unwrap_or(0) + skipped as u64;
        let [first, second, result] = [&self.layouts[0], &self.layouts[1], &self.layouts[2]];
        // SAFETY: the objects are alive and the scalars locals, which the library reads before it returns; the rest is the
        // caller's promise.
        let code = unsafe {
            (library.cublasLtMatmul)(
                *raw,
                self.desc.raw,
                ptr::from_ref(&alpha).cast(),
                tensors.b,
                first.raw,
                a,
                second.raw,
                ptr::from_ref(&beta).cast(),
                d,
                result.raw,
                d,
                result.raw,
                &self.algorithm,
                self.workspace.address(),
                self.workspace.len(),
                stream.raw(),
            )
        };
        library.check("cublasLtMatmul", code)
    }
}
