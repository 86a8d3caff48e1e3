//! What moves rows between ranks: the face of a transport, and what it is given.

use counterpoint_schedule::{BufferSpec, GroupCast, GroupReduce, Op, OverlapPolicy, Program};

use crate::{Backend, CaptureFault, ExecError, OpPlace, PlanIdentity, TablesOf};

/// Moves rows between ranks for one rank of a [`Backend`]. The n-th collective that one rank enqueues is matched with the n-th of
/// every other, whatever streams they are on.
///
/// Enqueueing has three steps, each of which may wait on the host until the peers have taken the one before. Ranks with a
/// thread each take them at once ([`Transport::enqueue`]); one thread that enqueues for several ranks takes each step for
/// all of them.
pub trait Transport<B: Backend>: Send + Sync {
    /// A collective made ready to run many times.
    type Collective: Send;
    /// A collective that is being enqueued.
    type Pending: Send;

    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks that take part.
    fn world_size(&self) -> usize;

    /// Checks this rank's part of a group-cast and makes it ready, to be moved as the context's policy says.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the part does not fit the tensors: nothing has been sent then; [`ExecError::Policy`] when
    /// the transport has nothing that moves rows so.
    fn prepare_cast(
        &self,
        place: &OpPlace,
        op: &GroupCast,
        context: &CollectiveContext<'_>,
    ) -> Result<Self::Collective, ExecError>;

    /// Likewise for a group-reduce.
    ///
    /// # Errors
    /// As [`Transport::prepare_cast`].
    fn prepare_reduce(
        &self,
        place: &OpPlace,
        op: &GroupReduce,
        context: &CollectiveContext<'_>,
    ) -> Result<Self::Collective, ExecError>;

    /// Makes the parts of a fused operation ready as one, by the tables of its Program, or gives `None` where there is no kernel for them: they are then enqueued one
    /// after the other. All ranks find the same.
    ///
    /// # Errors
    /// As [`Transport::prepare_cast`]; when the device has too little of something.
    fn prepare_fused(
        &self,
        _backend: &B,
        _place: &OpPlace,
        _parts: &[Op],
        _program: &Program,
        _tables: &TablesOf<B>,
    ) -> Result<Option<Self::Collective>, ExecError> {
        Ok(None)
    }

    /// Publishes to the peers where memory lies that calls of a collective will bring them, as far as it is in `buffers`, which hold none for tensors of
    /// the caller: they open it before the first call.
    ///
    /// # Errors
    /// The world's error, when it has failed.
    fn publish_memory(
        &self,
        _collective: &Self::Collective,
        _buffers: &[Option<B::Buffer>],
    ) -> Result<(), ExecError> {
        Ok(())
    }

    /// Whether a graph of the device can hold calls of a collective, whose ranks then synchronise on the device alone each time it is
    /// replayed; if not, why, and what to do.
    ///
    /// # Errors
    /// The reason.
    fn can_be_captured(&self, _collective: &Self::Collective) -> Result<(), CaptureFault> {
        Err(CaptureFault::HostSynchronises)
    }

    /// Announces to the peers this rank's part in a collective that it has not called yet, which comes after `between` others that are not
    /// enqueued yet: a call then waits once for what all of its collectives need of the peers. [`Transport::begin`] announces what this has
    /// not.
    ///
    /// # Errors
    /// The world's error, when it has failed.
    fn announce(
        &self,
        _call: &CollectiveCall<'_, B, Self::Collective>,
        _between: u64,
    ) -> Result<(), ExecError> {
        Ok(())
    }

    /// Announces to the peers this rank's part, unless [`Transport::announce`] has. Arrives at the call's barrier as soon as the collective has started, before it
    /// waits for any peer.
    ///
    /// # Errors
    /// The world's error, when it has failed.
    fn begin(&self, call: &CollectiveCall<'_, B, Self::Collective>) -> Result<Self::Pending, ExecError>;

    /// Enqueues what takes the peers' rows, once they have begun.
    ///
    /// # Errors
    /// As [`Transport::begin`]; when peers disagree or do not come.
    fn fetch(
        &self,
        call: &CollectiveCall<'_, B, Self::Collective>,
        pending: &mut Self::Pending,
    ) -> Result<(), ExecError>;

    /// Enqueues the end, once the peers have fetched: what is enqueued on the stream after it finds this rank's outputs
    /// complete, and may overwrite its inputs.
    ///
    /// # Errors
    /// As [`Transport::fetch`].
    fn end(
        &self,
        call: &CollectiveCall<'_, B, Self::Collective>,
        pending: Self::Pending,
    ) -> Result<(), ExecError>;

    /// All three steps.
    ///
    /// # Errors
    /// As [`Transport::fetch`].
    fn enqueue(&self, call: &CollectiveCall<'_, B, Self::Collective>) -> Result<(), ExecError> {
        let mut pending = self.begin(call)?;
        self.fetch(call, &mut pending)?;
        self.end(call, pending)
    }
}

/// What a collective is made ready for. One transport serves many Programs, so that what differs between them comes with each
/// collective.
#[derive(Clone, Copy, Debug)]
pub struct CollectiveContext<'a> {
    /// The table that its buffer ids index.
    pub buffers: &'a [BufferSpec],
    /// How rows are to be moved.
    pub policy: &'a OverlapPolicy,
    /// The plan that it belongs to, compared between ranks when the collective is first called.
    pub plan: Option<&'a PlanIdentity>,
    /// Where ranks make Programs ready at times of their own, what they number collectives by: the Program's turn, which is the same on all
    /// ranks, and the collective's number in it.
    pub turn: Option<[u64; 2]>,
}

/// A collective to be enqueued.
pub struct CollectiveCall<'a, B: Backend, C> {
    /// The rank's backend.
    pub backend: &'a B,
    /// The stream that it is put on.
    pub stream: &'a B::Stream,
    /// Its place in the Program.
    pub place: &'a OpPlace,
    /// What was made ready.
    pub collective: &'a C,
    /// The table that its buffer ids index.
    pub buffers: &'a [B::Buffer],
    /// Where it arrives.
    pub barrier: Option<&'a B::Barrier>,
    /// What it raises as its rows come ([`Delivery`](counterpoint_schedule::Delivery)), or what signals to it the rows that it takes so.
    pub signal: Option<&'a B::Signal>,
}
