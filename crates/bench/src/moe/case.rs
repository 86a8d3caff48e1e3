//! One layer of experts on one machine: in all variants that are compared, one run after the other.

use std::sync::Arc;
use std::time::Instant;

use counterpoint_choose::{
    ExpertDirection, LinearMachine, TunedExpertShape, TunedHere, TunedPlace, expert_pass,
};
use counterpoint_console::{
    CliError,
    arguments::{OverlapChoice, dtype_name},
    note,
};
use counterpoint_cost::CostModel;
use counterpoint_exec::{
    ExecError, ExpertInputs, ExpertLayer, ExpertOptions, ExpertOutputs, ExpertOverlap, ExpertPass,
    ExpertPasses, Group, HostTensor, LayerCall, LayerGradient, Machine, RankBuffers, RunConfig, RunTimes,
    WorldConfig, random_tensor,
};
use counterpoint_measure::Processes;
use counterpoint_plan::{ExpertCapacity, ExpertGroups, ExpertKind, ExpertSpec, Routing, Topology};
use counterpoint_reference::{LinearSample, WrongResult, check_experts};
use counterpoint_report::Statistics;
use counterpoint_schedule::{OverlapPolicy, Timeline, WeightGradient};

use super::row::{ExpertsRow, Parts};
use crate::arguments::{BenchTpPass, MoeLayersArguments};
use crate::hidden::Hidden;
use crate::interleaved::{figure, run_order};

/// Rows and columns of each result of a rank that are compared with f64.
const SAMPLED: usize = 32;
const WARM_UPS: usize = 3;
/// Routings that nobody has seen.
const FRESH: usize = 8;

/// One layer.
pub(super) struct Case<'a> {
    pub(super) arguments: &'a MoeLayersArguments,
    pub(super) spec: ExpertSpec,
    pub(super) routing: &'a Arc<Routing>,
    pub(super) cost: CostModel,
    pub(super) device: &'a str,
    pub(super) place: TunedPlace,
    pub(super) compared: &'a Compared,
    pub(super) processes: Processes<'a>,
}

/// Which variants are compared, besides the sequential one.
pub(crate) enum Compared {
    /// Those that `--overlap` names, as they were tuned where they were.
    Asked(Arc<TunedHere>),
    /// So many of those that are predicted to be fastest, under every policy, or each of those that `--overlap` names.
    Fastest(usize),
}

/// A layer that runs in one of the variants that are compared.
struct Variant<M: Machine> {
    overlap: String,
    passes: ExpertPasses,
    layer: ExpertLayer<M>,
    checked: Result<(), WrongResult>,
    /// Of each pass, runs with the times of all operations and those with that of the whole alone.
    runs: Vec<[Vec<Timeline>; 2]>,
}

/// The tensors that all variants use.
struct Tensors<M: Machine> {
    x: RankBuffers<M>,
    dy: RankBuffers<M>,
    weight: RankBuffers<M>,
}

/// The tensors of the ranks here, of those of all.
fn of_ranks<M: Machine>(group: &Group<M>, all: Option<&[HostTensor]>) -> Vec<HostTensor> {
    all.and_then(|all| all.get(group.ranks_here())).unwrap_or_default().to_vec()
}

