//! One layer in `bench tp`: its passes under every policy on the same tensors, interleaved, checked against f64 and by their bits.

use std::sync::Arc;

use counterpoint_choose::{LayerGroups, LinearMachine, TunedHere};
use counterpoint_console::{
    CliError,
    arguments::{Device, OverlapChoice, dtype_name},
};
use counterpoint_cost::CostModel;
use counterpoint_cuda::TransportKind;
use counterpoint_exec::{
    ExecError, Group, HostTensor, LayerGradient, LayerOverlap, LinearInputs, LinearOutputs, LinearTensor,
    Machine, PlannedPass, PlannedPasses, RankBuffers, RunConfig, RunTimes, WorldConfig,
};
use counterpoint_measure::Processes;
use counterpoint_plan::{GemmCollective, LinearDirection, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_reference::{LinearSample, WrongResult, check_linear_part};
use counterpoint_report::Statistics;
use counterpoint_schedule::{OverlapPolicy, WeightGradient};
use rayon::prelude::*;

use super::connections;
use super::measured::{Measured, MeasuredPass, digest};
use super::normalised::{First, Layer, NORM};
use super::parts::Parts;
use super::peers::{self, PeerResult};
use super::row::LinearRow;
use crate::arguments::{BenchTpArguments, BenchTpPass, LayerShape};
use crate::hidden::Hidden;
use crate::interleaved::{LEAST_HIDEABLE, figure, noise, run_order, saved};
use crate::pytorch::Peers;

/// Rows and columns of each result that are compared with f64.
const SAMPLED: usize = 12;
const WARM_UPS: usize = 3;

/// One layer on one machine.
pub(super) struct Case<'a> {
    pub(super) arguments: &'a BenchTpArguments,
    pub(super) spec: LinearSpec,
    /// Tokens, features that are not split, features of a rank.
    pub(super) shape: LayerShape,
    pub(super) tp_size: usize,
    pub(super) transport: TransportKind,
    pub(super) cost: CostModel,
    pub(super) device: &'a str,
    pub(super) inputs: &'a LinearInputs,
    pub(super) processes: Processes<'a>,
    /// What was tuned on this machine.
    pub(super) tuned: Arc<TunedHere>,
}

/// The tensors that all policies use.
struct Tensors<M: Machine> {
    x: RankBuffers<M>,
    dy: RankBuffers<M>,
    weight: RankBuffers<M>,
    bias: Option<RankBuffers<M>>,
}

/// What gradients are added to.
struct Sums<M: Machine> {
    weight: RankBuffers<M>,
    bias: Option<RankBuffers<M>>,
}

/// A layer that runs in one of the variants that are compared.
struct Variant<M: Machine> {
    overlap: String,
    planned: PlannedPasses,
    layer: Layer<M>,
    checked: Result<f64, WrongResult>,
    bits: Vec<u64>,
    passes: Vec<MeasuredPass>,
}

impl<M: Machine> Variant<M> {
    fn measured(self) -> Measured {
        let Self { overlap, checked, bits, passes, .. } = self;
        Measured { overlap, passes, checked, bits }
    }
}

