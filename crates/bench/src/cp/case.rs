//! One mask in `bench cp`: planned, predicted, run in interleaved variants, checked, and what is hidden of its communication.

use counterpoint_choose::{AttentionPrediction, PlanConfig};
use counterpoint_console::{
    self as console, CliError,
    arguments::{Exchange, PassOverlaps, dtype_name},
    launched::ended,
    overlap::Overlapped,
    prediction::predict,
    rank_machine::AttentionRuns,
    solution::Solution,
};
use counterpoint_exec::{AttentionRun, Pass, RanksRun, RunConfig, RunTimes};
use counterpoint_mask::{Mask, MaskPreset};
use counterpoint_plan::{RankPlan, Topology, TrafficBounds};
use counterpoint_reference::{CheckReport, Sample, check_sample};
use counterpoint_report::{
    BenchRow, Rate, Statistics, TimelinePair, TraceSection, chrome_trace, format_bytes, format_ratio,
    format_seconds,
};
use counterpoint_schedule::{GradientReduction, PassPolicies, Timeline};
use rayon::prelude::*;
use serde_json::json;

use super::hiding::Hiding;
use super::peers::{self, PeerResult};
use super::{Bench, SAMPLED_KEYS, SAMPLED_ROWS, WARM_UPS};
use crate::attention::{BACKWARD, FORWARD, shape_text, verified};
use crate::interleaved::run_order;
use crate::masks;
use crate::pytorch::Peers;

/// The last run of a row.
pub(super) struct Traced {
    name: String,
    measured: Timeline,
    predicted: Option<Timeline>,
}

pub(super) fn trace(rows: &[Traced]) -> String {
    let sections: Vec<TraceSection<'_>> = rows
        .iter()
        .map(|row| TraceSection {
            name: &row.name,
            timelines: TimelinePair { predicted: row.predicted.as_ref(), measured: Some(&row.measured) },
        })
        .collect();
    chrome_trace(&sections)
}

/// One mask on so many ranks, planned, and by which policies it is to run.
pub(super) struct Planned {
    topology: Topology,
    exchange: Exchange,
    asked: PassOverlaps,
    pub(super) policies: PassPolicies,
    pub(super) solution: Solution,
    config: PlanConfig,
}

/// One mask on so many ranks under one policy of each pass, ready to run in turn with others.
pub(super) struct Variant<'a> {
    topology: Topology,
    exchange: Exchange,
    asked: PassOverlaps,
    /// Whether it is one of those that were asked for.
    is_asked: bool,
    policies: PassPolicies,
    solution: Solution,
    predicted: AttentionPrediction,
    /// Several where each GPU does the same by itself, none in a process that has no part in it.
    runs: Vec<Box<dyn AttentionRuns + 'a>>,
    times: RanksRun,
    inter_node: Option<InterNodeBytes>,
}

impl Variant<'_> {
    /// Whether it runs by these policies.
    pub(super) fn runs_by(&self, policies: PassPolicies) -> bool {
        self.policies == policies
    }
}

impl<'a> Bench<'a> {
    /// Plans, and chooses what was left to be chosen.
    pub(super) fn planned(
        &self,
        mask: &Mask,
        topology: Topology,
        exchange: Exchange,
        asked: PassOverlaps,
    ) -> Result<Planned, CliError> {
        let (solution, config) = self.solve(mask, topology, exchange)?;
        let (plan, spec, backward) = (&solution.plan, &self.spec, self.backward());
        let overlapped = Overlapped { plan, spec, backward, config: &config };
        let policies = overlapped.by(asked, &[self.ranks.transport()])?.policies;
        Ok(Planned { topology, exchange, asked, policies, solution, config })
    }

    /// How gradients travel; `None` where there are none.
    fn backward(&self) -> Option<GradientReduction> {
        self.inputs.dout.as_ref().map(|_| self.reduction())
    }

