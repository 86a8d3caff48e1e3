//! The ranks that `--device` names: threads on CPUs or GPUs, or this process as one of several.

use std::error::Error;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use counterpoint_choose::TunedPlace;
use counterpoint_cost::{CostModel, MachineProfile};
use counterpoint_cuda::{CudaMachine, CudaProcess, PlainProducts, Timing, TransportKind};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, CpuMachine, ExecError, Facet, Launch, Machine, Pass, PreparedAttention,
    RankProblem, RanksRun, Rendezvous, RunConfig, RunTimes, SlowLink,
};
use counterpoint_measure::calibrate;
use counterpoint_plan::{AttentionSpec, Plan, Topology};
use counterpoint_schedule::{RankTransport, Timeline};

use crate::FlagFault;
use crate::arguments::Device;
use crate::device;
use crate::error::CliError;
use crate::launched::{agree, gather, gpu_of_rank};
use crate::profile;
use crate::tuned;

/// What `--device` names.
pub enum RankMachine {
    /// Ranks are threads, on the CPU of this name.
    Cpu(String),
    /// Ranks are threads, on GPUs.
    Cuda(CudaMachine),
    /// Ranks are processes, of which this is one, on GPUs.
    Process(Box<RankProcess>),
}

/// This process's rank.
pub struct RankProcess {
    rendezvous: Arc<Rendezvous>,
    machine: CudaProcess,
    /// What rank 0 runs alone.
    alone: CudaMachine,
}

/// Starts the threads that references and checks compute on. Where they are first needed it is too late for an error.
fn start_threads() -> Result<(), CliError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    match rayon::ThreadPoolBuilder::new().build_global() {
        // Without a source, they run already.
        Err(error) if error.source().is_some() => {
            Err(CliError::Threads { threads, reason: error.to_string() })
        }
        _ => Ok(()),
    }
}

impl RankMachine {
    /// The CPU, or as many GPUs as there are ranks, all of them for `None`.
    pub fn open(device: Device, cp_size: Option<usize>, transport: TransportKind) -> Result<Self, CliError> {
        start_threads()?;
        match (device, transport) {
            (Device::Cpu, TransportKind::Auto) => Ok(Self::Cpu(device::cpu_name())),
            (Device::Cpu, named) => Err(CliError::flag("--transport", named.to_string(), FlagFault::ForGpus)),
            (Device::Cuda, transport) => {
                let machine = CudaMachine::for_ranks(cp_size.unwrap_or(usize::MAX), Timing::Spans)
                    .and_then(|machine| machine.with_transport(transport));
                machine.map(Self::Cuda).map_err(|source| CliError::Cuda { source })
            }
        }
    }

    /// The same; what moves which rows between GPUs is chosen as they were measured, in the profile that is `named` or that was kept.
    pub fn measured(self, named: Option<&Path>) -> Result<Self, CliError> {
        let profile = self.profile(named)?;
        Ok(match (self, profile) {
            (Self::Cuda(machine), Some(profile)) => Self::Cuda(machine.with_profile(&profile)),
            (ranks, _) => ranks,
        })
    }

    /// The same, whose plain products are computed so.
    pub fn with_plain_products(self, by: PlainProducts) -> Result<Self, CliError> {
        match (self, by) {
            (Self::Cpu(_), PlainProducts::CublasLt) => {
                Err(CliError::flag("--plain-products", "cublaslt", FlagFault::ForGpus))
            }
            (Self::Cuda(machine), by) => Ok(Self::Cuda(machine.with_plain_products(by))),
            (Self::Process(process), by) => {
                let RankProcess { rendezvous, machine, alone } = *process;
                let machine = machine.with_plain_products(by);
                Ok(Self::Process(Box::new(RankProcess { rendezvous, machine, alone })))
            }
            (cpu, PlainProducts::Ours) => Ok(cpu),
        }
    }

    /// This process's rank of several.
    pub fn join(
        rendezvous: &Arc<Rendezvous>,
        launch: &Launch,
        transport: TransportKind,
        topology: Topology,
    ) -> Result<Self, CliError> {
        start_threads()?;
        let timing = Timing::Spans;
        let machine = gpu_of_rank(rendezvous, launch.local_rank, timing, transport, topology)?;
        let alone = CudaMachine::new(vec![machine.device().clone()], timing);
        let alone = alone.map_err(|source| CliError::Cuda { source })?;
        Ok(Self::Process(Box::new(RankProcess { rendezvous: rendezvous.clone(), machine, alone })))
    }

    /// Whether this process has the results, and prints what comes of them.
    pub fn prints(&self) -> bool {
        match self {
            Self::Cpu(_) | Self::Cuda(_) => true,
            Self::Process(process) => process.rendezvous.rank() == 0,
        }
    }

