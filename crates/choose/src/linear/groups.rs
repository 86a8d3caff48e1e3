//! The groups of tokens in which a layer's pass is computed: as they are asked for, or those that are predicted to end first.

use counterpoint_cost::CostModel;
use counterpoint_plan::{GROUP_TILE_ROWS, LinearDirection, LinearPlan, LinearSpec, PlanError, WaveGroups};

use super::wave_costs::{LinkUse, PassCurves};
use counterpoint_schedule::ProductStart;

/// The most groups that a pass is cut into by itself: each costs the start of a collective.
pub(super) const MOST_GROUPS: usize = 16;

/// The steps in which sizes of groups are looked at.
const STEPS: usize = 32;

/// Groups of a layer's pass as a caller asks for them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum LayerGroups {
    /// Those that the cost model predicts to end first.
    #[default]
    Auto,
    /// These.
    Given(WaveGroups),
}

impl From<WaveGroups> for LayerGroups {
    fn from(groups: WaveGroups) -> Self {
        Self::Given(groups)
    }
}

impl LayerGroups {
    /// The layer over `tp_size` ranks in these groups. Automatic ones are those of the pass in which they matter most.
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub fn plan(&self, spec: LinearSpec, tp_size: usize, cost: &CostModel) -> Result<LinearPlan, PlanError> {
        let groups = match self {
            Self::Given(groups) => groups.clone(),
            Self::Auto => {
                let whole = LinearPlan::new(spec, tp_size, WaveGroups::Fixed(1))?;
                WaveGroups::Sizes(fastest_groups(&whole, cost))
            }
        };
        LinearPlan::new(spec, tp_size, groups)
    }
}

/// The groups with the smallest predicted time of the pass in which they matter most.
fn fastest_groups(whole: &LinearPlan, cost: &CostModel) -> Vec<usize> {
    let (spec, tp_size, direction) = (&whole.spec, whole.tp_size, whole.spec.communicating_pass());
    let own = whole.tokens_of(0).len();
    let product =
        |rows: usize| cost.launch_seconds + cost.matmul_seconds(spec.product_of(direction, rows, tp_size));
    let row_bytes = (tp_size - 1) * spec.travelling_columns() * spec.dtype.size();
    let travel = |rows: usize| cost.link.seconds((rows * row_bytes) as u64);
    let overlapped_speed = cost.sharing.map_or(1.0, |sharing| sharing.speed_without(sharing.communication));
    let join = 2.0 * (own * spec.travelling_columns() * spec.dtype.size()) as f64;
    let curves = PassCurves {
        product: &product,
        travel: &travel,
        back: &travel,
        after: match direction {
            LinearDirection::Backward { weight_gradient: true } => product(spec.tokens),
            _ => 0.0,
        },
        join: cost.launch_seconds + join / cost.memory_bytes_per_second,
        starts: ProductStart::Free,
        link: LinkUse::Shared,
        overlapped_speed,
    };
    let step = wave_step(whole);
    match curves.costs(whole, direction, step) {
        Some(costs) => whole.rows_of_waves(step, &costs.fastest(MOST_GROUPS)),
        None => vec![own],
    }
}

/// Rows of the waves that groups are made of by themselves: whole tiles, where an owner has enough rows.
pub(super) fn wave_step(plan: &LinearPlan) -> usize {
    let step = plan.tokens_of(0).len().div_ceil(STEPS);
    if step < GROUP_TILE_ROWS { step } else { step.next_multiple_of(GROUP_TILE_ROWS) }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::{Activations, DType, LinearKind};

    use super::*;

    /// More groups where there is more to hide, one where a collective's start costs more than all of it. Small first ones where
    /// communication takes longer, so that it begins early; small last ones where computation does.
    #[test]
    fn automatic_groups_follow_the_cost() {
        let groups = |tokens: usize, kind: LinearKind, in_features: usize| {
            let spec = LinearSpec { kind, tokens, in_features, out_features: 8192, ..SPEC };
            let plan = LayerGroups::Auto.plan(spec, 4, &CostModel::H200).unwrap();
            assert_eq!(plan.group_sizes().iter().sum::<usize>(), tokens.div_ceil(4));
            plan.group_sizes().to_vec()
        };
        assert_eq!(groups(16, LinearKind::Row, 8192), [4]);
        assert!(groups(32_768, LinearKind::Column, 8192).len() > 1);
        let ends = |sizes: &[usize]| (sizes[0], sizes[sizes.len() - 1]);
        let (first, last) = ends(&groups(32_768, LinearKind::Row, 4096));
        assert!(first < last, "{first} {last}");
        let (first, last) = ends(&groups(32_768, LinearKind::Row, 32_768));
        assert!(first > last, "{first} {last}");
    }

    #[test]
    fn automatic_groups_are_all_rows_of_any_layer() {
        for tokens in [1, 2, 7, 64, 65, 1500] {
            for tp_size in [1, 2, 3, 4] {
                let spec = LinearSpec { tokens, ..SPEC };
                let plan = LayerGroups::Auto.plan(spec, tp_size, &CostModel::H200).unwrap();
                assert_eq!(plan.group_sizes().iter().sum::<usize>(), tokens.div_ceil(tp_size));
            }
        }
    }

    #[test]
    fn layers_that_cannot_be_split_are_refused() {
        for (spec, tp_size) in [(LinearSpec { tokens: 5, ..SPEC }, 5), (LinearSpec { tokens: 0, ..SPEC }, 4)]
        {
            assert!(matches!(
                LayerGroups::Auto.plan(spec, tp_size, &CostModel::H200),
                Err(PlanError::Linear { .. })
            ));
        }
    }

    const SPEC: LinearSpec = LinearSpec {
        kind: LinearKind::Column,
        activations: Activations::SequenceParallel,
        tokens: 1,
        in_features: 8,
        out_features: 12,
        has_bias: false,
        dtype: DType::Bf16,
    };
}
