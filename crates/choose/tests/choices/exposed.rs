//! What of communication is not hidden where nothing is named: packed documents, 8 ranks of 8k tokens, simulated.

use counterpoint_choose::{AttentionPrediction, DeviceModel, attention_policies, plan_attention};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, PlanConfig};
use counterpoint_schedule::{GradientReduction, RankTransport, Timeline};

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

/// Seconds of communication that no computation hides, and all.
fn exposed(timeline: &Timeline) -> [f64; 2] {
    let overlap = timeline.overlap();
    [overlap.exposed_seconds, overlap.communication_seconds]
}

#[test]
fn documents_hide_most_of_what_they_send() {
    let spec = AttentionSpec::new(64, 8, 128, DType::Bf16);
    let model = DeviceModel::of_machine("NVIDIA H200").unwrap();
    let config = PlanConfig { cost: cost(), ..PlanConfig::new(RANKS) };
    let topology = config.topology;
    let backward = Some(GradientReduction::default());
    let mut sums = [[0.0; 2]; 2];
    for mask in packs() {
        let (plan, choice) = plan_attention(&mask, &spec, &config, model, u64::MAX).unwrap();
        let transports = RankTransport::of_gpus(&topology);
        let policies =
            attention_policies(&plan, &spec, backward, transports, &topology, &config.cost).unwrap();
        let policies = policies.policies();
        let predicted =
            AttentionPrediction::of(&plan, &spec, policies, backward, &topology, &config.cost).unwrap();
        let passes = [exposed(&predicted.forward), exposed(&predicted.backward.unwrap())];
        let share = |[exposed, all]: [f64; 2]| 100.0 * exposed / all;
        println!(
            "{:?}, {policies}: forward {:.0} % of {:.0} us, backward {:.0} % of {:.0} us",
            choice.chosen,
            share(passes[0]),
            1e6 * passes[0][1],
            share(passes[1]),
            1e6 * passes[1][1]
        );
        for (sum, pass) in sums.iter_mut().zip(passes) {
            (0..2).for_each(|at| sum[at] += pass[at]);
        }
    }
    let [forward, backward] = sums.map(|[exposed, all]| exposed / all);
    println!("exposed of all packs: forward {:.1} %, backward {:.1} %", 100.0 * forward, 100.0 * backward);
    assert!(forward <= 0.9 && backward <= 0.9, "{forward} {backward}");
}
