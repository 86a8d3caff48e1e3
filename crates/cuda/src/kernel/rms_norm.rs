use bytemuck::NoUninit;

use super::{ElementType, GemmRows, MatrixUnit, SharedLayout, Specialisation, blocks_of, shared_layout};
use crate::arch::Arch;
use crate::{CudaError, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
/// Tensors of one launch (`kRmsNormSources`).
const SOURCES: usize = 64;
/// Elements that the kernel loads at once where it can.
const PACK: usize = 8;

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
    /// Residual and its sum with the rows, `[rows, columns]` each.
    pub residual: Option<(u64, u64)>,
    /// `[columns]`.
    pub weight: u64,
    /// `[rows, columns]`.
    pub out: u64,
}

/// RMSNorm of rows that come in pieces, prepared to run many times.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    function: Function,
    pieces: DeviceBuffer,
    tensors: usize,
    counts: [u32; 3],
    epsilon: f32,
    blocks: u32,
}

/// `RmsNormSources` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct RmsNormSources {
    at: [u64; SOURCES],
}

/// `RmsNormPiece` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct RmsNormPiece {
    source: u32,
    first: u32,
    begin: u32,
    end: u32,
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
        let pack = if spec.columns.is_multiple_of(PACK) { PACK } else { 1 };
        let function = device.function(&source(device.arch(), spec.element, pack))?;
        let rows: usize = spec.rows.iter().map(|piece| piece.count).sum();
        let tensors = spec.rows.iter().map(|piece| piece.tensor + 1).max().unwrap_or(0);
        let (Ok(row_count), Ok(columns)) = (u32::try_from(rows), u32::try_from(spec.columns)) else {
            return Err(refused(format!("{rows} rows of {} columns", spec.columns)));
        };
        if tensors > SOURCES {
            return Err(refused(format!("rows of {tensors} tensors, it takes those of {SOURCES}")));
        }
        let mut begin = 0;
        let pieces = spec.rows.iter().map(|piece| {
            let end = begin + piece.count as u32;
            let (source, first) = (piece.tensor as u32, piece.first as u32);
            RmsNormPiece { source, first, begin: std::mem::replace(&mut begin, end), end }
        });
        let pieces: Vec<RmsNormPiece> = pieces.collect();
        Ok(Self {
            function,
            tensors,
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
            counts: [pieces.len() as u32, row_count, columns],
            epsilon: spec.epsilon,
            blocks: blocks_of(rows as u64, device.sm_count()),
        })
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
        let [piece_count, rows, columns] = self.counts;
        if tensors.src.len() != self.tensors {
            let given = tensors.src.len();
            return Err(refused(format!("{given} addresses, it has {} tensors", self.tensors)));
        }
        if rows == 0 {
            return Ok(());
        }
        let mut sources = RmsNormSources { at: [0; SOURCES] };
        sources.at[..tensors.src.len()].copy_from_slice(tensors.src);
        let (residual, sum) = tensors.residual.unwrap_or((0, 0));
        let arguments = RmsNormArguments {
            pieces: self.pieces.address(),
            residual,
            sum,
            weight: tensors.weight,
            out: tensors.out,
            piece_count,
            rows,
            columns,
            epsilon: self.epsilon,
        };
        // SAFETY: the arguments are those of the kernel in `source`, a test compares their layouts; the pieces have all rows, by `new`;
        // the rest is the caller's promise.
        unsafe { self.function.launch(stream, &Launch::linear(self.blocks, THREADS), &(sources, arguments)) }
    }
}

fn refused(reason: String) -> CudaError {
    CudaError::Launch { kernel: "rms_norm".to_owned(), reason }
}

fn source(arch: Arch, element: ElementType, pack: usize) -> KernelSource {
    let element = element.scalar();
    let name = format!("rms_norm_{}_{pack}", element.name());
    KernelSource::new(&name, arch)
        .line("#include \"rms_norm.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("static_assert(kRmsNormThreads == {THREADS}, \"blocks\");"))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ RmsNormSources sources,"))
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
    vec![
        shared_layout!("rms_norm.cuh", RmsNormSources { at }),
        shared_layout!("rms_norm.cuh", RmsNormPiece { source, first, begin, end }),
        shared_layout!(
            "rms_norm.cuh",
            RmsNormArguments { pieces, residual, sum, weight, out, piece_count, rows, columns, epsilon }
        ),
    ]
}
