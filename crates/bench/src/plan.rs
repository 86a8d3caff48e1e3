//! `counterpoint bench plan`.

use std::fmt::Write;
use std::time::Instant;

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, plan_mask};
use counterpoint_console::{
    self as console, CliError, Progress, Schema,
    arguments::{DISPATCHES, dispatch_name},
    device, mask_argument,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan, chunk_work, received_rows};
use counterpoint_report::{
    BenchRow, ComparisonRow, Statistics, Style, Verified, comparison_table, fold, format_count,
    format_seconds,
};
use serde::Serialize;

use crate::arguments::BenchPlanArguments;
use crate::rows::all_right;

/// `counterpoint bench plan`.
pub(crate) fn run(arguments: &BenchPlanArguments) -> Result<(), CliError> {
    let cases = match arguments.mask.is_empty() {
        true => built_in_cases(arguments.cp_size.as_slice())?,
        false => given_cases(arguments)?,
    };
    console::note_development_build();
    let style = console::style();
    let mut groups = Vec::new();
    for case in &cases {
        let progress = Progress::new();
        let group = case.measure(arguments.iterations as usize, &progress)?;
        drop(progress);
        if arguments.json {
            group.rows.iter().try_for_each(|row| console::print_json(Schema::BenchPlan, row))?;
        } else {
            console::print(&group.text(case, &style))?;
        }
        groups.push(group);
    }
    if !arguments.json {
        console::print(&goals_text(&cases, &groups))?;
    }
    let wrong: Vec<String> = groups.into_iter().flat_map(|group| group.wrong).collect();
    all_right("plans that are wrong", &wrong)
}

/// One mask on a number of ranks.
struct Case {
    name: String,
    mask: Mask,
    cp_size: usize,
    chunk_size: usize,
    /// What simulated annealing found, and what this project set itself.
    goal: Option<Goal>,
}

/// Figures to reach, all of one kind of case.
#[derive(Clone, Copy)]
struct Goal {
    /// Seconds of a whole plan.
    solve_seconds: f64,
    /// Mean key rows received by a rank after 12 s of simulated annealing over chunk swaps, balance held at 1.005: the
    /// yardstick, and not a result of this run.
    annealed_recv_rows: Option<u64>,
}

/// Balance to stay below.
const BALANCE: f64 = 1.01;
/// Factor on the annealed rows to stay below.
const OF_ANNEALED: f64 = 1.1;

const LOGNORMAL: &str = include_str!("../../../benches/data/packed_documents_lognormal_1m.txt");
const PARETO: &str = include_str!("../../../benches/data/packed_documents_pareto_1m.txt");

/// Lengths, ranks, and the annealed figure for chunks of 512.
const ANNEALED: [(&str, &str, usize, u64); 4] = [
    ("lognormal documents", LOGNORMAL, 8, 17_788),
    ("lognormal documents", LOGNORMAL, 64, 22_818),
    ("pareto documents", PARETO, 8, 67_810),
    ("pareto documents", PARETO, 64, 95_279),
];

/// Masks that few others distribute, of 1M tokens.
const SEEDS: [(&str, &str); 4] = [
    ("block-causal with a last global block", "preset:block_causal_last_global,1M"),
    ("shared question", "preset:shared_question,1M"),
    ("sliding window with global tokens", "sliding-window:1M,left=8191,right=0,global=1024"),
    ("block-sparse", "preset:block_sparse,1M"),
];

/// Two packed batches of 1M tokens, four other masks and one causal sequence of 4M.
fn built_in_cases(cp_sizes: &[usize]) -> Result<Vec<Case>, CliError> {
    let mut cases = Vec::new();
    for name in ["lognormal documents", "pareto documents"] {
        for &cp_size in cp_sizes {
            let of_name = ANNEALED.iter().filter(|row| row.0 == name);
            let annealed = of_name.clone().find(|row| row.2 == cp_size).map(|row| row.3);
            let Some((_, lengths, ..)) = of_name.clone().next() else { continue };
            let list = lengths.split_whitespace().collect::<Vec<_>>().join(",");
            let mask = mask_argument::load(&format!("varlen-causal:lengths={list}"))?;
            let goal = Some(Goal { solve_seconds: 0.010, annealed_recv_rows: annealed });
            cases.push(Case { name: format!("{name}, 1M tokens"), mask, cp_size, chunk_size: 512, goal });
        }
    }
    for (name, mask) in SEEDS {
        let mask = mask_argument::load(mask)?;
        for &cp_size in cp_sizes {
            let (name, mask) = (format!("{name}, 1M tokens"), mask.clone());
            cases.push(Case { name, mask, cp_size, chunk_size: 2048, goal: None });
        }
    }
    cases.push(Case {
        name: "causal, 4M tokens".to_owned(),
        mask: mask_argument::load("causal:4M")?,
        cp_size: 1024,
        chunk_size: 2048,
        goal: Some(Goal { solve_seconds: 0.200, annealed_recv_rows: None }),
    });
    Ok(cases)
}

