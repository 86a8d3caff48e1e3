//! The launcher of `link_reduce.cuh`: group-reduces over NVLink, operands fetched from peers and added in a fixed order.

use std::sync::Arc;

use bytemuck::NoUninit;
use counterpoint_schedule::{Accumulate, ReduceOp};

use super::link_barrier::{LINK_RANKS, LINK_TENSORS, LinkCall};
use super::operand_rows::OperandRows;
use super::row_reduce::ReduceTypes;
use super::scalar::Scalar;
use super::{MatrixUnit, RowMove, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Event, Function, KernelSource, Launch, Stream};

/// Teams that add pieces in turn.
const TEAMS: u32 = 1;
/// Warps that have the copy engine fetch operands, and threads of a team (`kLinkAdders`).
const FETCHERS: u32 = 1;
const ADDERS: u32 = 256;
/// Stages, and bytes of each: an operand of a piece.
const STAGES: u32 = 12;
const STAGE_BYTES: u32 = 16 << 10;
/// Elements of a piece at least, unless there are no more.
const LEAST_ELEMENTS: u64 = 512;
/// Pieces that a block has at least, while they are not shorter than that.
const PIECES: u64 = 8;
/// `kLinkOwn`: what is fetched is the result's own contents.
const OWN: u16 = u16::MAX;
/// `sizeof(LinkReduceShared)`: stages with two barriers each, addresses, a word; rounded up to its alignment.
pub(super) const SHARED_BYTES: u32 =
    (STAGES * (STAGE_BYTES + 16) + 8 * (LINK_RANKS * LINK_TENSORS) as u32 + 4).next_multiple_of(128);

/// Partial results of rows summed (or averaged) in f32 into their owner's rows, straight from the memories of GPUs that reach
/// each other, for tensors of one pattern, prepared to run many times. Ranks pass a barrier inside the kernel; operands are added in the
/// order of their ranks.
#[derive(Debug)]
pub struct LinkReduce {
    function: Function,
    lists: DeviceLists,
    accumulate: Accumulate,
}

/// What each block sums and fetches, on the device.
#[derive(Debug)]
pub(super) struct DeviceLists {
    pieces: DeviceBuffer,
    fetches: DeviceBuffer,
    blocks: DeviceBuffer,
    pub(super) block_count: u32,
}

impl DeviceLists {
    /// Of `moves`, for at most `num_sms` blocks.
    pub(super) fn new(
        stream: &Stream,
        spec: &LinkReduceSpec,
        moves: &[RowMove],
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let Lists { pieces, fetches, blocks } = lists(spec, moves, num_sms);
        Ok(Self {
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
            fetches: DeviceBuffer::from_slice(stream, &fetches)?,
            block_count: blocks.len() as u32 - 1,
            blocks: DeviceBuffer::from_slice(stream, &blocks)?,
        })
    }

    /// Of pieces, of what is fetched, and of where each block's begin.
    pub(super) fn addresses(&self) -> [u64; 3] {
        [&self.pieces, &self.fetches, &self.blocks].map(DeviceBuffer::address)
    }
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
    /// Where the operands lie.
    pub operands: LinkOperands,
    /// Rows of each result, and elements of one of its rows.
    pub tensors: Vec<(usize, u64)>,
    /// Of a mean: by what each row of all results is divided, where that is not how many operands it has here.
    pub divisors: Option<Arc<[u32]>>,
}

/// Where the operands of a reduction lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkOperands {
    /// In the tensors that each rank announces.
    Announced,
    /// With the one that adds them: the others have put theirs there before they announced anything. Its own tensors of a call are
    /// then the results, what came, and its own partial sums, each so many as there are results. Rows that no move names are results
    /// already.
    Delivered {
        /// The one that adds.
        rank: usize,
    },
}

impl LinkOperands {
    /// The rank and the tensor from which the kernel fetches what `rank` has for one of `tensors` results.
    fn place(self, rank: usize, tensor: usize, tensors: usize) -> (u16, u16) {
        match self {
            Self::Announced => (rank as u16, tensor as u16),
            Self::Delivered { rank: own } => {
                (OWN, (tensor + tensors * if rank == own { 2 } else { 1 }) as u16)
            }
        }
    }
}

/// `LinkReducePiece` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct LinkReducePiece {
    to: u64,
    count: u32,
    divisor: u32,
    tensor: u32,
    operands: u32,
}

