//! The ranks of a group that are in this process, and what they do together.

mod engine;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use counterpoint_choose::TunedPlace;
use counterpoint_console::tuned::{place_of_processes, place_of_threads};
use counterpoint_cuda::{CudaMachine, CudaProcess, DescribedGpu, Device, Timing, TransportKind};
use counterpoint_exec::{
    CpuMachine, DeviceFault, ExecError, ExpertPass, Group, JoinConfig, PlanningThreads, SlowLink, WorldConfig,
};
use counterpoint_plan::PlanCache;
use counterpoint_schedule::ReduceOp;
use pyo3::prelude::*;

use crate::allocator::PythonAllocator;
use crate::borrow::Borrowed;
use crate::calls::{Calls, Waits};
use crate::described::{Described, GroupFacts, PlacedOn, StepTables};
use crate::engine::{Engine, Joined};
use crate::error::{engine, raise};
use crate::experts::{ExpertCall, ExpertFields, ExpertKey};
use crate::integers::duration;
use crate::interrupt::{self, interruptible};
use crate::join::{self, Attempt, placed};
use crate::linear::{LayerKey, LinearCall, WantedTensor, named_call};
use crate::process::Process;
use crate::routing::Routing;
use crate::rows::{RowAction, RowPattern, RowsCall, RowsKey, rows_of};
use crate::site::{Site, measured, topology};
use crate::solution::{Content, Solution};
use crate::splits::Splits;
use crate::tuned;

/// Ranks that are joined: all of a group in this process, or one of several processes.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Ranks {
    facts: Arc<GroupFacts>,
    engine: Mutex<Option<Arc<dyn Engine>>>,
    /// Plans that were made for it, in host memory alone.
    plans: Mutex<PlanCache<Content>>,
    /// Threads that plan side by side.
    planners: Mutex<Option<Arc<PlanningThreads>>>,
    tuned: Tuned,
    process: Process,
}

/// What linear layers follow where it was measured.
struct Tuned {
    place: TunedPlace,
    /// Plans for it.
    count: usize,
}

/// Plans that a group keeps, to be found again by their content.
const KEPT_PLANS: NonZeroUsize = NonZeroUsize::new(16).expect("16 is not zero");

#[pymethods]
impl Ranks {
    /// All `size` ranks in this process. `slow_link` imitates a link: (seconds of a collective, bytes a second). `tuned` is the text of
    /// tuned plans.
    #[staticmethod]
    #[pyo3(signature = (size, *, slow_link, limit, tuned))]
    fn local(
        py: Python<'_>,
        size: usize,
        slow_link: Option<(f64, f64)>,
        limit: f64,
        tuned: Option<&str>,
    ) -> PyResult<Self> {
        let plans = tuned::given(py, tuned)?;
        let (limit, site) = (duration(py, limit)?, Site::cpu(topology(size, 1), None));
        let slow_link = match slow_link {
            None => None,
            Some((_, bytes_per_second)) if !(bytes_per_second.is_finite() && bytes_per_second > 0.0) => {
                let message =
                    format!("slow_link is {bytes_per_second} bytes a second; it must be more than 0");
                return Err(raise(py, "PlanError", &message, &[]));
            }
            Some((alpha, bytes_per_second)) => {
                Some(SlowLink { alpha: duration(py, alpha)?, bytes_per_second, network: None })
            }
        };
        let place = place_of_threads(slow_link);
        let group = engine(py, || Group::connect(&CpuMachine::new(0, slow_link)?, size, config(limit)))?;
        let (group, count) = tuned::following(group, plans, &place);
        let facts = GroupFacts { rank: None, transport: "memory".into(), site, device: PlacedOn::Cpu };
        Ok(Self::with(facts, Tuned { place, count }, Arc::new(Joined::new(group))))
    }

    /// This process as a rank of an attempt of processes to join.
    /// `address` is one of rank 0's host at which all reach it. `nodes` is on how many machines they are, equally many on each. `profile` is
    /// the text of a machine profile, which plans are made by, `tuned` that of tuned plans, `concurrent_collectives` whether those of other
    /// libraries run at any time; all the same on all ranks. Collective.
    #[staticmethod]
    #[pyo3(signature = (attempt, *, address, limit, nodes, profile, tuned, concurrent_collectives))]
    fn join(
        py: Python<'_>,
        attempt: &Attempt,
        address: &str,
        limit: f64,
        nodes: usize,
        profile: Option<&str>,
        tuned: Option<&str>,
        concurrent_collectives: bool,
    ) -> PyResult<Self> {
        let (rank, size) = attempt.place();
        let plans = tuned::given(py, tuned)?;
        let site = Site::cpu(topology(size, nodes), measured(py, profile)?);
        let (address, world) = (join::address(py, address)?, config(duration(py, limit)?));
        let (store, attempt, _give_up) = attempt.lend(py);
        let joined = move || Group::join_in(&attempt, &store, &JoinConfig { address, world });
        let group = placed(interruptible(py, joined, |_| {})?, concurrent_collectives);
        let place = place_of_processes(None);
        let (group, count) = tuned::following(group, plans, &place);
        let facts = GroupFacts { rank: Some(rank), transport: "tcp".into(), site, device: PlacedOn::Cpu };
        Ok(Self::with(facts, Tuned { place, count }, Arc::new(Joined::new(group))))
    }