fn given_cases(arguments: &BenchPlanArguments) -> Result<Vec<Case>, CliError> {
    let mut cases = Vec::new();
    for name in &arguments.mask {
        let mask = mask_argument::load(name)?;
        for &cp_size in &arguments.cp_size {
            let (name, mask) = (name.clone(), mask.clone());
            cases.push(Case { name, mask, cp_size, chunk_size: arguments.chunk_size, goal: None });
        }
    }
    Ok(cases)
}

/// Heads as a large model has them. They weigh communication against computation, which stages are cut by.
const SPEC: AttentionSpec = AttentionSpec {
    heads_q: 64,
    heads_kv: 8,
    head_dim: 128,
    head_dim_v: 128,
    dtype: DType::Bf16,
    scale: 0.088_388_347_648_318_44,
    softcap: 0.0,
    seqlen_sink: 0,
    gradient_shares: GradientShares::Accumulators,
    max_logits: false,
    dlse: false,
};

/// One algorithm on one case, as JSON has it.
#[derive(Serialize)]
struct PlanRow {
    #[serde(flatten)]
    row: BenchRow,
    dispatch: &'static str,
    chunk_size: usize,
    balance: f64,
    /// Mean of a rank.
    recv_tokens: f64,
    /// Over those of the min-heap greedy in this run.
    recv_ratio_to_min_heap: Option<f64>,
    /// A figure from elsewhere, see [`Goal`].
    annealed_recv_tokens: Option<u64>,
    lower_bound_tokens: f64,
    ring_tokens: f64,
    all_gather_tokens: f64,
    /// Where heads divide by ranks.
    ulysses_tokens: Option<f64>,
}

/// The rows of one case.
struct Group {
    rows: Vec<PlanRow>,
    /// Algorithms whose plans were found to be wrong.
    wrong: Vec<String>,
}

impl Case {
    fn measure(&self, iterations: usize, progress: &Progress) -> Result<Group, CliError> {
        let mut group = Group { rows: Vec::new(), wrong: Vec::new() };
        let config = PlanConfig { chunk_size: Some(self.chunk_size), ..PlanConfig::new(self.cp_size) };
        // Before the chunks are counted one by one.
        config.validate_for(&self.mask).map_err(CliError::of_choice)?;
        let work = chunk_work(&self.mask, self.chunk_size);
        for (name, dispatch) in DISPATCHES {
            progress.step(format!("{} on {}: {name}", self.name, console::count(self.cp_size, "rank")));
            let config = PlanConfig { dispatch, ..config };
            // The first solve warms caches and is the one that is checked.
            let plan = solve(&self.mask, &config)?;
            let error = wrong_rows_of(&plan, &self.mask, &work);
            let mut seconds = Vec::with_capacity(iterations);
            for _ in 0..iterations {
                let begin = Instant::now();
                let again = solve(&self.mask, &config)?;
                seconds.push(begin.elapsed().as_secs_f64());
                drop(again);
            }
            let Some(seconds) = Statistics::of(&seconds) else { continue };
            if error > 0 {
                group.wrong.push(format!(
                    "{} on {}: {name}",
                    self.name,
                    console::count(self.cp_size, "rank")
                ));
                continue;
            }
            group.rows.push(self.row(&plan, dispatch, seconds));
        }
        group.compare_with_min_heap();
        Ok(group)
    }

    fn row(&self, plan: &Plan, dispatch: DispatchAlgorithm, seconds: Statistics) -> PlanRow {
        let bounds = counterpoint_plan::TrafficBounds::new(plan, &self.mask, &SPEC);
        let mean = |rows: u64| rows as f64 / self.cp_size as f64;
        PlanRow {
            row: BenchRow {
                name: "plan".to_owned(),
                shape: format!("{} x {}", self.mask.seqlen_q(), self.mask.seqlen_k()),
                dtype: "bf16".to_owned(),
                mask: Some(self.name.clone()),
                device: device::cpu_name(),
                ranks: self.cp_size,
                seconds,
                rate: None,
                ratio: None,
                verified: Verified { error: 0.0, bound: 0.0 },
            },
            dispatch: dispatch_name(dispatch),
            chunk_size: self.chunk_size,
            balance: plan.balance(),
            recv_tokens: mean(bounds.recv_tokens),
            recv_ratio_to_min_heap: None,
            annealed_recv_tokens: self.goal.and_then(|goal| goal.annealed_recv_rows),
            lower_bound_tokens: mean(bounds.lower_bound_tokens),
            ring_tokens: mean(bounds.ring_tokens),
            all_gather_tokens: mean(bounds.all_gather_tokens),
            ulysses_tokens: bounds.ulysses_tokens.map(mean),
        }
    }
}

fn solve(mask: &Mask, config: &PlanConfig) -> Result<Plan, CliError> {
    plan_mask(mask, &SPEC, config).map_err(CliError::of_choice)
}

