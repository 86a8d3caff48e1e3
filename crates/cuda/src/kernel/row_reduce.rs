//! The launcher of `row_reduce.cuh`: the sums of a group-reduce, in the order of ranks.

use std::sync::Arc;

use bytemuck::NoUninit;
use counterpoint_schedule::{Accumulate, ReduceOp};

use super::operand_rows::OperandRows;
use super::scalar::Scalar;
use super::{MatrixUnit, RowMove, RowsFault, Specialisation, StartMark, blocks_of};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
const WARPS: u64 = 8;
/// Blocks of a multiprocessor, and the registers that this leaves a thread.
const BLOCKS: u32 = 3;
const REGISTERS: u32 = 80;
/// Pointers of one launch (`kRowReduceSources`).
const SOURCES: usize = 256;
/// Elements that a warp sums at most before it looks for more, and at least unless there are no more. Multiples of what
/// the kernel packs, the first of what a warp of it loads at once too.
const MOST_ELEMENTS: u64 = 9 << 9;
const LEAST_ELEMENTS: u64 = 512;
/// Elements that the kernel loads at once at most, where it can: 16 bytes of the narrowest.
const PACK: u64 = 8;

/// The element types of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReduceTypes {
    /// Of the partial results.
    pub partial: Scalar,
    /// On the wire.
    pub wire: Scalar,
    /// In which operands are combined.
    pub sum: Scalar,
    /// Of the result.
    pub result: Scalar,
}

impl ReduceTypes {
    /// A wire that keeps every value is as good as none.
    pub(super) fn normalised(mut self) -> Self {
        if self.partial.survives(self.wire) {
            self.wire = self.partial;
        }
        self
    }

    pub(super) fn name(&self) -> String {
        [self.partial, self.wire, self.sum, self.result].map(Scalar::name).join("_")
    }

    pub(super) fn cpp(&self) -> String {
        [self.partial, self.wire, self.sum, self.result].map(Scalar::cpp).join(", ")
    }

    /// Those that attention and its collectives use: everything in one type, or summed in f32.
    pub(super) fn shipped() -> Vec<Self> {
        use Scalar::{Bf16, F16, F32};
        let one = |scalar| Self { partial: scalar, wire: scalar, sum: F32, result: scalar };
        let mut all = vec![one(F32)];
        for narrow in [Bf16, F16] {
            all.push(one(narrow));
            all.push(Self { partial: F32, wire: narrow, sum: F32, result: F32 });
            all.push(Self { partial: narrow, wire: narrow, sum: F32, result: F32 });
        }
        all
    }
}

/// Partial results of rows summed (or averaged) into their owner's rows, prepared to run many times. The operands of a row
/// are combined in the order of their peers, so a result has the same bits every time.
#[derive(Debug)]
pub struct RowReduce {
    function: Function,
    pieces: DeviceBuffer,
    operands: DeviceBuffer,
    count: u32,
    peers: usize,
    accumulate: bool,
    /// Whether rows are multiples of what the kernel packs.
    packs: bool,
    sm_count: u32,
}

/// `RowReduceSources` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct RowReduceSources {
    at: [u64; SOURCES],
}

/// `RowReducePiece` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(super) struct RowReducePiece {
    to: u64,
    count: u32,
    operand_begin: u32,
    operand_end: u32,
    divisor: u32,
}

impl RowReducePiece {
    /// The same piece where its operands are listed behind so many others.
    pub(super) fn behind(self, operands: u32) -> Self {
        let (operand_begin, operand_end) = (self.operand_begin + operands, self.operand_end + operands);
        Self { operand_begin, operand_end, ..self }
    }
}

/// `RowReduceOperand` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(super) struct RowReduceOperand {
    from: u64,
    source: u32,
    reserved: u32,
}

/// What a reduction of one tensor is, apart from its moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowReduceSpec {
    /// [`ReduceOp::Sum`] or [`ReduceOp::Avg`].
    pub op: ReduceOp,
    /// Whether the result's own contents are the first operand.
    pub accumulate: Accumulate,
    /// Types.
    pub types: ReduceTypes,
    /// Rows of the result.
    pub rows: usize,
    /// Elements of one row.
    pub row_elements: u64,
    /// Of a mean: by what each row is divided, where that is not how many operands it has here.
    pub divisors: Option<Arc<[u32]>>,
}

impl RowReduceSpec {
    /// Whether rows are multiples of what the kernel packs.
    pub(super) fn packs(&self) -> bool {
        self.row_elements.is_multiple_of(PACK)
    }
}

