//! A tensor-parallel linear layer, made ready on a group.

use std::sync::Arc;

use counterpoint_choose::TunedPass;
use counterpoint_mask::Range;
use counterpoint_plan::{DType, LinearPlan};
use counterpoint_schedule::{
    BufferSpec, OverlapPolicy, Program, Timeline, WeightGradient, lower_linear_backward,
    lower_linear_forward, lower_linear_weight_gradient,
};

use super::deferred::Deferred;
use super::overlap::{PlannedPass, PlannedPasses};
use super::shard::Shard;
use crate::{
    Backend, ExecError, Group, HostTensor, Machine, PlanIdentity, Prepared, RunTimes, TensorFault, Ticket,
    Transport,
};

pub(super) type Rank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;

/// A tensor of each rank that is in this process, in the order of ranks.
pub type RankBuffers<M> = Vec<<<M as Machine>::Backend as Backend>::Buffer>;

/// What a layer does with the gradient of its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerGradient {
    /// The weight is frozen: there is none.
    Frozen,
    /// Each backward writes it.
    Written,
    /// Each backward adds it to `main_grad`, of this type, in its product's epilogue.
    Accumulated(DType),
    /// Each backward writes it to `main_grad`, of this type, over what was there.
    Replaced(DType),
    /// It waits in a queue, of at most `limit` backwards, until [`LinearLayer::flush`] or until the queue is full and another
    /// comes; 0 is no limit, as of Megatron-LM. Then it is added to `main_grad`, of the type `into`, or written where there is none; for that `limit` must be 1.
    Deferred {
        /// Type of `main_grad`.
        into: Option<DType>,
        /// Backwards whose gradients wait; 0 where any number may.
        limit: usize,
    },
}

impl LayerGradient {
    pub(super) fn of_backward(self) -> WeightGradient {
        match self {
            Self::Frozen => WeightGradient::Frozen,
            Self::Written => WeightGradient::Written,
            Self::Accumulated(dtype) => WeightGradient::Accumulated(dtype),
            Self::Replaced(dtype) => WeightGradient::Replaced(dtype),
            Self::Deferred { .. } => WeightGradient::Deferred,
        }
    }

    /// What tuned plans are for whose backward makes it.
    pub fn tuned_pass(self) -> TunedPass {
        match self {
            Self::Frozen | Self::Deferred { .. } => TunedPass::InputGradient,
            Self::Written => TunedPass::WrittenGradient,
            // The one reads what the other does not.
            Self::Accumulated(dtype) | Self::Replaced(dtype) => TunedPass::AddedGradient(dtype),
        }
    }

    /// The type of what is added to.
    pub(super) fn main_grad(self) -> Option<DType> {
        match self {
            Self::Accumulated(dtype) | Self::Replaced(dtype) => Some(dtype),
            Self::Deferred { into, .. } => into,
            Self::Frozen | Self::Written => None,
        }
    }
}

/// Tensors of a layer, by how they lie on its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearTensor {
    /// `x` and `dx`, whole `[tokens, in_features]`.
    Input,
    /// `y` and `dy`, whole `[tokens, out_features]`.
    Output,
    /// The weight and its gradients, whole `[out_features, in_features]`.
    Weight,
    /// The bias and its gradients, whole `[out_features]`.
    Bias,
}

impl std::fmt::Display for LinearTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Input => "input",
            Self::Output => "output",
            Self::Weight => "weight",
            Self::Bias => "bias",
        })
    }
}

impl LinearTensor {
    /// Rows and columns of a rank's part of this tensor, which is `[rows, columns]` as a whole; of all of it where every rank has it.
    pub fn window(self, plan: &LinearPlan, rank: usize, [rows, columns]: [usize; 2]) -> [Range; 2] {
        self.shard(plan).window(plan, rank, [rows, columns])
    }

    pub(super) fn shard(self, plan: &LinearPlan) -> Shard {
        match self {
            Self::Input => Shard::of_input(plan),
            Self::Output => Shard::of_output(plan),
            Self::Weight => Shard::of_weight(plan),
            Self::Bias => Shard::of_bias(plan),
        }
    }
}