/// `LinkFetch` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct LinkFetch {
    from: u64,
    bytes: u32,
    rank: u16,
    tensor: u16,
}

/// `LinkBlock` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct LinkBlock {
    pieces: u32,
    fetches: u32,
}

/// What each block sums and fetches, block after block.
struct Lists {
    pieces: Vec<LinkReducePiece>,
    fetches: Vec<LinkFetch>,
    /// Where each block's begin, and where the last one's end.
    blocks: Vec<LinkBlock>,
}

impl LinkReduce {
    /// Whether there is a kernel for partial results of this type that are summed in that one, with rows of so many elements:
    /// the wire rounds nothing, sums are in f32, and the copy engine takes multiples of 16 bytes of whatever type.
    pub fn takes(partial: Scalar, wire: Scalar, sum: Scalar, row_elements: u64) -> bool {
        partial.survives(wire) && sum == Scalar::F32 && row_elements.is_multiple_of(8)
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
        let lists = DeviceLists::new(stream, spec, moves, num_sms)?;
        Ok(Self { function, lists, accumulate: spec.accumulate })
    }

    /// Enqueues the reduction. `started` is marked once all its blocks have begun.
    ///
    /// # Safety
    /// As [`LinkCopy::launch`](super::LinkCopy::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        call: &LinkCall,
        started: Option<&Event>,
    ) -> Result<(), CudaError> {
        let launch = Launch::linear(self.lists.block_count, threads(TEAMS)).shared_bytes(SHARED_BYTES);
        let accumulate = u32::from(self.accumulate == Accumulate::Continue);
        let [pieces, fetches, blocks] = self.lists.addresses();
        let arguments = (*call, pieces, fetches, blocks, accumulate);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch_signalling(stream, &launch, &arguments, started) }
    }
}

/// Elements of a piece at most: as many as fit a stage. What a piece costs hardly depends on their size, so narrow ones must be
/// more.
fn most_elements(types: ReduceTypes) -> u32 {
    STAGE_BYTES / types.partial.bytes().max(types.result.bytes()) as u32
}

/// The rows of the results, cut into what a block sums at once, and dealt out to blocks in turn.
fn lists(spec: &LinkReduceSpec, moves: &[RowMove], num_sms: u32) -> Lists {
    let accumulate = spec.accumulate == Accumulate::Continue;
    let with_empty = !accumulate && spec.operands == LinkOperands::Announced;
    let rows = spec.tensors.iter().map(|&(rows, _)| {
        let rows = OperandRows::of_moves(moves, rows, with_empty);
        spec.divisors.as_ref().map_or(rows.clone(), |divisors| rows.cut_where(divisors))
    });
    let rows: Vec<_> = rows.collect();
    let total: u64 = rows.iter().zip(&spec.tensors).map(|(parts, &(_, row))| parts.rows() * row).sum();
    let most = total.div_ceil(u64::from(num_sms.max(1)) * PIECES).next_multiple_of(LEAST_ELEMENTS);
    let most = most.clamp(LEAST_ELEMENTS, u64::from(most_elements(spec.types)));
    let (mut all, mut fetches) = (Vec::new(), Vec::with_capacity(moves.len()));
    for (tensor, (parts, &(_, row))) in rows.iter().zip(&spec.tensors).enumerate() {
        for (part, of_part) in parts.parts() {
            let elements = part.len() as u64 * row;
            let operands = of_part.len() as u32 + u32::from(accumulate);
            let divisor = match (spec.op, &spec.divisors) {
                (ReduceOp::Avg, Some(divisors)) => divisors[part.start].max(1),
                (ReduceOp::Avg, None) => operands.max(1),
                (ReduceOp::Sum | ReduceOp::Lse, _) => 1,
            };
            for offset in (0..elements).step_by(most as usize) {
                let to = part.start as u64 * row + offset;
                let count = most.min(elements - offset) as u32;
                let fetch = |from: u64, (rank, tensor), scalar: Scalar| LinkFetch {
                    from: from * scalar.bytes(),
                    bytes: count * scalar.bytes() as u32,
                    rank,
                    tensor,
                };
                let own = accumulate.then(|| fetch(to, (OWN, tensor as u16), spec.types.result));
                let others = of_part.iter().map(|&(rank, from)| {
                    let place = spec.operands.place(rank as usize, tensor, spec.tensors.len());
                    fetch(u64::from(from) * row + offset, place, spec.types.partial)
                });
                let first = fetches.len();
                fetches.extend(own.into_iter().chain(others));
                let tensor = tensor as u32;
                all.push((LinkReducePiece { to, count, divisor, tensor, operands }, first..fetches.len()));
            }
        }
    }
    let block_count = (num_sms as usize).min(all.len()).max(1);
    let mut lists = Lists { pieces: Vec::new(), fetches: Vec::new(), blocks: Vec::new() };
    for block in 0..block_count {
        lists.close_block();
        for (piece, of_piece) in all.iter().skip(block).step_by(block_count) {
            lists.pieces.push(*piece);
            lists.fetches.extend(&fetches[of_piece.clone()]);
        }
    }
    lists.close_block();
    lists
}

