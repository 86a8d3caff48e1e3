//! `counterpoint bench tp`.

mod case;
mod connections;
mod measured;
mod normalised;
mod parts;
mod peers;
mod row;
mod shared;

use std::sync::Arc;

use counterpoint_choose::{TunedHere, TunedPlans};
use counterpoint_console::{
    self as console, CliError, CommandLine, Progress, Schema,
    arguments::Device,
    launched::{as_rank, ended, launch, refuse_other_sizes},
    output::Outputs,
    rank_machine::RankMachine,
    tuned,
};
use counterpoint_cost::CostModel;
use counterpoint_cuda::{NcclSums, TransportKind};
use counterpoint_exec::{
    CpuMachine, LinearInputs, Machine, Rendezvous, RunConfig, TcpMachine, random_linear_inputs,
};
use counterpoint_plan::{DType, LinearKind, LinearSpec, Topology};
use counterpoint_reference::SumRounding;
use counterpoint_report::{TimelinePair, TraceSection, chrome_trace};

use self::case::Case;
use self::peers::PeerResult;
use self::row::LinearRow;
use crate::arguments::{BenchTpArguments, BenchTpKind, LayerShape};
use crate::pytorch::Peers;
use crate::ranks::BenchRanks;
use crate::rows::Rows;
use counterpoint_console::FlagFault;

/// `counterpoint bench tp`.
pub(crate) fn run(arguments: &BenchTpArguments, line: &CommandLine) -> Result<(), CliError> {
    match launch()? {
        None if !arguments.connections.is_empty() => {
            // GPUs are those processes' meanwhile.
            connections::run(arguments, line)
        }
        None => {
            let open = |kind| RankMachine::open(arguments.device, arguments.tp_size, kind);
            measure_all(arguments, &machines(arguments, open)?)
        }
        Some(launch) => as_rank(&launch, line, RunConfig::default().world.limit, |rendezvous| {
            refuse_other_sizes(&launch, "--tp-size", arguments.tp_size.unwrap_or(launch.world_size))?;
            refuse_threads_alone(arguments)?;
            if arguments.device == Device::Cpu {
                return measure_all(arguments, &cpu_process(arguments, rendezvous)?);
            }
            let topology = Topology::flat(launch.world_size);
            let join = |kind| RankMachine::join(rendezvous, &launch, kind, topology);
            measure_all(arguments, &machines(arguments, join)?)
        }),
    }
}

/// When sums by a transport are rounded.
fn rounding(transport: TransportKind) -> SumRounding {
    match transport.nccl() {
        Some(settings) if settings.sums == NcclSums::Library => SumRounding::EverySum,
        _ => SumRounding::Partials,
    }
}

/// One for every transport.
fn machines(
    arguments: &BenchTpArguments,
    open: impl Fn(TransportKind) -> Result<RankMachine, CliError>,
) -> Result<Vec<(TransportKind, BenchRanks)>, CliError> {
    let by = arguments.plain_products.products();
    let ranks = |kind| Ok((kind, BenchRanks::Machine(open(kind)?.with_plain_products(by)?)));
    arguments.transport.iter().map(|&kind| ranks(kind)).collect()
}

/// This process as one of several that are CPU ranks.
fn cpu_process(
    arguments: &BenchTpArguments,
    rendezvous: &Arc<Rendezvous>,
) -> Result<Vec<(TransportKind, BenchRanks)>, CliError> {
    // Refuses what is for GPUs.
    machines(arguments, |kind| RankMachine::open(Device::Cpu, None, kind))?;
    let machine = TcpMachine::new(rendezvous.clone(), 0, arguments.slow_link).map_err(ended)?;
    Ok(vec![(TransportKind::Auto, BenchRanks::CpuProcess(rendezvous.clone(), machine))])
}

/// What only ranks that are threads do.
fn refuse_threads_alone(arguments: &BenchTpArguments) -> Result<(), CliError> {
    let alone = |flag, value: String| Err(CliError::flag(flag, value, FlagFault::StartsProcesses));
    let numbers = |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    match arguments {
        BenchTpArguments { peers, .. } if !peers.is_empty() => alone("--peers", numbers(peers)),
        BenchTpArguments { connections, .. } if !connections.is_empty() => {
            alone("--connections", numbers(connections))
        }
        _ => Ok(()),
    }
}

fn measure_all(
    arguments: &BenchTpArguments,
    machines: &[(TransportKind, BenchRanks)],
) -> Result<(), CliError> {
    let Some((_, first)) = machines.first() else { return Ok(()) };
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        return Err(CliError::flag("--slow-link", "", FlagFault::ForCpuRanks));
    }
    if let (true, Some(kind)) =
        (arguments.rms_norm, arguments.kinds.iter().find(|kind| kind.kind() != LinearKind::Row))
    {
        let fault = FlagFault::WholeRows { kind: kind.kind(), flag: "--kinds" };
        return Err(CliError::flag("--rms-norm", "", fault));
    }
    let tp_size = first.count(arguments.tp_size);
    if let Some(layers) = arguments.shared_input {
        let columns = BenchTpKind::Column;
        let specs = specs(arguments, &[columns], tp_size);
        return shared::run(arguments, layers as usize, (machines, tp_size), &specs);
    }
    let traces = Outputs::check(&[("--trace", arguments.trace.as_deref())])?;
    let title = || Ok(row::title(&first.name(), tp_size));
    let mut shown = Rows::begin(first.prints(), title, Schema::BenchTp, arguments.json)?;
    let tuned = tuned::kept()?;
    first.agree("what was tuned and kept", &tuned.to_json())?;
    let mut peers = peers::start(arguments, tp_size)?;
    let progress = Progress::new();
    let (mut rows, mut of_peers) = (Vec::new(), Vec::new());
    for (shape, spec) in specs(arguments, &arguments.kinds, tp_size) {
        let inputs = random_linear_inputs(&spec, None, spec.tokens as u64, true);
        for (transport, machine) in machines {
            let LinearSpec { kind, activations, .. } = spec;
            progress.step(format!("{kind} {activations} {shape} {transport}"));
            let on = Setting { transport: *transport, machine, tuned: &tuned };
            let ours = measure(arguments, (spec, shape), tp_size, on, &inputs, &mut peers)?;
            let peer_rows = peers::rows(&peers, &ours);
            ours.iter().try_for_each(|row| shown.add(row))?;
            rows.extend(ours);
            if arguments.json {
                peer_rows.iter().try_for_each(|row| console::print_json(Schema::BenchTpPeer, row))?;
            }
            of_peers.extend(peer_rows);
        }
    }
    drop(progress);
    if !arguments.json {
        peers::print(&of_peers)?;
    }
    if first.prints() {
        traces.write(|_| Ok(trace_of(&rows).into_bytes()))?;
    }
    shown.end("", "results out of bounds against f64")?;
    peers.end()
}

