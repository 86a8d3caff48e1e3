//! Layers of a mixture of experts, on tensors of Python, in place.

use std::sync::{Arc, Mutex, PoisonError};

use counterpoint_exec::{
    Backend, BufferAccess, ExecError, ExpertLayer, ExpertOptions, ExpertOverlap, ExpertPasses, Group,
    LayerCall, Machine, TensorFault, Ticket,
};
use counterpoint_plan::{ExpertCapacity, ExpertKind, ExpertSpec, Routing};
use counterpoint_schedule::{OverlapPolicy, WeightGradient};
use pyo3::prelude::*;

use crate::borrow::{Borrowed, InPlace, dtype_of};
use crate::kept::Kept;
use crate::linear::policy_of;
use crate::routing::rows_of_ranks;

/// A layer, whatever its routing.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertFields {
    spec: ExpertSpec,
    experts: usize,
    gradient: WeightGradient,
    /// Without one, each pass as it was tuned or is predicted to end first.
    policy: Option<OverlapPolicy>,
    capacity: ExpertCapacity,
}

impl<'py> FromPyObject<'_, 'py> for ExpertFields {
    type Error = PyErr;

    /// (kind, (in, out, experts), dtype, gradient, overlap, (tokens, rows)): a kind is "dispatch" or "combine", a gradient "frozen", "written", or
    /// "added" with the type of `main_grad` behind a colon; tokens and rows of a rank at most, or `None`.
    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        type Most = (Option<usize>, Option<usize>);
        type Fields = (String, (usize, usize, usize), String, String, String, Most);
        let (kind, (in_features, out_features, experts), dtype, gradient, overlap, most): Fields =
            object.extract()?;
        let capacity = ExpertCapacity { tokens: most.0, rows_of_rank: most.1, ..ExpertCapacity::default() };
        let kind = if kind == "combine" { ExpertKind::Combine } else { ExpertKind::Dispatch };
        let gradient = match gradient.split_once(':') {
            Some((_, into)) => WeightGradient::Accumulated(dtype_of(into)?),
            None if gradient == "written" => WeightGradient::Written,
            None => WeightGradient::Frozen,
        };
        let policy = policy_of(object.py(), &overlap)?;
        let spec = ExpertSpec { kind, in_features, out_features, dtype: dtype_of(&dtype)? };
        Ok(Self { spec, experts, gradient, policy, capacity })
    }
}

/// A layer under a routing: all that its Programs depend on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertKey {
    layer: ExpertFields,
    routing: Arc<Routing>,
}

impl ExpertKey {
    pub(crate) fn new(layer: ExpertFields, routing: Arc<Routing>) -> Self {
        Self { layer, routing }
    }

    /// Rows of a rank in a tensor of that name.
    fn rows(&self, name: &str) -> Vec<usize> {
        let Self { layer: ExpertFields { spec, experts, .. }, routing } = self;
        let ranks = 0..routing.ranks();
        match (name, spec.kind) {
            ("x" | "dx", ExpertKind::Dispatch) | ("y" | "dy", ExpertKind::Combine) => {
                ranks.map(|rank| routing.tokens(rank)).collect()
            }
            ("x" | "dx" | "y" | "dy", _) => rows_of_ranks(routing),
            _ => vec![experts / routing.ranks() * spec.out_features; routing.ranks()],
        }
    }
}

/// A call of a layer.
pub(crate) struct ExpertCall {
    pub(crate) key: ExpertKey,
    pub(crate) call: LayerCall,
    /// PyTorch's current stream, where there are streams.
    pub(crate) stream: u64,
    /// With the rows of all ranks here.
    pub(crate) tensors: Vec<(String, Borrowed)>,
}

/// Layers of experts of a group of ranks.
pub(crate) trait ExpertEngine: Send + Sync {
    /// On the CPU it returns once the results are written; on a device once they are on their way on the stream.
    fn call(&self, call: &ExpertCall) -> Result<(), ExecError>;
    /// Asks for a pass, which [`ExpertEngine::make`] makes ready, or its first call. False where it was asked for before.
    fn ask(&self, key: &ExpertKey, call: LayerCall) -> bool;
    /// Makes a pass ready that was asked for, where no call has come first. On any thread.
    fn make(&self, key: &ExpertKey, call: LayerCall) -> Result<(), ExecError>;
    /// How the passes of a layer are run.
    fn passes(&self, key: &ExpertKey) -> Result<ExpertPasses, ExecError>;
}

/// Passes that stay ready: each has lists of its own, and most routings come once.
const KEPT_PASSES: usize = 4;
/// Passes that are ready ahead of their first call: backwards of as many layers and micro-batches.
const AHEAD: usize = 64;

/// The layers of experts of a group: those that are ready, each under one routing for one call, and how the passes of each are run.
pub(crate) struct Experts<M: Machine> {
    ready: Kept<(ExpertKey, LayerCall), ExpertLayer<M>>,
    choices: Mutex<Vec<Choice>>,
}

/// How the passes of a layer are run: as is best for the first routing that the caller asked for. All ranks ask in one order, whichever
/// pass their threads come to first.
struct Choice {
    layer: ExpertFields,
    first: Arc<Routing>,
    passes: Option<ExpertPasses>,
}

