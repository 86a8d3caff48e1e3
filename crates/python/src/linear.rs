//! Tensor-parallel linear layers of a rank that is this process, on tensors of Python, in place.

use std::sync::{Arc, Mutex, PoisonError};

use counterpoint_choose::LayerGroups;
use counterpoint_exec::{
    Backend, BufferAccess, ExecError, Group, LayerCall, LayerGradient, LayerOverlap, LinearLayer,
    LinearOptions, Machine, NamedBuffers, PassesUpTo, PlannedPass, PlannedPasses, SharedInputLinear,
    TensorFault, Ticket,
};
use counterpoint_plan::{Activations, LinearKind, LinearSpec};
use counterpoint_schedule::{BufferRole, BufferSpec, InputGradient, OverlapPolicy};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::borrow::{Borrowed, InPlace, dtype_of, name_of};
use crate::error::raise;
use crate::kept::Kept;

/// A layer as modules share it: all that its Programs depend on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayerKey {
    /// Of layers that share one input, with the output features of all of them.
    spec: LinearSpec,
    /// Output features of each of column-parallel layers that share one input; none of a layer by itself.
    shared: Vec<usize>,
    gradient: LayerGradient,
    /// Without one, each pass as it was tuned or is predicted to end first.
    policy: Option<OverlapPolicy>,
    /// The most tokens of a layer whose number of tokens changes from call to call.
    most_tokens: Option<usize>,
}

impl<'py> FromPyObject<'_, 'py> for LayerKey {
    type Error = PyErr;

    /// (kind, sequence parallel, (tokens, in, out), bias, dtype, gradient, overlap, most tokens): a kind is "column", "row", or "shared input", with the
    /// output features of each layer. A gradient is "frozen", "written", "added", "replaced" or "deferred", the last three with
    /// the type of `main_grad` behind a colon.
    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        type Fields = (String, bool, Vec<usize>, bool, String, String, String, Option<usize>);
        let (kind, is_sequence_parallel, sizes, has_bias, dtype, gradient, overlap, most_tokens): Fields =
            object.extract()?;
        let [tokens, in_features, outputs @ ..] = sizes.as_slice() else {
            return Err(PyValueError::new_err(format!("no layer has the sizes {sizes:?}")));
        };
        let spec = LinearSpec {
            kind: if kind == "row" { LinearKind::Row } else { LinearKind::Column },
            activations: match is_sequence_parallel {
                true => Activations::SequenceParallel,
                false => Activations::Replicated,
            },
            tokens: *tokens,
            in_features: *in_features,
            out_features: outputs.iter().fold(0, |sum: usize, features| sum.saturating_add(*features)),
            has_bias,
            dtype: dtype_of(&dtype)?,
        };
        let shared = if kind == "shared input" { outputs.to_vec() } else { Vec::new() };
        let gradient = match gradient.split_once(':') {
            Some(("added", into)) => LayerGradient::Accumulated(dtype_of(into)?),
            Some(("replaced", into)) => LayerGradient::Replaced(dtype_of(into)?),
            // Modules keep what waits, so the engine's own queue is of no use.
            Some((_, into)) => LayerGradient::Deferred { into: Some(dtype_of(into)?), limit: 0 },
            None if gradient == "deferred" => LayerGradient::Deferred { into: None, limit: 1 },
            None if gradient == "written" => LayerGradient::Written,
            None => LayerGradient::Frozen,
        };
        let policy = policy_of(object.py(), &overlap)?;
        Ok(Self { spec, shared, gradient, policy, most_tokens })
    }
}

/// The overlap policy that a layer names; `None` for the best.
pub(crate) fn policy_of(py: Python<'_>, overlap: &str) -> PyResult<Option<OverlapPolicy>> {
    match overlap {
        "auto" => Ok(None),
        text => text.parse().map(Some).map_err(|error| raise(py, "PolicyError", &format!("{error}"), &[])),
    }
}

