//! The golden record: 306 plans with the Programs of all their ranks, and the bits that a part of them computes on the CPU, against
//! `record.jsonl`. A change that is meant to change nothing leaves it as it is; one that is meant to change something records it
//! anew with `GOLDEN=record cargo test --test golden`, and the diff of the record says what it changed.

mod attention;
mod case;
mod collective;
mod draw;
mod linear;
mod plan_text;
mod record;
mod tensor;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use case::Case;
use record::Entry;

/// Every case, in order.
fn cases() -> Vec<Case> {
    type Maker = fn(usize) -> Case;
    let makers: Vec<(Maker, usize)> = [
        (attention::case as Maker, attention::COUNT),
        (linear::case, linear::COUNT),
        (collective::case, collective::COUNT),
    ]
    .into_iter()
    .flat_map(|(make, count)| (0..count).map(move |index| (make, index)))
    .collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, std::num::NonZero::get) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some((make, index)) = makers.get(at) else { break };
                    let case = make(*index);
                    found.lock().unwrap().push((at, case));
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap();
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().map(|(_, case)| case).collect()
}

/// Operations that lowerings emit. A record without one of them would not notice its change.
const OPERATIONS: [&str; 23] = [
    "attention_backward",
    "attention_delta",
    "attention_finish",
    "attention_forward",
    "cast",
    "column_sum",
    "concat",
    "copy_rows",
    "fused attention_backward",
    "fused gemm_nn",
    "fused gemm_nt",
    "fused group_cast",
    "gemm_nn",
    "gemm_nt",
    "gemm_tn",
    "group_cast",
    "group_reduce_lse",
    "group_reduce_sum",
    "place_columns",
    "place_rows",
    "rms_norm",
    "wait signal",
    "wave_gemm",
];

#[test]
fn nothing_has_changed() {
    let cases = cases();
    assert_eq!(cases.len(), 306);
    let has = |wanted: &str| {
        let wanted = format!("  {wanted} ");
        cases.iter().any(|case| case.parts.iter().any(|(_, text)| text.contains(&wanted)))
    };
    let missing: Vec<&&str> = OPERATIONS.iter().filter(|name| !has(name)).collect();
    assert!(missing.is_empty(), "no case has {missing:?}");
    match std::env::var("GOLDEN").as_deref() {
        Ok("record") => return record::write(&cases),
        Ok(other) => panic!("GOLDEN is `{other}`; `record` writes the record"),
        Err(_) => {}
    }
    let recorded = record::read();
    let machine = case::machine();
    if !record::has_outputs_of(&recorded, &machine) {
        eprintln!(
            "no outputs were recorded on {machine}: only those that are the same on all machines are compared"
        );
    }
    let known: Vec<&Entry> = recorded.iter().collect();
    assert_eq!(known.len(), cases.len(), "cases in the record");
    let differences: Vec<String> = known
        .iter()
        .zip(&cases)
        .filter_map(|(entry, case)| {
            let difference = record::compare(entry, case);
            (!difference.is_empty()).then(|| format!("== {}: {}\n{difference}", case.name, case.text))
        })
        .collect();
    let shown = differences.iter().take(5).map(String::as_str).collect::<Vec<_>>().join("\n");
    assert!(
        differences.is_empty(),
        "{} of {} cases differ from tests/golden/record.jsonl, the first:\n{shown}\n\
         Where the change is meant, record it with `GOLDEN=record cargo test --test golden`.",
        differences.len(),
        cases.len(),
    );
}

/// A record that notices nothing would prove nothing: one line of one Program is changed.
#[test]
fn a_changed_line_is_shown() {
    let case = attention::case(1);
    let entry = Entry::of(&case);
    assert_eq!(record::compare(&entry, &case), "");
    let mut changed = attention::case(1);
    let part = changed.parts.iter_mut().find(|(name, _)| name.starts_with("backward"));
    let (name, text) = part.unwrap();
    let name = name.clone();
    *text = text.replacen("attention_backward", "attention_forward", 1);
    let difference = record::compare(&entry, &changed);
    assert!(difference.contains(&name) && difference.contains("+  "), "{difference}");
    changed.parts.pop();
    assert!(record::compare(&entry, &changed).contains("no longer there"));
}
