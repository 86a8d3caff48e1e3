//! Bytes between nodes: as many are sent as Programs say, and fewer in two levels than flat.

use counterpoint_reference::selftest::SelfCheck;
use serde::Deserialize;

use super::job::ProcessEnd;

/// What each rank is given. Under this mask every rank needs rows of both nodes.
pub(super) const LINE: &str = "bench cp --device cuda --nodes 2 --exchange two-level,flat --masks causal --tokens 512 --heads 4:2 \
                               --head-dim 64 --iterations 3 --json";
/// What each rank is given where queries travel to the keys of both nodes, and come back as partial results: so many that two steps are
/// predicted to take less time than one.
pub(super) fn hosted_line(exchange: &str) -> String {
    format!(
        "attention --device cuda --cp-size {RANKS} --nodes 2 --exchange {exchange} --query-exchange fewest-bytes --mask full:8k,keys=128k \
         --heads-q 4 --heads-kv 4 --head-dim 64 --backward --json"
    )
}

/// Ways over nodes, that which saves bytes first.
pub(super) const EXCHANGES: [&str; 2] = ["two-level", "flat"];

/// Ranks, two on each node.
pub(super) const RANKS: usize = 4;

/// A row that rank 0 prints.
#[derive(Deserialize)]
struct CrossingRow {
    pass: String,
    ranks: usize,
    exchange: String,
    planned_crossing_bytes: Option<u64>,
    counted_crossing_bytes: Option<u64>,
}

/// What rank 0 says of an attention whose queries travel.
#[derive(Deserialize)]
struct Hosted {
    crossing_bytes: Crossing,
    plan: HostedPlan,
}

#[derive(Deserialize)]
struct Crossing {
    forward: u64,
    backward: u64,
    counted: Option<u64>,
}

#[derive(Deserialize)]
struct HostedPlan {
    comm: HostedRows,
}

#[derive(Deserialize)]
struct HostedRows {
    query_tokens: u64,
}

/// Whether what rank 0 said of queries that travel holds, an end for each of [`EXCHANGES`].
pub(super) fn hosted_checks(ended: [&ProcessEnd; 2]) -> Vec<SelfCheck> {
    let mut crossed = Vec::new();
    let mut checks = Vec::new();
    for (exchange, ended) in EXCHANGES.into_iter().zip(ended) {
        let what =
            name(&format!("bytes that cross where queries travel, {exchange}, unlike those of the Programs"));
        let said = ended.text.lines().filter(|line| line.starts_with('{'));
        let mut said = said.filter_map(|line| serde_json::from_str::<Hosted>(line).ok());
        match said.next() {
            Some(Hosted { crossing_bytes: Crossing { forward, backward, counted: Some(counted) }, plan })
                if plan.comm.query_tokens > 0 =>
            {
                checks.push(SelfCheck::of(what, 0, counted.abs_diff(forward + backward) as f64, 0.0));
                crossed.push(counted);
            }
            _ => checks.push(SelfCheck::failed(what, 0, format!("rank 0 said: {}", last_line(ended)))),
        }
    }
    checks.extend(saved(&crossed, "where queries travel"));
    checks
}

fn name(what: &str) -> String {
    format!("{RANKS} processes on 2 nodes: {what}")
}

fn last_line(ended: &ProcessEnd) -> &str {
    ended.text.trim_end().lines().next_back().unwrap_or("nothing")
}

/// That two levels save something of what crosses flat.
fn saved(crossed: &[u64], r#where: &str) -> Option<SelfCheck> {
    let &[two_level, flat] = crossed else { return None };
    let share = if flat == 0 { f64::INFINITY } else { two_level as f64 / flat as f64 };
    let what = format!("bytes that cross in two levels over those that cross flat, {where}");
    Some(SelfCheck::of(name(&what), 0, share, 0.99))
}

/// Whether what rank 0 said holds.
pub(super) fn checks(ended: &ProcessEnd) -> Vec<SelfCheck> {
    let rows = ended.text.lines().filter(|line| line.starts_with('{'));
    let rows = rows.map(serde_json::from_str::<CrossingRow>).collect::<Result<Vec<_>, _>>();
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) => return vec![SelfCheck::failed(name("rows of bytes"), 0, error.to_string())],
    };
    let of = |exchange: &str| {
        rows.iter().find(|row| (row.ranks, &row.pass[..], &row.exchange[..]) == (RANKS, "forward", exchange))
    };
    let mut crossed = Vec::new();
    let mut checks = Vec::new();
    for exchange in EXCHANGES {
        let what = name(&format!("bytes that cross, {exchange}, unlike those of the Programs"));
        let bytes = of(exchange).map(|row| (row.planned_crossing_bytes, row.counted_crossing_bytes));
        match bytes {
            Some((Some(planned), Some(counted))) => {
                checks.push(SelfCheck::of(what, 0, planned.abs_diff(counted) as f64, 0.0));
                crossed.push(counted);
            }
            _ => {
                checks.push(SelfCheck::failed(what, 0, format!("rank 0 said: {}", last_line(ended))));
            }
        }
    }
    checks.extend(saved(&crossed, "where keys travel"));
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(exchange: &str, planned: u64, counted: u64) -> String {
        format!(
            "{{\"pass\":\"forward\",\"ranks\":4,\"exchange\":\"{exchange}\",\"planned_crossing_bytes\":{planned},\
             \"counted_crossing_bytes\":{counted}}}"
        )
    }

    #[test]
    fn other_bytes_than_planned_are_found_and_so_is_a_level_that_saves_nothing() {
        let failures = |lines: [String; 2]| {
            let checks = checks(&ProcessEnd { code: Some(0), text: lines.join("\n"), threads: None });
            checks.iter().filter(|check| !check.passed).count()
        };
        assert_eq!(failures([row("two-level", 5, 5), row("flat", 9, 9)]), 0);
        assert_eq!(failures([row("two-level", 5, 6), row("flat", 9, 9)]), 1);
        assert_eq!(failures([row("two-level", 9, 9), row("flat", 9, 9)]), 1);
        assert_eq!(failures([row("two-level", 5, 5), "nothing".to_owned()]), 1);
    }

    #[test]
    fn queries_that_do_not_travel_or_cross_as_others_say_are_found() {
        let end = |queries: u64, [forward, backward, counted]: [u64; 3]| ProcessEnd {
            code: Some(0),
            text: format!(
                "{{\"crossing_bytes\":{{\"forward\":{forward},\"backward\":{backward},\"counted\":{counted}}},\"plan\":{{\"comm\":\
                 {{\"query_tokens\":{queries}}}}}}}"
            ),
            threads: None,
        };
        let failures = |ends: [ProcessEnd; 2]| {
            hosted_checks(ends.each_ref()).iter().filter(|check| !check.passed).count()
        };
        assert_eq!(failures([end(6, [2, 3, 5]), end(6, [4, 5, 9])]), 0);
        assert_eq!(failures([end(6, [2, 3, 6]), end(6, [4, 5, 9])]), 1);
        assert_eq!(failures([end(6, [4, 5, 9]), end(6, [4, 5, 9])]), 1);
        assert_eq!(failures([end(0, [2, 3, 5]), end(6, [4, 5, 9])]), 1);
    }
}