    /// Likewise with this process on the GPU of that number, which other ranks may share.
    #[staticmethod]
    #[pyo3(signature = (attempt, ordinal, *, address, limit, transport, nodes, profile, tuned, concurrent_collectives, allocator))]
    fn join_cuda(
        py: Python<'_>,
        attempt: &Attempt,
        ordinal: usize,
        address: &str,
        limit: f64,
        transport: &str,
        nodes: usize,
        profile: Option<&str>,
        tuned: Option<&str>,
        concurrent_collectives: bool,
        allocator: PythonAllocator,
    ) -> PyResult<Self> {
        let (rank, size) = attempt.place();
        let (measured, plans) = (measured(py, profile)?, tuned::given(py, tuned)?);
        let (address, world) = (join::address(py, address)?, config(duration(py, limit)?));
        let kind: TransportKind = transport
            .parse()
            .map_err(|reason| raise(py, "Error", &format!("transport is {transport:?}: {reason}"), &[]))?;
        let topology = topology(size, nodes);
        let (store, attempt, _give_up) = attempt.lend(py);
        let joined = move || -> Result<_, ExecError> {
            let join = JoinConfig { address, world: world.clone() };
            let rendezvous = attempt.join(&store, &join)?;
            let process = CudaProcess::new(&rendezvous, Some(ordinal), Timing::Spans, kind, topology)?;
            let process = process.with_allocator(Arc::new(allocator)).map_err(|error| ExecError::Device {
                rank,
                place: "the memory of a rank".to_owned(),
                reason: DeviceFault::call(error),
            })?;
            let site = Site {
                machine: process.device().properties().name.clone(),
                transport: process.transport().transport(),
                topology,
                cost: process.cost(measured.as_ref()),
            };
            let (transport, device) =
                (process.transport().to_string(), PlacedOn::Gpu(DescribedGpu::of(process.device())));
            let group = placed(Group::connect_at(&rendezvous, process, size, world)?, concurrent_collectives);
            let place = TunedPlace { device: site.machine.clone(), transport: transport.clone() };
            let (group, count) = tuned::following(group, plans, &place);
            let facts = GroupFacts { rank: Some(rank), transport, site, device };
            Ok((Joined::new(group), facts, Tuned { place, count }))
        };
        let (joined, facts, tuned) = interruptible(py, joined, |_| {})?;
        Ok(Self::with(facts, tuned, Arc::new(joined)))
    }

    /// All `size` ranks in this process, on one GPU, with the allocator's memory.
    #[staticmethod]
    #[pyo3(signature = (size, ordinal, *, limit, tuned, allocator))]
    fn cuda(
        py: Python<'_>,
        size: usize,
        ordinal: usize,
        limit: f64,
        tuned: Option<&str>,
        allocator: PythonAllocator,
    ) -> PyResult<Self> {
        let (limit, plans) = (duration(py, limit)?, tuned::given(py, tuned)?);
        let allocator = Arc::new(allocator);
        let machine = engine(py, || {
            let machine = CudaMachine::new(vec![Device::open(ordinal)?], Timing::Spans)?;
            machine.with_allocator(allocator)
        })?;
        let site = Site {
            machine: machine.devices()[0].properties().name.clone(),
            transport: machine.transport().transport(),
            topology: topology(size, 1),
            cost: machine.cost(None, size),
        };
        let group = engine(py, || Group::connect(&machine, size, config(limit)))?;
        let transport = machine.transport().to_string();
        let place = TunedPlace { device: site.machine.clone(), transport };
        let (group, count) = tuned::following(group, plans, &place);
        let device = PlacedOn::Gpu(DescribedGpu::of(&machine.devices()[0]));
        let facts = GroupFacts { rank: None, transport: "memory".into(), site, device };
        Ok(Self::with(facts, Tuned { place, count }, Arc::new(Joined::new(group))))
    }

    /// This process's rank; None where all are here.
    #[getter]
    fn rank(&self) -> Option<usize> {
        self.facts.rank
    }

    /// What moves rows between ranks.
    #[getter]
    fn transport(&self) -> &str {
        &self.facts.transport
    }

    /// Number of ranks.
    #[getter]
    fn size(&self) -> usize {
        self.facts.size()
    }

