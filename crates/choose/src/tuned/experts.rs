//! What tuned passes of layers of experts are distinguished by.

use counterpoint_plan::{DType, ExpertKind, ExpertSpec, Routing, Topology};
use serde::{Deserialize, Serialize};

use super::{TunedPass, TunedPlace};

/// What a tuned pass of a layer of experts is for. It is used for nothing else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TunedExpertShape {
    /// Name of the device, as the system gives it.
    pub device: String,
    /// What moves rows between ranks.
    pub transport: String,
    /// Ranks that share the experts.
    pub ranks: usize,
    /// Of them, those of one node.
    pub ranks_per_node: usize,
    /// Which way tokens go in the forward.
    pub kind: ExpertKind,
    /// The pass.
    pub pass: TunedPass,
    /// Experts of all ranks.
    pub experts: usize,
    /// Tokens of all ranks.
    pub tokens: usize,
    /// Rows of all experts: every token as often as it chose one that takes it.
    pub rows: usize,
    /// Columns of `x`.
    pub in_features: usize,
    /// Columns of `y`.
    pub out_features: usize,
    /// Element type.
    pub dtype: DType,
}

impl TunedExpertShape {
    /// That of a pass of a layer under a routing, of which it knows tokens and rows and not who chose whom; `None` on one rank, where nothing
    /// travels.
    pub fn of(
        spec: &ExpertSpec,
        routing: &Routing,
        pass: TunedPass,
        topology: Topology,
        place: &TunedPlace,
    ) -> Option<Self> {
        let Topology { world_size: ranks, ranks_per_node } = topology;
        let TunedPlace { device, transport } = place.clone();
        let ExpertSpec { kind, in_features, out_features, dtype } = *spec;
        let tokens = (0..routing.ranks()).map(|rank| routing.tokens(rank)).sum();
        let (experts, rows) = (routing.experts(), routing.rows().iter().sum());
        (ranks > 1).then_some(Self {
            device,
            transport,
            ranks,
            ranks_per_node,
            kind,
            pass,
            experts,
            tokens,
            rows,
            in_features,
            out_features,
            dtype,
        })
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::{ExpertGroups, RandomRouting};

    use super::*;
    use crate::tuned::{GroupSearch, TunedExperts, TunedPlans, TuningError};

    const TWO: Topology = Topology::flat(2);

    fn tuned(pass: TunedPass, device: &str, policy: &str, seconds: f64) -> TunedExperts {
        let drawn = RandomRouting { experts: 4, choices: 2, ranks: 2, tokens: 8, skew: 0.0, seed: 1 };
        let routing = Routing::random(drawn).unwrap();
        let spec =
            ExpertSpec { kind: ExpertKind::Combine, in_features: 8, out_features: 16, dtype: DType::F32 };
        let place = TunedPlace { device: device.to_owned(), transport: "threads".to_owned() };
        let shape = TunedExpertShape::of(&spec, &routing, pass, TWO, &place).unwrap();
        assert_eq!((shape.tokens, shape.rows, shape.experts), (16, 32, 4));
        assert!(TunedExpertShape::of(&spec, &routing, pass, Topology::flat(1), &place).is_none());
        let (groups, search) = (ExpertGroups { count: 3, growth: 150 }, GroupSearch::Predictive);
        let policy = policy.to_owned();
        TunedExperts { shape, policy, groups, seconds, sequential_seconds: 1.0, search }
    }

    #[test]
    fn they_survive_their_file_and_are_found_by_all_that_they_are_for() {
        let mut plans = TunedPlans::default();
        for (policy, seconds) in [("signals", 0.5), ("concurrent", 0.7), ("signals", 0.9)] {
            plans.experts.insert(tuned(TunedPass::Forward, "X", policy, seconds));
        }
        assert_eq!(plans.experts.plans().len(), 2);
        assert_eq!(TunedPlans::from_json(&plans.to_json()), Ok(plans.clone()));
        let shape = tuned(TunedPass::Forward, "X", "", 0.0).shape;
        let experts = &plans.experts;
        assert_eq!(experts.fastest(&shape, |_| true).unwrap().policy, "concurrent");
        assert_eq!(experts.fastest(&shape, |plan| plan.policy == "signals").unwrap().seconds, 0.9);
        assert!(experts.under(&shape, "kernel-barrier").is_none());
        for other in [
            tuned(TunedPass::WrittenGradient, "X", "", 0.0).shape,
            tuned(TunedPass::Forward, "Y", "", 0.0).shape,
            TunedExpertShape { rows: 31, ..shape.clone() },
            TunedExpertShape { experts: 8, ..shape.clone() },
            TunedExpertShape { transport: "tcp".to_owned(), ..shape.clone() },
            TunedExpertShape { kind: ExpertKind::Dispatch, ..shape.clone() },
            TunedExpertShape { dtype: DType::Bf16, ..shape },
        ] {
            assert!(experts.fastest(&other, |_| true).is_none());
        }
    }

    #[test]
    fn groups_that_cannot_be_are_refused() {
        for groups in [ExpertGroups::even(0), ExpertGroups { count: 2, growth: 1001 }] {
            let mut plans = TunedPlans::default();
            plans.experts.insert(TunedExperts { groups, ..tuned(TunedPass::Forward, "X", "signals", 0.5) });
            let refused = TunedPlans::from_json(&plans.to_json()).unwrap_err();
            assert_eq!(refused, TuningError::ExpertGroups { index: 0, groups });
            assert!(refused.to_string().contains("tune moe"), "{refused}");
        }
    }
}