impl Lists {
    /// What is added from now on belongs to the next block.
    fn close_block(&mut self) {
        let (pieces, fetches) = (self.pieces.len() as u32, self.fetches.len() as u32);
        self.blocks.push(LinkBlock { pieces, fetches });
    }
}

fn source(arch: Arch, types: ReduceTypes) -> KernelSource {
    source_of(arch, types, TEAMS, ["link_reduce", "LinkCall"])
}

/// Threads of a block with so many teams.
pub(super) const fn threads(teams: u32) -> u32 {
    32 * FETCHERS + teams * ADDERS
}

/// The kernel of this stem, which is given a call of that type, with so many teams.
pub(super) fn source_of(arch: Arch, types: ReduceTypes, teams: u32, [stem, call]: [&str; 2]) -> KernelSource {
    let ReduceTypes { partial, result, .. } = types;
    let name = format!("{stem}_{}_{}", partial.name(), result.name());
    let (partial, result) = (partial.cpp(), result.cpp());
    kernel_source(&name, arch)
        .line(format_args!("#include \"{stem}.cuh\""))
        .line("using namespace counterpoint;")
        .line(format_args!(
            "using Config = LinkReduceConfig<{partial}, {result}, {FETCHERS}, {teams}, {}, {STAGES}, {STAGE_BYTES}>;",
            most_elements(types)
        ))
        .line(format_args!(
            "static_assert(sizeof(LinkReduceShared<Config>) == {SHARED_BYTES} && Config::kThreads == {}, \"launch\");",
            threads(teams)
        ))
        .line("extern \"C\" __global__ void __launch_bounds__(Config::kThreads)")
        .line(format_args!("{name}(const __grid_constant__ {call} call, const LinkReducePiece* pieces,"))
        .line("    const LinkFetch* fetches, const LinkBlock* blocks, u32 accumulate) {")
        .line(format_args!("  {stem}<Config>(call, pieces, fetches, blocks, accumulate);"))
        .line("}")
}

/// The types that attention uses; others are compiled when they are asked for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    specialisations_of(TEAMS, |types| source(Arch::SM_90A, types))
}

