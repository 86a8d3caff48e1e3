use bytemuck::{NoUninit, Zeroable};
use counterpoint_mask::Range;

use super::scalar::Scalar;
use super::{MatrixUnit, SharedLayout, Specialisation, blocks_of, shared_layout};
use crate::arch::Arch;
use crate::{CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 256;
/// Pointers of one launch (`kRowCopySources`, `kRowCopyTargets`).
const SOURCES: usize = 240;
const TARGETS: usize = 16;
/// Bytes that a warp copies at most before it looks for more, and at least unless there are no more.
const MOST_BYTES: u64 = 16 << 10;
const LEAST_BYTES: u64 = 2 << 10;

/// Rows of a peer's tensors and the rows of the own ones that they are copied to, of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowMove {
    /// Which peer: an index into the addresses that a launch is given.
    pub peer: usize,
    /// Its rows.
    pub from: Range,
    /// The own rows.
    pub to: Range,
}

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
    fn row_bytes(&self) -> u64 {
        self.row_elements * self.scalar.bytes()
    }

    fn mode(&self) -> Mode {
        if self.scalar.survives(self.wire) { Mode::Plain } else { Mode::Rounded(self.scalar, self.wire) }
    }
}

/// What happens to elements on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    Plain,
    Rounded(Scalar, Scalar),
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
    function: Function,
    mode: Mode,
    tensors: Vec<usize>,
    peers: Vec<usize>,
    pieces: DeviceBuffer,
    count: u32,
    /// Of an average piece.
    piece_bytes: u64,
    /// All row lengths, in bytes, one or-ed into the other.
    row_bytes: u64,
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
struct RowCopyPiece {
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
        let sources: Vec<_> = tensors.iter().map(|tensor| source(device.arch(), tensor.mode())).collect();
        device.functions(&sources).map(|_| ())
    }

    /// Makes the copies of `moves` ready for all of `tensors`. The lists are uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(stream: &Stream, tensors: &[RowCopyTensor], moves: &[RowMove]) -> Result<Self, CudaError> {
        let device = stream.device();
        let mut modes: Vec<Mode> = tensors.iter().map(RowCopyTensor::mode).collect();
        modes.sort_unstable();
        modes.dedup();
        let mut peers: Vec<usize> = moves.iter().map(|step| step.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        let mut launches = Vec::new();
        for mode in modes {
            let function = device.function(&source(device.arch(), mode))?;
            let indices: Vec<usize> = (0..tensors.len()).filter(|&i| tensors[i].mode() == mode).collect();
            for tensor_group in indices.chunks(TARGETS) {
                for peer_group in peers.chunks(SOURCES / tensor_group.len()) {
                    let pieces = pieces(tensors, tensor_group, moves, peer_group, device.sm_count());
                    if pieces.is_empty() {
                        continue;
                    }
                    let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
                    launches.push(Part {
                        function: function.clone(),
                        mode,
                        tensors: tensor_group.to_vec(),
                        peers: peer_group.to_vec(),
                        count: pieces.len() as u32,
                        piece_bytes: bytes / pieces.len() as u64,
                        pieces: DeviceBuffer::from_slice(stream, &pieces)?,
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
    ) -> Result<(), CudaError> {
        for part in &self.launches {
            let mut tensors = RowCopyTensors { sources: [0; SOURCES], targets: [0; TARGETS] };
            let mut alignment = part.row_bytes | 16;
            for (slot, &tensor) in part.tensors.iter().enumerate() {
                tensors.targets[slot] = targets[tensor];
                alignment |= targets[tensor];
                for (place, &peer) in part.peers.iter().enumerate() {
                    let address = source(peer, tensor);
                    tensors.sources[place * part.tensors.len() + slot] = address;
                    alignment |= address;
                }
            }
            let alignment = 1u32 << alignment.trailing_zeros();
            let lanes = match part.mode {
                Mode::Plain => lanes_of(part.piece_bytes, u64::from(alignment)),
                Mode::Rounded(..) => 32,
            };
            let blocks = blocks_of(u64::from(part.count).div_ceil(u64::from(THREADS / lanes)), self.sm_count);
            let launch = Launch::linear(blocks, THREADS);
            let list = part.pieces.address();
            // SAFETY: the arguments are those of the kernels in `source`, the list lives as long as this value, whose memory
            // is freed only after what is enqueued; the rest is the caller's promise.
            unsafe {
                match part.mode {
                    Mode::Plain => {
                        part.function.launch(stream, &launch, &(tensors, list, part.count, alignment, lanes))
                    }
                    Mode::Rounded(..) => part.function.launch(stream, &launch, &(tensors, list, part.count)),
                }
            }?;
        }
        Ok(())
    }
}

/// Lanes of a piece: each has at least two words to load at once.
fn lanes_of(piece_bytes: u64, alignment: u64) -> u32 {
    [32, 16, 8].into_iter().find(|&lanes| piece_bytes >= 2 * u64::from(lanes) * alignment).unwrap_or(4)
}

/// The moves of some peers for some tensors, cut into what a warp copies.
fn pieces(
    tensors: &[RowCopyTensor],
    tensor_group: &[usize],
    moves: &[RowMove],
    peer_group: &[usize],
    sm_count: u32,
) -> Vec<RowCopyPiece> {
    let moves: Vec<(usize, &RowMove)> = moves
        .iter()
        .filter_map(|step| Some((peer_group.binary_search(&step.peer).ok()?, step)))
        .filter(|(_, step)| !step.from.is_empty())
        .collect();
    let rows: u64 = moves.iter().map(|(_, step)| step.from.len() as u64).sum();
    let total: u64 = tensor_group.iter().map(|&tensor| rows * tensors[tensor].row_bytes()).sum();
    // Two pieces for every warp of a full device; small copies are spread thin to be over soon.
    let most =
        (total / (u64::from(sm_count) * 64)).clamp(LEAST_BYTES, MOST_BYTES).next_multiple_of(LEAST_BYTES);
    let mut pieces = Vec::new();
    for &(place, step) in &moves {
        for (slot, &tensor) in tensor_group.iter().enumerate() {
            let row = tensors[tensor].row_bytes();
            let (from, to) = (step.from.start as u64 * row, step.to.start as u64 * row);
            let bytes = step.from.len() as u64 * row;
            let mut done = 0;
            while done < bytes {
                let piece = most.min(bytes - done);
                pieces.push(RowCopyPiece {
                    from: from + done,
                    to: to + done,
                    bytes: piece as u32,
                    source: (place * tensor_group.len() + slot) as u16,
                    target: slot as u16,
                });
                done += piece;
            }
        }
    }
    pieces
}

fn source(arch: Arch, mode: Mode) -> KernelSource {
    let name = match mode {
        Mode::Plain => "row_copy".to_owned(),
        Mode::Rounded(scalar, wire) => format!("row_copy_{}_through_{}", scalar.name(), wire.name()),
    };
    let start = KernelSource::new(&name, arch)
        .line("#include \"row_copy.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!(
            "{name}(const __grid_constant__ RowCopyTensors tensors, const RowCopyPiece* pieces,"
        ));
    match mode {
        Mode::Plain => start
            .line("    u32 count, u32 alignment, u32 lanes) {")
            .line("  counterpoint::row_copy(tensors, pieces, count, alignment, lanes);")
            .line("}"),
        Mode::Rounded(scalar, wire) => start
            .line("    u32 count) {")
            .line(format_args!(
                "  counterpoint::row_copy_rounded<{}, {}>(tensors, pieces, count);",
                scalar.cpp(),
                wire.cpp()
            ))
            .line("}"),
    }
}

/// Plain, and every rounding that there is.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let types = Scalar::ALL.into_iter().flat_map(|a| Scalar::ALL.into_iter().map(move |b| (a, b)));
    let rounded = types.filter(|(scalar, wire)| !scalar.survives(*wire));
    [Mode::Plain]
        .into_iter()
        .chain(rounded.map(|(scalar, wire)| Mode::Rounded(scalar, wire)))
        .map(|mode| Specialisation {
            source: source(arch, mode),
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
    use super::*;

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
        let pieces = pieces(&tensors, &[0, 1], &moves, &[2, 5], 132);
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
