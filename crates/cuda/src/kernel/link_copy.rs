//! The launcher of `link_copy.cuh`: group-casts over NVLink by kernels that pull or push, ranks synchronised inside them.

use bytemuck::NoUninit;

use super::link_barrier::{LINK_PARTS, LINK_RANKS, LINK_TENSORS, LinkCall};
use super::{MatrixUnit, RowMove, RowsFault, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Event, Function, KernelSource, Launch, Stream};

/// Bytes of a piece at least, unless there are no more.
const LEAST_BYTES: u64 = 1 << 10;
/// Pieces that a warp has at least, while they are not shorter than that: so many are on their way at once.
const PIECES: u64 = 8;

/// Warps of a block, each with stages of its own: one thread that waits for one piece holds up no other warp's.
const WARPS: u32 = 1;
const STAGES: u32 = 12;
/// Bytes of a stage, and of a piece at most.
const PIECE_BYTES: u32 = 16 << 10;
/// `sizeof(LinkCopyShared)`: stages, with a barrier, a target and a length each; addresses; rounded up to its alignment.
const SHARED_BYTES: u32 =
    (WARPS * STAGES * (PIECE_BYTES + 20) + 8 * (LINK_RANKS * LINK_TENSORS) as u32).next_multiple_of(128);
const THREADS: u32 = 32 * WARPS;

/// Which side of a link a rank's kernel writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDirection {
    /// It reads the other ranks' memory and writes its own.
    Pull,
    /// It reads its own and writes theirs.
    Push,
}

/// What of a call one launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkPhase {
    /// All: a barrier, the copies, a barrier.
    Whole,
    /// The first barrier: what is enqueued behind it may write the others' tensors.
    Begin,
    /// The rows of the list are copied, between begin and end.
    Work,
    /// Ranks part, once all that was enqueued before it is done.
    End,
}

impl LinkPhase {
    /// `LinkPhases` of the kernel.
    fn bits(self) -> u32 {
        match self {
            Self::Work => 0,
            Self::Begin => 1,
            Self::End => 2,
            Self::Whole => 3,
        }
    }
}

impl LinkDirection {
    /// Pieces that a warp loads ahead of what it stores: the remote side is the slow one.
    const fn ahead(self) -> u32 {
        match self {
            Self::Pull => 9,
            Self::Push => 4,
        }
    }
}

/// Ranges of rows between the memories of GPUs that reach each other, for tensors of one pattern, prepared to run many
/// times: the list of pieces is on the device. Ranks pass barriers inside the kernel.
#[derive(Debug)]
pub struct LinkCopy {
    function: Function,
    pieces: DeviceBuffer,
    count: u32,
    blocks: u32,
    parts: LinkParts,
}

/// `LinkParts` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct LinkParts {
    count: u32,
    ends: [u32; LINK_PARTS],
}

/// Whether receivers are notified of parts of their rows as these are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkDelivery {
    /// Of none.
    Whole,
    /// Of each.
    Parts,
}

/// `LinkPiece` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(C)]
struct LinkPiece {
    own: u64,
    remote: u64,
    bytes: u32,
    rank: u16,
    tensor: u16,
}

impl LinkCopy {
    /// Whether rows of so many bytes can be copied: the copy engine takes multiples of 16.
    pub fn takes(row_bytes: u64) -> bool {
        row_bytes.is_multiple_of(16)
    }

