//! A forward and a backward enqueued one behind the other by events, without the host in between.

use std::time::Instant;

use counterpoint_exec::{Backend, ExecError, Prepared, Transport};

use super::CudaBackend;
use crate::{CudaError, Event, Stream};

/// Passes of one step, such as forward and backward, each a Program for every rank of this process, enqueued one behind the
/// other without the host's waiting: a rank begins a pass when it has ended the one before, whatever the others do.
pub struct PassOrder {
    /// Marked before the first pass.
    begun: Event,
    /// Marked behind each stream of a pass: by pass, rank and stream.
    ended: Vec<Vec<Vec<Event>>>,
}

/// The ranks of this process, pass by pass.
pub type Passes<'a, 'b, T> = &'b mut [&'a mut [Prepared<CudaBackend, T>]];

impl PassOrder {
    /// For these passes, which have the same ranks with a stream each at least.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn new<T: Transport<CudaBackend>>(
        passes: &[&mut [Prepared<CudaBackend, T>]],
    ) -> Result<Self, ExecError> {
        let of_rank = |rank: &Prepared<CudaBackend, T>| -> Result<Vec<Event>, ExecError> {
            rank.streams().iter().map(|_| rank.backend().create_event()).collect()
        };
        let of_pass = |pass: &&mut [Prepared<CudaBackend, T>]| pass.iter().map(of_rank).collect();
        Ok(Self {
            begun: passes[0][0].backend().create_event()?,
            ended: passes.iter().map(of_pass).collect::<Result<_, _>>()?,
        })
    }

    /// The stream on which a step begins and ends: whoever waits for it waits for all ranks.
    pub fn origin<'a, T: Transport<CudaBackend>>(
        passes: &'a [&mut [Prepared<CudaBackend, T>]],
    ) -> &'a Stream {
        passes[0][0].streams()[0].queue()
    }

    /// Enqueues one step.
    ///
    /// # Errors
    /// As [`Prepared::start_ranks`].
    pub fn enqueue<T: Transport<CudaBackend>>(&self, passes: Passes<'_, '_, T>) -> Result<(), ExecError> {
        let backend = passes[0][0].backend().clone();
        let failed = |error: CudaError| backend.error(&"the order of passes", error);
        self.begun.record(Self::origin(passes)).map_err(failed)?;
        for (p, ended) in self.ended.iter().enumerate() {
            for (r, rank) in passes[p].iter().enumerate() {
                let before =
                    if p == 0 { std::slice::from_ref(&self.begun) } else { &self.ended[p - 1][r][..] };
                for stream in rank.streams() {
                    before.iter().try_for_each(|event| stream.queue().wait(event)).map_err(failed)?;
                }
            }
            Prepared::start_ranks(passes[p], Instant::now())?;
            for (rank, ended) in passes[p].iter().zip(ended) {
                let mut streams = rank.streams().iter().zip(ended);
                streams.try_for_each(|(stream, ended)| ended.record(stream.queue())).map_err(failed)?;
            }
        }
        let origin = Self::origin(passes);
        let mut last = self.ended.iter().flatten().flatten();
        last.try_for_each(|ended| origin.wait(ended)).map_err(failed)
    }
}
