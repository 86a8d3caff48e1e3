use std::time::{Duration, Instant};

use counterpoint_exec::{Machine, MeasureError, MeasuredClock, Repeats};
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

/// Runs of one sequence that have taken so long are enough: their median is as good as that of many short ones.
const ENOUGH: Duration = Duration::from_millis(10);
/// Sequences that a predictive search tries: as many as take some tenths of a second.
const TRIALS: (f64, f64) = (4.0, 12.0);
const TRIAL_SECONDS: f64 = 0.4;
/// What a trial takes beside its runs, on GPUs.
const READY_SECONDS: f64 = 6e-3;

/// What is tuned, and how.
pub(super) struct Tuning<'a> {
    pub(super) arguments: &'a TuneGemmArguments,
    pub(super) spec: LinearSpec,
    pub(super) tp_size: usize,
    pub(super) policy: OverlapPolicy,
    /// Without trials yet: how many there is time for shows when the forward is first run.
    pub(super) searcher: GroupSearcher,
}

impl Tuning<'_> {
    fn clock<'m, M>(&self, machine: &'m M, policy: OverlapPolicy) -> MeasuredClock<'m, M> {
        let timing = Repeats { enough: ENOUGH, ..repeats(&self.arguments.ranks) };
        MeasuredClock { machine, spec: self.spec, ranks: self.tp_size, policy, timing }
    }

    /// Sequences that a predictive search may try of a forward that takes so many `seconds`.
    fn trials(&self, seconds: f64) -> usize {
        let Repeats { warmups, iterations, .. } = repeats(&self.arguments.ranks);
        let counted = |most: usize, least: f64| {
            (ENOUGH.as_secs_f64() / seconds).clamp(least, f64::max(least, most as f64))
        };
        let runs = counted(warmups, 1.0) + counted(iterations, 3.0);
        (TRIAL_SECONDS / (READY_SECONDS + runs * seconds)).clamp(TRIALS.0, TRIALS.1) as usize
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
        let first = alone.pass(&whole).map_err(failed)?;
        let searcher = GroupSearcher { trials: self.trials(first), ..self.searcher };
        let mut answers = Vec::new();
        for &search in searches {
            let bar = Bar::new();
            let told = |step: SearchStep| bar.show(&step.what, step.done, step.all);
            let begun = Instant::now();
            let (plan, expected) = match search {
                GroupSearch::Predictive => searcher.predictive(&mut clock, told),
                GroupSearch::Exhaustive => searcher.exhaustive(&mut clock, told),
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
        let mut sequential = f64::INFINITY;
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