    /// Number of GPUs; 0 on the CPU.
    pub fn gpus(&self) -> usize {
        match self {
            Self::Cpu(_) => 0,
            Self::Cuda(machine) => machine.devices().len(),
            Self::Process(process) => process.rendezvous.world_size(),
        }
    }

    /// Where plans of linear layers are tuned and used: the device, and what moves rows, an imitated link by its figures.
    pub fn tuned_place(&self, slow_link: Option<SlowLink>) -> TunedPlace {
        let transport = match self {
            Self::Cpu(_) => return tuned::place_of_threads(slow_link),
            Self::Cuda(machine) => machine.transport().to_string(),
            Self::Process(process) => process.machine.transport().to_string(),
        };
        TunedPlace { device: self.name().to_owned(), transport }
    }

    /// The name of the device, of the first of several.
    pub fn name(&self) -> &str {
        match self {
            Self::Cpu(name) => name,
            Self::Cuda(machine) => &machine.devices()[0].properties().name,
            Self::Process(process) => &process.machine.device().properties().name,
        }
    }

    /// What it was measured to do: as the file says that was named, or on GPUs the one that was kept. The CPU's rates depend on
    /// shapes so much that a command rather measures its own.
    pub fn profile(&self, named: Option<&Path>) -> Result<Option<MachineProfile>, CliError> {
        match self {
            Self::Cpu(name) => profile::named(named, name),
            Self::Cuda(_) => profile::of_machine(named, self.name()),
            Self::Process(_) => {
                let profile = profile::of_machine(named, self.name())?;
                // One that was measured and kept may be another on another host.
                let text = profile.as_ref().map_or_else(|| "none".to_owned(), MachineProfile::to_json);
                self.agree("the machine's profile", &text)?;
                Ok(profile)
            }
        }
    }

    /// Compares a text that decides what is computed, where ranks are processes.
    pub fn agree(&self, what: &str, text: &str) -> Result<(), CliError> {
        let Self::Process(process) = self else { return Ok(()) };
        agree(&process.rendezvous, what, text)
    }

    /// How its ranks exchange rows.
    pub fn transport(&self) -> RankTransport {
        match self {
            Self::Cpu(_) => RankTransport::Cpu,
            Self::Cuda(machine) => machine.transport().transport(),
            Self::Process(process) => process.machine.transport().transport(),
        }
    }

    /// What work costs on so many ranks of it: as the profile says. Without one it is measured on CPUs, for these very shapes,
    /// and estimated on GPUs.
    pub fn cost(&self, spec: &AttentionSpec, cp_size: usize, profile: Option<&MachineProfile>) -> CostModel {
        let measured = profile.map(|profile| &profile.cost);
        match self {
            Self::Cpu(_) => measured.copied().unwrap_or_else(|| calibrate(spec, cp_size)),
            Self::Cuda(machine) => machine.cost(measured, cp_size),
            Self::Process(process) => process.machine.cost(measured),
        }
    }

    /// Bytes of rows that this process has sent to other nodes so far; `None` where nobody counts them.
    pub fn sent_between_nodes(&self) -> Option<u64> {
        match self {
            Self::Cpu(_) | Self::Cuda(_) => None,
            Self::Process(process) => process.machine.sent_between_nodes(),
        }
    }

    /// Bytes that all processes have sent to other nodes since each had sent as many as `before`. All processes call it.
    pub fn crossed_since(&self, before: Option<u64>) -> Result<Option<u64>, CliError> {
        let (Self::Process(process), Some(before), Some(now)) = (self, before, self.sent_between_nodes())
        else {
            return Ok(None);
        };
        let all: Vec<u64> = gather(&process.rendezvous, "bytes between nodes", &(now - before))?;
        Ok(Some(all.into_iter().sum()))
    }

    /// Attention on it, ready to run again and again. A plan of one rank is for each GPU of this process by itself, for they are not
    /// equally fast; among processes it is for the one that has the results, and the others have none.
    pub fn prepare<'a>(
        &'a self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<Vec<Box<dyn AttentionRuns + 'a>>, ExecError> {
        let one = |runs| vec![runs];
        match self {
            Self::Cpu(_) => {
                let machine = CpuMachine::new(config.policy.sm_margin(), config.slow_link)?;
                RunsHere::boxed(Box::new(machine), plan, spec, inputs, config).map(one)
            }
            Self::Cuda(machine) if plan.cp_size() == 1 => {
                let alone = |machine| RunsHere::boxed(Box::new(machine), plan, spec, inputs, config);
                machine.each_alone().into_iter().map(alone).collect()
            }
            Self::Cuda(machine) => RunsHere::boxed(machine, plan, spec, inputs, config).map(one),
            Self::Process(process) => match (plan.cp_size(), self.prints()) {
                (1, true) => RunsHere::boxed(&process.alone, plan, spec, inputs, config).map(one),
                (1, false) => Ok(Vec::new()),
                _ => process.prepare(plan, spec, inputs, config).map(one),
            },
        }
    }
}

