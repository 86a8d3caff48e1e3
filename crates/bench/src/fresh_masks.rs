//! `counterpoint bench fresh-masks`: what a mask costs that has never been seen, and a call of one that has.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, plan_mask_within};
use counterpoint_console::{self as console, CheckFault, CliError, Schema, arguments::Device, device};
use counterpoint_cuda::{CudaMachine, DriverCalls, Timing};
use counterpoint_exec::{
    AttentionCalls, AttentionInputs, Backend, BackwardTensors, CpuMachine, ExecError, ForwardTensors, Group,
    HostTensor, Machine, Pass, PlanningThreads, RunConfig, Ticket, WorldConfig, random_inputs,
    run_attention_on,
};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, Plan, Planning};
use counterpoint_reference::selftest::unlike_elements;
use counterpoint_report::{Column, Statistics, format_seconds, table};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, lower_attention_backward, lower_attention_forward,
};
use serde::Serialize;

use crate::arguments::BenchFreshMasksArguments;

/// Fresh masks of each row.
const SAMPLES: usize = 10;
/// Calls of each mask that are timed.
const CALLS: usize = 10;

/// Lengths of documents as training data has them.
const LENGTHS: &str = include_str!("../../../benches/data/packed_documents_lognormal_1m.txt");

/// One figure, as JSON has it.
#[derive(Serialize)]
struct FreshMasksRow {
    what: &'static str,
    device: String,
    ranks: usize,
    /// In all.
    tokens: usize,
    planning_threads: usize,
    median_seconds: f64,
    min_seconds: f64,
    /// How often the driver was asked to wait, at most in one sample; none where there is no driver.
    synchronizations: Option<usize>,
    /// Likewise to make memory, streams, events or graphs.
    allocations: Option<usize>,
    /// Likewise to copy from the host to a device.
    uploads: Option<usize>,
}

/// `counterpoint bench fresh-masks`.
pub(crate) fn run(arguments: &BenchFreshMasksArguments) -> Result<(), CliError> {
    console::note_development_build();
    let tokens = arguments.tokens;
    let threads = PlanningThreads::new(arguments.planning_threads).map_err(exec)?;
    let planning = threads.planning();
    let mut rows = Vec::new();
    for (ranks, tokens) in match arguments.ranks {
        Some(ranks) => vec![(ranks, tokens.unwrap_or(ranks * 8192))],
        None => vec![(8, tokens.unwrap_or(8 * 8192)), (64, tokens.unwrap_or(1 << 20))],
    } {
        rows.push(tables(ranks, tokens, &planning)?);
    }
    let ranks = arguments.ranks.unwrap_or(1);
    rows.extend(match arguments.device {
        Device::Cpu => {
            let machine = CpuMachine::new(0, None).map_err(|source| CliError::Run { source })?;
            let case = Case { ranks, tokens: tokens.unwrap_or(512), device: device::cpu_name(), planning };
            case.measure(&machine, |work| work().map(|()| None))?
        }
        Device::Cuda => {
            let machine = CudaMachine::for_ranks(ranks, Timing::Off);
            let machine = machine.map_err(|source| CliError::Cuda { source })?;
            let device = machine.devices()[0].properties().name.clone();
            let case = Case { ranks, tokens: tokens.unwrap_or(32 << 10), device, planning };
            case.measure(&machine, |work| {
                let (done, calls) = DriverCalls::of(work).map_err(|source| CliError::Cuda { source })?;
                done.map(|()| Some([calls.synchronizations(), calls.allocations(), calls.uploads()]))
            })?
        }
    });
    rows.iter_mut().for_each(|row| row.planning_threads = arguments.planning_threads);
    if arguments.json {
        return rows.iter().try_for_each(|row| console::print_json(Schema::BenchFreshMasks, row));
    }
    console::print(&text(&rows))
}

const SPEC: AttentionSpec = AttentionSpec {
    heads_q: 8,
    heads_kv: 2,
    head_dim: 128,
    head_dim_v: 128,
    dtype: DType::Bf16,
    scale: 0.088_388_347_648_318_44,
    softcap: 0.0,
    seqlen_sink: 0,
    gradient_shares: counterpoint_plan::GradientShares::Accumulators,
    max_logits: false,
    dlse: false,
};

