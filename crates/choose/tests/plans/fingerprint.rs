//! Fingerprints see every field of every input, whichever these are: every field of the serialised form is changed.

use std::collections::HashMap;

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, QueryExchange, StageCount, plan_mask};
use counterpoint_cost::{CostModel, WorkerSharing};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, Fingerprint, Plan};
use serde_json::{Value, json};

/// Inputs in which nothing is left out.
fn inputs() -> Value {
    let mask: Mask = "causal:1000".parse().unwrap();
    let spec = AttentionSpec { softcap: 30.0, seqlen_sink: 1, ..AttentionSpec::new(8, 2, 64, DType::Bf16) };
    let config = PlanConfig {
        chunk_size: Some(64),
        stages: StageCount::Fixed(2).into(),
        cost: CostModel {
            sharing: Some(WorkerSharing::H200),
            engine: Some(CostModel::H200.link),
            packed_elements_per_second: Some(1e9),
            ..CostModel::H200
        },
        ..PlanConfig::new(4)
    };
    json!({"mask": mask, "spec": spec, "config": config})
}

fn fingerprint(inputs: &Value) -> Result<Fingerprint, serde_json::Error> {
    let mask: Mask = serde_json::from_value(inputs["mask"].clone())?;
    let spec: AttentionSpec = serde_json::from_value(inputs["spec"].clone())?;
    let config: PlanConfig = serde_json::from_value(inputs["config"].clone())?;
    Ok(Fingerprint::of(&mask, &spec, &config))
}

