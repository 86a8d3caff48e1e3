//! Memory of the engine's that stands in for the caller's where other processes read or write a tensor. No memory of the caller is
//! opened by them: not all of it can be (PyTorch's expandable segments), and its owner may free it meanwhile.

use std::collections::BTreeMap;
use std::sync::Mutex;

use counterpoint_exec::collective::PeerRows;
use counterpoint_mask::Range;
use counterpoint_schedule::BufferId;

use super::collective::Work;
use super::{Call, CallError, CudaTransport};
use crate::backend::CudaBuffer;
use crate::sync::lock;
use crate::{CudaError, Device, DeviceBuffer, Stream};

/// Every tensor begins at a multiple of this.
const ALIGNMENT: usize = 256;

/// As many copies at most bring the rows of a tensor that others read.
const MOST_COPIES: usize = 16;

/// Blocks that tensors of the caller have stand in for them.
#[derive(Debug, Default)]
pub(super) struct StandIns {
    blocks: Mutex<BTreeMap<Use, DeviceBuffer>>,
    /// Those that graphs of the caller read and write, when larger ones take their place.
    captured: Mutex<Vec<DeviceBuffer>>,
}

/// What a block serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    /// Collectives of a stream, which follow each other: one begins behind all that other ranks do with the one before.
    Stream(usize),
    /// A collective whose ranks publish once where their memory is.
    Collective(u64),
}

/// A call's tensors as other processes see them.
pub(super) struct StoodIn {
    /// Every buffer of the Program.
    pub(super) table: Vec<CudaBuffer>,
    /// What others write: (where, what that stands for, its rows).
    written: Vec<(CudaBuffer, CudaBuffer, Vec<Range>)>,
}

/// A tensor that other ranks use where it lies.
struct Exposed {
    buffer: BufferId,
    /// The rows that they use.
    rows: Vec<Range>,
    is_written: bool,
}

impl StandIns {
    /// A block of `bytes` at least.
    fn block(&self, device: &Device, of: Use, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        let mut blocks = lock(&self.blocks);
        if let Some(block) = blocks.get(&of).filter(|block| block.len() >= bytes) {
            return Ok(block.clone());
        }
        let block = DeviceBuffer::new(device, bytes)?;
        blocks.insert(of, block.clone());
        Ok(block)
    }

    /// A collective with this number is gone.
    pub(super) fn forget(&self, number: u64) {
        lock(&self.blocks).remove(&Use::Collective(number));
    }

    /// Keeps a block that a graph has.
    fn keep(&self, block: &DeviceBuffer) {
        let mut captured = lock(&self.captured);
        if !captured.iter().any(|kept| kept.address() == block.address()) {
            captured.push(block.clone());
        }
    }
}

impl CudaTransport {
    /// What stands in for tensors of the caller in a call, with the rows that others read; `None` where others use none of its memory.
    pub(super) fn stand_in(&self, call: &Call<'_>) -> Result<Option<StoodIn>, CallError> {
        if self.peers.is_none() {
            return Ok(None);
        }
        let mut exposed = self.exposed(call);
        exposed.retain(|tensor| {
            let memory = call.buffers[tensor.buffer.0].memory();
            memory.is_borrowed() && !memory.is_empty() && !tensor.rows.is_empty()
        });
        if exposed.is_empty() {
            return Ok(None);
        }
        let queue = call.stream.queue();
        let of = match &*call.collective.work {
            Work::GemmReduce(_) | Work::CastGemm(_) => Use::Collective(call.collective.number),
            _ => Use::Stream(queue.raw() as usize),
        };
        let length =
            |tensor: &Exposed| call.buffers[tensor.buffer.0].memory().len().next_multiple_of(ALIGNMENT);
        let block = self.stand_ins.block(&self.device, of, exposed.iter().map(length).sum())?;
        if queue.is_capturing()? {
            self.stand_ins.keep(&block);
        }
        let mut stood_in = StoodIn { table: call.buffers.to_vec(), written: Vec::new() };
        let mut begin = 0;
        for tensor in exposed {
            let callers = &call.buffers[tensor.buffer.0];
            let memory = block.slice(begin..begin + callers.memory().len())?;
            begin += length(&tensor);
            let ours = CudaBuffer::new(memory, callers.shape(), callers.dtype())?;
            if tensor.is_written {
                stood_in.written.push((ours.clone(), callers.clone(), tensor.rows));
            } else {
                copy_rows(queue, callers, &ours, &tensor.rows)?;
            }
            stood_in.table[tensor.buffer.0] = ours;
        }
        Ok(Some(stood_in))
    }

