//! How a layer's passes overlap.

use std::sync::{Arc, Mutex};

use counterpoint_choose::{
    LayerGroups, LinearMachine, Offered, TunedGroups, TunedPass, TunedShape, TunedSizes,
};
use counterpoint_cost::CostModel;
use counterpoint_plan::{
    GemmCollective, LinearBound, LinearField, LinearPlan, LinearSpec, PlanError, WaveGroups,
};
use counterpoint_schedule::{OverlapPolicy, PassOverlap};

use super::layer::LayerGradient;
use crate::monitor::lock;

/// How the passes of a layer share a machine. Results have the same bits however they do.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerOverlap {
    /// Each pass as it was tuned on this machine ([`Group::with_tuned`](crate::Group::with_tuned)); where it was not, in the way that is
    /// predicted to end first, of those that the machine has: by these costs, or by those that the machine itself says.
    Predicted(Option<CostModel>),
    /// Both by this policy, in these groups. Automatic ones are those that were tuned for it, or follow from these costs, and are one
    /// where groups have nothing to hide.
    Policy(OverlapPolicy, LayerGroups, CostModel),
    /// As is chosen for a number of tokens near that of the layer, of layers whose numbers of tokens change from call to call.
    UpTo(Arc<PassesUpTo>),
}

impl Default for LayerOverlap {
    /// By the machine's own costs.
    fn default() -> Self {
        Self::Predicted(None)
    }
}

/// A pass of a layer as it is run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPass {
    /// The layer in the pass's groups.
    pub plan: LinearPlan,
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
}

/// The passes of a layer as they are run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPasses {
    /// `y`.
    pub forward: PlannedPass,
    /// `dx` and the gradient of the weight.
    pub backward: PlannedPass,
}

impl LayerOverlap {
    /// The passes of a layer on the ranks of a machine ([`Machine::linear`](crate::Machine::linear)).
    ///
    /// # Errors
    /// As [`LinearPlan::new`].
    pub fn passes(
        &self,
        machine: &LinearMachine,
        spec: LinearSpec,
        gradient: LayerGradient,
    ) -> Result<PlannedPasses, PlanError> {
        let forward = TunedPass::Forward;
        let backward = gradient.tuned_pass();
        match self {
            Self::UpTo(passes) => passes.passes(machine, spec, gradient),
            Self::Policy(policy, groups, cost) => {
                let pass = |pass: TunedPass| {
                    let groups = match groups {
                        LayerGroups::Auto if !policy.overlaps_by_groups() => WaveGroups::Fixed(1).into(),
                        LayerGroups::Auto => tuned_groups(machine, &spec, pass, policy),
                        groups => groups.clone(),
                    };
                    let plan = groups.plan(spec, machine.topology.world_size, cost)?;
                    Ok(PlannedPass { plan, policy: *policy })
                };
                Ok(PlannedPasses { forward: pass(forward)?, backward: pass(backward)? })
            }
            Self::Predicted(cost) => {
                let cost = cost.as_ref().unwrap_or(&machine.cost);
                let pass = |pass: TunedPass| match tuned_pass(machine, &spec, pass) {
                    Some(tuned) => tuned,
                    None => {
                        let (way, plan) = machine.fastest(spec, pass.direction(), cost)?;
                        Ok(PlannedPass { plan, policy: way.into() })
                    }
                };
                Ok(PlannedPasses { forward: pass(forward)?, backward: pass(backward)? })
            }
        }
    }
}

/// Passes of layers of up to so many tokens, those of all ranks. Choosing how passes are run takes as long as hundreds of launches, so counts
/// share a choice: that of the next of four counts in each octave. A count has its policies, and its groups in proportion; passes that were tuned for
/// the very count stay as they were tuned. Results have the same bits however they are run.
///
/// It keeps what it has chosen: all layers of a model may have one.
#[derive(Debug)]
pub struct PassesUpTo {
    tokens: usize,
    overlap: LayerOverlap,
    chosen: Mutex<Vec<Chosen>>,
}

/// What was chosen for a layer.
#[derive(Debug)]
struct Chosen {
    spec: LinearSpec,
    gradient: LayerGradient,
    /// The ways that there were.
    ways: Vec<PassOverlap>,
    passes: PlannedPasses,
}

/// Choices that are kept: some tens for each layer of a model that is like no other.
const KEPT: usize = 1024;

impl PartialEq for PassesUpTo {
    fn eq(&self, other: &Self) -> bool {
        (self.tokens, &self.overlap) == (other.tokens, &other.overlap)
    }
}

impl PassesUpTo {
    /// Of up to so many tokens, chosen like this.
    pub fn new(tokens: usize, overlap: LayerOverlap) -> Self {
        Self { tokens, overlap, chosen: Mutex::default() }
    }

