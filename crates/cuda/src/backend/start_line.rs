use std::sync::Mutex;

use super::lock;
use crate::{CudaError, DeviceBuffer, Event, Stream};

/// What holds back the ranks of a process until all of them are enqueued: fills of memory that nobody reads, which the streams
/// of all ranks wait for. Not a wait for the host, which might itself be held up by a device that waits.
#[derive(Default)]
pub(super) struct StartLine {
    filled: Mutex<Option<(DeviceBuffer, Event)>>,
}

/// A fill of so many bytes takes some 20 us.
const BYTES: usize = 64 << 20;
/// Enqueueing up to the first meeting takes about 20 us a rank.
const FILLS_PER_RANK: usize = 2;

impl StartLine {
    /// Has what is enqueued on `streams` from now on start together, some 40 us a rank from now. `setup` is a stream of its own.
    pub(super) fn hold(&self, setup: &Stream, ranks: usize, streams: &[&Stream]) -> Result<(), CudaError> {
        let mut filled = lock(&self.filled);
        let (memory, passed) = match &mut *filled {
            Some(filled) => filled,
            none => {
                let memory = DeviceBuffer::new(setup.device(), BYTES)?;
                none.insert((memory, Event::new(setup.device())?))
            }
        };
        (0..FILLS_PER_RANK * ranks).try_for_each(|_| memory.fill(setup, 0))?;
        passed.record(setup)?;
        streams.iter().try_for_each(|stream| stream.wait(passed))
    }
}