    /// Compiles or finds the kernel, so that [`LinkCopy::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, direction: LinkDirection) -> Result<(), CudaError> {
        device.function(&source(device.arch(), direction)).map(|_| ())
    }

    /// Makes moves, whose peers are ranks, ready for tensors with rows of these many bytes, for a kernel of at most `num_sms`
    /// blocks: those of each of the `parts`, one after the other. The list is uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for more parts than a call has; when the kernel cannot be compiled, or the list does not fit into
    /// memory.
    pub fn new(
        stream: &Stream,
        direction: LinkDirection,
        row_bytes: &[u64],
        parts: &[Vec<RowMove>],
        delivery: LinkDelivery,
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&source(device.arch(), direction))?;
        if parts.len() > LINK_PARTS {
            let reason = RowsFault::LinkParts { parts: parts.len(), most: LINK_PARTS }.into();
            return Err(CudaError::Launch { kernel: function.name().to_owned(), reason });
        }
        let (pieces, ends) = pieces(direction, row_bytes, parts, num_sms);
        let mut parts = LinkParts::default();
        if delivery == LinkDelivery::Parts {
            parts.count = ends.len() as u32;
            parts.ends[..ends.len()].copy_from_slice(&ends);
        }
        Ok(Self {
            parts,
            function,
            count: pieces.len() as u32,
            blocks: num_sms.min(pieces.len() as u32).max(1),
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
        })
    }

    /// Whether there is anything in the list.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Enqueues the copies, or a phase of the call. The whole ends when the copies are made and when all others that work on what
    /// `call` announces have made theirs. `started` is marked once all blocks of the launch have begun.
    ///
    /// # Safety
    /// The tensors of `call` on both sides have the rows that were prepared for, are aligned to 16 bytes and live until the
    /// kernel has run, as do the mailboxes; all ranks launch in the same order, each on a GPU of its own.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        call: &LinkCall,
        phase: LinkPhase,
        started: Option<&Event>,
    ) -> Result<(), CudaError> {
        let (blocks, count) = match phase {
            LinkPhase::Whole | LinkPhase::Work => (self.blocks, self.count),
            LinkPhase::Begin | LinkPhase::End => (1, 0),
        };
        let launch = Launch::linear(blocks, THREADS).shared_bytes(SHARED_BYTES);
        let arguments = (*call, self.pieces.address(), count, phase.bits(), self.parts);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch_signalling(stream, &launch, &arguments, started) }
    }
}

/// The moves cut into what is copied at once, and how many of these there are up to the end of each part. Peers alternate, so
/// that all links are busy from the first piece to the last.
fn pieces(
    direction: LinkDirection,
    row_bytes: &[u64],
    parts: &[Vec<RowMove>],
    num_sms: u32,
) -> (Vec<LinkPiece>, Vec<u32>) {
    let rows: u64 = parts.iter().flatten().map(|step| step.from.len() as u64).sum();
    let total = rows * row_bytes.iter().sum::<u64>();
    let even = total.div_ceil(u64::from(num_sms.max(1) * WARPS) * PIECES);
    let most = even.next_multiple_of(LEAST_BYTES).clamp(LEAST_BYTES, u64::from(PIECE_BYTES));
    let (mut all, mut ends) = (Vec::new(), Vec::with_capacity(parts.len()));
    for moves in parts {
        all.extend(pieces_of_part(direction, row_bytes, moves, most));
        ends.push(all.len() as u32);
    }
    (all, ends)
}

fn pieces_of_part(
    direction: LinkDirection,
    row_bytes: &[u64],
    moves: &[RowMove],
    most: u64,
) -> Vec<LinkPiece> {
    let mut queues: Vec<Vec<LinkPiece>> = Vec::new();
    for step in moves {
        if step.peer >= queues.len() {
            queues.resize_with(step.peer + 1, Vec::new);
        }
        let queue = &mut queues[step.peer];
        let (own, remote) = match direction {
            LinkDirection::Pull => (step.to.start, step.from.start),
            LinkDirection::Push => (step.from.start, step.to.start),
        };
        for (tensor, &row) in row_bytes.iter().enumerate() {
            let (own, remote, bytes) = (own as u64 * row, remote as u64 * row, step.from.len() as u64 * row);
            let offsets = (0..bytes).step_by(most as usize);
            queue.extend(offsets.map(|offset| LinkPiece {
                own: own + offset,
                remote: remote + offset,
                bytes: most.min(bytes - offset) as u32,
                rank: step.peer as u16,
                tensor: tensor as u16,
            }));
        }
    }
    let mut queues: Vec<_> = queues.into_iter().map(Vec::into_iter).collect();
    let mut interleaved = Vec::new();
    loop {
        let before = interleaved.len();
        interleaved.extend(queues.iter_mut().filter_map(Iterator::next));
        if interleaved.len() == before {
            return interleaved;
        }
    }
}

