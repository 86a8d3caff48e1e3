//! The group: ranks that work together, joined once for the life of a process, and the plans that are called on them.

mod attempt;
mod collective;
mod end;
mod join;

use std::ops::Range;
use std::sync::Arc;

use counterpoint_choose::{LinearMachine, TunedHere};
use counterpoint_schedule::Program;

pub use self::attempt::Attempt;
pub use self::collective::{
    CollectiveCalls, CollectiveRank, CollectiveSpec, CollectiveTensors, GroupCollective, Reduce, TensorPair,
};
pub use self::join::{JoinConfig, Store};
use crate::group_rank::ConnectionKeeper;
use crate::{
    Backend, Call, CpuMachine, ExecError, GroupRank, Machine, PlanIdentity, Prepared, Rendezvous, Ticket,
    World, WorldConfig,
};

/// A rank of a machine's group.
pub type RankOf<M> = Arc<GroupRank<<M as Machine>::Backend, <M as Machine>::Transport>>;

/// A rank of a machine, with one Program made ready.
pub type PreparedRank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;

/// Ranks that work together, joined once, collectively: all of one process, or one of this process and others of other processes.
///
/// A group holds what is made once and used by everything that its ranks run: the connection between them, their streams, their
/// scratch memory, and the place of the first error. Making a plan ready on it ([`Group::prepare`], [`Group::attention`]) and dropping
/// a plan are local: no other rank is asked or waited for. Calls follow each other on the ranks' streams. All ranks make the same
/// calls in the same order.
///
/// After its first error a group is of no use: every call gives that error at once. Drop it and join a new one.
pub struct Group<M: Machine> {
    world_size: usize,
    here: Range<usize>,
    ranks: Vec<RankOf<M>>,
    linear: Arc<LinearMachine>,
}

impl<M: Machine> Clone for Group<M> {
    fn clone(&self) -> Self {
        let Self { world_size, here, ranks, linear } = self;
        Self { world_size: *world_size, here: here.clone(), ranks: ranks.clone(), linear: linear.clone() }
    }
}

impl Group<CpuMachine> {
    /// A group of `world_size` ranks that are threads of this process.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no threads.
    pub fn local(world_size: usize, config: WorldConfig) -> Result<Self, ExecError> {
        Self::connect(&CpuMachine::new(0, None)?, world_size, config)
    }
}

impl<M: Machine> Group<M> {
    /// Connects `world_size` ranks of a machine. Every process of a machine of several calls it, as often as the others.
    ///
    /// # Errors
    /// When the machine has too little of something; when a rank does not come within the limit.
    pub fn connect(machine: &M, world_size: usize, config: WorldConfig) -> Result<Self, ExecError> {
        Self::connect_kept(machine, world_size, config, None)
    }

    /// The same for ranks that have joined at a rendezvous of the group's own: it keeps that and the machine, and leaves with its
    /// [`close`](Group::close).
    ///
    /// # Errors
    /// As [`Group::connect`].
    pub fn connect_at(
        rendezvous: &Arc<Rendezvous>,
        machine: M,
        world_size: usize,
        config: WorldConfig,
    ) -> Result<Self, ExecError>
    where
        M: Send + Sync + 'static,
    {
        let machine = Arc::new(machine);
        let keeper = ConnectionKeeper { _machine: machine.clone(), rendezvous: rendezvous.clone() };
        Self::connect_kept(&*machine, world_size, config, Some(Arc::new(keeper)))
    }

    fn connect_kept(
        machine: &M,
        world_size: usize,
        config: WorldConfig,
        keeper: Option<Arc<ConnectionKeeper>>,
    ) -> Result<Self, ExecError> {
        let world = World::new(world_size, config);
        let ends = machine.connect(&world)?.into_iter();
        let rank = |(backend, transport)| GroupRank::kept_by(backend, transport, keeper.clone());
        Ok(Self {
            here: machine.ranks_here(world_size),
            ranks: ends.map(rank).collect(),
            linear: Arc::new(machine.linear(world_size)),
            world_size,
        })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Those that are in this process.
    pub fn ranks_here(&self) -> Range<usize> {
        self.here.clone()
    }

    /// Those that are in this process, in their order.
    pub fn ranks(&self) -> &[RankOf<M>] {
        &self.ranks
    }

    /// The same, whose linear layers run as they were tuned, where they were. The same on all ranks.
    #[must_use]
    pub fn with_tuned(mut self, tuned: Arc<TunedHere>) -> Self {
        self.linear = Arc::new(LinearMachine { tuned: Some(tuned), ..(*self.linear).clone() });
        self
    }

    /// The same where collectives of other libraries run concurrently, on streams that its calls are not ordered with
    /// ([`GroupRank::order_with`](crate::GroupRank::order_with)): no pass of a linear layer is chosen, or taken as it was tuned, that may
    /// hold all multiprocessors while it waits for other ranks. A policy that is named is taken as it is. The same on all ranks.
    #[must_use]
    pub fn concurrent_collectives(mut self) -> Self {
        self.linear = Arc::new((*self.linear).clone().without_waiting_products());
        self
    }

    /// The same, whose calls overlap where the caller gives them different streams, as micro-batches have: the first collectives of one
    /// run under the last computations of the one before. Every stream's own calls follow each other, and whoever uses one stream's
    /// results on another orders the two, as always with streams. What was made ready before keeps to itself, and so do calls without
    /// a stream, those of one rank alone, and Programs with kernels that compute and communicate at once
    /// ([`Program::overlaps_other_calls`]). Scratch memory is held twice. The same on all ranks.
    #[must_use]
    pub fn overlap_calls(self) -> Self {
        self.ranks.iter().for_each(|rank| rank.overlap_calls());
        self
    }

    /// What its ranks can do with passes of linear layers; see [`Machine::linear`].
    pub fn linear(&self) -> &LinearMachine {
        &self.linear
    }

    /// Bytes of scratch memory of the ranks here.
    pub fn scratch_bytes(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.scratch_bytes()).sum()
    }

