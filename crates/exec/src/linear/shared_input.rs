//! Column-parallel layers that share one input, on a group.

use std::sync::Arc;

use counterpoint_choose::Offered;
use counterpoint_plan::{Activations, LinearKind, LinearPlan, LinearSpec};
use counterpoint_schedule::{
    BufferSpec, InputGradient, SharedInput, Timeline, lower_shared_input_backward,
    lower_shared_input_forward, lower_shared_input_weight_gradient,
};

use super::deferred::Deferred;
use super::layer::{
    LayerCall, LayerGradient, LayerPass, NamedBuffers, Rank, RankBuffers, check_present, prepare, tensors_of,
};
use super::overlap::{PlannedPass, PlannedPasses};
use super::parallel::LinearOptions;
use super::shard::Shard;
use crate::{
    Backend, ExecError, Group, HostTensor, Machine, Prepared, RunTimes, TensorFault, Ticket, Transport,
};

/// Column-parallel layers of one input, such as q, k and v of an attention, or gate and up of an MLP: `x` is gathered once for all of
/// them, and what they give to its gradient is added on each rank and summed over ranks once.
///
/// Weights, results and gradients are lists in the order of the layers.
pub struct SharedInputLinear<M: Machine> {
    passes: PlannedPasses,
    /// Of each layer, its own, for how its tensors lie.
    layers: Vec<LinearPlan>,
    gradient: LayerGradient,
    forward: Vec<Rank<M>>,
    backward: Vec<Rank<M>>,
    deferred: Option<Deferred<M>>,
}

/// What a forward gave. The next one writes over the memory of the results.
pub struct SharedInputForward<M: Machine> {
    /// `y` of each layer.
    pub ys: Vec<RankBuffers<M>>,
    /// Measured.
    pub timeline: Timeline,
}

impl<M: Machine> SharedInputLinear<M> {
    /// Layers of so many `tokens` from `in_features` to each of `out_features`, those of all ranks.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for no layers, sizes that are 0 or do not divide over the ranks, and partial gradients of an input of
    /// which every rank has its own tokens; as [`LinearLayer::new`](crate::LinearLayer::new).
    pub fn new(
        group: &Group<M>,
        tokens: usize,
        in_features: usize,
        out_features: &[usize],
        options: &LinearOptions,
        input: InputGradient,
    ) -> Result<Self, ExecError> {
        let LinearOptions { activations, has_bias, dtype, gradient, ref overlap } = *options;
        if input == InputGradient::Partial && activations == Activations::SequenceParallel {
            return Err(ExecError::tensor("layer", TensorFault::PartialInputGradient));
        }
        let failed = |error: counterpoint_plan::PlanError| ExecError::tensor("layer", error);
        let kind = LinearKind::Column;
        let spec = |out_features| LinearSpec {
            kind,
            activations,
            tokens,
            in_features,
            out_features,
            has_bias,
            dtype,
        };
        // A kernel that sends its tiles, or columns of them, makes them of one product.
        let machine = group.linear().clone().without_waiting_products().with_column_groups(Offered::Never);
        let all = out_features.iter().fold(0usize, |sum, features| sum.saturating_add(*features));
        let passes = overlap.passes(&machine, spec(all), gradient).map_err(failed)?;
        let layer = |&out_features: &usize| {
            let groups = counterpoint_plan::WaveGroups::Fixed(1);
            LinearPlan::new(spec(out_features), group.world_size(), groups).map_err(failed)
        };
        let layers: Vec<LinearPlan> = out_features.iter().map(layer).collect::<Result<_, _>>()?;
        let outputs: Vec<usize> = layers.iter().map(LinearPlan::local_out_features).collect();
        let PlannedPass { plan, policy } = &passes.forward;
        let forward = prepare(group, plan, *policy, |rank| {
            lower_shared_input_forward(SharedInput { plan, outputs: &outputs }, rank, *policy)
        })?;
        let PlannedPass { plan, policy } = &passes.backward;
        let shared = SharedInput { plan, outputs: &outputs };
        let deferred = match gradient {
            LayerGradient::Deferred { into, limit } => {
                let lower = |rank| lower_shared_input_weight_gradient(shared, rank, into, *policy);
                Some(Deferred::new(|| prepare(group, plan, *policy, lower), into, limit)?)
            }
            _ => None,
        };
        let of_weights = gradient.of_backward();
        let backward = prepare(group, plan, *policy, |rank| {
            lower_shared_input_backward(shared, rank, (of_weights, input), *policy)
        })?;
        Ok(Self { passes, layers, gradient, forward, backward, deferred })
    }

