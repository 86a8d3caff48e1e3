//! `counterpoint bench tp`.

mod case;
mod connections;
mod parts;
mod peers;
mod row;

use counterpoint_cuda::TransportKind;
use counterpoint_exec::{CpuMachine, LinearInputs, random_linear_inputs};
use counterpoint_plan::{CostModel, DType, LinearKind, LinearSpec, TunedPlans};

use self::case::Case;
use self::row::Row;
use super::rank_machine::RankMachine;
use crate::arguments::{BenchTpArguments, Device};
use crate::console;
use crate::error::CliError;
use crate::progress::Progress;
use crate::tuned;

/// `counterpoint bench tp`.
pub(crate) fn run(arguments: &BenchTpArguments) -> Result<(), CliError> {
    let shapes = shapes(arguments);
    if !arguments.connections.is_empty() {
        // GPUs are those processes' meanwhile.
        let rows = connections::run(arguments, &shapes)?;
        return match rows.first() {
            Some(row) if !arguments.peers.is_empty() => {
                peers::run(&arguments.peers, arguments, row.ranks, &shapes, &rows)
            }
            _ => Ok(()),
        };
    }
    let open =
        |kind: &TransportKind| Ok((*kind, RankMachine::open(arguments.device, arguments.tp_size, *kind)?));
    let machines = arguments.transport.iter().map(open).collect::<Result<Vec<_>, CliError>>()?;
    let Some((_, first)) = machines.first() else { return Ok(()) };
    let tp_size = arguments.tp_size.unwrap_or(first.gpus().max(2));
    console::note_development_build();
    if !arguments.json {
        console::print(&format!(
            "tensor-parallel linear layers on {}, {}\n{}\n",
            first.name(),
            console::count(tp_size, "rank"),
            row::HEADER
        ))?;
    }
    let tuned = tuned::kept()?;
    let progress = Progress::new();
    let (mut rows, mut wrong) = (Vec::new(), Vec::new());
    for (shape, spec) in specs(arguments, &shapes, tp_size) {
        let inputs = random_linear_inputs(&spec, None, spec.tokens as u64, true);
        for (transport, machine) in &machines {
            let words = format!("{:?} {:?} {shape:?} {transport}", spec.kind, spec.activations);
            progress.step(words.to_lowercase());
            let on = On { transport: *transport, machine, tuned: &tuned };
            for row in measure(arguments, (spec, shape), tp_size, on, &inputs)? {
                match &row.wrong {
                    Some(reason) => wrong.push(format!("{}: {reason}", row.name())),
                    None if arguments.json => console::print_json(&row)?,
                    None => console::print(&row.line())?,
                }
                rows.push(row);
            }
        }
    }
    drop(progress);
    if !arguments.peers.is_empty() {
        peers::run(&arguments.peers, arguments, tp_size, &shapes, &rows)?;
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(CliError::CheckFailed { what: format!("results out of bounds against f64: {}", wrong.join("; ")) })
}

/// What a layer is measured on.
struct On<'a> {
    transport: TransportKind,
    machine: &'a RankMachine,
    tuned: &'a TunedPlans,
}

fn measure(
    arguments: &BenchTpArguments,
    (spec, shape): (LinearSpec, [usize; 3]),
    tp_size: usize,
    On { transport, machine, tuned }: On<'_>,
    inputs: &LinearInputs,
) -> Result<Vec<Row>, CliError> {
    let profile = machine.profile(None)?;
    let measured = profile.as_ref().map(|profile| &profile.cost);
    let cost = match machine {
        RankMachine::Cuda(gpus) => gpus.cost(measured, tp_size),
        RankMachine::Cpu(_) | RankMachine::Process(_) => measured.copied().unwrap_or(CostModel::H200),
    };
    let device = machine.name();
    let case = Case { arguments, spec, shape, tp_size, transport, cost, device, inputs, tuned };
    match machine {
        // Ranks are threads: `open` makes no other.
        RankMachine::Cpu(_) | RankMachine::Process(_) => {
            let ranks = CpuMachine::new(0, None).map_err(|source| CliError::Run { source })?;
            case.measure_on(&ranks)
        }
        RankMachine::Cuda(gpus) => case.measure_on(gpus),
    }
}

/// Tokens, features that are not split, features of a rank.
fn shapes(arguments: &BenchTpArguments) -> Vec<[usize; 3]> {
    /// Those whose backward is known from Megatron-LM's pattern on the same GPUs (overlap of an all-reduce and a product).
    const GPU: [[usize; 3]; 3] = [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]];
    match (&arguments.shapes[..], arguments.device) {
        ([], Device::Cpu) => vec![[512, 256, 256]],
        ([], Device::Cuda) => GPU.to_vec(),
        (shapes, _) => shapes.to_vec(),
    }
}

/// Every layer that is measured, with its shape.
fn specs(
    arguments: &BenchTpArguments,
    shapes: &[[usize; 3]],
    tp_size: usize,
) -> Vec<([usize; 3], LinearSpec)> {
    let mut specs = Vec::new();
    for &shape in shapes {
        let [tokens, hidden, local] = shape;
        for kind in arguments.kinds.iter().map(|kind| kind.kind()) {
            let (in_features, out_features) = match kind {
                LinearKind::Column => (hidden, local * tp_size),
                LinearKind::Row => (local * tp_size, hidden),
            };
            for activations in arguments.activations.iter().map(|activations| activations.activations()) {
                let dtype = if arguments.device == Device::Cpu { DType::F32 } else { DType::Bf16 };
                let has_bias = arguments.bias;
                let spec =
                    LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
                specs.push((shape, spec));
            }
        }
    }
    specs
}
