use std::time::Instant;

use counterpoint_exec::{Machine, MeasureError, MeasuredClock};
use counterpoint_plan::{
    GroupSearch, GroupSearcher, LinearPlan, LinearSpec, PassClock, SearchStep, WaveGroups,
};
use counterpoint_schedule::{OverlapPolicy, StartOrder};

use super::found::{Answer, Found};
use super::repeats;
use crate::arguments::{SearchArgument, TuneGemmArguments};
use crate::error::CliError;
use crate::progress::Bar;

/// How often each answer is measured, all of them in turns.
const TURNS: usize = 5;

/// What is tuned, and how.
pub(super) struct Tuning<'a> {
    pub(super) arguments: &'a TuneGemmArguments,
    pub(super) spec: LinearSpec,
    pub(super) tp_size: usize,
    pub(super) policy: OverlapPolicy,
    pub(super) searcher: GroupSearcher,
}

impl Tuning<'_> {
    fn clock<'m, M>(&self, machine: &'m M, policy: OverlapPolicy) -> MeasuredClock<'m, M> {
        let timing = repeats(&self.arguments.ranks);
        MeasuredClock { machine, spec: self.spec, ranks: self.tp_size, policy, timing }
    }

    /// Searches as the arguments say, and measures what was found beside the same without overlap.
    pub(super) fn search<M: Machine>(&self, machine: &M) -> Result<Found, CliError> {
        let begun = Instant::now();
        let searches: &[GroupSearch] = match self.arguments.search {
            SearchArgument::Predictive => &[GroupSearch::Predictive],
            SearchArgument::Exhaustive => &[GroupSearch::Exhaustive],
            SearchArgument::Both => &[GroupSearch::Predictive, GroupSearch::Exhaustive],
        };
        let mut clock = self.clock(machine, self.policy);
        let mut alone = self.clock(machine, OverlapPolicy::new(StartOrder::Sequential));
        let whole = self.searcher.plan(WaveGroups::Fixed(1)).map_err(|source| CliError::Plan { source })?;
        // What a process does once, connecting ranks above all, is no part of a search.
        let mut sequential = alone.pass(&whole).map_err(failed)?;
        let mut answers = Vec::new();
        for &search in searches {
            let bar = Bar::new();
            let told = |step: SearchStep| bar.show(&step.what, step.done, step.all);
            let begun = Instant::now();
            let (plan, expected) = match search {
                GroupSearch::Predictive => self.searcher.predictive(&mut clock, told),
                GroupSearch::Exhaustive => self.searcher.exhaustive(&mut clock, told),
            }
            .map_err(failed)?;
            let took = begun.elapsed().as_secs_f64();
            answers.push(Answer { search, plan, expected, measured: f64::INFINITY, took });
        }
        // All of them in turns, so that they meet the same disturbance by other programs. Two searches may have one answer.
        let mut plans: Vec<(LinearPlan, f64)> = Vec::new();
        for answer in &answers {
            if plans.iter().all(|(plan, _)| *plan != answer.plan) {
                plans.push((answer.plan.clone(), f64::INFINITY));
            }
        }
        for _ in 0..TURNS {
            sequential = sequential.min(alone.pass(&whole).map_err(failed)?);
            for (plan, least) in &mut plans {
                *least = least.min(clock.pass(plan).map_err(failed)?);
            }
        }
        for answer in &mut answers {
            let measured = plans.iter().find(|(plan, _)| *plan == answer.plan);
            answer.measured = measured.map_or(f64::INFINITY, |(_, least)| *least);
        }
        Ok(Found { answers, whole, sequential, took: begun.elapsed().as_secs_f64() })
    }
}

fn failed(error: MeasureError) -> CliError {
    match error {
        MeasureError::Plan(source) => CliError::Plan { source },
        MeasureError::Run(source) => CliError::Run { source },
        other => CliError::Usage { message: other.to_string() },
    }
}
