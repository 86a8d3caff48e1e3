//! The launcher of `row_copy.cuh`: packs and unpacks rows for NCCL, and copies them between peers without a barrier.

use bytemuck::{NoUninit, Zeroable};

use super::row_steps::{RowMove, RowStep, RowSteps, StepCount};
use super::scalar::Scalar;
use super::{MatrixUnit, Specialisation, StartMark};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
/// Blocks that a multiprocessor holds: of the copy of aligned rows, which are all that it can, and of others.
const BLOCKS: u32 = 8;
const BLOCKS_UNALIGNED: u32 = 4;
/// Pointers of one launch (`kRowCopySources`, `kRowCopyTargets`).
const SOURCES: usize = 240;
const TARGETS: usize = 16;
/// Bytes that the kernel for aligned rows copies at once.
const WORD: u64 = 16;
/// Bytes that a warp copies at most before it looks for more, and at least unless there are no more.
const MOST_BYTES: u64 = 16 << 10;
const LEAST_BYTES: u64 = 2 << 10;

/// One of the tensors that travel together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopyTensor {
    /// Element type.
    pub scalar: Scalar,
    /// Elements of one row.
    pub row_elements: u64,
    /// Type on the wire: elements are rounded to it if it is narrower.
    pub wire: Scalar,
}

impl RowCopyTensor {
    /// Bytes of one row.
    pub(super) fn row_bytes(&self) -> u64 {
        self.row_elements * self.scalar.bytes()
    }

    /// Whether elements lose something on the wire.
    pub(super) fn is_rounded(&self) -> bool {
        !self.scalar.survives(self.wire)
    }

    fn mode(&self) -> Mode {
        if self.is_rounded() { Mode::Rounded(self.scalar, self.wire) } else { Mode::Plain }
    }
}

/// What happens to elements on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Plain,
    Rounded(Scalar, Scalar),
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// For multiples of 16 bytes.
    Aligned,
    /// For all others.
    Unaligned,
    Rounded(Scalar, Scalar),
}

impl Mode {
    /// The kernels for it.
    fn entries(self) -> Vec<Entry> {
        match self {
            Self::Plain => vec![Entry::Aligned, Entry::Unaligned],
            Self::Rounded(scalar, wire) => vec![Entry::Rounded(scalar, wire)],
        }
    }
}

/// Ranges of rows of many tensors copied to ranges of rows of others, prepared to run many times: the list of pieces is on
/// the device, and only the tensors' addresses are given anew.
#[derive(Debug)]
pub struct RowCopy {
    launches: Vec<Part>,
    sm_count: u32,
}

/// One launch: some tensors of some peers.
#[derive(Debug)]
struct Part {
    kernel: Kernel,
    tensors: Vec<usize>,
    peers: Vec<usize>,
    pieces: DeviceBuffer,
    count: u32,
    /// Of an average piece.
    piece_bytes: u64,
    /// All row lengths, in bytes, one or-ed into the other.
    row_bytes: u64,
}

/// What copies a part.
#[derive(Clone, Debug)]
enum Kernel {
    /// Which of the two depends on the tensors' addresses.
    Plain {
        aligned: Function,
        unaligned: Function,
    },
    Rounded(Function),
}

/// `RowCopyTensors` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct RowCopyTensors {
    sources: [u64; SOURCES],
    targets: [u64; TARGETS],
}

/// `RowCopyPiece` of the kernel.
#[derive(Clone, Copy, NoUninit, Zeroable)]
#[repr(C)]
pub(super) struct RowCopyPiece {
    from: u64,
    to: u64,
    bytes: u32,
    source: u16,
    target: u16,
}

impl RowCopy {
    /// Compiles or finds the kernels for `tensors`, so that [`RowCopy::new`] need not.
    ///
    /// # Errors
    /// When one cannot be compiled or loaded.
    pub fn load(device: &Device, tensors: &[RowCopyTensor]) -> Result<(), CudaError> {
        let arch = device.arch();
        let entries = tensors.iter().flat_map(|tensor| tensor.mode().entries());
        let sources: Vec<_> = entries.map(|entry| source(arch, entry)).collect();
        device.functions(&sources).map(|_| ())
    }