    /// Predicts and prepares.
    pub(super) fn variant(&self, planned: Planned, is_asked: bool) -> Result<Variant<'a>, CliError> {
        let Planned { topology, exchange, asked, policies, solution, config } = planned;
        let predicted = predict(&solution.plan, &self.spec, policies, self.backward(), &config)?;
        let run_config = RunConfig {
            policy: policies,
            deterministic: self.arguments.deterministic,
            ..RunConfig::default()
        }
        .with_poison(false);
        let ranks = self.ranks;
        let runs = ranks.prepare(&solution.plan, &self.spec, &self.inputs, &run_config).map_err(ended)?;
        let inter_node = (topology.nodes() > 1).then(|| {
            let planned =
                predicted.forward_inter_node_bytes + predicted.backward_inter_node_bytes.unwrap_or(0);
            InterNodeBytes { planned, counted: Some(0) }
        });
        let times = RanksRun::of_outputs(Vec::new());
        Ok(Variant {
            topology,
            exchange,
            asked,
            is_asked,
            policies,
            solution,
            predicted,
            runs,
            times,
            inter_node,
        })
    }

    /// Runs a pass in all variants, those of the peers too, once each in turn, again and again.
    pub(super) fn run(
        &self,
        pass: Pass,
        variants: &mut [Variant<'_>],
        peers: &mut Peers<PeerResult>,
    ) -> Result<(), CliError> {
        let of_peers = peers::of_pass(peers, pass);
        for round in 0..WARM_UPS + self.arguments.iterations as usize {
            for next in run_order(round, variants.len() + of_peers.len()) {
                match variants.get_mut(next) {
                    Some(variant) => self.run_once(pass, round, variant)?,
                    None => peers.run(of_peers[next - variants.len()], round >= WARM_UPS),
                }
            }
        }
        Ok(())
    }

    fn run_once(&self, pass: Pass, round: usize, variant: &mut Variant<'_>) -> Result<(), CliError> {
        let Variant { runs, times, inter_node, .. } = variant;
        // Time stamps of operations hold up others.
        let taken = if round < WARM_UPS { RunTimes::Operations } else { RunTimes::Whole };
        runs.iter_mut().for_each(|runs| runs.set_timing(taken));
        let before = self.ranks.sent_between_nodes();
        let slowest = match &mut runs[..] {
            [alone] => Some(alone.run(pass).map_err(ended)?),
            several => {
                let timelines = several.par_iter_mut().map(|runs| runs.run(pass));
                let timelines: Vec<Timeline> = timelines.collect::<Result<_, _>>().map_err(ended)?;
                timelines.into_iter().max_by(|a, b| a.duration().total_cmp(&b.duration()))
            }
        };
        let Some(timeline) = slowest else { return Ok(()) };
        if let Some(inter_node) = inter_node.as_mut().filter(|_| round == 0) {
            let sent = self.ranks.crossed_since(before)?;
            inter_node.counted = inter_node.counted.zip(sent).map(|(counted, sent)| counted + sent);
        }
        let RanksRun { forward, backward, forward_seconds, backward_seconds, .. } = times;
        let seconds = if pass == Pass::Forward { forward_seconds } else { backward_seconds };
        match (taken, pass) {
            (RunTimes::Whole | RunTimes::Nothing, _) => seconds.push(timeline.duration()),
            (RunTimes::Operations, Pass::Forward) => *forward = timeline,
            (RunTimes::Operations, Pass::ForwardBackward) => *backward = Some(timeline),
        }
        Ok(())
    }

    /// What came of it, checked; `None` in a process that has no results.
    pub(super) fn finish(&self, mask: &Mask, variant: Variant<'_>) -> Result<Option<Case>, CliError> {
        let Variant {
            topology,
            exchange,
            asked,
            is_asked,
            policies,
            solution,
            predicted,
            runs,
            times,
            inter_node,
        } = variant;
        // What each GPU found by itself is the same.
        let Some(runs) = runs.into_iter().next() else { return Ok(None) };
        let Some(run) = runs.finish(&solution.plan, times).map_err(ended)? else { return Ok(None) };
        let pass = if self.inputs.dout.is_some() { Pass::ForwardBackward } else { Pass::Forward };
        let sample = Sample::random(mask, &self.spec, pass, SAMPLED_ROWS, SAMPLED_KEYS, mask.area());
        let check = check_sample(mask, &self.spec, &self.inputs, &run.outputs, &sample);
        let (area, cp_size) = (mask.area(), topology.world_size);
        let traffic = TrafficBounds::new(&solution.plan, mask, &self.spec);
        Ok(Some(Case {
            area,
            cp_size,
            traffic,
            exchange,
            asked,
            is_asked,
            policies,
            hiding: [None; 2],
            inter_node,
            solution,
            predicted,
            run,
            check,
        }))
    }
}

