//! This process as one rank of several that a launcher started. Rank 0 reads the mask, measures, writes and prints; every
//! rank plans for itself, which gives the same plan, and reads its own rows of the input.

use std::sync::Arc;

use counterpoint_choose::PlanConfig;
use counterpoint_console::{
    self as console, CliError, CommandLine, Progress,
    arguments::Device,
    device,
    launched::{as_rank, ended, gather, gpu_of_rank, refuse_other_sizes},
    mask_argument,
    output::Outputs,
    profile,
};
use counterpoint_cost::CostModel;
use counterpoint_cuda::{CudaProcess, Timing};
use counterpoint_exec::{
    AttentionInputs, ExecError, Facet, Launch, RankProblem, RanksRun, Rendezvous, RendezvousError, RunConfig,
    StoreFault, run_attention_process, run_attention_ranks,
};
use counterpoint_mask::Mask;
use counterpoint_measure::calibrate;
use counterpoint_plan::{AttentionSpec, Plan, Topology};
use counterpoint_schedule::{PassPolicies, PolicyError, RankTransport};

use super::process_inputs::agree_on_rows;
use super::tensors::Tensors;
use super::{
    FinishedRun, checked_outputs, pass, passes, placed, plan_config, policies, refuse_what_does_not_fit,
    refuse_what_the_device_lacks, run_config, solve,
};
use crate::arguments::AttentionArguments;

/// Joins the other processes and runs this one's rank. Whatever ends it ends the others too.
pub(super) fn run(
    launch: &Launch,
    arguments: AttentionArguments,
    line: &CommandLine,
) -> Result<(), CliError> {
    as_rank(launch, line, arguments.run.limit, |rendezvous| {
        refuse_other_sizes(launch, "--cp-size", arguments.cp_size)?;
        Rank { launch, rendezvous, arguments: &arguments }.run()
    })
}

/// Where this process's rank is.
enum ProcessMachine {
    /// On this host's cores.
    Cpu,
    /// On one of its GPUs.
    Cuda(CudaProcess),
}

struct Rank<'a> {
    launch: &'a Launch,
    rendezvous: &'a Arc<Rendezvous>,
    arguments: &'a AttentionArguments,
}

