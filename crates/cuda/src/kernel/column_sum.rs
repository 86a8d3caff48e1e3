//! The launcher of `column_sum.cuh`: gradients of biases, and partial sums of other gradients, with the same bits whatever SMs they run on.

use super::row_pieces::{PACK, RowPieces, pack_of};
use super::{ElementType, GemmRows, MatrixUnit, Scalar, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DeviceBuffer, Function, KernelSource, Launch, Stream};

const KERNEL: &str = "column_sum";
const THREADS: u32 = 256;
/// Blocks that a multiprocessor has room for.
const BLOCKS: u32 = 8;
/// Rows that a block sums at a time (`kColumnSumRows`).
const ROWS: usize = 128;

/// What columns are summed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnSumSpec {
    /// The rows of the matrix, piece after piece, of tensors whose rows are contiguous.
    pub rows: Vec<GemmRows>,
    /// Its columns.
    pub columns: usize,
    /// Its elements.
    pub element: Scalar,
    /// Elements of the sums: that type, or f32.
    pub result: Scalar,
    /// Whether sums are added to what is there.
    pub adds: bool,
    /// Multiprocessors to leave to others. No bit of a result depends on it.
    pub sm_margin: u32,
}

/// The sums of a matrix's columns, prepared to run many times, one run at a time: the memory of its parts is its own. The order of
/// the additions depends on the number of rows alone.
#[derive(Debug)]
pub struct ColumnSum {
    function: Function,
    pieces: RowPieces,
    partials: DeviceBuffer,
    arrivals: DeviceBuffer,
    adds: bool,
    blocks: u32,
}

/// `ColumnSumArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct ColumnSumArguments {
    pieces: u64,
    dst: u64,
    partials: u64,
    arrivals: u64,
    piece_count: u32,
    rows: u32,
    columns: u32,
    adds: u32,
}

impl ColumnSum {
    /// Makes the sums ready: compiles or finds the kernel, and uploads the list of pieces by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for more tensors or rows than a kernel takes; when it cannot be compiled, or memory is short.
    pub fn new(stream: &Stream, spec: &ColumnSumSpec) -> Result<Self, CudaError> {
        let device = stream.device();
        let pack = pack_of(spec.columns);
        let choice = Choice { element: spec.element, result: spec.result, pack };
        let function = device.function(&choice.source(device.arch()))?;
        let pieces = RowPieces::new(stream, KERNEL, &spec.rows, spec.columns)?;
        let row_blocks = (pieces.rows as usize).div_ceil(ROWS);
        let column_blocks = spec.columns.div_ceil(32 * pack);
        let most = device.sm_count().saturating_sub(spec.sm_margin).max(1) * BLOCKS;
        Ok(Self {
            function,
            pieces,
            partials: DeviceBuffer::new(device, row_blocks * spec.columns * size_of::<f32>())?,
            arrivals: DeviceBuffer::from_slice(stream, &vec![0u32; column_blocks])?,
            adds: spec.adds,
            blocks: ((row_blocks * column_blocks) as u32).min(most),
        })
    }

    /// Enqueues the sums. `tensors` are the addresses of what the spec's rows are of, `dst` that of `[columns]`.
    ///
    /// # Safety
    /// They are what the spec says, aligned to 16 bytes, and live until the kernel has run, as does this value; nothing else
    /// writes to them meanwhile.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for too many or few addresses, or the driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &[u64], dst: u64) -> Result<(), CudaError> {
        let sources = self.pieces.sources(tensors)?;
        if self.blocks == 0 {
            return Ok(());
        }
        let arguments = ColumnSumArguments {
            pieces: self.pieces.address(),
            dst,
            partials: self.partials.address(),
            arrivals: self.arrivals.address(),
            piece_count: self.pieces.count,
            rows: self.pieces.rows,
            columns: self.pieces.columns,
            adds: u32::from(self.adds),
        };
        // SAFETY: the arguments are those of the kernel in `Choice::source`, a test compares their layouts; lists and partial
        // sums are as long as the kernel takes them to be, by `new`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &Launch::linear(self.blocks, THREADS), &(sources, arguments)) }
    }
}

#[derive(Clone, Copy)]
struct Choice {
    element: Scalar,
    result: Scalar,
    pack: usize,
}

impl Choice {
    fn source(self, arch: Arch) -> KernelSource {
        let Self { element, result, pack } = self;
        let name = format!("column_sum_{}_{}_{pack}", element.name(), result.name());
        kernel_source(&name, arch)
            .line("#include \"column_sum.cuh\"")
            .line("using namespace counterpoint;")
            .line(format_args!(
                "static_assert(kColumnSumRows == {ROWS} && kColumnSumThreads == {THREADS}, \"blocks\");"
            ))
            .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
            .line(format_args!("{name}(const __grid_constant__ RowSources sources,"))
            .line("    const __grid_constant__ ColumnSumArguments arguments) {")
            .line(format_args!(
                "  column_sum<{}, {}, {pack}>(sources, arguments);",
                element.cpp(),
                result.cpp()
            ))
            .line("}")
    }
}

/// Every kernel that [`ColumnSum`] may ask for.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let narrow = ElementType::ALL.map(ElementType::scalar);
    let pairs = narrow.into_iter().flat_map(|element| [(element, element), (element, Scalar::F32)]);
    let pairs = pairs.chain([(Scalar::F32, Scalar::F32)]);
    let all = pairs.flat_map(|(element, result)| [1, PACK].map(|pack| Choice { element, result, pack }));
    let kernel = |choice: Choice| {
        let source = choice.source(arch);
        Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 64 }
    };
    all.map(kernel).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "column_sum.cuh",
        ColumnSumArguments { pieces, dst, partials, arrivals, piece_count, rows, columns, adds }
    )]
}
