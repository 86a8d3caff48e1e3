//! `counterpoint attention`: refuses what cannot run, plans, runs all ranks of this process or one, checks, writes and prints.

mod process;
mod process_inputs;
mod result;
mod tensors;

use counterpoint_choose::PlanConfig;
use counterpoint_console::{
    self as console, CliError, CommandLine, Progress, Schema, UsageFault,
    arguments::{Device, Exchange, dtype_name},
    device,
    launched::launch,
    mask_argument,
    nodes::{slow_link, topology},
    output::Outputs,
    overlap::Overlapped,
    prediction::predict,
    rank_machine::RankMachine,
    solution::Solution,
};
use counterpoint_cost::{CostModel, Link};
use counterpoint_exec::{
    AttentionInputs, AttentionRun, Measurement, Pass, RunConfig, SlowLink, available_memory, run_attention,
    run_attention_on,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, Plan, Planning, Topology};
use counterpoint_reference::{check_attention, reference_bytes};
use counterpoint_schedule::{GradientReduction, PassPolicies, RankTransport};

use self::result::AttentionResult;
use self::tensors::Tensors;
use crate::arguments::AttentionArguments;
use counterpoint_console::FlagFault;

/// `counterpoint attention`: all ranks in this process, or this process one of them.
pub(crate) fn run(arguments: AttentionArguments, line: &CommandLine) -> Result<(), CliError> {
    if let Some(launch) = launch()? {
        return process::run(&launch, arguments, line);
    }
    run_all(&arguments)
}

/// How gradients travel; `None` where there are none.
fn reduction(arguments: &AttentionArguments) -> Option<GradientReduction> {
    let reduction = match arguments.run.deterministic {
        true => GradientReduction::Deterministic,
        false => GradientReduction::PerStage,
    };
    arguments.run.backward.then_some(reduction)
}

/// The policies that were named, or those that are predicted to end first.
fn policies(
    arguments: &AttentionArguments,
    (plan, spec): (&Plan, &AttentionSpec),
    config: &PlanConfig,
    transport: RankTransport,
) -> Result<PassPolicies, CliError> {
    let overlapped = Overlapped { plan, spec, backward: reduction(arguments), config };
    Ok(overlapped.by(arguments.run.overlap, &[transport])?.policies)
}

/// All ranks in this process.
fn run_all(arguments: &AttentionArguments) -> Result<(), CliError> {
    let mask = mask_argument::load(&arguments.mask)?;
    let mut tensors = Tensors::of(arguments, &mask)?;
    let outputs = checked_outputs(arguments)?;
    refuse_what_does_not_fit(arguments, &mask, tensors.spec())?;
    let (topology, slow_link) = placed(arguments)?;
    let machine = open_machine(arguments, tensors.spec().dtype)?;
    let profile = machine.profile(arguments.planning.profile.as_deref())?;

    let progress = Progress::new();
    progress.step("reading tensors");
    let spec = *tensors.spec();
    let inputs = tensors.read(arguments, &mask)?;
    progress.step("measuring this machine");
    let config = plan_config(arguments, topology, machine.cost(&spec, arguments.cp_size, profile.as_ref()));
    progress.step("planning");
    let solution = solve(arguments, &mask, &spec, &config, machine.name())?;
    progress.step(format!("{} on {}", passes(arguments), console::count(arguments.cp_size, "rank")));
    let policies = policies(arguments, (&solution.plan, &spec), &config, machine.transport())?;
    let how = run_config(arguments, policies, slow_link);
    // With the memory of one pass at a time.
    let run = match &machine {
        RankMachine::Cpu(_) => run_attention(&solution.plan, &spec, &inputs, &how),
        RankMachine::Cuda(gpus) => run_attention_on(gpus, &solution.plan, &spec, &inputs, &how),
        RankMachine::Process(_) => return Err(CliError::usage(UsageFault::NoLauncher)),
    };
    let run = run.map_err(|source| CliError::Run { source })?;
    let has_unused_dout = tensors.has_unused_dout();
    let ended = FinishedRun {
        crossed: None,
        policies,
        arguments,
        mask: &mask,
        spec,
        config,
        solution,
        run,
        has_unused_dout,
    };
    ended.conclude(&outputs, progress, || Ok(inputs))
}

