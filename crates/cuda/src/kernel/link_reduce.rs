use bytemuck::NoUninit;
use counterpoint_schedule::{Accumulate, ReduceOp};

use super::link_meeting::{LINK_RANKS, LINK_TENSORS, LinkCall};
use super::operand_rows::operand_rows;
use super::row_reduce::ReduceTypes;
use super::scalar::Scalar;
use super::{MatrixUnit, RowMove, SharedLayout, Specialisation, shared_layout};
use crate::arch::Arch;
use crate::{CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 288;
/// Elements of a piece at most (`kLinkElements`), and at least unless there are no more.
const MOST_ELEMENTS: u64 = 4096;
const LEAST_ELEMENTS: u64 = 512;
/// Pieces that a block has at least, while they are not shorter than that.
const PIECES: u64 = 8;
/// `kLinkOperandBytes`.
const OPERAND_BYTES: u64 = 192 << 10;

/// Partial results of rows summed (or averaged) in f32 into their owner's rows, straight from the memories of GPUs that reach
/// each other, for tensors of one pattern, prepared to run many times. Ranks meet inside the kernel; operands are added in the
/// order of their ranks.
#[derive(Debug)]
pub struct LinkReduce {
    function: Function,
    pieces: DeviceBuffer,
    operands: DeviceBuffer,
    count: u32,
    blocks: u32,
    accumulate: Accumulate,
    shared_bytes: u32,
}

/// What a reduction is, apart from its moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkReduceSpec {
    /// [`ReduceOp::Sum`] or [`ReduceOp::Avg`].
    pub op: ReduceOp,
    /// Whether the results' own contents are the first operand.
    pub accumulate: Accumulate,
    /// Types, the same for all tensors.
    pub types: ReduceTypes,
    /// Rows of each result, and elements of one of its rows.
    pub tensors: Vec<(usize, u64)>,
}

/// `LinkReducePiece` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct LinkReducePiece {
    to: u64,
    count: u32,
    operand_begin: u32,
    operand_end: u32,
    divisor: u32,
    tensor: u32,
    reserved: u32,
}

/// `LinkOperand` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct LinkOperand {
    from: u64,
    rank: u32,
    reserved: u32,
}

impl LinkReduce {
    /// Whether there is a kernel for tensors of these types with rows of so many elements: the wire rounds nothing, sums are in
    /// f32, and the copy engine takes multiples of 16 bytes.
    pub fn takes(types: ReduceTypes, row_elements: u64) -> bool {
        types.partial.survives(types.wire)
            && types.sum == Scalar::F32
            && (row_elements * types.partial.bytes()).is_multiple_of(16)
    }

    /// Compiles or finds the kernel, so that [`LinkReduce::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, types: ReduceTypes) -> Result<(), CudaError> {
        device.function(&source(device.arch(), types)).map(|_| ())
    }

    /// Makes the reduction of `moves`, whose peers are ranks, ready for a kernel of at most `num_sms` blocks. The lists are
    /// uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(
        stream: &Stream,
        spec: &LinkReduceSpec,
        moves: &[RowMove],
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&source(device.arch(), spec.types))?;
        let (pieces, operands) = lists(spec, moves, num_sms);
        Ok(Self {
            function,
            count: pieces.len() as u32,
            blocks: num_sms.min(pieces.len() as u32).max(1),
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
            operands: DeviceBuffer::from_slice(stream, &operands)?,
            accumulate: spec.accumulate,
            shared_bytes: shared_bytes(spec.types.partial),
        })
    }

    /// Enqueues the reduction.
    ///
    /// # Safety
    /// As [`LinkCopy::launch`](super::LinkCopy::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(&self, stream: &Stream, call: &LinkCall) -> Result<(), CudaError> {
        let launch = Launch::linear(self.blocks, THREADS).shared_bytes(self.shared_bytes);
        let accumulate = u32::from(self.accumulate == Accumulate::Continue);
        let arguments = (*call, self.pieces.address(), self.operands.address(), self.count, accumulate);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &launch, &arguments) }
    }
}

/// The rows of the results, cut into what a block sums at once.
fn lists(spec: &LinkReduceSpec, moves: &[RowMove], num_sms: u32) -> (Vec<LinkReducePiece>, Vec<LinkOperand>) {
    let accumulate = spec.accumulate == Accumulate::Continue;
    let rows = spec.tensors.iter().map(|&(rows, _)| operand_rows(moves, rows, !accumulate));
    let rows: Vec<_> = rows.collect();
    let counted = rows.iter().zip(&spec.tensors).map(|(parts, &(_, row))| {
        let rows: u64 = parts.iter().map(|part| part.rows.len() as u64).sum();
        rows * row
    });
    let total: u64 = counted.sum();
    let most = total.div_ceil(u64::from(num_sms.max(1)) * PIECES).next_multiple_of(LEAST_ELEMENTS);
    let most = most.clamp(LEAST_ELEMENTS, MOST_ELEMENTS);
    let (mut pieces, mut operands) = (Vec::new(), Vec::new());
    for (tensor, (parts, &(_, row))) in rows.iter().zip(&spec.tensors).enumerate() {
        for part in parts {
            let elements = part.rows.len() as u64 * row;
            let divisor = match spec.op {
                ReduceOp::Avg => (part.operands.len() as u32 + u32::from(accumulate)).max(1),
                ReduceOp::Sum | ReduceOp::Lse => 1,
            };
            for offset in (0..elements).step_by(most as usize) {
                let operand_begin = operands.len() as u32;
                operands.extend(part.operands.iter().map(|&(rank, from)| LinkOperand {
                    from: from as u64 * row + offset,
                    rank: rank as u32,
                    reserved: 0,
                }));
                pieces.push(LinkReducePiece {
                    to: part.rows.start as u64 * row + offset,
                    count: most.min(elements - offset) as u32,
                    operand_begin,
                    operand_end: operands.len() as u32,
                    divisor,
                    tensor: tensor as u32,
                    reserved: 0,
                });
            }
        }
    }
    (pieces, operands)
}

