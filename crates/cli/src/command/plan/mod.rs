//! `counterpoint plan`.

mod dispatches;
mod figures;
mod imbalance;

use std::collections::BTreeMap;
use std::fmt::Write;

use counterpoint_choose::{AttentionPrediction, PassChoice, PlanConfig, PolicyChoice};
use counterpoint_console::{
    self as console, CliError, Progress, Schema,
    arguments::{ShapeArguments, dispatch_name, dtype_name},
    input::flags_divide,
    mask_argument,
    nodes::topology,
    origin,
    output::Outputs,
    overlap::{ChosenPass, chosen_text},
    prediction::rank_seconds,
    profile,
    solution::Solution,
};
use counterpoint_cost::{CostModel, MachineProfile};
use counterpoint_exec::PlanningThreads;
use counterpoint_mask::Mask;
use counterpoint_plan::{
    AttentionSpec, DType, Fingerprint, GradientShares, PlanSummary, TrafficBounds, TwoLevelExchange,
};
use counterpoint_report::{
    Figures, HtmlReport, TimelinePair, comparison_table, format_count, format_seconds, plan_table,
};
use serde::Serialize;

use super::comparison::traffic_rows;
use super::programs;
use crate::arguments::PlanArguments;

use dispatches::DispatchRow;
use imbalance::{Imbalance, Level};

/// `counterpoint plan`.
pub(crate) fn run(arguments: &PlanArguments) -> Result<(), CliError> {
    let topology = topology(arguments.cp_size, arguments.nodes)?;
    let profile = profile::modelled(arguments.planning.profile.as_deref())?;
    let spec = attention_spec(&arguments.shape, arguments.planning.gradient_shares, &profile.cost)?;
    let mask = mask_argument::load(&arguments.mask)?;
    let outputs = Outputs::check(&[("--report", arguments.report.as_deref())])?;
    let config = PlanConfig {
        chunk_size: arguments.planning.chunk_size,
        dispatch: arguments.planning.dispatch.named(),
        stages: arguments.planning.stages,
        query_exchange: arguments.planning.query_exchange_of(arguments.cp_size, false),
        topology,
        cost: profile.cost,
    };
    let ranks = arguments.program.map(|rank| programs::ranks(rank, arguments.cp_size)).transpose()?;
    let threads = PlanningThreads::new(arguments.planning_threads);
    let threads = threads.map_err(|source| CliError::Run { source })?;
    let by = threads.planning();
    let needs_pieces = ranks.is_some() || arguments.report.is_some();
    if arguments.cp_size > dispatches::MOST_COMPARED_RANKS && !needs_pieces {
        return figures::run(arguments, &mask, &spec, &profile, &config, &by);
    }
    let progress = Progress::new();
    progress.step(format!("planning for {}", console::count(arguments.cp_size, "rank")));
    let asked = (arguments.planning.dispatch, profile.machine.as_str());
    let solution = Solution::solve(&mask, &spec, &config, asked, &by)?.over_nodes(&topology);
    let query_exchange = arguments.planning.query_exchange_in(&solution.plan, false);
    let config = PlanConfig { dispatch: solution.dispatch, query_exchange, ..config };
    progress.step("simulating");
    let (overlap, prediction) = dispatches::by_default(&solution.plan, &spec, &config)?;
    if let Some(ranks) = ranks {
        drop(progress);
        return console::print(&programs::text(&solution.plan, &spec, overlap.policies, ranks));
    }
    progress.step("comparing dispatches");
    let planned = (&solution.plan, &prediction);
    let dispatches = dispatches::compare(&mask, &spec, &config, planned, &by)?;
    let level = Level::of(&solution.plan, imbalance::compute_balance(&prediction));
    let imbalance = Imbalance::of(&mask, &spec, &config, &level, (arguments.planning.dispatch, &dispatches));
    let choice = overlap.choice;
    let planned =
        PlanReport { arguments, mask: &mask, spec, profile, config, solution, choice, dispatches, imbalance };
    outputs.write(|_| Ok(planned.report(&prediction).into_bytes()))?;
    drop(progress);
    planned.solution.note_idle_ranks();
    if arguments.json {
        return console::print_json(Schema::Plan, &planned.document());
    }
    console::print_folded(&planned.text(&prediction, &outputs))
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    inputs: Inputs<'a>,
    #[serde(flatten)]
    summary: PlanSummary,
    /// How each pass is run by default; none where there are too many ranks to simulate.
    overlap: BTreeMap<&'static str, ChosenPass>,
    dispatches: &'a [DispatchRow],
    imbalance: &'a Option<Imbalance>,
}

