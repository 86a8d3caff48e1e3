//! A layer of a mixture of experts on a group: made once, given a routing at every step.

use std::sync::Arc;

use counterpoint_choose::LinearMachine;
use counterpoint_plan::{ExpertCapacity, ExpertPlan, ExpertSpec, Routing};
use counterpoint_schedule::{
    BufferSpec, OverlapPolicy, Program, Timeline, WeightGradient, lower_expert_backward, lower_expert_forward,
};

use super::overlap::{ExpertOverlap, ExpertPass, ExpertPasses};
use crate::linear::join_rows;
use crate::{
    Backend, ExecError, Group, HostTensor, LayerCall, LayerPass, Machine, NamedBuffers, PlanIdentity,
    Prepared, RankBuffers, RankOf, RunTimes, TensorFault, Ticket,
};

type Rank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;

/// Rows of zeros that kernels copy behind those of an expert at most.
const PADDING: usize = 64;

/// What a layer of experts is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOptions {
    /// Kind, sizes and type.
    pub spec: ExpertSpec,
    /// Experts of all ranks.
    pub experts: usize,
    /// What becomes of the gradients of the weights; they are not deferred.
    pub gradient: WeightGradient,
    /// The most that a routing may ask for. With [`rows_of_rank`](ExpertCapacity::rows_of_rank) the group has scratch memory for as much from the
    /// first routing on, and others allocate none; but for the sums of tokens with several experts on a rank, from the first that has such.
    pub capacity: ExpertCapacity,
    /// How passes are run.
    pub overlap: ExpertOverlap,
}

/// One product of every expert of a mixture, with the way of its tokens there or back ([`ExpertSpec`]), on a group. Experts lie on ranks
/// in equal ranges. Which tokens go to which experts is said by [`ExpertLayer::route`], at every step anew; all ranks must say the
/// same, and the first collective compares it.
///
/// ```
/// use std::sync::Arc;
///
/// use counterpoint_exec::{ExpertLayer, ExpertOptions, ExpertOverlap, Group, HostTensor, WorldConfig};
/// use counterpoint_plan::{DType, ExpertCapacity, ExpertKind, ExpertSpec, Routing};
/// use counterpoint_schedule::WeightGradient;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = Group::local(2, WorldConfig::default())?;
/// let spec = ExpertSpec { kind: ExpertKind::Dispatch, in_features: 1, out_features: 1, dtype: DType::F32 };
/// let mut layer = ExpertLayer::new(
///     &group,
///     ExpertOptions {
///         spec,
///         experts: 2,
///         gradient: WeightGradient::Frozen,
///         capacity: ExpertCapacity { rows_of_expert: Some(3), ..ExpertCapacity::default() },
///         overlap: ExpertOverlap::default(),
///     },
/// )?;
/// // Expert 0, on rank 0, multiplies by 10, expert 1 by 100.
/// layer.bind_weight(&layer.scatter_weight(&HostTensor::from_vec(vec![2, 1], vec![10f32, 100.0]))?)?;
/// // Of rank 0's tokens the first goes to both, the second to expert 1; rank 1 has one, for expert 0.
/// let none = Routing::NO_EXPERT;
/// layer.route(Arc::new(Routing::top_k(2, 2, &[vec![0, 1, 1, none], vec![0, none]])?))?;
/// let x = layer.upload("x", vec![
///     HostTensor::from_vec(vec![2, 1], vec![1f32, 2.0]),
///     HostTensor::from_vec(vec![1, 1], vec![3f32]),
/// ])?;
/// let y = layer.forward(&x)?.result;
/// let rows: Vec<Vec<f64>> = layer.download(&y)?.iter().map(HostTensor::to_f64).collect();
/// assert_eq!(rows, [vec![10.0, 30.0], vec![100.0, 200.0]]);
/// # Ok(())
/// # }
/// ```
pub struct ExpertLayer<M: Machine> {
    options: ExpertOptions,
    ranks: Vec<RankOf<M>>,
    machine: LinearMachine,
    /// Known from the first routing on.
    passes: Option<ExpertPasses>,
    weight: Option<RankBuffers<M>>,
    main_grad: Option<RankBuffers<M>>,
    routed: Option<Routed<M>>,
}

/// What was made ready for a routing; of a pass that has not been asked for, nothing.
struct Routed<M: Machine> {
    routing: Arc<Routing>,
    passes: ExpertPasses,
    forward: Vec<Rank<M>>,
    backward: Vec<Rank<M>>,
}