/// Rows that the plan gets wrong, by other arithmetic than the planner's: key rows received against the difference of
/// what chunks need and ranks own, areas against the mask's, chunks that no rank or several ranks have.
fn wrong_rows_of(plan: &Plan, mask: &Mask, work: &counterpoint_plan::ChunkWork) -> u64 {
    let expected = received_rows(work, &plan.q_dispatch, &plan.k_dispatch);
    let received =
        plan.ranks.iter().map(|rank| rank.forward.iter().map(|stage| stage.part.recv_rows()).sum::<u64>());
    let traffic: u64 =
        expected.iter().zip(received).map(|(expected, received)| expected.abs_diff(received)).sum();
    let area: u64 = plan.ranks.iter().flat_map(|rank| &rank.forward).map(|stage| stage.area).sum();
    let mut chunks: Vec<u32> =
        (0..plan.cp_size()).flat_map(|rank| plan.q_dispatch.chunks(rank)).copied().collect();
    chunks.sort_unstable();
    let owners = !chunks.iter().copied().eq(0..plan.q_dispatch.num_chunks() as u32);
    traffic + area.abs_diff(mask.area()) + u64::from(owners)
}

impl Group {
    fn compare_with_min_heap(&mut self) {
        let greedy =
            self.row(DispatchAlgorithm::MinHeap).map(|row| (row.row.seconds.median, row.recv_tokens));
        let Some((seconds, recv_tokens)) = greedy else { return };
        for row in &mut self.rows {
            row.row.ratio = Some(seconds / row.row.seconds.median);
            row.recv_ratio_to_min_heap = (recv_tokens > 0.0).then(|| row.recv_tokens / recv_tokens);
        }
    }

    fn row(&self, dispatch: DispatchAlgorithm) -> Option<&PlanRow> {
        self.rows.iter().find(|row| row.dispatch == dispatch_name(dispatch))
    }

    fn text(&self, case: &Case, style: &Style) -> String {
        let mut out = format!(
            "{}, {}, chunks of {} (ratio: rows received, to min-heap's)\n",
            case.name,
            console::count(case.cp_size, "rank"),
            case.chunk_size
        );
        let mut rows: Vec<ComparisonRow> = self
            .rows
            .iter()
            .map(|row| ComparisonRow {
                name: row.dispatch.to_owned(),
                solve_seconds: Some(row.row.seconds.median),
                balance: Some(row.balance),
                recv_rows: (row.recv_tokens * case.cp_size as f64).round() as u64,
                ratio: row.recv_ratio_to_min_heap,
            })
            .collect();
        let greedy = self.row(DispatchAlgorithm::MinHeap).map(|row| row.recv_tokens);
        let mut reference = |name: &str, mean: f64| {
            rows.push(ComparisonRow {
                name: name.to_owned(),
                solve_seconds: None,
                balance: None,
                recv_rows: (mean * case.cp_size as f64).round() as u64,
                ratio: greedy.filter(|&greedy| greedy > 0.0).map(|greedy| mean / greedy),
            });
        };
        if let Some(annealed) = case.goal.and_then(|goal| goal.annealed_recv_rows) {
            reference("annealed for 12 s (known)", annealed as f64);
        }
        if let Some(affinity) = self.row(DispatchAlgorithm::Affinity) {
            reference("lower bound", affinity.lower_bound_tokens);
            reference("ring attention", affinity.ring_tokens);
            reference("all-gather", affinity.all_gather_tokens);
            if let Some(ulysses) = affinity.ulysses_tokens {
                reference("Ulysses", ulysses);
            }
        }
        out.push_str(&comparison_table(case.cp_size, &rows, style));
        for row in &self.rows {
            let Statistics { count, median, min, max, .. } = row.row.seconds;
            let line = format!(
                "  {}: whole plan in {} (min {}, max {}, {count} solves)\n",
                row.dispatch,
                format_seconds(median),
                format_seconds(min),
                format_seconds(max),
            );
            out.push_str(&fold(&line, style));
        }
        out.push('\n');
        out
    }
}

/// The default algorithm against what this project set itself, case by case.
fn goals_text(cases: &[Case], groups: &[Group]) -> String {
    let mut out = String::new();
    for (case, group) in cases.iter().zip(groups) {
        let (Some(goal), Some(row)) = (case.goal, group.row(DispatchAlgorithm::Affinity)) else { continue };
        let mut line = |what: String, reached: bool| {
            let verdict = if reached { "reached" } else { "MISSED" };
            let _ =
                writeln!(out, "  {verdict}  {}, {}: {what}", case.name, console::count(case.cp_size, "rank"));
        };
        let Statistics { median, min, .. } = row.row.seconds;
        let [taken, fastest, limit] = [median, min, goal.solve_seconds].map(format_seconds);
        line(format!("plan in {taken} (fastest {fastest}), goal {limit}"), median <= goal.solve_seconds);
        line(format!("balance {:.4}, goal {BALANCE}", row.balance), row.balance <= BALANCE);
        if let Some(annealed) = goal.annealed_recv_rows {
            let limit = annealed as f64 * OF_ANNEALED;
            let rows = format_count(row.recv_tokens.round() as u64);
            let what = format!("{rows} rows received, goal {}", format_count(limit as u64));
            line(what, row.recv_tokens <= limit);
        }
    }
    if out.is_empty() { out } else { format!("goals of the default dispatch:\n{out}") }
}
