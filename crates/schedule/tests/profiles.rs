//! Whatever figures a machine profile holds: it is refused with a sentence, or everything that follows from it is a number.

use std::time::{Duration, Instant};

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, Prediction, QueryExchange, StageCount, plan_mask};
use counterpoint_cost::{LinkPoint, MachineProfile, PolicyMeasurement, TransportMeasurement};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, GemmCollective, Topology};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, MatrixShape, OverlapPolicy, Program, RankOf, lower_attention_backward,
    lower_attention_forward, lower_collective, simulate,
};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

/// A profile with something in every field.
fn full_profile() -> MachineProfile {
    let points = || (1..4).map(|size| LinkPoint { bytes: size << 20, seconds: 1e-5 * size as f64 }).collect();
    MachineProfile {
        transports: vec![TransportMeasurement {
            transport: "p2p".to_owned(),
            cast: points(),
            reduce: points(),
        }],
        policies: vec![PolicyMeasurement { policy: "fused".to_owned(), seconds: 1e-3, efficiency: 0.9 }],
        ..MachineProfile::h200()
    }
}

/// JSON pointers to all numbers below `value`.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| numbers(value, &format!("{at}/{name}"), found))
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, value)| numbers(value, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

/// A number as a person may have got it wrong, or a worse one.
fn odd_number(was: &Value, rng: &mut impl Rng) -> Value {
    let real = 10f64.powf(rng.random_range(-320.0..308.3));
    match rng.random_range(0..8) {
        0 => json!(0),
        1 => json!(1),
        2 => json!(u64::MAX >> rng.random_range(0..64)),
        3 => json!(-real),
        4 => json!(f64::MAX),
        5 => json!(10f64.powf(rng.random_range(-6.0..30.0))),
        // As valid profiles go.
        6 => json!(was.as_f64().unwrap() * 10f64.powf(rng.random_range(-9.0..9.0))),
        _ => json!(real),
    }
}

/// Everything that a command predicts with a profile.
fn predict(profile: &MachineProfile, rng: &mut impl Rng) {
    let masks = ["causal:5000", "varlen-causal:lengths=300,2000,40,1800", "last-global:0,3000,global=64"];
    let mask: Mask = masks[rng.random_range(0..masks.len())].parse().unwrap();
    let spec = AttentionSpec::new(8, 2, 64, DType::Bf16);
    let ranks = rng.random_range(1..6);
    let topology = Topology { world_size: ranks, ranks_per_node: rng.random_range(1..=ranks) };
    let stages = [StageCount::Auto, StageCount::Auto, StageCount::Fixed(0), StageCount::Fixed(3)];
    let exchange = [QueryExchange::Auto, QueryExchange::Never];
    let config = PlanConfig {
        chunk_size: Some(128),
        dispatch: [DispatchAlgorithm::Affinity, DispatchAlgorithm::Zigzag][rng.random_range(0..2)],
        stages: stages[rng.random_range(0..stages.len())].into(),
        query_exchange: exchange[rng.random_range(0..2)],
        topology,
        cost: profile.cost,
    };
    let plan = plan_mask(&mask, &spec, &config).expect("a valid profile plans").over_nodes(&topology);
    let prediction = Prediction::new(&plan, &spec, &config);
    assert!(prediction.forward_seconds().is_finite() && prediction.backward_seconds().is_finite());
    let policy = OverlapPolicy::default();
    let programs: [Vec<Program>; 2] = [
        (0..ranks)
            .map(|rank| lower_attention_forward(&plan, rank, &spec, policy, KeyBlocks::Unaligned))
            .collect(),
        (0..ranks)
            .map(|rank| lower_attention_backward(&plan, rank, &spec, policy, GradientReduction::default()))
            .collect(),
    ];
    for programs in programs {
        let timeline = simulate(&programs, &topology, &profile.cost).expect("programs that fit");
        assert!(timeline.makespan().is_finite(), "{}", timeline.makespan());
    }
    let gather = lower_collective(
        GemmCollective::AllGather,
        RankOf { rank: 0, ranks: 4 },
        MatrixShape { rows: 4096, columns: 512 },
        DType::Bf16,
    );
    assert!(simulate(&[gather], &Topology::flat(4), &profile.cost).unwrap().makespan().is_finite());
    for transport in &profile.transports {
        for bytes in [0, 1, 3 << 20, u64::MAX] {
            let seconds = [transport.cast_seconds(bytes), transport.reduce_seconds(bytes)];
            assert!(seconds.into_iter().flatten().all(f64::is_finite), "{seconds:?}");
        }
    }
}

/// Up to three numbers of a valid profile are changed at a time, for as long as the budget lasts.
#[test]
fn odd_profiles_are_refused_or_predict_numbers() {
    let seed = std::env::var("COUNTERPOINT_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(19);
    println!("seed {seed}");
    let valid = serde_json::to_value(full_profile()).unwrap();
    let mut places = Vec::new();
    numbers(&valid, "", &mut places);
    assert!(places.len() > 40, "{places:?}");
    let began = Instant::now();
    let (mut accepted, mut refused) = (0, 0);
    for case in 0_u64.. {
        if began.elapsed() > Duration::from_secs(4) && case >= 200 {
            break;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ case << 32);
        let mut profile = valid.clone();
        for _ in 0..rng.random_range(1..4) {
            let place = &places[rng.random_range(0..places.len())];
            let number = profile.pointer_mut(place).unwrap();
            *number = odd_number(number, &mut rng);
        }
        let text = profile.to_string();
        match MachineProfile::from_json(&text) {
            Ok(profile) => {
                println!("case {case} of seed {seed}: {text}");
                predict(&profile, &mut rng);
                accepted += 1;
            }
            Err(error) => {
                let sentence = error.to_string();
                assert!(!sentence.is_empty() && !sentence.contains("Some("), "{sentence}");
                refused += 1;
            }
        }
    }
    assert!(accepted >= 20 && refused >= 20, "{accepted} accepted, {refused} refused");
}

/// What once passed and then panicked: seconds that overflow, a size that is not ascending.
#[test]
fn figures_beyond_any_machine_are_refused_by_name() {
    let valid = serde_json::to_value(full_profile()).unwrap();
    let odd = [
        ("/cost/forward_flops_per_second", json!(1e-300), "forward_flops_per_second"),
        ("/cost/backward_flops_per_second", json!(5e-324), "backward_flops_per_second"),
        ("/cost/link/bytes_per_second", json!(1e-305), "link.bytes_per_second"),
        ("/cost/launch_seconds", json!(1e308), "launch_seconds"),
        ("/cost/network/alpha_seconds", json!(1e308), "network.alpha_seconds"),
        ("/cost/tiles/forward/tile_columns", json!(1e300), "tiles.tile_columns"),
        ("/cost/tiles/workers", json!(u64::MAX), "tiles.workers"),
        ("/cost/sharing/gemm_tile/0", json!(u64::MAX), "sharing.gemm_tile"),
        ("/transports/0/cast/0/bytes", json!(u64::MAX), "transports.cast"),
        ("/transports/0/reduce/0/seconds", json!(-1.0), "transports.reduce"),
    ];
    for (place, number, field) in odd {
        let mut profile = valid.clone();
        *profile.pointer_mut(place).unwrap() = number;
        let error = MachineProfile::from_json(&profile.to_string()).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("it must be"), "{place}: {error}");
    }
}