    /// The group as a value.
    #[getter]
    fn described(&self) -> Described {
        Described { facts: self.facts.clone() }
    }

    /// Makes a plan ready to be called. `stream` is PyTorch's current one; None on a thread that calls nothing. `tables` are step tables that
    /// were made ahead. Local.
    #[pyo3(signature = (solution, *, stream, tables=None))]
    fn prepare(
        slf: &Bound<'_, Self>,
        solution: &Solution,
        stream: Option<u64>,
        tables: Option<&StepTables>,
    ) -> PyResult<Calls> {
        let (py, content) = (slf.py(), &solution.content);
        let (ranks, tables) = (slf.get().engine(py)?, tables.map(|tables| &tables.ranks[..]));
        let passes = engine(py, || ranks.prepare(content.clone(), stream, tables))?;
        Ok(Calls::new(slf.clone().unbind(), passes, content, Waits::InTheEngine))
    }

    /// The same of which every call gives its times.
    fn prepare_measured(slf: &Bound<'_, Self>, solution: &Solution) -> PyResult<Calls> {
        let (py, content) = (slf.py(), &solution.content);
        let passes = slf.get().engine(py)?.measured(content.clone());
        Ok(Calls::new(slf.clone().unbind(), passes, content, Waits::OnAThread))
    }

    /// Moves rows of a tensor that is dispatched as the queries (or keys) of a plan: "gather", "reduce_scatter", or "roll". Collective.
    #[pyo3(signature = (solution, what, role, *, shift, stream, source, target))]
    fn rows(
        &self,
        py: Python<'_>,
        solution: &Solution,
        what: &str,
        role: &str,
        shift: i64,
        stream: u64,
        source: Borrowed,
        target: Borrowed,
    ) -> PyResult<()> {
        let (content, keys) = (solution.content.clone(), role == "k");
        let (pattern, action) = match what {
            "gather" => (RowPattern::Whole { content, keys }, RowAction::Cast),
            "reduce_scatter" => (RowPattern::Whole { content, keys }, RowAction::Reduce(ReduceOp::Sum)),
            _ => (RowPattern::Rolled { content, shift }, RowAction::Cast),
        };
        self.move_rows(py, pattern, action, stream, vec![(source, target)])
    }

    /// Moves rows by splits, one of each rank here: "cast", or a reduction, "sum", "avg" or "lse". Of the pairs (source, target) all rows
    /// of a split travel together. Collective.
    fn move_by_splits(
        &self,
        py: Python<'_>,
        splits: Vec<PyRef<'_, Splits>>,
        what: &str,
        stream: u64,
        pairs: Vec<(Borrowed, Borrowed)>,
    ) -> PyResult<()> {
        let parts: Vec<_> = splits.iter().map(|splits| (*splits.part).clone()).collect();
        for (rank, part) in self.here().zip(&parts) {
            let [own, held] = rows_of(part);
            engine(py, || part.check(rank, self.facts.size(), own, held))?;
        }
        let action = match what {
            "cast" => RowAction::Cast,
            "sum" => RowAction::Reduce(ReduceOp::Sum),
            "avg" => RowAction::Reduce(ReduceOp::Avg),
            _ => RowAction::Reduce(ReduceOp::Lse),
        };
        self.move_rows(py, RowPattern::Splits(Arc::new(parts)), action, stream, pairs)
    }

    /// A call of a linear layer, "forward", "backward" or "weight_gradient", on tensors by their names. Collective.
    fn linear(
        &self,
        py: Python<'_>,
        layer: LayerKey,
        call: &str,
        stream: u64,
        tensors: Vec<(String, Borrowed)>,
    ) -> PyResult<()> {
        let ranks = self.engine_to_call(py)?;
        let call = LinearCall { key: layer, call: named_call(call), stream, tensors };
        engine(py, || ranks.linear().call(&call))
    }

    /// What such a call takes: names, types, shapes, and whether each is "read", "added to" or "written". Local.
    fn linear_tensors(&self, py: Python<'_>, layer: LayerKey, call: &str) -> PyResult<Vec<WantedTensor>> {
        let (ranks, call) = (self.engine(py)?, named_call(call));
        engine(py, || ranks.linear().tensors(&layer, call))
    }

    /// How the passes of such a layer are run, the forward first: the overlap policy, and rows of every group in the tokens of the first
    /// rank. Local.
    fn linear_passes(&self, py: Python<'_>, layer: LayerKey) -> PyResult<[(String, Vec<usize>); 2]> {
        let ranks = self.engine(py)?;
        engine(py, || ranks.linear().passes(&layer))
    }

    /// Where tuned plans are used, (device, transport), and how many of the group's are for it.
    #[getter]
    fn tuned(&self) -> (&str, &str, usize) {
        let Tuned { place, count } = &self.tuned;
        (&place.device, &place.transport, *count)
    }