/// Attention that is ready to run, wherever its ranks are.
pub trait AttentionRuns: Send {
    /// Runs the forward, or the backward of the last forward, once; what the ranks of this process took.
    fn run(&mut self, pass: Pass) -> Result<Timeline, ExecError>;

    /// Which times runs take from the next one on.
    fn set_timing(&mut self, times: RunTimes);

    /// The results, in the process that has them, with the `times` of what was run.
    fn finish(self: Box<Self>, plan: &Plan, times: RanksRun) -> Result<Option<AttentionRun>, ExecError>;
}

fn run_pass<M: Machine>(
    prepared: &mut PreparedAttention<M>,
    machine: &M,
    pass: Pass,
) -> Result<Timeline, ExecError> {
    match pass {
        Pass::Forward => prepared.forward(machine),
        Pass::ForwardBackward => prepared.backward(machine),
    }
}

fn pass_of(inputs: &AttentionInputs) -> Pass {
    if inputs.dout.is_some() { Pass::ForwardBackward } else { Pass::Forward }
}

/// All ranks are in this process.
struct RunsHere<M: Machine, H: Deref<Target = M>> {
    machine: H,
    prepared: PreparedAttention<M>,
}

impl<'a, M: Machine + 'a, H: Deref<Target = M> + Send + 'a> RunsHere<M, H> {
    fn boxed(
        machine: H,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<Box<dyn AttentionRuns + 'a>, ExecError> {
        let problem = RankProblem { plan, spec, pass: pass_of(inputs), host_bytes: inputs.bytes() };
        let prepared = PreparedAttention::new(&*machine, &problem, config, inputs.of_ranks(plan)?)?;
        Ok(Box::new(Self { machine, prepared }))
    }
}

impl<M: Machine, H: Deref<Target = M> + Send> AttentionRuns for RunsHere<M, H> {
    fn run(&mut self, pass: Pass) -> Result<Timeline, ExecError> {
        run_pass(&mut self.prepared, &self.machine, pass)
    }

    fn set_timing(&mut self, times: RunTimes) {
        self.prepared.set_timing(times);
    }

    fn finish(self: Box<Self>, plan: &Plan, times: RanksRun) -> Result<Option<AttentionRun>, ExecError> {
        RanksRun { outputs: self.prepared.outputs()?, ..times }.into_whole(plan).map(Some)
    }
}

/// This process has one of the ranks.
struct RunsOfProcess<'a> {
    process: &'a RankProcess,
    prepared: PreparedAttention<CudaProcess>,
}

impl RunsOfProcess<'_> {
    fn reported<T>(&self, result: Result<T, ExecError>) -> Result<T, ExecError> {
        result.map_err(|error| self.process.rendezvous.fail(error))
    }
}

impl AttentionRuns for RunsOfProcess<'_> {
    fn run(&mut self, pass: Pass) -> Result<Timeline, ExecError> {
        let timeline = run_pass(&mut self.prepared, &self.process.machine, pass);
        self.reported(timeline)
    }

    fn set_timing(&mut self, times: RunTimes) {
        self.prepared.set_timing(times);
    }

    fn finish(self: Box<Self>, plan: &Plan, times: RanksRun) -> Result<Option<AttentionRun>, ExecError> {
        let outputs = self.reported(self.prepared.outputs())?;
        RanksRun { outputs, ..times }.gather(&self.process.rendezvous, plan)
    }
}

impl RankProcess {
    /// What the rank lives on.
    pub fn machine(&self) -> &CudaProcess {
        &self.machine
    }

    /// The rendezvous with the others.
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    fn prepare(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<Box<dyn AttentionRuns + '_>, ExecError> {
        let fingerprint = Facet::new("the plan", plan.fingerprint());
        self.rendezvous.agree("plan", &[fingerprint])?;
        let problem = RankProblem { plan, spec, pass: pass_of(inputs), host_bytes: 0 };
        let own = inputs.of_rank(&plan.ranks[self.rendezvous.rank()])?;
        let prepared = PreparedAttention::new(&self.machine, &problem, config, vec![own]);
        let prepared = prepared.map_err(|error| self.rendezvous.fail(error))?;
        Ok(Box::new(RunsOfProcess { process: self, prepared }))
    }
}
