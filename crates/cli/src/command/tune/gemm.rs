use std::time::Instant;

use counterpoint_cuda::TransportKind;
use counterpoint_exec::{CpuMachine, Machine, MeasureError, MeasuredClock, Repeats};
use counterpoint_plan::{
    DType, GroupSearch, GroupSearcher, LinearPlan, LinearSpec, LinkUse, PassClock, ProductStart, TunedGroups,
    TunedShape, WaveGroups,
};
use counterpoint_report::{Column, format_ratio, format_seconds, table};
use counterpoint_schedule::{OverlapPolicy, StartOrder, WorkerShare};
use serde_json::{Value, json};

use crate::arguments::{Device, RanksArguments, SearchArgument, TuneGemmArguments, dtype_name};
use crate::command::rank_machine::RankMachine;
use crate::console;
use crate::error::CliError;
use crate::progress::Bar;
use crate::tuned::TunedFile;

/// Waves that a prediction is made with; twice as many sequences for each more would be measured.
const PREDICTED_WAVES: u32 = 16;
const MEASURED_WAVES: u32 = 6;
/// Rows of a tile of the GPU's product.
const TILE_ROWS: usize = 128;
/// Flags of the sizes of the layer that the product is of.
const FLAGS: [(&str, &str); 2] = [("in_features", "--k"), ("out_features", "--n")];

pub(super) fn run(arguments: &TuneGemmArguments) -> Result<(), CliError> {
    let mut file = TunedFile::open(arguments.plans.as_deref())?;
    let ranks =
        RankMachine::open(arguments.ranks.device, arguments.ranks.tp_size, arguments.ranks.transport)?;
    let tp_size = tp_size(&arguments.ranks, &ranks)?;
    let policy = arguments.overlap.unwrap_or_else(|| usual_policy(&ranks, arguments.ranks.transport));
    let spec = arguments.collective.layer([arguments.m, arguments.n, arguments.k], dtype(&arguments.ranks));
    let searcher = searcher(arguments, spec, tp_size, policy, &ranks)?;
    console::note_development_build();
    let tuning = Tuning { arguments, spec, tp_size, policy, searcher };
    let found = match &ranks {
        RankMachine::Cpu(_) => {
            let machine = CpuMachine::new(policy.sm_margin(), arguments.ranks.slow_link)
                .map_err(|source| CliError::Run { source })?;
            tuning.search(&machine)?
        }
        RankMachine::Cuda(machine) => tuning.search(machine)?,
        RankMachine::Process(_) => return Err(only_threads()),
    };
    let kept = found.kept(ranks.name());
    if let Some(kept) = kept {
        file.plans.insert(kept);
        file.write()?;
    }
    found.tell(&tuning, ranks.name(), &file)
}

/// What lets communication run under computation on these ranks.
fn usual_policy(ranks: &RankMachine, transport: TransportKind) -> OverlapPolicy {
    let RankMachine::Cuda(machine) = ranks else { return OverlapPolicy::default() };
    // Copy engines take no multiprocessor, so nothing has to be kept free for them.
    if transport == TransportKind::CopyEngine {
        return OverlapPolicy::default();
    }
    let workers = WorkerShare::Margin(machine.worker_sharing().communication);
    OverlapPolicy { workers, ..OverlapPolicy::new(StartOrder::KernelBarrier) }
}

/// What is timed here are ranks of one process.
pub(in crate::command) fn only_threads() -> CliError {
    let message = "ranks that are processes are not timed by this command; start it without a launcher";
    CliError::Usage { message: message.to_owned() }
}

/// Ranks that were asked for, or as many as there are GPUs; at least two.
pub(in crate::command) fn tp_size(
    arguments: &RanksArguments,
    ranks: &RankMachine,
) -> Result<usize, CliError> {
    let tp_size = arguments.tp_size.unwrap_or_else(|| ranks.gpus().max(2));
    if tp_size < 2 {
        let reason = "is one rank, and nothing travels; use at least 2".to_owned();
        return Err(CliError::Flag { flag: "--tp-size", value: tp_size.to_string(), reason });
    }
    if let (Some(_), Device::Cuda) = (arguments.slow_link, arguments.device) {
        let reason = "imitates a link between CPU ranks; leave it out with --device cuda".to_owned();
        return Err(CliError::Flag { flag: "--slow-link", value: String::new(), reason });
    }
    Ok(tp_size)
}

