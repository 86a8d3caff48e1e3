//! Why a plan gives some ranks more than others, and what would help: found by trying.

use counterpoint_console::arguments::{DispatchAsked, dispatch_name};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, Plan, chunk_work};
use counterpoint_schedule::{SpanKind, Timeline};
use serde::Serialize;

use super::dispatches::DispatchRow;
use counterpoint_choose::{
    AttentionPrediction, DispatchAlgorithm, PlanConfig, QueryExchange, dispatch, dispatch_queries, plan_mask,
};

/// From here on a balance is explained.
const LEVEL: f64 = 1.02;
/// A remedy must bring this much.
const LEAST_GAIN: f64 = 0.01;
/// Smaller chunks are no more than so many in all, and have at least so many rows.
const MOST_CHUNKS: usize = 1 << 16;
const LEAST_ROWS: usize = 16;
/// Up to so many ranks whole plans are made: there the default dispatch goes on from areas to predicted time.
const SEARCHED_RANKS: usize = 16;

/// Why, and what would help.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Imbalance {
    /// One clause.
    pub(super) reason: String,
    /// Largest predicted computation of a rank over the mean, of a forward and a backward.
    pub(super) compute_balance: f64,
    /// Flags that make it more level, tried one at a time.
    pub(super) remedies: Vec<Remedy>,
}

/// A flag and the balance of the plan with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Remedy {
    pub(super) flag: String,
    pub(super) balance: f64,
}

/// How level a plan is, and its chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    pub(super) balance: f64,
    /// Of what ranks compute.
    pub(super) compute_balance: f64,
    pub(super) chunk_size: usize,
    pub(super) num_chunks: usize,
    /// Whether queries travel.
    pub(super) hosts: bool,
}

impl Level {
    pub(super) fn of(plan: &Plan, compute_balance: f64) -> Self {
        Self {
            balance: plan.balance(),
            compute_balance,
            chunk_size: plan.q_dispatch.chunk_size(),
            num_chunks: plan.q_dispatch.num_chunks(),
            hosts: plan.ranks.iter().any(|rank| rank.hosted.is_some()),
        }
    }
}

impl Imbalance {
    /// Of a plan that is not level; `None` of one that is.
    pub(super) fn of(
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
        level: &Level,
        (asked, rows): (DispatchAsked, &[DispatchRow]),
    ) -> Option<Self> {
        let Level { balance, compute_balance, .. } = *level;
        if balance <= LEVEL {
            return None;
        }
        let ranks = config.topology.world_size;
        let is_searched = config.dispatch == DispatchAlgorithm::Affinity && ranks <= SEARCHED_RANKS;
        let by_pairs = is_searched.then(|| pair_balance(mask, config));
        if let Some(by_pairs) = by_pairs.filter(|by_pairs| by_pairs + LEAST_GAIN < balance) {
            let reason = format!(
                "levelled by predicted time, not by pairs: the busiest rank computes {compute_balance:.3} times the mean, \
                 and by pairs alone the balance would be {by_pairs:.3}"
            );
            return Some(Self { reason, compute_balance, remedies: Vec::new() });
        }
        let mut remedies = Vec::new();
        // With smaller chunks another dispatch might be chosen.
        let same = match asked {
            DispatchAsked::Auto => format!(" --dispatch {}", dispatch_name(config.dispatch)),
            DispatchAsked::Named(_) => String::new(),
        };
        remedies.extend(
            smaller_chunks(mask, spec, config, level)
                .map(|remedy| Remedy { flag: remedy.flag + &same, ..remedy }),
        );
        let others = rows.iter().filter(|row| !row.chosen && row.balance + LEAST_GAIN < balance);
        remedies.extend(
            others
                .min_by(|a, b| a.balance.total_cmp(&b.balance))
                .map(|row| Remedy { flag: format!("--dispatch {}", row.name), balance: row.balance }),
        );
        Some(Self { reason: reason(mask, config, level), compute_balance, remedies })
    }

    /// One line for people.
    pub(super) fn text(&self, balance: f64) -> String {
        let tried: Vec<String> = self
            .remedies
            .iter()
            .map(|remedy| format!("`{}` gives {:.3}", remedy.flag, remedy.balance))
            .collect();
        let helps = match (tried.is_empty(), self.reason.starts_with("levelled")) {
            (false, _) => format!(": {}", tried.join(", ")),
            (true, true) => String::new(),
            (true, false) => {
                format!("; no chunks down to {LEAST_ROWS} rows and no other dispatch are more level")
            }
        };
        format!("balance {balance:.3}: {}{helps}\n", self.reason)
    }
}