/// All that decides a plan and what is predicted of it.
#[derive(Serialize)]
struct Inputs<'a> {
    /// As given.
    mask: &'a str,
    seqlen_q: usize,
    seqlen_k: usize,
    slices: usize,
    attention: &'a AttentionSpec,
    config: &'a PlanConfig,
    model: Model<'a>,
    /// Of the mask, the attention and the configuration, as [`Fingerprint::of`].
    fingerprint: String,
}

impl<'a> Inputs<'a> {
    fn new(
        name: &'a str,
        mask: &Mask,
        attention: &'a AttentionSpec,
        config: &'a PlanConfig,
        profile: &'a MachineProfile,
    ) -> Self {
        Self {
            mask: name,
            seqlen_q: mask.seqlen_q(),
            seqlen_k: mask.seqlen_k(),
            slices: mask.slices().len(),
            attention,
            config,
            model: Model { machine: &profile.machine, source: &profile.source, version: profile.version },
            fingerprint: Fingerprint::of(mask, attention, config).to_string(),
        }
    }
}

/// The machine that is planned for.
#[derive(Serialize)]
struct Model<'a> {
    machine: &'a str,
    source: &'a str,
    version: u32,
}

/// The attention that flags describe, for a machine of this cost.
pub(super) fn attention_spec(
    shape: &ShapeArguments,
    gradient_shares: GradientShares,
    cost: &CostModel,
) -> Result<AttentionSpec, CliError> {
    // A machine whose kernels compute tiles is a GPU.
    let usual = if cost.tiles.is_some() { DType::Bf16 } else { DType::F32 };
    let heads_kv = shape.heads_kv.unwrap_or(shape.heads_q);
    flags_divide(shape.heads_q, heads_kv)?;
    Ok(AttentionSpec {
        heads_q: shape.heads_q,
        heads_kv,
        head_dim: shape.head_dim,
        head_dim_v: shape.head_dim,
        dtype: shape.dtype.unwrap_or(usual),
        scale: 1.0 / (shape.head_dim as f64).sqrt(),
        softcap: 0.0,
        seqlen_sink: 0,
        gradient_shares,
        max_logits: false,
        dlse: false,
    })
}

/// A profile's machine, as text shows it.
fn machine_of(profile: &MachineProfile) -> String {
    profile.machine.chars().filter(|c| !c.is_control()).collect()
}

/// The first line of what is printed.
fn headline(mask: &Mask, config: &PlanConfig, dispatch: &str, chunks: usize, chunk_size: usize) -> String {
    format!(
        "{} queries x {} keys, area {}; {} on {}, {} of {} rows, dispatch {dispatch}\n\n",
        format_count(mask.seqlen_q() as u64),
        format_count(mask.seqlen_k() as u64),
        format_count(mask.area()),
        console::count(config.topology.world_size, "rank"),
        console::count(config.topology.nodes(), "node"),
        console::count(chunks, "chunk"),
        format_count(chunk_size as u64),
    )
}

/// A plan with all that is printed of it.
struct PlanReport<'a> {
    arguments: &'a PlanArguments,
    mask: &'a Mask,
    spec: AttentionSpec,
    /// What it is planned for.
    profile: MachineProfile,
    config: PlanConfig,
    solution: Solution,
    /// How its passes are run by default.
    choice: Option<PolicyChoice>,
    dispatches: Vec<DispatchRow>,
    imbalance: Option<Imbalance>,
}