/// Packed documents of so many tokens, causal; another pack for every number.
fn pack(tokens: usize, number: usize) -> Result<Mask, CliError> {
    let lengths: Vec<usize> = LENGTHS.split_whitespace().filter_map(|length| length.parse().ok()).collect();
    let mut left = tokens;
    let documents = lengths.iter().cycle().skip(number * 97 % lengths.len().max(1)).map_while(|&length| {
        let taken = length.clamp(1, left.max(1));
        let document = (left > 0).then_some(taken);
        left -= document.unwrap_or(0);
        document
    });
    let documents = documents.collect::<Vec<_>>();
    let mask = Documents::from_lengths(documents).and_then(Mask::causal);
    mask.map_err(|source| CliError::MaskExpression { expression: "of packed documents".to_owned(), source })
}

fn plan(mask: &Mask, ranks: usize, planning: &Planning<'_>) -> Result<Plan, CliError> {
    let plan = plan_mask_within(mask, &SPEC, &PlanConfig::new(ranks), u64::MAX, planning);
    plan.map_err(CliError::of_choice)
}

/// From a mask to what a loader can make of it ahead: the plan and one rank's Programs.
fn tables(ranks: usize, tokens: usize, planning: &Planning<'_>) -> Result<FreshMasksRow, CliError> {
    let mut seconds = Vec::with_capacity(SAMPLES);
    for number in 0..SAMPLES {
        let mask = pack(tokens, number)?;
        let began = Instant::now();
        let plan = plan(&mask, ranks, planning)?;
        let policy = OverlapPolicy::default();
        let forward = lower_attention_forward(&plan, 0, &SPEC, policy, KeyBlocks::Unaligned);
        let reduction = GradientReduction::Deterministic;
        let backward = lower_attention_backward(&plan, 0, &SPEC, policy, reduction);
        seconds.push(began.elapsed().as_secs_f64());
        drop((forward, backward));
    }
    Ok(row("tables", device::cpu_name(), ranks, tokens, &seconds, None))
}

fn row(
    what: &'static str,
    device: String,
    ranks: usize,
    tokens: usize,
    seconds: &[f64],
    asked: Option<[usize; 3]>,
) -> FreshMasksRow {
    let statistics = Statistics::of(seconds);
    let (median_seconds, min_seconds) = statistics.map_or((f64::NAN, f64::NAN), |all| (all.median, all.min));
    let [synchronizations, allocations, uploads] = asked.map_or([None; 3], |asked| asked.map(Some));
    let planning_threads = 1;
    FreshMasksRow {
        what,
        device,
        ranks,
        tokens,
        planning_threads,
        median_seconds,
        min_seconds,
        synchronizations,
        allocations,
        uploads,
    }
}

/// Where fresh masks are called.
struct Case<'a> {
    ranks: usize,
    tokens: usize,
    device: String,
    planning: Planning<'a>,
}

/// Seconds of one kind of thing, and the most that the driver was asked in one of them.
#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    asked: Option<[usize; 3]>,
}

impl Samples {
    fn add(&mut self, seconds: f64, asked: Option<[usize; 3]>) {
        self.seconds.push(seconds);
        let most =
            |of: [usize; 3]| self.asked.map_or(of, |asked| std::array::from_fn(|at| asked[at].max(of[at])));
        self.asked = asked.map(most).or(self.asked);
    }
}

/// A rank's tensors.
struct Tensors<B: Backend> {
    read: [B::Buffer; 4],
    out: B::Buffer,
    lse: B::Buffer,
    gradients: [B::Buffer; 3],
}