impl<M: Machine> Default for Experts<M> {
    fn default() -> Self {
        Self { ready: Kept::of(KEPT_PASSES, AHEAD), choices: Mutex::new(Vec::new()) }
    }
}

impl<M> Experts<M>
where
    M: Machine,
    M::Backend: InPlace,
{
    /// Enqueues a call on the ranks here.
    pub(crate) fn enqueue(
        &self,
        group: &Group<M>,
        call: &ExpertCall,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let ExpertCall { key, call, tensors, .. } = call;
        let buffers = split(group, key, tensors)?;
        self.note(key);
        let named: Vec<Vec<_>> = buffers
            .iter()
            .map(|buffers| buffers.iter().map(|(name, buffer)| (name.as_str(), buffer.clone())).collect())
            .collect();
        let make = |turn| self.made(group, key, *call, turn);
        self.ready.with(&(key.clone(), *call), make, |layer| layer.enqueue(*call, &named, streams))
    }

    /// A layer under a routing, made ready for one call.
    fn made(
        &self,
        group: &Group<M>,
        key: &ExpertKey,
        call: LayerCall,
        turn: u64,
    ) -> Result<ExpertLayer<M>, ExecError> {
        let ExpertFields { spec, experts, gradient, capacity, .. } = key.layer;
        let overlap = ExpertOverlap::Passes(self.passes_of(group, key)?);
        let mut layer =
            ExpertLayer::new(group, ExpertOptions { spec, experts, gradient, capacity, overlap })?;
        layer.route_for(key.routing.clone(), call, Some(turn))?;
        Ok(layer)
    }

    /// As [`ExpertEngine::ask`].
    pub(crate) fn ask(&self, key: &ExpertKey, call: LayerCall) -> bool {
        self.note(key);
        self.ready.ask(&(key.clone(), call))
    }

    /// As [`ExpertEngine::make`].
    pub(crate) fn make(&self, group: &Group<M>, key: &ExpertKey, call: LayerCall) -> Result<(), ExecError> {
        self.ready.make(&(key.clone(), call), |turn| self.made(group, key, call, turn))
    }

    /// Notes which routing a layer was first asked for with. In the caller's thread.
    fn note(&self, ExpertKey { layer, routing }: &ExpertKey) {
        let mut choices = self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        if choices.iter().all(|known| known.layer != *layer) {
            choices.push(Choice { layer: layer.clone(), first: routing.clone(), passes: None });
        }
    }

    /// How the passes of a layer are run: found once, for predicting takes longer than a step should. Before anybody has asked for one, as
    /// they would be if this routing were the first.
    pub(crate) fn passes_of(
        &self,
        group: &Group<M>,
        ExpertKey { layer, routing }: &ExpertKey,
    ) -> Result<ExpertPasses, ExecError> {
        let mut choices = self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        let known = choices.iter_mut().find(|known| known.layer == *layer);
        if let Some(passes) = known.as_ref().and_then(|known| known.passes) {
            return Ok(passes);
        }
        let ExpertFields { spec, gradient, policy, .. } = *layer;
        let overlap = policy.map_or(ExpertOverlap::Predicted, ExpertOverlap::Policy);
        let first = known.as_ref().map_or(routing, |known| &known.first);
        let passes = overlap.passes(group.linear(), spec, first, gradient)?;
        if let Some(known) = known {
            known.passes = Some(passes);
        }
        Ok(passes)
    }

    /// Has a layer stay, which a graph of the caller replays.
    pub(crate) fn keep(&self, ExpertCall { key, call, .. }: &ExpertCall) {
        self.ready.keep(&(key.clone(), *call));
    }

    /// Lets go of layers that graphs replayed.
    pub(crate) fn let_go(&self) {
        self.ready.let_go();
    }
}

/// A rank's rows of tensors, by name.
type OfRank<M> = Vec<(String, <<M as Machine>::Backend as Backend>::Buffer)>;

/// The tensors of every rank here, each rank's rows of them.
fn split<M>(
    group: &Group<M>,
    key: &ExpertKey,
    tensors: &[(String, Borrowed)],
) -> Result<Vec<OfRank<M>>, ExecError>
where
    M: Machine,
    M::Backend: InPlace,
{
    if key.routing.ranks() != group.world_size() {
        let (ranks, group) = (key.routing.ranks(), group.world_size());
        return Err(ExecError::tensor("routing", TensorFault::RoutingOfOthers { ranks, group }));
    }
    let here = group.ranks().iter();
    let mut buffers: Vec<Vec<_>> = here.clone().map(|_| Vec::with_capacity(tensors.len())).collect();
    for (name, tensor) in tensors {
        let rows = key.rows(name);
        let wanted: usize = here.clone().map(|rank| rows[rank.rank()]).sum();
        if tensor.rows() != wanted {
            let fault = TensorFault::RoutedRows { rows: tensor.rows(), wanted };
            return Err(ExecError::tensor(name, fault));
        }
        let written = matches!(name.as_str(), "y" | "dx" | "dweight" | "main_grad");
        let access = if written { BufferAccess::Write } else { BufferAccess::Read };
        let mut first = 0;
        for (rank, buffers) in here.clone().zip(&mut buffers) {
            let next = first + rows[rank.rank()];
            buffers.push((name.clone(), rank.backend().borrow(name, tensor, first..next, access)?));
            first = next;
        }
    }
    Ok(buffers)
}