impl<M: Machine> ExpertLayer<M> {
    /// A layer over all ranks of a group.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when the experts do not divide over the ranks, a size is 0 or gradients are to be deferred.
    pub fn new(group: &Group<M>, options: ExpertOptions) -> Result<Self, ExecError> {
        let ExpertOptions { spec, experts, gradient, .. } = options;
        let ranks = group.world_size();
        if experts == 0 || !experts.is_multiple_of(ranks) {
            return Err(refused(TensorFault::Experts { experts, ranks }));
        }
        if spec.in_features == 0 || spec.out_features == 0 {
            return Err(refused(TensorFault::NoFeatures));
        }
        if gradient == WeightGradient::Deferred {
            return Err(refused(TensorFault::DeferredExperts));
        }
        if matches!(gradient, WeightGradient::Replaced(_)) {
            return Err(refused(TensorFault::ReplacedExperts));
        }
        let (ranks, machine) = (group.ranks().to_vec(), group.linear().clone());
        Ok(Self { options, ranks, machine, passes: None, weight: None, main_grad: None, routed: None })
    }

    /// What it is.
    pub fn options(&self) -> &ExpertOptions {
        &self.options
    }

    /// The routing that it was given last.
    pub fn routing(&self) -> Option<&Arc<Routing>> {
        self.routed.as_ref().map(|routed| &routed.routing)
    }

    /// How its passes are run; `None` before its first routing, by which that is chosen.
    pub fn passes(&self) -> Option<ExpertPasses> {
        self.passes
    }

    /// Uploads the weights of the experts on the ranks here, of those of all, `[experts x out_features, in_features]`.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for another shape; [`ExecError::OutOfMemory`].
    pub fn scatter_weight(&self, whole: &HostTensor) -> Result<RankBuffers<M>, ExecError> {
        let ExpertOptions { spec, experts, .. } = self.options;
        let wanted = [experts * spec.out_features, spec.in_features];
        if let Some(fault) = TensorFault::of_shape(&wanted, whole.shape()) {
            return Err(ExecError::tensor("weight", fault));
        }
        let upload = |rank: &RankOf<M>| {
            let each = experts / rank.world_size() * spec.out_features;
            let rows = counterpoint_mask::Range::new(rank.rank() * each, (rank.rank() + 1) * each);
            rank.backend().upload("weight", crate::dispatch(whole, &[rows])?)
        };
        self.ranks.iter().map(upload).collect()
    }

    /// Downloads the weights of all experts, or their gradients.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] unless all ranks are in this process and have their part.
    pub fn gather_weight(&self, parts: &RankBuffers<M>) -> Result<HostTensor, ExecError> {
        self.check_count("weight", parts.len())?;
        let ranks = self.ranks.first().map_or(0, |rank| rank.world_size());
        if parts.len() != ranks || ranks == 0 {
            let fault = TensorFault::PartsElsewhere { here: parts.len(), parts: ranks };
            return Err(ExecError::tensor("weight", fault));
        }
        Ok(join_rows(&self.download(parts)?))
    }

    /// Uploads a tensor of each rank here.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for another number of tensors; [`ExecError::OutOfMemory`].
    pub fn upload(&self, name: &str, tensors: Vec<HostTensor>) -> Result<RankBuffers<M>, ExecError> {
        self.check_count(name, tensors.len())?;
        self.ranks.iter().zip(tensors).map(|(rank, tensor)| rank.backend().upload(name, tensor)).collect()
    }

    /// The parts of a tensor that the ranks here have.
    ///
    /// # Errors
    /// As the backend's.
    pub fn download(&self, parts: &RankBuffers<M>) -> Result<Vec<HostTensor>, ExecError> {
        self.ranks.iter().zip(parts).map(|(rank, part)| rank.backend().download(part)).collect()
    }

    /// Has the layer use these weights from the next pass on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a shape or type differs.
    pub fn bind_weight(&mut self, weight: &RankBuffers<M>) -> Result<(), ExecError> {
        self.check_count("weight", weight.len())?;
        if let Some(routed) = &mut self.routed {
            Prepared::bind_ranks(&mut routed.forward, "weight", weight)?;
            Prepared::bind_ranks(&mut routed.backward, "weight", weight)?;
        }
        self.weight = Some(weight.clone());
        Ok(())
    }

    /// Has gradients be added to these tensors, as the weights, from the next backward on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] where gradients are not added to anything, or a shape or type differs.
    pub fn bind_main_grad(&mut self, main_grad: &RankBuffers<M>) -> Result<(), ExecError> {
        let WeightGradient::Accumulated(_) = self.options.gradient else {
            let unused = "this layer has no use for it".to_owned();
            return Err(ExecError::tensor("main_grad", TensorFault::Unused { unused }));
        };
        self.check_count("main_grad", main_grad.len())?;
        if let Some(routed) = &mut self.routed {
            Prepared::bind_ranks(&mut routed.backward, "main_grad", main_grad)?;
        }
        self.main_grad = Some(main_grad.clone());
        Ok(())
    }

