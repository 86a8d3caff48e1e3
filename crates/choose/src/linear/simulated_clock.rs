//! The simulator as the clock by which groups of a layer's pass are searched.

use counterpoint_cost::CostModel;
use counterpoint_plan::{
    DType, GemmCollective, LinearDirection, LinearPlan, LinearSpec, PlanError, Topology,
};
use counterpoint_schedule::{
    MatrixShape, OverlapPolicy, Program, RankOf, SimulateError, Timeline, WeightGradient, lower_collective,
    lower_join, lower_linear_backward, lower_linear_forward, lower_product, simulate, travel_seconds,
};
use thiserror::Error;

use super::group_search::PassClock;

/// Simulated times of a layer's pass and its parts, on a modelled machine. All ranks do the same, so one is simulated.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedClock<'a> {
    /// The layer.
    pub spec: LinearSpec,
    /// The pass; a backward adds the gradient of the weight to f32.
    pub direction: LinearDirection,
    /// Ranks and nodes; all of them share the layer.
    pub topology: Topology,
    /// The machine.
    pub cost: &'a CostModel,
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
}

/// Why a simulated time cannot be had.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ClockError {
    /// A layer that cannot be split.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Programs that do not fit each other.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

impl SimulatedClock<'_> {
    fn play(&self, program: Program) -> Result<Timeline, ClockError> {
        Ok(simulate(&[program], &self.topology, self.cost)?)
    }
}

impl PassClock for SimulatedClock<'_> {
    type Error = ClockError;

    fn product(&mut self, rows: usize) -> Result<f64, ClockError> {
        let ranks = self.topology.world_size;
        let size = self.spec.product_of(self.direction, rows, ranks);
        let product =
            lower_product(RankOf { rank: 0, ranks }, size, self.spec.tokens, self.spec.dtype, self.policy);
        Ok(self.play(product)?.makespan())
    }

    fn travel(&mut self, rows: usize) -> Result<[f64; 2], ClockError> {
        let Some(collective) = GemmCollective::of_pass(&self.spec, self.direction) else {
            return Ok([0.0; 2]);
        };
        let ranks = self.topology.world_size;
        let columns = self.spec.travelling_columns();
        let timeline = self.play(lower_collective(
            collective,
            RankOf { rank: 0, ranks },
            MatrixShape { rows, columns },
            self.spec.dtype,
        ))?;
        Ok(travel_seconds(collective, &timeline))
    }

    fn join(&mut self) -> Result<f64, ClockError> {
        let ranks = self.topology.world_size;
        let (rows, columns) = (self.spec.tokens.div_ceil(ranks), self.spec.travelling_columns());
        let join = lower_join(RankOf { rank: 0, ranks }, MatrixShape { rows, columns }, self.spec.dtype);
        Ok(self.play(join)?.makespan())
    }

    fn after(&mut self) -> Result<f64, ClockError> {
        let LinearDirection::Backward { weight_gradient: true } = self.direction else { return Ok(0.0) };
        let ranks = self.topology.world_size;
        let size = self.spec.weight_gradient_size(ranks);
        Ok(self
            .play(lower_product(RankOf { rank: 0, ranks }, size, size.m, self.spec.dtype, self.policy))?
            .makespan())
    }

    fn pass(&mut self, plan: &LinearPlan) -> Result<f64, ClockError> {
        let program = match self.direction {
            LinearDirection::Forward => lower_linear_forward(plan, 0, self.policy),
            LinearDirection::Backward { weight_gradient } => {
                let gradient = match weight_gradient {
                    true => WeightGradient::Accumulated(DType::F32),
                    false => WeightGradient::Frozen,
                };
                lower_linear_backward(plan, 0, gradient, self.policy)
            }
        };
        Ok(self.play(program)?.makespan())
    }
}