    /// The most tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The count whose choice is that of `tokens`.
    fn chosen_for(&self, tokens: usize) -> usize {
        /// In each octave.
        const COUNTS: usize = 4;
        let step = tokens.checked_next_power_of_two().map_or(1, |octave| (octave / (2 * COUNTS)).max(1));
        tokens.next_multiple_of(step).min(self.tokens)
    }

    /// The passes of a layer, as [`LayerOverlap::passes`].
    fn passes(
        &self,
        machine: &LinearMachine,
        spec: LinearSpec,
        gradient: LayerGradient,
    ) -> Result<PlannedPasses, PlanError> {
        let LinearSpec { tokens, .. } = spec;
        if tokens > self.tokens {
            let wanted = LinearBound::MaxTokens { max_tokens: self.tokens };
            return Err(PlanError::Linear { field: LinearField::Tokens, value: tokens, wanted });
        }
        let of_class = self.of_class(machine, spec, gradient)?;
        let fewer = |PlannedPass { plan, policy }: PlannedPass| {
            Ok(PlannedPass { plan: plan.of_fewer_tokens(tokens)?, policy })
        };
        let [forward, backward] = tuned_passes(machine, &spec, gradient);
        let pass = |tuned: Option<_>, of_class| tuned.unwrap_or_else(|| fewer(of_class));
        Ok(PlannedPasses {
            forward: pass(forward, of_class.forward)?,
            backward: pass(backward, of_class.backward)?,
        })
    }

    /// Those of the count whose choice the layer has.
    fn of_class(
        &self,
        machine: &LinearMachine,
        spec: LinearSpec,
        gradient: LayerGradient,
    ) -> Result<PlannedPasses, PlanError> {
        let spec = LinearSpec { tokens: self.chosen_for(spec.tokens), ..spec };
        let mut chosen = lock(&self.chosen);
        let is_it =
            |one: &Chosen| one.spec == spec && one.gradient == gradient && one.ways == machine.overlaps;
        if let Some(one) = chosen.iter().find(|one| is_it(one)) {
            return Ok(one.passes.clone());
        }
        let passes = self.overlap.passes(machine, spec, gradient)?;
        if chosen.len() >= KEPT {
            chosen.remove(0);
        }
        chosen.push(Chosen { spec, gradient, ways: machine.overlaps.clone(), passes: passes.clone() });
        Ok(passes)
    }
}

/// Forward and backward as they were tuned for the very layer; `None` where they were not.
fn tuned_passes(
    machine: &LinearMachine,
    spec: &LinearSpec,
    gradient: LayerGradient,
) -> [Option<Result<PlannedPass, PlanError>>; 2] {
    [TunedPass::Forward, gradient.tuned_pass()].map(|pass| tuned_pass(machine, spec, pass))
}

/// The pass as it was tuned; `None` where it was not.
fn tuned_pass(
    machine: &LinearMachine,
    spec: &LinearSpec,
    pass: TunedPass,
) -> Option<Result<PlannedPass, PlanError>> {
    let tuned = machine.tuned.as_ref()?;
    let shape = TunedShape::of(spec, pass, machine.topology, &tuned.place)?;
    let runs = |plan: &TunedGroups| {
        let in_columns = matches!(plan.groups, TunedSizes::Columns { .. });
        let has_them = plan.policy.parse().is_ok_and(|policy| has_kernels(machine, &policy));
        let gathers = GemmCollective::of_pass(spec, pass.direction()) == Some(GemmCollective::AllGather);
        let waits = gathers && plan.policy.parse().is_ok_and(|policy: OverlapPolicy| policy.is_in_waves());
        let refused = |is: bool, offered| is && offered == Offered::Never;
        has_them && !refused(in_columns, machine.column_groups) && !refused(waits, machine.arriving_rows)
    };
    let found = tuned.plans.layers.fastest(&shape, runs)?;
    let policy = found.policy.parse().ok()?;
    let plan = LinearPlan::new(*spec, machine.topology.world_size, found.wave_groups());
    Some(plan.map(|plan| PlannedPass { plan, policy }))
}

/// Whether a pass that takes this machine can be fused as the policy says: layers that share an input cannot.
fn has_kernels(machine: &LinearMachine, policy: &OverlapPolicy) -> bool {
    !policy.is_fused() || machine.overlaps.iter().any(PassOverlap::is_fused)
}

/// The groups that were tuned for a pass under a policy, or automatic ones.
fn tuned_groups(
    machine: &LinearMachine,
    spec: &LinearSpec,
    pass: TunedPass,
    policy: &OverlapPolicy,
) -> LayerGroups {
    let found = machine.tuned.as_ref().and_then(|tuned| {
        let shape = TunedShape::of(spec, pass, machine.topology, &tuned.place)?;
        tuned.plans.layers.under(&shape, &policy.to_string())
    });
    found.map_or(LayerGroups::Auto, |plan| plan.wave_groups().into())
}