    /// How all of them together are split.
    pub fn plan(&self) -> &LinearPlan {
        &self.passes.forward.plan
    }

    /// How the passes of all of them together are run.
    pub fn passes(&self) -> &PlannedPasses {
        &self.passes
    }

    /// Each layer's own split.
    pub fn layers(&self) -> &[LinearPlan] {
        &self.layers
    }

    fn upload(
        &self,
        name: &str,
        plan: &LinearPlan,
        shard: Shard,
        whole: &HostTensor,
    ) -> Result<RankBuffers<M>, ExecError> {
        let upload = |rank: &Rank<M>| {
            let part = shard.cut(plan, rank.backend().rank(), whole)?;
            rank.backend().upload(name, part)
        };
        self.forward.iter().map(upload).collect()
    }

    /// Uploads the ranks' parts of the whole input, or of its gradient, `[tokens, in_features]`.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for another shape; [`ExecError::OutOfMemory`].
    pub fn scatter_input(&self, whole: &HostTensor) -> Result<RankBuffers<M>, ExecError> {
        check_shape("x", whole, &[self.plan().spec.tokens, self.plan().spec.in_features])?;
        self.upload("x", self.plan(), Shard::of_input(self.plan()), whole)
    }

    /// Uploads the ranks' parts of whole weights, `[out_features, in_features]`, one a layer.
    ///
    /// # Errors
    /// As [`SharedInputLinear::scatter_input`].
    pub fn scatter_weights(&self, whole: &[HostTensor]) -> Result<Vec<RankBuffers<M>>, ExecError> {
        self.scatter("weight", whole, Shard::of_weight, |spec| vec![spec.out_features, spec.in_features])
    }

    /// Uploads the ranks' parts of whole results or their gradients, `[tokens, out_features]`, one a layer.
    ///
    /// # Errors
    /// As [`SharedInputLinear::scatter_input`].
    pub fn scatter_outputs(&self, whole: &[HostTensor]) -> Result<Vec<RankBuffers<M>>, ExecError> {
        self.scatter("dy", whole, Shard::of_output, |spec| vec![spec.tokens, spec.out_features])
    }

    /// Uploads the ranks' parts of whole biases, `[out_features]`, one a layer.
    ///
    /// # Errors
    /// As [`SharedInputLinear::scatter_input`].
    pub fn scatter_biases(&self, whole: &[HostTensor]) -> Result<Vec<RankBuffers<M>>, ExecError> {
        self.scatter("bias", whole, Shard::of_bias, |spec| vec![spec.out_features])
    }

    fn scatter(
        &self,
        name: &str,
        whole: &[HostTensor],
        shard: fn(&LinearPlan) -> Shard,
        shape: fn(&LinearSpec) -> Vec<usize>,
    ) -> Result<Vec<RankBuffers<M>>, ExecError> {
        self.check_layers(name, whole.len())?;
        let upload = |(plan, whole): (&LinearPlan, &HostTensor)| {
            check_shape(name, whole, &shape(&plan.spec))?;
            self.upload(name, plan, shard(plan), whole)
        };
        self.layers.iter().zip(whole).map(upload).collect()
    }

    /// The parts of a tensor that the ranks here have, in their order.
    ///
    /// # Errors
    /// As the backend's.
    pub fn download(&self, parts: &RankBuffers<M>) -> Result<Vec<HostTensor>, ExecError> {
        self.forward.iter().zip(parts).map(|(rank, part)| rank.backend().download(part)).collect()
    }

