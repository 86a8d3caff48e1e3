//! The launcher of `rms_norm.cuh`: RMSNorm of rows in pieces, with or without a residual and a weight, behind a row-parallel layer.

use super::row_pieces::{PACK, RowPieces, pack_of};
use super::{ElementType, GemmRows, MatrixUnit, Specialisation, blocks_of};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Function, KernelSource, Launch, LaunchStart, Stream};

const KERNEL: &str = "rms_norm";
const THREADS: u32 = 512;

/// What is normalised.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsNormSpec {
    /// The rows, piece after piece, of tensors whose rows are contiguous.
    pub rows: Vec<GemmRows>,
    /// Their elements.
    pub columns: usize,
    /// Type of all tensors.
    pub element: ElementType,
    /// What is added to the mean of squares.
    pub epsilon: f32,
}

/// Addresses of a launch's tensors, multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RmsNormTensors<'a> {
    /// Those that the rows are of.
    pub src: &'a [u64],
    /// What is added to the rows, `[rows, columns]`.
    pub residual: Option<u64>,
    /// Where what is normalised goes, the rows or their sum with the residual, `[rows, columns]`.
    pub sum: u64,
    /// `[columns]`; without one it is 1.
    pub weight: Option<u64>,
    /// `[rows, columns]`.
    pub out: u64,
}

/// RMSNorm of rows that come in pieces, prepared to run many times.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    function: Function,
    pieces: RowPieces,
    epsilon: f32,
    launch: Launch,
}

/// `RmsNormArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RmsNormArguments {
    pieces: u64,
    residual: u64,
    sum: u64,
    weight: u64,
    out: u64,
    piece_count: u32,
    rows: u32,
    columns: u32,
    epsilon: f32,
}

impl RmsNorm {
    /// Compiles or finds the kernel, and uploads the list of pieces by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for more tensors or rows than a kernel takes; when it cannot be compiled, or memory is short.
    pub fn new(stream: &Stream, spec: &RmsNormSpec) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&source(device.arch(), spec.element, pack_of(spec.columns)))?;
        let pieces = RowPieces::new(stream, KERNEL, &spec.rows, spec.columns)?;
        let blocks = blocks_of(u64::from(pieces.rows), device.sm_count());
        // It mostly follows a kernel that sums its rows, and may take multiprocessors as these become free.
        let start = match device.capability().major {
            ..9 => LaunchStart::AfterPrevious,
            9.. => LaunchStart::Overlapping,
        };
        let launch = Launch::linear(blocks, THREADS).start(start);
        Ok(Self { function, pieces, epsilon: spec.epsilon, launch })
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// The tensors are those of the spec and live until the kernel has run, as does this value; nothing else writes to what is read, or
    /// uses what is written, meanwhile.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for too many or few addresses, or the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &RmsNormTensors<'_>) -> Result<(), CudaError> {
        let sources = self.pieces.sources(tensors.src)?;
        if self.pieces.rows == 0 {
            return Ok(());
        }
        let arguments = RmsNormArguments {
            pieces: self.pieces.address(),
            residual: tensors.residual.unwrap_or(0),
            sum: tensors.sum,
            weight: tensors.weight.unwrap_or(0),
            out: tensors.out,
            piece_count: self.pieces.count,
            rows: self.pieces.rows,
            columns: self.pieces.columns,
            epsilon: self.epsilon,
        };
        // SAFETY: the arguments are those of the kernel in `source`, a test compares their layouts; the pieces have all rows, by `new`;
        // the rest is the caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(sources, arguments)) }
    }
}

fn source(arch: Arch, element: ElementType, pack: usize) -> KernelSource {
    let element = element.scalar();
    let name = format!("rms_norm_{}_{pack}", element.name());
    kernel_source(&name, arch)
        .line("#include \"rms_norm.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("static_assert(kRmsNormThreads == {THREADS}, \"blocks\");"))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ RowSources sources,"))
        .line("    const __grid_constant__ RmsNormArguments arguments) {")
        .line(format_args!("  rms_norm<{}, {pack}>(sources, arguments);", element.cpp()))
        .line("}")
}

/// Every kernel that [`RmsNorm`] may ask for.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let all =
        ElementType::ALL.into_iter().flat_map(|element| [1, PACK].map(|pack| source(arch, element, pack)));
    all.map(|source| Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 64 }).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "rms_norm.cuh",
        RmsNormArguments { pieces, residual, sum, weight, out, piece_count, rows, columns, epsilon }
    )]
}
