//! `counterpoint simulate`.

mod attention;
mod linear;
mod model;
mod moe;

use std::path::Path;

use counterpoint_console::{
    self as console, CliError, Schema,
    arguments::{OverlapChoice, PassOverlaps},
    origin,
    output::Outputs,
    profile,
};
use counterpoint_cost::MachineProfile;
use counterpoint_report::{
    Column, SimulationReport, TimelinePair, TraceSection, chrome_trace, fold, format_seconds, printable,
    table,
};
use counterpoint_schedule::{OverlapPolicy, RankTransport, Timeline};
use serde_json::{Value, json};

use crate::arguments::{SimulateCommand, SimulationArguments};

/// `counterpoint simulate`.
pub(crate) fn run(command: &SimulateCommand) -> Result<(), CliError> {
    match command {
        SimulateCommand::Attention(arguments) => attention::run(arguments),
        SimulateCommand::Linear(arguments) => linear::run(arguments),
        SimulateCommand::Moe(arguments) => moe::run(arguments),
        SimulateCommand::Model(arguments) => model::run(arguments),
    }
}

/// The machine, and where results go: looked at before anything is computed.
struct Setting {
    profile: MachineProfile,
    outputs: Outputs,
}

impl Setting {
    /// Of the machine in a file, or the H200 that is built in.
    fn of(arguments: &SimulationArguments, profile: Option<&Path>) -> Result<Self, CliError> {
        let outputs = Outputs::check(&[
            ("--trace", arguments.trace.as_deref()),
            ("--report", arguments.report.as_deref()),
        ])?;
        Ok(Self { profile: profile::modelled(profile)?, outputs })
    }
}

/// What came out, in the forms in which it is printed.
struct Predicted {
    schema: Schema,
    /// Such as `Predicted linear layer`.
    title: String,
    /// What was simulated, as (name, value).
    setup: Vec<(String, String)>,
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    /// The same with full precision.
    json: Vec<Value>,
    timelines: Vec<(String, Timeline)>,
}

impl Predicted {
    fn new(schema: Schema, title: &str, profile: &MachineProfile, columns: Vec<Column>) -> Self {
        let shared = match profile.cost.sharing {
            Some(sharing) => format!("{}, {} of them to communicate", sharing.workers, sharing.communication),
            None => "not shared".to_owned(),
        };
        let setup = vec![("machine".to_owned(), profile.machine.clone()), ("workers".to_owned(), shared)];
        Self {
            schema,
            title: title.to_owned(),
            setup,
            columns,
            rows: Vec::new(),
            json: Vec::new(),
            timelines: Vec::new(),
        }
    }

    fn set(&mut self, name: &str, value: impl ToString) {
        self.setup.push((name.to_owned(), value.to_string()));
    }

    fn print(self, arguments: &SimulationArguments, setting: &Setting) -> Result<(), CliError> {
        setting.outputs.write(|flag| {
            let text = if flag == "--trace" { self.trace() } else { self.report() };
            Ok(text.into_bytes())
        })?;
        if arguments.json {
            let key = |name: &str| name.replace([' ', '-'], "_").to_lowercase();
            let setup: serde_json::Map<String, Value> =
                self.setup.iter().map(|(name, value)| (key(name), json!(value))).collect();
            return console::print_json(self.schema, &json!({"setup": setup, "rows": self.json}));
        }
        let setup = self.setup.iter().map(|(name, value)| format!("{name} {}", printable(value)));
        let setup: Vec<String> = setup.collect();
        let mut text = fold(&format!("{}: {}\n\n", self.title, setup.join(", ")), &console::style());
        text.push_str(&table(&self.columns, self.rows.iter().cloned(), &console::style()));
        text.push_str(&setting.outputs.places());
        console::print(&text)
    }

    fn trace(&self) -> String {
        let section = |(name, timeline): &'_ (String, Timeline)| (name.clone(), timeline.clone());
        let named: Vec<(String, Timeline)> = self.timelines.iter().map(section).collect();
        let sections: Vec<TraceSection<'_>> = named
            .iter()
            .map(|(name, timeline)| TraceSection {
                name,
                timelines: TimelinePair { predicted: Some(timeline), measured: None },
            })
            .collect();
        chrome_trace(&sections)
    }

    fn report(&self) -> String {
        SimulationReport {
            origin: Some(&origin::here()),
            title: &self.title,
            setup: self.setup.clone(),
            columns: self.columns.iter().map(Column::header).collect(),
            rows: self.rows.clone(),
            timelines: self.timelines.iter().map(|(name, timeline)| (name.clone(), timeline)).collect(),
        }
        .render()
    }
}

