//! `counterpoint bench cp`.

mod peers;
mod sizes;

use counterpoint_exec::{
    AttentionInputs, AttentionRun, CheckReport, Facet, Pass, RunConfig, Sample, check_sample, random_inputs,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, MachineProfile, PlanConfig, RankPlan, Topology};
use counterpoint_report::{
    BenchRow, Rate, Statistics, TimelinePair, TraceSection, chrome_trace, format_ratio, format_seconds,
};
use counterpoint_schedule::{GradientReduction, OverlapPolicy, Timeline};
use serde_json::json;

use self::sizes::Sizes;
use super::bench_attention::{BACKWARD, FORWARD, Section, shape_text, verified};
use super::bench_mask;
use super::launched::{as_rank, ended, launch, refuse_other_sizes};
use super::nodes::topology;
use super::prediction::Prediction;
use super::rank_machine::RankMachine;
use super::solution::Solution;
use crate::arguments::{BenchCpArguments, BenchMask, Device, Exchange, dtype_name};
use crate::console;
use crate::error::CliError;
use crate::output::Outputs;
use crate::profile;
use crate::progress::Progress;

/// Rows and keys that are compared with the definition, in f64.
const SAMPLED_ROWS: usize = 32;
const SAMPLED_KEYS: usize = 8;
const WARM_UPS: usize = 3;

/// `counterpoint bench cp`.
pub(crate) fn run(arguments: &BenchCpArguments) -> Result<(), CliError> {
    match launch()? {
        None => measure_all(
            arguments,
            &RankMachine::open(arguments.device, arguments.cp_size, arguments.transport)?,
        ),
        Some(launch) => {
            refuse_other_sizes(&launch, "--cp-size", arguments.cp_size.unwrap_or(launch.world_size))?;
            refuse_threads_alone(arguments)?;
            let topology = topology(launch.world_size, arguments.nodes)?;
            as_rank(&launch, RunConfig::default().limit, |rendezvous| {
                let given = Facet::new("the arguments", format!("{arguments:?}"));
                rendezvous.agree("arguments", &[given]).map_err(ended)?;
                let ranks = RankMachine::join(rendezvous, &launch, arguments.transport, topology)?;
                measure_all(arguments, &ranks)
            })
        }
    }
}

/// What only ranks that are threads do.
fn refuse_threads_alone(arguments: &BenchCpArguments) -> Result<(), CliError> {
    let reason = "starts processes of its own; run it without a launcher".to_owned();
    if let Some(names) = &arguments.peers {
        return Err(CliError::Flag { flag: "--peers", value: names.clone(), reason });
    }
    if arguments.device == Device::Cpu {
        let reason =
            "is timed with ranks as threads; run it without a launcher, or with --device cuda".to_owned();
        return Err(CliError::Flag { flag: "--device", value: "cpu".to_owned(), reason });
    }
    Ok(())
}

fn measure_all(arguments: &BenchCpArguments, ranks: &RankMachine) -> Result<(), CliError> {
    let sizes = Sizes::of(arguments, ranks.gpus());
    let topology = topology(sizes.cp_size, arguments.nodes)?;
    // One process writes what all have timed.
    let traced_to = arguments.trace.as_deref().filter(|_| ranks.prints());
    let outputs = Outputs::check(&[("--trace", traced_to)], &[])?;
    if ranks.prints() {
        console::note_development_build();
    }
    let mut wrong = Vec::new();
    let mut traced = Vec::new();
    for &tokens in &sizes.tokens {
        let bench = Bench::new(arguments, ranks, topology, &sizes, tokens)?;
        let section = bench.measure(&arguments.masks, &mut traced)?;
        if !ranks.prints() {
            continue;
        }
        if arguments.json {
            section.rows.iter().try_for_each(console::print_json)?;
        } else {
            console::print(&section.text(&console::style()))?;
        }
        wrong.extend(section.wrong);
    }
    outputs.write(|_| Ok(trace(&traced).into_bytes()))?;
    if let Some(names) = &arguments.peers {
        peers::run(names, arguments, &sizes)?;
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(CliError::CheckFailed {
        what: format!("rows out of bounds against the f64 reference: {}", wrong.join("; ")),
    })
}

/// The last run of a row.
struct Traced {
    name: String,
    measured: Timeline,
    predicted: Option<Timeline>,
}

fn trace(rows: &[Traced]) -> String {
    let sections: Vec<TraceSection<'_>> = rows
        .iter()
        .map(|row| TraceSection {
            name: &row.name,
            timelines: TimelinePair { predicted: row.predicted.as_ref(), measured: Some(&row.measured) },
        })
        .collect();
    chrome_trace(&sections)
}

/// One number of tokens, with its tensors.
struct Bench<'a> {
    arguments: &'a BenchCpArguments,
    ranks: &'a RankMachine,
    topology: Topology,
    tokens: usize,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    profile: Option<MachineProfile>,
    policy: OverlapPolicy,
}

