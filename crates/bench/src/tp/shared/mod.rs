//! `bench tp --shared-input`: column-parallel layers of one input, such as q, k and v, together and each by itself.

mod row;
mod variant;

use std::sync::Arc;

use counterpoint_choose::{LayerGroups, TunedHere};
use counterpoint_console::{
    self as console, CliError, FlagFault, Progress, Schema, arguments::OverlapChoice, launched::gather,
    rank_machine::RankMachine, tuned,
};
use counterpoint_cost::CostModel;
use counterpoint_cuda::TransportKind;
use counterpoint_exec::{
    CpuMachine, ExecError, Group, LayerGradient, LayerOverlap, LinearInputs, LinearLayer, Machine,
    RankBuffers, RunConfig, RunTimes, SharedInputLinear, WorldConfig, random_linear_inputs,
};
use counterpoint_measure::Processes;
use counterpoint_plan::{LinearSpec, WaveGroups};
use counterpoint_reference::WrongResult;
use counterpoint_schedule::OverlapPolicy;

use self::row::{SharedRow, row};
use self::variant::worse;
use super::{cost_of, measured::slowest};
use crate::arguments::{BenchTpArguments, BenchTpPass, LayerShape};
use crate::interleaved::run_order;
use crate::ranks::BenchRanks;
use crate::rows::Rows;

const WARM_UPS: usize = 3;

/// Measures `layers` layers of one input of every shape and prints them; `specs` are of layers of which each has them all.
pub(super) fn run(
    arguments: &BenchTpArguments,
    layers: usize,
    (machines, tp_size): (&[(TransportKind, BenchRanks)], usize),
    specs: &[(LayerShape, LinearSpec)],
) -> Result<(), CliError> {
    let Some((_, first)) = machines.first() else { return Ok(()) };
    let fused = arguments.overlap.iter().find_map(|choice| match choice {
        OverlapChoice::Named(policy) if policy.is_fused() => Some(policy.to_string()),
        _ => None,
    });
    if let Some(value) = fused {
        return Err(CliError::flag("--overlap", value, FlagFault::OneProduct));
    }
    let ranks = console::count(tp_size, "rank");
    let title = format!("{layers} column-parallel layers of one input on {}, {ranks}", first.name());
    let schema = Schema::BenchTpSharedInput;
    let mut shown = Rows::begin(first.prints(), || Ok(title), schema, arguments.json)?;
    let kept = tuned::kept()?;
    first.agree("what was tuned and kept", &kept.to_json())?;
    let progress = Progress::new();
    for (shape, spec) in specs {
        let spec = LinearSpec { out_features: spec.out_features.saturating_mul(layers), ..*spec };
        let inputs = random_linear_inputs(&spec, None, spec.tokens as u64, true);
        for (transport, machine) in machines {
            progress.step(format!("{layers} x {shape} {transport}"));
            let case = Shared {
                arguments,
                spec,
                layers,
                shape: *shape,
                tp_size,
                transport: *transport,
                cost: cost_of(arguments, machine, tp_size)?,
                device: &machine.name(),
                inputs: &inputs,
                processes: machine.processes(),
                tuned: Arc::new(TunedHere {
                    place: machine.tuned_place(arguments.slow_link),
                    plans: kept.clone(),
                }),
            };
            case.measure(machine)?.iter().try_for_each(|row| shown.add(row))?;
        }
    }
    drop(progress);
    shown.end("", "results out of bounds against f64")
}

/// Layers of one input on one machine.
struct Shared<'a> {
    arguments: &'a BenchTpArguments,
    /// Of all of them as one layer: every rank has its part of the first, then its part of the second, and so on.
    spec: LinearSpec,
    layers: usize,
    /// Of each layer.
    shape: LayerShape,
    tp_size: usize,
    transport: TransportKind,
    cost: CostModel,
    device: &'a str,
    inputs: &'a LinearInputs,
    processes: Processes<'a>,
    tuned: Arc<TunedHere>,
}

/// Layers in one of the variants that are compared.
enum Layers<M: Machine> {
    Together(Box<SharedInputLinear<M>>),
    Apart(Vec<LinearLayer<M>>),
}

struct Variant<M: Machine> {
    overlap: String,
    /// Of forward and backward: the policy, and the number of groups.
    passes: [(OverlapPolicy, usize); 2],
    layers: Layers<M>,
    checked: Result<f64, WrongResult>,
    bits: Vec<u64>,
    /// Of each pass that is timed.
    seconds: Vec<Vec<f64>>,
}

/// The tensors that all variants use; of each layer, but for `x`.
struct Tensors<M: Machine> {
    x: RankBuffers<M>,
    dys: Vec<RankBuffers<M>>,
    weights: Vec<RankBuffers<M>>,
    biases: Vec<RankBuffers<M>>,
}