impl<B: Backend> Tensors<B> {
    fn new(backend: &B, inputs: &AttentionInputs) -> Result<Self, ExecError> {
        let upload = |name: &str, tensor: &HostTensor| backend.upload(name, tensor.clone());
        let dout = inputs.dout.as_ref().unwrap_or(&inputs.q);
        let lse = HostTensor::zeros(vec![inputs.q.rows(), SPEC.heads_q], SPEC.dtype.accumulator());
        Ok(Self {
            read: [
                upload("q", &inputs.q)?,
                upload("k", &inputs.k)?,
                upload("v", &inputs.v)?,
                upload("dout", dout)?,
            ],
            out: upload("out", dout)?,
            lse: upload("lse", &lse)?,
            gradients: [upload("dq", &inputs.q)?, upload("dk", &inputs.k)?, upload("dv", &inputs.v)?],
        })
    }

    fn forward(&self) -> ForwardTensors<'_, B> {
        let [q, k, v, _] = &self.read;
        ForwardTensors { q, k, v, sink: None, out: &self.out, lse: &self.lse, max_logits: None }
    }

    fn backward(&self) -> BackwardTensors<'_, B> {
        let ([q, k, v, dout], [dq, dk, dv]) = (&self.read, &self.gradients);
        let Self { out, lse, .. } = self;
        BackwardTensors { dout, q, k, v, sink: None, out, lse, dlse: None, dq, dk, dv, dsink: None }
    }
}

fn exec(source: ExecError) -> CliError {
    CliError::Run { source }
}

type Calls<M> = AttentionCalls<M>;

impl Case<'_> {
    /// `counted` runs what it is given and says what the driver was asked.
    fn measure<M: Machine>(
        &self,
        machine: &M,
        counted: impl Fn(&mut dyn FnMut() -> Result<(), CliError>) -> Result<Option<[usize; 3]>, CliError>,
    ) -> Result<Vec<FreshMasksRow>, CliError> {
        let config = WorldConfig { limit: Duration::from_secs(120), poison: false, ..WorldConfig::default() };
        let group = Group::connect(machine, self.ranks, config).map_err(exec)?;
        let [mut adopt, mut cold, mut forward, mut backward] = [(); 4].map(|()| Samples::default());
        let mut first = [Samples::default(), Samples::default()];
        for number in 0..=SAMPLES {
            let mask = pack(self.tokens, number)?;
            let ahead = plan(&mask, self.ranks, &self.planning)?;
            let inputs = random_inputs(&mask, &SPEC, number as u64, Pass::ForwardBackward);
            let of_ranks = inputs.of_ranks(&ahead).map_err(exec)?;
            let ranks = group.ranks().iter().zip(&of_ranks);
            let tensors = ranks.map(|(rank, inputs)| Tensors::new(rank.backend(), inputs));
            let tensors = tensors.collect::<Result<Vec<_>, _>>().map_err(exec)?;
            let (mut kept, mut adopted) = (None, 0.0);
            let of_adopting = counted(&mut || {
                let began = Instant::now();
                kept = Some(prepare(&group, &ahead)?);
                adopted = began.elapsed().as_secs_f64();
                Ok(())
            })?;
            drop(kept);
            let began = Instant::now();
            let calls = prepare(&group, &plan(&mask, self.ranks, &self.planning)?)?;
            step(&calls, &tensors)?;
            let unprepared = began.elapsed().as_secs_f64();
            group.synchronize().map_err(exec)?;
            if number == 0 {
                // Loads kernels, and is checked.
                self.check(machine, &ahead, &inputs, &group, &tensors)?;
                continue;
            }
            adopt.add(adopted, of_adopting);
            cold.add(unprepared, None);
            let timed = |calls: &Calls<M>, pass: Pass, samples: &mut Samples| -> Result<(), CliError> {
                let mut seconds = 0.0;
                let asked = counted(&mut || {
                    let began = Instant::now();
                    let tickets = call(calls, &tensors, pass)?;
                    seconds = began.elapsed().as_secs_f64();
                    drop(tickets);
                    Ok(())
                })?;
                samples.add(seconds, asked);
                Ok(())
            };
            const PASSES: [Pass; 2] = [Pass::Forward, Pass::ForwardBackward];
            // What a step meets whose mask a loader's thread has made ready.
            let ready = thread::scope(|scope| scope.spawn(|| prepare(&group, &ahead)).join());
            let ready = ready.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            for (pass, samples) in PASSES.into_iter().zip(&mut first) {
                timed(&ready, pass, samples)?;
            }
            group.synchronize().map_err(exec)?;
            for _ in 0..CALLS {
                for (pass, samples) in PASSES.into_iter().zip([&mut forward, &mut backward]) {
                    timed(&calls, pass, samples)?;
                }
                group.synchronize().map_err(exec)?;
            }
        }
        group.close().map_err(exec)?;
        let [first_forward, first_backward] = first;
        let all = [
            ("adopt", adopt),
            ("cold", cold),
            ("first_forward", first_forward),
            ("first_backward", first_backward),
            ("enqueue_forward", forward),
            ("enqueue_backward", backward),
        ];
        let of = |(what, samples): (_, Samples)| {
            row(what, self.device.clone(), self.ranks, self.tokens, &samples.seconds, samples.asked)
        };
        Ok(all.into_iter().map(of).collect())
    }

    /// Compares what calls left with a run of the same tensors.
    fn check<M: Machine>(
        &self,
        machine: &M,
        plan: &Plan,
        inputs: &AttentionInputs,
        group: &Group<M>,
        tensors: &[Tensors<M::Backend>],
    ) -> Result<(), CliError> {
        let run = RunConfig { deterministic: true, ..RunConfig::default() }.with_poison(false);
        let right = run_attention_on(machine, plan, &SPEC, inputs, &run).map_err(exec)?.outputs;
        let right = AttentionInputs { q: right.out, ..inputs.clone() }.of_ranks(plan).map_err(exec)?;
        let mut unlike = 0;
        for ((rank, tensors), right) in group.ranks().iter().zip(tensors).zip(&right) {
            let found = rank.backend().download(&tensors.out).map_err(exec)?;
            unlike += unlike_elements(&found, &right.q);
        }
        match unlike {
            0 => Ok(()),
            elements => Err(CliError::check(CheckFault::OfCalls { elements })),
        }
    }
}

