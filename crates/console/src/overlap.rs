//! What `--overlap` comes to for a plan: policies that are named, or for each pass the one that is predicted to end first.

use counterpoint_choose::{PassChoice, PlanConfig, PolicyChoice, attention_policies};
use counterpoint_cost::CostModel;
use counterpoint_plan::{AttentionSpec, Plan, Planning};
use counterpoint_report::format_seconds;
use counterpoint_schedule::{GradientReduction, OverlapPolicy, PassPolicies, RankTransport};
use serde::Serialize;
use serde_json::{Value, json};

use crate::arguments::{OverlapChoice, PassOverlaps};
use crate::error::CliError;

/// The policies that a plan is run by.
#[derive(Clone, Debug)]
pub struct Overlap {
    /// Of each pass.
    pub policies: PassPolicies,
    /// What they were chosen from, where some pass was left to be chosen.
    pub choice: Option<PolicyChoice>,
}

/// What is run, for whom.
#[derive(Clone, Copy)]
pub struct Overlapped<'a> {
    /// Who computes what.
    pub plan: &'a Plan,
    /// The shapes.
    pub spec: &'a AttentionSpec,
    /// How gradients travel; `None` where there are none.
    pub backward: Option<GradientReduction>,
    /// What the plan was made for.
    pub config: &'a PlanConfig,
}

impl Overlapped<'_> {
    /// What was asked for, with passes that were left to be chosen chosen of what some of `transports` runs.
    pub fn by(&self, asked: PassOverlaps, transports: &[RankTransport]) -> Result<Overlap, CliError> {
        let Self { plan, spec, backward, config } = *self;
        if let (OverlapChoice::Named(forward), OverlapChoice::Named(backward)) =
            (asked.forward, asked.backward)
        {
            return Ok(Overlap { policies: PassPolicies { forward, backward }, choice: None });
        }
        let (topology, cost) = (&config.topology, &config.cost);
        let choice = attention_policies(plan, spec, backward, transports, topology, cost, &Planning::ALONE);
        let choice = choice.map_err(CliError::of_choice)?;
        let chosen = choice.policies();
        let pick = |asked: OverlapChoice, chosen: OverlapPolicy| match asked {
            OverlapChoice::Auto => chosen,
            OverlapChoice::Named(policy) => policy,
        };
        let policies = PassPolicies {
            forward: pick(asked.forward, chosen.forward),
            backward: pick(asked.backward, chosen.backward),
        };
        Ok(Overlap { policies, choice: Some(choice) })
    }
}

/// `auto`, for both passes.
pub const AUTO: PassOverlaps = PassOverlaps { forward: OverlapChoice::Auto, backward: OverlapChoice::Auto };

/// A pass as `--json` has it: what was chosen, and from what.
#[derive(Clone, Debug, Serialize)]
pub struct ChosenPass {
    policy: String,
    transport: &'static str,
    seconds: f64,
    sequential_seconds: f64,
    candidates: Vec<Value>,
}

impl ChosenPass {
    /// What was chosen for a pass.
    pub fn of(choice: &PassChoice) -> Self {
        let chosen = choice.chosen();
        let candidates = choice.candidates.iter().map(|one| {
            json!({"policy": one.policy.to_string(), "transport": one.transport.name(), "seconds": one.seconds})
        });
        Self {
            policy: chosen.policy.to_string(),
            transport: chosen.transport.name(),
            seconds: chosen.seconds,
            sequential_seconds: choice.sequential_seconds(),
            candidates: candidates.collect(),
        }
    }
}

/// What was chosen for a pass, in words.
pub fn chosen_text(choice: &PassChoice) -> String {
    let (chosen, sequential) = (choice.chosen(), choice.sequential_seconds());
    let compared = choice.candidates.len();
    format!(
        "overlap {} of {compared} policies, {} less than sequential",
        chosen.policy,
        format_seconds(sequential - chosen.seconds)
    )
}

/// Why a policy is not what it seems, where it is not: a margin that is too small for what a collective occupies, a variable that must
/// be set.
pub fn warning(policy: &OverlapPolicy, cost: &CostModel) -> Option<String> {
    if policy.queues == counterpoint_schedule::HardwareQueues::Single {
        return Some("needs CUDA_DEVICE_MAX_CONNECTIONS=1".to_owned());
    }
    let taken = cost.sharing?.communication;
    let margin = policy.sm_margin();
    let by_workers = policy.moves_by_transport();
    (by_workers && margin > 0 && margin < taken)
        .then(|| format!("a collective takes {taken} workers, so a margin of {margin} lets none start"))
}
