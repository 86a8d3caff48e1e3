//! Rotation of the buffers of remote stages: a slot takes the keys or gradients of a later stage once the one before is through.

use super::STAGE_SLOTS;
use crate::builder::{Mark, ProgramBuilder};
use crate::{BufferId, StreamId};

/// The slots that the buffers of remote stages reuse, and when each is free again.
pub(super) struct Rotation {
    /// Number of stages, stage 0 included.
    stages: usize,
    reuses: [Reuse; STAGE_SLOTS],
}

#[derive(Clone, Copy, Default)]
struct Reuse {
    slots: [Option<usize>; 2],
    free: Option<Mark>,
}

impl Rotation {
    pub(super) fn new(stages: usize) -> Self {
        Self { stages, reuses: Default::default() }
    }

    /// Gives the two buffers of remote stage `s` their slots, and has `stream`, which writes them first, wait until those of
    /// the stage before in these slots are of no more use.
    pub(super) fn take(
        &mut self,
        p: &mut ProgramBuilder,
        stream: StreamId,
        s: usize,
        (first, second): (BufferId, BufferId),
    ) {
        let reuse = &mut self.reuses[s % STAGE_SLOTS];
        p.share(&mut reuse.slots[0], first);
        p.share(&mut reuse.slots[1], second);
        if let Some(free) = reuse.free.take() {
            p.after(stream, Some(s), "wait for a free buffer", free);
        }
    }

    /// The buffers of stage `s` are of no more use after what `stream` has been given so far.
    pub(super) fn leave(&mut self, p: &mut ProgramBuilder, stream: StreamId, s: usize) {
        if s > 0 && s + STAGE_SLOTS < self.stages {
            self.reuses[s % STAGE_SLOTS].free = Some(p.mark(stream, Some(s), "buffer free"));
        }
    }
}
