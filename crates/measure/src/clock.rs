//! Times of a linear layer's pass and of its parts, measured on the ranks of a machine.

use counterpoint_choose::{PassClock, TunedPass};
use counterpoint_cost::ProblemSize;
use counterpoint_exec::{Backend, ExecError, Machine};
use counterpoint_mask::Range;
use counterpoint_plan::{
    Activations, GemmCollective, LinearDirection, LinearKind, LinearPlan, LinearSpec, PlanError,
};
use counterpoint_reference::LinearSample;
use counterpoint_schedule::{
    MatrixShape, OverlapPolicy, Program, RankOf, Timeline, WeightGradient, lower_join, lower_linear_backward,
    lower_linear_forward, lower_product,
};
use thiserror::Error;

use crate::collective_shape::CollectiveShape;
use crate::contents::Contents;
use crate::processes::Processes;
use crate::timed::{Expected, Repeats, TimedRank, check, median, run};

/// Measured times of a layer's pass and of its parts, on the ranks of a machine. A sample of every result is compared with what it
/// must be.
pub struct MeasuredClock<'a, M> {
    /// The machine.
    pub machine: &'a M,
    /// Where its ranks are.
    pub processes: Processes<'a>,
    /// The layer.
    pub spec: LinearSpec,
    /// The pass.
    pub pass: TunedPass,
    /// Ranks that share it.
    pub ranks: usize,
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
    /// How things are timed.
    pub timing: Repeats,
}

/// Why a time cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// A layer that cannot be split.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The run failed, or gave what it must not.
    #[error(transparent)]
    Run(#[from] ExecError),
}

/// Rows and columns of a result that are compared.
const SAMPLED: LinearSample = LinearSample::Spread(8);
/// Rows of a collective or of a copy, all of whose elements are compared: 12,288 sums over two ranks take the host 0.07 ms.
const SAMPLED_ROWS: LinearSample = LinearSample::Spread(8);
/// Columns that are compared of the first and the last row of each group.
const SAMPLED_ENDS: LinearSample = LinearSample::Spread(2);

impl<M: Machine> PassClock for MeasuredClock<'_, M> {
    type Error = MeasureError;

    fn product(&mut self, rows: usize) -> Result<f64, MeasureError> {
        let tokens = self.spec.tokens;
        let size = self.spec.product_of(self.pass.direction(), rows, self.ranks);
        self.timed_product(size, tokens)
    }

    fn travel(&mut self, rows: usize) -> Result<[f64; 2], MeasureError> {
        let Some(collective) = GemmCollective::of_pass(&self.spec, self.pass.direction()) else {
            return Ok([0.0; 2]);
        };
        let case = CollectiveShape {
            collective,
            ranks: self.ranks,
            rows,
            columns: self.spec.travelling_columns(),
            dtype: self.spec.dtype,
        };
        let times = case.measure(self.machine, self.processes, &self.timing, SAMPLED_ROWS)?;
        Ok([median(times.iter().map(|times| times[0])), median(times.iter().map(|times| times[1]))])
    }

    fn join(&mut self) -> Result<f64, MeasureError> {
        let rows = self.spec.tokens.div_ceil(self.ranks);
        let shape = MatrixShape { rows, columns: self.spec.travelling_columns() };
        let (rows, columns) = (SAMPLED_ROWS.of(Range::new(0, rows)), Vec::from_iter(0..shape.columns));
        let lower = |rank| lower_join(RankOf { rank, ranks: self.ranks }, shape, self.spec.dtype);
        self.seconds(lower, |rank| {
            let from = Contents::of(rank.backend().rank(), 0);
            let wanted =
                |row, column| Expected { value: from.at(row * shape.columns + column), partials: 0.0 };
            check::<M>(rank, "to", [&rows, &columns], wanted)
        })
    }

    fn after(&mut self) -> Result<f64, MeasureError> {
        let LinearDirection::Backward { weight_gradient: true } = self.pass.direction() else {
            return Ok(0.0);
        };
        let size = self.spec.weight_gradient_size(self.ranks);
        self.timed_product(size, size.m)
    }

    fn pass(&mut self, plan: &LinearPlan) -> Result<f64, MeasureError> {
        let gradient = match self.pass {
            TunedPass::Forward => {
                let lower = |rank| lower_linear_forward(plan, rank, self.policy);
                return self.seconds(lower, |rank| check_forward::<M>(rank, plan));
            }
            TunedPass::InputGradient => WeightGradient::Frozen,
            TunedPass::WrittenGradient => WeightGradient::Written,
            TunedPass::AddedGradient(dtype) => WeightGradient::Accumulated(dtype),
        };
        let lower = |rank| lower_linear_backward(plan, rank, gradient, self.policy);
        self.seconds(lower, |rank| check_backward::<M>(rank, plan))
    }
}

