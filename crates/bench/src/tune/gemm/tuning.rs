//! The search of `tune gemm` for a product's groups, bounded in time, with its answers measured side by side.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use counterpoint_choose::{GroupSearch, GroupSearcher, PassClock, SearchStep, TunedPass, TunedShape};
use counterpoint_console::{Bar, CliError};
use counterpoint_exec::Machine;
use counterpoint_measure::{MeasureError, MeasuredClock, Processes, Repeats};
use counterpoint_plan::{LinearPlan, LinearSpec};
use counterpoint_schedule::OverlapPolicy;

use super::found::{Answer, SearchResult};
use super::repeats;
use crate::arguments::{SearchArgument, TuneGemmArguments};

/// How often each answer is measured, all of them interleaved: as often as there is time.
const ROUNDS: [usize; 2] = [2, 5];
/// Once rounds have taken so long, they are enough.
const ROUNDS_ENOUGH: Duration = Duration::from_millis(200);

/// Runs of one sequence that have taken so long are enough: their median is as good as that of many short ones.
const ENOUGH: Duration = Duration::from_millis(4);
/// Sequences that a predictive search tries besides one group: as many as there is time for.
pub(super) const TRIALS: [usize; 2] = [4, 12];
/// Once a predictive search would take longer with one more trial, it ends.
const SEARCH_ENOUGH: Duration = Duration::from_millis(650);

/// Says how long a search goes on.
struct Patience {
    begun: Instant,
    printed: Instant,
}

impl Patience {
    fn new(now: Instant) -> Self {
        Self { begun: now, printed: now }
    }