    /// Has the next passes send tokens so. Nothing is enqueued: the forward is lowered and made ready, for the ranks here alone, the backward with
    /// its first call.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a routing of other experts or ranks, or one that exceeds a capacity: the layer keeps the routing that it
    /// had. [`ExecError::OutOfMemory`].
    pub fn route(&mut self, routing: Arc<Routing>) -> Result<(), ExecError> {
        self.route_for(routing, LayerCall::Forward, None)
    }

    /// The same of which the pass of one call alone is made ready, for who has a layer for each; others are with their first call. Ranks that
    /// make passes ready at times of their own, in threads say, number them alike: by a turn, which no other pass on the group has.
    ///
    /// # Errors
    /// As [`ExpertLayer::route`].
    pub fn route_for(
        &mut self,
        routing: Arc<Routing>,
        call: LayerCall,
        turn: Option<u64>,
    ) -> Result<(), ExecError> {
        let (experts, ranks) = (self.options.experts, self.ranks.first().map_or(0, |rank| rank.world_size()));
        if (routing.experts(), routing.ranks()) != (experts, ranks) {
            let of = (routing.experts(), routing.ranks());
            let fault = TensorFault::OtherRouting {
                experts: of.0,
                ranks: of.1,
                own_experts: experts,
                own_ranks: ranks,
            };
            return Err(ExecError::tensor("routing", fault));
        }
        routing.check(&self.options.capacity).map_err(|error| ExecError::tensor("routing", error))?;
        let passes = match self.passes {
            Some(passes) => passes,
            None => {
                let ExpertOptions { spec, gradient, overlap, .. } = self.options;
                overlap.passes(&self.machine, spec, &routing, gradient)?
            }
        };
        let mut routed = Routed { routing, passes, forward: Vec::new(), backward: Vec::new() };
        match call {
            LayerCall::Forward => routed.forward = self.prepared_forward(&routed, turn)?,
            LayerCall::Backward => routed.backward = self.prepared_backward(&routed, turn)?,
            LayerCall::WeightGradient => {}
        }
        (self.passes, self.routed) = (Some(passes), Some(routed));
        Ok(())
    }

    fn prepare(
        &self,
        (plan, turn): (&ExpertPlan, Option<u64>),
        policy: OverlapPolicy,
        lower: impl Fn(usize) -> Program,
    ) -> Result<Vec<Rank<M>>, ExecError> {
        let ExpertSpec { kind, in_features, out_features, dtype } = plan.spec;
        // One rank has nobody to compare it with.
        let identity = (plan.ranks() > 1).then(|| {
            PlanIdentity::new([
                ("layer", format!("experts, {kind}")),
                ("experts", self.options.experts.to_string()),
                ("in_features", in_features.to_string()),
                ("out_features", out_features.to_string()),
                ("dtype", dtype.to_string()),
                ("policy", policy.to_string()),
                ("groups", plan.cut().to_string()),
                ("routing", plan.routing().fingerprint().to_string()),
            ])
        });
        let prepare = |rank: &RankOf<M>| {
            let program = lower(rank.rank());
            let own = program.buffers.len();
            let room = |index, _: &BufferSpec| self.room(plan, index < own);
            Prepared::with_room(rank, program, (identity.as_ref(), turn), room)
        };
        let mut prepared: Vec<Rank<M>> = self.ranks.iter().map(prepare).collect::<Result<_, ExecError>>()?;
        if let Some(weight) = &self.weight {
            Prepared::bind_ranks(&mut prepared, "weight", weight)?;
        }
        Ok(prepared)
    }

    /// Rows of scratch memory that a pass under a routing within the capacity needs at most: of tokens on their way, or of what kernels copy.
    fn room(&self, plan: &ExpertPlan, is_on_its_way: bool) -> Option<usize> {
        let ExpertCapacity { tokens, rows_of_rank, .. } = self.options.capacity;
        let rows = rows_of_rank?;
        let ranks = plan.ranks();
        if is_on_its_way {
            // Each is a row of some expert, and each rank has its group's.
            let of_group = |tokens| plan.cut().most_tokens(tokens).saturating_mul(ranks);
            return Some(tokens.map_or(rows, |tokens| rows.min(of_group(tokens))));
        }
        Some(rows.saturating_add(PADDING * (self.options.experts / ranks)))
    }

    fn prepared_forward(&self, routed: &Routed<M>, turn: Option<u64>) -> Result<Vec<Rank<M>>, ExecError> {
        let ExpertPass { policy, groups } = routed.passes.forward;
        let plan = ExpertPlan::new(self.options.spec, routed.routing.clone(), groups);
        self.prepare((&plan, turn), policy, |rank| lower_expert_forward(&plan, rank, policy))
    }

