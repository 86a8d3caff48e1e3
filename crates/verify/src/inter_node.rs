//! Bytes between nodes: as many are sent as Programs say, and fewer in two levels than flat.

use counterpoint_reference::selftest::SelfCheck;
use serde::Deserialize;

use super::job::ProcessEnd;

/// What each rank is given. Under this mask every rank needs rows of both nodes.
pub(super) const LINE: &str = "bench cp --device cuda --nodes 2 --exchange two-level,flat --masks causal --tokens 512 --heads 4:2 \
                               --head-dim 64 --iterations 3 --json";
/// Ranks, two on each node.
pub(super) const RANKS: usize = 4;

/// A row that rank 0 prints.
#[derive(Deserialize)]
struct Row {
    pass: String,
    ranks: usize,
    exchange: String,
    planned_crossing_bytes: Option<u64>,
    counted_crossing_bytes: Option<u64>,
}

/// Whether what rank 0 said holds.
pub(super) fn checks(ended: &ProcessEnd) -> Vec<SelfCheck> {
    let rows = ended.text.lines().filter(|line| line.starts_with('{'));
    let rows = rows.map(serde_json::from_str::<Row>).collect::<Result<Vec<_>, _>>();
    let name = |what: &str| format!("{RANKS} processes on 2 nodes: {what}");
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) => return vec![SelfCheck::failed(name("rows of bytes"), 0, error.to_string())],
    };
    let of = |exchange: &str| {
        rows.iter().find(|row| (row.ranks, &row.pass[..], &row.exchange[..]) == (RANKS, "forward", exchange))
    };
    let mut crossed = Vec::new();
    let mut checks = Vec::new();
    for exchange in ["two-level", "flat"] {
        let what = name(&format!("bytes that cross, {exchange}, unlike those of the Programs"));
        let bytes = of(exchange).map(|row| (row.planned_crossing_bytes, row.counted_crossing_bytes));
        match bytes {
            Some((Some(planned), Some(counted))) => {
                checks.push(SelfCheck::of(what, 0, planned.abs_diff(counted) as f64, 0.0));
                crossed.push(counted);
            }
            _ => {
                let said = ended.text.trim_end().lines().next_back().unwrap_or("nothing");
                checks.push(SelfCheck::failed(what, 0, format!("rank 0 said: {said}")));
            }
        }
    }
    if let [two_level, flat] = crossed[..] {
        let share = if flat == 0 { f64::INFINITY } else { two_level as f64 / flat as f64 };
        checks.push(SelfCheck::of(
            name("bytes that cross in two levels over those that cross flat"),
            0,
            share,
            0.99,
        ));
    }
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
}