/// A policy that is simulated: what was asked for, and for each pass what that is.
struct Simulated {
    asked: String,
    /// Forward and backward.
    passes: [OverlapPolicy; 2],
}

/// What was asked for, each once; `default` is what is run by default, forward and backward.
fn simulated(asked: impl IntoIterator<Item = PassOverlaps>, default: [OverlapPolicy; 2]) -> Vec<Simulated> {
    let mut all: Vec<Simulated> = Vec::new();
    for overlaps in asked {
        let of_pass = |choice, default| match choice {
            OverlapChoice::Named(policy) => policy,
            OverlapChoice::Auto => default,
        };
        let passes = [of_pass(overlaps.forward, default[0]), of_pass(overlaps.backward, default[1])];
        if all.iter().all(|known| known.passes != passes) {
            all.push(Simulated { asked: overlaps.to_string(), passes });
        }
    }
    all
}

/// What a row of a pass says of its policy, and of how the pass would be run.
struct PassRow<'a> {
    pass: &'static str,
    asked: &'a str,
    policy: OverlapPolicy,
    timeline: Timeline,
    /// Seconds under the first policy.
    first: f64,
    /// Groups of tokens; none of attention.
    groups: Option<usize>,
    /// The transport of these nodes that runs it so, or why none does.
    runs: Result<RankTransport, &'static str>,
    /// Whether it is what is run by default.
    chosen: bool,
    /// What to know of the policy on this machine.
    warning: Option<String>,
}

/// Columns of a table of passes.
fn pass_columns() -> Vec<Column> {
    vec![
        Column::name("pass"),
        Column::name("policy"),
        Column::number("seconds", 0),
        Column::number("computation", 3),
        Column::number("communication", 2),
        Column::number("exposed", 1),
        Column::number("efficiency", 1),
        Column::number("vs first", 2),
        Column::text("", 0),
    ]
}

impl Predicted {
    /// Adds the rows of passes, and marks of each pass that which is predicted to end first, of those that can run.
    fn add_passes(&mut self, rows: Vec<PassRow<'_>>) {
        let ends = |at: usize| rows[at].timeline.makespan();
        // The first of those that end at the same moment.
        let fastest = |pass: &str| {
            let can_run = (0..rows.len()).filter(|&at| rows[at].pass == pass && rows[at].runs.is_ok());
            can_run.min_by(|&a, &b| ends(a).total_cmp(&ends(b)))
        };
        for (at, row) in rows.iter().enumerate() {
            let notes = [
                (fastest(row.pass) == Some(at)).then(|| "predicted fastest".to_owned()),
                row.chosen.then(|| "default".to_owned()),
                row.runs.err().map(|reason| format!("cannot run: {reason}")),
                row.warning.clone(),
            ];
            let notes: Vec<String> = notes.into_iter().flatten().collect();
            let (cells, json) = row.cells_and_json(&notes.join(", "));
            self.rows.push(cells);
            self.json.push(json);
        }
        for PassRow { pass, asked, timeline, .. } in rows {
            self.timelines.push((format!("{pass}, {asked}"), timeline));
        }
    }
}

impl PassRow<'_> {
    /// One pass under one policy, compared with the same pass under the first: as a table and as JSON have it.
    fn cells_and_json(&self, notes: &str) -> (Vec<String>, Value) {
        let overlap = self.timeline.overlap();
        let seconds = self.timeline.makespan();
        let policy = self.policy.to_string();
        let named = self.asked == "auto" && policy != self.asked;
        let row = vec![
            self.pass.to_owned(),
            if named { format!("auto: {policy}") } else { policy.clone() },
            format_seconds(seconds),
            format_seconds(overlap.compute_seconds),
            format_seconds(overlap.communication_seconds),
            format_seconds(overlap.exposed_seconds),
            overlap.efficiency.map_or_else(|| "–".to_owned(), |efficiency| format!("{efficiency:.2}")),
            format!("{:.2}x", self.first / seconds),
            notes.to_owned(),
        ];
        let json = json!({
            "pass": self.pass,
            "policy": policy,
            "asked": self.asked,
            "groups": self.groups,
            "can_run": self.runs.is_ok(),
            "transport": self.runs.ok().map(RankTransport::name),
            "reason": self.runs.err(),
            "warning": self.warning,
            "chosen": self.chosen,
            "seconds": seconds,
            "compute_seconds": overlap.compute_seconds,
            "communication_seconds": overlap.communication_seconds,
            "exposed_seconds": overlap.exposed_seconds,
            "overlap_efficiency": overlap.efficiency,
            "ratio": self.first / seconds,
        });
        (row, json)
    }
}
