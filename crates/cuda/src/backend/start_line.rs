use std::sync::Mutex;

use super::lock;
use crate::{CudaError, Device, DeviceBuffer, Event, Stream, StreamPriority};

/// What holds back the ranks of a process until all of them are enqueued: fills of memory that nobody reads, which the streams
/// of all ranks wait for. Not a wait for the host, which might itself be held up by a device that waits.
#[derive(Default)]
pub(super) struct StartLine {
    filled: Mutex<Option<Fills>>,
}

/// On a stream of their own: what else is enqueued to be done at once, such as the mark that a run's times are measured from, must not be
/// held back.
struct Fills {
    stream: Stream,
    memory: DeviceBuffer,
    passed: Event,
}

/// A fill of so many bytes takes some 20 us.
const BYTES: usize = 64 << 20;
/// Enqueueing up to the first meeting takes about 20 us a rank.
const FILLS_PER_RANK: usize = 2;

impl StartLine {
    /// Has what is enqueued on `streams` from now on start together, some 40 us a rank from now.
    pub(super) fn hold(&self, device: &Device, ranks: usize, streams: &[&Stream]) -> Result<(), CudaError> {
        let mut filled = lock(&self.filled);
        let Fills { stream, memory, passed } = match &mut *filled {
            Some(filled) => filled,
            none => none.insert(Fills {
                stream: Stream::new(device, StreamPriority::High)?,
                memory: DeviceBuffer::new(device, BYTES)?,
                passed: Event::new(device)?,
            }),
        };
        (0..FILLS_PER_RANK * ranks).try_for_each(|_| memory.fill(stream, 0))?;
        passed.record(stream)?;
        streams.iter().try_for_each(|stream| stream.wait(passed))
    }
}
