//! What a run of attention gave, in every form that is printed or written.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use counterpoint_choose::AttentionPrediction;
use counterpoint_console::{
    self as console, CheckFault, CliError,
    arguments::{Device, dispatch_name, dtype_name},
    device, origin,
    output::{Outputs, outputs_as_safetensors},
    prediction::rank_seconds,
    solution::Solution,
};
use counterpoint_exec::AttentionRun;
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, PlanSummary};
use counterpoint_reference::CheckReport;
use counterpoint_report::{
    CheckFigures, CheckRow, Figures, HtmlReport, Style, TimelinePair, TraceSection, Verified, check_table,
    chrome_trace, format_bytes, format_count, format_flops, format_seconds, plan_table,
};
use counterpoint_schedule::{Overlap, PassPolicies, Span, Timeline};
use serde::Serialize;

use crate::arguments::AttentionArguments;

/// A run with all that is printed of it.
pub(super) struct AttentionResult<'a> {
    /// Bytes that all ranks have sent between nodes, where they were counted.
    pub(super) crossed: Option<u64>,
    /// By which it ran.
    pub(super) policies: PassPolicies,
    pub(super) arguments: &'a AttentionArguments,
    pub(super) mask: &'a Mask,
    pub(super) spec: AttentionSpec,
    pub(super) solution: Solution,
    pub(super) prediction: AttentionPrediction,
    pub(super) run: AttentionRun,
    pub(super) check: Option<CheckReport>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    seqlen_q: usize,
    seqlen_k: usize,
    area: u64,
    cp_size: usize,
    chunk_size: usize,
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
    head_dim_v: usize,
    dtype: &'static str,
    dispatch: &'static str,
    /// By which it ran; where each pass has one of its own `forward=...,backward=...`.
    overlap_policy: String,
    /// As it was asked for.
    overlap_asked: String,
    deterministic: bool,
    nodes: usize,
    crossing_bytes: InterNodeBytes,
    plan: PlanSummary,
    seconds: Seconds,
    predicted_seconds: Seconds,
    overlap: Overlap,
    overlap_by_pass: BTreeMap<&'static str, Overlap>,
    check: Option<&'a CheckReport>,
    files: BTreeMap<&'static str, &'a Path>,
}

/// Bytes sent between nodes, all ranks together.
#[derive(Serialize)]
struct InterNodeBytes {
    forward: u64,
    backward: Option<u64>,
    /// What was sent indeed, forward and backward, where the transport counts it.
    counted: Option<u64>,
}

/// Seconds until the last rank was done.
#[derive(Serialize)]
struct Seconds {
    plan: Option<f64>,
    forward: f64,
    backward: Option<f64>,
}

