//! Wave groups that a search has found, kept for the next run.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Activations, DType, GroupFlow, LinearDirection, LinearKind, LinearPlan, LinearSpec, WaveGroups};

/// The version of the format, and of what a group means. It changes with either.
pub const TUNING_VERSION: u32 = 1;

/// A matrix product and the collective that its communication amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GemmCollective {
    /// The rows of the first operand are gathered, then multiplied.
    AllGather,
    /// Every rank has a share of each sum, which ends on the row's owner.
    ReduceScatter,
    /// Every rank has a share of each sum, which ends on all.
    AllReduce,
}

impl GemmCollective {
    /// All of them, with their names on the command line.
    pub const NAMES: [(&'static str, GemmCollective); 3] = [
        ("all-gather", GemmCollective::AllGather),
        ("reduce-scatter", GemmCollective::ReduceScatter),
        ("all-reduce", GemmCollective::AllReduce),
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, named)| *named == self).map_or("", |(name, _)| name)
    }

    /// That of a layer's forward; `None` where it has none.
    pub fn of(spec: &LinearSpec) -> Option<Self> {
        Self::of_pass(spec, LinearDirection::Forward)
    }

    /// That of the product of a pass; `None` where it has none.
    pub fn of_pass(spec: &LinearSpec, direction: LinearDirection) -> Option<Self> {
        Some(match spec.flow(direction)? {
            GroupFlow::Gather => Self::AllGather,
            GroupFlow::Reduce => Self::ReduceScatter,
            GroupFlow::ReduceAndGather => Self::AllReduce,
        })
    }

    /// The layer whose forward it is, without a bias. `m`, `n` and `k` are those of all ranks together.
    pub fn layer(self, [m, n, k]: [usize; 3], dtype: DType) -> LinearSpec {
        let (kind, activations) = match self {
            Self::AllGather => (LinearKind::Column, Activations::SequenceParallel),
            Self::ReduceScatter => (LinearKind::Row, Activations::SequenceParallel),
            Self::AllReduce => (LinearKind::Row, Activations::Replicated),
        };
        LinearSpec { kind, activations, tokens: m, in_features: k, out_features: n, has_bias: false, dtype }
    }
}

/// What a tuned plan is for. It is used for nothing else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TunedShape {
    /// Name of the device, as the system gives it.
    pub device: String,
    /// Ranks that share the product.
    pub ranks: usize,
    /// Rows of the product.
    pub m: usize,
    /// Columns of the product, of all ranks.
    pub n: usize,
    /// Terms of every sum, of all ranks.
    pub k: usize,
    /// Element type.
    pub dtype: DType,
    /// What travels.
    pub collective: GemmCollective,
}

impl TunedShape {
    /// That of a layer's forward; `None` where nothing travels in it.
    pub fn of(spec: &LinearSpec, ranks: usize, device: &str) -> Option<Self> {
        let LinearSpec { tokens: m, out_features: n, in_features: k, dtype, .. } = *spec;
        let collective = GemmCollective::of(spec)?;
        Some(Self { device: device.to_owned(), ranks, m, n, k, dtype, collective })
    }
}

/// How the groups were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupSearch {
    /// Every sequence was measured.
    Exhaustive,
    /// Parts were measured, and sequences predicted from them.
    Predictive,
}

/// The fastest groups of a shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedGroups {
    /// What they are for.
    #[serde(flatten)]
    pub shape: TunedShape,
    /// Rows of every group in the tokens of the first rank.
    pub groups: Vec<usize>,
    /// Seconds measured with them.
    pub seconds: f64,
    /// Seconds measured with one group, nothing overlapped.
    pub sequential_seconds: f64,
    /// How they were found.
    pub search: GroupSearch,
}

/// All that was tuned, as a file holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedPlans {
    /// [`TUNING_VERSION`] of whoever wrote it.
    version: u32,
    /// At most one for every shape, in their order.
    plans: Vec<TunedGroups>,
}

/// Why tuned plans cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TuningError {
    /// Not JSON, or not of the form.
    #[error("it holds no tuned plans ({reason}); move it away and tune again with `counterpoint tune gemm`")]
    Form {
        /// What is wrong, with line and column.
        reason: String,
    },
    /// Written by a program whose groups mean something else.
    #[error(
        "its plans are of version {found}, and this program has version {TUNING_VERSION}; move it away and tune again with \
         `counterpoint tune gemm`"
    )]
    Version {
        /// Of the file.
        found: u32,
    },
    /// A plan that does not fit its own shape.
    #[error(
        "plan {index} (m {m}, {collective}, {ranks} ranks) has groups of {sum} rows, and a rank has {rows}; remove it, or tune \
         the shape again with `counterpoint tune gemm`",
        collective = collective.name()
    )]
    Groups {
        /// Its index in the file.
        index: usize,
        /// Rows of its product.
        m: usize,
        /// Its collective.
        collective: GemmCollective,
        /// Its ranks.
        ranks: usize,
        /// What its groups add up to.
        sum: usize,
        /// What they must add up to.
        rows: usize,
    },
}

/// The version alone: it says whether the rest can be understood.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Default for TunedPlans {
    fn default() -> Self {
        Self { version: TUNING_VERSION, plans: Vec::new() }
    }
}

