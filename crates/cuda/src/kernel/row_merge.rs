//! The launcher of `row_merge.cuh`: the log-sum-exp merge of partial attention that came from other ranks.

use bytemuck::NoUninit;
use counterpoint_schedule::Accumulate;

use super::operand_rows::OperandRows;
use super::row_reduce::ReduceTypes;
use super::{MatrixUnit, RowMove, RowsFault, Specialisation, StartMark, blocks_of};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
const WARPS: u64 = 8;
/// Pointers of one launch (`kRowMergeSources`).
const SOURCES: usize = 128;
/// Heads that a warp merges before it looks for more (`kRowMergeHeads`).
const HEADS: u32 = 4;

/// Partial results of attention, (out, lse) pairs over disjoint columns, merged into their owner's rows, prepared to run
/// many times. The operands of a row are merged in the order of their peers. Logarithms are f32.
#[derive(Debug)]
pub struct RowMerge {
    function: Function,
    pieces: DeviceBuffer,
    operands: DeviceBuffer,
    count: u32,
    peers: usize,
    spec: RowMergeSpec,
    sm_count: u32,
}

/// What a merge of one pair is, apart from its moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMergeSpec {
    /// Whether the result's own contents are the first operand.
    pub accumulate: Accumulate,
    /// Types of out.
    pub types: ReduceTypes,
    /// Rows of the result.
    pub rows: usize,
    /// Heads of a row.
    pub heads: u32,
    /// Elements of one head of out.
    pub dim: u32,
}

impl RowMergeSpec {
    /// What warps of the kernel take from a list of so many pieces.
    pub(super) fn steps(&self, pieces: u32) -> u64 {
        u64::from(pieces) * u64::from(self.heads.div_ceil(HEADS).max(1))
    }

    /// Whether heads are multiples of what the kernel packs.
    pub(super) fn packs(&self) -> bool {
        self.dim.is_multiple_of(4)
    }
}

/// `RowMergeSources` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct RowMergeSources {
    out: [u64; SOURCES],
    lse: [u64; SOURCES],
}

/// `RowMergePiece` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(super) struct RowMergePiece {
    to: u32,
    rows: u32,
    operand_begin: u32,
    operand_end: u32,
}

/// `RowMergeOperand` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
pub(super) struct RowMergeOperand {
    from: u32,
    source: u32,
}

impl RowMerge {
    /// Compiles or finds the kernel for these types, so that [`RowMerge::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, types: ReduceTypes) -> Result<(), CudaError> {
        device.function(&source(device.arch(), types.normalised())).map(|_| ())
    }

    /// Makes the merge of `moves` ready. Peers are below 128. The lists are uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(stream: &Stream, spec: &RowMergeSpec, moves: &[RowMove]) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&source(device.arch(), spec.types.normalised()))?;
        let peers = moves.iter().map(|step| step.peer + 1).max().unwrap_or(0);
        if peers > SOURCES {
            let reason = RowsFault::Sources { ranks: peers, most: SOURCES }.into();
            return Err(CudaError::Launch { kernel: function.name().to_owned(), reason });
        }
        let (pieces, operands) = lists(spec, moves);
        Ok(Self {
            function,
            count: pieces.len() as u32,
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
            operands: DeviceBuffer::from_slice(stream, &operands)?,
            peers,
            spec: *spec,
            sm_count: device.sm_count(),
        })
    }

    /// Enqueues the merge. `source` gives the addresses of a peer's (out, lse), `result` those of the own pair.
    ///
    /// # Safety
    /// As [`RowCopy::launch`](super::RowCopy::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        source: impl Fn(usize) -> (u64, u64),
        result: (u64, u64),
        started: &StartMark,
    ) -> Result<(), CudaError> {
        if self.count == 0 {
            return Ok(());
        }
        let mut sources = RowMergeSources { out: [0; SOURCES], lse: [0; SOURCES] };
        let mut addresses = result.0;
        for peer in 0..self.peers {
            (sources.out[peer], sources.lse[peer]) = source(peer);
            addresses |= sources.out[peer];
        }
        let RowMergeSpec { heads, dim, accumulate, .. } = self.spec;
        let packed = self.spec.packs() && addresses.is_multiple_of(16);
        let blocks = blocks_of(self.spec.steps(self.count).div_ceil(WARPS), self.sm_count);
        let arguments = (
            sources,
            self.pieces.address(),
            self.operands.address(),
            result.0,
            result.1,
            self.count,
            heads,
            dim,
            u32::from(accumulate == Accumulate::Continue),
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

/// The rows of the result, cut into what a warp merges, and their operands.
pub(super) fn lists(spec: &RowMergeSpec, moves: &[RowMove]) -> (Vec<RowMergePiece>, Vec<RowMergeOperand>) {
    let (mut pieces, mut operands) = (Vec::new(), Vec::new());
    // Rows with more heads are merged in several steps, each row by itself.
    let most = (HEADS / spec.heads.max(1)).max(1) as usize;
    let all = OperandRows::of_moves(moves, spec.rows, spec.accumulate == Accumulate::Start);
    for (part, of_part) in all.parts() {
        let mut done = 0;
        while done < part.len() {
            let rows = most.min(part.len() - done);
            let operand_begin = operands.len() as u32;
            operands.extend(
                of_part
                    .iter()
                    .map(|&(peer, from)| RowMergeOperand { from: from + done as u32, source: peer }),
            );
            let operand_end = operands.len() as u32;
            let to = (part.start + done) as u32;
            pieces.push(RowMergePiece { to, rows: rows as u32, operand_begin, operand_end });
            done += rows;
        }
    }
    (pieces, operands)
}

fn source(arch: Arch, types: ReduceTypes) -> KernelSource {
    let name = format!("row_merge_{}", types.name());
    let result = types.result.cpp();
    kernel_source(&name, arch)
        .line("#include \"row_merge.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ RowMergeSources sources, const RowMergePiece* pieces,"
        ))
        .line(format_args!(
            "    const RowMergeOperand* operands, {result}* result, float* result_lse, u32 count,"
        ))
        .line("    u32 heads, u32 dim, u32 accumulate, u32 packed) {")
        .line(format_args!(
            "  counterpoint::row_merge<{}>(sources, pieces, operands, result, result_lse, count, heads, dim,",
            types.cpp()
        ))
        .line("      accumulate, packed);")
        .line("}")
}

/// The types that attention uses; others are compiled when they are asked for.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let specialisation = |types| Specialisation {
        source: source(arch, types),
        matrix_unit: MatrixUnit::None,
        register_limit: 64,
    };
    ReduceTypes::shipped().into_iter().map(specialisation).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("row_merge.cuh", RowMergeSources { out, lse }),
        shared_layout!("row_merge.cuh", RowMergePiece { to, rows, operand_begin, operand_end }),
        shared_layout!("row_merge.cuh", RowMergeOperand { from, source }),
    ]
}