/// Bytes that cross between nodes in a forward and a backward, all ranks together.
struct InterNodeBytes {
    /// By the Programs.
    planned: u64,
    /// Those that were sent, where the transport counts them.
    counted: Option<u64>,
}

const PASSES: [Pass; 2] = [Pass::Forward, Pass::ForwardBackward];

/// What came out of one mask on so many ranks.
pub(super) struct Case {
    area: u64,
    cp_size: usize,
    /// Key rows that all ranks receive, compared with other variants to distribute attention.
    traffic: TrafficBounds,
    exchange: Exchange,
    asked: PassOverlaps,
    is_asked: bool,
    policies: PassPolicies,
    /// What is hidden of the forward and of the backward, judged by the same with nothing side by side.
    hiding: [Option<Hiding>; 2],
    /// Between several nodes.
    inter_node: Option<InterNodeBytes>,
    solution: Solution,
    predicted: AttentionPrediction,
    run: AttentionRun,
    check: CheckReport,
}

impl Case {
    /// The row of one pass, where it ran; compared with the same on one rank.
    pub(super) fn row(
        &self,
        bench: &Bench<'_>,
        mask: MaskPreset,
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
        let hiding = self.hiding(pass);
        let predicted = predicted.map(Timeline::duration);
        let row = BenchRow {
            name: name.to_owned() + &baseline.map_or_else(String::new, |_| self.way_text(bench)),
            shape: shape_text(&bench.inputs.q, &bench.inputs.k),
            dtype: dtype_name(bench.spec.dtype).to_owned(),
            mask: Some(mask.name().to_owned()),
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
            "overlap": self.policies.to_string(),
            "asked": self.asked.to_string(),
            "deterministic": bench.arguments.deterministic,
            "chunk_size": plan.k_dispatch.chunk_size(),
            // Stage 0 is the local work.
            "stages": stages.len() - 1,
            "nodes": bench.topology.nodes(),
            "exchange": masks::value_name(&self.exchange),
            "planned_crossing_bytes": self.inter_node.as_ref().map(|inter_node| inter_node.planned),
            "counted_crossing_bytes": self.inter_node.as_ref().and_then(|inter_node| inter_node.counted),
            "received_rows": plan.ranks.iter().map(RankPlan::recv_rows).max(),
            // Of all ranks.
            "traffic": self.traffic,
            "sequential_seconds": hiding.map(|hiding| hiding.sequential),
            "hideable_seconds": hiding.map(|hiding| hiding.hideable),
            "overlap_efficiency": hiding.and_then(|hiding| hiding.efficiency()),
            // To which the time that is hidden is known.
            "overlap_noise_seconds": hiding.map(|hiding| hiding.noise),
            // Of a run with time stamps, which a single hardware queue is held up by.
            "communication_seconds": overlap.communication_seconds,
            "exposed_seconds": overlap.exposed_seconds,
            // Of these, behind a rank's computation while that of the slowest lasts.
            "imbalance_seconds": overlap.imbalance_seconds,
            // Of the runs without, what they took that the ranks' computations do not.
            "beyond_compute_seconds": statistics.median - overlap.compute_seconds,
            "predicted_seconds": predicted,
            "measured_over_predicted": predicted.map(|predicted| statistics.median / predicted),
            "scaling": scaling,
        });
        Some((row, detail, &self.check))
    }

    /// What to read from one pass, and its timelines.
    pub(super) fn finding(
        &self,
        bench: &Bench<'_>,
        mask: MaskPreset,
        pass: Pass,
    ) -> Option<(String, Traced)> {
        let (seconds, measured, predicted) = self.pass(pass)?;
        let median = Statistics::of(seconds)?.median;
        let key = if pass == Pass::Forward { "forward" } else { "backward" };
        let variant = self.way_text(bench);
        let name = format!("{} {key}{variant}, {} tokens a rank", mask.name(), bench.tokens);
        let rank = &self.solution.plan.ranks[0];
        let stages = if pass == Pass::Forward { rank.forward.len() } else { rank.backward.len() } - 1;
        let predicted_seconds = predicted.map(Timeline::duration);
        let predicted_text = predicted_seconds.map_or_else(String::new, |predicted| {
            let ratio = format_ratio(median / predicted);
            format!(", predicted {} (measured {ratio})", format_seconds(predicted))
        });
        let overlap = measured.overlap();
        let hidden = self.hiding(pass).map_or_else(String::new, |hiding| format!("; {}", hiding.text()));
        let imbalance = match overlap.imbalance_seconds {
            0.0 => String::new(),
            seconds => format!(", {} waiting for the slowest rank", format_seconds(seconds)),
        };
        let stages = console::count(stages, "remote stage");
        let finding =
            format!("{name}: {}{predicted_text}; {stages}{hidden}{imbalance}", format_seconds(median));
        Some((finding, Traced { name, measured: measured.clone(), predicted: predicted.cloned() }))
    }

    /// What distinguishes it from the others.
    fn way_text(&self, bench: &Bench<'_>) -> String {
        format!("{}{}", bench.exchange_text(self.exchange), bench.policy_text(self.asked, self.policies))
    }

    /// What is received, compared with other variants to distribute attention, in parts of what a ring moves.
    pub(super) fn traffic_text(&self, bench: &Bench<'_>, mask: MaskPreset) -> Option<String> {
        let (mask, variant) = (mask.name(), self.way_text(bench));
        let shares =
            self.traffic.of_ring()?.map(|(name, share)| format!("{name} {share:.3}")).collect::<Vec<_>>();
        Some(format!("{mask}{variant}: key rows received, in parts of a ring's: {}", shares.join(", ")))
    }

    /// What crosses between nodes, where there are several.
    pub(super) fn inter_node_text(&self, bench: &Bench<'_>, mask: MaskPreset) -> Option<String> {
        let InterNodeBytes { planned, counted } = self.inter_node.as_ref()?;
        let counted = match counted {
            Some(bytes) if bytes == planned => ", as many counted".to_owned(),
            Some(bytes) => format!(", {} counted", format_bytes(*bytes)),
            None => ", not counted by this transport".to_owned(),
        };
        let (mask, variant) = (mask.name(), self.way_text(bench));
        Some(format!("{mask}{variant}: {} between nodes{counted}", format_bytes(*planned)))
    }

    /// What is wrong, where other bytes crossed than planned.
    pub(super) fn miscounted(&self, mask: MaskPreset) -> Option<String> {
        let InterNodeBytes { planned, counted } = *self.inter_node.as_ref()?;
        let counted = counted.filter(|counted| *counted != planned)?;
        Some(format!("{}: {counted} bytes crossed between nodes, not {planned}", mask.name()))
    }

    /// Whether its rows cross between nodes as the other's do.
    pub(super) fn crosses_alike(&self, other: &Self) -> bool {
        self.exchange == other.exchange
    }

    /// Whether it is one of those that were asked for.
    pub(super) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Judges cases that differ in their policy only by the one of them that is `sequential`, interleaved with them.
    pub(super) fn judge(cases: &mut [Case], sequential: PassPolicies) {
        let Some(plain) = cases.iter().position(|case| case.policies == sequential) else { return };
        for index in (0..cases.len()).filter(|index| *index != plain) {
            cases[index].hiding = PASSES.map(|pass| {
                let (plain_seconds, measured, _) = cases[plain].pass(pass)?;
                let (seconds, ..) = cases[index].pass(pass)?;
                Hiding::of(plain_seconds, measured, seconds)
            });
        }
    }

    /// Of a pass, where there is something to hide and something to judge it by.
    fn hiding(&self, pass: Pass) -> Option<Hiding> {
        let [forward, backward] = self.hiding;
        if pass == Pass::Forward { forward } else { backward }
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