impl TunedPlans {
    /// Reads what [`TunedPlans::to_json`] wrote.
    ///
    /// # Errors
    /// Text that holds none, another version, groups that do not fit their shape.
    pub fn from_json(text: &str) -> Result<Self, TuningError> {
        let form = |error: serde_json::Error| TuningError::Form { reason: error.to_string() };
        let Versioned { version } = serde_json::from_str(text).map_err(form)?;
        if version != TUNING_VERSION {
            return Err(TuningError::Version { found: version });
        }
        let plans: Self = serde_json::from_str(text).map_err(form)?;
        for (index, plan) in plans.plans.iter().enumerate() {
            let TunedShape { m, ranks, collective, .. } = plan.shape;
            let rows = m.div_ceil(ranks.max(1));
            let sum = plan.groups.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
            if sum != rows || plan.groups.contains(&0) {
                return Err(TuningError::Groups { index, m, collective, ranks, sum, rows });
            }
        }
        Ok(plans)
    }

    /// As a file holds it.
    pub fn to_json(&self) -> String {
        // Numbers, strings and lists of them always serialise.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// The plans, in the order of their shapes.
    pub fn plans(&self) -> &[TunedGroups] {
        &self.plans
    }

    /// Keeps a plan, in place of an older one of the same shape.
    pub fn insert(&mut self, plan: TunedGroups) {
        match self.plans.binary_search_by(|known| known.shape.cmp(&plan.shape)) {
            Ok(index) => self.plans[index] = plan,
            Err(index) => self.plans.insert(index, plan),
        }
    }

    /// The plan of a shape.
    pub fn get(&self, shape: &TunedShape) -> Option<&TunedGroups> {
        self.plans.iter().find(|plan| plan.shape == *shape)
    }

    /// Groups for a layer on so many ranks of a device: those that were tuned for it, or automatic ones.
    pub fn groups_for(&self, spec: &LinearSpec, ranks: usize, device: &str) -> WaveGroups {
        let shape = TunedShape::of(spec, ranks, device);
        let plan = shape.and_then(|shape| self.get(&shape));
        plan.map_or(WaveGroups::Auto, |plan| WaveGroups::Sizes(plan.groups.clone()))
    }

    /// Devices that the same product was tuned on, for a sentence about why nothing tuned is used on this one.
    pub fn devices_with(&self, shape: &TunedShape) -> Vec<&str> {
        let same = self.plans.iter().filter(|plan| {
            TunedShape { device: shape.device.clone(), ..plan.shape.clone() } == *shape
                && plan.shape != *shape
        });
        same.map(|plan| plan.shape.device.as_str()).collect()
    }
}

impl TunedGroups {
    /// What was found for `plan`, on a device.
    pub fn of(
        plan: &LinearPlan,
        device: &str,
        [seconds, sequential_seconds]: [f64; 2],
        search: GroupSearch,
    ) -> Option<Self> {
        let shape = TunedShape::of(&plan.spec, plan.tp_size, device)?;
        Some(Self { shape, groups: plan.group_sizes().to_vec(), seconds, sequential_seconds, search })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CostModel;

    fn tuned(collective: GemmCollective, m: usize, device: &str) -> TunedGroups {
        let spec = collective.layer([m, 64, 32], DType::Bf16);
        let groups = WaveGroups::Fixed(2);
        let plan = LinearPlan::new(spec, 4, groups, &CostModel::H200).unwrap();
        TunedGroups::of(&plan, device, [1.0, 1.5], GroupSearch::Exhaustive).unwrap()
    }

    #[test]
    fn plans_survive_their_file_and_are_found_by_their_shape_alone() {
        let mut plans = TunedPlans::default();
        for (_, collective) in GemmCollective::NAMES {
            plans.insert(tuned(collective, 128, "X"));
        }
        plans.insert(TunedGroups { seconds: 0.5, ..tuned(GemmCollective::AllGather, 128, "X") });
        plans.insert(tuned(GemmCollective::AllGather, 128, "Y"));
        assert_eq!(plans.plans().len(), 4);
        assert_eq!(TunedPlans::from_json(&plans.to_json()), Ok(plans.clone()));

        let spec = GemmCollective::AllGather.layer([128, 64, 32], DType::Bf16);
        let shape = TunedShape::of(&spec, 4, "X").unwrap();
        assert_eq!(plans.get(&shape).unwrap().seconds, 0.5);
        assert_eq!(plans.devices_with(&shape), ["Y"]);
        assert_eq!(plans.groups_for(&spec, 4, "X"), WaveGroups::Sizes(vec![16, 16]));
        // Anything that differs is another shape.
        for other in [
            plans.groups_for(&spec, 4, "Z"),
            plans.groups_for(&spec, 2, "X"),
            plans.groups_for(&LinearSpec { tokens: 64, ..spec }, 4, "X"),
            plans.groups_for(&LinearSpec { dtype: DType::F16, ..spec }, 4, "X"),
            plans.groups_for(&LinearSpec { activations: Activations::Replicated, ..spec }, 4, "X"),
        ] {
            assert_eq!(other, WaveGroups::Auto);
        }
    }

    #[test]
    fn a_file_that_cannot_be_trusted_is_refused_with_what_to_do() {
        let refused = |text: &str| TunedPlans::from_json(text).unwrap_err();
        for text in ["", "{", "[]", r#"{"version": 1}"#, r#"{"version": 1, "plans": [{"m": 3}]}"#] {
            assert!(matches!(refused(text), TuningError::Form { .. }), "{text}");
        }
        assert_eq!(refused(r#"{"version": 9, "plans": 7}"#), TuningError::Version { found: 9 });
        for wrong in [vec![16, 17], vec![32, 0], vec![]] {
            let mut plans = TunedPlans::default();
            plans.insert(TunedGroups { groups: wrong, ..tuned(GemmCollective::ReduceScatter, 128, "X") });
            let text = refused(&plans.to_json()).to_string();
            assert!(text.contains("plan 0") && text.contains("32") && text.contains("tune"), "{text}");
        }
    }
}
