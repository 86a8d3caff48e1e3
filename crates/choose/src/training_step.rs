//! What a layer of a transformer takes on its ranks, part by part, and a training step of all layers.

use counterpoint_cost::CostModel;
use counterpoint_mask::Mask;
use counterpoint_plan::{Activations, DType, GemmCollective, PlanError, Topology, TransformerSpec};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, MatrixShape, Overlap, OverlapPolicy, Program, SimulateError, Timeline,
    WeightGradient, WorkerShare, lower_attention_backward, lower_attention_forward, lower_linear_backward,
    lower_linear_forward, lower_row_passes, simulate,
};
use thiserror::Error;

use crate::config::PlanConfig;
use crate::error::{ChooseError, ConfigError};
use crate::{LayerGroups, LinkUse, PassCosts, ProductStart, plan_mask};

/// Passes over the tokens of a rank that norms, residual sums and rotations make besides products and attention: of each a
/// read and a write.
const NORM_PASSES: usize = 2;

/// Ranks of a step: tensor parallel groups innermost, then context parallel ones, then replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallelism {
    /// All ranks.
    pub topology: Topology,
    /// Ranks that share each linear layer and the heads.
    pub tp_size: usize,
    /// Ranks that share a sequence.
    pub cp_size: usize,
}

/// A training step to be predicted: every replica takes `microbatches` sequences, one after the other.
///
/// Embeddings, the head, the optimizer and recomputation are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSpec {
    /// The model.
    pub model: TransformerSpec,
    /// Its mask: as many queries as a sequence has tokens.
    pub mask: Mask,
    /// Sequences of a replica between two updates.
    pub microbatches: usize,
    /// Type of weights and activations.
    pub dtype: DType,
    /// What ranks of a tensor-parallel group have of the activations that are not split by features.
    pub activations: Activations,
    /// What becomes of the gradients of weights.
    pub gradient: WeightGradient,
    /// Groups of every linear layer.
    pub groups: LayerGroups,
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
}

/// Why a step cannot be predicted.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// A configuration that makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Ranks, heads or tokens do not divide.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Ranks that make no whole replicas.
    #[error(
        "{ranks} ranks are not a multiple of tp_size {tp_size} times cp_size {cp_size}; use as many ranks as make whole replicas"
    )]
    Replicas {
        /// All ranks.
        ranks: usize,
        /// Tensor parallel.
        tp_size: usize,
        /// Context parallel.
        cp_size: usize,
    },
    /// Programs of a plan that do not fit each other.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

impl From<ChooseError> for StepError {
    fn from(error: ChooseError) -> Self {
        match error {
            ChooseError::Config(source) => Self::Config(source),
            ChooseError::Plan(source) => Self::Plan(source),
            ChooseError::Simulate(source) => Self::Simulate(source),
        }
    }
}

/// A part of a layer and when everything in it happens.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPart {
    /// Such as `qkv`.
    pub name: &'static str,
    /// Its forward.
    pub forward: Timeline,
    /// Its backward.
    pub backward: Timeline,
}

/// A layer, its parts in the order of the forward: each ends before the next begins.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPrediction {
    /// The parts.
    pub parts: Vec<LayerPart>,
}

impl LayerPrediction {
    /// Seconds of the forward.
    pub fn forward_seconds(&self) -> f64 {
        self.parts.iter().map(|part| part.forward.makespan()).sum()
    }

    /// Seconds of the backward.
    pub fn backward_seconds(&self) -> f64 {
        self.parts.iter().map(|part| part.backward.makespan()).sum()
    }

    /// Both passes as one rank sees them, all parts one after the other.
    pub fn timelines(&self) -> [Timeline; 2] {
        let [mut forward, mut backward] =
            ["forward", "backward"].map(|name| Timeline { name: name.to_owned(), ..Timeline::default() });
        self.parts.iter().for_each(|part| forward.append(&part.forward));
        self.parts.iter().rev().for_each(|part| backward.append(&part.backward));
        [forward, backward]
    }

