//! Passes of layers as a search has found them fastest, kept for the next run.

mod experts;
mod layers;

use std::ops::RangeInclusive;

use counterpoint_cost::ProblemSize;
use counterpoint_plan::{DType, ExpertGroups, GemmCollective, LinearDirection, LinearPlan, WaveGroups};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use self::experts::TunedExpertShape;
pub use self::layers::TunedShape;

/// The version of the format, and of what a group means. It changes with either.
pub const TUNING_VERSION: u32 = 2;

/// What groups of layers of experts a file may hold: a search finds none beyond.
const MOST_EXPERT_GROUPS: usize = 4096;
const GROWTHS: RangeInclusive<u32> = 10..=1000;

/// Which pass was tuned, and what becomes of the gradient of the weight in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TunedPass {
    /// `y`.
    Forward,
    /// `dx`, of a layer whose weight is frozen or whose gradient is deferred.
    InputGradient,
    /// `dx`, and the gradient of the weight written in the layer's type.
    WrittenGradient,
    /// `dx`, and the gradient of the weight added to, in this type.
    AddedGradient(DType),
}

impl TunedPass {
    /// Which pass it is.
    pub fn direction(self) -> LinearDirection {
        match self {
            Self::Forward => LinearDirection::Forward,
            Self::InputGradient => LinearDirection::Backward { weight_gradient: false },
            Self::WrittenGradient | Self::AddedGradient(_) => {
                LinearDirection::Backward { weight_gradient: true }
            }
        }
    }
}

/// Where plans were tuned, and where they are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunedPlace {
    /// Name of the device, as the system gives it.
    pub device: String,
    /// What moves rows between ranks.
    pub transport: String,
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

/// The fastest groups of what is tuned under a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned<S, G> {
    /// What they are for.
    #[serde(flatten)]
    pub shape: S,
    /// The overlap policy, its margin included, as users write it.
    pub policy: String,
    /// The groups.
    pub groups: G,
    /// Seconds measured with them.
    pub seconds: f64,
    /// Seconds measured with one group, nothing overlapped.
    pub sequential_seconds: f64,
    /// How they were found.
    pub search: GroupSearch,
}

/// The groups of a pass of a linear layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TunedSizes {
    /// Rows of every group in the tokens of the first rank.
    Rows(Vec<usize>),
    /// Groups of columns.
    Columns {
        /// Columns of every group.
        columns: Vec<usize>,
    },
}

impl TunedSizes {
    /// Those of a plan.
    pub fn of(plan: &LinearPlan) -> Self {
        match plan.column_sizes() {
            [] => Self::Rows(plan.group_sizes().to_vec()),
            columns => Self::Columns { columns: columns.to_vec() },
        }
    }

    /// Rows or columns of every group.
    pub fn sizes(&self) -> &[usize] {
        match self {
            Self::Rows(sizes) | Self::Columns { columns: sizes } => sizes,
        }
    }
}

/// Of a linear layer.
pub type TunedGroups = Tuned<TunedShape, TunedSizes>;

/// Of a layer of experts.
pub type TunedExperts = Tuned<TunedExpertShape, ExpertGroups>;

/// What was tuned of one kind of layer: at most one plan for every shape and policy, in their order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TunedList<S, G>(Vec<Tuned<S, G>>);