impl Case<'_> {
    pub(super) fn measure_on<M: Machine>(&self, machine: &M) -> Result<Vec<ExpertsRow>, CliError> {
        let failed = |source| CliError::Run { source };
        let config =
            WorldConfig { limit: RunConfig::default().world.limit, poison: false, ..WorldConfig::default() };
        let group = Group::connect(machine, self.routing.ranks(), config).map_err(failed)?;
        let inputs = self.inputs();
        let sequential = OverlapPolicy::SEQUENTIAL;
        let alone = ExpertPass { policy: sequential, groups: ExpertGroups::default() };
        let mut asked = vec![(sequential.to_string(), ExpertPasses { forward: alone, backward: alone })];
        let linear = LinearMachine { cost: self.cost, ..group.linear().clone() };
        match self.compared {
            Compared::Asked(tuned) => {
                let linear = LinearMachine { tuned: Some(tuned.clone()), ..linear };
                for choice in &self.arguments.overlap {
                    let overlap = match choice {
                        OverlapChoice::Named(policy) => ExpertOverlap::Policy(*policy),
                        OverlapChoice::Auto => ExpertOverlap::Predicted,
                    };
                    let passes = overlap.passes(&linear, self.spec, self.routing, self.gradient());
                    asked.push((choice.to_string(), passes.map_err(failed)?));
                }
            }
            Compared::Fastest(trials) => {
                let forward = self.fastest(&linear, ExpertDirection::Forward, *trials)?;
                let backward = self.fastest(&linear, self.backward(), *trials)?;
                // Of a pass that has fewer, they are tried again.
                let of = |all: &[ExpertPass], at: usize| all.get(at % all.len().max(1)).copied();
                for at in 0..forward.len().max(backward.len()) {
                    let [forward, backward] = [&forward, &backward].map(|all| of(all, at).unwrap_or(alone));
                    asked.push(("trial".to_owned(), ExpertPasses { forward, backward }));
                }
            }
        }
        let mut variants: Vec<Variant<M>> = Vec::new();
        let (mut tensors, mut first) = (None, None);
        for (overlap, passes) in asked {
            variants.push(
                self.variant(&group, overlap, passes, &inputs, &mut tensors, &mut first).map_err(failed)?,
            );
        }
        let Some(tensors) = &tensors else { return Ok(Vec::new()) };
        if let (Compared::Asked(_), Processes::One) = (self.compared, &self.processes) {
            let [forward, backward] = self.fresh(variants[0].layer.options(), &group).map_err(failed)?;
            note(&format!(
                "{}: a routing that nobody has seen takes {forward:.2} ms of the host for the forward of a rank, {backward:.2} ms for its \
                 backward",
                self.spec.kind
            ));
        }
        for &pass in &self.arguments.passes {
            self.measure(machine, pass, &mut variants, tensors).map_err(failed)?;
        }
        let (passes, topology) = (self.arguments.passes.iter().enumerate(), group.linear().topology);
        let rows = passes.flat_map(|(at, &pass)| {
            let variants = &variants;
            variants.iter().filter_map(move |variant| self.row((pass, at), topology, variant, &variants[0]))
        });
        Ok(rows.collect())
    }

    /// Milliseconds of the host for each rank here until a pass is ready under a routing that nobody has seen, of the forward and of the
    /// backward behind it: the fewest of some.
    fn fresh<M: Machine>(&self, options: &ExpertOptions, group: &Group<M>) -> Result<[f64; 2], ExecError> {
        let mut least = [f64::INFINITY; 2];
        for _ in 0..FRESH {
            // A copy knows nothing of what was found of it.
            let routing = Arc::new(Routing::clone(self.routing));
            for (call, least) in [LayerCall::Forward, LayerCall::Backward].into_iter().zip(&mut least) {
                let mut layer = ExpertLayer::new(group, *options)?;
                let begin = Instant::now();
                layer.route_for(routing.clone(), call, None)?;
                *least = least.min(begin.elapsed().as_secs_f64() * 1e3 / group.ranks().len() as f64);
            }
        }
        Ok(least)
    }

    fn gradient(&self) -> WeightGradient {
        match self.arguments.gradient.gradient(self.spec.dtype) {
            LayerGradient::Frozen => WeightGradient::Frozen,
            LayerGradient::Accumulated(dtype) => WeightGradient::Accumulated(dtype),
            _ => WeightGradient::Written,
        }
    }

    fn backward(&self) -> ExpertDirection {
        ExpertDirection::Backward(self.gradient())
    }

    /// So many variants to run a pass, those first that are predicted to be fastest; of every policy at least one.
    fn fastest(
        &self,
        machine: &LinearMachine,
        direction: ExpertDirection,
        trials: usize,
    ) -> Result<Vec<ExpertPass>, CliError> {
        let LinearMachine { transport, topology, cost, .. } = machine;
        let choice = expert_pass(self.spec, self.routing, direction, &[*transport], topology, cost)
            .map_err(|source| CliError::Predict { source })?;
        let asked = &self.arguments.overlap;
        let is_asked = |policy: &OverlapPolicy| {
            let all = asked.contains(&OverlapChoice::Auto);
            policy.overlaps() && (all || asked.contains(&OverlapChoice::Named(*policy)))
        };
        let mut candidates: Vec<_> = choice.candidates.iter().filter(|one| is_asked(&one.policy)).collect();
        candidates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut policies: Vec<OverlapPolicy> = Vec::new();
        let (first_of_policy, others): (Vec<_>, Vec<_>) = candidates.into_iter().partition(|one| {
            let is_first = !policies.contains(&one.policy);
            policies.extend(is_first.then_some(one.policy));
            is_first
        });
        let trials = trials.max(first_of_policy.len());
        let all = first_of_policy.into_iter().chain(others).take(trials);
        Ok(all.map(|one| ExpertPass { policy: one.policy, groups: one.groups }).collect())
    }

    fn inputs(&self) -> ExpertInputs {
        let ExpertSpec { kind, in_features, out_features, dtype } = self.spec;
        let seed = self.arguments.seed;
        let rows = self.routing.rows();
        let tensors = |columns: usize, are_rows: bool, stream: u64| -> Vec<HostTensor> {
            let tensor = |rank: usize| {
                let experts = self.routing.experts_of(rank);
                let count = match are_rows {
                    true => rows[experts.start..experts.end].iter().sum(),
                    false => self.routing.tokens(rank),
                };
                random_tensor(vec![count, columns], dtype, seed.wrapping_add(1000 * stream + rank as u64))
            };
            (0..self.routing.ranks()).map(tensor).collect()
        };
        let shape = vec![self.routing.experts() * out_features, in_features];
        ExpertInputs {
            x: tensors(in_features, kind == ExpertKind::Combine, 1),
            weight: random_tensor(shape.clone(), dtype, seed.wrapping_add(7)),
            dy: Some(tensors(out_features, kind == ExpertKind::Dispatch, 2)),
            // So that the gradient of the first backward can be distinguished.
            main_grad: match self.gradient() {
                WeightGradient::Accumulated(into) => Some(HostTensor::zeros(shape, into)),
                _ => None,
            },
        }
    }

    /// A layer that runs so, its results compared with f64 and with the first variant's bits.
    fn variant<M: Machine>(
        &self,
        group: &Group<M>,
        overlap: String,
        passes: ExpertPasses,
        inputs: &ExpertInputs,
        tensors: &mut Option<Tensors<M>>,
        first: &mut Option<ExpertOutputs>,
    ) -> Result<Variant<M>, ExecError> {
        let options = ExpertOptions {
            spec: self.spec,
            experts: self.routing.experts(),
            gradient: self.gradient(),
            capacity: ExpertCapacity::default(),
            overlap: ExpertOverlap::Passes(passes),
        };
        let mut layer = ExpertLayer::new(group, options)?;
        let tensors = match tensors {
            Some(tensors) => tensors,
            None => tensors.insert(Tensors {
                x: layer.upload("x", of_ranks(group, Some(&inputs.x)))?,
                dy: layer.upload("dy", of_ranks(group, inputs.dy.as_deref()))?,
                weight: layer.scatter_weight(&inputs.weight)?,
            }),
        };
        layer.bind_weight(&tensors.weight)?;
        let zeros = inputs.main_grad.as_ref().map(|zeros| layer.scatter_weight(zeros)).transpose()?;
        if let Some(zeros) = &zeros {
            layer.bind_main_grad(zeros)?;
        }
        layer.route(self.routing.clone())?;
        let all =
            |layer: &ExpertLayer<M>, parts: &RankBuffers<M>| self.processes.gathered(layer.download(parts)?);
        let y = layer.forward(&tensors.x)?.result;
        let y = all(&layer, &y)?;
        let dx = layer.backward(&tensors.x, &tensors.dy)?.result;
        let dx = Some(all(&layer, &dx)?);
        let dweight = zeros.or_else(|| layer.weight_gradient());
        let dweight = dweight.map(|parts| match self.processes {
            Processes::One => layer.gather_weight(&parts),
            Processes::Each(_) => self.processes.rows(layer.download(&parts)?),
        });
        let outputs = ExpertOutputs { y, dx, dweight: dweight.transpose()? };
        let sample = LinearSample::Spread(SAMPLED);
        let mut checked =
            check_experts(&self.spec, self.routing, inputs, &outputs, sample).map_err(WrongResult::from);
        if first.get_or_insert_with(|| outputs.clone()) != &outputs {
            checked = checked.and(Err(WrongResult::OtherBits));
        }
        Ok(Variant { overlap, passes, layer, checked, runs: Vec::new() })
    }

    /// Times a pass in all variants, a run of each in turn.
    fn measure<M: Machine>(
        &self,
        machine: &M,
        pass: BenchTpPass,
        variants: &mut [Variant<M>],
        tensors: &Tensors<M>,
    ) -> Result<(), ExecError> {
        variants.iter_mut().for_each(|variant| variant.runs.push([Vec::new(), Vec::new()]));
        for run in 0..WARM_UPS + self.arguments.iterations as usize {
            for next in run_order(run, 2 * variants.len()) {
                let Variant { layer, runs, .. } = &mut variants[next / 2];
                layer.set_timing(if next % 2 == 0 { RunTimes::Operations } else { RunTimes::Whole });
                machine.barrier("a run")?;
                let done = match pass {
                    BenchTpPass::Forward => layer.forward(&tensors.x)?,
                    BenchTpPass::Backward => layer.backward(&tensors.x, &tensors.dy)?,
                };
                let timeline = self.processes.joined(done.timeline)?;
                if let Some(runs) = runs.last_mut().filter(|_| run >= WARM_UPS) {
                    runs[next % 2].push(timeline);
                }
            }
        }
        Ok(())
    }

    /// What a tuned pass would be for.
    fn shape(&self, pass: BenchTpPass, topology: Topology) -> Option<TunedExpertShape> {
        let direction = if pass == BenchTpPass::Forward { ExpertDirection::Forward } else { self.backward() };
        TunedExpertShape::of(&self.spec, self.routing, direction.tuned_pass(), topology, &self.place)
    }

    fn row<M: Machine>(
        &self,
        (pass, at): (BenchTpPass, usize),
        topology: Topology,
        variant: &Variant<M>,
        plain: &Variant<M>,
    ) -> Option<ExpertsRow> {
        let seconds = |variant: &Variant<M>| -> Vec<f64> {
            variant.runs[at][1].iter().map(Timeline::duration).collect()
        };
        let (statistics, sequential) = (Statistics::of(&seconds(variant))?, Statistics::of(&seconds(plain))?);
        let parts = Parts::of(&plain.runs[at][0]);
        let hidden = Hidden::of(&variant.runs[at][0])?;
        let hidden_noise = hidden.share().map(|_| hidden.noise);
        let ExpertPass { policy, groups } = match pass {
            BenchTpPass::Forward => variant.passes.forward,
            BenchTpPass::Backward => variant.passes.backward,
        };
        let rows: usize = self.routing.rows().iter().sum();
        let has_one = pass == BenchTpPass::Forward || self.gradient() == WeightGradient::Frozen;
        let products = if has_one { 1.0 } else { 2.0 };
        let flops = products * 2.0 * (rows * self.spec.in_features) as f64 * self.spec.out_features as f64;
        Some(ExpertsRow {
            kind: self.spec.kind.to_string(),
            pass,
            ranks: self.routing.ranks(),
            experts: self.routing.experts(),
            rows,
            in_features: self.spec.in_features,
            out_features: self.spec.out_features,
            dtype: dtype_name(self.spec.dtype).to_owned(),
            device: self.device.to_owned(),
            overlap: variant.overlap.clone(),
            policy: policy.to_string(),
            groups: groups.to_string(),
            cut: groups,
            shape: self.shape(pass, topology),
            tflops: flops / self.routing.ranks() as f64 / statistics.median / 1e12,
            seconds: statistics,
            sequential_seconds: sequential.median,
            computation_seconds: parts.computation,
            communication_seconds: parts.communication,
            of_longer: statistics.median / parts.longer(),
            hidden: figure(hidden.share(), hidden_noise),
            hidden_noise,
            wrong: variant.checked.as_ref().err().map(ToString::to_string),
        })
    }
}