    /// Communication of both passes, and how much of it nothing hides.
    pub fn overlap(&self) -> Overlap {
        let passes = self.parts.iter().flat_map(|part| [part.forward.overlap(), part.backward.overlap()]);
        let (mut sum, mut hidden, mut hideable) = (Overlap::default(), 0.0, 0.0);
        for pass in passes {
            sum.communication_seconds += pass.communication_seconds;
            sum.compute_seconds += pass.compute_seconds;
            sum.exposed_seconds += pass.exposed_seconds;
            hidden += pass.communication_seconds - pass.exposed_seconds;
            hideable += pass.communication_seconds.min(pass.compute_seconds);
        }
        sum.efficiency = (hideable > 0.0).then(|| hidden / hideable);
        sum
    }
}

/// A step of all layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPrediction {
    /// Seconds of the step.
    pub seconds: f64,
    /// Communication of tensor and context parallelism that nothing hides.
    pub exposed_seconds: f64,
    /// What the replicas' gradients and weights add to the step.
    pub replica_exposed_seconds: f64,
    /// The same, had nothing hidden it.
    pub replica_seconds: f64,
    /// Floating-point operations of a rank, of linear layers and attention.
    pub flops: f64,
}

impl StepSpec {
    /// Predicts one layer: its linear layers over one tensor parallel group, its attention over one context parallel group.
    /// Of tensor parallel ranks, which do the same, one is simulated.
    ///
    /// # Errors
    /// Sizes that do not divide; see [`StepError`].
    pub fn layer(&self, ranks: &Parallelism, cost: &CostModel) -> Result<LayerPrediction, StepError> {
        let Parallelism { topology, tp_size, cp_size } = *ranks;
        let world = topology.world_size;
        if tp_size == 0 || cp_size == 0 || !world.is_multiple_of(tp_size * cp_size) {
            return Err(StepError::Replicas { ranks: world, tp_size, cp_size });
        }
        self.model.check_tensor_parallel(tp_size)?;
        self.model.check_bytes(world)?;
        let tokens = self.mask.seqlen_q().div_ceil(cp_size);
        let near = Topology { world_size: tp_size, ranks_per_node: topology.ranks_per_node.min(tp_size) };
        let mut parts = Vec::new();
        for (index, linear) in
            self.model.linears(tokens, self.activations, self.dtype).into_iter().enumerate()
        {
            if index % 2 == 0 {
                // Without sequence parallelism every rank normalises all tokens.
                let own = match self.activations {
                    Activations::SequenceParallel => tokens.div_ceil(tp_size),
                    Activations::Replicated => tokens,
                };
                parts.push(self.norm(own, &near, cost)?);
            }
            let plan = self.groups.plan(linear.spec, tp_size, cost)?;
            let alone = |program: Program| simulate(&[program], &near, cost);
            parts.push(LayerPart {
                name: linear.name,
                forward: alone(lower_linear_forward(&plan, 0, self.policy))?,
                backward: alone(lower_linear_backward(&plan, 0, self.gradient, self.policy))?,
            });
            if linear.name == "qkv" {
                parts.push(self.attention(ranks, cost)?);
            }
        }
        Ok(LayerPrediction { parts })
    }

