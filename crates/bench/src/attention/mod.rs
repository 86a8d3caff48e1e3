//! `counterpoint bench attention`.

mod cuda;
mod kernel;
mod overlap;

use counterpoint_console::{self as console, CliError, Progress, Schema, UsageFault, arguments::Device};
use counterpoint_exec::HostTensor;
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::CheckReport;
use counterpoint_report::{BenchRow, Style, Verified, bench_table, fold};
use serde::Serialize;

use crate::arguments::BenchAttentionArguments;
use crate::rows::all_right;

/// `counterpoint bench attention`.
pub(crate) fn run(arguments: &BenchAttentionArguments) -> Result<(), CliError> {
    match (arguments.device, arguments.cuda.given()) {
        (Device::Cuda, _) => return cuda::run(arguments),
        (Device::Cpu, Some(flag)) => {
            return Err(CliError::usage(UsageFault::ForGpus { flag }));
        }
        (Device::Cpu, None) => {}
    }
    console::note_development_build();
    let sizes = if arguments.quick { Sizes::QUICK } else { Sizes::FULL };
    let mut wrong = Vec::new();
    for section in [kernel::measure, overlap::measure] {
        let progress = Progress::new();
        let section = section(&sizes, &progress)?;
        drop(progress);
        section.print(Schema::BenchAttention, arguments.json)?;
        wrong.extend(section.wrong);
    }
    all_right(OUT_OF_BOUNDS, &wrong)
}

/// Tensors that a check of the forward looks at.
pub(super) const FORWARD: &[&str] = &["out", "lse"];
/// Tensors that a check of the backward looks at.
pub(super) const BACKWARD: &[&str] = &["dq", "dk", "dv", "dsink"];

/// How much is measured.
struct Sizes {
    /// Rows of the causal mask that the goal speaks of.
    goal_rows: usize,
    /// Rows of the other masks.
    rows: usize,
    goals: Goals,
    /// How many of the masks, the one of the goal first.
    masks: usize,
    heads: usize,
    head_dim: usize,
    iterations: usize,
}

impl Sizes {
    const FULL: Sizes = Sizes {
        goal_rows: 4096,
        rows: 2048,
        goals: Goals::Apply,
        masks: usize::MAX,
        heads: 8,
        head_dim: 128,
        iterations: 10,
    };
    const QUICK: Sizes = Sizes {
        goal_rows: 512,
        rows: 256,
        goals: Goals::DoNotApply,
        masks: 3,
        heads: 2,
        head_dim: 64,
        iterations: 3,
    };

    fn spec(&self, heads_q: usize, heads_kv: usize, dtype: DType) -> AttentionSpec {
        AttentionSpec::new(heads_q, heads_kv, self.head_dim, dtype)
    }
}

/// A measured case, as JSON has it.
#[derive(Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    row: BenchRow,
    /// What only rows of this kind have.
    #[serde(flatten)]
    detail: serde_json::Value,
}

/// What rows of attention are that are wrong.
pub(super) const OUT_OF_BOUNDS: &str = "rows out of bounds against the f64 reference";

/// Rows that belong together.
pub(super) struct Section {
    pub(super) title: String,
    pub(super) rows: Vec<Row>,
    /// What to read from them, and whether goals are reached.
    pub(super) findings: Vec<String>,
    /// Cases whose results were out of bounds; they have no row.
    pub(super) wrong: Vec<String>,
}

impl Section {
    /// Without rows.
    pub(super) fn new(title: String) -> Self {
        Self { title, rows: Vec::new(), findings: Vec::new(), wrong: Vec::new() }
    }

    /// Keeps a row if what it timed is right.
    pub(super) fn add(&mut self, row: BenchRow, detail: serde_json::Value, check: &CheckReport) {
        if row.verified.passed() {
            self.rows.push(Row { row, detail });
        } else {
            let mask = row.mask.map_or(String::new(), |mask| format!("{mask}, "));
            self.wrong.push(format!("{}, {mask}{} ({})", row.name, row.shape, check.failures()));
        }
    }

    /// To standard output: rows and findings, or the rows as objects of JSON.
    pub(super) fn print(&self, schema: Schema, json: bool) -> Result<(), CliError> {
        match json {
            true => self.rows.iter().try_for_each(|row| console::print_json(schema, row)),
            false => console::print(&self.text(&console::style())),
        }
    }

    fn text(&self, style: &Style) -> String {
        let rows: Vec<BenchRow> = self.rows.iter().map(|row| row.row.clone()).collect();
        let mut out = fold(&format!("{}\n", self.title), style) + &bench_table(&rows, style);
        for finding in &self.findings {
            out.push_str(&fold(&format!("  {finding}\n"), style));
        }
        out.push('\n');
        out
    }
}

/// The error that is nearest to its bound, or furthest past it, of those tensors that `names` has.
pub(super) fn verified(check: &CheckReport, names: &[&str]) -> Verified {
    let tensors = check.tensors.iter().filter(|tensor| names.contains(&tensor.name.as_str()));
    let of = |tensor: &counterpoint_reference::TensorCheck| match tensor.passed {
        true => Verified { error: tensor.relative_error, bound: tensor.relative_bound },
        // Out of one of its bounds, be it that on the largest error: not passed, whatever the relative error.
        false => Verified {
            error: tensor.relative_error.max(tensor.relative_bound * 2.0),
            bound: tensor.relative_bound,
        },
    };
    let worse = |a: &Verified, b: &Verified| (a.error / a.bound).total_cmp(&(b.error / b.bound));
    tensors.map(of).max_by(worse).unwrap_or(Verified { error: f64::NAN, bound: 0.0 })
}

/// Rows and heads as tables show them.
pub(super) fn shape_text(q: &HostTensor, k: &HostTensor) -> String {
    let heads = match (q.shape()[1], k.shape()[1]) {
        (q, k) if q == k => q.to_string(),
        (q, k) => format!("{q}:{k}"),
    };
    format!("{} x {heads} x {}", q.shape()[0], q.shape()[2])
}

/// Whether shapes are those that goals speak of.
#[derive(Clone, Copy, PartialEq)]
enum Goals {
    Apply,
    /// Small shapes: starting things up is most of their time.
    DoNotApply,
}

impl Goals {
    /// `what`, and whether its goal is reached.
    fn judge(self, what: &str, goal: &str, reached: bool) -> String {
        match (self, reached) {
            (Goals::DoNotApply, _) => what.to_owned(),
            (Goals::Apply, true) => format!("{what}; goal {goal}: reached"),
            (Goals::Apply, false) => format!("{what}; goal {goal}: MISSED"),
        }
    }
}