impl<'a> Bench<'a> {
    fn new(
        arguments: &'a BenchCpArguments,
        ranks: &'a RankMachine,
        topology: Topology,
        sizes: &Sizes,
        tokens: usize,
    ) -> Result<Self, CliError> {
        let (heads_q, heads_kv) = sizes.heads;
        let spec = AttentionSpec {
            heads_q,
            heads_kv,
            head_dim: sizes.head_dim,
            head_dim_v: sizes.head_dim,
            dtype: match ranks {
                RankMachine::Cpu(_) => DType::F32,
                RankMachine::Cuda(_) | RankMachine::Process(_) => DType::Bf16,
            },
            scale: 1.0 / (sizes.head_dim as f64).sqrt(),
            softcap: 0.0,
            seqlen_sink: 0,
        };
        // Inputs do not depend on the mask; they need one for its length.
        let longest = bench_mask::load(BenchMask::Full, tokens * sizes.cp_size)?;
        let inputs = random_inputs(&longest, &spec, tokens as u64, !arguments.forward_only);
        let profile = ranks.profile(arguments.planning.profile.as_deref())?;
        let policy = profile::policy(arguments.overlap, profile.as_ref())?;
        Ok(Self { arguments, ranks, topology, tokens, spec, inputs, profile, policy })
    }

    fn measure(&self, masks: &[BenchMask], traced: &mut Vec<Traced>) -> Result<Section, CliError> {
        let mut section = Section {
            title: format!(
                "distributed attention, {} tokens a rank, {}, {}; vs baseline: the same on one rank",
                self.tokens,
                self.ranks.name(),
                self.policy
            ),
            rows: Vec::new(),
            findings: Vec::new(),
            wrong: Vec::new(),
        };
        let progress = Progress::new();
        for &name in masks {
            let mask = bench_mask::load(name, self.inputs.q.rows())?;
            progress.step(format!("{}, one rank", bench_mask::name(name)));
            let alone = self.case(&mask, Topology::flat(1))?;
            let ranks = console::count(self.topology.world_size, "rank");
            progress.step(format!("{}, {ranks}", bench_mask::name(name)));
            let together = self.case(&mask, self.topology)?;
            let (Some(alone), Some(together)) = (alone, together) else { continue };
            for pass in [Pass::Forward, Pass::ForwardBackward] {
                let rows = [together.row(self, name, pass, Some(&alone)), alone.row(self, name, pass, None)];
                for (row, detail, check) in rows.into_iter().flatten() {
                    section.add(row, detail, check);
                }
                if let Some((finding, timelines)) = together.finding(self, name, pass) {
                    section.findings.push(finding);
                    traced.extend(self.arguments.trace.is_some().then_some(timelines));
                }
            }
        }
        Ok(section)
    }

    /// Plans, predicts, runs and checks; `None` in a process that has no results.
    fn case(&self, mask: &Mask, topology: Topology) -> Result<Option<Case>, CliError> {
        let cp_size = topology.world_size;
        let planning = &self.arguments.planning;
        let config = PlanConfig {
            chunk_size: planning.chunk_size,
            dispatch: planning.dispatch,
            stages: planning.stages,
            query_exchange: planning.query_exchange_of(self.arguments.deterministic),
            topology,
            cost: self.ranks.cost(&self.spec, cp_size, self.profile.as_ref()),
        };
        let mut solution = Solution::solve(mask, &self.spec, &config)?;
        if topology.nodes() > 1 && self.arguments.exchange == Exchange::TwoLevel {
            solution = solution.over_nodes(&topology);
        }
        let reduction = match self.arguments.deterministic {
            true => GradientReduction::Deterministic,
            false => GradientReduction::PerStage,
        };
        let backward = self.inputs.dout.as_ref().map(|_| reduction);
        let policy = self.policy;
        let predicted = Prediction::of(&solution.plan, &self.spec, policy, backward, &config)?;
        let run_config = RunConfig {
            policy,
            deterministic: self.arguments.deterministic,
            poison: false,
            warmups: WARM_UPS,
            samples: self.arguments.iterations as usize,
            ..RunConfig::default()
        };
        let run = self.ranks.run(&solution.plan, &self.spec, &self.inputs, &run_config);
        let Some(run) = run.map_err(ended)? else { return Ok(None) };
        let pass = if backward.is_some() { Pass::ForwardBackward } else { Pass::Forward };
        let sample = Sample::random(mask, &self.spec, pass, SAMPLED_ROWS, SAMPLED_KEYS, mask.area());
        let check = check_sample(mask, &self.spec, &self.inputs, &run.outputs, &sample);
        Ok(Some(Case { area: mask.area(), cp_size, solution, predicted, run, check }))
    }
}

/// What came out of one mask on so many ranks.
struct Case {
    area: u64,
    cp_size: usize,
    solution: Solution,
    predicted: Prediction,
    run: AttentionRun,
    check: CheckReport,
}