/// The rows one after the other.
fn trace_of(rows: &[LinearRow]) -> String {
    let names: Vec<String> = rows.iter().map(LinearRow::name).collect();
    let timelines = |row| TimelinePair { measured: Some(row), predicted: None };
    let sections =
        names.iter().zip(rows).map(|(name, row)| TraceSection { name, timelines: timelines(&row.last) });
    chrome_trace(&sections.collect::<Vec<_>>())
}

/// What a layer is measured on.
struct Setting<'a> {
    transport: TransportKind,
    machine: &'a BenchRanks,
    tuned: &'a TunedPlans,
}

/// What work costs on so many ranks of a machine.
fn cost_of(arguments: &BenchTpArguments, ranks: &BenchRanks, tp_size: usize) -> Result<CostModel, CliError> {
    let machine = match ranks {
        // Without a profile, which hosts may have others of.
        BenchRanks::CpuProcess(_, machine) => return Ok(machine.linear(tp_size).cost),
        BenchRanks::Machine(machine) => machine,
    };
    let profile = machine.profile(None)?;
    let measured = profile.as_ref().map(|profile| &profile.cost);
    Ok(match machine {
        RankMachine::Cuda(gpus) => gpus.cost(measured, tp_size),
        RankMachine::Process(process) => process.machine().cost(measured),
        RankMachine::Cpu(_) => {
            let ranks = CpuMachine::new(0, arguments.slow_link).map_err(|source| CliError::Run { source })?;
            measured.copied().unwrap_or(ranks.linear(tp_size).cost)
        }
    })
}

fn measure(
    arguments: &BenchTpArguments,
    (spec, shape): (LinearSpec, LayerShape),
    tp_size: usize,
    Setting { transport, machine, tuned }: Setting<'_>,
    inputs: &LinearInputs,
    peers: &mut Peers<PeerResult>,
) -> Result<Vec<LinearRow>, CliError> {
    let cost = cost_of(arguments, machine, tp_size)?;
    let device = &machine.name();
    let processes = machine.processes();
    let tuned = TunedHere { place: machine.tuned_place(arguments.slow_link), plans: tuned.clone() };
    let tuned = Arc::new(tuned);
    let case = Case { arguments, spec, shape, tp_size, transport, cost, device, inputs, tuned, processes };
    let machine = match machine {
        BenchRanks::CpuProcess(rendezvous, machine) => {
            return case.measure_on(machine, peers, |measured| measured.of_all(rendezvous));
        }
        BenchRanks::Machine(machine) => machine,
    };
    match machine {
        RankMachine::Cpu(_) => {
            let ranks = CpuMachine::new(0, arguments.slow_link).map_err(|source| CliError::Run { source })?;
            case.measure_on(&ranks, peers, |measured| Ok(Some(measured)))
        }
        RankMachine::Cuda(gpus) => case.measure_on(gpus, peers, |measured| Ok(Some(measured))),
        RankMachine::Process(process) => {
            case.measure_on(process.machine(), peers, |measured| measured.of_all(process.rendezvous()))
        }
    }
}

/// Tokens, features that are not split, features of a rank.
fn shapes(arguments: &BenchTpArguments) -> Vec<LayerShape> {
    /// Those whose backward is known from Megatron-LM's pattern on the same GPUs (overlap of an all-reduce and a product).
    const GPU: [[usize; 3]; 3] = [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]];
    match (&arguments.shapes[..], arguments.device) {
        ([], Device::Cpu) => vec![[512, 256, 256].into()],
        ([], Device::Cuda) => GPU.map(LayerShape::from).to_vec(),
        (shapes, _) => shapes.to_vec(),
    }
}

/// Every layer that is measured, with its shape.
fn specs(
    arguments: &BenchTpArguments,
    kinds: &[BenchTpKind],
    tp_size: usize,
) -> Vec<(LayerShape, LinearSpec)> {
    let mut specs = Vec::new();
    for shape in shapes(arguments) {
        let LayerShape { tokens, hidden, local } = shape;
        for kind in kinds.iter().map(|kind| kind.kind()) {
            let (in_features, out_features) = match kind {
                LinearKind::Column => (hidden, local * tp_size),
                LinearKind::Row => (local * tp_size, hidden),
            };
            for activations in arguments.activations.iter().map(|activations| activations.activations()) {
                let usual = if arguments.device == Device::Cpu { DType::F32 } else { DType::Bf16 };
                let dtype = arguments.dtype.unwrap_or(usual);
                let has_bias = arguments.bias;
                let spec =
                    LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
                specs.push((shape, spec));
            }
        }
    }
    specs
}