    fn prepared_backward(&self, routed: &Routed<M>, turn: Option<u64>) -> Result<Vec<Rank<M>>, ExecError> {
        let ExpertPass { policy, groups } = routed.passes.backward;
        let (plan, gradient) =
            (ExpertPlan::new(self.options.spec, routed.routing.clone(), groups), self.options.gradient);
        let mut backward =
            self.prepare((&plan, turn), policy, |rank| lower_expert_backward(&plan, rank, gradient, policy))?;
        if let Some(main_grad) = &self.main_grad {
            Prepared::bind_ranks(&mut backward, "main_grad", main_grad)?;
        }
        Ok(backward)
    }

    /// Makes a pass ready under the routing where it is not.
    fn make_ready(&mut self, call: LayerCall) -> Result<&mut Routed<M>, ExecError> {
        let routed = self.routed.as_ref().ok_or_else(unrouted)?;
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        match call {
            LayerCall::Forward if routed.forward.is_empty() => {
                forward = self.prepared_forward(routed, None)?
            }
            LayerCall::Backward if routed.backward.is_empty() => {
                backward = self.prepared_backward(routed, None)?
            }
            _ => {}
        }
        let routed = self.routed.as_mut().ok_or_else(unrouted)?;
        routed.forward.append(&mut forward);
        routed.backward.append(&mut backward);
        Ok(routed)
    }

    /// `y` of `x`.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a shape or type differs or there are no weights or no routing yet: nothing has been enqueued then;
    /// whatever ends a run early.
    pub fn forward(&mut self, x: &RankBuffers<M>) -> Result<LayerPass<M>, ExecError> {
        self.check_count("x", x.len())?;
        let routed = self.make_ready(LayerCall::Forward)?;
        Prepared::bind_ranks(&mut routed.forward, "x", x)?;
        let timeline = Prepared::run_ranks(&mut routed.forward)?;
        Ok(LayerPass { result: Prepared::buffers_of(&routed.forward, "y")?, timeline })
    }

    /// `dx` of `dy`, and what becomes of the gradients of the weights: `x` is that of the forward, which frozen ones have no use for.
    ///
    /// # Errors
    /// As [`ExpertLayer::forward`].
    pub fn backward(&mut self, x: &RankBuffers<M>, dy: &RankBuffers<M>) -> Result<LayerPass<M>, ExecError> {
        self.check_count("x", x.len())?;
        self.check_count("dy", dy.len())?;
        let needs_x = self.options.gradient != WeightGradient::Frozen;
        let routed = self.make_ready(LayerCall::Backward)?;
        Prepared::bind_ranks(&mut routed.backward, "dy", dy)?;
        if needs_x {
            Prepared::bind_ranks(&mut routed.backward, "x", x)?;
        }
        let timeline: Timeline = Prepared::run_ranks(&mut routed.backward)?;
        Ok(LayerPass { result: Prepared::buffers_of(&routed.backward, "dx")?, timeline })
    }

    /// The last gradients of the weights that were written, as the weights; `None` where they are added to something, or there are none.
    pub fn weight_gradient(&self) -> Option<RankBuffers<M>> {
        let routed = self.routed.as_ref()?;
        Prepared::buffers_of(&routed.backward, "dweight").ok().filter(|buffers| !buffers.is_empty())
    }

    /// Enqueues a pass on the caller's tensors, those that are written included, and returns at once; as
    /// [`LinearLayer::enqueue`](crate::LinearLayer::enqueue).
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a deferred gradient, which experts do not have, or a tensor that does not fit, or without a routing:
    /// nothing has been enqueued then; the group's first error.
    pub fn enqueue(
        &mut self,
        call: LayerCall,
        tensors: &NamedBuffers<'_, M>,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        let routed = self.make_ready(call)?;
        let ranks: Vec<&Rank<M>> = match call {
            LayerCall::Forward => routed.forward.iter().collect(),
            LayerCall::Backward => routed.backward.iter().collect(),
            LayerCall::WeightGradient => {
                return Err(refused(TensorFault::NothingDeferred));
            }
        };
        Prepared::call_ranks(&ranks, tensors, streams)
    }

    /// Which times passes take from the next one on, in their timelines.
    pub fn set_timing(&mut self, times: RunTimes) {
        if let Some(routed) = &mut self.routed {
            routed.forward.iter_mut().chain(&mut routed.backward).for_each(|rank| rank.set_timing(times));
        }
    }

    fn check_count(&self, name: &str, given: usize) -> Result<(), ExecError> {
        if given == self.ranks.len() {
            return Ok(());
        }
        let (given, needed) = (format!("{given} tensors"), format!("the {} ranks here", self.ranks.len()));
        Err(ExecError::tensor(name, TensorFault::Count { given, needed }))
    }
}

fn refused(fault: TensorFault) -> ExecError {
    ExecError::tensor("layer", fault)
}

fn unrouted() -> ExecError {
    ExecError::tensor("routing", TensorFault::Unrouted)
}