impl Case {
    /// The row of one pass, where it ran; beside the same on one rank.
    fn row(
        &self,
        bench: &Bench<'_>,
        mask: BenchMask,
        pass: Pass,
        baseline: Option<&Case>,
    ) -> Option<(BenchRow, serde_json::Value, &CheckReport)> {
        let (seconds, measured, predicted) = self.pass(pass)?;
        let statistics = Statistics::of(seconds)?;
        let (name, key, flops, tensors) = match pass {
            Pass::Forward => ("attention forward", "forward", bench.spec.flops_forward(self.area), FORWARD),
            Pass::ForwardBackward => {
                ("attention backward", "backward", bench.spec.flops_backward(self.area), BACKWARD)
            }
        };
        let rate = |case: &Case, median: f64| flops / median / case.cp_size as f64 / 1e12;
        let tflops = rate(self, statistics.median);
        let scaling = baseline.and_then(|alone| {
            let alone_median = Statistics::of(alone.pass(pass)?.0)?.median;
            Some(tflops / rate(alone, alone_median))
        });
        let plan = &self.solution.plan;
        let rank = &plan.ranks[0];
        let stages = if pass == Pass::Forward { &rank.forward } else { &rank.backward };
        let overlap = measured.overlap();
        let predicted = predicted.map(Timeline::duration);
        let row = BenchRow {
            name: name.to_owned(),
            shape: shape_text(&bench.inputs.q, &bench.inputs.k),
            dtype: dtype_name(bench.spec.dtype).to_owned(),
            mask: Some(bench_mask::name(mask)),
            device: bench.ranks.name().to_owned(),
            ranks: self.cp_size,
            seconds: statistics,
            rate: Some(Rate::Compute { tflops }),
            ratio: scaling,
            verified: verified(&self.check, tensors),
        };
        let detail = json!({
            "by": "counterpoint",
            "pass": key,
            "area": self.area,
            "tokens_per_rank": bench.tokens,
            "heads_q": bench.spec.heads_q,
            "heads_kv": bench.spec.heads_kv,
            "head_dim": bench.spec.head_dim,
            "overlap": bench.policy.to_string(),
            "deterministic": bench.arguments.deterministic,
            "chunk_size": plan.k_dispatch.chunk_size(),
            // Stage 0 is the local work.
            "stages": stages.len() - 1,
            "nodes": bench.topology.nodes(),
            "exchange": format!("{:?}", bench.arguments.exchange),
            "received_rows": plan.ranks.iter().map(RankPlan::recv_rows).max(),
            "communication_seconds": overlap.communication_seconds,
            "exposed_seconds": overlap.exposed_seconds,
            "overlap_efficiency": overlap.efficiency,
            "predicted_seconds": predicted,
            "measured_over_predicted": predicted.map(|predicted| statistics.median / predicted),
            "scaling": scaling,
        });
        Some((row, detail, &self.check))
    }

    /// What to read from one pass, and its timelines.
    fn finding(&self, bench: &Bench<'_>, mask: BenchMask, pass: Pass) -> Option<(String, Traced)> {
        let (seconds, measured, predicted) = self.pass(pass)?;
        let median = Statistics::of(seconds)?.median;
        let key = if pass == Pass::Forward { "forward" } else { "backward" };
        let name = format!("{} {key}, {} tokens a rank", bench_mask::name(mask), bench.tokens);
        let rank = &self.solution.plan.ranks[0];
        let stages = if pass == Pass::Forward { rank.forward.len() } else { rank.backward.len() } - 1;
        let predicted_seconds = predicted.map(Timeline::duration);
        let told = predicted_seconds.map_or_else(String::new, |predicted| {
            let ratio = format_ratio(median / predicted);
            format!(", predicted {} (measured {ratio})", format_seconds(predicted))
        });
        let overlap = measured.overlap();
        let hidden =
            overlap.efficiency.map_or_else(String::new, |share| format!(", {:.0} % hidden", 100.0 * share));
        let stages = console::count(stages, "remote stage");
        let communication = format_seconds(overlap.communication_seconds);
        let finding = format!(
            "{name}: {}{told}; {stages}, communication {communication}{hidden}",
            format_seconds(median)
        );
        Some((finding, Traced { name, measured: measured.clone(), predicted: predicted.cloned() }))
    }

    /// Seconds, the timeline of the last run and the predicted one.
    fn pass(&self, pass: Pass) -> Option<(&[f64], &Timeline, Option<&Timeline>)> {
        Some(match pass {
            Pass::Forward => (&self.run.forward_seconds, &self.run.forward, Some(&self.predicted.forward)),
            Pass::ForwardBackward => {
                (&self.run.backward_seconds, self.run.backward.as_ref()?, self.predicted.backward.as_ref())
            }
        })
    }
}