    /// Whether there is time at `now` for that trial, which is taken to last as long as what came before it.
    fn lasts(&mut self, trial: usize, now: Instant) -> ControlFlow<()> {
        let before = now.saturating_duration_since(self.printed);
        self.printed = now;
        match trial > TRIALS[0] && now + before > self.begun + SEARCH_ENOUGH {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

/// What is tuned, and how.
pub(super) struct Tuning<'a> {
    pub(super) arguments: &'a TuneGemmArguments,
    pub(super) spec: LinearSpec,
    pub(super) pass: TunedPass,
    /// The layer in one group.
    pub(super) whole: LinearPlan,
    /// What is kept is for it.
    pub(super) shape: TunedShape,
    pub(super) variants: Vec<Variant>,
}

/// A policy that is tried, with the search for its groups.
pub(super) struct Variant {
    pub(super) policy: OverlapPolicy,
    pub(super) searcher: GroupSearcher,
}

impl Tuning<'_> {
    fn clock<'m, M>(
        &self,
        (machine, processes): (&'m M, Processes<'m>),
        policy: OverlapPolicy,
    ) -> MeasuredClock<'m, M> {
        let timing = Repeats { enough: ENOUGH, ..repeats(&self.arguments.ranks) };
        let (spec, pass, ranks) = (self.spec, self.pass, self.whole.tp_size);
        MeasuredClock { machine, processes, spec, pass, ranks, policy, timing }
    }

    /// Searches as the arguments say under every policy, and measures what was found against the same without overlap.
    pub(super) fn search<M: Machine>(
        &self,
        machine: &M,
        processes: Processes<'_>,
    ) -> Result<SearchResult, CliError> {
        let begun = Instant::now();
        let on = (machine, processes);
        let mut alone = self.clock(on, OverlapPolicy::SEQUENTIAL);
        // What a process does once, connecting ranks above all, is no part of a search.
        let mut sequential = alone.pass(&self.whole).map_err(failed)?;
        let mut answers = Vec::new();
        for variant in &self.variants {
            self.answers(on, variant, &mut answers)?;
        }
        // All of them interleaved, so that they meet the same disturbance by other programs. Two searches may have one answer.
        let mut trials: Vec<(OverlapPolicy, LinearPlan, f64)> = Vec::new();
        for Answer { policy, plan, .. } in &answers {
            if trials.iter().all(|(known, groups, _)| (known, groups) != (policy, plan)) {
                trials.push((*policy, plan.clone(), f64::INFINITY));
            }
        }
        let interleaving = Instant::now();
        for round in 0..ROUNDS[1] {
            // All processes end together.
            let spent =
                processes.longest(interleaving.elapsed()).map_err(|source| CliError::Run { source })?;
            if round >= ROUNDS[0] && spent >= ROUNDS_ENOUGH {
                break;
            }
            sequential = sequential.min(alone.pass(&self.whole).map_err(failed)?);
            for (policy, plan, least) in &mut trials {
                *least = least.min(self.clock(on, *policy).pass(plan).map_err(failed)?);
            }
        }
        for answer in &mut answers {
            let of_answer = |(policy, plan, _): &&(OverlapPolicy, LinearPlan, f64)| {
                (policy, plan) == (&answer.policy, &answer.plan)
            };
            answer.measured = trials.iter().find(of_answer).map_or(f64::INFINITY, |(_, _, least)| *least);
        }
        let whole = self.whole.clone();
        Ok(SearchResult { answers, whole, sequential, took: begun.elapsed().as_secs_f64() })
    }

    /// What the searches that were asked for find under a policy; a kernel that sends its tiles as they are done has no groups.
    fn answers<M: Machine>(
        &self,
        on: (&M, Processes<'_>),
        Variant { policy, searcher }: &Variant,
        answers: &mut Vec<Answer>,
    ) -> Result<(), CliError> {
        let searches: &[GroupSearch] = match self.arguments.search {
            SearchArgument::Predictive => &[GroupSearch::Predictive],
            SearchArgument::Exhaustive => &[GroupSearch::Exhaustive],
            SearchArgument::Both => &[GroupSearch::Predictive, GroupSearch::Exhaustive],
        };
        let mut clock = self.clock(on, *policy);
        for &search in searches {
            let bar = Bar::new();
            let show = |step: &SearchStep| bar.show(&format!("{policy}: {}", step.what), step.done, step.all);
            let begun = Instant::now();
            let mut patience = Patience::new(begun);
            let (plan, expected) = match search {
                _ if !policy.overlaps_by_groups() => {
                    let seconds = clock.pass(&self.whole).map_err(failed)?;
                    (self.whole.clone(), seconds)
                }
                GroupSearch::Predictive => searcher
                    .predictive(&mut clock, |step| {
                        show(&step);
                        // All processes end together; where one has failed, the next trial says why.
                        match on.1.longest(begun.elapsed()) {
                            Ok(spent) => patience.lasts(step.done, begun + spent),
                            Err(_) => ControlFlow::Break(()),
                        }
                    })
                    .map_err(failed)?,
                GroupSearch::Exhaustive => {
                    searcher.exhaustive(&mut clock, |step| show(&step)).map_err(failed)?
                }
            };
            let found = (plan, expected);
            let (plan, expected) = searcher.columns(&mut clock, found, |step| show(&step)).map_err(failed)?;
            let (took, measured) = (begun.elapsed().as_secs_f64(), f64::INFINITY);
            answers.push(Answer { policy: *policy, search, plan, expected, measured, took });
        }
        Ok(())
    }
}

fn failed(error: MeasureError) -> CliError {
    match error {
        MeasureError::Plan(source) => CliError::of_choice(source),
        MeasureError::Run(source) => CliError::Run { source },
        other => CliError::usage(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_ends_when_its_time_is_up_and_not_before_some_trials() {
        let begun = Instant::now();
        let tried = |parts: u64, trial: u64| {
            let mut patience = Patience::new(begun);
            let at = |millis| begun + Duration::from_millis(millis);
            // One group counts as trial 0.
            let goes_on =
                |index: &usize| patience.lasts(*index, at(parts + *index as u64 * trial)).is_continue();
            (0..=TRIALS[1]).take_while(goes_on).count() - 1
        };
        assert_eq!(tried(100, 10), 12);
        // Trial 8 would end at 700.
        assert_eq!(tried(250, 50), 7);
        assert_eq!(tried(2_000, 500), 4);
    }
}