/// A run that is over.
struct FinishedRun<'a> {
    /// Bytes that were sent between nodes, where they were counted.
    crossed: Option<u64>,
    policies: PassPolicies,
    arguments: &'a AttentionArguments,
    mask: &'a Mask,
    spec: AttentionSpec,
    config: PlanConfig,
    solution: Solution,
    run: AttentionRun,
    has_unused_dout: bool,
}

impl FinishedRun<'_> {
    /// Checks the results where that was asked for, writes and prints them.
    fn conclude(
        self,
        outputs: &Outputs,
        progress: Progress,
        inputs: impl FnOnce() -> Result<AttentionInputs, CliError>,
    ) -> Result<(), CliError> {
        let Self { crossed, policies, arguments, mask, spec, config, solution, run, has_unused_dout } = self;
        let prediction = predict(&solution.plan, &spec, policies, reduction(arguments), &config)?;
        let mut check = None;
        if arguments.results.check {
            progress.step("checking against the dense f64 reference");
            check = Some(check_attention(mask, &spec, &inputs()?, &run.outputs));
        }
        progress.step("writing");
        let result =
            AttentionResult { crossed, policies, arguments, mask, spec, solution, prediction, run, check };
        outputs.write(|flag| result.contents(flag))?;
        drop(progress);
        result.solution.note_idle_ranks();
        if has_unused_dout {
            console::note("note: the input's dout was not read; --backward reads it");
        }
        if arguments.run.device == Device::Cpu {
            note_excessive_margin(policies);
        }
        if arguments.results.json {
            console::print_json(Schema::Attention, &result.document(outputs))?;
        } else {
            console::print_folded(&result.text(outputs))?;
        }
        result.verdict()
    }
}

/// Opens it, once the arguments that suit the CPU only are refused.
fn open_machine(arguments: &AttentionArguments, dtype: DType) -> Result<RankMachine, CliError> {
    refuse_what_the_device_lacks(arguments, dtype)?;
    let run = &arguments.run;
    RankMachine::open(run.device, Some(arguments.cp_size), run.transport)?
        .measured(arguments.planning.profile.as_deref())
}

/// Types and imitations that only the CPU has.
fn refuse_what_the_device_lacks(arguments: &AttentionArguments, dtype: DType) -> Result<(), CliError> {
    let run = &arguments.run;
    let refuse = |fault: FlagFault| Err(CliError::flag("--device", "cuda", fault));
    if run.device == Device::Cuda && !matches!(dtype, DType::Bf16 | DType::F16) {
        return refuse(FlagFault::GpuDType { dtype: dtype_name(dtype) });
    }
    if run.device == Device::Cuda && (run.slow_link.is_some() || run.slow_network.is_some()) {
        return refuse(FlagFault::ImitatesNoLinks);
    }
    Ok(())
}

fn run_config(
    arguments: &AttentionArguments,
    policy: PassPolicies,
    slow_link: Option<SlowLink>,
) -> RunConfig {
    RunConfig {
        policy,
        deterministic: arguments.run.deterministic,
        slow_link,
        measurement: Measurement {
            warmups: usize::from(arguments.run.device == Device::Cuda),
            ..Measurement::default()
        },
        ..RunConfig::default()
    }
    .with_limit(arguments.run.limit)
}

/// A margin may suit another machine, so it is no error here; what it came to should be known.
fn note_excessive_margin(policies: PassPolicies) {
    let (margin, threads) = (policies.sm_margin(), device::cpu_threads());
    if margin >= threads {
        console::note(&format!(
            "note: --overlap with sm-margin={margin} leaves none of this machine's {}; one computed all the same",
            console::count(threads, "thread")
        ));
    }
}

fn pass(arguments: &AttentionArguments) -> Pass {
    if arguments.run.backward { Pass::ForwardBackward } else { Pass::Forward }
}

fn passes(arguments: &AttentionArguments) -> &'static str {
    if arguments.run.backward { "running forward and backward" } else { "running the forward" }
}