impl Case<'_> {
    /// Rows of all passes: first those with nothing side by side, then those of the policies. `joined` is given what the ranks here
    /// measured and has what all of them did, or `None` where another process has that.
    pub(super) fn measure_on<M: Machine>(
        &self,
        machine: &M,
        peers: &mut Peers<PeerResult>,
        joined: impl Fn(Measured) -> Result<Option<Measured>, CliError>,
    ) -> Result<Vec<LinearRow>, CliError> {
        let config =
            WorldConfig { limit: RunConfig::default().world.limit, poison: false, ..WorldConfig::default() };
        let group =
            Group::connect(machine, self.tp_size, config).map_err(|source| CliError::Run { source })?;
        let mut tensors = None;
        let sequential = OverlapPolicy::SEQUENTIAL;
        let named = |policy, groups: LayerGroups| LayerOverlap::Policy(policy, groups, self.cost);
        let mut asked = vec![(sequential.to_string(), named(sequential, WaveGroups::Fixed(1).into()))];
        for choice in &self.arguments.overlap {
            let OverlapChoice::Named(policy) = choice else {
                asked.push((choice.to_string(), LayerOverlap::Predicted(Some(self.cost))));
                continue;
            };
            let groups = self.arguments.groups.iter();
            asked.extend(groups.map(|groups| (choice.to_string(), named(*policy, groups.clone()))));
        }
        let mut variants: Vec<Variant<M>> = Vec::new();
        for (overlap, how) in asked {
            let planned = self.passes(machine, &how)?;
            if !variants.iter().any(|variant| variant.overlap == overlap && variant.planned == planned) {
                variants.push(self.prepare(&group, overlap, planned, &mut tensors)?);
            }
        }
        let Some(tensors) = &tensors else { return Ok(Vec::new()) };
        peers.prepare(&peers::case(self.shape, self.spec.kind, self.spec.activations));
        for &pass in &self.arguments.passes {
            self.measure(machine, pass, &mut variants, tensors, peers)
                .map_err(|source| CliError::Run { source })?;
        }
        let all: Vec<_> =
            variants.into_iter().map(|variant| joined(variant.measured())).collect::<Result<_, _>>()?;
        let all: Vec<Measured> = all.into_iter().flatten().collect();
        let Some(plain) = all.first() else { return Ok(Vec::new()) };
        let rows = self
            .arguments
            .passes
            .iter()
            .flat_map(|&pass| all.iter().filter_map(move |measured| self.row(pass, measured, plain)));
        Ok(rows.collect())
    }

    /// What becomes of the gradient of the weight.
    fn gradient(&self) -> LayerGradient {
        self.arguments.gradient.gradient(self.spec.dtype)
    }

    fn passes<M: Machine>(&self, machine: &M, overlap: &LayerOverlap) -> Result<PlannedPasses, CliError> {
        let machine = LinearMachine { tuned: Some(self.tuned.clone()), ..machine.linear(self.tp_size) };
        overlap
            .passes(&machine, self.spec, self.gradient())
            .map_err(|error| CliError::flag("--shapes", self.shape.to_string(), error))
    }

    /// A layer that runs so, with its results checked.
    fn prepare<M: Machine>(
        &self,
        group: &Group<M>,
        overlap: String,
        planned: PlannedPasses,
        tensors: &mut Option<Tensors<M>>,
    ) -> Result<Variant<M>, CliError> {
        let failed = |source| CliError::Run { source };
        let norm = self.arguments.rms_norm.then_some(NORM);
        let layer = Layer::new(group, planned.clone(), self.gradient(), norm);
        // Other ranks wait for this one by now: they are to hear of it.
        let mut layer = layer.map_err(|error| failed(group.fail_with(error)))?;
        let tensors = match tensors {
            Some(tensors) => tensors,
            None => tensors.insert(self.upload(&layer)?),
        };
        layer.bind_weight(&tensors.weight, tensors.bias.as_ref()).map_err(failed)?;
        let sums = self.zeros(&layer).map_err(failed)?;
        if let Some(sums) = &sums {
            layer.bind_main_grad(&sums.weight, sums.bias.as_ref()).map_err(failed)?;
        }
        let (checked, bits) = self.check(&mut layer, tensors, sums.as_ref(), &planned.forward.plan)?;
        Ok(Variant { overlap, planned, layer, checked, bits, passes: Vec::new() })
    }

    /// Times a pass in all variants, those of the peers too, a run of each in turn.
    fn measure<M: Machine>(
        &self,
        machine: &M,
        pass: BenchTpPass,
        variants: &mut [Variant<M>],
        tensors: &Tensors<M>,
        peers: &mut Peers<PeerResult>,
    ) -> Result<(), ExecError> {
        for variant in &mut *variants {
            let PlannedPass { plan, policy } = match pass {
                BenchTpPass::Forward => &variant.planned.forward,
                BenchTpPass::Backward => &variant.planned.backward,
            };
            let policy = *policy;
            let in_columns = plan.travels_in_columns(direction(pass)) && !policy.is_fused();
            let groups = if in_columns { plan.sum_groups() } else { plan.groups() };
            let (detailed, whole) = (Vec::new(), Vec::new());
            variant.passes.push(MeasuredPass { pass, policy, groups, in_columns, detailed, whole });
        }
        let of_peers = peers.those(|known| known.pass == pass);
        // A variant's runs with the times of all operations and those without are interleaved as well: nobody runs behind itself alone.
        let ours = 2 * variants.len();
        for run in 0..WARM_UPS + self.arguments.iterations as usize {
            for next in run_order(run, ours + of_peers.len()) {
                if next >= ours {
                    peers.run(of_peers[next - ours], run >= WARM_UPS);
                    continue;
                }
                let Variant { layer, passes, .. } = &mut variants[next / 2];
                let Some(MeasuredPass { detailed, whole, .. }) = passes.last_mut() else { continue };
                let (times, timelines) = match next % 2 {
                    0 => (RunTimes::Operations, detailed),
                    _ => (RunTimes::Whole, whole),
                };
                layer.set_timing(times);
                machine.barrier("a run")?;
                let done = match pass {
                    BenchTpPass::Forward => layer.forward(&tensors.x)?,
                    BenchTpPass::Backward => layer.backward(&tensors.x, &tensors.dy)?,
                };
                if run >= WARM_UPS {
                    timelines.push(done.timeline);
                }
            }
        }
        Ok(())
    }

    fn upload<M: Machine>(&self, layer: &Layer<M>) -> Result<Tensors<M>, CliError> {
        let scatter = |tensor, whole: &HostTensor| {
            layer.scatter(tensor, whole).map_err(|source| CliError::Run { source })
        };
        // There is a dy: the inputs are those of a backward.
        let dy = self.inputs.dy.as_ref().unwrap_or(&self.inputs.x);
        Ok(Tensors {
            x: scatter(LinearTensor::Input, &self.inputs.x)?,
            dy: scatter(LinearTensor::Output, dy)?,
            weight: scatter(LinearTensor::Weight, &self.inputs.weight)?,
            bias: self.inputs.bias.as_ref().map(|bias| scatter(LinearTensor::Bias, bias)).transpose()?,
        })
    }

    /// So that the gradient of the first backward can be distinguished.
    fn zeros<M: Machine>(&self, layer: &Layer<M>) -> Result<Option<Sums<M>>, ExecError> {
        let LayerGradient::Accumulated(dtype) = self.gradient() else { return Ok(None) };
        let LinearSpec { out_features, in_features, has_bias, .. } = self.spec;
        let zeros = |tensor, shape: Vec<usize>| layer.scatter(tensor, &HostTensor::zeros(shape, dtype));
        Ok(Some(Sums {
            weight: zeros(LinearTensor::Weight, vec![out_features, in_features])?,
            bias: has_bias.then(|| zeros(LinearTensor::Bias, vec![out_features])).transpose()?,
        }))
    }

    /// Runs each pass once and compares a sample of all results with f64; and what distinguishes these bits from others, by rank.
    fn check<M: Machine>(
        &self,
        layer: &mut Layer<M>,
        tensors: &Tensors<M>,
        sums: Option<&Sums<M>>,
        plan: &LinearPlan,
    ) -> Result<(Result<f64, WrongResult>, Vec<u64>), CliError> {
        let failed = |source| CliError::Run { source };
        let First { y, dx, inputs, norm } =
            layer.first(&tensors.x, &tensors.dy, self.inputs, self.processes).map_err(failed)?;
        let outputs = || -> Result<Vec<LinearOutputs>, ExecError> {
            let (ys, dxs) = (layer.download(&y)?, layer.download(&dx)?);
            // Added to, or written; a frozen weight has none.
            let written = if sums.is_none() { layer.weight_gradient() } else { None };
            let gradients = match (sums, &written) {
                (Some(sums), _) => [Some(&sums.weight), sums.bias.as_ref()],
                (None, Some((weight, bias))) => [Some(weight), bias.as_ref()],
                (None, None) => [None; 2],
            };
            let downloaded = |part: Option<&RankBuffers<M>>| match part {
                Some(part) => Ok(layer.download(part)?.into_iter().map(Some).collect()),
                None => Ok::<_, ExecError>(vec![None; ys.len()]),
            };
            let (dweights, dbiases) = (downloaded(gradients[0])?, downloaded(gradients[1])?);
            let all = ys.into_iter().zip(dxs).zip(dweights).zip(dbiases);
            let outputs = |(((y, dx), dweight), dbias)| LinearOutputs { y, dx: Some(dx), dweight, dbias };
            Ok(all.map(outputs).collect())
        };
        let outputs = outputs().map_err(failed)?;
        // What is added to began as zeros.
        let gradient = match self.gradient() {
            LayerGradient::Frozen => WeightGradient::Frozen,
            _ => WeightGradient::Written,
        };
        let (sample, rounding) = (LinearSample::Spread(SAMPLED), super::rounding(self.transport));
        let of_rank = |(rank, outputs): (usize, &LinearOutputs)| {
            check_linear_part(plan, rank, &inputs, gradient, outputs, sample, rounding)
                .map_err(|reason| reason.of_rank(rank))
        };
        let mut checks = layer.ranks().zip(&outputs).map(of_rank);
        let checked = norm.and_then(|norm| checks.try_fold(norm, |worst, share| Ok(f64::max(worst, share?))));
        Ok((checked, outputs.par_iter().map(digest).collect()))
    }

    fn row(&self, pass: BenchTpPass, measured: &Measured, of_plain: &Measured) -> Option<LinearRow> {
        let of = |measured: &Measured| measured.passes.iter().find(|measured| measured.pass == pass).cloned();
        let (runs, plain) = (of(measured)?, of(of_plain)?);
        let (own_seconds, plain_seconds) = (runs.seconds(), plain.seconds());
        let (statistics, sequential) = (Statistics::of(&own_seconds)?, Statistics::of(&plain_seconds)?);
        let of_ranks = Parts::of_ranks(&plain.detailed);
        let ideal = Parts::ideal_of_slowest(&of_ranks, self.spec.kind, pass);
        let (own, plain) = (Parts::mean(&Parts::of_ranks(&runs.detailed)), Parts::mean(&of_ranks));
        let last = runs.detailed.last()?.clone();
        // Times of a GPU's kernel that waits for rows itself do not distinguish its waits from its work.
        let gathers = GemmCollective::of_pass(&self.spec, direction(pass)) == Some(GemmCollective::AllGather);
        let waits = gathers && runs.policy.is_in_waves() && self.arguments.device == Device::Cuda;
        let hidden = match runs.policy.is_fused() || waits {
            true => Hidden::of_fused(Parts::least_communication(&of_ranks), &plain_seconds, &own_seconds)?,
            false => Hidden::of(&runs.detailed)?,
        };
        let hideable = sequential.median - ideal;
        let hides = measured.overlap != OverlapPolicy::SEQUENTIAL.to_string()
            && hidden.communication_seconds > 0.0
            && hideable > LEAST_HIDEABLE * ideal;
        let efficiency = hides.then(|| (sequential.median - statistics.median) / hideable);
        let efficiency_noise = hides.then(|| noise(&saved(&plain_seconds, &own_seconds)) / hideable);
        let hidden_noise = hidden.share().map(|_| hidden.noise);
        let speedup = sequential.median / statistics.median;
        let has_one = pass == BenchTpPass::Forward || self.gradient() == LayerGradient::Frozen;
        let products = if has_one { 1.0 } else { 2.0 };
        let flops = products
            * 2.0
            * (self.spec.tokens * self.spec.in_features) as f64
            * self.spec.out_features as f64;
        Some(LinearRow {
            by: "counterpoint".to_owned(),
            kind: self.spec.kind,
            behind: self.arguments.rms_norm.then(|| "rms-norm".to_owned()),
            pass,
            activations: self.spec.activations,
            shape: self.shape,
            ranks: self.tp_size,
            device: self.device.to_owned(),
            connections: connections::here(),
            overlap: measured.overlap.clone(),
            policy: runs.policy.to_string(),
            transport: self.transport.to_string(),
            groups: runs.groups,
            in_columns: runs.in_columns,
            tflops: flops / self.tp_size as f64 / statistics.median / 1e12,
            seconds: statistics,
            sequential_seconds: sequential.median,
            ideal_seconds: ideal,
            efficiency: figure(efficiency, efficiency_noise),
            efficiency_noise,
            speedup,
            hidden: figure(hidden.share(), hidden_noise),
            hidden_noise,
            dtype: dtype_name(self.spec.dtype).to_owned(),
            product_seconds: own.product,
            weight_gradient_seconds: own.weight_gradient,
            bias_gradient_seconds: own.bias_gradient,
            weight_gradient_slowdown: (plain.weight_gradient > 0.0)
                .then_some(own.weight_gradient / plain.weight_gradient),
            gather_seconds: own.gather,
            reduce_seconds: own.reduce,
            spread_seconds: own.spread,
            communication_seconds: hidden.communication_seconds,
            exposed_seconds: hidden.exposed_seconds,
            of_bound: measured.checked.clone().unwrap_or(f64::INFINITY),
            bits: measured.bits_in_words(),
            last,
            wrong: match (&measured.checked, measured.bits == of_plain.bits) {
                (Err(reason), _) => Some(reason.to_string()),
                (Ok(_), false) => Some(WrongResult::OtherBits.to_string()),
                (Ok(_), true) => None,
            },
        })
    }
}

/// Which pass of a layer it is.
fn direction(pass: BenchTpPass) -> LinearDirection {
    match pass {
        BenchTpPass::Forward => LinearDirection::Forward,
        BenchTpPass::Backward => LinearDirection::Backward { weight_gradient: true },
    }
}