impl<M: Machine> MeasuredClock<'_, M> {
    /// Seconds of a product as one of a pass of so many rows.
    fn timed_product(&self, size: ProblemSize, pass_rows: usize) -> Result<f64, MeasureError> {
        let dtype = self.spec.dtype;
        let lower =
            |rank| lower_product(RankOf { rank, ranks: self.ranks }, size, pass_rows, dtype, self.policy);
        let ProblemSize { m, n, k } = size;
        let (rows, columns) = (SAMPLED.of(Range::new(0, m)), SAMPLED.of(Range::new(0, n)));
        self.seconds(lower, |rank| {
            let [a, b] = [0, 1].map(|input| Contents::of(rank.backend().rank(), input));
            let wanted = |row, column| Expected { value: a.dot(row * k, b, column * k, k), partials: 0.0 };
            check::<M>(rank, "to", [&rows, &columns], wanted)
        })
    }

    fn seconds(
        &self,
        lower: impl Fn(usize) -> Program,
        check: impl Fn(&TimedRank<M>) -> Result<(), ExecError>,
    ) -> Result<f64, MeasureError> {
        let (timelines, prepared) = run(self.machine, self.processes, self.ranks, &self.timing, lower)?;
        prepared.iter().try_for_each(check)?;
        Ok(median(timelines.iter().map(Timeline::duration)))
    }
}

/// Compares a sample of a rank's `y` with the definition: some rows, and the first and last of every group.
fn check_forward<M: Machine>(rank: &TimedRank<M>, plan: &LinearPlan) -> Result<(), ExecError> {
    let number = rank.backend().rank();
    let own = plan.tokens_of(number);
    let is_scattered =
        plan.spec.kind == LinearKind::Row && plan.spec.activations == Activations::SequenceParallel;
    let here = if is_scattered { own } else { Range::new(0, plan.spec.tokens) };
    let of_groups = (0..plan.groups()).flat_map(|group| plan.group_tokens(group));
    let ends =
        of_groups.filter(|tokens| !tokens.is_empty()).flat_map(|tokens| [tokens.start, tokens.end - 1]);
    let rows = |tokens: &mut dyn Iterator<Item = usize>| {
        let mut rows: Vec<usize> = tokens.map(|token| token - here.start).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    };
    let ends = rows(&mut ends.filter(|token| here.contains(*token)));
    let spread = rows(&mut SAMPLED.of(here).into_iter());
    let columns = match plan.spec.kind {
        LinearKind::Column => plan.local_out_features(),
        LinearKind::Row => plan.spec.out_features,
    };
    let columns = |sample: LinearSample| sample.of(Range::new(0, columns));
    let k = plan.local_in_features();
    let partial = |rank: usize, weight: usize, row: usize, column: usize| {
        Contents::of(rank, 0).dot(row * k, Contents::of(weight, 1), column * k, k)
    };
    let wanted = |row: usize, column: usize| {
        let token = here.start + row;
        // A row-parallel layer adds its bias on the first rank, before that one's partial sum is rounded.
        let bias = |rank: usize| match plan.spec.has_bias {
            true => Contents::of(rank, 2).at(column),
            false => 0.0,
        };
        match plan.spec.kind {
            LinearKind::Row => (0..plan.tp_size).fold(Expected::default(), |sum, rank| {
                let partial = partial(rank, rank, token, column) + if rank == 0 { bias(0) } else { 0.0 };
                Expected { value: sum.value + partial, partials: sum.partials + partial.abs() }
            }),
            LinearKind::Column => {
                let owner =
                    (0..plan.tp_size).find(|&rank| plan.tokens_of(rank).contains(token)).unwrap_or(number);
                let row = token - plan.tokens_of(owner).start;
                Expected { value: partial(owner, number, row, column) + bias(number), partials: 0.0 }
            }
        }
    };
    check::<M>(rank, "y", [&spread, &columns(SAMPLED)], wanted)?;
    check::<M>(rank, "y", [&ends, &columns(SAMPLED_ENDS)], wanted)
}