/// A tensor that a call takes: name, type, shape, and whether it is read, added to or written.
pub(crate) type WantedTensor = (String, String, Vec<usize>, &'static str);

/// A call of a layer.
pub(crate) struct LinearCall {
    pub(crate) key: LayerKey,
    pub(crate) call: LayerCall,
    /// PyTorch's current stream, where there are streams.
    pub(crate) stream: u64,
    pub(crate) tensors: Vec<(String, Borrowed)>,
}

/// Linear layers of a group of ranks.
pub(crate) trait LinearEngine: Send + Sync {
    /// On the CPU it returns once the results are written; on a device once they are on their way on the stream.
    fn call(&self, call: &LinearCall) -> Result<(), ExecError>;
    /// What a call takes.
    fn tensors(&self, key: &LayerKey, call: LayerCall) -> Result<Vec<WantedTensor>, ExecError>;
    /// How forward and backward are run.
    fn passes(&self, key: &LayerKey) -> Result<[RunPass; 2], ExecError>;
}

/// How a pass is run: the policy, and rows of every group in the tokens of the first rank.
pub(crate) type RunPass = (String, Vec<usize>);

/// A layer that is ready.
pub(crate) enum ReadyLayer<M: Machine> {
    One(LinearLayer<M>, PlannedPasses),
    SharedInput(SharedInputLinear<M>),
}

impl<M: Machine> ReadyLayer<M> {
    fn new(
        group: &Group<M>,
        LayerKey { spec, shared, gradient, .. }: &LayerKey,
        overlap: LayerOverlap,
    ) -> Result<Self, ExecError> {
        let LinearSpec { activations, has_bias, dtype, tokens, in_features, .. } = *spec;
        if !shared.is_empty() {
            let options = LinearOptions { activations, has_bias, dtype, gradient: *gradient, overlap };
            let gradient = InputGradient::Summed;
            let layers = SharedInputLinear::new(group, tokens, in_features, shared, &options, gradient);
            return layers.map(Self::SharedInput);
        }
        let passes = overlap
            .passes(group.linear(), *spec, *gradient)
            .map_err(|error| ExecError::tensor("layer", error))?;
        let layer = LinearLayer::with_passes(group, passes.clone(), *gradient)?;
        Ok(Self::One(layer, passes))
    }

    /// How forward and backward are run.
    pub(crate) fn passes(&self) -> [RunPass; 2] {
        let passes = match self {
            Self::One(_, passes) => passes,
            Self::SharedInput(layers) => layers.passes(),
        };
        [&passes.forward, &passes.backward]
            .map(|PlannedPass { plan, policy }| (policy.to_string(), plan.group_sizes().to_vec()))
    }

    /// Of the only rank here.
    fn tensors(&self, call: LayerCall) -> Result<Vec<BufferSpec>, ExecError> {
        match self {
            Self::One(layer, _) => layer.tensors(call, 0),
            Self::SharedInput(layers) => layers.tensors(call, 0),
        }
    }

    fn enqueue(
        &self,
        call: LayerCall,
        tensors: &NamedBuffers<'_, M>,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        match self {
            Self::One(layer, _) => layer.enqueue(call, tensors, streams),
            Self::SharedInput(layers) => layers.enqueue(call, tensors, streams),
        }
    }
}

/// The layers that are ready on a group.
pub(crate) struct Layers<M: Machine> {
    ready: Kept<LayerKey, ReadyLayer<M>>,
    capacities: Mutex<Capacities>,
}

/// What layers share whose numbers of tokens change from call to call.
#[derive(Default)]
struct Capacities {
    /// What was chosen, by policy and most tokens.
    passes: Vec<(Option<OverlapPolicy>, Arc<PassesUpTo>)>,
    /// Layers of the most tokens, for which there is memory.
    with_memory: Vec<LayerKey>,
}

impl<M: Machine> Default for Layers<M> {
    fn default() -> Self {
        Self { ready: Kept::default(), capacities: Mutex::default() }
    }
}