    /// A call of a layer of experts, "forward" or "backward", on tensors by their names; they have the rows of all ranks here, one
    /// rank's after the other's. Collective.
    fn experts(
        &self,
        py: Python<'_>,
        layer: ExpertFields,
        routing: &Routing,
        call: &str,
        stream: u64,
        tensors: Vec<(String, Borrowed)>,
    ) -> PyResult<()> {
        let ranks = self.engine_to_call(py)?;
        let key = ExpertKey::new(layer, routing.native.clone());
        let call = named_call(call);
        engine(py, || ranks.experts().call(&ExpertCall { key, call, stream, tensors }))
    }

    /// How the passes of such a layer are run, the forward first: the overlap policy, the number of groups, and the tokens of each in percent
    /// of those of the one before. Local.
    fn expert_passes(
        &self,
        py: Python<'_>,
        layer: ExpertFields,
        routing: &Routing,
    ) -> PyResult<[(String, usize, u32); 2]> {
        let ranks = self.engine(py)?;
        let key = ExpertKey::new(layer, routing.native.clone());
        let passes = engine(py, || ranks.experts().passes(&key))?;
        let pass = |pass: ExpertPass| (pass.policy.to_string(), pass.groups.count.max(1), pass.groups.growth);
        Ok([passes.forward, passes.backward].map(pass))
    }

    /// Ends the group for all ranks, which hear `reason`.
    fn fail(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let ranks = self.engine(py)?;
        engine::<_, ExecError>(py, || {
            ranks.fail(reason);
            Ok(())
        })
    }

    /// Has calls on different streams overlap, of plans that are made ready from now on.
    fn overlap_calls(&self, py: Python<'_>) -> PyResult<()> {
        self.engine(py)?.overlap_calls();
        Ok(())
    }

    /// Has calls and what a stream is given follow each other from now on; false where there are no streams.
    fn order_with(&self, py: Python<'_>, stream: u64) -> PyResult<bool> {
        Ok(self.engine(py)?.order_with(stream))
    }

    /// Raises the group's first error, as far as it is known here; never waits.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let ranks = self.engine(py)?;
        engine(py, || ranks.poll())
    }

    /// Leaves the group, once all its ranks do. Calls from now on are errors.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.take_engine(py)? {
            Some(ranks) => engine(py, move || ranks.close()),
            None => Ok(()),
        }
    }

    /// Has so many threads make each plan from now on.
    fn plan_with(&self, py: Python<'_>, threads: usize) -> PyResult<()> {
        let planners = engine(py, || PlanningThreads::new(threads))?;
        *self.planners.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(planners));
        Ok(())
    }

    /// Of the plans that it keeps: how often one was found, how often one was made, how many there are at most, and how many there are.
    fn plan_cache_info(&self) -> (u64, u64, usize, usize) {
        let plans = self.plans();
        (plans.hits(), plans.misses(), plans.capacity().get(), plans.len())
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl Ranks {
    fn with(facts: GroupFacts, tuned: Tuned, engine: Arc<dyn Engine>) -> Self {
        let (facts, engine) = (Arc::new(facts), Mutex::new(Some(engine)));
        let (plans, planners) = (Mutex::new(PlanCache::new(KEPT_PLANS)), Mutex::new(None));
        Self { facts, engine, plans, planners, tuned, process: Process::this() }
    }

    fn move_rows(
        &self,
        py: Python<'_>,
        pattern: RowPattern,
        action: RowAction,
        stream: u64,
        pairs: Vec<(Borrowed, Borrowed)>,
    ) -> PyResult<()> {
        let ranks = self.engine_to_call(py)?;
        let of_row =
            |(from, _): &(Borrowed, Borrowed)| (from.shape.iter().skip(1).copied().collect(), from.dtype);
        let key = RowsKey { pattern, action, tensors: pairs.iter().map(of_row).collect() };
        let call = RowsCall { key, stream, pairs };
        engine(py, || ranks.rows().call(&call))
    }

    /// What plans of the group follow.
    pub(crate) fn facts(&self) -> &GroupFacts {
        &self.facts
    }

    /// Plans that were made for the group.
    pub(crate) fn plans(&self) -> MutexGuard<'_, PlanCache<Content>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Threads that plans of the group are made with; `None` where the caller's is enough, as in a fork, which has none of them.
    pub(crate) fn planning_threads(&self) -> Option<Arc<PlanningThreads>> {
        if self.is_forked() {
            return None;
        }
        self.planners.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The ranks of this process.
    pub(crate) fn here(&self) -> Range<usize> {
        self.facts.here()
    }
}

fn config(limit: Duration) -> WorldConfig {
    WorldConfig { limit, interrupted: interrupt::reason, ..WorldConfig::default() }
}
