//! A plan, rank by rank, and other ways to dispatch to compare it with.

use counterpoint_plan::{Plan, PlanSummary, RankPlan, RankSummary};

use super::{Column, Grid, Style, Tone, plain};
use crate::{
    quantity::{format_count, format_ratio, format_seconds},
    statistics::Statistics,
};

/// Ranks that a table shows one by one; of more, only the heaviest.
const RANKS_SHOWN: usize = 32;
/// Ranks shown of more than that.
const HEAVIEST_SHOWN: usize = 16;

/// A plan, one row a rank: chunks, query rows, area, key rows received and sent in the forward, query rows of others that it
/// hosts (where ranks do), and the predicted seconds of the forward where the caller has them (one a rank). Of more than 32 ranks the 16 with the largest area are
/// shown. Mean and maximum of all ranks end the table.
pub fn plan_table(plan: &Plan, predicted_seconds: Option<&[f64]>, style: &Style) -> String {
    let row = |rank: &RankPlan| RankRow {
        chunks: chunk_list(plan.q_dispatch.chunks(rank.rank), 4),
        figures: [rank.q_rows as u64, rank.area, rank.recv_rows(), rank.send_rows(), rank.query_recv_rows()],
    };
    let hosts = plan.ranks.iter().any(|rank| rank.hosted.is_some());
    rank_table(&plan.ranks.iter().map(row).collect::<Vec<_>>(), hosts, predicted_seconds, style)
}

/// As [`plan_table`], of a plan's figures.
pub fn summary_table(summary: &PlanSummary, predicted_seconds: Option<&[f64]>, style: &Style) -> String {
    let row = |rank: &RankSummary| RankRow {
        chunks: chunk_list(&rank.chunks, 4),
        figures: [rank.tokens as u64, rank.area, rank.recv_tokens, rank.send_tokens, rank.query_recv_tokens],
    };
    let hosts = summary.ranks.iter().any(|rank| rank.hosted_area > 0);
    rank_table(&summary.ranks.iter().map(row).collect::<Vec<_>>(), hosts, predicted_seconds, style)
}

/// One rank of a table.
struct RankRow {
    chunks: String,
    /// Query rows, area, key rows received and sent, query rows hosted.
    figures: [u64; 5],
}

fn rank_table(rows: &[RankRow], hosts: bool, predicted_seconds: Option<&[f64]>, style: &Style) -> String {
    let mut columns = vec![
        Column::number_name("rank"),
        Column::text("chunks", 5),
        Column::number("tokens", 4),
        Column::number("area", 0),
        Column::number("/ mean", 1),
        Column::number("recv rows", 0),
        Column::number("send rows", 3),
    ];
    if hosts {
        columns.push(Column::number("hosted rows", 1));
    }
    if predicted_seconds.is_some() {
        columns.push(Column::number("predicted", 2));
    }
    let mut grid = Grid::new(columns);

    let [tokens, areas, received, sent, hosted] =
        [0, 1, 2, 3, 4].map(|at| rows.iter().map(|row| row.figures[at]).collect::<Vec<u64>>());
    let mean_area = mean(&areas);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    if order.len() > RANKS_SHOWN {
        order.sort_by_key(|&rank| std::cmp::Reverse(areas[rank]));
        order.truncate(HEAVIEST_SHOWN);
    }
    for &rank in &order {
        let ratio = if mean_area > 0.0 { areas[rank] as f64 / mean_area } else { 1.0 };
        let mut row = vec![
            plain(rank.to_string()),
            (rows[rank].chunks.clone(), Tone::Soft),
            plain(format_count(tokens[rank])),
            plain(format_count(areas[rank])),
            (format!("{ratio:.3}"), if ratio > 1.05 { Tone::Bad } else { Tone::Plain }),
            plain(format_count(received[rank])),
            plain(format_count(sent[rank])),
        ];
        row.extend(hosts.then(|| plain(format_count(hosted[rank]))));
        if let Some(seconds) = predicted_seconds {
            row.push(plain(seconds.get(rank).map_or_else(String::new, |&s| format_seconds(s))));
        }
        grid.row(row);
    }
    for (name, of) in [("mean", mean as fn(&[u64]) -> f64), ("max", max)] {
        let count = |values: &[u64]| plain(format_count(of(values).round() as u64));
        let mut row = vec![
            plain(name),
            plain(""),
            count(&tokens),
            count(&areas),
            plain(if mean_area > 0.0 {
                format!("{:.3}", of(&areas) / mean_area)
            } else {
                "1.000".to_owned()
            }),
            count(&received),
            count(&sent),
        ];
        row.extend(hosts.then(|| count(&hosted)));
        if let Some(statistics) = predicted_seconds.and_then(Statistics::of) {
            row.push(plain(format_seconds(if name == "mean" { statistics.mean } else { statistics.max })));
        } else if predicted_seconds.is_some() {
            row.push(plain(""));
        }
        grid.row(row);
    }
    let mut out = grid.render(style);
    if order.len() < rows.len() {
        out.push_str(&format!(
            "(the {} ranks with the largest area of {}; mean and max are of all)\n",
            order.len(),
            format_count(rows.len() as u64)
        ));
    }
    out
}