    /// Makes the copies of `moves` ready for all of `tensors`. The lists are uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(stream: &Stream, tensors: &[RowCopyTensor], moves: &[RowMove]) -> Result<Self, CudaError> {
        Self::of_steps(stream, tensors, &moves.iter().map(RowStep::from).collect::<Vec<_>>()[..])
    }

    /// The same of steps.
    ///
    /// # Errors
    /// As [`RowCopy::new`].
    pub fn of_steps(
        stream: &Stream,
        tensors: &[RowCopyTensor],
        steps: &(impl RowSteps + ?Sized),
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let mut modes: Vec<Mode> = tensors.iter().map(RowCopyTensor::mode).collect();
        modes.sort_unstable();
        modes.dedup();
        let counts = steps.counts();
        let peers = peers_of(&counts);
        let mut launches = Vec::new();
        for mode in modes {
            let function = |entry| device.function(&source(device.arch(), entry));
            let kernel = match mode {
                Mode::Plain => Kernel::Plain {
                    aligned: function(Entry::Aligned)?,
                    unaligned: function(Entry::Unaligned)?,
                },
                Mode::Rounded(scalar, wire) => Kernel::Rounded(function(Entry::Rounded(scalar, wire))?),
            };
            let indices: Vec<usize> = (0..tensors.len()).filter(|&i| tensors[i].mode() == mode).collect();
            for tensor_group in indices.chunks(TARGETS) {
                for peer_group in peers.chunks(SOURCES / tensor_group.len()) {
                    let (pieces, bytes) =
                        pieces(tensors, tensor_group, (steps, &counts), peer_group, device.sm_count());
                    if pieces.is_empty() {
                        continue;
                    }
                    launches.push(Part {
                        kernel: kernel.clone(),
                        tensors: tensor_group.to_vec(),
                        peers: peer_group.to_vec(),
                        count: pieces.len() as u32,
                        piece_bytes: bytes / pieces.len() as u64,
                        pieces: DeviceBuffer::from_vec(stream, pieces)?,
                        row_bytes: tensor_group.iter().fold(0, |all, &i| all | tensors[i].row_bytes()),
                    });
                }
            }
        }
        Ok(Self { launches, sm_count: device.sm_count() })
    }

    /// Enqueues all copies. `source` gives the address of a peer's tensor (peer, tensor), `targets` those of the own tensors.
    ///
    /// # Safety
    /// The addresses are of tensors with the rows that were prepared for, aligned to their elements, which live until the
    /// kernel has run; nobody writes the sources or touches the target rows meanwhile.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        source: impl Fn(usize, usize) -> u64,
        targets: &[u64],
        started: &StartMark,
    ) -> Result<(), CudaError> {
        for part in &self.launches {
            let mut tensors = RowCopyTensors { sources: [0; SOURCES], targets: [0; TARGETS] };
            let mut alignment = part.row_bytes;
            for (slot, &tensor) in part.tensors.iter().enumerate() {
                tensors.targets[slot] = targets[tensor];
                alignment |= targets[tensor];
                for (place, &peer) in part.peers.iter().enumerate() {
                    let address = source(peer, tensor);
                    tensors.sources[place * part.tensors.len() + slot] = address;
                    alignment |= address;
                }
            }
            let (list, count) = (part.pieces.address(), part.count);
            let launch = |per_block: u32, per_multiprocessor: u32| {
                let most = self.sm_count.max(1) * per_multiprocessor;
                Launch::linear(count.div_ceil(per_block).clamp(1, most), THREADS)
            };
            let started = started.take();
            let started = started.as_ref();
            // SAFETY: the arguments are those of the kernels in `source`, the list lives as long as this value, whose memory
            // is freed only after what is enqueued; the rest is the caller's promise.
            unsafe {
                match &part.kernel {
                    Kernel::Plain { aligned, .. } if alignment.is_multiple_of(WORD) => {
                        let lanes = lanes_of(part.piece_bytes);
                        let launch = launch(THREADS / lanes, BLOCKS);
                        let arguments = (tensors, list, count, lanes);
                        aligned.launch_signalling(stream, &launch, &arguments, started)
                    }
                    Kernel::Plain { unaligned, .. } => {
                        let launch = launch(THREADS / 32, BLOCKS_UNALIGNED);
                        unaligned.launch_signalling(stream, &launch, &(tensors, list, count), started)
                    }
                    Kernel::Rounded(rounded) => {
                        let launch = launch(THREADS / 32, BLOCKS);
                        rounded.launch_signalling(stream, &launch, &(tensors, list, count), started)
                    }
                }
            }?;
        }
        Ok(())
    }
}

/// Lanes of a piece: one for each of its words, as far as a power of two up to a warp can be.
fn lanes_of(piece_bytes: u64) -> u32 {
    (piece_bytes / WORD).clamp(4, 32).next_power_of_two() as u32
}

/// The moves of all `tensors` for a kernel of `num_sms` blocks that knows the tensors of all peers: `stride` apart, those of a peer together.
pub(super) fn pieces_of_all(
    tensors: &[RowCopyTensor],
    moves: &[RowMove],
    stride: u16,
    num_sms: u32,
) -> Vec<RowCopyPiece> {
    let steps: Vec<RowStep> = moves.iter().map(RowStep::from).collect();
    let (counts, all) = (steps.counts(), (0..tensors.len()).collect::<Vec<_>>());
    let peers = peers_of(&counts);
    let (mut pieces, _) = pieces(tensors, &all, (&steps[..], &counts), &peers, num_sms);
    for piece in &mut pieces {
        let place = usize::from(piece.source) / tensors.len();
        piece.source = peers[place] as u16 * stride + piece.target;
    }
    pieces
}

