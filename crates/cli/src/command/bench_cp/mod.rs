//! `counterpoint bench cp`.

mod peers;
mod sizes;

use counterpoint_exec::{
    AttentionInputs, AttentionRun, CheckReport, Pass, RunConfig, Sample, check_sample, random_inputs,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, PlanConfig, RankPlan, Topology};
use counterpoint_report::{BenchRow, Rate, Statistics};
use counterpoint_schedule::{GradientReduction, Timeline};
use serde_json::json;

use self::sizes::Sizes;
use super::bench_attention::{BACKWARD, FORWARD, Section, shape_text, verified};
use super::bench_mask;
use super::prediction::Prediction;
use super::rank_machine::RankMachine;
use super::solution::Solution;
use crate::arguments::{BenchCpArguments, BenchMask, dtype_name};
use crate::console;
use crate::error::CliError;
use crate::progress::Progress;

/// Rows and keys that are compared with the definition, in f64.
const SAMPLED_ROWS: usize = 32;
const SAMPLED_KEYS: usize = 8;
const WARM_UPS: usize = 3;

/// `counterpoint bench cp`.
pub(crate) fn run(arguments: &BenchCpArguments) -> Result<(), CliError> {
    let ranks = RankMachine::open(arguments.device, arguments.cp_size, arguments.transport)?;
    let sizes = Sizes::of(arguments, ranks.gpus());
    console::note_development_build();
    let mut wrong = Vec::new();
    for &tokens in &sizes.tokens {
        let section = Bench::new(arguments, &ranks, &sizes, tokens)?.measure(&arguments.masks)?;
        if arguments.json {
            section.rows.iter().try_for_each(console::print_json)?;
        } else {
            console::print(&section.text(&console::style()))?;
        }
        wrong.extend(section.wrong);
    }
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

/// One number of tokens, with its tensors.
struct Bench<'a> {
    arguments: &'a BenchCpArguments,
    ranks: &'a RankMachine,
    cp_size: usize,
    tokens: usize,
    spec: AttentionSpec,
    inputs: AttentionInputs,
}

impl<'a> Bench<'a> {
    fn new(
        arguments: &'a BenchCpArguments,
        ranks: &'a RankMachine,
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
                RankMachine::Cuda(_) => DType::Bf16,
            },
            scale: 1.0 / (sizes.head_dim as f64).sqrt(),
            softcap: 0.0,
            seqlen_sink: 0,
        };
        // Inputs do not depend on the mask; they need one for its length.
        let longest = bench_mask::load(BenchMask::Full, tokens * sizes.cp_size)?;
        let inputs = random_inputs(&longest, &spec, tokens as u64, !arguments.forward_only);
        Ok(Self { arguments, ranks, cp_size: sizes.cp_size, tokens, spec, inputs })
    }

    fn measure(&self, masks: &[BenchMask]) -> Result<Section, CliError> {
        let mut section = Section {
            title: format!(
                "distributed attention, {} tokens a rank, {}, {}; vs baseline: the same on one rank",
                self.tokens,
                self.ranks.name(),
                self.arguments.overlap
            ),
            rows: Vec::new(),
            findings: Vec::new(),
            wrong: Vec::new(),
        };
        let progress = Progress::new();
        for &name in masks {
            let mask = bench_mask::load(name, self.inputs.q.rows())?;
            progress.step(format!("{}, one rank", bench_mask::name(name)));
            let alone = self.case(&mask, 1)?;
            progress.step(format!("{}, {}", bench_mask::name(name), console::count(self.cp_size, "rank")));
            let together = self.case(&mask, self.cp_size)?;
            for pass in [Pass::Forward, Pass::ForwardBackward] {
                let rows = [together.row(self, name, pass, Some(&alone)), alone.row(self, name, pass, None)];
                for (row, detail, check) in rows.into_iter().flatten() {
                    section.add(row, detail, check);
                }
            }
        }
        Ok(section)
    }

    /// Plans, predicts, runs and checks.
    fn case(&self, mask: &Mask, cp_size: usize) -> Result<Case, CliError> {
        let planning = &self.arguments.planning;
        let config = PlanConfig {
            chunk_size: planning.chunk_size,
            dispatch: planning.dispatch,
            stages: planning.stages,
            query_exchange: planning.query_exchange,
            topology: Topology::flat(cp_size),
            cost: self.ranks.cost(&self.spec, cp_size),
        };
        let solution = Solution::solve(mask, &self.spec, &config)?;
        let reduction = match self.arguments.deterministic {
            true => GradientReduction::Deterministic,
            false => GradientReduction::PerStage,
        };
        let backward = self.inputs.dout.as_ref().map(|_| reduction);
        let policy = self.arguments.overlap;
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
        let run = run.map_err(|source| CliError::Run { source })?;
        let pass = if backward.is_some() { Pass::ForwardBackward } else { Pass::Forward };
        let sample = Sample::random(mask, &self.spec, pass, SAMPLED_ROWS, SAMPLED_KEYS, mask.area());
        let check = check_sample(mask, &self.spec, &self.inputs, &run.outputs, &sample);
        Ok(Case { area: mask.area(), cp_size, solution, predicted, run, check })
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
            "overlap": bench.arguments.overlap.to_string(),
            "deterministic": bench.arguments.deterministic,
            "chunk_size": plan.k_dispatch.chunk_size(),
            // Stage 0 is the local work.
            "stages": stages.len() - 1,
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