    /// A step of all layers of all replicas, of which `layer` is one of the layers.
    ///
    /// The gradients of a layer's weights are summed over the replicas (reduce-scattered in f32, Rajbhandari et al. 2020)
    /// under the backwards of the layers before it; its weights are gathered under the forwards of the layers before it.
    pub fn step(&self, layer: &LayerPrediction, ranks: &Parallelism, cost: &CostModel) -> StepPrediction {
        let layers = self.model.layers;
        let (forward, backward) = (layer.forward_seconds(), layer.backward_seconds());
        let weights = self.model.layer_parameters() / ranks.tp_size as u64;
        let gradients = replica_seconds(weights * DType::F32.size() as u64, ranks, cost);
        let gathered = replica_seconds(weights * self.dtype.size() as u64, ranks, cost);
        let overlapped_speed = cost.sharing.map_or(1.0, |sharing| match self.policy.workers {
            WorkerShare::Common if !self.policy.moves_by_engines() => {
                sharing.speed_without(sharing.communication)
            }
            _ => 1.0,
        });
        let added = |collective: GemmCollective, product: f64, travel: f64| {
            if travel == 0.0 {
                return 0.0;
            }
            let table = |each: f64| (0..=layers).map(|n| n as f64 * each).collect::<Vec<f64>>();
            let (product, travel) = (table(product), table(travel));
            let costs = PassCosts {
                together: Vec::new(),
                collective,
                product,
                travel,
                back: Vec::new(),
                before: 0.0,
                after: 0.0,
                join: 0.0,
                starts: ProductStart::Free,
                link: LinkUse::Shared,
                overlapped_speed,
            };
            costs.seconds(&vec![1; layers]) - costs.product[layers]
        };
        let sequential = !self.policy.overlaps();
        let all = layers as f64 * (gradients + gathered);
        let replica_exposed_seconds = if sequential {
            all
        } else {
            added(GemmCollective::ReduceScatter, backward, gradients)
                + added(GemmCollective::AllGather, forward, gathered)
        };
        let passes = layers as f64 * self.microbatches as f64;
        let tokens = self.mask.seqlen_q() as f64 / ranks.cp_size as f64;
        let attention = self.model.attention(ranks.tp_size, self.dtype);
        let area = self.mask.area();
        let attention_flops = attention.flops_forward(area) + attention.flops_backward(area);
        StepPrediction {
            seconds: passes * (forward + backward) + replica_exposed_seconds,
            exposed_seconds: passes * layer.overlap().exposed_seconds,
            replica_exposed_seconds,
            replica_seconds: all,
            flops: passes * (6.0 * weights as f64 * tokens + attention_flops / ranks.cp_size as f64),
        }
    }

    /// Norm and residual sum of `tokens` tokens of a rank.
    fn norm(&self, tokens: usize, topology: &Topology, cost: &CostModel) -> Result<LayerPart, StepError> {
        let pass = |name: &str| {
            let shape = MatrixShape { rows: tokens.max(1), columns: self.model.hidden };
            let program =
                lower_row_passes(name, "norm and residual", NORM_PASSES, shape, self.dtype, self.policy);
            simulate(&[program], topology, cost)
        };
        Ok(LayerPart { name: "norm", forward: pass("norm forward")?, backward: pass("norm backward")? })
    }

    fn attention(&self, ranks: &Parallelism, cost: &CostModel) -> Result<LayerPart, StepError> {
        let cp_size = ranks.cp_size;
        // Ranks of a group are a tensor parallel group apart.
        let ranks_per_node = (ranks.topology.ranks_per_node / ranks.tp_size).clamp(1, cp_size);
        let topology = Topology { world_size: cp_size, ranks_per_node };
        let spec = self.model.attention(ranks.tp_size, self.dtype);
        let config = PlanConfig { topology, cost: *cost, ..PlanConfig::new(cp_size) };
        let plan = plan_mask(&self.mask, &spec, &config)?.over_nodes(&topology);
        let lower = |lower: &dyn Fn(usize) -> Program| {
            let programs: Vec<Program> = (0..cp_size).map(lower).collect();
            simulate(&programs, &topology, cost)
        };
        Ok(LayerPart {
            name: "attention",
            forward: lower(&|rank| {
                lower_attention_forward(&plan, rank, &spec, self.policy, KeyBlocks::Unaligned)
            })?,
            backward: lower(&|rank| {
                lower_attention_backward(&plan, rank, &spec, self.policy, GradientReduction::default())
            })?,
        })
    }
}

/// Seconds in which the ranks that hold the same weights reduce-scatter, or gather, so many bytes of them.
fn replica_seconds(bytes: u64, ranks: &Parallelism, cost: &CostModel) -> f64 {
    let Topology { world_size, ranks_per_node } = ranks.topology;
    let holders = (world_size / ranks.tp_size) as u64;
    let near = (ranks_per_node / ranks.tp_size).clamp(1, holders as usize) as u64;
    let share = |others: u64| bytes / holders * others;
    f64::max(cost.link.seconds(share(near - 1)), cost.network.seconds(share(holders - near)))
}