    /// Makes a Program ready for each rank here, from what `lower` gives for it. Local, on any thread, and at any time. `plan` is
    /// what ranks compare in the first call.
    ///
    /// # Errors
    /// As [`Prepared::on`]; the group is as before.
    pub fn prepare(
        &self,
        lower: impl Fn(usize) -> Program,
        plan: Option<&PlanIdentity>,
    ) -> Result<Vec<PreparedRank<M>>, ExecError> {
        self.ranks.iter().map(|rank| Prepared::on(rank, lower(rank.rank()), plan)).collect()
    }

    /// Whether all is well; never sleeps.
    ///
    /// # Errors
    /// [`ExecError::Closed`]; the first error of any rank, as far as it is known here.
    pub fn poll(&self) -> Result<(), ExecError> {
        self.ranks.iter().try_for_each(|rank| rank.check())
    }

    /// Ends the group for all ranks, which hear `reason` from whatever they wait for: what a rank does that cannot go on. Gives the
    /// group's error, which is another where that came first.
    pub fn fail(&self, reason: impl Into<String>) -> ExecError {
        self.fail_with(ExecError::GaveUp { rank: self.here.start, reason: reason.into() })
    }

    /// Likewise with an error as the reason.
    pub fn fail_with(&self, error: ExecError) -> ExecError {
        let firsts = self.ranks.iter().map(|rank| rank.backend().fail(error.clone()));
        firsts.reduce(|first, _| first).unwrap_or(error)
    }

    /// Ends the group, collectively: returns once all calls of all ranks have ended, and all know it. From then on it takes no calls.
    /// Dropping a group without it waits for no one. Either way a rank has left: a call that another rank makes and that needs it fails at
    /// once. A process that ends meanwhile is lost to the others.
    ///
    /// A group that has failed is left by this rank alone: what runs here ends first, for the limit at most, so that another
    /// group may take the same tensors.
    ///
    /// # Errors
    /// The first error of any rank, [`ExecError::Left`] where another still called this one; [`ExecError::Stalled`] with the rank that does
    /// not close within the limit.
    pub fn close(&self) -> Result<(), ExecError> {
        let ended = self.end_together().inspect_err(|_| {
            self.ranks.iter().for_each(|rank| {
                rank.drain();
            });
        });
        self.ranks.iter().for_each(|rank| rank.leave());
        ended
    }

    fn end_together(&self) -> Result<(), ExecError> {
        let identity = PlanIdentity::end_of_group();
        let last = self.prepare(|rank| end::program(rank, self.world_size), Some(&identity))?;
        let tensors = last.iter().map(end::tensors).collect::<Result<Vec<_>, _>>()?;
        let calls = last.iter().zip(&tensors).map(|(rank, tensors)| Call::new(rank, tensors, None));
        let tickets = Call::enqueue_ranks(calls.collect::<Result<_, _>>()?)?;
        self.ranks.iter().for_each(|rank| rank.close());
        tickets.iter().try_for_each(Ticket::wait)?;
        self.synchronize_streams()
    }

    /// Sleeps until all calls of the ranks here have ended.
    ///
    /// # Errors
    /// The first error of any rank.
    pub fn synchronize(&self) -> Result<(), ExecError> {
        for rank in &self.ranks {
            let ends: Vec<_> = rank.order().before(0, false).map(|(_, ended)| ended.clone()).collect();
            ends.iter().try_for_each(|ended| rank.backend().wait_on_host(ended))?;
        }
        self.ranks.iter().try_for_each(|rank| rank.backend().check())
    }

    fn synchronize_streams(&self) -> Result<(), ExecError> {
        self.ranks.iter().try_for_each(|rank| rank.synchronize())
    }
}
