use counterpoint_schedule::{BufferSpec, GroupCast, GroupReduce};

use crate::{Backend, ExecError, OpPlace};

/// Moves rows between ranks for one rank of a [`Backend`]. The n-th collective that one rank enqueues meets the n-th of
/// every other, whatever streams they are on.
pub trait Transport<B: Backend>: Send {
    /// A collective made ready to run many times.
    type Collective: Send;

    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks that take part.
    fn world_size(&self) -> usize;

    /// Checks this rank's part of a group-cast and makes it ready. `specs` is the table that its buffer ids index.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the part does not fit the tensors: nothing has been sent then.
    fn prepare_cast(
        &self,
        place: &OpPlace,
        op: &GroupCast,
        specs: &[BufferSpec],
    ) -> Result<Self::Collective, ExecError>;

    /// Likewise for a group-reduce.
    ///
    /// # Errors
    /// As [`Transport::prepare_cast`].
    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        specs: &[BufferSpec],
    ) -> Result<Self::Collective, ExecError>;

    /// Enqueues a collective and returns at once. Arrives at `barrier` as soon as it has started, before it waits for any
    /// peer; finishes when this rank's outputs are complete and its inputs may be overwritten.
    ///
    /// # Errors
    /// The world's error, when it has failed.
    fn enqueue(
        &self,
        backend: &B,
        stream: &B::Stream,
        place: &OpPlace,
        collective: &Self::Collective,
        buffers: &[B::Buffer],
        barrier: Option<&B::Barrier>,
    ) -> Result<(), ExecError>;
}
