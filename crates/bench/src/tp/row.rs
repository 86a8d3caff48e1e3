//! Rows of `bench tp`: a pass under a policy, compared with its sequential and its ideal time.

use counterpoint_plan::{Activations, LinearKind, WaveGroups};
use counterpoint_report::{Column, Statistics};
use counterpoint_schedule::{OverlapPolicy, Timeline};
use serde::{Deserialize, Serialize};

use crate::arguments::{BenchTpPass, LayerShape};
use crate::interleaved::efficiency_text;
use crate::rows::MeasuredRow;

/// One pass of one layer under one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LinearRow {
    pub(super) by: String,
    pub(super) kind: LinearKind,
    /// What is computed behind the layer, as part of its passes: `rms-norm`, or nothing.
    pub(super) behind: Option<String>,
    pub(super) pass: BenchTpPass,
    pub(super) activations: Activations,
    /// Tokens, features that are not split, features of a rank.
    pub(super) shape: LayerShape,
    pub(super) ranks: usize,
    pub(super) device: String,
    /// Hardware queues that the driver was given; `None` where it was left to its default.
    pub(super) connections: Option<u32>,
    /// What was asked for: a policy, or `auto`.
    pub(super) overlap: String,
    /// What the pass ran under.
    pub(super) policy: String,
    pub(super) transport: String,
    pub(super) groups: usize,
    /// Whether these are of columns, not of tokens.
    pub(super) in_columns: bool,
    /// Of the slowest rank, from the start of its first operation to the end of its last; no other times are taken meanwhile, and those
    /// of parts below are of other runs.
    pub(super) seconds: Statistics,
    /// Of a rank.
    pub(super) tflops: f64,
    /// With nothing side by side.
    pub(super) sequential_seconds: f64,
    pub(super) ideal_seconds: f64,
    /// How much of the variant from the one to the other; `None` where there is none, or where it is not known well enough.
    pub(super) efficiency: Option<f64>,
    /// To how much that is known: twice its standard error.
    pub(super) efficiency_noise: Option<f64>,
    /// The sequential pass over this one.
    pub(super) speedup: f64,
    /// The share of the communication that ran under computation: `1 - exposed / communication`. Of a fused pass, whose kernels send as they
    /// multiply, by what it is shorter than the sequential one. `None` as of `efficiency`.
    pub(super) hidden: Option<f64>,
    /// To how much that is known: twice its standard error.
    pub(super) hidden_noise: Option<f64>,
    /// Element type.
    pub(super) dtype: String,
    pub(super) product_seconds: f64,
    pub(super) weight_gradient_seconds: f64,
    /// A pass over dy, where there is a bias.
    pub(super) bias_gradient_seconds: f64,
    /// That of the weight over that of the sequential run.
    pub(super) weight_gradient_slowdown: Option<f64>,
    /// Inputs on their variant to all ranks; sums to their owners; those to all ranks.
    pub(super) gather_seconds: f64,
    pub(super) reduce_seconds: f64,
    pub(super) spread_seconds: f64,
    /// Of the run that hides the middle share; of a fused pass that of the sequential one.
    pub(super) communication_seconds: f64,
    pub(super) exposed_seconds: f64,
    /// The largest share of what an element may err.
    pub(super) of_bound: f64,
    /// The same word for the same bits of all results.
    pub(super) bits: String,
    /// The last run with the times of all operations.
    #[serde(skip)]
    pub(super) last: Timeline,
    #[serde(skip)]
    pub(super) wrong: Option<String>,
}

/// What stands above the rows.
pub(super) fn title(device: &str, ranks: usize) -> String {
    format!("tensor-parallel linear layers on {device}, {}", counterpoint_console::count(ranks, "rank"))
}

impl LinearRow {
    pub(super) fn name(&self) -> String {
        let Self { pass, activations, shape, policy, transport, .. } = self;
        format!("{} {pass} {activations} {shape} {policy} {transport}", self.layer())
    }

    fn layer(&self) -> String {
        match &self.behind {
            Some(behind) => format!("{}+{behind}", self.kind),
            None => self.kind.to_string(),
        }
    }

    /// Nothing of it runs side by side because that was asked for.
    pub(super) fn is_sequential(&self) -> bool {
        self.overlap == OverlapPolicy::SEQUENTIAL.to_string()
    }

    /// As `--groups` takes them.
    pub(super) fn groups_text(&self) -> String {
        match self.in_columns {
            true => WaveGroups::Columns(self.groups).to_string(),
            false => self.groups.to_string(),
        }
    }
}

impl MeasuredRow<17> for LinearRow {
    const TABLE: [Column; 17] = [
        Column::name("kind").wide(12),
        Column::name("pass").wide(8),
        Column::name("activations").wide(17),
        Column::name("shape").wide(18),
        Column::name("policy").wide(38),
        Column::name("transport").wide(11),
        Column::number_name("groups"),
        Column::number("us", 0).wide(8),
        Column::number("TFLOP/s", 3),
        Column::number("sequential", 2),
        Column::number("ideal", 4).wide(8),
        Column::number("speedup", 3),
        Column::number("efficiency", 1),
        Column::number("hidden", 2).wide(9),
        Column::number("wgrad x", 6),
        Column::number("exposed us", 5),
        Column::number("of bound", 7),
    ];

    fn cells(&self) -> [String; 17] {
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        let none = || "–".to_owned();
        [
            self.layer(),
            self.pass.to_string(),
            self.activations.to_string(),
            self.shape.to_string(),
            self.policy.clone(),
            self.transport.clone(),
            self.groups_text(),
            us(self.seconds.median),
            // Of CPU ranks it is a hundredth or so.
            format!("{:.*}", if self.tflops < 10.0 { 3 } else { 1 }, self.tflops),
            us(self.sequential_seconds),
            us(self.ideal_seconds),
            format!("{:.2}", self.speedup),
            efficiency_text(self.efficiency, self.efficiency_noise),
            efficiency_text(self.hidden, self.hidden_noise),
            self.weight_gradient_slowdown.map_or_else(none, |slowdown| format!("{slowdown:.2}")),
            us(self.exposed_seconds),
            format!("{:.2}", self.of_bound),
        ]
    }

    fn fault(&self) -> Option<String> {
        self.wrong.as_ref().map(|reason| format!("{}: {reason}", self.name()))
    }
}