fn source(arch: Arch, direction: LinkDirection) -> KernelSource {
    let (name, push) = match direction {
        LinkDirection::Pull => ("link_pull", "false"),
        LinkDirection::Push => ("link_push", "true"),
    };
    let ahead = direction.ahead();
    kernel_source(name, arch)
        .line("#include \"link_copy.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!(
            "static_assert(sizeof(LinkCopyShared<{WARPS}, {STAGES}, {PIECE_BYTES}>) == {SHARED_BYTES}, \"shared memory\");"
        ))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ LinkCall call, const LinkPiece* pieces, u32 count, u32 phases, \
             const __grid_constant__ LinkParts parts) {{"
        ))
        .line(format_args!(
            "  link_copy<{push}, {WARPS}, {STAGES}, {ahead}, {PIECE_BYTES}>(call, pieces, count, phases, parts);"
        ))
        .line("}")
}

/// Both directions, for Hopper, whose copy engine moves bytes.
pub(super) fn specialisations() -> Vec<Specialisation> {
    [LinkDirection::Pull, LinkDirection::Push]
        .map(|direction| Specialisation {
            source: source(Arch::SM_90A, direction),
            matrix_unit: MatrixUnit::None,
            register_limit: 255,
        })
        .into()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("link_copy.cuh", LinkPiece { own, remote, bytes, rank, tensor }),
        shared_layout!("link_copy.cuh", LinkParts { count, ends }),
    ]
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    /// Every byte of every move is in one piece; peers alternate.
    #[test]
    fn pieces_cover_the_moves() {
        let step = |peer, from, to, rows| RowMove {
            peer,
            from: Range::new(from, from + rows),
            to: Range::new(to, to + rows),
        };
        let moves = [step(2, 0, 70, 100), step(5, 50, 0, 70), step(2, 300, 190, 1), step(5, 0, 170, 0)];
        let row_bytes = [2048, 48];
        let parts = [moves[..3].to_vec(), moves[3..].to_vec()];
        let (found, ends) = pieces(LinkDirection::Pull, &row_bytes, &parts, 4);
        // The last move is empty.
        assert_eq!(ends, [found.len() as u32; 2]);
        assert_eq!(found.iter().take(4).map(|piece| piece.rank).collect::<Vec<_>>(), [2, 5, 2, 5]);
        for (tensor, row) in row_bytes.into_iter().enumerate() {
            let mut seen = vec![None; 191 * row as usize];
            for piece in found.iter().filter(|piece| usize::from(piece.tensor) == tensor) {
                assert!(piece.bytes > 0 && piece.bytes <= PIECE_BYTES && piece.bytes % 16 == 0);
                for byte in 0..u64::from(piece.bytes) {
                    let at = &mut seen[(piece.own + byte) as usize];
                    assert_eq!(*at, None);
                    *at = Some((usize::from(piece.rank), piece.remote + byte));
                }
            }
            for (at, found) in seen.into_iter().enumerate() {
                let (place, byte) = (at / row as usize, at as u64 % row);
                let step = moves.iter().find(|step| (step.to.start..step.to.end).contains(&place));
                let expected = step
                    .map(|step| (step.peer, (step.from.start + place - step.to.start) as u64 * row + byte));
                assert_eq!(found, expected, "row {place}");
            }
        }
        let (pushed, _) = pieces(LinkDirection::Push, &row_bytes, &parts, 4);
        let swapped = found.iter().map(|piece| LinkPiece { own: piece.remote, remote: piece.own, ..*piece });
        assert!(pushed.into_iter().eq(swapped));
    }
}