impl AttentionResult<'_> {
    /// The bytes of the file that `flag` asked for.
    pub(super) fn contents(&self, flag: &str) -> Result<Vec<u8>, CliError> {
        match flag {
            "--output" => outputs_as_safetensors(&self.run.outputs),
            "--trace" => {
                let sections: Vec<TraceSection<'_>> =
                    self.passes().map(|(name, timelines)| TraceSection { name, timelines }).collect();
                Ok(chrome_trace(&sections).into_bytes())
            }
            _ => Ok(self.report().into_bytes()),
        }
    }

    /// The document of `--json`.
    pub(super) fn document<'a>(&'a self, outputs: &'a Outputs) -> impl Serialize + 'a {
        let (spec, plan) = (&self.spec, &self.solution.plan);
        Document {
            seqlen_q: self.mask.seqlen_q(),
            seqlen_k: self.mask.seqlen_k(),
            area: self.mask.area(),
            cp_size: plan.cp_size(),
            chunk_size: plan.q_dispatch.chunk_size(),
            heads_q: spec.heads_q,
            heads_kv: spec.heads_kv,
            head_dim: spec.head_dim,
            head_dim_v: spec.head_dim_v,
            dtype: dtype_name(spec.dtype),
            dispatch: dispatch_name(self.solution.dispatch),
            overlap_policy: self.policies.to_string(),
            overlap_asked: self.arguments.run.overlap.to_string(),
            deterministic: self.arguments.run.deterministic,
            nodes: self.arguments.nodes,
            crossing_bytes: InterNodeBytes {
                forward: self.prediction.forward_inter_node_bytes,
                backward: self.prediction.backward_inter_node_bytes,
                counted: self.crossed,
            },
            plan: self.solution.summary(self.mask, &self.spec),
            seconds: Seconds {
                plan: Some(self.solution.seconds),
                forward: self.run.forward.makespan(),
                backward: self.run.backward.as_ref().map(Timeline::makespan),
            },
            predicted_seconds: Seconds {
                plan: None,
                forward: self.prediction.forward.makespan(),
                backward: self.prediction.backward.as_ref().map(Timeline::makespan),
            },
            overlap: self.whole_run().overlap(),
            overlap_by_pass: self
                .passes()
                .filter_map(|(name, pair)| Some((name, pair.measured?.overlap())))
                .collect(),
            check: self.check.as_ref(),
            files: outputs.files().map(|(flag, path)| (flag.trim_start_matches('-'), path)).collect(),
        }
    }

    /// The table and what it means.
    pub(super) fn text(&self, outputs: &Outputs) -> String {
        let style = console::style();
        let (mask, spec, plan) = (self.mask, &self.spec, &self.solution.plan);
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{} queries x {} keys, area {}; {}:{} heads of {}, {}",
            format_count(mask.seqlen_q() as u64),
            format_count(mask.seqlen_k() as u64),
            format_count(mask.area()),
            spec.heads_q,
            spec.heads_kv,
            spec.head_dim,
            dtype_name(spec.dtype),
        );
        let _ = writeln!(
            out,
            "{}, {} of {} rows, dispatch {}, planned in {}\n",
            console::count(plan.cp_size(), "rank"),
            console::count(plan.q_dispatch.num_chunks(), "chunk"),
            plan.q_dispatch.chunk_size(),
            dispatch_name(self.solution.dispatch),
            format_seconds(self.solution.seconds),
        );
        out.push_str(&plan_table(plan, Some(&rank_seconds(&self.prediction.forward)), &style));
        out.push('\n');
        self.passes_text(&mut out);
        if let Some(inter_node) = self.inter_node_text() {
            let _ = writeln!(out, "between {} nodes: {inter_node}", self.arguments.nodes);
        }
        self.check_text(&mut out, &style);
        out.push_str(&outputs.places());
        out
    }

    /// Whether the check, if there was one, found everything within its bounds.
    pub(super) fn verdict(&self) -> Result<(), CliError> {
        let Some(check) = self.check.as_ref().filter(|check| !check.passed) else { return Ok(()) };
        Err(CliError::check(CheckFault::OutOfBounds { report: Box::new(check.clone()) }))
    }

    fn passes_text(&self, out: &mut String) {
        let ranks = self.solution.plan.cp_size() as f64;
        let area = self.mask.area();
        let plan = &self.solution.plan.ranks[0];
        for (name, pair) in self.passes() {
            let (Some(measured), Some(predicted)) = (pair.measured, pair.predicted) else { continue };
            let (flops, stages) = match name {
                "forward" => (self.spec.flops_forward(area), plan.forward.len()),
                _ => (self.spec.flops_backward(area), plan.backward.len()),
            };
            let seconds = measured.makespan();
            let rate = if seconds > 0.0 { format_flops(flops / seconds / ranks) } else { "-".to_owned() };
            let _ = writeln!(
                out,
                "{name}: {} ({rate} a rank; predicted {}), {}",
                format_seconds(seconds),
                format_seconds(predicted.makespan()),
                console::stages(stages),
            );
            let overlap = measured.overlap();
            let _ = match overlap.efficiency {
                Some(efficiency) => writeln!(
                    out,
                    "  communication {} a rank, {} of it exposed: overlap efficiency {efficiency:.2}",
                    format_seconds(overlap.communication_seconds),
                    format_seconds(overlap.exposed_seconds),
                ),
                None => writeln!(out, "  nothing to communicate"),
            };
        }
    }

    /// What was sent between nodes, where there are several.
    fn inter_node_text(&self) -> Option<String> {
        let AttentionPrediction { forward_inter_node_bytes, backward_inter_node_bytes, .. } = self.prediction;
        let forward = format!("{} in the forward", format_bytes(forward_inter_node_bytes));
        let text = match backward_inter_node_bytes {
            Some(bytes) => format!("{forward}, {} in the backward", format_bytes(bytes)),
            None => forward,
        };
        let text = match self.crossed {
            Some(bytes) => format!("{text}; {} counted", format_bytes(bytes)),
            None => text,
        };
        (self.arguments.nodes > 1).then_some(text)
    }

    fn check_text(&self, out: &mut String, style: &Style) {
        let Some(check) = self.check_figures() else { return };
        let verdict = if check.passed() { "within bounds" } else { "OUT OF BOUNDS" };
        let _ = writeln!(out, "\ncheck against the dense f64 reference: {verdict}");
        out.push_str(&check_table(&check, style));
        out.push('\n');
    }

    fn check_figures(&self) -> Option<CheckFigures> {
        let check = self.check.as_ref()?;
        let mut rows = Vec::new();
        for tensor in &check.tensors {
            let mut row = |measure: &str, error, bound| {
                let verified = Verified { error, bound };
                rows.push(CheckRow { tensor: tensor.name.clone(), measure: measure.to_owned(), verified });
            };
            row(tensor.relative_to.measure(), tensor.relative_error, tensor.relative_bound);
            if let Some(bound) = tensor.max_abs_bound {
                row("largest", tensor.max_abs_error, bound);
            }
        }
        Some(CheckFigures { rows })
    }

    fn report(&self) -> String {
        let (spec, plan) = (&self.spec, &self.solution.plan);
        let setup = [
            ("mask", self.arguments.mask.clone()),
            ("device", device_name(self.arguments.run.device)),
            ("dtype", dtype_name(spec.dtype).to_owned()),
            ("heads", format!("{}:{} of {}", spec.heads_q, spec.heads_kv, spec.head_dim)),
            ("dispatch", dispatch_name(self.solution.dispatch).to_owned()),
            ("overlap", self.policies.to_string()),
        ];
        let inter_node = self.inter_node_text().map(|text| ("between nodes".to_owned(), text));
        let check = self.check_figures();
        let passes: BTreeMap<_, _> = self.passes().collect();
        HtmlReport {
            title: "Distributed attention",
            mask: self.mask,
            plan,
            figures: Figures {
                setup: setup
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), value))
                    .chain(inter_node)
                    .collect(),
                plan_seconds: Some(self.solution.seconds),
                comm: Some(self.solution.summary(self.mask, spec).comm),
                kv_row_bytes: Some(spec.kv_row_bytes() as u64),
                forward_flops: Some(spec.flops_forward(self.mask.area())),
                backward_flops: Some(spec.flops_backward(self.mask.area())),
            },
            forward: passes.get("forward").copied(),
            backward: passes.get("backward").copied(),
            check: check.as_ref(),
            origin: Some(&origin::here()),
        }
        .render()
    }

    /// The passes that ran, by name, measured and predicted.
    fn passes(&self) -> impl Iterator<Item = (&'static str, TimelinePair<'_>)> {
        let pair =
            |predicted, measured| TimelinePair { predicted: Some(predicted), measured: Some(measured) };
        let backward = self.prediction.backward.as_ref().zip(self.run.backward.as_ref());
        let forward = ("forward", pair(&self.prediction.forward, &self.run.forward));
        [forward]
            .into_iter()
            .chain(backward.map(|(predicted, measured)| ("backward", pair(predicted, measured))))
    }

    /// The passes one after the other, as one timeline.
    fn whole_run(&self) -> Timeline {
        let mut whole = Timeline { name: "attention".to_owned(), ..self.run.forward.clone() };
        let begin = whole.makespan();
        let backward = self.run.backward.iter().flat_map(|timeline| &timeline.spans);
        whole.spans.extend(backward.map(|span| Span {
            start: span.start + begin,
            end: span.end + begin,
            ..span.clone()
        }));
        whole
    }
}

/// What computed.
fn device_name(device: Device) -> String {
    match device {
        Device::Cpu => device::cpu_name(),
        Device::Cuda => {
            counterpoint_cuda::Device::properties_of(0).map_or_else(|_| "GPUs".to_owned(), |first| first.name)
        }
    }
}
