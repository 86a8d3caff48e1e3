//! What planning takes on one core: packed documents, `plan_mask` compared with `plan_attention`, which compares dispatches and policies,
//! with and without queries that may travel.
//!
//! `cargo run --release -p counterpoint-choose --example planning_seconds [case]`

use std::error::Error;
use std::time::Instant;

use counterpoint_choose::{DeviceModel, PlanConfig, QueryExchange, plan_attention, plan_mask};
use counterpoint_cost::CostModel;
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, Planning};

/// Lengths of documents as training data has them.
const LENGTHS: &str = include_str!("../../../benches/data/packed_documents_lognormal_1m.txt");

/// Ranks, tokens of all of them, and heads of queries and keys.
const CASES: [(usize, usize, [usize; 2]); 6] = [
    (1, 32 << 10, [64, 8]),
    (2, 16 << 10, [64, 8]),
    (8, 64 << 10, [64, 8]),
    (8, 64 << 10, [8, 2]),
    (16, 256 << 10, [64, 8]),
    (64, 1 << 20, [64, 8]),
];

/// Packs of each case, each planned once.
const PACKS: usize = 12;

/// Packed documents of so many tokens, causal; another pack for every number.
fn pack(tokens: usize, number: usize) -> Result<Mask, Box<dyn Error>> {
    let lengths = LENGTHS.split_whitespace().map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let mut left = tokens;
    let documents = lengths.iter().cycle().skip(number * 97 % lengths.len()).map_while(|&length| {
        let taken = length.min(left);
        left -= taken;
        (taken > 0).then_some(taken)
    });
    Ok(Mask::causal(Documents::from_lengths(documents.collect::<Vec<_>>())?)?)
}

/// The median of milliseconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let only: Option<usize> = std::env::args().nth(1).map(|text| text.parse()).transpose()?;
    let model = DeviceModel::for_choices("NVIDIA H200", &CostModel::H200);
    println!(
        "| ranks | tokens | heads | plan_mask, ms | plan_attention, ms | ratio | queries may travel, ms |\n|---|---|---|---|---|---|---|"
    );
    for (case, (ranks, tokens, [heads_q, heads_kv])) in CASES.into_iter().enumerate() {
        if only.is_some_and(|only| only != case) {
            continue;
        }
        let config = PlanConfig::new(ranks);
        let spec = AttentionSpec::new(heads_q, heads_kv, 128, DType::Bf16);
        let (mut plain, mut compared, mut travelling) = (Vec::new(), Vec::new(), Vec::new());
        let auto = PlanConfig { query_exchange: QueryExchange::Auto, ..config };
        for number in 0..PACKS {
            let mask = pack(tokens, number)?;
            let began = Instant::now();
            drop(plan_mask(&mask, &spec, &config)?);
            plain.push(1e3 * began.elapsed().as_secs_f64());
            let began = Instant::now();
            drop(plan_attention(&mask, &spec, &config, model, u64::MAX, &Planning::ALONE)?);
            compared.push(1e3 * began.elapsed().as_secs_f64());
            let began = Instant::now();
            drop(plan_attention(&mask, &spec, &auto, model, u64::MAX, &Planning::ALONE)?);
            travelling.push(1e3 * began.elapsed().as_secs_f64());
        }
        let (plain, compared, travelling) = (median(plain), median(compared), median(travelling));
        println!(
            "| {ranks} | {tokens} | {heads_q}:{heads_kv} | {plain:.2} | {compared:.2} | {:.1} | {travelling:.2} |",
            compared / plain
        );
    }
    Ok(())
}