/// The peers that have steps, ascending.
fn peers_of(counts: &[StepCount]) -> Vec<usize> {
    counts.iter().enumerate().filter_map(|(peer, count)| (count.0 > 0).then_some(peer)).collect()
}

/// The steps of some peers, ascending, for some tensors, cut into what a warp copies; the bytes of all.
fn pieces(
    tensors: &[RowCopyTensor],
    tensor_group: &[usize],
    (steps, counts): (&(impl RowSteps + ?Sized), &[StepCount]),
    peer_group: &[usize],
    sm_count: u32,
) -> (Vec<RowCopyPiece>, u64) {
    const OF_OTHERS: u16 = u16::MAX;
    let mut places = vec![OF_OTHERS; counts.len()];
    peer_group.iter().zip(0..).for_each(|(&peer, place)| places[peer] = place);
    let of_group = peer_group.iter().map(|&peer| counts[peer]);
    let (count, rows) = of_group.fold((0, 0), |all, of| (all.0 + of.0, all.1 + of.1));
    let row_bytes: Vec<u64> = tensor_group.iter().map(|&tensor| tensors[tensor].row_bytes()).collect();
    let total: u64 = row_bytes.iter().map(|row| rows * row).sum();
    // Two pieces for every warp of a full device; small copies are spread thin to be over soon.
    let most =
        (total / (u64::from(sm_count) * 64)).clamp(LEAST_BYTES, MOST_BYTES).next_multiple_of(LEAST_BYTES);
    let mut pieces = Vec::with_capacity(count * tensor_group.len());
    steps.each(|some| {
        for of_peer in some.chunk_by(|one, next| one.peer == next.peer) {
            let place = places[of_peer[0].peer as usize];
            if place == OF_OTHERS {
                continue;
            }
            let first_source = place * tensor_group.len() as u16;
            // Tokens come one by one, so that nearly every step of one tensor is a piece; here and there a longer one is cut.
            match row_bytes[..] {
                [row] if are_pieces(of_peer, row, most) => {
                    pieces.extend(of_peer.iter().map(|step| RowCopyPiece::of(step, row, (first_source, 0))));
                }
                _ => of_peer.iter().for_each(|step| {
                    for (slot, row) in (0..).zip(&row_bytes) {
                        add_pieces(&mut pieces, step, *row, (first_source + slot, slot), most);
                    }
                }),
            }
        }
    });
    (pieces, total)
}

/// Whether each step's rows of so many bytes are one piece of at most `most`.
fn are_pieces(steps: &[RowStep], row: u64, most: u64) -> bool {
    let rows = (most / row.max(1)).min(u64::from(u32::MAX)) as u32;
    steps.iter().fold(true, |all, step| all & (step.count.wrapping_sub(1) < rows))
}

impl RowCopyPiece {
    /// All rows of a step.
    #[inline]
    fn of(step: &RowStep, row: u64, (source, target): (u16, u16)) -> Self {
        let (from, to) = (u64::from(step.from) * row, u64::from(step.to) * row);
        Self { from, to, bytes: (u64::from(step.count) * row) as u32, source, target }
    }
}

/// A step's rows of so many bytes, cut into pieces of `most`, of such a source and target.
fn add_pieces(pieces: &mut Vec<RowCopyPiece>, step: &RowStep, row: u64, of: (u16, u16), most: u64) {
    let (source, target) = of;
    let (mut from, mut to) = (u64::from(step.from) * row, u64::from(step.to) * row);
    let mut left = u64::from(step.count) * row;
    while left > most {
        pieces.push(RowCopyPiece { from, to, bytes: most as u32, source, target });
        (from, to, left) = (from + most, to + most, left - most);
    }
    if left > 0 {
        pieces.push(RowCopyPiece { from, to, bytes: left as u32, source, target });
    }
}

fn source(arch: Arch, entry: Entry) -> KernelSource {
    let (name, blocks, lanes, call) = match entry {
        Entry::Aligned => {
            ("row_copy".to_owned(), BLOCKS, true, "row_copy(tensors, pieces, count, lanes)".to_owned())
        }
        Entry::Unaligned => {
            let call = "row_copy_unaligned(tensors, pieces, count)";
            ("row_copy_unaligned".to_owned(), BLOCKS_UNALIGNED, false, call.to_owned())
        }
        Entry::Rounded(scalar, wire) => {
            let name = format!("row_copy_{}_through_{}", scalar.name(), wire.name());
            let call = format!("row_copy_rounded<{}, {}>(tensors, pieces, count)", scalar.cpp(), wire.cpp());
            (name, BLOCKS, false, call)
        }
    };
    let lanes = if lanes { ", u32 lanes" } else { "" };
    kernel_source(&name, arch)
        .line("#include \"row_copy.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS}, {blocks})"))
        .line(format_args!(
            "{name}(const __grid_constant__ RowCopyTensors tensors, const RowCopyPiece* pieces,"
        ))
        .line(format_args!("    u32 count{lanes}) {{"))
        .line(format_args!("  counterpoint::{call};"))
        .line("}")
}

