//! What of communication is not hidden where nothing is named: packed documents, 8 ranks of 8k tokens, simulated.

use counterpoint_choose::{
    AttentionPrediction, DeviceModel, PlanConfig, StageCount, attention_policies, plan_attention,
};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan, Planning};
use counterpoint_schedule::{GradientReduction, PassPolicies, RankTransport, Timeline};

use crate::case::cost;

const RANKS: usize = 8;

/// Packs of documents whose lengths are those of texts: the same list from another place on.
fn packs() -> impl Iterator<Item = Mask> {
    let text = include_str!("../../../../benches/data/packed_documents_lognormal_1m.txt");
    let lengths: Vec<usize> = text.split_whitespace().map(|length| length.parse().unwrap()).collect();
    (0..12).map(move |number| {
        let mut left = RANKS << 13;
        let documents = lengths.iter().cycle().skip(number * 97 % lengths.len()).map_while(|&length| {
            let taken = length.min(left);
            left -= taken;
            (taken > 0).then_some(taken)
        });
        Mask::causal(Documents::from_lengths(documents.collect::<Vec<_>>()).unwrap()).unwrap()
    })
}

fn spec(gradient_shares: GradientShares) -> AttentionSpec {
    AttentionSpec { gradient_shares, ..AttentionSpec::new(64, 8, 128, DType::Bf16) }
}

fn config(stages: StageCount) -> PlanConfig {
    PlanConfig { cost: cost(), stages: stages.into(), ..PlanConfig::new(RANKS) }
}

fn planned(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Plan {
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    plan_attention(mask, spec, config, model, u64::MAX, &Planning::ALONE).unwrap().0
}

/// Forward and backward by these policies, or by those that are chosen.
fn passes(
    plan: &Plan,
    spec: &AttentionSpec,
    config: &PlanConfig,
    policies: Option<PassPolicies>,
) -> [Timeline; 2] {
    let (topology, backward) = (config.topology, Some(GradientReduction::default()));
    let policies = policies.unwrap_or_else(|| {
        let transports = RankTransport::of_gpus(&topology);
        attention_policies(plan, spec, backward, transports, &topology, &config.cost, &Planning::ALONE)
            .unwrap()
            .policies()
    });
    let predicted = AttentionPrediction::of(plan, spec, policies, backward, &topology, &config.cost).unwrap();
    [predicted.forward, predicted.backward.unwrap()]
}

/// Of one pass, summed over packs.
#[derive(Clone, Copy, Default)]
struct Sums {
    /// Seconds of the slowest rank.
    ends: f64,
    /// Means of a rank.
    communication: f64,
    exposed: f64,
    /// Of that, behind a rank's computation while the slowest rank computes: no overlap hides it.
    waiting: f64,
}

impl Sums {
    fn add(&mut self, timeline: &Timeline) {
        let overlap = timeline.overlap();
        self.ends += timeline.makespan();
        self.communication += overlap.communication_seconds;
        self.exposed += overlap.exposed_seconds;
        self.waiting += overlap.imbalance_seconds;
    }

    /// Exposed of all that is sent, whatever it is exposed by.
    fn share(&self) -> f64 {
        self.exposed / self.communication
    }

    /// Likewise without what is spent waiting for a rank that has more to compute.
    fn share_of_sending(&self) -> f64 {
        (self.exposed - self.waiting) / (self.communication - self.waiting)
    }

    /// What is exposed and not waited, of the whole pass.
    fn share_of_pass(&self) -> f64 {
        (self.exposed - self.waiting) / self.ends
    }

    fn text(&self) -> String {
        let [exposed, sending, pass] =
            [self.share(), self.share_of_sending(), self.share_of_pass()].map(|share| 100.0 * share);
        format!(
            "exposed {exposed:.1} % of communication, {sending:.1} % without waiting, {pass:.2} % of the pass"
        )
    }
}

fn chosen(shares: GradientShares) -> [Sums; 2] {
    let (spec, config) = (spec(shares), config(StageCount::Auto));
    let mut sums = [Sums::default(); 2];
    for mask in packs() {
        let plan = planned(&mask, &spec, &config);
        let timelines = passes(&plan, &spec, &config, None);
        sums.iter_mut().zip(&timelines).for_each(|(sum, timeline)| sum.add(timeline));
    }
    println!("{shares:?}: forward {}", sums[0].text());
    println!("{shares:?}: backward {}", sums[1].text());
    sums
}

/// The forward hides all. Of the backward two thirds of what is exposed is waiting for ranks that compute more; the rest are the last partial sums of dk
/// and dv, which nothing comes after.
#[test]
fn documents_hide_most_of_what_they_send() {
    let [forward, backward] = chosen(GradientShares::Accumulators);
    assert!(forward.share() <= 0.02, "{}", forward.text());
    assert!(backward.share() <= 0.55, "{}", backward.text());
    assert!(backward.share_of_sending() <= 0.28, "{}", backward.text());
    assert!(backward.share_of_pass() <= 0.015, "{}", backward.text());
    // Half as many bytes to the owners.
    let [_, rounded] = chosen(GradientShares::Elements);
    assert!(rounded.share_of_sending() <= 0.22, "{}", rounded.text());
}

/// Whatever hides more of the backward's communication takes longer: stages have launches of their own, and pass dq on.
#[test]
fn what_hides_more_ends_later() {
    let spec = spec(GradientShares::Accumulators);
    let policies = ["concurrent", "concurrent+copy-engine", "kernel-barrier+sm-margin=16"];
    let mut worst = f64::INFINITY;
    for (number, mask) in packs().enumerate().step_by(3) {
        let config_of = config(StageCount::Auto);
        let [_, default] = passes(&planned(&mask, &spec, &config_of), &spec, &config_of, None);
        let share = |timeline: &Timeline| {
            let mut sums = Sums::default();
            sums.add(timeline);
            sums.share()
        };
        for stages in 1..=4 {
            let config = config(StageCount::Fixed(stages));
            let plan = planned(&mask, &spec, &config);
            for policy in policies {
                let policies =
                    PassPolicies { forward: policy.parse().unwrap(), backward: policy.parse().unwrap() };
                let [_, other] = passes(&plan, &spec, &config, Some(policies));
                let longer = other.makespan() / default.makespan();
                let [hides, of] = [share(&other), share(&default)].map(|share| 100.0 * share);
                println!(
                    "pack {number}, {stages} stages, {policy}: {hides:.0} % exposed (default {of:.0} %), {longer:.3} of its time"
                );
                if hides < of {
                    worst = worst.min(longer);
                }
            }
        }
    }
    println!("what hides more takes at least {worst:.3} times as long");
    assert!(worst >= 1.0, "{worst}");
}
