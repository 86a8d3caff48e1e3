//! Checks of the kernel whose group-casts round rows on their way, or move rows that are no multiples of 16 bytes, between barriers of its own.

use std::time::Duration;

use counterpoint_mask::Range;
use counterpoint_reference::selftest::SelfCheck;
use half::{bf16, f16};

use counterpoint_cuda::kernel::{
    LinkCast, LinkEnd, LinkPeers, RowCopy, RowCopyTensor, RowMove, Scalar, StartMark,
};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};

/// Rows of each tensor.
const ROWS: usize = 96;
/// Calls, each of which must give the same.
const CALLS: usize = 3;
/// Blocks of a rank: both are on one GPU where there is one only.
const BLOCKS: u32 = 4;

/// Two ranks fetch rows of each other's tensors and of their own, on the first two of `devices` or on two streams of the only one: of every
/// type, whole words and not, through every type. Words must be those of the host, and the bits those of the kernel that is ordered by
/// the host.
///
/// # Errors
/// When a kernel cannot be compiled or launched.
pub(super) fn checks(devices: [&Device; 2], place: &str) -> Result<Vec<SelfCheck>, CudaError> {
    let mut checks = Vec::new();
    for wire in Scalar::ALL {
        let (mut other_values, mut other_bits) = (0, 0);
        for row_elements in [1, 8, 65, 130] {
            let tensors: Vec<RowCopyTensor> =
                Scalar::ALL.map(|scalar| RowCopyTensor { scalar, row_elements, wire }).to_vec();
            let ranks = [Side::new(devices[0], 0, &tensors)?, Side::new(devices[1], 1, &tensors)?];
            for _ in 0..CALLS {
                for (at, rank) in ranks.iter().enumerate() {
                    rank.launch(&ranks, at, &tensors)?;
                }
            }
            for rank in &ranks {
                let (values, bits) = rank.compare(&ranks, &tensors)?;
                other_values += values;
                other_bits += bits;
            }
        }
        let name = |what: &str| {
            format!("group-casts through {} between barriers of one kernel, {place}, {what}", wire.name())
        };
        checks.push(SelfCheck::of(name("values unlike the host's"), 0, other_values as f64, 0.0));
        checks.push(SelfCheck::of(name("bits unlike those of two kernels"), 0, other_bits as f64, 0.0));
    }
    Ok(checks)
}

/// One of two ranks.
struct Side {
    stream: Stream,
    end: LinkEnd,
    cast: LinkCast,
    moves: Vec<RowMove>,
    /// On the host, as 32-bit floats or halves.
    contents: Vec<Vec<u8>>,
    inputs: Vec<DeviceBuffer>,
    outputs: Vec<DeviceBuffer>,
}