fn checked_outputs(arguments: &AttentionArguments) -> Result<Outputs, CliError> {
    let results = &arguments.results;
    Outputs::check(&[
        ("--output", results.output.as_deref()),
        ("--report", results.report.as_deref()),
        ("--trace", results.trace.as_deref()),
    ])
}

/// Tensors and the dense reference, which are known before anything is read or drawn. The ranks' buffers are weighed when
/// they are allocated.
fn refuse_what_does_not_fit(
    arguments: &AttentionArguments,
    mask: &Mask,
    spec: &AttentionSpec,
) -> Result<(), CliError> {
    let Some(available) = available_memory() else { return Ok(()) };
    // Once in global order, once on the ranks; and what runs them.
    let tensors = tensor_bytes(mask, spec, arguments.run.backward).saturating_mul(2);
    let tensors = tensors.saturating_add(runtime_bytes(arguments.cp_size));
    let refuse = |what, needed, instead| Err(CliError::OutOfMemory { what, needed, available, instead });
    if tensors > available {
        return refuse(
            "holding the tensors and the ranks' copies",
            tensors,
            "use fewer rows or heads, or a narrower type",
        );
    }
    if arguments.results.check {
        let reference = reference_bytes(spec, mask.seqlen_q(), mask.seqlen_k(), arguments.run.backward);
        let needed = tensors.saturating_add(reference);
        if needed > available {
            return refuse(
                "--check, the dense f64 reference,",
                needed,
                "check a shorter sequence or fewer heads",
            );
        }
    }
    Ok(())
}

/// Bytes of stacks and of what kernels and the measurement of this machine take for themselves.
fn runtime_bytes(ranks: usize) -> u64 {
    const OF_PROCESS: u64 = 48 << 20;
    const STACK: u64 = 2 << 20;
    // Two streams a rank, its own thread and one that watches.
    OF_PROCESS + STACK * (4 * ranks + device::cpu_threads()) as u64
}

/// Bytes of the inputs and the results.
fn tensor_bytes(mask: &Mask, spec: &AttentionSpec, backward: bool) -> u64 {
    let elements = |rows: usize, heads: usize, dim: usize| rows as u128 * heads as u128 * dim as u128;
    let q = elements(mask.seqlen_q(), spec.heads_q, spec.head_dim);
    let out = elements(mask.seqlen_q(), spec.heads_q, spec.head_dim_v);
    let keys = elements(mask.seqlen_k(), spec.heads_kv, spec.head_dim + spec.head_dim_v);
    let all = if backward { 2 * (q + keys + out) } else { q + keys + out };
    u64::try_from(all * spec.dtype.size() as u128).unwrap_or(u64::MAX)
}

/// The topology, and the link that is to be imitated.
fn placed(arguments: &AttentionArguments) -> Result<(Topology, Option<SlowLink>), CliError> {
    let topology = topology(arguments.cp_size, arguments.nodes)?;
    Ok((topology, slow_link(arguments.run.slow_link, arguments.run.slow_network, topology)?))
}

/// The plan, with rows that cross between nodes as `--exchange` says.
fn solve(
    arguments: &AttentionArguments,
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    machine: &str,
) -> Result<Solution, CliError> {
    let solution =
        Solution::solve(mask, spec, config, (arguments.planning.dispatch, machine), &Planning::ALONE)?;
    Ok(match arguments.run.exchange {
        Exchange::TwoLevel => solution.over_nodes(&config.topology),
        Exchange::Flat => solution,
    })
}

fn plan_config(arguments: &AttentionArguments, topology: Topology, mut cost: CostModel) -> PlanConfig {
    let link = |slow: SlowLink| Link {
        alpha_seconds: slow.alpha.as_secs_f64(),
        bytes_per_second: slow.bytes_per_second,
    };
    cost.link = arguments.run.slow_link.map_or(cost.link, link);
    cost.network = arguments.run.slow_network.map_or(cost.network, link);
    PlanConfig {
        chunk_size: arguments.planning.chunk_size,
        dispatch: arguments.planning.dispatch.named(),
        stages: arguments.planning.stages,
        query_exchange: arguments
            .planning
            .query_exchange_of(topology.world_size, arguments.run.deterministic),
        topology,
        cost,
    }
}