/// Compares a sample of a rank's `dx` with the definition: some rows, and the first and last of every group. Inputs are, in their order,
/// `dy`, `weight`.
fn check_backward<M: Machine>(rank: &TimedRank<M>, plan: &LinearPlan) -> Result<(), ExecError> {
    let number = rank.backend().rank();
    let spec = &plan.spec;
    let is_scattered = spec.kind == LinearKind::Column && spec.activations == Activations::SequenceParallel;
    let here = if is_scattered { plan.tokens_of(number) } else { Range::new(0, spec.tokens) };
    let of_groups = (0..plan.groups()).flat_map(|group| plan.group_tokens(group));
    let ends =
        of_groups.filter(|tokens| !tokens.is_empty()).flat_map(|tokens| [tokens.start, tokens.end - 1]);
    let mut rows: Vec<usize> = ends.filter(|token| here.contains(*token)).collect();
    rows.extend(SAMPLED.of(here));
    rows.iter_mut().for_each(|token| *token -= here.start);
    rows.sort_unstable();
    rows.dedup();
    let (features, columns) = (plan.local_out_features(), plan.local_in_features());
    // What one rank's weight makes of a row of `dy`, which is that of rank `from`.
    let partial = |from: usize, weight: usize, row: usize, column: usize| -> f64 {
        let (dy, weight) = (Contents::of(from, 0), Contents::of(weight, 1));
        let terms = (0..features).map(|f| dy.at(row * features + f) * weight.at(f * columns + column));
        terms.sum()
    };
    let wanted = |row: usize, column: usize| {
        let token = here.start + row;
        match spec.kind {
            LinearKind::Column => (0..plan.tp_size).fold(Expected::default(), |sum, rank| {
                let partial = partial(rank, rank, token, column);
                Expected { value: sum.value + partial, partials: sum.partials + partial.abs() }
            }),
            LinearKind::Row if spec.activations == Activations::SequenceParallel => {
                let owner = (0..plan.tp_size).find(|&rank| plan.tokens_of(rank).contains(token));
                let owner = owner.unwrap_or(number);
                let row = token - plan.tokens_of(owner).start;
                Expected { value: partial(owner, number, row, column), partials: 0.0 }
            }
            LinearKind::Row => Expected { value: partial(number, number, token, column), partials: 0.0 },
        }
    };
    check::<M>(rank, "dx", [&rows, &SAMPLED_ENDS.of(Range::new(0, columns))], wanted)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use counterpoint_exec::CpuMachine;
    use counterpoint_plan::{DType, WaveGroups};

    use super::*;

    const TIMING: Repeats =
        Repeats { limit: Duration::from_secs(60), warmups: 0, iterations: 1, enough: Duration::MAX };

    fn clock(
        machine: &CpuMachine,
        collective: GemmCollective,
        dtype: DType,
    ) -> MeasuredClock<'_, CpuMachine> {
        // A token that not all ranks have, and rows of no usual length.
        let spec = collective.layer([61, 30, 42].into(), dtype);
        let pass = TunedPass::Forward;
        let (processes, policy) = (Processes::One, OverlapPolicy::default());
        MeasuredClock { machine, processes, spec, pass, ranks: 3, policy, timing: TIMING }
    }

    /// What ranks compute is what is said of it, for all collectives and types, in one group and in several.
    #[test]
    fn results_are_what_they_must_be() {
        let machine = CpuMachine::new(0, None).unwrap();
        for (_, collective) in GemmCollective::NAMES {
            for dtype in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
                let mut clock = clock(&machine, collective, dtype);
                for groups in [WaveGroups::Fixed(1), WaveGroups::Sizes(vec![3, 10, 8])] {
                    let plan = LinearPlan::new(clock.spec, 3, groups).unwrap();
                    for policy in
                        [OverlapPolicy::SEQUENTIAL, OverlapPolicy::CONCURRENT, OverlapPolicy::SIGNALS]
                    {
                        clock.policy = policy;
                        assert!(clock.pass(&plan).unwrap() > 0.0);
                    }
                    let mut with_bias = plan;
                    with_bias.spec.has_bias = true;
                    assert!(clock.pass(&with_bias).unwrap() > 0.0);
                }
                assert!(clock.product(17).unwrap() > 0.0 && clock.join().unwrap() > 0.0);
                assert!(clock.travel(7).unwrap()[0] > 0.0);
            }
        }
    }

    /// Likewise of backwards, of both kinds and all activations.
    #[test]
    fn backwards_are_what_they_must_be() {
        let machine = CpuMachine::new(0, None).unwrap();
        for kind in [LinearKind::Column, LinearKind::Row] {
            for activations in [Activations::Replicated, Activations::SequenceParallel] {
                let mut clock = clock(&machine, GemmCollective::AllReduce, DType::F32);
                clock.spec = LinearSpec { kind, activations, ..clock.spec };
                clock.pass = TunedPass::AddedGradient(DType::F32);
                for groups in [WaveGroups::Fixed(1), WaveGroups::Sizes(vec![3, 10, 8])] {
                    let plan = LinearPlan::new(clock.spec, 3, groups).unwrap();
                    for policy in
                        [OverlapPolicy::SEQUENTIAL, OverlapPolicy::CONCURRENT, OverlapPolicy::SIGNALS]
                    {
                        clock.policy = policy;
                        assert!(clock.pass(&plan).unwrap() > 0.0, "{kind} {activations} {policy}");
                    }
                }
                assert!(clock.after().unwrap() > 0.0);
            }
        }
    }

    /// Results of another layer are refused, with where.
    #[test]
    fn what_is_wrong_is_named() {
        let machine = CpuMachine::new(0, None).unwrap();
        for (_, collective) in GemmCollective::NAMES {
            let clock = clock(&machine, collective, DType::Bf16);
            let plan = |in_features| {
                let spec = LinearSpec { in_features, ..clock.spec };
                LinearPlan::new(spec, 3, WaveGroups::Fixed(2)).unwrap()
            };
            let lower = |rank| lower_linear_forward(&plan(42), rank, clock.policy);
            let (_, prepared) = run(&machine, Processes::One, 3, &TIMING, lower).unwrap();
            assert!(prepared.iter().all(|rank| check_forward::<CpuMachine>(rank, &plan(42)).is_ok()));
            // As if rows were shorter.
            for rank in &prepared {
                let text = check_forward::<CpuMachine>(rank, &plan(39)).unwrap_err().to_string();
                assert!(
                    text.contains('y') && text.contains("row") && text.contains("linear forward"),
                    "{text}"
                );
            }
        }
    }
}