impl Shared<'_> {
    fn measure(&self, ranks: &BenchRanks) -> Result<Vec<SharedRow>, CliError> {
        match ranks {
            BenchRanks::Machine(RankMachine::Cpu(_)) => {
                let ranks = CpuMachine::new(0, self.arguments.slow_link);
                self.measure_on(&ranks.map_err(|source| CliError::Run { source })?)
            }
            BenchRanks::Machine(RankMachine::Cuda(gpus)) => self.measure_on(gpus),
            BenchRanks::Machine(RankMachine::Process(process)) => self.measure_on(process.machine()),
            BenchRanks::CpuProcess(_, machine) => self.measure_on(machine),
        }
    }

    /// Rows of all passes: layers that share nothing, those that share their input with nothing side by side, and under each policy.
    fn measure_on<M: Machine>(&self, machine: &M) -> Result<Vec<SharedRow>, CliError> {
        let failed = |source| CliError::Run { source };
        let config =
            WorldConfig { limit: RunConfig::default().world.limit, poison: false, ..WorldConfig::default() };
        let group = Group::connect(machine, self.tp_size, config).map_err(failed)?;
        let group = group.with_tuned(self.tuned.clone());
        let parts = self.parts().map_err(failed)?;
        let sequential = OverlapPolicy::SEQUENTIAL;
        let named = |policy, groups: LayerGroups| LayerOverlap::Policy(policy, groups, self.cost);
        let mut asked = vec![(sequential.to_string(), named(sequential, WaveGroups::Fixed(1).into()))];
        for choice in &self.arguments.overlap {
            let how = match choice {
                OverlapChoice::Named(policy) => named(*policy, LayerGroups::Auto),
                OverlapChoice::Auto => LayerOverlap::Predicted(Some(self.cost)),
            };
            asked.push((choice.to_string(), how));
        }
        let mut variants = vec![self.apart(&group, &parts).map_err(failed)?];
        let mut tensors = None;
        for (overlap, how) in asked {
            variants.push(self.together(&group, overlap, how, &parts, &mut tensors).map_err(failed)?);
        }
        let Some(tensors) = &tensors else { return Ok(Vec::new()) };
        for &pass in &self.arguments.passes {
            self.time(machine, pass, &mut variants, tensors).map_err(failed)?;
        }
        variants.iter_mut().try_for_each(|variant| self.join(variant))?;
        let variants = &variants;
        let passes = self.arguments.passes.iter().enumerate();
        let rows = passes.flat_map(|(at, &pass)| {
            variants.iter().filter_map(move |variant| row(self, pass, at, variant, variants))
        });
        Ok(rows.collect())
    }

    /// What the ranks of all processes found: the slowest of each run, and the worst result.
    fn join<M: Machine>(&self, variant: &mut Variant<M>) -> Result<(), CliError> {
        let Processes::Each(rendezvous) = self.processes else { return Ok(()) };
        let own = (variant.checked.clone(), std::mem::take(&mut variant.bits), variant.seconds.clone());
        for (checked, bits, seconds) in gather(rendezvous, "times", &own)? {
            variant.checked = worse(variant.checked.clone(), checked);
            variant.bits.extend(bits);
            for (longest, took) in variant.seconds.iter_mut().flatten().zip(seconds.into_iter().flatten()) {
                *longest = longest.max(took);
            }
        }
        Ok(())
    }

    /// The number of the first rank that is in this process.
    fn first_rank(&self) -> usize {
        match self.processes {
            Processes::One => 0,
            Processes::Each(rendezvous) => rendezvous.rank(),
        }
    }

    fn gradient(&self) -> LayerGradient {
        self.arguments.gradient.gradient(self.spec.dtype)
    }

    /// Times a pass in all variants, a run of each in turn.
    fn time<M: Machine>(
        &self,
        machine: &M,
        pass: BenchTpPass,
        variants: &mut [Variant<M>],
        tensors: &Tensors<M>,
    ) -> Result<(), ExecError> {
        let Tensors { x, dys, .. } = tensors;
        variants.iter_mut().for_each(|variant| variant.seconds.push(Vec::new()));
        for run in 0..WARM_UPS + self.arguments.iterations as usize {
            for next in run_order(run, variants.len()) {
                let Variant { layers, seconds, .. } = &mut variants[next];
                machine.barrier("a run")?;
                let took = match (layers, pass) {
                    (Layers::Together(layers), BenchTpPass::Forward) => {
                        layers.set_timing(RunTimes::Whole);
                        slowest(&layers.forward(x)?.timeline)
                    }
                    (Layers::Together(layers), BenchTpPass::Backward) => {
                        layers.set_timing(RunTimes::Whole);
                        slowest(&layers.backward(x, dys)?.timeline)
                    }
                    (Layers::Apart(layers), pass) => {
                        let mut sum = 0.0;
                        for (layer, dy) in layers.iter_mut().zip(dys) {
                            layer.set_timing(RunTimes::Whole);
                            let done = match pass {
                                BenchTpPass::Forward => layer.forward(x)?,
                                BenchTpPass::Backward => layer.backward(x, dy)?,
                            };
                            sum += slowest(&done.timeline);
                        }
                        sum
                    }
                };
                if let Some(seconds) = seconds.last_mut().filter(|_| run >= WARM_UPS) {
                    seconds.push(took);
                }
            }
        }
        Ok(())
    }
}
