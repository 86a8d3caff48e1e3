//! A plan's traffic, and what one would compare it with.

use counterpoint_plan::TrafficBounds;
use counterpoint_report::ComparisonRow;

/// Rows of a table: this plan, the lower bound, and other ways to distribute the same attention.
pub(crate) fn traffic_rows(
    name: &str,
    bounds: &TrafficBounds,
    balance: f64,
    seconds: f64,
) -> Vec<ComparisonRow> {
    let ratio = |rows: u64| (bounds.recv_tokens > 0).then(|| rows as f64 / bounds.recv_tokens as f64);
    let other = |name: &str, rows: u64| ComparisonRow {
        name: name.to_owned(),
        solve_seconds: None,
        balance: None,
        recv_rows: rows,
        ratio: ratio(rows),
    };
    let mut rows = vec![
        ComparisonRow {
            name: format!("this plan ({name})"),
            solve_seconds: Some(seconds),
            balance: Some(balance),
            recv_rows: bounds.recv_tokens,
            ratio: ratio(bounds.recv_tokens),
        },
        other("lower bound", bounds.lower_bound_tokens),
        other("ring attention", bounds.ring_tokens),
        other("all-gather of k and v", bounds.all_gather_tokens),
    ];
    rows.extend(bounds.ulysses_tokens.map(|tokens| other("Ulysses, in rows of k and v", tokens)));
    rows
}
