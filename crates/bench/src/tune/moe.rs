//! `counterpoint tune moe`.

use counterpoint_choose::{GroupSearch, TunedExperts};
use counterpoint_console::{
    self as console, CliError, CommandLine, FlagFault, Schema, output::shown, tuned::TunedFile,
};
use serde_json::{Value, json};

use crate::arguments::TuneMoeArguments;
use crate::moe::{Compared, ExpertsRow, WRONG, each_kind, on_ranks};
use crate::ranks::BenchRanks;

pub(super) fn run(arguments: &TuneMoeArguments, line: &CommandLine) -> Result<(), CliError> {
    on_ranks(&arguments.layers, line, |ranks| tune(arguments, ranks))
}

fn tune(arguments: &TuneMoeArguments, ranks: &BenchRanks) -> Result<(), CliError> {
    let layers = &arguments.layers;
    if ranks.count(layers.ep_size) < 2 {
        return Err(CliError::flag("--ep-size", "1", FlagFault::OneRank));
    }
    let file = ranks.prints().then(|| TunedFile::open(arguments.plans.as_deref()));
    let mut file = file.transpose()?;
    let compared = Compared::Fastest(arguments.trials as usize);
    let rows = each_kind(layers, (ranks, Schema::TuneMoe), &compared, |table, rows| {
        let Some(file) = &mut file else { return Ok(()) };
        // What is found is kept at once, so that who breaks off has what was found by then.
        for &pass in &layers.passes {
            let rows = once(rows.iter().filter(|row| row.pass == pass));
            let kept = fastest(&rows);
            file.keep(|plans| kept.iter().for_each(|plan| plans.experts.insert(plan.clone())))?;
            match layers.json {
                true => console::print_json(Schema::TuneMoe, &document(&rows, &kept, file))?,
                false => rows.iter().try_for_each(|row| table.show(row))?,
            }
        }
        Ok(())
    })?;
    let kept = file.map(|file| format!("\nkept in {}\n", shown(file.path())));
    rows.end(&kept.unwrap_or_default(), WRONG)
}

/// Each way once: a pass of fewer ways than the other was tried in some of them again.
fn once<'a>(rows: impl Iterator<Item = &'a ExpertsRow>) -> Vec<&'a ExpertsRow> {
    let mut once: Vec<&ExpertsRow> = Vec::new();
    for row in rows {
        if once.iter().all(|known| (&known.policy, known.cut) != (&row.policy, row.cut)) {
            once.push(row);
        }
    }
    once
}

/// The fastest groups under every policy, those of all policies in the order of their times.
fn fastest(rows: &[&ExpertsRow]) -> Vec<TunedExperts> {
    let mut rows = rows.to_vec();
    rows.sort_by(|a, b| a.seconds.median.total_cmp(&b.seconds.median));
    let mut kept: Vec<TunedExperts> = Vec::new();
    for row in rows {
        let is_known = kept.iter().any(|one| one.policy == row.policy);
        let Some(shape) = row.shape.clone().filter(|_| !is_known) else { continue };
        kept.push(TunedExperts {
            shape,
            policy: row.policy.clone(),
            groups: row.cut,
            seconds: row.seconds.median,
            sequential_seconds: row.sequential_seconds,
            search: GroupSearch::Predictive,
        });
    }
    kept
}

fn document(rows: &[&ExpertsRow], kept: &[TunedExperts], file: &TunedFile) -> Value {
    let trial = |row: &&ExpertsRow| {
        json!({
            "policy": row.policy,
            "groups": row.cut,
            "seconds": row.seconds.median,
            "ratio": row.sequential_seconds / row.seconds.median,
        })
    };
    let trials: Vec<Value> = rows.iter().map(trial).collect();
    let fastest = kept.first();
    json!({
        "shape": fastest.map(|one| &one.shape),
        "sequential_seconds": fastest.map(|one| one.sequential_seconds),
        "trials": trials,
        "kept": fastest,
        "plans": file.path(),
    })
}