/// JSON pointers to everything in `value`, itself included.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| pointers(value, &format!("{at}/{name}"), found));
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, value)| pointers(value, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

/// Other values that may stand where `value` does; those that may not are found out by deserialising.
fn others(value: &Value) -> Vec<Value> {
    match value {
        Value::Number(number) => match number.as_u64() {
            Some(number) => vec![json!(number + 1), json!(number.saturating_sub(1)), Value::Null],
            None => vec![json!(number.as_f64().unwrap() * 1.25 + 1e-9)],
        },
        Value::Bool(value) => vec![json!(!value)],
        // Other variants.
        Value::String(_) => {
            let names = ["min-heap", "auto", "never", "f16", "elements", "full", "inv_causal"];
            names.map(Value::from).to_vec()
        }
        Value::Object(_) => vec![Value::Null, json!("auto")],
        _ => Vec::new(),
    }
}

#[test]
fn every_field_of_the_serialised_inputs_changes_the_fingerprint() {
    let inputs = inputs();
    let base = fingerprint(&inputs).unwrap();
    assert_eq!(fingerprint(&inputs).unwrap(), base);
    let mut places = Vec::new();
    pointers(&inputs, "", &mut places);
    let mut seen = HashMap::from([(base, "nothing".to_owned())]);
    let mut changed = 0;
    for place in &places {
        let value = inputs.pointer(place).unwrap();
        let mut accepted = 0;
        for other in others(value).into_iter().filter(|other| other != value) {
            let mut inputs = inputs.clone();
            *inputs.pointer_mut(place).unwrap() = other.clone();
            let Ok(fingerprint) = fingerprint(&inputs) else { continue };
            accepted += 1;
            if let Some(before) = seen.insert(fingerprint, format!("{place} = {other}")) {
                panic!("{place} = {other} has the fingerprint of {before}");
            }
        }
        // Starts of ranges, for one, can only change together with others; every other leaf must have been tried.
        let must_change = !matches!(value, Value::Object(_) | Value::Array(_));
        assert!(accepted > 0 || !must_change, "no other value was accepted for {place}: {value}");
        changed += accepted;
    }
    assert!(changed > 45, "{changed}");
    assert!(places.iter().any(|place| place == "/config/cost/sharing/communication"));
}

/// Profiles that differ in what overlapping work takes from each other plan differently, so they share no entry of a cache.
#[test]
fn sharing_counts() {
    let config = PlanConfig::new(4);
    let cost = CostModel { sharing: Some(WorkerSharing::H200), ..config.cost };
    let (mask, spec) = (Mask::causal(1000).unwrap(), AttentionSpec::new(8, 2, 64, DType::Bf16));
    let shared = PlanConfig { cost, ..config };
    assert_ne!(Fingerprint::of(&mask, &spec, &config), Fingerprint::of(&mask, &spec, &shared));
    let base = plan_mask(&mask, &spec, &config).unwrap();
    let on = |config: &PlanConfig| Fingerprint::of_mask_on(&base, &mask, &spec, &config.on_a_dispatch());
    assert_ne!(on(&config), on(&shared));
}

/// Each number and word of a plan, too.
#[test]
fn every_field_of_a_plan_changes_its_fingerprint() {
    let config = PlanConfig {
        chunk_size: Some(64),
        query_exchange: counterpoint_choose::QueryExchange::FewestBytes,
        topology: counterpoint_plan::Topology { world_size: 2, ranks_per_node: 1 },
        stages: StageCount::Fixed(1).into(),
        ..PlanConfig::new(2)
    };
    let mask: Mask = "last-global:0,960,global=64".parse().unwrap();
    let spec = AttentionSpec::new(2, 2, 64, DType::Bf16);
    let plan = plan_mask(&mask, &spec, &config).unwrap().over_nodes(&config.topology);
    assert!(plan.ranks[0].hosted.is_some() && plan.two_level.is_some());
    let value = serde_json::to_value(&plan).unwrap();
    let mut places = Vec::new();
    pointers(&value, "", &mut places);
    let base = plan.fingerprint();
    let mut changed = 0;
    for place in places.iter().filter(|place| value.pointer(place).unwrap().is_number()) {
        let mut other = value.clone();
        let leaf = other.pointer_mut(place).unwrap();
        *leaf = json!(leaf.as_i64().unwrap() + 1);
        let other: Plan = serde_json::from_value(other).unwrap();
        assert_ne!(other.fingerprint(), base, "{place}");
        changed += 1;
    }
    assert!(changed > 100, "{changed}");
}

/// Of masks of all kinds, hosts among them; and what one is written as has not changed unnoticed.
#[test]
fn plans_are_read_as_they_were_written() {
    const RECORDED: (&str, &str) =
        ("(plan 1)", "bc766c215138cf8668df37860dbd482030283a28a19d2890aabfb9c6e32d1d80");
    let spec = AttentionSpec::new(8, 2, 64, DType::Bf16);
    let offload = PlanConfig { query_exchange: QueryExchange::FewestBytes, ..PlanConfig::new(4) };
    for (mask, config) in [
        ("varlen-causal:lengths=300,1900,60,700,1136", PlanConfig::new(1)),
        ("varlen-causal:lengths=300,1900,60,700,1136", PlanConfig::new(7)),
        ("sliding-window:4096,left=511,right=0", PlanConfig::new(8)),
        ("causal:4096", offload),
    ] {
        let plan = plan_mask(&mask.parse().unwrap(), &spec, &config).unwrap();
        let bytes = Plan::BYTES.write(&plan);
        assert_eq!(Plan::BYTES.read(&bytes).as_ref(), Ok(&plan), "{mask}");
        let json = serde_json::to_vec(&plan).unwrap().len();
        assert!(bytes.len() * 2 < json + 200, "{mask}: {} bytes, {json} as JSON", bytes.len());
    }
    let config = PlanConfig {
        chunk_size: Some(128),
        dispatch: DispatchAlgorithm::Sequential,
        stages: StageCount::Fixed(1).into(),
        ..PlanConfig::new(2)
    };
    let found = plan_mask(&"causal:1024".parse().unwrap(), &spec, &config).unwrap().fingerprint().to_string();
    let version = Plan::BYTES.version();
    assert!(
        version.ends_with(RECORDED.0) && found == RECORDED.1,
        "a plan of {version} is {found}: if plans have other fields, count up the number of Plan::BYTES, and record it here"
    );
}