/// What of a layer is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCall {
    /// `y` of `x`, `weight` and `bias`.
    Forward,
    /// `dx` of `dy` and `weight`, and with `x` what becomes of the gradient of the weight: `dweight` and `dbias` are written,
    /// `main_grad` and `main_grad_bias` added to, or what the gradient needs later is kept.
    Backward,
    /// The deferred gradient of the weight, of `x`, `dy` and what a backward has kept.
    WeightGradient,
}

/// Tensors of each rank here, by name.
pub type NamedBuffers<'a, M> = Vec<Vec<(&'a str, <<M as Machine>::Backend as Backend>::Buffer)>>;

/// What one pass of a layer gave.
pub struct LayerPass<M: Machine> {
    /// The result of each rank, whose memory the next pass of the same kind writes over.
    pub result: RankBuffers<M>,
    /// Measured.
    pub timeline: Timeline,
}

/// A tensor-parallel linear layer on a group, prepared once to run many times; see
/// [`ColumnParallelLinear`](crate::ColumnParallelLinear) and [`RowParallelLinear`](crate::RowParallelLinear).
///
/// Each call runs all ranks that are in this process, and waits for them. Buffers are those of ranks: parts of whole tensors as
/// [`LinearLayer::scatter`] deals them out. A call that fails leaves the layer of no use, as its world is.
pub struct LinearLayer<M: Machine> {
    pub(super) plan: LinearPlan,
    pub(super) gradient: LayerGradient,
    pub(super) forward: Vec<Rank<M>>,
    pub(super) backward: Vec<Rank<M>>,
    pub(super) deferred: Option<Deferred<M>>,
}

impl<M: Machine> LinearLayer<M> {
    /// Lowers the passes of `plan` for the ranks here, both under `policy`, and makes them ready. Scratch buffers are views of the
    /// group's.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a queue of no or too many gradients; [`ExecError::OutOfMemory`]; when the machine has no way to
    /// follow the policy, or no kernels for the type.
    pub fn new(
        group: &Group<M>,
        plan: LinearPlan,
        gradient: LayerGradient,
        policy: OverlapPolicy,
    ) -> Result<Self, ExecError> {
        let pass = PlannedPass { plan, policy };
        Self::with_passes(group, PlannedPasses { forward: pass.clone(), backward: pass }, gradient)
    }

    /// The same with a plan and a policy of its own for each pass.
    ///
    /// # Errors
    /// As [`LinearLayer::new`].
    pub fn with_passes(
        group: &Group<M>,
        passes: PlannedPasses,
        gradient: LayerGradient,
    ) -> Result<Self, ExecError> {
        let PlannedPasses { forward, backward: PlannedPass { plan, policy } } = passes;
        let deferred = match gradient {
            LayerGradient::Deferred { into, limit } => {
                let lower = |rank| lower_linear_weight_gradient(&plan, rank, into, policy);
                Some(Deferred::new(|| prepare(group, &plan, policy, lower), into, limit)?)
            }
            _ => None,
        };
        let of_backward = gradient.of_backward();
        let backward =
            prepare(group, &plan, policy, |rank| lower_linear_backward(&plan, rank, of_backward, policy))?;
        Ok(Self { backward, deferred, gradient, ..Self::forward_only(group, forward.plan, forward.policy)? })
    }

    /// The same without a backward.
    ///
    /// # Errors
    /// As [`LinearLayer::new`].
    pub fn forward_only(
        group: &Group<M>,
        plan: LinearPlan,
        policy: OverlapPolicy,
    ) -> Result<Self, ExecError> {
        let forward = prepare(group, &plan, policy, |rank| lower_linear_forward(&plan, rank, policy))?;
        let gradient = LayerGradient::Frozen;
        Ok(Self { forward, backward: Vec::new(), deferred: None, gradient, plan })
    }

    /// How it is split.
    pub fn plan(&self) -> &LinearPlan {
        &self.plan
    }

    /// What becomes of the gradient of the weight.
    pub fn gradient(&self) -> LayerGradient {
        self.gradient
    }

