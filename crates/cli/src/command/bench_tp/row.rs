use counterpoint_plan::{Activations, LinearKind};
use counterpoint_report::Statistics;
use counterpoint_schedule::{StartOrder, Timeline};
use serde::{Deserialize, Serialize};

use crate::arguments::BenchTpPass;

/// One pass of one layer under one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) by: String,
    pub(super) kind: LinearKind,
    pub(super) pass: BenchTpPass,
    pub(super) activations: Activations,
    /// Tokens, features that are not split, features of a rank.
    pub(super) shape: [usize; 3],
    pub(super) ranks: usize,
    pub(super) device: String,
    /// Hardware queues that the driver was told to use; `None` where it was told nothing.
    pub(super) connections: Option<u32>,
    /// What was asked for: a policy, or `auto`.
    pub(super) overlap: String,
    /// What the pass ran under.
    pub(super) policy: String,
    pub(super) transport: String,
    pub(super) groups: usize,
    /// Of the slowest rank, from the start of its first operation to the end of its last; no other times are taken meanwhile, and those
    /// of parts below are of other runs.
    pub(super) seconds: Statistics,
    /// Of a rank.
    pub(super) tflops: f64,
    /// With nothing side by side.
    pub(super) sequential_seconds: f64,
    pub(super) ideal_seconds: f64,
    /// How much of the way from the one to the other.
    pub(super) efficiency: Option<f64>,
    /// To how much that is known: twice its standard error.
    pub(super) efficiency_noise: Option<f64>,
    pub(super) product_seconds: f64,
    pub(super) weight_gradient_seconds: f64,
    /// A pass over dy, where there is a bias.
    pub(super) bias_gradient_seconds: f64,
    /// That of the weight over that of the sequential run.
    pub(super) weight_gradient_slowdown: Option<f64>,
    /// Inputs on their way to all ranks; sums to their owners; those to all ranks.
    pub(super) gather_seconds: f64,
    pub(super) reduce_seconds: f64,
    pub(super) spread_seconds: f64,
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

pub(super) const HEADER: &str = "kind    pass      activations        shape               policy                                  transport    \
                                 groups        us  TFLOP/s  sequential     ideal  efficiency  wgrad x  exposed us  of bound";

impl Row {
    pub(super) fn name(&self) -> String {
        let [tokens, hidden, local] = self.shape;
        let words = format!("{:?} {:?} {:?}", self.kind, self.pass, self.activations).to_lowercase();
        format!("{words} {tokens}:{hidden}:{local} {} {}", self.policy, self.transport)
    }

    /// Nothing of it runs side by side because that was asked for.
    pub(super) fn is_sequential(&self) -> bool {
        self.overlap == StartOrder::Sequential.name()
    }

    pub(super) fn line(&self) -> String {
        let [tokens, hidden, local] = self.shape;
        let word = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let activations = match self.activations {
            Activations::Replicated => "replicated",
            Activations::SequenceParallel => "sequence-parallel",
        };
        let share = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
        format!(
            "{:6}  {:8}  {:17}  {:18}  {:38}  {:11}  {:6}  {:8.1}  {:>7}  {:10.1}  {:8.1}  {:>10}  {:>7}  {:10.1}  {:8.2}\n",
            word(&self.kind),
            word(&self.pass),
            activations,
            format!("{tokens}:{hidden}:{local}"),
            self.policy,
            self.transport,
            self.groups,
            1e6 * self.seconds.median,
            // Of CPU ranks it is a hundredth or so.
            format!("{:.*}", if self.tflops < 10.0 { 3 } else { 1 }, self.tflops),
            1e6 * self.sequential_seconds,
            1e6 * self.ideal_seconds,
            self.efficiency
                .zip(self.efficiency_noise)
                .map_or_else(|| "–".to_owned(), |(efficiency, noise)| format!("{efficiency:.2}±{noise:.2}")),
            share(self.weight_gradient_slowdown),
            1e6 * self.exposed_seconds,
            self.of_bound,
        )
    }
}