/// Plain, and every rounding that there is.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let types = Scalar::ALL.into_iter().flat_map(|a| Scalar::ALL.into_iter().map(move |b| (a, b)));
    let rounded = types.filter(|(scalar, wire)| !scalar.survives(*wire));
    Mode::Plain
        .entries()
        .into_iter()
        .chain(rounded.map(|(scalar, wire)| Entry::Rounded(scalar, wire)))
        .map(|entry| Specialisation {
            source: source(arch, entry),
            matrix_unit: MatrixUnit::None,
            register_limit: 64,
        })
        .collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("row_copy.cuh", RowCopyTensors { sources, targets }),
        shared_layout!("row_copy.cuh", RowCopyPiece { from, to, bytes, source, target }),
    ]
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;

    /// A kernel that knows all peers finds the tensors of each where they are.
    #[test]
    fn pieces_name_the_tensors_of_their_peers() {
        let tensor = |row_elements| RowCopyTensor { scalar: Scalar::F32, row_elements, wire: Scalar::Bf16 };
        let tensors = [tensor(1024), tensor(3)];
        let (own, other) = (Range::new(0, 9), Range::new(4, 13));
        let moves = [RowMove { peer: 3, from: own, to: other }, RowMove { peer: 7, from: own, to: own }];
        let pieces = pieces_of_all(&tensors, &moves, 13, 16);
        for (peer, to) in [(3, 4), (7, 0)] {
            for (slot, tensor) in (0..).zip(&tensors) {
                let of_tensor = pieces.iter().filter(|piece| piece.source == peer * 13 + slot);
                let bytes: u64 = of_tensor.clone().map(|piece| u64::from(piece.bytes)).sum();
                assert_eq!(bytes, 9 * tensor.row_bytes());
                assert!(of_tensor.clone().all(|piece| piece.target == slot));
                assert_eq!(of_tensor.map(|piece| piece.to).min(), Some(to * tensor.row_bytes()));
            }
        }
    }

    /// Every byte of every move is in one piece, and no piece crosses into another row range.
    #[test]
    fn pieces_cover_the_moves() {
        let tensor = |row_elements| RowCopyTensor { scalar: Scalar::Bf16, row_elements, wire: Scalar::Bf16 };
        let tensors = [tensor(1024), tensor(3)];
        let step = |peer, from, to, rows| RowMove {
            peer,
            from: Range::new(from, from + rows),
            to: Range::new(to, to + rows),
        };
        let moves = [step(2, 0, 7, 100), step(5, 50, 0, 7), step(2, 300, 120, 1), step(5, 0, 107, 0)];
        let steps: Vec<RowStep> = moves.iter().map(RowStep::from).collect();
        let counts = steps.counts();
        assert_eq!((peers_of(&counts), counts[5]), (vec![2, 5], (2, 7)));
        let (pieces, bytes) = pieces(&tensors, &[0, 1], (&steps[..], &counts), &[2, 5], 132);
        assert_eq!(bytes, pieces.iter().map(|piece| u64::from(piece.bytes)).sum::<u64>());
        for (slot, tensor) in tensors.iter().enumerate() {
            let mut seen = vec![None; 121 * tensor.row_bytes() as usize];
            for piece in pieces.iter().filter(|piece| usize::from(piece.target) == slot) {
                assert!(piece.bytes > 0 && u64::from(piece.bytes) <= MOST_BYTES);
                for byte in 0..u64::from(piece.bytes) {
                    let at = &mut seen[(piece.to + byte) as usize];
                    assert_eq!(*at, None);
                    *at = Some((piece.source, piece.from + byte));
                }
            }
            for (row, bytes) in seen.chunks(tensor.row_bytes() as usize).enumerate() {
                let found = moves.iter().find(|step| (step.to.start..step.to.end).contains(&row));
                for (byte, at) in bytes.iter().enumerate() {
                    let expected = found.map(|step| {
                        let place = usize::from(step.peer == 5);
                        let from = (step.from.start + row - step.to.start) as u64 * tensor.row_bytes();
                        ((place * 2 + slot) as u16, from + byte as u64)
                    });
                    assert_eq!(*at, expected, "row {row}");
                }
            }
        }
    }
}