    /// Has the layers use these weights, and these biases where they have some, from the next pass on.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when a number, shape or type differs, or biases are missing or too much.
    pub fn bind_weights(
        &mut self,
        weights: &[RankBuffers<M>],
        biases: &[RankBuffers<M>],
    ) -> Result<(), ExecError> {
        self.check_layers("weight", weights.len())?;
        if self.plan().spec.has_bias {
            self.check_layers("bias", biases.len())?;
        } else if !biases.is_empty() {
            check_present("bias", true, false)?;
        }
        bind(&mut self.forward, "weight", weights)?;
        bind(&mut self.backward, "weight", weights)?;
        bind(&mut self.forward, "bias", biases)
    }

    /// Has gradients be added to these tensors from the next backward on, those of biases too where layers have them.
    ///
    /// # Errors
    /// As [`SharedInputLinear::bind_weights`]; [`ExecError::Tensor`] where gradients are not added to anything.
    pub fn bind_main_grads(
        &mut self,
        weights: &[RankBuffers<M>],
        biases: &[RankBuffers<M>],
    ) -> Result<(), ExecError> {
        check_present("main_grad", true, self.gradient.main_grad().is_some())?;
        self.check_layers("main_grad", weights.len())?;
        if self.plan().spec.has_bias {
            self.check_layers("main_grad's bias", biases.len())?;
        }
        let ranks = match &mut self.deferred {
            Some(deferred) => deferred.ranks(),
            None => &mut self.backward,
        };
        bind(ranks, "main_grad", weights)?;
        bind(ranks, "main_grad_bias", biases)
    }

    /// `y` of each layer.
    ///
    /// # Errors
    /// As [`LinearLayer::forward`](crate::LinearLayer::forward).
    pub fn forward(&mut self, x: &RankBuffers<M>) -> Result<SharedInputForward<M>, ExecError> {
        Prepared::bind_ranks(&mut self.forward, "x", x)?;
        let timeline = Prepared::run_ranks(&mut self.forward)?;
        let y = |at: usize| Prepared::buffers_of(&self.forward, &format!("y_{at}"));
        let ys = (0..self.layers.len()).map(y).collect::<Result<_, _>>()?;
        Ok(SharedInputForward { ys, timeline })
    }

    /// `dx` of the gradients of all results, and what becomes of those of the weights: `x` is that of the forward, which frozen weights
    /// have no use for. Where gradients are deferred, `x` and `dys` must stay as they are until they have been computed.
    ///
    /// # Errors
    /// As [`SharedInputLinear::forward`].
    pub fn backward(
        &mut self,
        x: &RankBuffers<M>,
        dys: &[RankBuffers<M>],
    ) -> Result<LayerPass<M>, ExecError> {
        self.check_layers("dy", dys.len())?;
        if self.gradient != LayerGradient::Frozen {
            Prepared::bind_ranks(&mut self.backward, "x", x)?;
        }
        bind(&mut self.backward, "dy", dys)?;
        if let Some(deferred) = &mut self.deferred {
            deferred.begin(&mut self.backward)?;
        }
        let timeline = Prepared::run_ranks(&mut self.backward)?;
        if let Some(deferred) = &mut self.deferred {
            let dys = dys.iter().enumerate().map(|(at, dy)| (format!("dy_{at}"), dy.clone()));
            deferred.push(std::iter::once(("x".to_owned(), x.clone())).chain(dys).collect());
        }
        Ok(LayerPass { result: Prepared::buffers_of(&self.backward, "dx")?, timeline })
    }

    /// The tensors that a call takes on one of the ranks here, as [`LinearLayer::tensors`](crate::LinearLayer::tensors): those of
    /// layers have their number behind the name, such as `weight_0`.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a call that the layers were not made for.
    pub fn tensors(&self, call: LayerCall, rank: usize) -> Result<Vec<BufferSpec>, ExecError> {
        Ok(tensors_of(self.ranks_of(call)?, rank))
    }