    /// Uploads the parts of a whole tensor that the ranks here have.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when it has another shape; [`ExecError::OutOfMemory`].
    pub fn scatter(&self, tensor: LinearTensor, whole: &HostTensor) -> Result<RankBuffers<M>, ExecError> {
        let shard = tensor.shard(&self.plan);
        let wanted = self.shape(tensor);
        if let Some(fault) = TensorFault::of_shape(&wanted, whole.shape()) {
            return Err(ExecError::tensor(&tensor.to_string(), fault));
        }
        let upload = |rank: &Rank<M>| {
            let part = shard.cut(&self.plan, rank.backend().rank(), whole)?;
            rank.backend().upload(&tensor.to_string(), part)
        };
        self.forward.iter().map(upload).collect()
    }

    /// Downloads the ranks' parts of a tensor and puts the whole together.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] unless all ranks are in this process and have their part.
    pub fn gather(&self, tensor: LinearTensor, parts: &RankBuffers<M>) -> Result<HostTensor, ExecError> {
        let name = tensor.to_string();
        self.check_count(&name, parts)?;
        if parts.len() != self.plan.tp_size {
            let fault = TensorFault::PartsElsewhere { here: parts.len(), parts: self.plan.tp_size };
            return Err(ExecError::tensor(&name, fault));
        }
        Ok(tensor.shard(&self.plan).join(&self.download(parts)?))
    }