impl<S, G> Default for TunedList<S, G> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<S, G> TunedList<S, G> {
    /// The plans, in the order of their shapes.
    pub fn plans(&self) -> &[Tuned<S, G>] {
        &self.0
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<S: Ord, G> TunedList<S, G> {
    /// Keeps a plan, in place of an older one of the same shape and policy.
    pub fn insert(&mut self, plan: Tuned<S, G>) {
        let key = (&plan.shape, &plan.policy);
        match self.0.binary_search_by(|known| (&known.shape, &known.policy).cmp(&key)) {
            Ok(index) => self.0[index] = plan,
            Err(index) => self.0.insert(index, plan),
        }
    }

    /// In their order, the last of those of one shape and policy alone: files are edited and joined by hand.
    fn in_order(&mut self) {
        self.0.reverse();
        self.0.sort_by(|a, b| (&a.shape, &a.policy).cmp(&(&b.shape, &b.policy)));
        self.0.dedup_by(|a, b| (&a.shape, &a.policy) == (&b.shape, &b.policy));
    }

    /// The fastest plan of a shape, of all that `runs` says can be run; the sequential one where none was faster.
    pub fn fastest(&self, shape: &S, runs: impl Fn(&Tuned<S, G>) -> bool) -> Option<&Tuned<S, G>> {
        let known = self.0.iter().filter(|plan| plan.shape == *shape && runs(plan));
        known.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// The plan of a shape under a policy.
    pub fn under(&self, shape: &S, policy: &str) -> Option<&Tuned<S, G>> {
        self.0.iter().find(|plan| plan.shape == *shape && plan.policy == policy)
    }
}

/// All that was tuned, as a file holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TunedPlans {
    /// [`TUNING_VERSION`] of whoever wrote it.
    version: u32,
    /// Of linear layers.
    #[serde(rename = "plans")]
    pub layers: TunedList<TunedShape, TunedSizes>,
    /// Of layers of experts.
    #[serde(default, skip_serializing_if = "TunedList::is_empty")]
    pub experts: TunedList<TunedExpertShape, ExpertGroups>,
}

/// What was tuned, and where the ranks that use it are.
#[derive(Clone, Debug, PartialEq)]
pub struct TunedHere {
    /// Device and transport of the ranks.
    pub place: TunedPlace,
    /// All that was tuned, elsewhere too. The same on all ranks.
    pub plans: TunedPlans,
}

/// Why tuned plans cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TuningError {
    /// Not JSON, or not of the form.
    #[error("it holds no tuned plans ({reason}); move it away and tune again with `counterpoint tune`")]
    Form {
        /// What is wrong, with line and column.
        reason: String,
    },
    /// Written by a program whose groups mean something else.
    #[error(
        "its plans are of version {found}, and this program has version {TUNING_VERSION}; move it away and tune again with \
         `counterpoint tune`"
    )]
    Version {
        /// Of the file.
        found: u32,
    },
    /// A plan that does not fit its own shape.
    #[error(
        "plan {index} (m {m}, {collective}, {ranks} ranks) has groups of {sum} {what}, and there are {wanted}; remove it, or tune \
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
        /// Rows of a rank, or columns.
        what: &'static str,
        /// What its groups add up to.
        sum: usize,
        /// What they must add up to.
        wanted: usize,
    },
    /// A plan of a layer of experts whose groups cannot be.
    #[error(
        "plan {index} of layers of experts has {count} groups that grow by {growth} %; remove it, or tune the layer again with \
         `counterpoint tune moe`",
        count = groups.count,
        growth = groups.growth
    )]
    ExpertGroups {
        /// Its index among those of experts.
        index: usize,
        /// Its groups.
        groups: ExpertGroups,
    },
}

/// The version alone: it says whether the rest can be understood.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Default for TunedPlans {
    fn default() -> Self {
        Self { version: TUNING_VERSION, layers: TunedList::default(), experts: TunedList::default() }
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
        let mut plans: Self = serde_json::from_str(text).map_err(form)?;
        for (index, plan) in plans.layers.0.iter().enumerate() {
            let TunedShape { product: ProblemSize { m, n, .. }, ranks, collective, .. } = plan.shape;
            let (what, wanted) = match plan.groups {
                TunedSizes::Rows(_) => ("rows of a rank", m.div_ceil(ranks.max(1))),
                TunedSizes::Columns { .. } => ("columns", n),
            };
            let sizes = plan.groups.sizes();
            let sum = sizes.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
            if sum != wanted || sizes.contains(&0) {
                return Err(TuningError::Groups { index, m, collective, ranks, what, sum, wanted });
            }
        }
        for (index, TunedExperts { groups, .. }) in plans.experts.0.iter().enumerate() {
            if !(1..=MOST_EXPERT_GROUPS).contains(&groups.count) || !GROWTHS.contains(&groups.growth) {
                return Err(TuningError::ExpertGroups { index, groups: *groups });
            }
        }
        plans.layers.in_order();
        plans.experts.in_order();
        Ok(plans)
    }

    /// As a file holds it.
    pub fn to_json(&self) -> String {
        // Numbers, strings and lists of them always serialise.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }
}