    /// Enqueues a call on the caller's tensors, as [`LinearLayer::enqueue`](crate::LinearLayer::enqueue).
    ///
    /// # Errors
    /// As [`LinearLayer::enqueue`](crate::LinearLayer::enqueue).
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
        match call {
            LayerCall::Forward => Ok(&self.forward),
            LayerCall::Backward => Ok(&self.backward),
            LayerCall::WeightGradient => self.deferred.as_ref().map(Deferred::written).ok_or_else(|| {
                let (layers, pass) = ("these layers were", "deferred gradients of the weight");
                let fault = TensorFault::NotMadeFor { layers: layers.to_owned(), pass: pass.to_owned() };
                ExecError::tensor("dweight", fault)
            }),
        }
    }

    /// Backwards whose gradients of the weights wait.
    pub fn waiting(&self) -> usize {
        self.deferred.as_ref().map_or(0, Deferred::waiting)
    }

    /// Computes all gradients of the weights that wait, as [`LinearLayer::flush`](crate::LinearLayer::flush).
    ///
    /// # Errors
    /// As [`LinearLayer::flush`](crate::LinearLayer::flush).
    pub fn flush(&mut self) -> Result<Vec<Timeline>, ExecError> {
        self.deferred.as_mut().map_or_else(|| Ok(Vec::new()), Deferred::flush)
    }

    /// Enqueues them and returns at once, as [`LinearLayer::enqueue_flush`](crate::LinearLayer::enqueue_flush).
    ///
    /// # Errors
    /// As [`LinearLayer::enqueue_flush`](crate::LinearLayer::enqueue_flush).
    pub fn enqueue_flush(
        &mut self,
        streams: Option<&[&Arc<<M::Backend as Backend>::Stream>]>,
    ) -> Result<Vec<Ticket<M::Backend>>, ExecError> {
        self.deferred.as_mut().map_or_else(|| Ok(Vec::new()), |deferred| deferred.enqueue(streams))
    }

    /// The last gradients of the weights that were written, one a layer; `None` where they are added to something, or there are none.
    pub fn weight_gradients(&self) -> Option<Vec<RankBuffers<M>>> {
        self.written("dweight")
    }

    /// Likewise those of the biases; `None` too where there are no biases.
    pub fn bias_gradients(&self) -> Option<Vec<RankBuffers<M>>> {
        self.written("dbias")
    }

    fn written(&self, name: &str) -> Option<Vec<RankBuffers<M>>> {
        let ranks = self.deferred.as_ref().map_or(&self.backward[..], Deferred::written);
        let of = |at: usize| Prepared::buffers_of(ranks, &format!("{name}_{at}")).ok();
        (0..self.layers.len()).map(of).collect()
    }

    /// Which times passes take from the next one on, in their timelines.
    pub fn set_timing(&mut self, times: RunTimes) {
        self.forward.iter_mut().chain(&mut self.backward).for_each(|rank| rank.set_timing(times));
    }

    fn check_layers(&self, name: &str, given: usize) -> Result<(), ExecError> {
        if given == self.layers.len() {
            return Ok(());
        }
        let (given, needed) = (format!("{given} tensors"), format!("{} layers", self.layers.len()));
        Err(ExecError::tensor(name, TensorFault::Count { given, needed }))
    }
}

/// Each layer's buffers by its number.
fn bind<B: Backend, T: Transport<B>>(
    ranks: &mut [Prepared<B, T>],
    name: &str,
    buffers: &[Vec<B::Buffer>],
) -> Result<(), ExecError> {
    let mut layers = buffers.iter().enumerate();
    layers.try_for_each(|(at, buffers)| Prepared::bind_ranks(ranks, &format!("{name}_{at}"), buffers))
}

fn check_shape(name: &str, tensor: &HostTensor, wanted: &[usize]) -> Result<(), ExecError> {
    TensorFault::of_shape(wanted, tensor.shape()).map_or(Ok(()), |fault| Err(ExecError::tensor(name, fault)))
}