    /// Those ranks whose parts of tensors are in this process.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        self.forward.iter().map(|rank| rank.backend().rank())
    }

    /// The parts of a tensor that the ranks here have, in their order.
    ///
    /// # Errors
    /// As the backend's.
    pub fn download(&self, parts: &RankBuffers<M>) -> Result<Vec<HostTensor>, ExecError> {
        self.forward.iter().zip(parts).map(|(rank, part)| rank.backend().download(part)).collect()
    }

    fn shape(&self, tensor: LinearTensor) -> Vec<usize> {
        let spec = &self.plan.spec;
        match tensor {
            LinearTensor::Input => vec![spec.tokens, spec.in_features],
            LinearTensor::Output => vec![spec.tokens, spec.out_features],
            LinearTensor::Weight => vec![spec.out_features, spec.in_features],
            LinearTensor::Bias => vec![spec.out_features],
        }
    }

    /// Has the layer use this weight, and this bias where it has one, from the next pass on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a shape or type differs, or a bias is missing or too much.
    pub fn bind_weight(
        &mut self,
        weight: &RankBuffers<M>,
        bias: Option<&RankBuffers<M>>,
    ) -> Result<(), ExecError> {
        check_present("bias", bias.is_some(), self.plan.spec.has_bias)?;
        self.check_count("weight", weight)?;
        Prepared::bind_ranks(&mut self.forward, "weight", weight)?;
        Prepared::bind_ranks(&mut self.backward, "weight", weight)?;
        let Some(bias) = bias else { return Ok(()) };
        self.check_count("bias", bias)?;
        Prepared::bind_ranks(&mut self.forward, "bias", bias)
    }

    /// Has gradients be added to these tensors from the next backward on.
    ///
    /// # Errors
    /// As [`LinearLayer::bind_weight`]; [`ExecError::Tensor`] where gradients are not added to anything.
    pub fn bind_main_grad(
        &mut self,
        weight: &RankBuffers<M>,
        bias: Option<&RankBuffers<M>>,
    ) -> Result<(), ExecError> {
        check_present("main_grad", true, self.gradient.main_grad().is_some())?;
        check_present("main_grad's bias", bias.is_some(), self.plan.spec.has_bias)?;
        self.check_count("main_grad", weight)?;
        let ranks = match &mut self.deferred {
            Some(deferred) => deferred.ranks(),
            None => &mut self.backward,
        };
        Prepared::bind_ranks(ranks, "main_grad", weight)?;
        bias.map_or(Ok(()), |bias| Prepared::bind_ranks(ranks, "main_grad_bias", bias))
    }

    /// `y` of `x`.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a shape or type differs or there is no weight yet; whatever ends a run early.
    pub fn forward(&mut self, x: &RankBuffers<M>) -> Result<LayerPass<M>, ExecError> {
        self.check_count("x", x)?;
        Prepared::bind_ranks(&mut self.forward, "x", x)?;
        let timeline = Prepared::run_ranks(&mut self.forward)?;
        Ok(LayerPass { result: Prepared::buffers_of(&self.forward, "y")?, timeline })
    }

    /// `dx` of `dy`, and what becomes of the gradient of the weight: `x` is that of the forward, which a frozen weight has no use
    /// for. Where the gradient is deferred, `x` and `dy` must stay as they are until it has been computed.
    ///
    /// # Errors
    /// As [`LinearLayer::forward`]. A full queue first computes its oldest gradient.
    pub fn backward(&mut self, x: &RankBuffers<M>, dy: &RankBuffers<M>) -> Result<LayerPass<M>, ExecError> {
        self.check_count("x", x)?;
        self.check_count("dy", dy)?;
        if self.backward.is_empty() {
            return Err(ExecError::tensor("dy", TensorFault::ForwardLayer));
        }
        for (name, buffers) in [("x", x), ("dy", dy)] {
            if self.backward.iter().all(|rank| rank.takes(name)) {
                Prepared::bind_ranks(&mut self.backward, name, buffers)?;
            }
        }
        if let Some(deferred) = &mut self.deferred {
            deferred.begin(&mut self.backward)?;
        }
        let timeline = Prepared::run_ranks(&mut self.backward)?;
        if let Some(deferred) = &mut self.deferred {
            deferred.push(vec![("x".to_owned(), x.clone()), ("dy".to_owned(), dy.clone())]);
        }
        Ok(LayerPass { result: Prepared::buffers_of(&self.backward, "dx")?, timeline })
    }

    /// The tensors that a call takes on one of the ranks here: names, types and shapes of what it reads, adds to and writes.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a call that the layer was not made for.
    pub fn tensors(&self, call: LayerCall, rank: usize) -> Result<Vec<BufferSpec>, ExecError> {
        Ok(tensors_of(self.ranks_of(call)?, rank))
    }

    /// Enqueues a call on the caller's tensors, those that are written included, and returns at once: results lie in no memory of the
    /// layer, so that any number of calls may be in flight. Tensors that are not named are those that were bound. `streams` as in
    /// [`Prepared::call_ranks`].
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a call that the layer was not made for, or a tensor that does not fit: nothing has been enqueued then;
    /// the group's first error.
    pub fn enqueue(
        &self,
        call: LayerCall,
        tensors: &NamedBuffers<'_, M>,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let ranks: Vec<&Rank<M>> = self.ranks_of(call)?.iter().collect();
        Prepared::call_ranks(&ranks, tensors, streams)
    }

    fn ranks_of(&self, call: LayerCall) -> Result<&[Rank<M>], ExecError> {
        let (ranks, name, pass) = match call {
            LayerCall::Forward => (&self.forward[..], "x", "a forward"),
            LayerCall::Backward => (&self.backward[..], "dy", "a backward"),
            LayerCall::WeightGradient => {
                let ranks = self.deferred.as_ref().map_or(&[][..], Deferred::written);
                (ranks, "dweight", "deferred gradients of the weight")
            }
        };
        if ranks.is_empty() {
            let (layers, pass) = ("this layer was".to_owned(), pass.to_owned());
            return Err(ExecError::tensor(name, TensorFault::NotMadeFor { layers, pass }));
        }
        Ok(ranks)
    }

    /// Which times passes take from the next one on, in their timelines.
    pub fn set_timing(&mut self, times: RunTimes) {
        self.forward.iter_mut().chain(&mut self.backward).for_each(|rank| rank.set_timing(times));
    }

    /// Gradients of the weight that wait.
    pub fn waiting(&self) -> usize {
        self.deferred.as_ref().map_or(0, Deferred::waiting)
    }

    /// Computes all gradients of the weight that wait, the oldest first; their timelines.
    ///
    /// # Errors
    /// Whatever ends a run early, a missing `main_grad` included.
    pub fn flush(&mut self) -> Result<Vec<Timeline>, ExecError> {
        self.deferred.as_mut().map_or_else(|| Ok(Vec::new()), Deferred::flush)
    }

    /// Enqueues the gradients of the weight that wait, the oldest first, and returns at once: under whatever the caller runs next, such as
    /// what pipeline stages send each other or another layer's collective. `streams` as in [`Prepared::call_ranks`]. Gives the tickets
    /// of the last, which end after all others; none where nothing waits.
    ///
    /// # Errors
    /// A missing `main_grad`; the group's first error.
    pub fn enqueue_flush(
        &mut self,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        self.deferred.as_mut().map_or_else(|| Ok(Vec::new()), |deferred| deferred.enqueue(streams))
    }

    /// The last gradient of the weight and of the bias that was written; `None` where it is added to `main_grad`, or there is
    /// none.
    pub fn weight_gradient(&self) -> Option<(RankBuffers<M>, Option<RankBuffers<M>>)> {
        let ranks = self.deferred.as_ref().map_or(&self.backward[..], Deferred::written);
        Some((Prepared::buffers_of(ranks, "dweight").ok()?, Prepared::buffers_of(ranks, "dbias").ok()))
    }

    pub(super) fn check_count(&self, name: &str, buffers: &RankBuffers<M>) -> Result<(), ExecError> {
        if buffers.len() == self.forward.len() {
            return Ok(());
        }
        let given = format!("{} buffers", buffers.len());
        let needed = format!("the {} ranks here", self.forward.len());
        Err(ExecError::tensor(name, TensorFault::Count { given, needed }))
    }
}

