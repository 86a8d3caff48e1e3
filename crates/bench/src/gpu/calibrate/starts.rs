//! Whether communication starts before the computation that should hide it, as `doctor --overlap` counts it.

use std::time::Duration;

use counterpoint_cuda::CudaBarrier;
use counterpoint_cuda::kernel::StartLitmus;
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, Event, Stream, StreamPriority};

/// Multiprocessors of the communication that is imitated.
const COMMUNICATION: u32 = 16;
/// How long its blocks stay, and those of the computation.
const NANOSECONDS: u32 = 20_000;

/// Of a wait for a counter, which these kernels do not need.
const LIMIT: Duration = Duration::from_secs(10);

/// Which of two kernels started first, the communication that is enqueued first or the computation that should hide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartCount {
    /// Rounds.
    pub rounds: u32,
    /// Those in which every block of the communication had begun when the first one of the computation did.
    pub communication_first: u32,
}

/// Enqueues a computation that fills `device`, behind it a communication that needs its result, and a second computation, round
/// after round; with `barrier` the second computation waits until the communication has started, as the policy
/// `kernel-barrier` has it, and by the same means.
///
/// # Errors
/// When a kernel cannot be compiled or launched.
pub fn count_starts(device: &Device, rounds: u32, barrier: bool) -> Result<StartCount, CudaError> {
    let litmus = StartLitmus::new(device)?;
    let (compute, communication) =
        (Stream::new(device, StreamPriority::Low)?, Stream::new(device, StreamPriority::High)?);
    let computed = Event::new(device)?;
    let workers = device.sm_count();
    let words = (workers + COMMUNICATION) as usize;
    let starts = DeviceBuffer::new(device, 8 * words)?;
    let (first, second) = (starts.address(), starts.address() + 8 * u64::from(COMMUNICATION));
    let gate = CudaBarrier::new(&compute);
    let mut communication_first = 0;
    for _ in 0..rounds {
        gate.begin_run();
        // SAFETY: both ranges of words lie in `starts`, which lives until the round has ended.
        unsafe {
            litmus.launch(&compute, second, workers, NANOSECONDS, None)?;
            computed.record(&compute)?;
            communication.wait(&computed)?;
            let started = barrier.then(|| gate.arrival()).transpose()?;
            litmus.launch(&communication, first, COMMUNICATION, NANOSECONDS, started.as_ref())?;
            if barrier {
                gate.wait(&compute, 1, "the start of a communication", LIMIT)?;
            }
            litmus.launch(&compute, second, workers, NANOSECONDS, None)?;
        }
        communication.synchronize()?;
        let began = starts.download::<u64>(&compute, 0, words)?;
        let (communication, computation) = began.split_at(COMMUNICATION as usize);
        communication_first += u32::from(communication.iter().max() <= computation.iter().min());
    }
    Ok(StartCount { rounds, communication_first })
}
