//! This process as one rank of several that a launcher started. Rank 0 reads the mask, measures, writes and prints; every
//! rank plans for itself, which gives the same plan, and reads its own rows of the input.

use std::sync::Arc;

use counterpoint_cuda::{CudaProcess, Timing};
use counterpoint_exec::{
    AttentionInputs, ExecError, Facet, Launch, Pass, RankProblem, RanksRun, Rendezvous, RendezvousError,
    SlowLink, TcpMachine, calibrate, run_attention_ranks,
};
#[cfg(feature = "mpi")]
use counterpoint_exec::{Launcher, MpiMachine};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, CostModel, Topology};

use super::tensors::Tensors;
use super::{
    Ended, checked_outputs, passes, placed, plan_config, refuse_what_does_not_fit,
    refuse_what_the_device_lacks, run_config, solve,
};
use crate::arguments::{AttentionArguments, Device};
use crate::command::launched::{as_rank, ended, gather, gpu_of_rank, refuse_other_sizes};
use crate::error::CliError;
use crate::output::Outputs;
use crate::progress::Progress;
use crate::{console, device, mask_argument, profile};

/// Joins the other processes and runs this one's rank. Whatever ends it ends the others too.
pub(super) fn run(launch: &Launch, arguments: &AttentionArguments) -> Result<(), CliError> {
    refuse_other_sizes(launch, "--cp-size", arguments.cp_size)?;
    as_rank(launch, arguments.run.limit, |rendezvous| Rank { launch, rendezvous, arguments }.run())
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
        rendezvous.agree("arguments", &facets(arguments)).map_err(ended)?;
        let mask = self.mask()?;
        let mut tensors = Tensors::of(arguments, &mask)?;
        let spec = *tensors.spec();
        refuse_what_the_device_lacks(arguments, spec.dtype)?;
        rendezvous.agree("tensors", &shape_facets(&spec)).map_err(ended)?;
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
        let solution = solve(arguments, &mask, &spec, &config)?;
        let fingerprint = Facet::new("the plan", solution.plan.fingerprint());
        rendezvous.agree("plan", &[fingerprint]).map_err(ended)?;

        progress.step("reading tensors");
        let plan = &solution.plan;
        let inputs = tensors.read_rank(arguments, &plan.ranks[rendezvous.rank()])?;
        progress.step(format!("{} on {}", passes(arguments), console::count(arguments.cp_size, "rank")));
        let pass = if arguments.run.backward { Pass::ForwardBackward } else { Pass::Forward };
        let problem = RankProblem { plan, spec: &spec, pass, host_bytes: 0 };
        let run = self
            .run_ranks(&machine, &problem, inputs, link)
            .map_err(|error| ended(rendezvous.fail(error)))?;
        let crossed = self.crossed_bytes(&machine)?;
        let Some(run) = run.gather(rendezvous, plan).map_err(ended)? else { return Ok(()) };
        let has_unused_dout = tensors.has_unused_dout();
        let over = Ended { crossed, arguments, mask: &mask, spec, config, solution, run, has_unused_dout };
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

    /// On CPUs through MPI where that was built in and started us, else through TCP.
    fn run_ranks(
        &self,
        machine: &ProcessMachine,
        problem: &RankProblem<'_>,
        inputs: AttentionInputs,
        link: Option<SlowLink>,
    ) -> Result<RanksRun, ExecError> {
        let Self { launch, rendezvous, arguments } = *self;
        let margin = arguments.run.overlap.policy().sm_margin();
        let config = run_config(arguments, link);
        if let ProcessMachine::Cuda(machine) = machine {
            return run_attention_ranks(machine, problem, &config, vec![inputs]);
        }
        match launch.launcher {
            #[cfg(feature = "mpi")]
            Launcher::OpenMpi | Launcher::Pmi => {
                let machine = MpiMachine::new(rendezvous.clone(), margin, link)?;
                run_attention_ranks(&machine, problem, &config, vec![inputs])
            }
            _ => {
                let machine = TcpMachine::new(rendezvous.clone(), margin, link)?;
                run_attention_ranks(&machine, problem, &config, vec![inputs])
            }
        }
    }

    /// Bytes that all ranks have sent between nodes in one run, where they are counted.
    fn crossed_bytes(&self, machine: &ProcessMachine) -> Result<Option<u64>, CliError> {
        let ProcessMachine::Cuda(machine) = machine else { return Ok(None) };
        let Some(own) = machine.sent_between_nodes() else { return Ok(None) };
        let config = run_config(self.arguments, None);
        let all: Vec<u64> = gather(self.rendezvous, "bytes between nodes", &own)?;
        Ok(Some(all.into_iter().sum::<u64>() / (config.warmups + config.samples) as u64))
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
        let bytes = self.rendezvous.get(key).map_err(ended)?;
        String::from_utf8(bytes).map_err(|error| self.broken(&error))
    }

    fn broken(&self, error: &dyn std::error::Error) -> CliError {
        let (rank, reason) = (self.rendezvous.rank(), error.to_string());
        ended(RendezvousError::Broken { rank, reason }.into())
    }
}

/// What all command lines must have alike: everything that changes what is computed.
fn facets(arguments: &AttentionArguments) -> Vec<Facet> {
    let AttentionArguments { mask, cp_size, nodes, planning, tensors, run, results } = arguments;
    let given = |flag: &str, value: &dyn std::fmt::Debug| Facet::new(flag, format!("{value:?}"));
    vec![
        Facet::new("the version of counterpoint", env!("CARGO_PKG_VERSION")),
        Facet::new("--mask", mask),
        Facet::new("--cp-size", cp_size),
        given("--chunk-size", &planning.chunk_size),
        given("--dispatch", &planning.dispatch),
        given("--stages", &planning.stages),
        given("--gradient-shares", &planning.gradient_shares),
        given("whether there is --input", &tensors.input.is_some()),
        given("--seqlen", &tensors.seqlen),
        given("--heads-q", &tensors.heads_q),
        given("--heads-kv", &tensors.heads_kv),
        given("--head-dim", &tensors.head_dim),
        given("--dtype", &tensors.dtype),
        given("--seed", &tensors.seed),
        given("--backward", &run.backward),
        given("--scale", &run.scale),
        given("--softcap", &run.softcap),
        given("--deterministic", &run.deterministic),
        given("--overlap", &run.overlap),
        given("--device", &run.device),
        given("--transport", &run.transport),
        given("--slow-link", &run.slow_link),
        given("--nodes", nodes),
        given("--slow-network", &run.slow_network),
        given("--exchange", &run.exchange),
        given("--check", &results.check),
    ]
}

/// What the files of all ranks must have alike.
fn shape_facets(spec: &AttentionSpec) -> Vec<Facet> {
    let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, dtype, scale, softcap, seqlen_sink, .. } =
        *spec;
    vec![
        Facet::new("the number of query heads", heads_q),
        Facet::new("the number of key heads", heads_kv),
        Facet::new("the length of a query's row", head_dim),
        Facet::new("the length of a value's row", head_dim_v),
        Facet::new("the element type", format!("{dtype:?}")),
        Facet::new("the scale", scale),
        Facet::new("the softcap", softcap),
        Facet::new("the number of sinks", seqlen_sink),
    ]
}