/// The tensors that a call takes on one of the ranks here.
pub(super) fn tensors_of<B: Backend, T: Transport<B>>(
    ranks: &[Prepared<B, T>],
    rank: usize,
) -> Vec<BufferSpec> {
    ranks.get(rank).map(|rank| rank.tensors().cloned().collect()).unwrap_or_default()
}

/// A layer's Programs on the ranks here.
pub(super) fn prepare<M: Machine>(
    group: &Group<M>,
    plan: &LinearPlan,
    policy: OverlapPolicy,
    lower: impl Fn(usize) -> Program,
) -> Result<Vec<Rank<M>>, ExecError> {
    prepare_with(group, plan, policy, None, lower)
}

/// The same of a layer that is something besides its plan, which all ranks must have alike.
pub(super) fn prepare_with<M: Machine>(
    group: &Group<M>,
    plan: &LinearPlan,
    policy: OverlapPolicy,
    more: Option<(&'static str, String)>,
    lower: impl Fn(usize) -> Program,
) -> Result<Vec<Rank<M>>, ExecError> {
    if plan.tp_size != group.world_size() {
        let fault = TensorFault::SplitOver { ranks: plan.tp_size, group: group.world_size() };
        return Err(ExecError::tensor("layer", fault));
    }
    group.prepare(lower, Some(&identity(plan, policy, more)))
}

/// What all ranks must have alike of a layer.
fn identity(plan: &LinearPlan, policy: OverlapPolicy, more: Option<(&'static str, String)>) -> PlanIdentity {
    let spec = &plan.spec;
    let common = [
        ("ranks", plan.tp_size.to_string()),
        ("layer", format!("{}, {}", spec.kind, spec.activations)),
        ("tokens", spec.tokens.to_string()),
        ("in_features", spec.in_features.to_string()),
        ("out_features", spec.out_features.to_string()),
        ("bias", spec.has_bias.to_string()),
        ("dtype", spec.dtype.to_string()),
        ("policy", policy.to_string()),
        ("groups", plan.groups().to_string()),
    ];
    PlanIdentity::new(common.into_iter().chain(more))
}

pub(super) fn check_present(name: &str, given: bool, wanted: bool) -> Result<(), ExecError> {
    let fault = match (given, wanted) {
        (true, false) => TensorFault::Unused { unused: "this layer has no use for it".to_owned() },
        (false, true) => TensorFault::MissingFor { wanted: "this layer needs it".to_owned() },
        _ => return Ok(()),
    };
    Err(ExecError::tensor(name, fault))
}