impl Side {
    fn new(device: &Device, rank: usize, tensors: &[RowCopyTensor]) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::High)?;
        let range = |start: usize, rows: usize| Range::new(start, start + rows);
        let (own, other) = (rank, 1 - rank);
        let moves = vec![
            RowMove { peer: own, from: range(3, 5), to: range(0, 5) },
            RowMove { peer: other, from: range(0, 40), to: range(5, 40) },
            RowMove { peer: other, from: range(51, 1), to: range(60, 1) },
        ];
        let contents: Vec<Vec<u8>> =
            (0..).zip(tensors).map(|(at, tensor)| contents(tensor, (10 * rank + at) as u32)).collect();
        let upload = |bytes: &Vec<u8>| DeviceBuffer::from_slice(&stream, bytes);
        let inputs = contents.iter().map(upload).collect::<Result<_, _>>()?;
        let outputs = contents.iter().map(|bytes| upload(&vec![0x55; bytes.len()]));
        Ok(Self {
            end: LinkEnd::new(&stream)?,
            cast: LinkCast::new(&stream, tensors, &moves, BLOCKS)?,
            moves,
            outputs: outputs.collect::<Result<_, _>>()?,
            inputs,
            contents,
            stream,
        })
    }

    fn launch(&self, ranks: &[Self; 2], rank: usize, tensors: &[RowCopyTensor]) -> Result<(), CudaError> {
        let both = vec![0, 1];
        let mailboxes = both.iter().map(|&peer| (peer, ranks[peer].end.mailbox().clone())).collect();
        let peers = LinkPeers { mailboxes, announce_to: both.clone(), work_on: both };
        let addresses = |buffers: &[DeviceBuffer]| -> Vec<u64> {
            buffers.iter().take(tensors.len()).map(DeviceBuffer::address).collect()
        };
        let (announced, own) = (addresses(&self.inputs), addresses(&self.outputs));
        let call = self.end.call(rank, &peers, &announced, &own, Duration::from_secs(10))?;
        // SAFETY: tensors and mailboxes live until both streams are idle, which `compare` waits for; rows are inside of the tensors; each kernel
        // has few blocks, on a stream of its own.
        unsafe { self.cast.launch(&self.stream, &call, None) }
    }

    /// Elements whose value is not the host's, and bytes that are not those of the kernel that knows no barrier.
    fn compare(&self, ranks: &[Self; 2], tensors: &[RowCopyTensor]) -> Result<(usize, usize), CudaError> {
        // Both, so that the other rank no longer reads what is freed.
        ranks.iter().try_for_each(|rank| rank.stream.synchronize())?;
        if self.end.missed().is_some() {
            return Ok((usize::MAX >> 32, 0));
        }
        let copy = RowCopy::new(&self.stream, tensors, &self.moves)?;
        let upload = |bytes: &Vec<u8>| DeviceBuffer::from_slice(&self.stream, &vec![0x55u8; bytes.len()]);
        let copied = self.contents.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        let targets: Vec<u64> = copied.iter().map(DeviceBuffer::address).collect();
        let source = |peer: usize, tensor: usize| ranks[peer].inputs[tensor].address();
        // SAFETY: rows are inside of the tensors, which live until the stream is idle.
        unsafe { copy.launch(&self.stream, source, &targets, &StartMark::none()) }?;
        let (mut other_values, mut other_bits) = (0, 0);
        for (at, tensor) in tensors.iter().enumerate() {
            let bytes = self.contents[at].len();
            let found: Vec<u8> = self.outputs[at].download(&self.stream, 0, bytes)?;
            let by_two: Vec<u8> = copied[at].download(&self.stream, 0, bytes)?;
            other_bits += found.iter().zip(&by_two).filter(|(one, two)| one != two).count();
            let mut expected = vec![0x55; bytes];
            let row = tensor.row_elements as usize * tensor.scalar.bytes() as usize;
            for step in &self.moves {
                let from = &ranks[step.peer].contents[at][step.from.start * row..step.from.end * row];
                expected[step.to.start * row..step.to.end * row].copy_from_slice(&rounded(tensor, from));
            }
            let element = tensor.scalar.bytes() as usize;
            let pairs = found.chunks_exact(element).zip(expected.chunks_exact(element));
            let is_nan = |bytes: &[u8]| value(tensor.scalar, bytes).is_nan();
            other_values += pairs.filter(|(one, two)| one != two && !(is_nan(one) && is_nan(two))).count();
        }
        Ok((other_values, other_bits))
    }
}

/// Elements of all kinds: of every size, zeros of both signs, infinities, what is no number.
fn contents(tensor: &RowCopyTensor, seed: u32) -> Vec<u8> {
    let count = ROWS * tensor.row_elements as usize;
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE];
    let element = |at: usize| match special.get(at % 13) {
        Some(&value) => narrowed(tensor.scalar, value),
        None => next().to_le_bytes()[..tensor.scalar.bytes() as usize].to_vec(),
    };
    (0..count).flat_map(element).collect()
}

fn value(scalar: Scalar, bytes: &[u8]) -> f32 {
    match (scalar, bytes) {
        (Scalar::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Scalar::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Scalar::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}

fn narrowed(scalar: Scalar, value: f32) -> Vec<u8> {
    match scalar {
        Scalar::F32 => value.to_le_bytes().to_vec(),
        Scalar::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        Scalar::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
    }
}

/// What the host makes of elements that travel as `tensor` says.
fn rounded(tensor: &RowCopyTensor, bytes: &[u8]) -> Vec<u8> {
    if tensor.scalar.survives(tensor.wire) {
        return bytes.to_vec();
    }
    let through = |bytes: &[u8]| {
        let on_the_wire = narrowed(tensor.wire, value(tensor.scalar, bytes));
        narrowed(tensor.scalar, value(tensor.wire, &on_the_wire))
    };
    bytes.chunks_exact(tensor.scalar.bytes() as usize).flat_map(through).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_rounds_to_the_nearest_and_leaves_what_survives() {
        let tensor = |scalar, wire| RowCopyTensor { scalar, row_elements: 1, wire };
        let of = |tensor: RowCopyTensor, value: f32| {
            super::value(tensor.scalar, &rounded(&tensor, &narrowed(tensor.scalar, value)))
        };
        assert_eq!(of(tensor(Scalar::F32, Scalar::Bf16), 1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(of(tensor(Scalar::F32, Scalar::F16), 1e6), f32::INFINITY);
        assert_eq!(of(tensor(Scalar::F16, Scalar::Bf16), 1.0 + 3.0 / 256.0), 1.0 + 1.0 / 64.0);
        assert_eq!(of(tensor(Scalar::Bf16, Scalar::F32), 3.140625), 3.140625);
        assert!(of(tensor(Scalar::F32, Scalar::Bf16), -0.0).is_sign_negative());
    }
}