/// Of a kernel for the types that [`LinkReduce::takes`].
pub(super) fn specialisations_of(
    teams: u32,
    source: impl Fn(ReduceTypes) -> KernelSource,
) -> Vec<Specialisation> {
    let types = ReduceTypes::shipped()
        .into_iter()
        .filter(|types| LinkReduce::takes(types.partial, types.wire, types.sum, 8));
    let specialisation = |types| Specialisation {
        source: source(types),
        matrix_unit: MatrixUnit::None,
        register_limit: ((64 << 10) / threads(teams).next_multiple_of(128)).min(224) / 8 * 8,
    };
    types.map(specialisation).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("link_reduce.cuh", LinkReducePiece { to, count, divisor, tensor, operands }),
        shared_layout!("link_reduce.cuh", LinkFetch { from, bytes, rank, tensor }),
        shared_layout!("link_reduce.cuh", LinkBlock { pieces, fetches }),
    ]
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    /// The others' partial sums are among the tensors of the one that adds, behind the results; its own behind those.
    #[test]
    fn delivered_operands_are_fetched_from_the_own_memory() {
        let step = |peer, from: usize, to: usize, rows: usize| RowMove {
            peer,
            from: Range::new(from, from + rows),
            to: Range::new(to, to + rows),
        };
        let types =
            ReduceTypes { partial: Scalar::F32, wire: Scalar::F32, sum: Scalar::F32, result: Scalar::Bf16 };
        let spec = LinkReduceSpec {
            op: ReduceOp::Sum,
            accumulate: Accumulate::Start,
            types,
            operands: LinkOperands::Delivered { rank: 1 },
            tensors: vec![(4, 8), (4, 16)],
            divisors: None,
        };
        let moves = [step(0, 7, 0, 4), step(1, 0, 0, 4), step(2, 3, 0, 4)];
        let lists =
            |rows| lists(&LinkReduceSpec { tensors: vec![(rows, 8), (rows, 16)], ..spec.clone() }, &moves, 1);
        // The rows after these are results already.
        let counts = |lists: &Lists| (lists.pieces.len(), lists.fetches.len());
        assert_eq!(counts(&lists(4)), counts(&lists(6)));
        let lists = lists(4);
        let found = lists.fetches.iter().map(|fetch| (fetch.rank, fetch.tensor, fetch.from, fetch.bytes));
        let expected = [(2, 7, 8), (4, 0, 8), (2, 3, 8), (3, 7, 16), (5, 0, 16), (3, 3, 16)]
            .map(|(tensor, row, elements)| (OWN, tensor, 4 * row * elements, 4 * 4 * elements as u32));
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert!(lists.pieces.iter().all(|piece| piece.operands == 3 && piece.divisor == 1));
    }

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
        // Where operands are combined elsewhere too, rows that have the same here are divided by other numbers.
        let elsewhere: Arc<[u32]> = (0..12).map(|row| row / 3 + 1).collect();
        for (accumulate, divisors) in [
            (Accumulate::Start, None),
            (Accumulate::Continue, None),
            (Accumulate::Start, Some(elsewhere.clone())),
            (Accumulate::Continue, Some(elsewhere)),
        ] {
            let tensors = vec![(12, 1000), (12, 8)];
            let operands = LinkOperands::Announced;
            let spec = LinkReduceSpec {
                op: ReduceOp::Avg,
                accumulate,
                types,
                operands,
                tensors: tensors.clone(),
                divisors: divisors.clone(),
            };
            let lists = lists(&spec, &moves, 2);
            assert_eq!(lists.blocks.len(), 3);
            // Each piece with what is fetched for it.
            let mut all: Vec<(LinkReducePiece, &[LinkFetch])> = Vec::new();
            for block in lists.blocks.windows(2) {
                let mut next = block[0].fetches as usize;
                for piece in &lists.pieces[block[0].pieces as usize..block[1].pieces as usize] {
                    all.push((*piece, &lists.fetches[next..next + piece.operands as usize]));
                    next += piece.operands as usize;
                }
                assert_eq!(next, block[1].fetches as usize);
            }
            for (tensor, &(rows, row)) in tensors.iter().enumerate() {
                for at in 0..rows as u64 * row {
                    let (place, column) = ((at / row) as usize, at % row);
                    let received: Vec<(u16, u64)> = moves
                        .iter()
                        .filter(|step| (step.to.start..step.to.end).contains(&place))
                        .map(|step| {
                            let from = (step.from.start + place - step.to.start) as u64 * row + column;
                            (step.peer as u16, 2 * from)
                        })
                        .collect();
                    let own = (accumulate == Accumulate::Continue).then_some((OWN, 4 * at));
                    let mut expected: Vec<(u16, u64)> = own.into_iter().chain(received.clone()).collect();
                    expected[usize::from(own.is_some())..].sort_unstable();
                    let found: Vec<_> = all
                        .iter()
                        .filter(|(piece, _)| piece.tensor as usize == tensor)
                        .filter(|(piece, _)| (piece.to..piece.to + u64::from(piece.count)).contains(&at))
                        .collect();
                    assert_eq!(
                        found.len(),
                        usize::from(own.is_none() || !received.is_empty()),
                        "element {at}"
                    );
                    for (piece, fetches) in found {
                        let listed = fetches.iter().map(|fetch| {
                            let bytes = if fetch.rank == OWN { 4 } else { 2 };
                            assert_eq!(fetch.bytes, piece.count * bytes as u32);
                            (fetch.rank, fetch.from + (at - piece.to) * bytes)
                        });
                        assert_eq!(listed.collect::<Vec<_>>(), expected, "element {at}");
                        let here = (expected.len() as u32).max(1);
                        assert_eq!(piece.divisor, divisors.as_ref().map_or(here, |of_rows| of_rows[place]));
                    }
                }
            }
        }
    }
}