impl TunedGroups {
    /// The groups of its layer.
    pub fn wave_groups(&self) -> WaveGroups {
        match &self.groups {
            TunedSizes::Rows(sizes) => WaveGroups::Sizes(sizes.clone()),
            TunedSizes::Columns { columns } => WaveGroups::ColumnSizes(columns.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::{Activations, LinearSpec, Topology};

    use super::*;

    const FLAT: Topology = Topology::flat(4);

    fn place(device: &str) -> TunedPlace {
        TunedPlace { device: device.to_owned(), transport: "nccl".to_owned() }
    }

    fn tuned(collective: GemmCollective, m: usize, device: &str, policy: &str) -> TunedGroups {
        let spec = collective.layer([m, 64, 32].into(), DType::Bf16);
        let plan = LinearPlan::new(spec, 4, WaveGroups::Fixed(2)).unwrap();
        TunedGroups {
            shape: TunedShape::of(&spec, TunedPass::Forward, FLAT, &place(device)).unwrap(),
            policy: policy.to_owned(),
            groups: TunedSizes::of(&plan),
            seconds: 1.0,
            sequential_seconds: 1.5,
            search: GroupSearch::Exhaustive,
        }
    }

    #[test]
    fn plans_survive_their_file_and_are_found_by_all_that_they_are_for() {
        let mut plans = TunedPlans::default();
        for (_, collective) in GemmCollective::NAMES {
            plans.layers.insert(tuned(collective, 128, "X", "signals"));
        }
        plans
            .layers
            .insert(TunedGroups { seconds: 0.5, ..tuned(GemmCollective::AllGather, 128, "X", "signals") });
        plans
            .layers
            .insert(TunedGroups { seconds: 0.7, ..tuned(GemmCollective::AllGather, 128, "X", "concurrent") });
        plans.layers.insert(tuned(GemmCollective::AllGather, 128, "Y", "signals"));
        assert_eq!(plans.layers.plans().len(), 5);
        let columns = TunedSizes::Columns { columns: vec![48, 16] };
        let in_columns = tuned(GemmCollective::ReduceScatter, 256, "Y", "signals");
        plans.layers.insert(TunedGroups { groups: columns, ..in_columns.clone() });
        let kept = plans.layers.under(&in_columns.shape, "signals").unwrap().wave_groups();
        assert_eq!(kept, WaveGroups::ColumnSizes(vec![48, 16]));
        assert_eq!(TunedPlans::from_json(&plans.to_json()), Ok(plans.clone()));
        // Sizes are at the level of everything else, where files of former versions have them.
        let file: serde_json::Value = serde_json::from_str(&plans.to_json()).unwrap();
        assert_eq!(["m", "n", "k"].map(|axis| file["plans"][0][axis].as_u64()), [128, 64, 32].map(Some));

        let spec = GemmCollective::AllGather.layer([128, 64, 32].into(), DType::Bf16);
        let shape =
            |spec: &LinearSpec, pass, topology, device| TunedShape::of(spec, pass, topology, &place(device));
        let own = shape(&spec, TunedPass::Forward, FLAT, "X").unwrap();
        let fastest = |shape: &TunedShape| plans.layers.fastest(shape, |_| true);
        assert_eq!(fastest(&own).unwrap().seconds, 0.5);
        assert_eq!(fastest(&own).unwrap().wave_groups(), WaveGroups::Sizes(vec![16, 16]));
        assert_eq!(plans.layers.fastest(&own, |plan| plan.policy != "signals").unwrap().seconds, 0.7);
        assert_eq!(plans.layers.under(&own, "concurrent").unwrap().seconds, 0.7);
        assert!(plans.layers.under(&own, "kernel-barrier").is_none());
        // Anything that differs is another shape.
        let nodes = Topology { world_size: 4, ranks_per_node: 2 };
        let backward = TunedPass::AddedGradient(DType::F32);
        for other in [
            shape(&spec, TunedPass::Forward, FLAT, "Z"),
            shape(&spec, TunedPass::Forward, Topology::flat(2), "X"),
            shape(&spec, TunedPass::Forward, nodes, "X"),
            shape(&spec, backward, FLAT, "X"),
            shape(&LinearSpec { tokens: 64, ..spec }, TunedPass::Forward, FLAT, "X"),
            shape(&LinearSpec { dtype: DType::F16, ..spec }, TunedPass::Forward, FLAT, "X"),
            shape(&LinearSpec { has_bias: true, ..spec }, TunedPass::Forward, FLAT, "X"),
            Some(TunedShape { transport: "nvlink".to_owned(), ..own.clone() }),
        ] {
            assert!(other.is_none_or(|shape| fastest(&shape).is_none()));
        }
        // Where nothing travels, nothing is tuned.
        let replicated = LinearSpec { activations: Activations::Replicated, ..spec };
        assert!(shape(&replicated, TunedPass::Forward, FLAT, "X").is_none());
        assert!(shape(&spec, TunedPass::Forward, Topology::flat(1), "X").is_none());
    }

    /// The layer of a collective has it in that pass, with a product of that size.
    #[test]
    fn layers_of_both_passes_have_their_product() {
        for pass in [TunedPass::Forward, TunedPass::WrittenGradient] {
            for (_, collective) in GemmCollective::NAMES {
                let spec = collective.layer_of(pass.direction(), [128, 64, 32].into(), DType::F32);
                let shape = TunedShape::of(&spec, pass, FLAT, &place("X")).unwrap();
                assert_eq!((shape.collective, shape.product), (collective, [128, 64, 32].into()));
            }
        }
    }

    /// As files are that somebody has joined: what is tuned then takes the place of all that was there.
    #[test]
    fn a_file_in_any_order_holds_one_plan_of_a_kind() {
        let of = |m, seconds| TunedGroups { seconds, ..tuned(GemmCollective::AllGather, m, "X", "signals") };
        let joined = [of(256, 3.0), of(128, 2.0), of(256, 1.0), of(64, 4.0)];
        let file = TunedPlans { layers: TunedList(joined.to_vec()), ..TunedPlans::default() };
        let mut read = TunedPlans::from_json(&file.to_json()).unwrap();
        let seconds = |plans: &TunedPlans| -> Vec<f64> {
            plans.layers.plans().iter().map(|plan| plan.seconds).collect()
        };
        assert_eq!(seconds(&read), [4.0, 2.0, 1.0]);
        read.layers.insert(of(256, 5.0));
        assert_eq!(seconds(&read), [4.0, 2.0, 5.0]);
        assert_eq!(read.layers.under(&of(256, 0.0).shape, "signals").unwrap().seconds, 5.0);
    }

    #[test]
    fn a_file_that_cannot_be_trusted_is_refused_with_what_to_do() {
        let refused = |text: &str| TunedPlans::from_json(text).unwrap_err();
        for text in ["", "{", "[]", r#"{"version": 2}"#, r#"{"version": 2, "plans": [{"m": 3}]}"#] {
            assert!(matches!(refused(text), TuningError::Form { .. }), "{text}");
        }
        assert_eq!(refused(r#"{"version": 9, "plans": 7}"#), TuningError::Version { found: 9 });
        let rows = [vec![16, 17], vec![32, 0], vec![]].map(TunedSizes::Rows);
        let columns = [vec![16, 17], vec![64, 0], vec![]].map(|columns| TunedSizes::Columns { columns });
        for (wrong, wanted) in
            rows.map(|wrong| (wrong, "32")).into_iter().chain(columns.map(|wrong| (wrong, "64")))
        {
            let mut plans = TunedPlans::default();
            let plan = tuned(GemmCollective::ReduceScatter, 128, "X", "signals");
            plans.layers.insert(TunedGroups { groups: wrong, ..plan });
            let text = refused(&plans.to_json()).to_string();
            assert!(text.contains("plan 0") && text.contains(wanted) && text.contains("tune"), "{text}");
        }
    }
}