    /// The tensors of a collective that other ranks use where they lie.
    fn exposed(&self, call: &Call<'_>) -> Vec<Exposed> {
        let collective = &call.collective.collective;
        let pattern = &collective.pattern;
        let rows_of = |peers: &[PeerRows], own: bool| {
            let peers = peers.iter().filter(|peer| own || peer.rank != self.rank);
            joined(peers.flat_map(|peer| peer.rows.iter().copied()))
        };
        let read = |own: bool| {
            let rows = few(rows_of(&pattern.outgoing, own));
            let tensor =
                |&(buffer, _): &(BufferId, _)| Exposed { buffer, rows: rows.clone(), is_written: false };
            collective.tensors.iter().map(tensor).collect()
        };
        let written = || {
            let rows = rows_of(&pattern.incoming, true);
            let tensor =
                |&(_, buffer): &(_, BufferId)| Exposed { buffer, rows: rows.clone(), is_written: true };
            collective.tensors.iter().map(tensor).collect()
        };
        match &*call.collective.work {
            // A rank has its own rows from its own tensor.
            Work::Pull(_) => read(false),
            Work::Push(push) if push.staging().is_none() => written(),
            Work::Link(link) if link.writes_outputs() => written(),
            Work::Link(_) => read(true),
            Work::GemmReduce(work) => {
                work.side.written().into_iter().map(|buffer| whole(call, buffer)).collect()
            }
            Work::CastGemm(_) => written(),
            Work::Push(_) | Work::BackwardReduce(_) | Work::Exchange(_) => Vec::new(),
        }
    }
}

impl StoodIn {
    /// Gives the caller what others have written, once they have.
    pub(super) fn give(&self, queue: &Stream) -> Result<(), CudaError> {
        self.written.iter().try_for_each(|(ours, callers, rows)| copy_rows(queue, ours, callers, rows))
    }
}

/// A tensor of which all rows are written.
fn whole(call: &Call<'_>, buffer: BufferId) -> Exposed {
    let rows = call.buffers[buffer.0].shape().first().copied().unwrap_or(0);
    Exposed { buffer, rows: joined([Range::new(0, rows)].into_iter()), is_written: true }
}

fn copy_rows(queue: &Stream, from: &CudaBuffer, to: &CudaBuffer, rows: &[Range]) -> Result<(), CudaError> {
    let row = from.memory().len() / from.shape().first().copied().unwrap_or(1).max(1);
    rows.iter().try_for_each(|rows| {
        let bytes = rows.start * row..rows.end * row;
        to.memory().copy_from(queue, bytes.start, &from.memory().slice(bytes)?)
    })
}

/// Ascending ranges that neither overlap nor touch.
fn joined(rows: impl Iterator<Item = Range>) -> Vec<Range> {
    let mut rows: Vec<Range> = rows.filter(|rows| !rows.is_empty()).collect();
    rows.sort_unstable();
    let mut joined: Vec<Range> = Vec::new();
    for range in rows {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    joined
}

/// The same, or all from the first to the last where they are many: bytes that nobody reads cost less than copies.
fn few(rows: Vec<Range>) -> Vec<Range> {
    match rows.as_slice() {
        [first, .., last] if rows.len() > MOST_COPIES => vec![first.hull(last)],
        _ => rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_several_ranks_read_are_copied_once_and_by_few_copies() {
        let is = |rows: &[(usize, usize)]| -> Vec<Range> {
            rows.iter().map(|&(start, end)| Range::new(start, end)).collect()
        };
        let of = |rows: &[(usize, usize)]| joined(is(rows).into_iter());
        assert_eq!(of(&[(8, 9), (0, 3), (2, 5), (5, 6), (7, 7)]), is(&[(0, 6), (8, 9)]));
        assert_eq!(of(&[(0, 9), (2, 3), (4, 12)]), is(&[(0, 12)]));
        assert!(of(&[]).is_empty());
        let apart: Vec<Range> = (0..MOST_COPIES + 1).map(|at| Range::new(3 * at, 3 * at + 1)).collect();
        assert_eq!(few(apart[1..].to_vec()), apart[1..]);
        assert_eq!(few(apart.clone()), [Range::new(0, 3 * MOST_COPIES + 1)]);
    }
}