impl<M: Machine> Layers<M> {
    /// Has `work` use the layer of a key, which is made ready where it is not.
    pub(crate) fn with<T>(
        &self,
        group: &Group<M>,
        key: &LayerKey,
        work: impl FnOnce(&mut ReadyLayer<M>) -> Result<T, ExecError>,
    ) -> Result<T, ExecError> {
        self.ready.with(key, |_| self.make(group, key), work)
    }

    fn make(&self, group: &Group<M>, key: &LayerKey) -> Result<ReadyLayer<M>, ExecError> {
        let overlap = match key.policy {
            None => LayerOverlap::default(),
            Some(policy) => LayerOverlap::Policy(policy, LayerGroups::Auto, group.linear().cost),
        };
        let Some(most) = key.most_tokens else { return ReadyLayer::new(group, key, overlap) };
        let mut capacities = self.capacities.lock().unwrap_or_else(PoisonError::into_inner);
        let Capacities { passes, with_memory } = &mut *capacities;
        let known = passes.iter().find(|(policy, known)| *policy == key.policy && known.tokens() == most);
        let up_to = known.map(|(_, known)| known.clone()).unwrap_or_else(|| {
            let made = Arc::new(PassesUpTo::new(most, overlap));
            passes.push((key.policy, made.clone()));
            made
        });
        let overlap = LayerOverlap::UpTo(up_to);
        let whole = LayerKey { spec: LinearSpec { tokens: most, ..key.spec }, ..key.clone() };
        if !with_memory.contains(&whole) {
            // Its scratch memory stays the group's, so that later numbers of tokens need none.
            drop(ReadyLayer::new(group, &whole, overlap.clone())?);
            with_memory.push(whole);
        }
        ReadyLayer::new(group, key, overlap)
    }

    /// Has a layer stay, which a graph of the caller replays.
    pub(crate) fn keep(&self, key: &LayerKey) {
        self.ready.keep(key);
    }

    /// Lets go of layers that graphs replayed.
    pub(crate) fn let_go(&self) {
        self.ready.let_go();
    }
}

/// Enqueues a call of the only rank here.
pub(crate) fn enqueue<M>(
    group: &Group<M>,
    layer: &ReadyLayer<M>,
    LinearCall { call, tensors, .. }: &LinearCall,
    streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
) -> Result<Vec<Ticket<M::Backend>>, ExecError>
where
    M: Machine,
    M::Backend: InPlace,
{
    let [rank] = group.ranks() else {
        let fault = TensorFault::OfOneRank { ranks: group.ranks().len() };
        return Err(ExecError::tensor("layer", fault));
    };
    let wanted = layer.tensors(*call)?;
    let of_spec = |spec: &BufferSpec| {
        let given = tensors.iter().find(|(name, _)| *name == spec.name);
        let (_, tensor) = given.ok_or_else(|| ExecError::tensor(&spec.name, TensorFault::Missing))?;
        let access = if spec.role == BufferRole::Input { BufferAccess::Read } else { BufferAccess::Write };
        Ok((spec.name.clone(), rank.backend().borrow(&spec.name, tensor, 0..tensor.rows(), access)?))
    };
    let buffers = wanted.iter().map(of_spec).collect::<Result<Vec<_>, ExecError>>()?;
    let named = vec![buffers.iter().map(|(name, buffer)| (name.as_str(), buffer.clone())).collect()];
    layer.enqueue(*call, &named, streams)
}

/// What a call takes, for Python.
pub(crate) fn tensors<M: Machine>(
    layer: &ReadyLayer<M>,
    call: LayerCall,
) -> Result<Vec<WantedTensor>, ExecError> {
    let described = |spec: BufferSpec| {
        let role = match spec.role {
            BufferRole::Input => "read",
            BufferRole::Updated => "added to",
            _ => "written",
        };
        (spec.name, name_of(spec.dtype).to_owned(), spec.shape, role)
    };
    Ok(layer.tensors(call)?.into_iter().map(described).collect())
}

/// The call that Python names.
pub(crate) fn named_call(name: &str) -> LayerCall {
    match name {
        "forward" => LayerCall::Forward,
        "backward" => LayerCall::Backward,
        _ => LayerCall::WeightGradient,
    }
}