/// The element type that was asked for, or the device's usual one.
pub(in crate::command) fn dtype(arguments: &RanksArguments) -> DType {
    arguments.dtype.unwrap_or(match arguments.device {
        Device::Cpu => DType::F32,
        Device::Cuda => DType::Bf16,
    })
}

pub(in crate::command) fn repeats(arguments: &RanksArguments) -> Repeats {
    Repeats {
        limit: arguments.limit,
        warmups: arguments.warmups as usize,
        iterations: arguments.iterations as usize,
    }
}

fn searcher(
    arguments: &TuneGemmArguments,
    spec: LinearSpec,
    tp_size: usize,
    policy: OverlapPolicy,
    ranks: &RankMachine,
) -> Result<GroupSearcher, CliError> {
    let predicted_only = arguments.search == SearchArgument::Predictive;
    let waves = arguments.waves.unwrap_or(if predicted_only { PREDICTED_WAVES } else { MEASURED_WAVES });
    if !predicted_only && waves > 12 {
        let reason =
            format!("makes {} sequences, too many to measure each; use at most 12", 1u64 << (waves - 1));
        return Err(CliError::Flag { flag: "--waves", value: waves.to_string(), reason });
    }
    let mut wave = spec.tokens.div_ceil(tp_size).div_ceil(waves as usize);
    let takes_workers =
        arguments.ranks.transport != TransportKind::CopyEngine && policy.workers == WorkerShare::Common;
    let (mut speed_beside, mut link) = (1.0, LinkUse::Apart);
    if let RankMachine::Cuda(machine) = ranks {
        // Whole tiles of the rows of all ranks together.
        wave = wave.next_multiple_of(TILE_ROWS.div_ceil(tp_size));
        link = LinkUse::Shared;
        if takes_workers {
            let sharing = machine.worker_sharing();
            speed_beside = sharing.speed_without(sharing.communication);
        }
    }
    let starts = match policy.start {
        StartOrder::KernelBarrier => ProductStart::AfterCommunication,
        StartOrder::Signals => ProductStart::OneKernel,
        StartOrder::Sequential | StartOrder::Concurrent => ProductStart::Free,
    };
    let most_groups = arguments.most_groups as usize;
    let searcher = GroupSearcher { spec, tp_size, wave, most_groups, starts, link, speed_beside };
    searcher.plan(WaveGroups::Fixed(1)).map_err(|source| CliError::of_layer(source, &FLAGS))?;
    Ok(searcher)
}

/// What is tuned, and how.
struct Tuning<'a> {
    arguments: &'a TuneGemmArguments,
    spec: LinearSpec,
    tp_size: usize,
    policy: OverlapPolicy,
    searcher: GroupSearcher,
}

/// One search's answer.
struct Answer {
    search: GroupSearch,
    plan: LinearPlan,
    /// Seconds that the search expects: predicted, or measured when it met the sequence.
    expected: f64,
    /// Seconds measured afterwards, beside the others.
    measured: f64,
    /// Seconds that the search itself took.
    took: f64,
}

/// Answers, and the same without overlap.
struct Found {
    answers: Vec<Answer>,
    whole: LinearPlan,
    sequential: f64,
}

impl Tuning<'_> {
    fn clock<'m, M>(&self, machine: &'m M, policy: OverlapPolicy) -> MeasuredClock<'m, M> {
        let timing = repeats(&self.arguments.ranks);
        MeasuredClock { machine, spec: self.spec, ranks: self.tp_size, policy, timing }
    }

    fn search<M: Machine>(&self, machine: &M) -> Result<Found, CliError> {
        let searches: &[GroupSearch] = match self.arguments.search {
            SearchArgument::Predictive => &[GroupSearch::Predictive],
            SearchArgument::Exhaustive => &[GroupSearch::Exhaustive],
            SearchArgument::Both => &[GroupSearch::Predictive, GroupSearch::Exhaustive],
        };
        let mut clock = self.clock(machine, self.policy);
        let mut answers = Vec::new();
        for &search in searches {
            let bar = Bar::new();
            let told = |step: counterpoint_plan::SearchStep| bar.show(&step.what, step.done, step.all);
            let begun = Instant::now();
            let (plan, expected) = match search {
                GroupSearch::Predictive => self.searcher.predictive(&mut clock, told),
                GroupSearch::Exhaustive => self.searcher.exhaustive(&mut clock, told),
            }
            .map_err(failed)?;
            let took = begun.elapsed().as_secs_f64();
            answers.push(Answer { search, plan, expected, measured: f64::INFINITY, took });
        }
        // All of them in turns, so that they meet the same disturbance by other programs.
        let whole = self.searcher.plan(WaveGroups::Fixed(1)).map_err(|source| CliError::Plan { source })?;
        let mut alone = self.clock(machine, OverlapPolicy::new(StartOrder::Sequential));
        let mut sequential = f64::INFINITY;
        for _ in 0..3 {
            sequential = sequential.min(alone.pass(&whole).map_err(failed)?);
            for answer in &mut answers {
                answer.measured = answer.measured.min(clock.pass(&answer.plan).map_err(failed)?);
            }
        }
        Ok(Found { answers, whole, sequential })
    }
}