fn mean(values: &[u64]) -> f64 {
    values.iter().map(|&value| value as f64).sum::<f64>() / values.len().max(1) as f64
}

fn max(values: &[u64]) -> f64 {
    values.iter().copied().max().unwrap_or(0) as f64
}

/// Ascending chunk indices as runs, `0–3, 12`; after `limit` runs only how many more chunks there are.
pub(crate) fn chunk_list(chunks: &[u32], limit: usize) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &chunk in chunks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == chunk => *last = chunk,
            _ => runs.push((chunk, chunk)),
        }
    }
    let text = |&(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}–{last}"),
    };
    let mut parts: Vec<String> = runs.iter().take(limit).map(text).collect();
    let rest: u32 = runs.iter().skip(limit).map(|(first, last)| last - first + 1).sum();
    if rest > 0 {
        parts.push(format!("+{} more", format_count(u64::from(rest))));
    }
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

/// One way of dispatching the same mask, in a comparison.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ComparisonRow {
    /// The algorithm or scheme, such as `affinity`.
    pub name: String,
    /// Seconds to solve; `None` for a figure that was not solved here (a bound, a published value).
    pub solve_seconds: Option<f64>,
    /// Largest area over mean area; `None` where it has no meaning.
    pub balance: Option<f64>,
    /// Key rows received by all ranks together.
    pub recv_rows: u64,
    /// `recv_rows` of this row over those of the row that the caller compares with.
    pub ratio: Option<f64>,
}

/// Ways of dispatching one mask over `ranks` ranks, one row each; rows received are shown as the mean of a rank.
pub fn comparison_table(ranks: usize, rows: &[ComparisonRow], style: &Style) -> String {
    let mut grid = Grid::new(vec![
        Column::name("dispatch"),
        Column::number("solved in", 2),
        Column::number("balance", 1),
        Column::number("recv rows / rank", 0),
        Column::number("ratio", 3),
    ]);
    for row in rows {
        grid.row(vec![
            plain(&*row.name),
            plain(row.solve_seconds.map_or_else(|| "–".to_owned(), format_seconds)),
            match row.balance {
                Some(balance) => {
                    (format!("{balance:.3}"), if balance > 1.05 { Tone::Bad } else { Tone::Plain })
                }
                None => plain("–"),
            },
            plain(format_count((row.recv_rows as f64 / ranks.max(1) as f64).round() as u64)),
            plain(row.ratio.map_or_else(|| "–".to_owned(), format_ratio)),
        ]);
    }
    grid.render(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_lists() {
        assert_eq!(chunk_list(&[], 4), "none");
        assert_eq!(chunk_list(&[5], 4), "5");
        assert_eq!(chunk_list(&[0, 1, 2, 3, 12], 4), "0–3, 12");
        assert_eq!(chunk_list(&[0, 1, 7, 9, 11, 13, 14], 3), "0, 1, 7, 9, +3 more");
    }

    #[test]
    fn comparisons_show_the_mean_of_a_rank() {
        let rows = [
            ComparisonRow {
                name: "affinity".into(),
                solve_seconds: Some(0.0042),
                balance: Some(1.003),
                recv_rows: 8 * 17_788,
                ratio: Some(1.0),
            },
            ComparisonRow {
                name: "lower bound".into(),
                solve_seconds: None,
                balance: None,
                recv_rows: 8,
                ratio: None,
            },
        ];
        let text = comparison_table(8, &rows, &Style::PLAIN);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(
            lines[2].split_whitespace().collect::<Vec<_>>(),
            ["affinity", "4.20", "ms", "1.003", "17,788", "1.00x"]
        );
        assert_eq!(lines[3].split_whitespace().collect::<Vec<_>>(), ["lower", "bound", "–", "–", "1", "–"]);
    }
}