#[cfg(test)]
mod tests {
    use counterpoint_choose::{GroupSearch, TunedHere, TunedPlace, TunedPlans};
    use counterpoint_plan::{Activations, DType, LinearKind, Topology};
    use counterpoint_schedule::RankTransport;

    use super::*;

    #[test]
    fn groups_are_for_policies_that_overlap_by_them() {
        let (kind, activations) = (LinearKind::Column, Activations::Replicated);
        let (tokens, in_features, out_features) = (8192, 8192, 14336);
        let spec = LinearSpec {
            kind,
            activations,
            tokens,
            in_features,
            out_features,
            has_bias: false,
            dtype: DType::Bf16,
        };
        let mut cost = CostModel::H200;
        cost.link.bytes_per_second /= 4.0;
        let topology = Topology::flat(2);
        let machine = LinearMachine::new(RankTransport::Nvlink, Vec::new(), topology, cost);
        let groups = |policy, groups: LayerGroups| {
            let overlap = LayerOverlap::Policy(policy, groups, cost);
            let passes = overlap.passes(&machine, spec, LayerGradient::Written).unwrap();
            passes.backward.plan.groups()
        };
        let fused = OverlapPolicy::FUSED;
        let sequential = OverlapPolicy::SEQUENTIAL;
        assert!(groups(OverlapPolicy::default(), LayerGroups::Auto) > 1);
        for policy in [fused, sequential] {
            assert_eq!(groups(policy, LayerGroups::Auto), 1);
            assert_eq!(groups(policy, WaveGroups::Fixed(3).into()), 3);
        }
    }

    fn up_to(tokens: usize) -> (PassesUpTo, LinearMachine, LinearSpec) {
        let ways = RankTransport::Nvlink.pass_overlaps(true, 16);
        let machine = LinearMachine::new(RankTransport::Nvlink, ways, Topology::flat(4), CostModel::H200);
        let spec = GemmCollective::ReduceScatter.layer([tokens, 8192, 4096].into(), DType::Bf16);
        (PassesUpTo::new(tokens, LayerOverlap::default()), machine, spec)
    }

    #[test]
    fn counts_of_an_octave_share_four_choices() {
        let (passes, machine, spec) = up_to(16_000);
        for (tokens, chosen) in [
            (1, 1),
            (7, 7),
            (9, 10),
            (4096, 4096),
            (4097, 5120),
            (5120, 5120),
            (8000, 8192),
            (15_000, 16_000),
        ] {
            assert_eq!(passes.chosen_for(tokens), chosen, "{tokens}");
        }
        let of = |tokens| passes.passes(&machine, LinearSpec { tokens, ..spec }, LayerGradient::Written);
        let whole = LayerOverlap::default();
        for tokens in (1..=16_000).step_by(61) {
            let found = of(tokens).unwrap();
            let class = LinearSpec { tokens: passes.chosen_for(tokens), ..spec };
            let class = whole.passes(&machine, class, LayerGradient::Written).unwrap();
            for (found, class) in [(found.forward, class.forward), (found.backward, class.backward)] {
                assert_eq!(found.policy, class.policy, "{tokens}");
                assert_eq!(found.plan, class.plan.of_fewer_tokens(tokens).unwrap());
                assert_eq!(found.plan.spec.tokens, tokens);
            }
        }
        assert!(lock(&passes.chosen).len() < 60, "{}", lock(&passes.chosen).len());
        let text = of(16_001).unwrap_err().to_string();
        assert!(text.contains("at most max_tokens, 16000"), "{text}");
    }

    /// What a layer has for its count goes before what a neighbour's choice makes of it, and what one layer was chosen is no other's.
    #[test]
    fn a_choice_is_for_its_layer_and_tuned_counts_keep_their_plans() {
        let (passes, mut machine, spec) = up_to(8192);
        let of = |machine: &LinearMachine, spec, gradient| passes.passes(machine, spec, gradient).unwrap();
        let spec = LinearSpec { tokens: 5000, ..spec };
        let fused = of(&machine, spec, LayerGradient::Written);
        let apart = of(&machine.clone().without_waiting_products(), spec, LayerGradient::Written);
        assert!(!apart.forward.policy.is_fused() && !apart.backward.policy.is_fused());
        assert!(fused.forward.policy.is_fused() || fused.backward.policy.is_fused());
        let place = TunedPlace { device: "X".to_owned(), transport: "nvlink".to_owned() };
        let mut plans = TunedPlans::default();
        plans.layers.insert(TunedGroups {
            shape: TunedShape::of(&spec, TunedPass::Forward, machine.topology, &place).unwrap(),
            policy: "concurrent".to_owned(),
            groups: TunedSizes::Rows(vec![1000, 250]),
            seconds: 0.1,
            sequential_seconds: 1.0,
            search: GroupSearch::Exhaustive,
        });
        machine.tuned = Some(Arc::new(TunedHere { place, plans }));
        let tuned = of(&machine, spec, LayerGradient::Written);
        assert_eq!(tuned.forward.plan.group_sizes(), [1000, 250]);
        assert_eq!(tuned.backward, fused.backward);
    }