fn failed(error: MeasureError) -> CliError {
    match error {
        MeasureError::Plan(source) => CliError::Plan { source },
        MeasureError::Run(source) => CliError::Run { source },
        other => CliError::Usage { message: other.to_string() },
    }
}

impl Found {
    fn best(&self) -> Option<&Answer> {
        self.answers.iter().min_by(|a, b| a.measured.total_cmp(&b.measured))
    }

    /// What is remembered: the fastest answer, or one group where that is no slower.
    fn kept(&self, device: &str) -> Option<TunedGroups> {
        let best = self.best()?;
        let (plan, seconds) = match best.measured < self.sequential {
            true => (&best.plan, best.measured),
            false => (&self.whole, self.sequential),
        };
        TunedGroups::of(plan, device, [seconds, self.sequential], best.search)
    }

    fn tell(&self, tuning: &Tuning<'_>, device: &str, file: &TunedFile) -> Result<(), CliError> {
        let arguments = tuning.arguments;
        let shape = TunedShape::of(&tuning.spec, tuning.tp_size, device);
        let kept = self.kept(device);
        if arguments.ranks.json {
            let answers: Vec<Value> = self.answers.iter().map(|answer| self.json(answer)).collect();
            return console::print_json(&json!({
                "shape": shape,
                "overlap": tuning.policy.to_string(),
                "wave_rows": tuning.searcher.wave,
                "sequential_seconds": self.sequential,
                "searches": answers,
                "kept": kept,
                "plans": file.path(),
            }));
        }
        let columns = [
            Column::text("search", 0),
            Column::text("rows of groups", 1),
            Column::number("expected", 2),
            Column::number("measured", 0),
            Column::number("vs sequential", 0),
            Column::number("search took", 2),
        ];
        let rows = self.answers.iter().map(|answer| {
            vec![
                name(answer.search).to_owned(),
                sizes(answer.plan.group_sizes()),
                format_seconds(answer.expected),
                format_seconds(answer.measured),
                format_ratio(self.sequential / answer.measured),
                format_seconds(answer.took),
            ]
        });
        let mut text = format!(
            "{} x {} x {} {}, {} over {} ranks, {device}, {}; sequential {}\n\n",
            arguments.m,
            arguments.n,
            arguments.k,
            dtype_name(tuning.spec.dtype),
            arguments.collective.name(),
            tuning.tp_size,
            tuning.policy,
            format_seconds(self.sequential),
        );
        text.push_str(&table(&columns, rows, &console::style()));
        if let Some(kept) = kept {
            let what = match kept.groups.len() {
                1 => "one group is kept: overlap gained nothing".to_owned(),
                _ => format!("groups of {} rows are kept", sizes(&kept.groups)),
            };
            text.push_str(&format!("\n{what}, in {}\n", file.path().display()));
        }
        console::print(&text)
    }

    fn json(&self, answer: &Answer) -> Value {
        json!({
            "search": name(answer.search),
            "groups": answer.plan.group_sizes(),
            "expected_seconds": answer.expected,
            "measured_seconds": answer.measured,
            "ratio": self.sequential / answer.measured,
            "search_seconds": answer.took,
        })
    }
}

fn name(search: GroupSearch) -> &'static str {
    match search {
        GroupSearch::Exhaustive => "exhaustive",
        GroupSearch::Predictive => "predictive",
    }
}

fn sizes(groups: &[usize]) -> String {
    groups.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}