impl PlanReport<'_> {
    fn document(&self) -> Document<'_> {
        Document {
            inputs: Inputs::new(&self.arguments.mask, self.mask, &self.spec, &self.config, &self.profile),
            summary: self.solution.summary(self.mask, &self.spec),
            overlap: self.passes().map(|(name, pass)| (name, ChosenPass::of(pass))).collect(),
            dispatches: &self.dispatches,
            imbalance: &self.imbalance,
        }
    }

    /// What was chosen for each pass.
    fn passes(&self) -> impl Iterator<Item = (&'static str, &PassChoice)> {
        let choice = self.choice.iter();
        choice.flat_map(|choice| {
            [("forward", &choice.forward)]
                .into_iter()
                .chain(choice.backward.iter().map(|pass| ("backward", pass)))
        })
    }

    fn text(&self, prediction: &AttentionPrediction, outputs: &Outputs) -> String {
        let style = console::style();
        let (mask, plan) = (self.mask, &self.solution.plan);
        let dispatch = dispatch_name(self.solution.dispatch);
        let (chunks, chunk_size) = (plan.q_dispatch.num_chunks(), plan.q_dispatch.chunk_size());
        let mut out = headline(mask, &self.config, dispatch, chunks, chunk_size);
        out.push_str(&plan_table(plan, Some(&rank_seconds(&prediction.forward)), &style));
        if let Some(imbalance) = &self.imbalance {
            out.push_str(&imbalance.text(plan.balance()));
        }
        let bounds = TrafficBounds::new(plan, mask, &self.spec);
        let rows = traffic_rows(dispatch, &bounds, plan.balance(), self.solution.seconds);
        let _ = writeln!(out, "\nkey rows that a rank receives, mean, and as a multiple of this plan's:");
        out.push_str(&comparison_table(plan.cp_size(), &rows, &style));
        if self.config.topology.nodes() > 1 {
            let inter_node = plan.two_level.as_ref().map_or(0, TwoLevelExchange::inter_node_rows);
            let _ = writeln!(
                out,
                "\nbetween nodes: {} key rows in all, each once for a node that needs it in a stage ({} if every rank fetched for itself)",
                format_count(inter_node),
                format_count(plan.flat_inter_node_rows(&self.config.topology)),
            );
            let queries = plan.flat_query_inter_node_rows(&self.config.topology);
            let hosted = plan.two_level.as_ref().filter(|exchange| !exchange.hosted.is_empty());
            if queries > 0 {
                let how = match hosted.map(TwoLevelExchange::query_inter_node_rows) {
                    None => format!("{} query rows, to each host by itself", format_count(queries)),
                    Some(once) => format!(
                        "{} query rows, each once for a node that hosts it ({} if each went to every host by itself)",
                        format_count(once),
                        format_count(queries)
                    ),
                };
                let _ = writeln!(out, "between nodes: {how}; as many partial results back");
            }
        }
        let _ = writeln!(out);
        let machine = machine_of(&self.profile);
        for (name, timeline, count) in [
            ("forward", Some(&prediction.forward), plan.ranks[0].forward.len()),
            ("backward", prediction.backward.as_ref(), plan.ranks[0].backward.len()),
        ] {
            let Some(timeline) = timeline else { continue };
            let efficiency = match timeline.overlap().efficiency {
                Some(efficiency) => format!("overlap efficiency {efficiency:.2}"),
                None => "nothing to communicate".to_owned(),
            };
            let seconds = format_seconds(timeline.makespan());
            let _ = writeln!(
                out,
                "{name} on {machine}, predicted: {seconds}, {}, {efficiency}{}",
                console::stages(count),
                self.passes()
                    .filter(|(pass, _)| *pass == name && plan.cp_size() > 1)
                    .map(|(_, pass)| format!("; {}", chosen_text(pass)))
                    .collect::<String>()
            );
        }
        let _ = writeln!(out);
        out.push_str(&dispatches::text(&self.dispatches, plan.cp_size(), &machine, &style));
        out.push_str(&outputs.places());
        out
    }

    fn report(&self, prediction: &AttentionPrediction) -> String {
        let (mask, spec, plan) = (self.mask, &self.spec, &self.solution.plan);
        let setup = [
            ("mask", self.arguments.mask.clone()),
            ("dispatch", dispatch_name(self.solution.dispatch).to_owned()),
            (
                "ranks",
                format!("{} on {}", plan.cp_size(), console::count(self.config.topology.nodes(), "node")),
            ),
            (
                "heads",
                format!(
                    "{}:{} of {}, {}",
                    spec.heads_q,
                    spec.heads_kv,
                    spec.head_dim,
                    dtype_name(spec.dtype)
                ),
            ),
            ("cost model", machine_of(&self.profile)),
        ];
        let predicted = |timeline| TimelinePair { predicted: Some(timeline), measured: None };
        HtmlReport {
            title: "Plan of distributed attention",
            mask,
            plan,
            figures: Figures {
                setup: setup.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                plan_seconds: Some(self.solution.seconds),
                comm: Some(self.solution.summary(mask, spec).comm),
                kv_row_bytes: Some(spec.kv_row_bytes() as u64),
                forward_flops: Some(spec.flops_forward(mask.area())),
                backward_flops: Some(spec.flops_backward(mask.area())),
            },
            forward: Some(predicted(&prediction.forward)),
            backward: prediction.backward.as_ref().map(predicted),
            check: None,
            origin: Some(&origin::here()),
        }
        .render()
    }
}