    /// Layers that share an input have no fused product, and the key of tuned plans does not distinguish them from others.
    #[test]
    fn tuned_plans_that_a_machine_has_no_kernels_for_are_passed_over() {
        let collective = GemmCollective::ReduceScatter;
        let spec = collective.layer([64, 32, 16].into(), DType::F32);
        let (topology, cost) = (Topology::flat(2), CostModel::H200);
        let place = TunedPlace { device: "X".to_owned(), transport: "nvlink".to_owned() };
        let shape = TunedShape::of(&spec, TunedPass::Forward, topology, &place).unwrap();
        let tuned = |policy: &str, groups: TunedSizes, seconds| TunedGroups {
            shape: shape.clone(),
            policy: policy.to_owned(),
            groups,
            seconds,
            sequential_seconds: 1.0,
            search: GroupSearch::Exhaustive,
        };
        let mut plans = TunedPlans::default();
        plans.layers.insert(tuned("signals", TunedSizes::Columns { columns: vec![16, 16] }, 0.05));
        plans.layers.insert(tuned("fused", TunedSizes::Rows(vec![32]), 0.1));
        plans.layers.insert(tuned("concurrent", TunedSizes::Rows(vec![12, 20]), 0.2));
        let ran = |overlaps, column_groups| {
            let tuned = Some(Arc::new(TunedHere { place: place.clone(), plans: plans.clone() }));
            let transport = RankTransport::Nvlink;
            let machine = LinearMachine::new(transport, overlaps, topology, cost);
            let machine = LinearMachine { tuned, column_groups, ..machine };
            let passes = LayerOverlap::default().passes(&machine, spec, LayerGradient::Written).unwrap();
            (passes.forward.policy.to_string(), passes.forward.plan.wave_groups())
        };
        let fused = "concurrent+fused".to_owned();
        let ways = RankTransport::Nvlink.pass_overlaps(true, 16);
        let fused_way = ways.into_iter().find(PassOverlap::is_fused).unwrap();
        let rows = |sizes: &[usize]| WaveGroups::Sizes(sizes.to_vec());
        let columns = WaveGroups::ColumnSizes(vec![16, 16]);
        for column_groups in [Offered::Predicted, Offered::Tuned] {
            let found = ran(vec![PassOverlap::SEQUENTIAL], column_groups);
            assert_eq!(found, ("signals".to_owned(), columns.clone()));
        }
        assert_eq!(ran(vec![PassOverlap::SEQUENTIAL, fused_way], Offered::Never), (fused, rows(&[32])));
        assert_eq!(
            ran(vec![PassOverlap::SEQUENTIAL], Offered::Never),
            ("concurrent".to_owned(), rows(&[12, 20]))
        );
    }

    /// Where collectives of others run too, nothing that waits for rows and holds multiprocessors meanwhile is taken.
    #[test]
    fn tuned_products_that_wait_for_rows_are_passed_over_where_they_are_in_the_way() {
        let spec = GemmCollective::AllGather.layer([64, 32, 16].into(), DType::F32);
        let topology = Topology::flat(2);
        let place = TunedPlace { device: "X".to_owned(), transport: "nccl".to_owned() };
        let shape = TunedShape::of(&spec, TunedPass::Forward, topology, &place).unwrap();
        let mut plans = TunedPlans::default();
        for (policy, seconds) in [("signals+sm-margin=16", 0.1), ("concurrent", 0.2)] {
            plans.layers.insert(TunedGroups {
                shape: shape.clone(),
                policy: policy.to_owned(),
                groups: TunedSizes::Rows(vec![12, 20]),
                seconds,
                sequential_seconds: 1.0,
                search: GroupSearch::Exhaustive,
            });
        }
        let overlaps = RankTransport::Nccl.pass_overlaps(true, 16);
        let machine = LinearMachine::new(RankTransport::Nccl, overlaps, topology, CostModel::H200);
        let machine = LinearMachine { tuned: Some(Arc::new(TunedHere { place, plans })), ..machine };
        let policy = |machine: &LinearMachine| {
            let passes = LayerOverlap::default().passes(machine, spec, LayerGradient::Written).unwrap();
            passes.forward.policy.to_string()
        };
        for offered in [Offered::Predicted, Offered::Tuned] {
            assert_eq!(policy(&machine.clone().with_arriving_rows(offered)), "signals+sm-margin=16");
        }
        assert_eq!(policy(&machine.without_waiting_products()), "concurrent");
    }
}