/// `sizeof(LinkReduceShared<Partial>)`: stages, two barriers each, addresses, a word; rounded up to its alignment.
const fn shared_bytes(partial: Scalar) -> u32 {
    let stages = OPERAND_BYTES / (MOST_ELEMENTS * partial.bytes());
    let bytes = OPERAND_BYTES + 16 * stages + 8 * (LINK_RANKS * LINK_TENSORS) as u64 + 4;
    (bytes as u32).next_multiple_of(128)
}

fn source(arch: Arch, types: ReduceTypes) -> KernelSource {
    let ReduceTypes { partial, result, .. } = types;
    let name = format!("link_reduce_{}_{}", partial.name(), result.name());
    let bytes = shared_bytes(partial);
    let (partial, result) = (partial.cpp(), result.cpp());
    KernelSource::new(&name, arch)
        .line("#include \"link_reduce.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!(
            "static_assert(sizeof(LinkReduceShared<{partial}>) == {bytes}, \"shared memory of a launch\");"
        ))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ LinkCall call, const LinkReducePiece* pieces,"))
        .line("    const LinkOperand* operands, u32 count, u32 accumulate) {")
        .line(format_args!("  link_reduce<{partial}, {result}>(call, pieces, operands, count, accumulate);"))
        .line("}")
}

/// The types that attention uses; others are compiled when they are asked for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let types = ReduceTypes::shipped().into_iter().filter(|types| LinkReduce::takes(*types, 8));
    let specialisation = |types| Specialisation {
        source: source(Arch::SM_90A, types),
        matrix_unit: MatrixUnit::None,
        register_limit: 224,
    };
    types.map(specialisation).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!(
            "link_reduce.cuh",
            LinkReducePiece { to, count, operand_begin, operand_end, divisor, tensor, reserved }
        ),
        shared_layout!("link_reduce.cuh", LinkOperand { from, rank, reserved }),
    ]
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    /// Element by element: the operands of the definition, in the order of ranks, and rows without any where sums start at 0.
    #[test]
    fn pieces_have_the_operands_of_their_rows() {
        let step = |peer, from: usize, to: usize, rows: usize| RowMove {
            peer,
            from: Range::new(from, from + rows),
            to: Range::new(to, to + rows),
        };
        let moves = [step(3, 10, 2, 4), step(1, 0, 4, 4), step(0, 30, 8, 3)];
        let types =
            ReduceTypes { partial: Scalar::Bf16, wire: Scalar::Bf16, sum: Scalar::F32, result: Scalar::F32 };
        for accumulate in [Accumulate::Start, Accumulate::Continue] {
            let tensors = vec![(12, 1000), (12, 8)];
            let spec = LinkReduceSpec { op: ReduceOp::Avg, accumulate, types, tensors: tensors.clone() };
            let (pieces, operands) = lists(&spec, &moves, 2);
            for (tensor, &(rows, row)) in tensors.iter().enumerate() {
                for at in 0..rows as u64 * row {
                    let (place, column) = ((at / row) as usize, at % row);
                    let mut expected: Vec<(u32, u64)> = moves
                        .iter()
                        .filter(|step| (step.to.start..step.to.end).contains(&place))
                        .map(|step| {
                            let from = (step.from.start + place - step.to.start) as u64 * row + column;
                            (step.peer as u32, from)
                        })
                        .collect();
                    expected.sort_unstable();
                    let found: Vec<_> = pieces
                        .iter()
                        .filter(|piece| piece.tensor as usize == tensor)
                        .filter(|piece| (piece.to..piece.to + u64::from(piece.count)).contains(&at))
                        .collect();
                    let own = u32::from(accumulate == Accumulate::Continue);
                    assert_eq!(found.len(), usize::from(own == 0 || !expected.is_empty()), "element {at}");
                    for piece in found {
                        let listed = &operands[piece.operand_begin as usize..piece.operand_end as usize];
                        let listed =
                            listed.iter().map(|operand| (operand.rank, operand.from + at - piece.to));
                        assert_eq!(listed.collect::<Vec<_>>(), expected, "element {at}");
                        assert_eq!(piece.divisor, (expected.len() as u32 + own).max(1));
                    }
                }
            }
        }
    }
}