impl RowReduce {
    /// Compiles or finds the kernel for these types, so that [`RowReduce::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, types: ReduceTypes) -> Result<(), CudaError> {
        device.function(&source(device.arch(), types.normalised())).map(|_| ())
    }

    /// Makes the reduction of `moves` ready. Peers are below 256. The lists are uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(stream: &Stream, spec: &RowReduceSpec, moves: &[RowMove]) -> Result<Self, CudaError> {
        let rows = OperandRows::of_moves(moves, spec.rows, spec.accumulate == Accumulate::Start);
        let peers = moves.iter().map(|step| step.peer + 1).max().unwrap_or(0);
        Self::of_rows(stream, spec, &rows, peers)
    }

    /// The same of `terms` of one peer, each its row and that of the result, which are added in their order; `None` where some row of the
    /// result has none.
    ///
    /// # Errors
    /// As [`RowReduce::new`].
    pub fn of_terms(
        stream: &Stream,
        spec: &RowReduceSpec,
        terms: &[(u32, u32)],
    ) -> Result<Option<Self>, CudaError> {
        let rows = OperandRows::of_terms(spec.rows, terms);
        rows.map(|rows| Self::of_rows(stream, spec, &rows, 1)).transpose()
    }

    fn of_rows(
        stream: &Stream,
        spec: &RowReduceSpec,
        rows: &OperandRows,
        peers: usize,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&source(device.arch(), spec.types.normalised()))?;
        if peers > SOURCES {
            let reason = RowsFault::Sources { ranks: peers, most: SOURCES }.into();
            return Err(CudaError::Launch { kernel: function.name().to_owned(), reason });
        }
        let (pieces, operands) = lists(spec, rows, device.sm_count());
        Ok(Self {
            function,
            count: pieces.len() as u32,
            pieces: DeviceBuffer::from_vec(stream, pieces)?,
            operands: DeviceBuffer::from_vec(stream, operands)?,
            peers,
            accumulate: spec.accumulate == Accumulate::Continue,
            packs: spec.packs(),
            sm_count: device.sm_count(),
        })
    }

    /// One more than the highest of its peers.
    pub fn peers(&self) -> usize {
        self.peers
    }

    /// Enqueues the reduction, on `sms` multiprocessors at most where that is said. `source` gives the address of a peer's
    /// partial results.
    ///
    /// # Safety
    /// As [`RowCopy::launch`](super::RowCopy::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        sms: Option<u32>,
        source: impl Fn(usize) -> u64,
        result: u64,
        started: &StartMark,
    ) -> Result<(), CudaError> {
        if self.count == 0 {
            return Ok(());
        }
        let mut sources = RowReduceSources { at: [0; SOURCES] };
        let mut addresses = result;
        for peer in 0..self.peers {
            sources.at[peer] = source(peer);
            addresses |= sources.at[peer];
        }
        let packed = self.packs && addresses.is_multiple_of(16);
        let most = sms.map_or(u32::MAX, |sms| sms.saturating_mul(BLOCKS));
        let blocks = blocks_of(u64::from(self.count).div_ceil(WARPS), self.sm_count).min(most);
        let arguments = (
            sources,
            self.pieces.address(),
            self.operands.address(),
            result,
            self.count,
            u32::from(self.accumulate),
            u32::from(packed),
        );
        // SAFETY: the arguments are those of the kernel in `source`, the lists live as long as this value, whose memory is
        // freed only after what is enqueued; the rest is the caller's promise.
        unsafe {
            let launch = Launch::linear(blocks, THREADS);
            self.function.launch_signalling(stream, &launch, &arguments, started.take().as_ref())
        }
    }
}

/// The rows of the result, cut into what a warp sums.
pub(super) fn lists(
    spec: &RowReduceSpec,
    rows: &OperandRows,
    sm_count: u32,
) -> (Vec<RowReducePiece>, Vec<RowReduceOperand>) {
    let accumulate = spec.accumulate == Accumulate::Continue;
    let row = spec.row_elements;
    let total = rows.rows() * row;
    let most = (total / (u64::from(sm_count) * 64)).clamp(LEAST_ELEMENTS, MOST_ELEMENTS);
    let most = most.next_multiple_of(LEAST_ELEMENTS);
    let cut = spec.divisors.as_ref().map(|divisors| rows.cut_where(divisors));
    let rows = cut.as_ref().unwrap_or(rows);
    let (parts, of_parts) = rows.lengths();
    // Rows that are summed one by one are cut alike.
    let each = row.div_ceil(most).max(1) as usize;
    let (mut pieces, mut operands) = (Vec::with_capacity(parts * each), Vec::with_capacity(of_parts * each));
    for (part, of_part) in rows.parts() {
        let elements = part.len() as u64 * row;
        let divisor = match (spec.op, &spec.divisors) {
            (ReduceOp::Avg, Some(divisors)) => divisors[part.start].max(1),
            (ReduceOp::Avg, None) => (of_part.len() as u32 + u32::from(accumulate)).max(1),
            (ReduceOp::Sum | ReduceOp::Lse, _) => 1,
        };
        let mut done = 0;
        while done < elements {
            let count = most.min(elements - done);
            let operand_begin = operands.len() as u32;
            for &(source, from) in of_part {
                operands.push(RowReduceOperand { from: u64::from(from) * row + done, source, reserved: 0 });
            }
            let operand_end = operands.len() as u32;
            let to = part.start as u64 * row + done;
            pieces.push(RowReducePiece { to, count: count as u32, operand_begin, operand_end, divisor });
            done += count;
        }
    }
    (pieces, operands)
}

fn source(arch: Arch, types: ReduceTypes) -> KernelSource {
    let name = format!("row_reduce_{}", types.name());
    let result = types.result.cpp();
    kernel_source(&name, arch)
        .line("#include \"row_reduce.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS}, {BLOCKS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ RowReduceSources sources, const RowReducePiece* pieces,"
        ))
        .line(format_args!(
            "    const RowReduceOperand* operands, {result}* result, u32 count, u32 accumulate,"
        ))
        .line("    u32 packed) {")
        .line(format_args!(
            "  counterpoint::row_reduce<{}>(sources, pieces, operands, result, count, accumulate, packed);",
            types.cpp()
        ))
        .line("}")
}

/// The types that attention uses; others are compiled when they are asked for.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let specialisation = |types| Specialisation {
        source: source(arch, types),
        matrix_unit: MatrixUnit::None,
        register_limit: REGISTERS,
    };
    ReduceTypes::shipped().into_iter().map(specialisation).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("row_reduce.cuh", RowReduceSources { at }),
        shared_layout!("row_reduce.cuh", RowReducePiece { to, count, operand_begin, operand_end, divisor }),
        shared_layout!("row_reduce.cuh", RowReduceOperand { from, source, reserved }),
    ]
}
