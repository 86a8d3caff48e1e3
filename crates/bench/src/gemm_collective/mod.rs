//! `counterpoint bench gemm-collective`.

mod cases;
mod cpu;
mod peers;
mod row;

use crate::gpu::{GemmCollectiveBench, GemmCollectiveRuns};
use counterpoint_choose::LayerGroups;
use counterpoint_console::{
    self as console, CliError, Progress, Schema,
    arguments::{Device, OverlapChoice},
    profile,
};
use counterpoint_cost::CostModel;
use counterpoint_cuda::{CudaMachine, Timing, TransportKind};
use counterpoint_exec::{ExecError, GemmCollectiveSpec, GemmOverlap};
use counterpoint_plan::WaveGroups;
use counterpoint_schedule::OverlapPolicy;

use self::peers::PeerResult;
use self::row::GemmCollectiveRow;
use crate::arguments::BenchGemmCollectiveArguments;
use crate::pytorch::Peers;
use crate::rows::Rows;
use counterpoint_console::FlagFault;

/// How long the runs of one sample should take together.
const SECONDS: f64 = 0.01;

/// `counterpoint bench gemm-collective`.
pub(crate) fn run(arguments: &BenchGemmCollectiveArguments) -> Result<(), CliError> {
    let machine = Ranks::open(arguments)?;
    let mut peers = peers::start(arguments)?;
    let title = format!("products and collectives on {}", machine.name());
    let mut shown = Rows::begin(true, || Ok(title), Schema::BenchGemmCollective, arguments.json)?;
    let (mut last, mut of_peers) = (Vec::new(), Vec::new());
    let cases = cases::chosen(arguments);
    let cost = costs(arguments)?;
    let overlap = |choice: &OverlapChoice| match choice {
        OverlapChoice::Auto => GemmOverlap::Predicted(&cost),
        OverlapChoice::Named(policy) => GemmOverlap::Policy(*policy),
    };
    for spec in &cases {
        let progress = Progress::new();
        progress.step(format!("{} of {}", spec.collective.name(), spec.size));
        let policies: Vec<_> = arguments.overlap.iter().map(|choice| spec.policy(overlap(choice))).collect();
        let mut rows = machine
            .measure(spec, &policies, arguments, &mut peers)
            .map_err(|source| CliError::Run { source })?;
        rows.iter_mut().zip(&arguments.overlap).for_each(|(row, choice)| row.asked = choice.to_string());
        drop(progress);
        rows.iter().try_for_each(|row| shown.add(row))?;
        let peer_rows = peers::rows(&peers, &rows);
        if arguments.json {
            peer_rows.iter().try_for_each(|row| console::print_json(Schema::BenchGemmCollectivePeer, row))?;
        }
        of_peers.extend(peer_rows);
        last.extend(rows.into_iter().next_back());
    }
    let judged = shown.end(&row::finding(&last), "results out of bounds against f64");
    if !arguments.json {
        peers::print(&of_peers)?;
    }
    judged.and_then(|()| peers.end())
}

/// By which `auto` is predicted: those of this machine's profile, if it has one.
fn costs(arguments: &BenchGemmCollectiveArguments) -> Result<CostModel, CliError> {
    if !arguments.overlap.contains(&OverlapChoice::Auto) {
        return Ok(CostModel::H200);
    }
    let profile = profile::of_device(None, arguments.device)?;
    Ok(profile.map_or(CostModel::H200, |profile| profile.cost))
}

/// In which groups an overlapped product's rows travel.
fn groups(arguments: &BenchGemmCollectiveArguments) -> LayerGroups {
    arguments.groups.map_or(LayerGroups::Auto, |groups| WaveGroups::Fixed(groups as usize).into())
}

/// What `--device` names.
enum Ranks {
    Cpu,
    Cuda(Box<GemmCollectiveBench>),
}

impl Ranks {
    fn open(arguments: &BenchGemmCollectiveArguments) -> Result<Self, CliError> {
        if arguments.device == Device::Cpu && arguments.transport != TransportKind::Auto {
            let value = arguments.transport.to_string();
            return Err(CliError::flag("--transport", value, FlagFault::ForGpus));
        }
        if arguments.device == Device::Cpu {
            return Ok(Self::Cpu);
        }
        let failed = |source| CliError::Cuda { source };
        let ranks = arguments.ranks as usize;
        let machine = CudaMachine::for_ranks(ranks, Timing::Off)
            .and_then(|machine| machine.with_transport(arguments.transport))
            .map_err(failed)?;
        if machine.devices().len() < ranks {
            let fault = FlagFault::Gpus { gpus: machine.devices().len() };
            return Err(CliError::flag("--ranks", ranks.to_string(), fault));
        }
        let bench = GemmCollectiveBench::new(machine, arguments.limit).map_err(failed)?;
        Ok(Self::Cuda(Box::new(bench)))
    }

    fn name(&self) -> String {
        match self {
            Self::Cpu => counterpoint_console::device::cpu_name(),
            Self::Cuda(bench) => {
                let devices = bench.machine().devices();
                format!("{} ({})", console::count(devices.len(), "GPU"), devices[0].properties().name)
            }
        }
    }

    fn measure(
        &self,
        spec: &GemmCollectiveSpec,
        policies: &[OverlapPolicy],
        arguments: &BenchGemmCollectiveArguments,
        peers: &mut Peers<PeerResult>,
    ) -> Result<Vec<GemmCollectiveRow>, ExecError> {
        match self {
            Self::Cpu => cpu::measure(spec, policies, arguments),
            Self::Cuda(bench) => {
                // At 600 TFLOP/s, which no shape exceeds by much.
                let estimate = 2e-5 + spec.flops() / 6e14;
                let iterations =
                    ((SECONDS / estimate) as usize).clamp(2, arguments.iterations.max(2) as usize);
                let runs = GemmCollectiveRuns { iterations, samples: arguments.cycles as usize };
                peers.prepare(&peers::case(spec));
                let variants = peers.variants().len();
                let mut timed = |timed| (0..variants).for_each(|variant| peers.run(variant, timed));
                timed(false);
                let mut between = || timed(true);
                let times = bench.measure(spec, policies, &groups(arguments), runs, &mut between)?;
                Ok(GemmCollectiveRow::of(spec, policies, &times))
            }
        }
    }
}
