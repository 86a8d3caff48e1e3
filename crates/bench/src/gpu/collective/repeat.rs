//! Group collectives called thousands of times with random delays, for the selftest's search for races.

use std::mem;

use counterpoint_exec::{Backend, ExecError, Machine, Transport};

use super::{BenchCollective, CheckedRows, CollectiveCase, Gate, Rank, RowContents, on_ranks};
use counterpoint_cuda::exec_error;
use counterpoint_cuda::{CudaBackend, CudaError, DeviceBuffer};

/// Calls after which the host waits, and so notices what failed.
const BATCH: usize = 1000;
/// What delays a rank, at most: it fills memory meanwhile.
const NOISE_BYTES: usize = 8 << 20;

/// Calls a collective again and again, with other contents each time and with random delays before every other call; elements that
/// were not of their call, on all ranks of this process. Everything is made, compared and counted on the devices, between the calls.
///
/// # Errors
/// Whatever ends a run.
pub fn repeat_collective<M: Machine<Backend = CudaBackend> + Sync>(
    machine: &M,
    case: &CollectiveCase,
    calls: usize,
) -> Result<u64, ExecError> {
    Ok(on_ranks(machine, case, |rank, gate| rank.repeat(gate, calls))?.into_iter().sum())
}

impl<M: Machine<Backend = CudaBackend>> Rank<'_, M> {
    fn repeat(&self, gate: &Gate<'_, M>, calls: usize) -> Result<u64, ExecError> {
        let (backend, transport) = self.ends;
        let failed = |error: CudaError| backend.fail(exec_error(self.rank, "a stress test", error));
        let stream = self.stream()?;
        let queue = stream.queue();
        let wrong = DeviceBuffer::from_slice(queue, &[0u64]).map_err(failed)?;
        let noise = DeviceBuffer::new(backend.device(), NOISE_BYTES).map_err(failed)?;
        let mut delays = Delays::of_rank(self.rank);
        let enqueued = self.call(&stream);
        // Sums begin with what their owner has, which is new in each call too.
        let (made, contents) = match self.case.collective {
            BenchCollective::GroupCast => (BenchCollective::TENSORS, RowContents::Received),
            BenchCollective::GroupReduce => (2 * BenchCollective::TENSORS, RowContents::Summed),
        };
        gate.wait()?;
        for call in 0..calls {
            if let Some(bytes) = delays.next(NOISE_BYTES) {
                noise.slice(0..bytes).and_then(|noise| noise.fill(queue, 0)).map_err(failed)?;
            }
            for at in 0..made {
                // SAFETY: as in `Rank::fill`.
                unsafe { self.check.fill(queue, &self.rows_of(at, call)) }.map_err(failed)?;
            }
            transport.enqueue(&enqueued)?;
            for at in BenchCollective::TENSORS..2 * BenchCollective::TENSORS {
                let rows = self.rows_of(at, call);
                // SAFETY: as in `Rank::wrong`; the count is a word.
                unsafe { self.check.count(queue, &rows, &self.origins, contents, &wrong) }.map_err(failed)?;
            }
            if call % BATCH == BATCH - 1 {
                backend.synchronize(&[&stream])?;
            }
        }
        backend.synchronize(&[&stream])?;
        gate.wait()?;
        let wrong = wrong.download::<u64>(queue, 0, 1).map_err(failed)?[0];
        Ok(wrong)
    }

    /// Rows that are unlike those of the calls before.
    fn rows_of(&self, at: usize, call: usize) -> CheckedRows {
        let rows = self.rows(at);
        CheckedRows { index: rows.index + (BenchCollective::TENSORS * (call % (1 << 24))) as u32, ..rows }
    }
}

/// Random delays of a rank, unlike any other rank's.
#[derive(Debug)]
pub struct Delays(u64);

impl Delays {
    /// Those of a rank, the same each time.
    pub fn of_rank(rank: usize) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ rank as u64)
    }

    /// Before one call in two how many bytes are to be filled, fewer than `most`.
    pub fn next(&mut self, most: usize) -> Option<usize> {
        let Self(state) = self;
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state & 1 == 1).then(|| ((*state >> 32) as usize % most).next_multiple_of(mem::size_of::<u64>()))
    }
}
