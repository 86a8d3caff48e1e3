use super::{MatrixUnit, Scalar, SharedLayout, Specialisation, blocks_of, shared_layout};
use crate::arch::Arch;
use crate::{CudaError, Device, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
/// Elements that the kernel loads at once where it can.
const PACK: usize = 8;

/// A residual added to rows, and a norm of them: `sum = src + residual`, rounded, and
/// `dst = sum / sqrt(mean(sum^2) + epsilon) * weight` (RMSNorm). All tensors have one type; the calculation is in f32.
#[derive(Clone, Debug)]
pub struct ResidualNorm {
    function: Function,
    rows: u32,
    columns: u32,
    epsilon: f32,
    blocks: u32,
}

/// Addresses of one run, multiples of 16.
#[derive(Clone, Copy, Debug)]
pub struct ResidualNormTensors {
    /// `[rows, columns]`.
    pub src: u64,
    /// `[rows, columns]`.
    pub residual: u64,
    /// `[columns]`.
    pub weight: u64,
    /// `[rows, columns]`, written.
    pub sum: u64,
    /// `[rows, columns]`, written.
    pub dst: u64,
}

/// `ResidualNormArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ResidualNormArguments {
    src: u64,
    residual: u64,
    weight: u64,
    sum: u64,
    dst: u64,
    rows: u32,
    columns: u32,
    epsilon: f32,
}

impl ResidualNorm {
    /// The kernel for rows of a type on a device.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for more rows or columns than it counts; when it cannot be compiled or loaded.
    pub fn new(
        device: &Device,
        element: Scalar,
        [rows, columns]: [usize; 2],
        epsilon: f32,
    ) -> Result<Self, CudaError> {
        let (Ok(row_count), Ok(column_count)) = (u32::try_from(rows), u32::try_from(columns)) else {
            let reason = format!("{rows} rows of {columns} columns");
            return Err(CudaError::Launch { kernel: "residual_norm".to_owned(), reason });
        };
        let function = device.function(&source(device.arch(), element, pack_of(columns)))?;
        let blocks = blocks_of(rows as u64, device.sm_count());
        Ok(Self { function, rows: row_count, columns: column_count, epsilon, blocks })
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// The tensors are as [`ResidualNorm::new`] was told; they live until the kernel has run, and those that are written overlap
    /// nothing.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &ResidualNormTensors) -> Result<(), CudaError> {
        let Self { rows, columns, epsilon, .. } = *self;
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let ResidualNormTensors { src, residual, weight, sum, dst } = *tensors;
        let arguments = ResidualNormArguments { src, residual, weight, sum, dst, rows, columns, epsilon };
        // SAFETY: the arguments are those of the kernel in `source`, a test compares their layout; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &Launch::linear(self.blocks, THREADS), &(arguments,)) }
    }
}

fn pack_of(columns: usize) -> usize {
    if columns.is_multiple_of(PACK) { PACK } else { 1 }
}

fn source(arch: Arch, element: Scalar, pack: usize) -> KernelSource {
    let name = format!("residual_norm_{}_{pack}", element.name());
    KernelSource::new(&name, arch)
        .line("#include \"residual_norm.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("static_assert(kResidualNormThreads == {THREADS}, \"blocks\");"))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ ResidualNormArguments arguments) {{"))
        .line(format_args!("  residual_norm<{}, {pack}>(arguments);", element.cpp()))
        .line("}")
}

/// Every kernel that [`ResidualNorm`] may ask for.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let choices = Scalar::ALL.into_iter().flat_map(|element| [(element, 1), (element, PACK)]);
    choices
        .map(|(element, pack)| Specialisation {
            source: source(arch, element, pack),
            matrix_unit: MatrixUnit::None,
            register_limit: 96,
        })
        .collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "residual_norm.cuh",
        ResidualNormArguments { src, residual, weight, sum, dst, rows, columns, epsilon }
    )]
}