impl Rank<'_> {
    fn run(&self) -> Result<(), CliError> {
        let Self { rendezvous, arguments, .. } = *self;
        let progress = Progress::new();
        let mask = self.mask()?;
        let mut tensors = Tensors::of(arguments, &mask)?;
        let spec = *tensors.spec();
        refuse_what_the_device_lacks(arguments, spec.dtype)?;
        let outputs = if self.is_first() {
            refuse_what_does_not_fit(arguments, &mask, &spec)?;
            checked_outputs(arguments)?
        } else {
            Outputs::default()
        };
        let (topology, link) = placed(arguments)?;
        let machine = self.machine(topology)?;
        progress.step("measuring this machine");
        let config = plan_config(arguments, topology, self.cost(&machine, &spec)?);
        progress.step("planning");
        let name = match &machine {
            ProcessMachine::Cpu => device::cpu_name(),
            ProcessMachine::Cuda(machine) => machine.device().properties().name.clone(),
        };
        let solution = solve(arguments, &mask, &spec, &config, &name)?;
        let fingerprint = Facet::new("the plan", solution.plan.fingerprint());
        rendezvous.agree("plan", &[fingerprint]).map_err(ended)?;

        let policies = self.policies((&solution.plan, &spec), &config, &machine)?;

        progress.step("reading tensors");
        let plan = &solution.plan;
        let inputs = tensors.read_rank(arguments, &plan.ranks[rendezvous.rank()])?;
        agree_on_rows(rendezvous, &mut tensors, &inputs, |tensors, rank| {
            tensors.read_rank(arguments, &plan.ranks[rank])
        })?;
        progress.step(format!("{} on {}", passes(arguments), console::count(arguments.cp_size, "rank")));
        let problem = RankProblem { plan, spec: &spec, pass: pass(arguments), host_bytes: 0 };
        let run = self
            .run_ranks(&machine, &problem, inputs, &run_config(arguments, policies, link))
            .map_err(|error| ended(rendezvous.fail(error)))?;
        let crossed = self.crossed_bytes(&machine)?;
        let Some(run) = run.gather(rendezvous, plan).map_err(ended)? else { return Ok(()) };
        let has_unused_dout = tensors.has_unused_dout();
        let over = FinishedRun {
            crossed,
            policies,
            arguments,
            mask: &mask,
            spec,
            config,
            solution,
            run,
            has_unused_dout,
        };
        over.conclude(&outputs, progress, || tensors.read(arguments, &mask))
    }

    /// This process's rank of the device.
    fn machine(&self, topology: Topology) -> Result<ProcessMachine, CliError> {
        let Self { launch, rendezvous, arguments } = *self;
        Ok(match arguments.run.device {
            Device::Cpu => ProcessMachine::Cpu,
            Device::Cuda => {
                let (timing, transport) = (Timing::Spans, arguments.run.transport);
                ProcessMachine::Cuda(gpu_of_rank(rendezvous, launch.local_rank, timing, transport, topology)?)
            }
        })
    }

    fn run_ranks(
        &self,
        machine: &ProcessMachine,
        problem: &RankProblem<'_>,
        inputs: AttentionInputs,
        config: &RunConfig,
    ) -> Result<RanksRun, ExecError> {
        let Self { launch, rendezvous, .. } = *self;
        match machine {
            ProcessMachine::Cuda(machine) => run_attention_ranks(machine, problem, config, vec![inputs]),
            ProcessMachine::Cpu => {
                run_attention_process(launch.launcher, rendezvous.clone(), problem, config, inputs)
            }
        }
    }

    /// Bytes that all ranks have sent between nodes in one run, where they are counted.
    fn crossed_bytes(&self, machine: &ProcessMachine) -> Result<Option<u64>, CliError> {
        let ProcessMachine::Cuda(machine) = machine else { return Ok(None) };
        let Some(own) = machine.sent_between_nodes() else { return Ok(None) };
        let measurement = run_config(self.arguments, PassPolicies::default(), None).measurement;
        let all: Vec<u64> = gather(self.rendezvous, "bytes between nodes", &own)?;
        Ok(Some(all.into_iter().sum::<u64>() / (measurement.warmups + measurement.samples) as u64))
    }

    /// The policies, as rank 0 picks them.
    fn policies(
        &self,
        planned: (&Plan, &AttentionSpec),
        config: &PlanConfig,
        machine: &ProcessMachine,
    ) -> Result<PassPolicies, CliError> {
        let transport = match machine {
            ProcessMachine::Cpu => RankTransport::Cpu,
            ProcessMachine::Cuda(machine) => machine.transport().transport(),
        };
        let pick = || Ok(policies(self.arguments, planned, config, transport)?.to_string());
        let names = self.made_by_first("overlap", pick)?;
        names.parse().map_err(|error: PolicyError| self.broken(&error))
    }

    fn is_first(&self) -> bool {
        self.rendezvous.rank() == 0
    }

    /// As rank 0 reads it.
    fn mask(&self) -> Result<Mask, CliError> {
        let json = self.made_by_first("mask", || Ok(mask_argument::load(&self.arguments.mask)?.to_json()))?;
        Mask::from_json(&json)
            .map_err(|source| CliError::MaskExpression { expression: self.arguments.mask.clone(), source })
    }

    /// As rank 0 measures it: equal plans need equal costs.
    fn cost(&self, machine: &ProcessMachine, spec: &AttentionSpec) -> Result<CostModel, CliError> {
        let measure = || {
            let named = self.arguments.planning.profile.as_deref();
            let cost = match machine {
                ProcessMachine::Cpu => {
                    let named = profile::named(named, &device::cpu_name())?;
                    named.map_or_else(|| calibrate(spec, self.arguments.cp_size), |profile| profile.cost)
                }
                ProcessMachine::Cuda(machine) => {
                    let profile = profile::of_machine(named, &machine.device().properties().name)?;
                    machine.cost(profile.as_ref().map(|profile| &profile.cost))
                }
            };
            serde_json::to_string(&cost).map_err(|error| self.broken(&error))
        };
        let json = self.made_by_first("cost", measure)?;
        serde_json::from_str(&json).map_err(|error| self.broken(&error))
    }

    /// What rank 0 makes, in text. Rank 0 itself goes through the text too, so that all have the same to the last bit.
    fn made_by_first(
        &self,
        key: &str,
        make: impl FnOnce() -> Result<String, CliError>,
    ) -> Result<String, CliError> {
        if self.is_first() {
            let text = make()?;
            self.rendezvous.set(key, text.as_bytes()).map_err(ended)?;
            return Ok(text);
        }
        let bytes = self.rendezvous.get(key, Some(0)).map_err(ended)?;
        String::from_utf8(bytes).map_err(|error| self.broken(&error))
    }

    fn broken(&self, error: &dyn std::error::Error) -> CliError {
        let (rank, reason) = (self.rendezvous.rank(), StoreFault::value(error));
        ended(RendezvousError::Broken { rank, reason }.into())
    }
}