fn prepare<M: Machine>(group: &Group<M>, plan: &Plan) -> Result<Calls<M>, CliError> {
    group.attention(plan, &SPEC, Pass::ForwardBackward, OverlapPolicy::default(), true).map_err(exec)
}

fn call<M: Machine>(
    calls: &Calls<M>,
    tensors: &[Tensors<M::Backend>],
    pass: Pass,
) -> Result<Vec<Ticket<M::Backend>>, CliError> {
    let called = match pass {
        Pass::Forward => calls.forward(&tensors.iter().map(Tensors::forward).collect::<Vec<_>>(), None),
        Pass::ForwardBackward => {
            calls.backward(&tensors.iter().map(Tensors::backward).collect::<Vec<_>>(), None)
        }
    };
    called.map_err(exec)
}

fn step<M: Machine>(calls: &Calls<M>, tensors: &[Tensors<M::Backend>]) -> Result<(), CliError> {
    [Pass::Forward, Pass::ForwardBackward]
        .into_iter()
        .try_for_each(|pass| call(calls, tensors, pass).map(drop))
}

fn text(rows: &[FreshMasksRow]) -> String {
    const COLUMNS: [Column; 8] = [
        Column::name("what"),
        Column::number_name("ranks"),
        Column::number_name("tokens"),
        Column::number("median", 0),
        Column::number("fastest", 2),
        Column::number("synchronizations", 1),
        Column::number("allocations", 1),
        Column::number("uploads", 1),
    ];
    let count = |count: Option<usize>| count.map_or_else(|| "–".to_owned(), |count| count.to_string());
    let cells = |row: &FreshMasksRow| {
        let [median, fastest] = [row.median_seconds, row.min_seconds].map(format_seconds);
        let [waits, made, uploads] = [row.synchronizations, row.allocations, row.uploads].map(count);
        let FreshMasksRow { what, ranks, tokens, .. } = row;
        vec![(*what).to_owned(), ranks.to_string(), tokens.to_string(), median, fastest, waits, made, uploads]
    };
    table(&COLUMNS, rows.iter().map(cells), &console::style())
}