/// Largest over mean of what ranks compute.
pub(super) fn compute_balance(prediction: &AttentionPrediction) -> f64 {
    let mut seconds = vec![0.0; prediction.forward.world_size];
    let mut add = |timeline: &Timeline| {
        let spans = timeline.spans.iter().filter(|span| span.kind == SpanKind::Compute);
        spans.for_each(|span| seconds[span.rank] += span.end - span.start);
    };
    add(&prediction.forward);
    prediction.backward.iter().for_each(&mut add);
    most_over_mean(&seconds)
}

pub(super) fn most_over_mean(values: &[f64]) -> f64 {
    let most = values.iter().fold(0.0, |most: f64, &value| most.max(value));
    let sum: f64 = values.iter().sum();
    if sum > 0.0 { most * values.len() as f64 / sum } else { 1.0 }
}

/// The balance of the areas that the dispatch algorithm gives ranks, before anything else is looked at.
fn pair_balance(mask: &Mask, config: &PlanConfig) -> f64 {
    let work = chunk_work(mask, config.chunk_size_for(mask.seqlen_q()));
    let ranks = config.topology.world_size;
    let dispatch = match mask.seqlen_q() == mask.seqlen_k() {
        true => dispatch(&work, ranks, config.dispatch),
        false => dispatch_queries(&work, ranks, config.dispatch),
    };
    let area = |rank| dispatch.chunks(rank).iter().map(|&chunk| work.areas()[chunk as usize]).sum::<u64>();
    let areas: Vec<u64> = (0..ranks).map(area).collect();
    match areas.iter().sum::<u64>() {
        0 => 1.0,
        sum => areas.iter().copied().max().unwrap_or(0) as f64 * ranks as f64 / sum as f64,
    }
}

/// The balance of the plan that `config` makes.
fn balance_with(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Option<f64> {
    let by_areas =
        config.topology.world_size > SEARCHED_RANKS && config.query_exchange == QueryExchange::Never;
    if by_areas {
        return Some(pair_balance(mask, config));
    }
    plan_mask(mask, spec, config).ok().map(|plan| plan.balance())
}

/// The largest chunks below the plan's that make it level, or the best of those that are tried.
fn smaller_chunks(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig, level: &Level) -> Option<Remedy> {
    let seqlen = mask.seqlen_q().max(mask.seqlen_k());
    let sizes = std::iter::successors(Some(level.chunk_size / 2), |size| Some(size / 2))
        .take_while(|&size| size >= LEAST_ROWS && seqlen.div_ceil(size) <= MOST_CHUNKS);
    let mut best: Option<(usize, f64)> = None;
    for size in sizes {
        let balance = balance_with(mask, spec, &PlanConfig { chunk_size: Some(size), ..*config })?;
        if best.is_none_or(|(_, least)| balance + LEAST_GAIN < least) {
            best = Some((size, balance));
        }
        if balance <= LEVEL {
            break;
        }
    }
    let (size, balance) = best.filter(|(_, balance)| balance + LEAST_GAIN < level.balance)?;
    Some(Remedy { flag: format!("--chunk-size {size}"), balance })
}

fn reason(mask: &Mask, config: &PlanConfig, level: &Level) -> String {
    if level.hosts {
        return "queries travel to the keys that they see, and their work with them".to_owned();
    }
    if matches!(config.dispatch, DispatchAlgorithm::Sequential | DispatchAlgorithm::Zigzag) {
        return format!("the dispatch {} does not look at the mask", dispatch_name(config.dispatch));
    }
    let (chunks, ranks) = (level.num_chunks, config.topology.world_size);
    let work = chunk_work(mask, level.chunk_size);
    let heaviest = work.areas().iter().copied().max().unwrap_or(0) as f64 * ranks as f64 / mask.area() as f64;
    let a_rank = chunks as f64 / ranks as f64;
    let a_rank = if chunks.is_multiple_of(ranks) { format!("{a_rank}") } else { format!("{a_rank:.1}") };
    if heaviest > 1.0 {
        return format!("{a_rank} chunks a rank, and the heaviest has {heaviest:.2} times a rank's share");
    }
    format!("{a_rank} chunks a rank")
}
